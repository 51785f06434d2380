"""What rows became, back to their sources: pushed, added up between nodes, and finished.

Assumes places that a dispatch by keys left. Does not say how rows go there: `rows_by_key` does.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Self

from commdsl.language.records import dataclass
from commdsl.program.memory import Rows, Transport
from commdsl.program.phases.common import (
    KEYS,
    MATES,
    Constant,
    Field,
    Held,
    Keyed,
    Ways,
    addresses,
    crossing_fields,
    node_constants,
)
from commdsl.program.touches import Touch, makes, reads, writes


class Each(Enum):
    """What comes home on the way back from keys: for how much of a row a place waits on its source."""

    ENTRY = "each key"  # the row of one key
    RANK = "each rank"  # the sum of those of a rank
    NODE = "each node"  # the sum of the sums of a node's ranks
    WORD = "each word"  # a float32 of one key

    @property
    def is_sum(self) -> bool:
        """Whether ranks add up what they have of a row."""
        return self in (Each.RANK, Each.NODE)

    @property
    def called(self) -> str:
        """What comes, in the name of a body: rows, sums or words."""
        return "words" if self is Each.WORD else "sums" if self.is_sum else "rows"

    @property
    def suffix(self) -> str:
        """The same in the name of a phase, whose rows need no word."""
        return "" if self is Each.ENTRY else f" {self.called}"


def _weighed(weights: Rows | None) -> Held:
    return () if weights is None else (f"times {weights.name}",)


def _times(weights: Rows | None) -> str:
    return "".join(f" {word}" for word in _weighed(weights))


@dataclass(frozen=True, slots=True)
class PushBack(Keyed):
    """What rows became, up to the last of `offsets`, to the places on their sources that wait for it.

    Of each rank: where the first of a row's places stands, all of them are added up in the order of the row's keys, in
    float32, times their `weights` if there are, and rounded; `mates` says for each key of a row which place it has.

    Of each node of `node` ranks: such sums go to the `crossing` of the one of the rank's own node that has the source's
    number, which adds them up (`AddUp`): for each row as many as its source tells it there by its `keys`.
    """

    given: Rows
    origins: Rows
    offsets: Rows
    to: Rows
    each: Each = Each.ENTRY
    mates: Rows | None = None
    weights: Rows | None = None
    node: int = 0
    crossing: Rows | None = None
    keys: Rows | None = None

    num_crossing = 2
    peers = "Returning"
    pushes = True
    sends_by_key = True
    sends_wave = True

    @property
    def name(self) -> str:
        return f"push{self.each.suffix}"

    @property
    def description(self) -> str:
        sums = ", the sums of this rank's" if self.each.is_sum else ""
        sums += f", once to a node of {self.node}" if self.node else ""
        return f"{self.name} {self.given.name} back{sums}{_times(self.weights)}, by {self.by.value}"

    @property
    def details(self) -> tuple[str, ...]:
        if not self.each.is_sum:
            return (f"{self.given.name}, where it is: as it is",)
        how = f"a row's places of this rank, by key{_times(self.weights)}, in float32, rounded"
        return (f"{self.given.name}, where it is: {how}",)

    @property
    def touches(self) -> tuple[Touch, ...]:
        read = reads(self.given, self.origins, self.offsets, self.mates, self.weights, self.keys)
        return (*read, *writes(self.to if self.crossing is None else self.crossing))

    @property
    def header(self) -> str:
        return "back.cuh" if self.crossing is None else "sums.cuh"

    def is_staged(self, transport: Transport) -> bool:
        """Whether a warp adds up rows in the own heap before they go."""
        return transport is Transport.NVSHMEM and self.each.is_sum

    def arguments(self, transport: Transport) -> tuple[Field, ...]:
        return (
            Field("waiting"),  # offset in every heap of where rows wait
            Field("waiting_rows"),  # room there
            *crossing_fields(self.crossing, self.num_crossing),
            # Offset in the own heap of a row for each warp, where what goes far is added up.
            *((Field("staging"),) if self.is_staged(transport) else ()),
            *addresses("given"),
            Field("given_rows"),  # room there, of which the first have been received
            Field("row_bytes"),
            *addresses("origins", "offsets"),
            *(() if self.mates is None else (*MATES, *addresses("mates"))),
            *(() if self.weights is None else addresses("weights")),
        )

    def constants(self, num_ranks: int, waves: int) -> tuple[Constant, ...]:
        return (
            ("bool", "kAddsHere", int(self.each.is_sum)),
            ("bool", "kWeighsHere", int(self.weights is not None)),
            ("i32", "kWaves", waves),
            *node_constants(self.node or num_ranks, self.crossing, self.num_crossing),
        )

    def kept(self, num_ranks: int) -> tuple[str, ...]:
        return *(f"rows {rank}" for rank in range(num_ranks)), "bad", "apart"

    @property
    def adds_up(self) -> bool:
        return self.each is not Each.WORD

    def of_wave(self, wave: int) -> Self:
        return replace(self, to=replace(self.to, wave=wave))

    def carry(self, held: Ways) -> None:
        sums = () if self.mates is None else (f"added up by {self.mates.name}",)
        place = f"up to {self.offsets.name}", f"by {self.origins.name}", self.each.value
        way = (f"rows of {self.given.name}", *sums, *_weighed(self.weights), *place)
        by = "nothing" if self.keys is None else self.keys.name
        across = () if self.crossing is None else (f"to one of {self.node}, by {by}",)
        held[self.crossing or self.to].add((*way, *across))

    def call(self, number: int, wave: str) -> str:
        return f"commdsl::push_{self.each.called}(here, peers{wave and f', {wave}'});"


@dataclass(frozen=True, slots=True)
class AddUp(Keyed):
    """Sums of this node's ranks, for each row of this rank, by its `keys`, and of its likes in other nodes: in order of
    the ranks, in float32, rounded, to the place on the row's source that waits for this node.
    """

    crossing: Rows
    keys: Rows
    to: Rows

    name = "add up"
    sends_by_key = True
    adds_up = True

    @property
    def description(self) -> str:
        return f"{self.name} {self.to.name}, the sums of this node's, by {self.by.value}"

    @property
    def details(self) -> tuple[str, ...]:
        return (f"{self.to.name}, between: a row's sums of this node, by rank, in float32, rounded",)

    @property
    def touches(self) -> tuple[Touch, ...]:
        return (*reads(self.crossing, self.keys), *writes(self.to))

    def carry(self, held: Ways) -> None:
        held[self.to].update([(*way, f"added up, by {self.keys.name}") for way in held[self.crossing]])


@dataclass(frozen=True, slots=True)
class FinishBack(Keyed):
    """For each row what waits for it: rows of its keys, in their order, times their weights if there are, or sums of
    ranks or nodes, in theirs, added up in float32 and rounded once; words as they came. What waits for nothing is zero.
    `positions`: as for `Count`.
    """

    waiting: Rows
    keys: Rows
    to: Rows
    positions: tuple[int, ...]
    each: Each = Each.ENTRY
    weights: Rows | None = None

    ends_wave = True

    @property
    def name(self) -> str:
        return f"finish{self.each.suffix}"

    @property
    def description(self) -> str:
        return f"{self.name} {self.to.name} of {self.each.value}{_times(self.weights)}, by {self.by.value}"

    @property
    def details(self) -> tuple[str, ...]:
        if self.each is Each.WORD:
            return (f"{self.to.name}, come back: as it came",)
        order = {Each.RANK: "by rank", Each.NODE: "by node"}.get(self.each, "by key")
        return (f"{self.to.name}, come back: {order}{_times(self.weights)}, in float32, rounded",)

    @property
    def key_positions(self) -> tuple[int, ...]:
        return self.positions

    @property
    def touches(self) -> tuple[Touch, ...]:
        return (*reads(self.waiting, self.keys, self.weights), *makes(self.to))

    def arguments(self, transport: Transport) -> tuple[Field, ...]:
        return (*(() if self.weights is None else addresses("weights")), *addresses("output"), *KEYS)

    def constants(self, num_ranks: int, waves: int) -> tuple[Constant, ...]:
        return (("bool", "kWeighs", int(self.weights is not None)),)

    @property
    def adds_up(self) -> bool:
        return self.each is not Each.WORD

    def of_wave(self, wave: int) -> Self:
        return replace(self, waiting=replace(self.waiting, wave=wave))

    def carry(self, held: Ways) -> None:
        held[self.to].update([(*way, *_weighed(self.weights)) for way in held[self.waiting]])

    def call(self, number: int, wave: str) -> str:
        return f"commdsl::finish_{self.each.called}(here, peers{wave and f', {wave}'});"
