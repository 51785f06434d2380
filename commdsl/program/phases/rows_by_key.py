"""Rows that go to the ranks of their keys: counted, pushed, sent on between nodes, and filled.

Assumes keys that `verify_keys` accepts. Does not say how rows come back: `rows_back` does.
"""

from __future__ import annotations

from commdsl.ir.dispatches import Often
from commdsl.language.records import dataclass
from commdsl.program.memory import Home, Rows, Transport
from commdsl.program.phases.common import (
    KEYS,
    MATES,
    Constant,
    Field,
    Keyed,
    Ways,
    addresses,
    crossing_fields,
    listed,
    node_constants,
)
from commdsl.program.touches import Touch, makes, reads, writes

_STAGED = (Field("staging"), Field("staged_bytes"))  # offset in the own heap of so many bytes for each warp

TO_PLACE = {
    Often.EACH: "to the places of its keys",
    Often.ONCE: "to the place of its first key there, from which the others are filled",
    Often.INDEX: "to the place of its first key there",
}


def _detail(names: str, push: PushByKey | PushAgain, beside: str) -> str:
    """How often a row travels, to where, and what arrives with it."""
    across = f"; to a node of {push.node} once, and from there to its ranks" if push.node else ""
    apart = "" if push.aligned == 1 else f", each key's from a multiple of {push.aligned} on"
    return f"{names}: {push.often.value}, {TO_PLACE[push.often]}{across}{apart}; beside it {beside}"


def _nodes(node: int) -> str:
    return f", once to a node of {node}" if node else ""


def _cross(push: PushByKey | PushAgain, held: Ways) -> None:
    """What crosses goes by way of a rank of another node, which forwards it."""
    if push.crossing is not None:
        held[push.crossing].add((f"by way of one of {push.node}",))


def _given(stretches: tuple[int, ...]) -> tuple[Constant, ...]:
    """How many tensors rows are of, and in what stretches they travel in float8: of as many as a dispatch may have."""
    found = enumerate((*stretches, 0, 0, 0)[:3])
    return ("i32", "kGiven", len(stretches)), *(("i32", f"kStretch{tensor}", stretch) for tensor, stretch in found)


@dataclass(frozen=True, slots=True)
class Count(Keyed):
    """Keys of the rank's rows, counted by every lane for itself, so that lanes have nothing to tell each other.

    `positions`: by key, its place among all keys, those of rank 0 first, then of rank 1, and so on.
    """

    keys: Rows
    positions: tuple[int, ...]

    name = "count"

    @property
    def description(self) -> str:
        return f"count {self.keys.name}, by {self.by.value}"

    @property
    def key_positions(self) -> tuple[int, ...]:
        return self.positions

    @property
    def touches(self) -> tuple[Touch, ...]:
        return reads(self.keys)

    def arguments(self, transport: Transport) -> tuple[Field, ...]:
        return KEYS


@dataclass(frozen=True, slots=True)
class PushByKey(Keyed):
    """Each row to the places of its keys, on the ranks that have these, as `often` as that says.

    On a rank places are sorted by key, source rank and row: where a source's rows with one key begin is the sum of what
    all have of lesser keys, each rounded up to a multiple of `aligned`, and lesser sources of this one, so segments are
    disjoint whatever the keys are. Places between two keys' rows are the rank's own, which clears them.

    Behind what is `given`, `to` has the scales of what travels in float8, by `stretches` of so many elements, 0 for the
    others; then what arrives beside rows (`beside`), of all places. The rank itself learns the `counts` of what comes
    to it, by key and source, the `offsets` where each key's end, and the `places` of its own.

    Rows for ranks of another node of `node` ranks go to the `crossing` of the one there that has this rank's number in
    its node, with their keys, places and values, each row at a place of its own: the segments that lie on the ranks of
    that node and are of this source are that rank's to write (`Forward`). So a segment still has one writer.
    """

    given: tuple[Rows, ...]
    keys: Rows
    value: Rows | None  # a number for each key of each row
    to: tuple[Rows, ...]
    counts: Rows
    offsets: Rows
    places: Rows
    often: Often
    aligned: int
    stretches: tuple[int, ...]  # by what is given
    node: int = 0  # 0: rows go straight to all ranks
    crossing: Rows | None = None

    peers, header = "Keyed", "keys.cuh"
    pushes = True
    sends_by_key = True

    @property
    def rows(self) -> tuple[Rows, ...]:
        """What arrives of the tensors, scales included."""
        return self.to[: len(self.given) + sum(stretch > 0 for stretch in self.stretches)]

    def at(self, name: str) -> int:
        """Which of `to` it is, -1 for none."""
        return next((at for at, rows in enumerate(self.to) if at >= len(self.rows) and rows.name == name), -1)

    @property
    def description(self) -> str:
        rows = listed((*self.given, *(() if self.value is None else (self.value,))))
        return f"push {rows} by {self.keys.name}, {self.often.value}{_nodes(self.node)}, by {self.by.value}"

    @property
    def details(self) -> tuple[str, ...]:
        names = ", ".join(name + how for name, how in self._cast.items())
        return (_detail(names, self, listed(self.to[len(self.given) :])),)

    @property
    def _cast(self) -> dict[str, str]:
        """By the name of what is given, how it travels."""
        pairs = zip(self.given, self.stretches, strict=True)
        return {rows.name: f" as float8 by {stretch}" if stretch else "" for rows, stretch in pairs}

    def carry(self, held: Ways) -> None:
        cast, how = self._cast, f"{self.often.value}, aligned {self.aligned}"
        rows = [(name, cast[name]) for name in cast] + [(f"scales of {name}", by) for name, by in cast.items() if by]
        for (name, by), to in zip(rows, self.to, strict=False):
            held[to].add((f"rows of {name}", f"pushed by key{by}, {how}"))
        if self.value is not None and (at := self.at(self.value.name)) >= 0:
            held[self.to[at]].add((f"values of {self.value.name}", "beside the rows"))
        _cross(self, held)

    @property
    def touches(self) -> tuple[Touch, ...]:
        own = makes(self.counts, self.offsets, self.places)
        return (*reads(*self.given, self.keys, self.value), *writes(*self.to), *own, *writes(self.crossing))

    @property
    def num_crossing(self) -> int:
        """Memories of what crosses: of rows, by tensor, then of keys, places and values."""
        return len(self.rows) + (2 if self.value is None else 3)

    def is_cast_far(self, transport: Transport) -> bool:
        """Whether a warp has rows in float8 in the own heap before they go."""
        return transport is Transport.NVSHMEM and any(self.stretches)

    def arguments(self, transport: Transport) -> tuple[Field, ...]:
        return (
            Field("inputs", len(self.given), is_address=True),
            *(() if self.value is None else addresses("values")),
            Field("row_bytes", len(self.rows)),  # as they travel, with those of scales
            *((Field("elements", 3),) if any(self.stretches) else ()),  # 0 float32, 1 float16, 2 bfloat16
            *(_STAGED if self.is_cast_far(transport) else ()),
            Field("outputs", len(self.to), is_address=True),
            Field("room"),  # rows of each output
            *addresses("counts", "offsets", "places"),
            *crossing_fields(self.crossing, self.num_crossing),
            *(MATES if self.often.is_once else ()),
        )

    def constants(self, num_ranks: int, waves: int) -> tuple[Constant, ...]:
        return (
            ("i32", "kNumRows", len(self.to)),
            ("i32", "kTensors", len(self.rows)),
            *_given(self.stretches),
            ("i32", "kValueAt", -1 if self.value is None else self.at(self.value.name)),
            ("i32", "kMatesAt", self.at("mates")),
            ("i32", "kIndexAt", self.at("index")),
            ("i32", "kOften", list(Often).index(self.often)),
            ("u64", "kAligned", self.aligned),
            *node_constants(self.node or num_ranks, self.crossing, self.num_crossing),
        )

    def kept(self, num_ranks: int) -> tuple[str, ...]:
        return *(f"{what} {rank}" for what in ("room", "comes") for rank in range(num_ranks)), "bad"

    def call(self, number: int, wave: str) -> str:
        return "commdsl::push_by_key(here, peers);"


@dataclass(frozen=True, slots=True)
class PushAgain(Keyed):
    """Rows to the places that rows had in a call before, whose `places`, `origins`, `offsets` and `counts` are given.
    The rank clears those of its own that have none. `positions`: as for `Count`, `node` and `crossing`: as there.
    """

    given: Rows
    keys: Rows
    places: Rows
    origins: Rows
    offsets: Rows
    counts: Rows
    to: Rows
    positions: tuple[int, ...]
    often: Often
    aligned: int
    node: int = 0
    crossing: Rows | None = None

    num_crossing = 3
    peers, header = "Again", "again.cuh"
    pushes = True
    sends_by_key = True

    @property
    def description(self) -> str:
        return f"push {self.given.name} again, {self.often.value}{_nodes(self.node)}, by {self.by.value}"

    @property
    def details(self) -> tuple[str, ...]:
        return (_detail(self.given.name, self, "nothing"),)

    @property
    def key_positions(self) -> tuple[int, ...]:
        return self.positions

    @property
    def touches(self) -> tuple[Touch, ...]:
        read = reads(self.given, self.keys, self.places, self.origins, self.offsets, self.counts)
        return (*read, *writes(self.to, self.crossing))

    def arguments(self, transport: Transport) -> tuple[Field, ...]:
        return (
            Field("inputs", 1, is_address=True),
            Field("row_bytes", 1),
            Field("outputs", 1, is_address=True),
            Field("room"),  # rows of the output
            *addresses("counts", "offsets", "places", "origins"),
            *crossing_fields(self.crossing, self.num_crossing),
            *KEYS,
        )

    def constants(self, num_ranks: int, waves: int) -> tuple[Constant, ...]:
        return (
            ("i32", "kNumRows", 1),
            ("i32", "kTensors", 1),
            *_given((0,)),
            ("i32", "kOften", list(Often).index(self.often)),
            ("u64", "kAligned", self.aligned),
            *node_constants(self.node or num_ranks, self.crossing, self.num_crossing),
        )

    def carry(self, held: Ways) -> None:
        left = listed((self.places, self.origins, self.offsets, self.counts))
        how = f"pushed again by {left}, {self.often.value}, aligned {self.aligned}"
        held[self.to].add((f"rows of {self.given.name}", how))
        _cross(self, held)

    def call(self, number: int, wave: str) -> str:
        return "commdsl::push_again(here, peers);"


@dataclass(frozen=True, slots=True)
class Forward(Keyed):
    """Rows that crossed to this rank for its node, to the places of their keys on the node's ranks, with what arrives
    beside them: to segments of the rank's likes in other nodes, which nobody else writes there.
    """

    crossing: Rows
    to: tuple[Rows, ...]

    name = "forward"
    sends_by_key = True

    @property
    def description(self) -> str:
        return f"forward {listed(self.to)}, by {self.by.value}"

    @property
    def touches(self) -> tuple[Touch, ...]:
        return (*reads(self.crossing), *writes(*self.to))

    def carry(self, held: Ways) -> None:
        for rows in self.to:
            held[rows].update([(*way, *across, "forwarded") for way in held[rows] for across in held[self.crossing]])


@dataclass(frozen=True, slots=True)
class FillByKey(Keyed):
    """Rows that came once, from the place of their first key on the rank to those of its others, as `mates` say."""

    to: tuple[Rows, ...]
    origins: Rows
    mates: Rows

    name = "fill"

    @property
    def description(self) -> str:
        return f"fill {listed(self.to)}, by {self.by.value}"

    @property
    def touches(self) -> tuple[Touch, ...]:
        # From rows that have come to places that nobody else writes: behind the push, before the caller.
        return (*reads(*self.to, self.origins, self.mates, turn=2), *makes(*self.to, turn=2))

    def arguments(self, transport: Transport) -> tuple[Field, ...]:
        return (*MATES, *addresses("mates")) if self.mates.home is Home.GIVEN else ()

    def carry(self, held: Ways) -> None:
        done = f"filled by {self.mates.name} at {self.origins.name}"
        for rows in self.to:
            held[rows].update([(*way, done) for way in held[rows]])
