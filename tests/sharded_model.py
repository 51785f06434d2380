"""A small transformer of parallel layers, and what torchrun runs of it: training beside one rank, checkpoints.

Assumes torch.distributed with gloo. `python sharded_model.py train|save|load FOLDER` on any number of ranks up to four.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

import commdsl
from commdsl import overlap

WORDS, WIDTH, HEADS, EXPERTS, TOKENS, BATCH, STEPS = 16, 16, 4, 4, 8, 2, 5
MAX_NORM = 0.05
"""Less than any gradient's norm here: each step clips."""


class Block(nn.Module):
    """Attention and a gated perceptron; between them each rank has its tokens, within them its heads and all tokens."""

    def __init__(self, column: Callable[..., nn.Module], row: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = column(WIDTH, 3 * WIDTH, bias=False, parts=3), row(WIDTH, WIDTH, bias=False)
        self.up, self.down = column(WIDTH, 4 * WIDTH, bias=False, parts=2), row(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (tokens, batch, width)."""
        heads = self.qkv(self.norms[0](x))
        q, k, v = heads.unflatten(-1, (3, -1, WIDTH // HEADS)).permute(2, 1, 3, 0, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.permute(2, 0, 1, 3).flatten(2))
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Experts(overlap.ShardedModule):
    """This rank's experts of EXPERTS: a matrix each."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS // place(group)[1], WIDTH, WIDTH))
        self.shard_parameters("up", group=group)


class Model(nn.Module):
    def __init__(self, column: Callable[..., nn.Module], row: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(column, row) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def linear(inputs: int, outputs: int, bias: bool = True, parts: int = 1) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias)


def whole_model() -> Model:
    """The model of one rank, of torch's layers alone."""
    torch.manual_seed(3)
    return Model(linear, linear)


def parallel_model(group: Any, sequence_parallel: bool = True) -> Model:
    """The same on the ranks of a group, from the whole weights."""
    made = {"group": group, "sequence_parallel": sequence_parallel}
    model = Model(partial(overlap.ColumnParallelLinear, **made), partial(overlap.RowParallelLinear, **made))
    model.load_state_dict(whole_model().state_dict())
    return model


def text(step: int) -> torch.Tensor:
    return torch.randint(WORDS, (TOKENS + 1, BATCH), generator=torch.Generator().manual_seed(step))


def own_loss(model: nn.Module, step: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's share of the mean over all tokens."""
    given, wanted = (part.chunk(ranks)[rank] for part in (text(step)[:-1], text(step)[1:]))
    return F.cross_entropy(model(given).flatten(0, 1), wanted.flatten(), reduction="sum") / (TOKENS * BATCH)


def wholes(state: Any) -> dict[str, torch.Tensor]:
    """A state dict with whole tensors, its parts one behind the other."""
    found = {}
    for name, value in state.items():
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        is_parted = "qkv" in name or "up." in name
        found[name] = value.flatten(0, 1) if is_parted and value.dim() > 1 + ("weight" in name) else value
    return found


def train() -> None:
    """Losses, norms and weights of five steps with clipping are those of one rank of torch alone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    one, model = whole_model(), parallel_model(None)
    overlap.sync_replicated(model)
    each = [(one, torch.nn.utils.clip_grad_norm_, 0, 1), (model, overlap.clip_grad_norm_, rank, ranks)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=2.0, momentum=0.9) for module, *_ in each]
    for step in range(STEPS):
        losses, norms = [], []
        for (module, clip, own, count), optimizer in zip(each, optimizers, strict=True):
            loss = own_loss(module, step, own, count)
            loss.backward()
            norms.append(clip(module.parameters(), MAX_NORM))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        total = commdsl.all_reduce(losses[1])
        torch.testing.assert_close(total, losses[0], rtol=2e-5, atol=0)
        torch.testing.assert_close(norms[1], norms[0], rtol=2e-5, atol=0)
        assert norms[0] > MAX_NORM
    torch.testing.assert_close(wholes(model.state_dict()), wholes(one.state_dict()), rtol=1e-5, atol=2e-6)


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """All that may be sharded, and what is not."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.column = overlap.ColumnParallelLinear(WIDTH, 2 * WIDTH, group=group)
        self.gated = overlap.ColumnParallelLinear(WIDTH, 2 * WIDTH, parts=2, group=group)
        self.row = overlap.RowParallelLinear(2 * WIDTH, WIDTH, group=group)
        self.row_of_all = overlap.RowParallelLinear(2 * WIDTH, WIDTH, sequence_parallel=False, group=group)
        self.experts = Experts(group)


SHARDED = {
    "column.weight": 0,
    "column.bias": 0,
    "gated.weight": 1,
    "gated.bias": 1,
    "row.weight": 1,
    "row.bias": 0,
    "row_of_all.weight": 1,
    "experts.up": 0,
}
"""The dimension of the whole that ranks share, by parameter."""


def place(group: Any) -> tuple[int, int]:
    """This rank and the number of ranks, of a group or of a mesh of one dimension."""
    found = group.get_group() if isinstance(group, DeviceMesh) else group
    return dist.get_rank(found), dist.get_world_size(found)


def trained(group: Any, seed: int) -> tuple[Everything, Any]:
    """A model and its optimizer after a step, of numbers that depend on the seed and on the rank's blocks alone."""
    rank, ranks = place(group)
    model = Everything(group)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        if name.startswith("gated"):
            shape[:1] = [2, shape[0] // 2]
        if name in SHARDED:
            shape[SHARDED[name]] *= ranks
        for is_gradient in (False, True):
            block = torch.randn(shape)
            block = block.chunk(ranks, SHARDED[name])[rank] if name in SHARDED else block
            with torch.no_grad():
                parameter.copy_(block.reshape(parameter.shape))
            if is_gradient:
                parameter.grad = block.reshape(parameter.shape).clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.step()
    return model, optimizer


def checkpoint(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def same(found: Any, wanted: Any) -> None:
    """Nested dictionaries of tensors are the same bit for bit, in whole."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, dict):
            same(found[name], value)
        elif isinstance(value, torch.Tensor):
            both = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in (found[name], value)]
            assert torch.equal(*both), name


def save(folder: str, group: Any = None) -> None:
    dcp.save(checkpoint(*trained(group, 7)), checkpoint_id=folder)


def load(folder: str, group: Any = None) -> None:
    """A model that was trained otherwise has the numbers that were saved, and so has its optimizer."""
    _, ranks = place(group)
    model, optimizer = trained(group, 8)
    state = checkpoint(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    wanted, of_optimizer = trained(group, 7)
    same(checkpoint(model, optimizer), checkpoint(wanted, of_optimizer))
    for (name, found), one in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(found, one), name
        for kind, value in of_optimizer.state[one].items():
            assert torch.equal(optimizer.state[found][kind], value), (name, kind)
            assert type(optimizer.state[found][kind]) is torch.Tensor
    assert all(
        hasattr(value, "placements") == (name in SHARDED and ranks > 1) for name, value in model.state_dict().items()
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"train": lambda *_: train(), "save": save, "load": load}[sys.argv[1]](*sys.argv[2:])
    dist.barrier()
    dist.destroy_process_group()
