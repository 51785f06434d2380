"""What a role does, one after another: phases that are proved by region, as a closed union.

Assumes nothing of a routing: which rows go where is data, which memory a lane may touch is not. Does not order
anything: `lower` puts phases in order, `proof` judges it, and the kernel's text is printed from it. `Moves`, the phase
that is proved by operation, has a module of its own, `touches` what each reads and writes, `wording` what it is called.

Who acts is a rank's first lane, all its lanes, or its caller on a stream. A phase waits, touches memory, then tells.
Words and counters that tell are what others wait for: nothing else orders two ranks.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

from commdsl.ir.dispatches import Often
from commdsl.language.records import dataclass
from commdsl.program.memory import Counters, Rows, Words


class Actor(Enum):
    """Which threads of a rank."""

    CALLER = "the stream"
    FIRST = "lane 0"
    LANES = "every lane"


class Ranks(Enum):
    """Which ranks, for one of them."""

    OWN = "its own rank"
    OTHERS = "all other ranks"
    ALL = "all ranks"


@dataclass(frozen=True, slots=True)
class Host:
    """What the caller does on its stream before the launch, or behind it: its tensors change, or are read."""

    name: str
    rows: tuple[Rows, ...]
    is_after: bool

    @property
    def by(self) -> Actor:
        return Actor.CALLER


@dataclass(frozen=True, slots=True)
class Tell:
    """Values to others, or that what came before is done."""

    by: Actor
    what: Words | Counters
    to: Ranks


@dataclass(frozen=True, slots=True)
class Meet:
    """Waits until all of them have told. A `spare` one is left out by lanes without rows to finish: by the first where
    rows wait on no rank.
    """

    by: Actor
    what: Words | Counters
    of: Ranks
    calls_back: int = 0
    is_spare: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """Values that need no wait, or none any more."""

    by: Actor
    what: Words | Counters


@dataclass(frozen=True, slots=True)
class Push:
    """Rows of the rank's tensors to where they wait on the ranks that a routing says: those of which copies are added
    up. `copied`: by tensor, whether a row may go to several ranks. `packed`: all rows wait, in one stretch a source
    rank; `reason` says why where the file has it otherwise.
    """

    given: tuple[Rows, ...]
    to: tuple[Rows, ...]
    copied: tuple[bool, ...]
    packed: bool
    reason: str = ""

    @property
    def by(self) -> Actor:
        return Actor.LANES


@dataclass(frozen=True, slots=True)
class PushStraight:
    """The other rows, to the places that the routing says. A lane leaves some of them to where it finishes what waited,
    so that they cross meanwhile.
    """

    given: tuple[Rows, ...]
    to: tuple[Rows, ...]

    @property
    def by(self) -> Actor:
        return Actor.LANES


@dataclass(frozen=True, slots=True)
class Finish:
    """Rows that waited: copied or summed to where they belong; rows that nobody sends: zero. In between, what the lane
    has `left` of the phase that sends rows straight to other ranks.
    """

    waiting: tuple[Rows, ...]
    to: tuple[Rows, ...]
    left: PushStraight | None = None
    is_spare: bool = True

    @property
    def by(self) -> Actor:
        return Actor.LANES


@dataclass(frozen=True, slots=True)
class Count:
    """Keys of the rank's rows, counted by every lane for itself, so that lanes have nothing to tell each other.

    `positions`: by key, its place among all keys, those of rank 0 first, then of rank 1, and so on.
    """

    keys: Rows
    positions: tuple[int, ...]

    @property
    def by(self) -> Actor:
        return Actor.LANES


@dataclass(frozen=True, slots=True)
class PushByKey:
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

    @property
    def by(self) -> Actor:
        return Actor.LANES

    @property
    def rows(self) -> tuple[Rows, ...]:
        """What arrives of the tensors, scales included."""
        return self.to[: len(self.given) + sum(stretch > 0 for stretch in self.stretches)]

    def at(self, name: str) -> int:
        """Which of `to` it is, -1 for none."""
        return next((at for at, rows in enumerate(self.to) if at >= len(self.rows) and rows.name == name), -1)


@dataclass(frozen=True, slots=True)
class PushAgain:
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

    @property
    def by(self) -> Actor:
        return Actor.LANES


@dataclass(frozen=True, slots=True)
class Forward:
    """Rows that crossed to this rank for its node, to the places of their keys on the node's ranks, with what arrives
    beside them: to segments of the rank's likes in other nodes, which nobody else writes there.
    """

    crossing: Rows
    to: tuple[Rows, ...]

    @property
    def by(self) -> Actor:
        return Actor.LANES


@dataclass(frozen=True, slots=True)
class FillByKey:
    """Rows that came once, from the place of their first key on the rank to those of its others, as `mates` say."""

    to: tuple[Rows, ...]
    origins: Rows
    mates: Rows

    @property
    def by(self) -> Actor:
        return Actor.LANES


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


@dataclass(frozen=True, slots=True)
class PushBack:
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

    @property
    def by(self) -> Actor:
        return Actor.LANES


@dataclass(frozen=True, slots=True)
class AddUp:
    """Sums of this node's ranks, for each row of this rank, by its `keys`, and of its likes in other nodes: in order of
    the ranks, in float32, rounded, to the place on the row's source that waits for this node.
    """

    crossing: Rows
    keys: Rows
    to: Rows

    @property
    def by(self) -> Actor:
        return Actor.LANES


@dataclass(frozen=True, slots=True)
class FinishBack:
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

    @property
    def by(self) -> Actor:
        return Actor.LANES


Routed: TypeAlias = (
    Host
    | Tell
    | Meet
    | Read
    | Push
    | PushStraight
    | Finish
    | Count
    | PushByKey
    | PushAgain
    | Forward
    | FillByKey
    | PushBack
    | AddUp
    | FinishBack
)
