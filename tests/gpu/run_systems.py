"""Random calls of all systems in one program, every result compared with float64. One process per rank:

    torchrun --nproc-per-node 2 tests/gpu/run_systems.py [--calls 2000 --time-budget 240 --seed 1]
    COMMDSL_SHARE_GPUS=1 torchrun --nproc-per-node 4 tests/gpu/run_systems.py    # 4 ranks on one GPU
    torchrun --nproc-per-node 3 tests/gpu/run_systems.py --device cpu --calls 10000 --time-budget 900

Collectives, loaded schedules, overlapped products, all-reduce + RMSNorm, experts, sequence attention and dispatched
attention, of random shapes, in random order, eagerly and in replayed CUDA graphs, with GPU and host delays of each
rank's own and no barrier between calls. Every rank draws all ranks' inputs from the seed of the call and computes its
own result by the words of the contract, so nothing but the calls under test communicates. Before that
`extremes` compares the bits of maxima and minima between ranks. Exit code 1: a wrong result, an exception, or no time
for all calls.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "20")
os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", "8G")

import repeated
import runner
import torch
from attend_cases import whole
from products import WANTED
from products import Shape as Product
from repeated import Repeated
from run_products import Products
from run_rms_norm import Norms
from run_rms_norm import Shape as Norm
from runner import Part, Parts

import commdsl
from commdsl import dispatch, ep
from commdsl.attention import attention, shard_sequence

GRACE = 15.0
WHOLE = 8  # numbers are whole, up to this: sums are exact in every dtype
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32)
SCHEDULES = ("allreduce_ring", "allreduce_oneshot", "allreduce_twoshot", "allreduce_halving_doubling")
"""Shipped schedules of the all-reduce, loaded by name."""

NEAR = {torch.bfloat16: 2.0**-6, torch.float32: 2.0**-16}
"""How far attention and sums of experts may be from float64, relative to the largest value."""


def generator(run: Parts, seed: int) -> torch.Generator:
    return torch.Generator(run.device).manual_seed(seed)


class Collective(Repeated):
    """One collective of one shape and dtype, by the chosen schedule or by a loaded one."""

    def __init__(self, run: Parts, name: str, rows: int, dtype: torch.dtype, op: str, *, how: str = "plain") -> None:
        super().__init__(run)
        self.name, self.rows, self.dtype, self.op, self.how = name, rows, dtype, op, how
        self.root = rows % run.ranks
        self.loaded = commdsl.load(name, ranks=run.ranks) if name in SCHEDULES else None
        self.x = self.drawn(0)[run.rank].clone()

    def __str__(self) -> str:
        return f"{self.name} of {self.rows} {self.dtype}, {self.op}, {self.how}"

    def drawn(self, seed: int) -> list[Any]:
        parts = self.run.ranks if self.name in ("reduce_scatter", "all_to_all") else 1
        draw = partial(torch.randint, -WHOLE, WHOLE + 1, (parts * self.rows, 3), device=self.run.device)
        dice = generator(self.run, seed)
        return [draw(generator=dice).to(self.dtype) for _ in range(self.run.ranks)]

    def fill(self, seed: int) -> None:
        self.x.copy_(self.drawn(seed)[self.run.rank])

    def made(self) -> Any:
        if self.loaded is not None:
            return self.loaded(self.x, op=self.op)
        if self.name == "all_reduce" and self.how != "plain":
            x = self.x.clone()
            if self.how == "async":
                return commdsl.all_reduce_(x, op=self.op, async_op=True).wait()
            return commdsl.all_reduce_(x, op=self.op)
        given = {"op": self.op} if "reduce" in self.name else {"root": self.root} if self.name == "broadcast" else {}
        call: Callable[..., Any] = getattr(commdsl, self.name)
        if self.how == "async":
            return call(self.x, **given, async_op=True).wait()
        return call(self.x, **given)

    def is_wrong(self, seed: int, found: Any) -> Any:
        x, rank, ranks = [one.double() for one in self.drawn(seed)], self.run.rank, self.run.ranks
        match self.name:
            case "all_gather":
                wanted = torch.cat(x)
            case "broadcast":
                wanted = x[self.root]
            case "all_to_all":
                wanted = torch.cat([one.chunk(ranks)[rank] for one in x])
            case _:
                of_all = torch.stack(x)
                wanted = of_all.sum(0) if self.op == "sum" else of_all.amax(0) if self.op == "max" else of_all.mean(0)
                wanted = wanted.chunk(ranks)[rank] if self.name == "reduce_scatter" else wanted
        near = 0.0 if self.op != "avg" else torch.finfo(self.dtype).eps * wanted.abs()
        return ~self.run.same(str(self), found, wanted.to(self.dtype), near)


class Experts(Repeated):
    """Dispatch to experts and combine: a rank multiplies what it receives by its number plus one."""

    def __init__(self, run: Parts, rows: int, hidden: int, topk: int, dtype: torch.dtype) -> None:
        super().__init__(run)
        self.dtype, self.topk, self.share = dtype, topk, 4
        self.rows, self.hidden = rows, hidden
        self.layer = ep.EPAll2AllLayer(
            None,
            max_tokens=rows,
            hidden=hidden,
            topk=topk,
            rank=run.rank,
            num_tot_experts=self.share * run.ranks,
            world_size=run.ranks,
            local_world_size=run.ranks,
            dtype=dtype,
            num_sm=20,
            device=run.device,
            capacity=float(run.ranks),
            results=4,  # a captured graph of two calls keeps two
            exact=not run.on_gpu,  # a captured call reads nothing on the host
        )
        self.given = [one.clone() for one in self.drawn(0)]

    def drawn(self, seed: int) -> tuple[Any, Any, Any]:
        """This rank's tokens, experts (some dropped) and weights; other ranks' are no part of its result."""
        dice = generator(self.run, seed * self.run.ranks + self.run.rank)
        draw = partial(torch.randn, generator=dice, device=self.run.device)
        x, weights = draw((self.rows, self.hidden)).to(self.dtype), draw((self.rows, self.topk))
        most = self.share * self.run.ranks + 1  # the last of these: dropped
        return x, torch.randint(0, most, (self.rows, self.topk), generator=dice, device=self.run.device).int(), weights

    def fill(self, seed: int) -> None:
        for to, values in zip(self.given, self.drawn(seed), strict=True):
            to.copy_(values)

    def made(self) -> Any:
        rows, weights, described = self.layer.dispatch(*self.given)
        made = rows.float() * (weights[:, None] * (self.run.rank + 1))
        return self.layer.combine(made.to(self.dtype), described)

    def is_wrong(self, seed: int, found: Any) -> Any:
        x, experts, weights = self.drawn(seed)
        owner = experts.long() // self.share
        factors = torch.where(owner < self.run.ranks, weights.double() * (owner + 1), 0.0)
        wanted, size = x.double() * factors.sum(1, keepdim=True), x.double().abs() * factors.abs().sum(1, keepdim=True)
        return ~self.run.same(f"experts of {self.dtype}", found, wanted, NEAR[self.dtype] * size + 1e-30)


class Attention(Repeated):
    """Attention of a sequence whose tokens all ranks share, against the definition of softmax in float64."""

    def __init__(self, run: Parts, tokens: int, dtype: torch.dtype, *, causal: bool) -> None:
        super().__init__(run)
        self.tokens, self.dtype, self.causal = tokens, dtype, causal
        self.given = [shard_sequence(one, 1).clone() for one in self.drawn(0)]

    def drawn(self, seed: int) -> list[Any]:
        dice = generator(self.run, seed)
        shapes = ((1, self.tokens, heads, 64) for heads in (4, 2, 2))
        return [torch.randn(one, generator=dice, device=self.run.device).to(self.dtype) for one in shapes]

    def fill(self, seed: int) -> None:
        for to, values in zip(self.given, self.drawn(seed), strict=True):
            to.copy_(shard_sequence(values, 1))

    def made(self) -> Any:
        return attention(*self.given, causal=self.causal, length=self.tokens)

    def is_wrong(self, seed: int, found: Any) -> Any:
        q, k, v = (one.double().transpose(1, 2) for one in self.drawn(seed))
        k, v = (one.repeat_interleave(2, 1) for one in (k, v))
        scores = q @ k.mT / 8
        if self.causal:
            at = torch.arange(self.tokens, device=q.device)
            scores = scores.masked_fill(at[None, :] > at[:, None], -torch.inf)
        wanted = shard_sequence((scores.softmax(-1) @ v).transpose(1, 2), 1)
        near = 4 * NEAR[self.dtype]
        return ~self.run.same(f"attention of {self.tokens}, causal {self.causal}", found, wanted, near)


class Dispatched(Repeated):
    """Attention of uneven documents, each rank's against the documents by themselves in float64."""

    HEADS, KEY_HEADS, DIM = 4, 2, 16

    def __init__(self, run: Parts, dice: random.Random) -> None:
        super().__init__(run)
        self.lengths = [[dice.randrange(1, 200) for _ in range(dice.randrange(1, 4))] for _ in range(run.ranks)]
        most = max(map(sum, self.lengths))
        sizes = (most, self.HEADS, self.KEY_HEADS, self.DIM, torch.float32)
        self.sender = dispatch.Dispatcher.for_tokens(*sizes, device=run.device)
        self.route = dispatch.plan(self.lengths, device=run.device)
        self.given = [one.clone() for one in self.drawn(0)]

    def drawn(self, seed: int) -> list[Any]:
        dice = generator(self.run, seed * self.run.ranks + self.run.rank)
        rows = sum(self.lengths[self.run.rank])
        shapes = ((rows, heads, self.DIM) for heads in (self.HEADS, self.KEY_HEADS, self.KEY_HEADS))
        return [torch.randn(one, generator=dice, device=self.run.device) for one in shapes]

    def fill(self, seed: int) -> None:
        for to, values in zip(self.given, self.drawn(seed), strict=True):
            to.copy_(values)

    def made(self) -> Any:
        return self.sender.attend(*self.given, self.route)

    def is_wrong(self, seed: int, found: Any) -> Any:
        wanted = whole(self.lengths[self.run.rank], *(one.double() for one in self.drawn(seed)))
        return ~self.run.same("dispatched attention", found, wanted, 4 * NEAR[torch.float32])


def kinds(run: Parts, dice: random.Random) -> list[Callable[[], Repeated]]:
    """Return the makers of all kinds of calls: the same on every rank."""
    found: list[Callable[[], Repeated]] = []
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        for how in ("plain", "async"):
            dtype, rows = dice.choice(DTYPES), int(2 ** dice.uniform(0, 16 if run.on_gpu else 11))
            op = dice.choice(("sum", "max")) if "reduce" in name else "sum"
            found.append(partial(Collective, run, name, rows, dtype, op, how=how))
    found.append(partial(Collective, run, "all_reduce", dice.randrange(1, 5000), torch.float32, "avg", how="in place"))
    for name in SCHEDULES:
        if name != "allreduce_halving_doubling" or run.ranks & (run.ranks - 1) == 0:
            found.append(partial(Collective, run, name, dice.randrange(1, 3000), dice.choice(DTYPES), "sum"))
    for call in WANTED:
        rows, depth, columns = (8 * dice.randrange(1, 40) for _ in range(3))
        found.append(partial(Products, run, Product(call, rows, depth, columns)))
        found.append(partial(Products, run, Product(call, rows, depth, columns, pieces=dice.choice((1, 4)))))
    found += [partial(Norms, run, Norm(dice.randrange(1, 100), dice.randrange(1, 3000))) for _ in range(2)]
    found.append(partial(Experts, run, 60, 128, 4, torch.bfloat16))
    found.append(partial(Experts, run, 33, 64, 2, torch.float32))
    found.append(partial(Attention, run, 48 * run.ranks, torch.bfloat16, causal=True))
    found.append(partial(Attention, run, 48 * run.ranks, torch.float32, causal=False))
    found += [partial(Dispatched, run, dice) for _ in range(2)]
    return found


FLOATS = {torch.bfloat16: (torch.int16, 7), torch.float16: (torch.int16, 10), torch.float32: (torch.int32, 23)}
"""By dtype the integer of its size, and the bits of its mantissa."""


def odd_values(run: Parts, dtype: torch.dtype, seed: int) -> list[Any]:
    """Return for every rank zeros of both signs and quiet NaNs of several payloads and signs among other numbers."""
    integer, mantissa = FLOATS[dtype]
    bits = 8 * dtype.itemsize
    infinity = (1 << (bits - 1)) - (1 << mantissa)
    nans = [infinity | 1 << (mantissa - 1) | payload for payload in (0, 1, 5)]
    known = torch.tensor([0, 0, 0, 1 << mantissa, infinity, *nans], dtype=integer, device=run.device)
    dice = generator(run, seed)
    draw = partial(torch.randint, generator=dice, device=run.device)
    size = 1000 + seed
    signs = [draw(0, 2, (size,)).to(integer) * torch.iinfo(integer).min for _ in range(run.ranks)]
    return [(known[draw(0, len(known), (size,))] | sign).view(dtype) for sign in signs]


def extremes(run: Parts) -> None:
    """Maxima and minima have the same bits on every rank: -0 is below +0, and there is one NaN."""
    schedules = [name for name in SCHEDULES if "doubling" not in name or run.ranks & (run.ranks - 1) == 0]

    def work(dtype: torch.dtype) -> int:
        wrong, integer = 0, FLOATS[dtype][0]
        for seed, (name, op) in enumerate((name, op) for name in schedules for op in ("max", "min")):
            x = odd_values(run, dtype, seed)
            found = commdsl.load(name, ranks=run.ranks)(x[run.rank], op=op)
            bits = run.everyone(found.view(integer).cpu())
            of_all = torch.stack(x).double()
            has_nan = of_all.isnan().any(0)
            wanted = of_all.amax(0) if op == "max" else of_all.amin(0)
            are_zero = (of_all == 0).all(0)
            negative = of_all.signbit().all(0) if op == "max" else of_all.signbit().any(0)
            right = all(torch.equal(one, bits[0]) for one in bits) and torch.equal(found.isnan(), has_nan)
            right = right and len(found[has_nan].view(integer).unique()) == 1
            right = right and torch.equal(found[~has_nan].double(), wanted[~has_nan])
            wrong += not (right and torch.equal(found.signbit()[are_zero], negative[are_zero]))
        return wrong

    for dtype in FLOATS:
        run.attempt_in_time(Part("extremes", f"max and min of {dtype}", 2 * len(schedules)), partial(work, dtype))


def storm(run: Parts) -> None:
    dice = random.Random(run.options.seed)
    repeated.storm(run, dice, kinds(run, dice))


if __name__ == "__main__":
    runner.run_parts(Parts, {"extremes": extremes, "storm": storm}, __doc__, calls=2000, seconds=240.0, grace=GRACE)
