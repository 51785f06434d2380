"""A small mixture of experts, trained on tokens that lie on all ranks, and again on one rank that has them all:

    torchrun --nproc-per-node 4 examples/mixture_of_experts.py [--tokens 48] [--steps 30] [--experts 3] [--topk 2]

Every rank has tokens of its own and some of the experts; the router and all else every rank has. `ep.dispatch` brings
each token to the ranks of its experts, sorted by expert, with the weight of each choice; a grouped matmul computes
there what experts make of them, and `ep.combine` adds it up at home. At the end of a step the gradients of what every
rank has are summed by one all-reduce; those of experts are whole where they are. On the processor or on GPUs.

Rank 0 then trains the same model from the same start on the same tokens, with all experts, by loops over experts, and
prints how the losses compare. They may be apart by 1e-5 of a loss in float32 and by 1e-2 in bfloat16; and as training
makes more of roundings with every step, by a few times what one rounding of the start makes, which is seen in one more
run from a start whose weights are larger by one rounding. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import commdsl
from commdsl import ep

VOCABULARY, WIDTH, INNER = 64, 64, 96

LEAST = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""How far losses may always be apart, as a share of the loss: by what experts compute in."""

A_FEW = 8.0
"""How often the distance that one rounding of the start makes."""

Spread: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Experts"], torch.Tensor]
"""Tokens (n, width), the experts of each (n, topk), the weights of these, and the experts, to what they make of it."""


# --- the model --------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Some experts: two products, the one through a gate, and a third back."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(count, WIDTH, INNER) / WIDTH**0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(count, INNER, WIDTH) / INNER**0.5)

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """rows: sorted by expert; offsets: where those of each end. What lies behind the last end does not count."""
        gate, up, down = (one.to(rows.dtype) for one in (self.gate, self.up, self.down))
        return grouped(F.silu(grouped(rows, gate, offsets)) * grouped(rows, up, offsets), down, offsets)


def grouped(rows: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The rows up to each offset times the matrix of that number; at least as many rows as the last offset says."""
    if can_group(rows):
        return F.grouped_mm(rows, matrices, offs=offsets)
    ends = offsets.tolist()
    parts = [rows[begin:end] @ one for begin, end, one in zip([0, *ends], ends, matrices, strict=False)]
    return torch.cat(parts)


def can_group(rows: torch.Tensor) -> bool:
    """Whether torch has one kernel for it, for such rows, where they are."""
    if not hasattr(F, "grouped_mm"):
        return False
    is_new = rows.device.type == "cpu" or torch.cuda.get_device_capability(rows.device) >= (9, 0)
    return is_new and (rows.dtype == torch.bfloat16 or rows.device.type == "cpu")


class Model(nn.Module):
    """What follows a word: an embedding, a mixture of experts beside it, and a head."""

    def __init__(self, size: Size, num_experts: int, mine: slice) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Linear(VOCABULARY, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.experts = Experts(num_experts)
        for name, whole in list(self.experts.named_parameters()):
            setattr(self.experts, name, nn.Parameter(whole.detach()[mine].clone()))

    @property
    def shared(self) -> list[nn.Parameter]:
        """What every rank has."""
        return [*self.embedding.parameters(), *self.router.parameters(), *self.head.parameters()]

    def forward(self, words: torch.Tensor, spread: Spread) -> torch.Tensor:
        x = self.embedding(F.one_hot(words, VOCABULARY).to(self.head.weight.dtype))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        weights, chosen = self.router(x).softmax(-1).topk(self.size.topk)
        weights = weights / weights.sum(-1, keepdim=True)
        made = spread(x.to(self.size.dtype), chosen.int(), weights.contiguous(), self.experts)
        return self.head(x + made.to(x.dtype))


def over_ranks(exchange: ep.Exchange) -> Spread:
    """Experts lie on all ranks."""

    def spread(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
        there = ep.dispatch(exchange, x, chosen, weights)
        assert isinstance(there.rows, torch.Tensor)
        assert there.weights is not None
        made = experts(there.rows, there.offsets)
        weighed = made.float() * there.weights[: len(made), None]
        return ep.combine(exchange, weighed.to(x.dtype), there.handle)

    return spread


def alone(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
    """All experts are here."""
    found = torch.zeros(x.shape, device=x.device)
    for k in range(chosen.shape[1]):
        order = torch.argsort(chosen[:, k], stable=True)
        counts = torch.bincount(chosen[:, k], minlength=len(experts.gate))
        made = experts(x[order], counts.cumsum(0, dtype=torch.int32)).float() * weights[order, k, None]
        found = found + torch.zeros_like(found).index_copy(0, order, made.to(x.dtype).float())
    return found.to(x.dtype)


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    tokens: int = 48  # of a rank, or fewer
    steps: int = 30
    experts: int = 3  # of a rank
    topk: int = 2
    dtype: torch.dtype = torch.float32


def text(size: Size, step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The words of a rank, another number of them each step, and what follows each: a multiple and a shift, mostly."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    count = int(torch.randint(size.tokens // 2, size.tokens + 1, (), generator=generator))
    given = torch.randint(VOCABULARY, (count,), generator=generator)
    noise = torch.rand(count, generator=generator) < 0.05
    follows = torch.where(noise, torch.randint(VOCABULARY, (count,), generator=generator), (5 * given + 7) % VOCABULARY)
    return given.to(device), follows.to(device)


def train(size: Size, ranks: int, device: torch.device, exchange: Any, *, more: float = 0.0) -> list[float]:
    """The loss of every step: on all ranks together, or without an `exchange` on this rank alone. `more`: by what share
    the weights of the start are larger.
    """
    torch.manual_seed(1)
    rank = dist.get_rank()
    mine = slice(None) if exchange is None else slice(rank * size.experts, (rank + 1) * size.experts)
    model = Model(size, ranks * size.experts, mine).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    spread = alone if exchange is None else over_ranks(exchange)
    losses = []
    for step in range(size.steps):
        everyone = [text(size, step, one, device) for one in range(ranks)]
        total = sum(len(words) for words, _ in everyone)
        words, wanted = everyone[rank] if exchange is not None else map(torch.cat, zip(*everyone, strict=True))
        # Of all tokens on all ranks: the sum of what the ranks have is the mean.
        loss = F.cross_entropy(model(words, spread), wanted, reduction="sum") / total
        loss.backward()
        if exchange is not None:
            add_up(model.shared)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().reshape(1))
    found = torch.cat(losses)
    return (found if exchange is None else commdsl.all_reduce(found)).tolist()


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
    parser.add_argument("--tokens", type=int, default=48, help="of a rank, at most; steps have as many, or fewer")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--experts", type=int, default=3, help="of a rank")
    parser.add_argument("--topk", type=int, default=2, help="experts of a token")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of experts")
    options = parser.parse_args(arguments)
    return Size(options.tokens, options.steps, options.experts, options.topk, getattr(torch, options.dtype))


def set_up() -> torch.device:
    """This rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def compared(size: Size, device: torch.device) -> Comparison | None:
    """What all ranks have trained beside what one has; on rank 0, which does it once more, and again."""
    ranks, width = dist.get_world_size(), WIDTH * size.dtype.itemsize
    received = ranks * size.tokens * size.topk  # all tokens, all their choices: the most that may come
    limits = ep.Limits(size.tokens, size.topk, received, (width,), width)
    together = train(size, ranks, device, ep.Exchange(limits, ranks * size.experts, device=device))
    if dist.get_rank() != 0:
        return None
    found = train(size, ranks, device, None)
    nudged = train(size, ranks, device, None, more=torch.finfo(torch.float32).eps)
    return Comparison(together, found, nudged, LEAST[size.dtype])


def main() -> None:
    found = compared(options_of(sys.argv[1:]), set_up())
    if found is not None:
        print(found.text())
    commdsl.shutdown()
    dist.destroy_process_group()
    sys.exit(int(found is not None and bool(found.fault)))


if __name__ == "__main__":
    main()
