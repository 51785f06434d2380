"""A small Llama, trained on one long sequence that lies on all ranks, and again on one rank that has it whole:

    torchrun --nproc-per-node 4 examples/long_context_llama.py [--tokens 1000] [--steps 30] [--schedule auto]

Every rank has its tokens of the sequence (`shard_sequence`), their positions for the rotary embedding (`positions`) and
all weights. Attention is what reaches over ranks: `commdsl.attention.attention`, causal, with fewer heads of keys than
of queries. All else is each rank's own, and at the end of a step gradients are summed by one all-reduce. On the
processor or on GPUs; there `--dtype bfloat16` is what keys and values travel in.

Rank 0 then trains the same model from the same start on the same sequences by torch's attention, and prints how the
losses compare. They may be apart by 1e-5 of a loss in float32 and by 1e-2 in bfloat16; and as training makes more of
roundings with every step, by a few times what one rounding of the start makes, which is seen in one more run from a
start whose weights are larger by one rounding. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import commdsl
from commdsl.attention import attention, positions, shard_sequence

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, BATCH = 64, 128, 8, 2, 16, 2

LEAST = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""How far losses may always be apart, as a share of the loss: by what attention computes in."""

A_FEW = 8.0
"""How often the distance that one rounding of the start makes."""

Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q (batch, tokens, heads, head_dim), k and v of fewer heads, to what the queries found; causal."""


# --- the model --------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm() for _ in range(2))
        self.query = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor, attend: Attend, dtype: torch.dtype) -> torch.Tensor:
        """x: (batch, this rank's tokens, width). `turn`: of these tokens, see `turns`."""
        h = self.norms[0](x)
        q = rotated(self.query(h).unflatten(-1, (HEADS, HEAD_DIM)), turn)
        k, v = self.key_value(h).unflatten(-1, (2 * KV_HEADS, HEAD_DIM)).chunk(2, dim=-2)
        found = attend(*(one.to(dtype).contiguous() for one in (q, rotated(k, turn), v)))
        x = x + self.out(found.flatten(-2).to(x.dtype))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def turns(position: torch.Tensor) -> torch.Tensor:
    """The angle of each pair of a head's elements at each position: (tokens, 1, head_dim / 2)."""
    frequency = 10000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2 + 1, device=position.device)[:-1]
    return position[:, None, None].to(torch.float32) * frequency


def rotated(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """The rotary embedding of (batch, tokens, heads, head_dim)."""
    one, other = x.chunk(2, dim=-1)
    return torch.cat((one * turn.cos() - other * turn.sin(), one * turn.sin() + other * turn.cos()), dim=-1)


class Llama(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(VOCABULARY, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, words: torch.Tensor, position: torch.Tensor, attend: Attend, dtype: torch.dtype) -> torch.Tensor:
        """words: (batch, this rank's tokens), at these positions of the sequence. The embedding is a product, whose
        gradient has one order on GPUs, too.
        """
        x, turn = self.embedding(F.one_hot(words, VOCABULARY).to(self.head.weight.dtype)), turns(position)
        for block in self.blocks:
            x = block(x, turn, attend, dtype)
        return self.head(self.norm(x))


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    tokens: int = 1000
    steps: int = 30
    layers: int = 2
    schedule: str = "auto"
    dtype: torch.dtype = torch.float32


def text(size: Size, step: int, device: torch.device) -> torch.Tensor:
    """(batch, tokens + 1): each word a multiple and a shift of the one before, mostly; the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(VOCABULARY, (BATCH, size.tokens + 1), generator=generator)
    noise = torch.rand(BATCH, size.tokens + 1, generator=generator) < 0.05
    for at in range(1, size.tokens + 1):
        found[:, at] = torch.where(noise[:, at], found[:, at], (5 * found[:, at - 1] + 7) % VOCABULARY)
    return found.to(device)


def train(size: Size, device: torch.device, *, alone: bool, more: float = 0.0) -> list[float]:
    """The loss of every step: on all ranks together, or on this rank alone. `more`: by what share the weights of the
    start are larger.
    """
    torch.manual_seed(1)
    model = Llama(size.layers).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    position = torch.arange(size.tokens, device=device) if alone else positions(size.tokens).to(device)
    losses = []
    for step in range(size.steps):
        words = text(size, step, device)
        given, wanted = (part if alone else shard_sequence(part, 1) for part in (words[:, :-1], words[:, 1:]))
        found = model(given.contiguous(), position, whole if alone else spread(size), size.dtype)
        # Of all tokens on all ranks: the sum of what the ranks have is the mean.
        loss = F.cross_entropy(found.flatten(0, 1), wanted.flatten(), reduction="sum") / (BATCH * size.tokens)
        loss.backward()
        if not alone:
            add_up(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().reshape(1))
    total = torch.cat(losses)
    return (total if alone else commdsl.all_reduce(total)).tolist()


def spread(size: Size) -> Attend:
    """Attention over the sequence that lies on all ranks."""
    return lambda q, k, v: attention(q, k, v, schedule=size.schedule, causal=True, length=size.tokens)


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over a sequence that is here."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def add_up(parameters: Sequence[nn.Parameter]) -> None:
    """Gradients, each rank's share, become their sum, in one call."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = commdsl.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, part in zip(gradients, total.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    spread: list[float]
    alone: list[float]
    nudged: list[float]  # alone again, from a start that is larger by a rounding
    least: float

    @property
    def apart(self) -> float:
        return apart(self.spread, self.alone)

    @property
    def bound(self) -> float:
        return max(self.least, A_FEW * apart(self.nudged, self.alone))

    @property
    def fault(self) -> str:
        """What is not as it must be; empty: nothing. Asked so that a number that is none is a fault, too."""
        if not self.spread[-1] < 0.9 * self.spread[0]:
            return f"nothing was learned: the loss was {self.spread[0]:.3f} and is {self.spread[-1]:.3f}"
        if not self.apart <= self.bound:
            return f"losses are {self.apart:.1e} apart, more than {self.bound:.1e}"
        return ""

    def text(self) -> str:
        steps = len(self.spread)
        said = f"loss {self.spread[0]:.4f} -> {self.spread[-1]:.4f} in {steps} steps, on one rank {self.alone[-1]:.4f}"
        near = f"losses at most {self.apart:.1e} apart, {self.bound:.1e} allowed"
        return "\n".join((said, near, self.fault or "as it must be"))


def apart(some: list[float], others: list[float]) -> float:
    """The largest difference, as a share of the loss."""
    one, other = torch.tensor(some), torch.tensor(others)
    return float(((one - other) / other).abs().max())


def options_of(arguments: Sequence[str]) -> Size:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000, help="of the sequence; any number")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--schedule", default="auto", help="as commdsl.attention.attention has it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of attention")
    options = parser.parse_args(arguments)
    return Size(options.tokens, options.steps, options.layers, options.schedule, getattr(torch, options.dtype))


def set_up() -> torch.device:
    """This rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def main() -> None:
    size, device = options_of(sys.argv[1:]), set_up()
    together = train(size, device, alone=False)
    code = 0
    if dist.get_rank() == 0:
        alone = train(size, device, alone=True)
        nudged = train(size, device, alone=True, more=torch.finfo(torch.float32).eps)
        found = Comparison(together, alone, nudged, LEAST[size.dtype])
        print(found.text())
        code = int(bool(found.fault))
    commdsl.shutdown()
    dist.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    main()
