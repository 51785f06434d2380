"""Turns a plan and a call's number into inputs, and into what each rank must hold after every op of a dispatch.

Assumes that all ranks draw the same numbers for the same seed: then each computes all others' inputs by itself, and a
check needs no communication. Compares bits, on the device; the host waits for nothing. Does not know groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from dispatch_plans import NOT_WRITTEN, Traced

from benchmarks.values import differs, poison

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Rows:
    """What a row of q, k and v is. `shift`: elements before each tensor's first, off its alignment."""

    dtype: torch.dtype
    nbytes: tuple[int, int, int]
    shift: int = 0

    def shape(self, part: int, rows: int) -> tuple[int, ...]:
        """Widths with a factor of 2 come as two dimensions, as heads do."""
        width = self.nbytes[part] // self.dtype.itemsize
        return (rows, 2, width // 2) if width % 2 == 0 else (rows, width)

    def fits(self) -> bool:
        return all(nbytes % self.dtype.itemsize == 0 for nbytes in self.nbytes)

    def __str__(self) -> str:
        shift = f", {self.shift * self.dtype.itemsize} bytes off" if self.shift else ""
        return f"{str(self.dtype).removeprefix('torch.')} {'/'.join(map(str, self.nbytes))} B{shift}"


@dataclass(eq=False)
class Player:
    """One rank's part in checks: its tables, and how many calls gave a wrong result so far."""

    rank: int
    traced: Traced  # on the device
    rows: Rows
    device: torch.device
    wrong: torch.Tensor = field(init=False)  # (): calls
    _seeds: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        self._seeds = torch.Generator(self.device)

    # --- inputs -------------------------------------------------------------------------------------------------------

    def _drawn(self, shape: tuple[int, ...], key: tuple[int, ...], *, bits: bool) -> torch.Tensor:
        """Random bits, not a number among them; or floats of [0.5, 1) with a sign, whose sums depend on the order."""
        seed = 0
        for number in key:
            seed = (seed * 1_000_003 + number + 1) % (1 << 62)
        self._seeds.manual_seed(seed)
        dtype = self.rows.dtype
        if bits:
            halves = (*shape[:-1], shape[-1] * dtype.itemsize // 2)
            numbers = torch.randint(-(1 << 15), 1 << 15, halves, device=self.device, generator=self._seeds)
            return numbers.to(torch.int16).view(dtype)
        numbers = torch.rand(shape, device=self.device, generator=self._seeds) - 0.5
        return (numbers + torch.copysign(torch.full_like(numbers, 0.5), numbers)).to(dtype)

    def everyone(self, part: int, lengths: Sequence[int], call: int, *, bits: bool) -> list[torch.Tensor]:
        """Every rank's tensor of a part (0: q, 1: k, 2: v) in a call; `lengths` are each rank's rows."""
        return [
            self._drawn(self.rows.shape(part, length), (call, part, rank), bits=bits)
            for rank, length in enumerate(lengths)
        ]

    def placed(self, values: torch.Tensor) -> torch.Tensor:
        """The same values, as far off a boundary as `rows` says."""
        room = torch.empty(values.numel() + self.rows.shift, dtype=values.dtype, device=self.device)
        return room[self.rows.shift :].view(values.shape).copy_(values)

    def poison(self, part: int, rows: int) -> None:
        """The next tensor of this size is made of memory full of 0xFF."""
        shape = self.rows.shape(part, rows)
        poison(torch.Size(shape).numel(), self.rows.dtype, self.device)

    # --- what must come out -------------------------------------------------------------------------------------------

    def there(self, part: int, sent: list[torch.Tensor]) -> torch.Tensor:
        """What this rank receives."""
        ids = (self.traced.queries if part == 0 else self.traced.keys)[self.rank]
        return torch.cat(sent)[ids]

    def back(self, part: int, held: list[torch.Tensor]) -> torch.Tensor:
        """What comes back to this rank: queries as they are; of keys the sum of the copies, in copy order, in float32,
        rounded once. Zeros where nothing does."""
        everyone = torch.cat(held)
        if part == 0:
            return _rows_of(everyone, self.traced.queries_back[self.rank])
        copies = self.traced.keys_back[self.rank]
        total = torch.zeros((copies.shape[1], *everyone.shape[1:]), dtype=torch.float32, device=self.device)
        for ids in copies:
            total += _rows_of(everyone, ids).float()
        return total.to(self.rows.dtype)

    def received(self, part: int) -> list[int]:
        return [len(ids) for ids in (self.traced.queries if part == 0 else self.traced.keys)]

    @property
    def has_keys(self) -> bool:
        return bool(self.traced.keys)

    # --- checks -------------------------------------------------------------------------------------------------------

    def count(self, got: Sequence[torch.Tensor | None], want: Sequence[torch.Tensor]) -> None:
        """One more wrong call if a single bit of a single tensor is different."""
        bad = [
            torch.ones((), dtype=torch.bool, device=self.device) if one is None else differs(one.contiguous(), other)
            for one, other in zip(got, want, strict=True)
        ]
        self.wrong += torch.stack(bad).any()

    def parts(self) -> range:
        return range(3 if self.has_keys else 1)

    def forward(self, sender: Any, route: Any, call: int) -> None:
        """Random bits arrive where the simulation puts them."""
        sent = [self.everyone(part, self.traced.rows, call, bits=True) for part in self.parts()]
        want = [self.there(part, sent[part]) for part in self.parts()]
        mine = [self.placed(tensors[self.rank]) for tensors in sent]
        for part in self.parts():
            self.poison(part, self.received(part)[self.rank])
        got = sender.dispatch_qkv(*mine, route) if self.has_keys else (sender.dispatch(mine[0], route),)
        self.count((*got, *mine), (*want, *(tensors[self.rank] for tensors in sent)))

    def reverse(self, sender: Any, route: Any, call: int) -> None:
        """Bits of queries come back as they were, copies of keys and values as their sum."""
        held = [self.everyone(part, self.received(part), call, bits=part == 0) for part in self.parts()]
        want = [self.back(part, held[part]) for part in self.parts()]
        mine = [self.placed(tensors[self.rank]) for tensors in held]
        for part in self.parts():
            self.poison(part, self.traced.rows[self.rank])
        got = sender.collect_qkv(*mine, route) if self.has_keys else (sender.collect(mine[0], route),)
        self.count(got, want)

    def one_tensor(self, sender: Any, route: Any, call: int) -> None:
        """The queries' route alone, there and back."""
        sent = self.everyone(0, self.traced.rows, call, bits=True)
        want = self.there(0, sent)
        self.poison(0, len(want))
        away = sender.dispatch(self.placed(sent[self.rank]), route)
        held = [_rows_of(torch.cat(sent), ids) for ids in self.traced.queries]
        want_back = self.back(0, held)
        self.poison(0, len(want_back))
        self.count((away, sender.collect(away, route)), (want, want_back))

    def gradients(self, sender: Any, route: Any, call: int) -> None:
        """The gradient of a dispatch is the way back; of the way back, a dispatch."""
        sent = [self.everyone(part, self.traced.rows, call, bits=False) for part in self.parts()]
        leaves = [self.placed(tensors[self.rank]).requires_grad_() for tensors in sent]
        out = sender.dispatch_qkv(*leaves, route) if self.has_keys else (sender.dispatch(leaves[0], route),)
        given = [self.everyone(part, self.received(part), call + 1, bits=False) for part in self.parts()]
        for part in self.parts():
            self.poison(part, self.traced.rows[self.rank])
        found = torch.autograd.grad(out, leaves, [self.placed(tensors[self.rank]) for tensors in given])
        want = [self.back(part, given[part]) for part in self.parts()]
        held = self.placed(given[0][self.rank]).requires_grad_()
        collected = sender.collect(held, route)
        (again,) = torch.autograd.grad(collected, held, self.placed(sent[0][self.rank]))
        self.count((*found, collected, again), (*want, want[0], self.there(0, sent[0])))


def _rows_of(everyone: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows by number; a row of zeros is appended, and NOT_WRITTEN, which is -1, picks it."""
    assert NOT_WRITTEN == -1
    return torch.cat([everyone, everyone.new_zeros((1, *everyone.shape[1:]))])[ids]
