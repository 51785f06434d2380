"""Turns the most that any call moves into bytes of symmetric memory, and judges whether a Route stays within it.

Assumes the same limits and Routes of the same plan on every rank, so that all refuse alike: a rank that went on alone
would wait for the others. Does not hold memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from commdsl.dispatch.errors import DispatchError
from commdsl.dispatch.route import Form, Route
from commdsl.program.plan import Plan
from commdsl.runtime.pool import aligned

KINDS = ("rows", "queries", "keys")

QUERY_ROOM, KEY_ROOM = 2, 4
"""A balanced plan (`dispatch.plan`) brings a rank at most so many times the rows of the fullest one: what a long
document has too much of goes to several ranks, and each needs the document's keys.
"""


@dataclass(frozen=True, slots=True)
class Shares:
    """What lies where in a rank's heap, in bytes: what peers tell each other, then rows that wait, then results."""

    waiting: tuple[int, ...]  # by tensor of the Plan: where its rows wait
    waiting_rows: tuple[int, ...]  # how many may
    results: int
    result_bytes: tuple[int, int]  # of one call's results: there, and back
    size: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that any rank has in a call; what symmetric memory is made for. Equal on all ranks."""

    rows: int  # of a rank's own tensors
    queries: int  # rows of queries that a rank receives
    keys: int = 0  # rows of keys, and of values, that a rank receives
    copies: int = 1  # of a shard that may go to several ranks
    widths: tuple[int, ...] = ()  # bytes of a row, by tensor: queries, keys, values

    @staticmethod
    def of(routes: Iterable[Route], widths: Sequence[int]) -> Limits:
        """The least under which all of these run, one Route or more, with rows of these bytes. DispatchError (C961)."""
        found = tuple(routes) if isinstance(routes, Iterable) and not hasattr(routes, "shape") else ()
        if not found or not all(isinstance(route, Route) for route in found):
            raise DispatchError(f"expected one Route or more, as in [route], got {routes!r}")
        if not isinstance(widths, Sequence) or not all(hasattr(width, "__index__") for width in widths):
            raise DispatchError(f"expected the bytes of a row by tensor, as in (256, 64, 64), got {widths!r}")
        rows, queries, keys = (max(column) for column in zip(*(route.most for route in found), strict=True))
        copies = max(1, *(number for route in found for number in route.copies))
        return Limits(rows, queries, keys, copies, tuple(widths))

    @staticmethod
    def for_tokens(tokens: int, ranks: int, widths: tuple[int, ...]) -> Limits:
        """For every plan that `dispatch.plan` makes of ranks with at most so many tokens each."""
        return Limits(tokens, min(QUERY_ROOM, ranks) * tokens, min(KEY_ROOM, ranks) * tokens, ranks, widths)

    @property
    def counts(self) -> tuple[int, int, int]:
        """In the order of KINDS."""
        return self.rows, self.queries, self.keys

    @property
    def received(self) -> tuple[int, int, int]:
        """By tensor the rows that a rank receives."""
        return self.queries, self.keys, self.keys

    def waiting(self, plan: Plan) -> list[int]:
        """By tensor the rows that may wait on a rank until it finishes them: packed all, else what is summed."""
        found = []
        for copied, there, _ in zip(plan.push.copied, self.received, self.widths, strict=False):
            copies = self.copies if copied else 1
            summed = self.rows * copies if copies > 1 else 0
            found.append(max(there, self.rows * copies) if plan.push.packed else summed)
        return found

    def layout(self, plan: Plan, calls: int) -> Shares:
        """The heap for these limits, with the results of so many calls there and back unless they are ordinary."""
        rows, offsets, at = self.waiting(plan), [], aligned(plan.symmetric_bytes)
        for count, width in zip(rows, self.widths, strict=True):
            offsets.append(at)
            at += aligned(count * width)
        pad = (0,) * (len(plan.push.given) - len(rows))
        there = sum(aligned(count * width) for count, width in zip(self.received, self.widths, strict=False))
        back = sum(aligned(self.rows * width) for width in self.widths)
        sizes = (0, 0) if plan.push.packed else (there, back)
        return Shares((*offsets, *pad), (*rows, *pad), at, sizes, at + calls * sum(sizes))

    def judge(self, plan: Plan) -> None:
        """Raises DispatchError (C961) for limits that the kernel cannot have."""
        for name, value in zip(KINDS, self.counts, strict=True):
            if not 0 <= value < 2**32:
                raise DispatchError(f"expected 0 <= {name} < 2 ** 32, got {value}")
        if self.copies < 1:
            raise DispatchError(f"expected at least 1 copy, got {self.copies}")
        if not 1 <= len(self.widths) <= len(plan.push.given):
            names = ", ".join(names_of(plan))
            raise DispatchError(
                f"expected the widths of 1 to {len(plan.push.given)} tensors ({names}), got {self.widths}"
            )
        for width in self.widths:
            _even(width)

    def admit(self, plan: Plan, route: Route, wanted: Form, waiting: Sequence[int]) -> None:
        """Raises DispatchError (C961) for a call that there is no memory for. `waiting`: by tensor the most rows of the
        Route that wait on a rank, empty where that is not known yet.
        """
        for what, has, most in zip(KINDS, route.most, self.counts, strict=True):
            if has > most and (what != "keys" or wanted.way.has_keys):
                raise DispatchError(f"a rank has {has} {what}, and the Limits are for {most}")
        if len(wanted.widths) > len(self.widths):
            raise DispatchError(f"{len(wanted.widths)} tensors, and the Limits have the widths of {len(self.widths)}")
        for name, width, limit in zip(names_of(plan), wanted.widths, self.widths, strict=False):
            _even(width)
            if width > limit:
                raise DispatchError(f"a row of `{name}` takes {width} bytes, and the Limits are for {limit}")
        self._admit_copies(plan, route, wanted)
        for name, has, limit in zip(names_of(plan), waiting, self.waiting(plan), strict=False):
            if has > limit:
                raise DispatchError(
                    f"{has} rows of `{name}` wait on a rank, and there is room for {limit}: the Limits are for "
                    f"{self.copies} copies of {self.rows} rows"
                )

    def _admit_copies(self, plan: Plan, route: Route, wanted: Form) -> None:
        copies = route.copies[0], *(route.copies[1],) * (len(wanted.widths) - 1)
        for name, copied, has in zip(names_of(plan), plan.push.copied, copies, strict=False):
            most = self.copies if copied else 1
            if has > most:
                why = f"the Limits are for {most}" if copied else f"`{plan.name}` sends a shard of it to one rank"
                raise DispatchError(f"a shard of `{name}` has {has} copies, and {why}")


def names_of(plan: Plan) -> tuple[str, ...]:
    """The tensors of a dispatch."""
    return tuple(rows.name for rows in plan.push.given)


def _even(width: int) -> None:
    if width < 2 or width % 2:
        raise DispatchError(f"a row takes an even number of bytes, 2 or more, not {width}")
