"""Turns the `Metadata` of all ranks into one rank's Route: the tables that its kernels read, on its device.

Assumes every rank makes its Route from the same Metadata. Does not move rows (`Dispatcher` does). Tables are made when
a call first asks for one, by the widths of the rows, and kept; `update_` writes new ones into the same memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np
import torch

from commdsl.dispatch import form, layout
from commdsl.dispatch.errors import DispatchError
from commdsl.dispatch.metadata import AttentionLayout, Metadata
from commdsl.dispatch.repeats import Repeat
from commdsl.dispatch.spans import Seen, Spans, seen_by, seen_in
from commdsl.dispatch.validator import validate
from commdsl.ir.plans import DispatchPlan, Routing
from commdsl.ir.routes import Longs, Mask, Routes, Shards, back
from commdsl.planner.balance import imbalance
from commdsl.program.runs import Shipment, Tiling
from commdsl.program.tiles import RowTable, Tables
from commdsl.runtime.lasting import words

SPARE = 2
"""A table has room for so many times the words of the plan it began with, so that another plan's fit as well."""

LEAST_WORDS = 4096
"""What it has room for at least."""

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The tables of a call and of its way back."""


class Way(Enum):
    """What travels in one call."""

    QUERIES = "queries"
    QUERIES_BACK = "queries back"
    ALL = "queries, keys and values"
    ALL_BACK = "queries, keys and values back"

    @property
    def reversed(self) -> Way:
        return _REVERSED[self]

    @property
    def goes(self) -> bool:
        """Away from where the rows belong."""
        return self is Way.ALL or self is Way.QUERIES

    @property
    def has_keys(self) -> bool:
        return self is Way.ALL or self is Way.ALL_BACK

    @property
    def without_keys(self) -> Way:
        return Way.QUERIES if self.goes else Way.QUERIES_BACK


_REVERSED = {
    Way.QUERIES: Way.QUERIES_BACK,
    Way.QUERIES_BACK: Way.QUERIES,
    Way.ALL: Way.ALL_BACK,
    Way.ALL_BACK: Way.ALL,
}


class Form(NamedTuple):
    """What a table depends on beside the routes."""

    way: Way
    widths: tuple[int, ...]  # bytes of a row, by tensor
    packed: bool
    tile_bytes: int


class Host(Protocol):
    """Who calls with a Route's tables, within what it has memory for."""

    def admit(self, route: Route, wanted: Form, waiting: tuple[int, ...]) -> None:
        """Raises DispatchError (C961) on all ranks alike; `waiting`: by tensor the most rows that wait on a rank, empty
        where that is not known yet.
        """
        ...


@dataclass(frozen=True, eq=False)
class _Numbers:
    """The routes of all ranks."""

    shards: Shards
    queries: Routes
    queries_back: Routes
    keys: Routes | None
    keys_back: Routes | None
    seen: Seen | None  # where it is known what queries attend to

    @cached_property
    def sizes(self) -> tuple[Longs, Longs, Longs]:
        """By rank: rows of its own, of queries received, of keys received."""
        return (
            self.shards.rows,
            self.queries.received,
            0 * self.shards.rows if self.keys is None else self.keys.received,
        )

    @cached_property
    def copies(self) -> tuple[int, int]:
        """The most copies of a shard: of queries, of keys."""
        found = [0 if one is None else int(np.bincount(one.shard).max(initial=0)) for one in (self.queries, self.keys)]
        return found[0], found[1]

    @cached_property
    def has_copies(self) -> bool:
        """Of queries."""
        return bool(self.queries.copy.any())

    def flows(self, way: Way, widths: tuple[int, ...]) -> list[Shipment]:
        goes = way.goes
        queries = self.queries if goes else self.queries_back
        _, query_rows, key_rows = self.sizes
        rows = query_rows if goes else self.shards.rows
        flows = [Shipment(queries, rows, widths[0], is_sum=not goes and self.has_copies)]
        if way.has_keys:
            keys = self.keys if goes else self.keys_back
            if keys is None:
                raise DispatchError("this Route has no keys and values: it was made of queries alone")
            rows = key_rows if goes else self.shards.rows
            flows += [Shipment(keys, rows, width, is_sum=not goes) for width in widths[1:]]
        return flows


@dataclass(eq=False, slots=True)
class _Table:
    """A table that was asked for, and who calls with it."""

    words: torch.Tensor  # int32, 1-D, on the device, with room to spare
    made: RowTable  # what is written there
    hosts: weakref.WeakSet[Host] = field(default_factory=weakref.WeakSet)

    def write(self, made: RowTable) -> None:
        new = torch.from_numpy(made.words.view(np.int32))
        if self.words.is_cuda:
            new = new.pin_memory()
        # By torch, which tells a gradient that the table changed.
        self.words[: made.words.size].copy_(new, non_blocking=True)
        self.made = made


class Route:
    """One plan for one rank: where its rows go, and where they come back to. Threads may share it."""

    # Plain numbers: what `torch.compile` traces reads them, and guards on them.
    rows: int
    """Rows of this rank's own tensors."""
    queries: int
    """Rows of queries that this rank receives."""
    keys: int
    """Rows of keys, and of values, that this rank receives; 0 where there are none."""
    most: tuple[int, int, int]
    """The most rows of any rank: of its own, of queries received, of keys received."""
    copies: tuple[int, int]
    """The most copies of a shard of any rank: of queries, of keys."""

    @classmethod
    def of_plan(cls, plan: DispatchPlan, routing: Routing, *, rank: int, device: torch.device) -> Route:
        """Of a plan and its routes, which were proved (`compiler.prove_plan`)."""
        made = cls.__new__(cls)
        ways = routing.queries, routing.queries_back, routing.keys, routing.keys_back
        made._begin(_Numbers(plan.shards, *ways, seen_by(plan, routing)), rank, device)
        return made

    def __init__(
        self,
        fwd_q: Metadata,
        rev_q: Metadata,
        fwd_k: Metadata | None = None,
        rev_k: Metadata | None = None,
        attention: AttentionLayout | None = None,
        *,
        rank: int,
        device: torch.device | str = "cpu",
        causal: bool = True,
    ) -> None:
        """Proves the Metadata of all ranks (`validate`) and keeps what `rank` needs. fwd_k and rev_k None: rows only.
        With the layout of the attention, under a causal mask or none, `attention` says what queries see:
        `Route(*load_plan("balanced_16k"), rank=rank)`.

        Raises MetadataError (C960) where the numbers are not those of one dispatch, DispatchError (C961) without any.
        """
        for given in (fwd_q, rev_q, *(one for one in (fwd_k, rev_k) if one is not None)):
            if not isinstance(given, Metadata):
                raise DispatchError(
                    f"expected the four Metadata of a dispatch one by one, got `{type(given).__name__}`"
                )
        if not hasattr(rank, "__index__"):
            raise DispatchError(f"expected a rank, a whole number, got {rank!r}")
        mask = None if attention is None else Mask.CAUSAL if causal else Mask.FULL
        validate(fwd_q, rev_q, fwd_k, rev_k, attention, mask=mask)
        seen = None if attention is None else seen_in(attention, causal=causal)
        numbers = _numbers(fwd_q, fwd_k, seen)
        if not 0 <= rank < numbers.shards.num_ranks:
            raise DispatchError(f"expected a rank 0 ..< {numbers.shards.num_ranks}, got {rank}")
        self._begin(numbers, rank, torch.device(device))

    def _begin(self, numbers: _Numbers, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self._count(numbers)
        self.ready: dict[tuple[str, str, tuple[int, ...]], Pair] = {}
        """By Dispatcher, Way and widths: what a call looks up."""
        self.repeats: dict[tuple[str, str], Repeat] = {}
        """By Dispatcher and Way: the last call."""
        self._tables: dict[Form, _Table] = {}
        self._lock = threading.Lock()  # of the tables

    def __repr__(self) -> str:
        seen = self._numbers.seen
        loads, what = (self._numbers.queries.received, "queries") if seen is None else (seen.pairs, "attention")
        received = f"receives {self.queries} queries" + (f" and {self.keys} keys" if self.has_keys else "")
        return (
            f"Route(rank {self.rank} of {self.num_ranks}: {self.rows} rows, {received}; the most {what} of a rank is "
            f"{imbalance(loads):.1%} above the mean)"
        )

    def __reduce__(self) -> NoReturn:
        raise DispatchError(
            "a Route has tables on a device, and is not copied or saved: save the Metadata or the lengths that it is of"
        )

    @property
    def num_ranks(self) -> int:
        return self._numbers.shards.num_ranks

    @property
    def has_keys(self) -> bool:
        return self._numbers.keys is not None

    @property
    def attention(self) -> Spans:
        """What the queries that this rank receives attend to. Raises DispatchError (C961) where that was not said."""
        if self._spans is None:
            raise DispatchError(
                "this Route does not say what its queries attend to: make it of the attention layout as well, or by "
                "`dispatch.plan`"
            )
        return self._spans

    def table(self, wanted: Form, host: Host) -> torch.Tensor:
        """int32, 1-D, on the device: what the kernel of this rank reads, once `host` has admitted the Route to it."""
        with self._lock:
            return self._table(wanted, host)

    def _table(self, wanted: Form, host: Host) -> torch.Tensor:
        found = self._tables.get(wanted)
        made = self._admitted(wanted, (host,), found)
        if found is None:
            found = self._tables[wanted] = _Table(words(max(SPARE * made.most_words, LEAST_WORDS), self.device), made)
            found.write(made)
        found.hosts.add(host)
        return found.words

    def digest(self, wanted: Form) -> int:
        """The digest in the table of that form: of the routes of all ranks, and of the mask and the keys of queries."""
        return self._tables[wanted].made.digest

    def words(self, wanted: Form) -> str:
        """The description of that digest, for errors of ranks whose plans differ."""
        seen = self._numbers.seen
        mask = "" if seen is None else ", causal" if seen.causal else ", not causal"
        return f"{wanted.way.value} by plan {self.digest(wanted):08x}{mask}"

    def update_(self, other: Route) -> None:
        """Overwrites the tables with those of `other`, on the current stream: a graph that was captured with this Route
        follows the other plan from then on. Every rank updates to the same plan between the same calls.

        Raises DispatchError (C961) on all ranks alike, and changes nothing, where the other plan is not within the
        Limits of a Dispatcher that this Route was used with, or where a table has no room for it: that is LEAST_WORDS,
        or SPARE times what the first plan takes.
        """
        if (other.rank, other.num_ranks) != (self.rank, self.num_ranks):
            raise DispatchError(
                f"this Route is rank {self.rank}'s of {self.num_ranks}, the other rank {other.rank}'s of "
                f"{other.num_ranks}"
            )
        made = {
            wanted: other._admitted(wanted, tuple(mine.hosts), other._tables.get(wanted))
            for wanted, mine in self._tables.items()
        }
        for wanted, new in made.items():
            room = len(self._tables[wanted].words)
            if new.most_words > room:
                raise DispatchError(
                    f"the table of {wanted.way.value} has room for {room} words, the other plan takes up to "
                    f"{new.most_words} on a rank: make the Route from the plan with the most shards first"
                )
        for wanted, new in made.items():
            self._tables[wanted].write(new)
        self._count(other._numbers)

    def place_of(self, address: int, send: int) -> str | None:
        """Which shard and replica a run of the table at an address is part of, in words; None if the table is not one
        of this Route's.
        """
        for wanted, found in self._tables.items():
            if found.words.data_ptr() == address:
                return self._place(wanted, send)
        return None

    def _place(self, wanted: Form, send: int) -> str:
        at = int(self._tables[wanted].made.route[send])
        for flow in self._numbers.flows(wanted.way, wanted.widths):
            if at < flow.routes.num:
                local = int(self._numbers.shards.local[flow.routes.shard[at]])
                return f"shard {local}, replica {int(flow.routes.copy[at])}"
            at -= flow.routes.num
        return f"run {send}"

    def _count(self, numbers: _Numbers) -> None:
        self._numbers = numbers
        self._maker = Tables(self.rank, self.num_ranks, 0 if numbers.seen is None else numbers.seen.digest)
        self._made: dict[Form, RowTable] = {}  # that nobody has asked for yet
        self._spans = None if numbers.seen is None else numbers.seen.on(self.rank, self.device)
        columns = [column.tolist() for column in numbers.sizes]
        self.most = max(columns[0]), max(columns[1]), max(columns[2])
        self.copies = numbers.copies
        self.rows, self.queries, self.keys = (column[self.rank] for column in columns)

    def _admitted(self, wanted: Form, hosts: Sequence[Host], found: _Table | None) -> RowTable:
        """The table, if every host admits it; it is made unless it was found."""
        for host in hosts:
            host.admit(self, wanted, ())
        made = self._make(wanted) if found is None else found.made
        for host in hosts:
            host.admit(self, wanted, made.waiting_rows)
        return made

    def _make(self, wanted: Form) -> RowTable:
        """The table, and with it those that calls ask for next, which takes little longer: of the way back, and of
        queries alone, as results go back without keys.
        """
        if wanted not in self._made:
            kinds = [(wanted.way, wanted.widths)]
            if wanted.way.has_keys:
                kinds.append((wanted.way.without_keys, wanted.widths[:1]))
            ways = [(one, widths) for way, widths in kinds for one in (way, way.reversed)]
            forms = [Form(*one, wanted.packed, wanted.tile_bytes) for one in ways]
            new = [form for form in forms if form not in self._tables]
            flows = [self._numbers.flows(form.way, form.widths) for form in new]
            self._made.update(
                zip(new, self._maker.tables(flows, Tiling(wanted.packed, wanted.tile_bytes)), strict=True)
            )
        return self._made.pop(wanted)


def checked(route: Route) -> Route:
    """Raises DispatchError (C961) for what is no Route."""
    if not isinstance(route, Route):
        known = isinstance(route, Metadata)
        made = "Route(fwd_q, rev_q, ..., rank=rank) makes one of it" if known else "`dispatch.plan` makes one"
        raise DispatchError(f"expected a Route, got `{type(route).__name__}`: {made}")
    return route


def _numbers(fwd_q: Metadata, fwd_k: Metadata | None, seen: Seen | None) -> _Numbers:
    """The routes that proved Metadata names."""
    queries, shards = _named("fwd_q", fwd_q)
    if fwd_k is None:
        return _Numbers(shards, queries, back(queries, shards), None, None, seen)
    keys, _ = _named("fwd_k", fwd_k)
    return _Numbers(shards, queries, back(queries, shards), keys, back(keys, shards), seen)


def _named(name: str, metadata: Metadata) -> tuple[Routes, Shards]:
    numbers = form.tables(name, metadata)
    shards = layout.padded(numbers.length)
    copies = numbers.dest.shape[2]
    return layout.routes_of(numbers.dest.reshape(-1, copies), numbers.row.reshape(-1, copies), shards), shards
