"""The carriers: how data and its flags travel, one record each; `protocol` of a `tune` block names one.

Every stage reads the capabilities of a record, and none compares names, so a new carrier is a record here and the
device code that its `wire` names. Assumes that a record says what its device code does. Does not choose a carrier:
texts, tables and stated defaults do.
"""

from __future__ import annotations

from collections.abc import Callable

from commdsl.language.records import dataclass

KB, MB = 1 << 10, 1 << 20
ANY = 1 << 62


@dataclass(frozen=True)
class Grid:
    """Settings that `commdsl tune` measures first, in every combination; tiles and sizes in bytes."""

    lanes: tuple[int | None, ...]  # None: the setting has no effect
    threads: tuple[int | None, ...]
    tiles: tuple[int, ...]
    least: int  # sizes outside of which the carrier has lost by far
    most: int
    ladder: tuple[int, ...] = tuple(KB << power for power in range(17))  # tiles that a refinement steps along


@dataclass(frozen=True)
class Carrier:
    """A way to move tiles between ranks, and its limits. Bytes of payload and of words are those of a cell."""

    name: str
    wire: str  # its struct in templates/include/commdsl
    threads: int  # of a lane, unless tuned
    tile_bytes: int  # of data, unless tuned
    payload_bytes: int = 16  # data in a word
    word_bytes: int = 16  # a word with its flag, if it carries one
    thread_bytes: int = 0  # of a word's payload, the part that one of the threads storing it has; 0: no flags in data
    runs_on_sms: bool = True  # False: the host issues copies to the copy engine, and a kernel raises and awaits flags
    combines: bool = True  # it can reduce, not only copy
    crosses_nodes: bool = True
    goes_by_nvshmem: bool = False  # it puts whole tiles, each with one flag behind it
    rounds: bool = False  # it can convert the element type of the payload
    adds_to_sums: bool = False  # it can add to sums in float32 of another type
    waits_for_tasks: bool = False  # its lanes can wait for tiles that are computed concurrently
    length_axes: int = 2  # unequal blocks: 0 none, 1 with lengths that all ranks know, 2 with heads that say them
    stages_in_shared: bool = False  # data goes through shared memory, by bulk copies
    majors: tuple[int, ...] = ()  # major compute capabilities of the GPUs that have it; none: all GPUs
    grid: Grid | None = None  # None: `commdsl tune` does not measure it

    @property
    def has_flags_in_data(self) -> bool:
        """Whether each word carries its flag: no barrier and no release, every cell written once a round."""
        return self.word_bytes > self.payload_bytes

    @property
    def is_dense(self) -> bool:
        """Whether nearly all bytes that it stores are data."""
        return self.payload_bytes > 3 / 4 * self.word_bytes

    @property
    def streams(self) -> bool:
        """Whether SMs move whole tiles, so that a long pipeline stores no flag but one a tile."""
        return self.runs_on_sms and not self.has_flags_in_data

    def runs_on(self, major: int) -> bool:
        """Whether GPUs of this major compute capability have it."""
        return not self.majors or major in self.majors


PACKET = Carrier(  # two single-copy atomic halves of 4 bytes of data and 4 of flag
    "packet", "Packet", 512, 4 * KB, payload_bytes=8, word_bytes=16, thread_bytes=8, length_axes=1,
    grid=Grid((128,), (256, 512), (4 * KB,), 0, 256 * KB),
)  # fmt: skip

LINE = Carrier(  # assumes that NVLink keeps a warp's store of a line of 128 bytes whole
    "line", "Line", 512, 7680, payload_bytes=120, word_bytes=128, thread_bytes=15, length_axes=1, crosses_nodes=False,
    grid=Grid((64, 132), (256, 640), (3840, 9600), 0, 64 * MB, (1920, 3840, 4800, 7680, 9600, 15360, 30720, 61440)),
)  # fmt: skip

BULK = Carrier(  # 16-byte vectors, then one release flag
    "bulk", "Bulk", 256, 128 * KB, goes_by_nvshmem=True, rounds=True, adds_to_sums=True, waits_for_tasks=True,
    grid=Grid((128,), (256,), (32 * KB, 128 * KB), MB, ANY),
)  # fmt: skip

BULK_COPY_MAJORS = (9, 10)
"""Major compute capabilities with bulk copies and enough shared memory for their stages; 12 has less."""

TMA = Carrier("tma", "Tma", 256, 128 * KB, stages_in_shared=True, majors=BULK_COPY_MAJORS)  # few SMs copy fast

ENGINE = Carrier(  # a copy pays its start, and a round its flags: large tiles
    "engine", "Bulk", 32, 32 * MB, runs_on_sms=False, combines=False, crosses_nodes=False, length_axes=0,
    grid=Grid((None,), (None,), (8 * MB, 32 * MB), 64 * MB, ANY),
)  # fmt: skip

CARRIERS = (PACKET, LINE, BULK, TMA, ENGINE)
"""All of them, those for the smallest messages first; adding one here is all that the stages need."""

DEFAULT = BULK
"""The carrier where `tune` names none: it runs everywhere, between any ranks, and does whatever carriers can."""

ANOTHER = f"tune another protocol, as `{DEFAULT.name}`"
"""How to mend a text that asks more of a carrier than it can."""


def named(name: str) -> Carrier:
    """Return the carrier of that name. Raises KeyError where there is none."""
    return {one.name: one for one in CARRIERS}[name]


def names(can: Callable[[Carrier], bool] = lambda _: True) -> tuple[str, ...]:
    """Return the names of the carriers that can do something; default: of all."""
    return tuple(one.name for one in CARRIERS if can(one))


def measured() -> tuple[Carrier, ...]:
    """Return the carriers that `commdsl tune` measures on GPUs."""
    return tuple(one for one in CARRIERS if one.grid is not None)
