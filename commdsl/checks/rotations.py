"""C309, C313, C328: the yields hand over what a rotation promises: each piece once, together with its partners.

Assumes indices in bounds, no overlapping writes, no undefined reads. Counts for every rank how often each piece of each
rank was fresh at a yield, in the buffer itself or in the one it visits in. One message per contract, for the first rank
and piece that breaks it. Does not ask where pieces go between yields.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.conservation import contributors, listing
from commdsl.checks.locations import Located, Locations
from commdsl.ir.contracts import Contract, Rotation
from commdsl.ir.held import Handed, handed
from commdsl.ir.schedules import Yield
from commdsl.ir.words import at_bindings
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.records import dataclass
from commdsl.language.source import Span


def broken_rotations(located: Located) -> Iterator[Diagnostic]:
    """Runs the schedule once for all of them."""
    yield from _separate(located)
    counts = [_Counted(located, one, one.rotation) for one in located.schedule.contracts if one.rotation is not None]
    if not counts:
        return
    for now in handed(located.schedule):
        for counted in counts:
            counted.see(now)
    for counted in counts:
        yield from counted.judge()


def _separate(located: Located) -> Iterator[Diagnostic]:
    """Yield C328 for every yield that is handed two buffers which no rotation names together: nothing says that the
    pieces in them belong to one another. One message per pair of rotations.
    """
    schedule = located.schedule
    contracts = [(one, one.rotation) for one in schedule.contracts if one.rotation is not None]
    told: set[tuple[Span, Span]] = set()
    for step in (one.step for one in located.tasks()):
        if not isinstance(step, Yield):
            continue
        rotating = [buffer for buffer in step.reads if any(buffer in rotation.buffers for _, rotation in contracts)]
        for first, second in combinations(dict.fromkeys(rotating), 2):
            if any({first, second} <= rotation.buffers for _, rotation in contracts):
                continue
            names = [schedule.buffers[buffer].name for buffer in (first, second)]
            of = [next(one for one, rotation in contracts if buffer in rotation.buffers) for buffer in (first, second)]
            if (of[0].span, of[1].span) in told:
                continue
            told.add((of[0].span, of[1].span))
            label = Label(step.span, f"reads `{names[0]}` and `{names[1]}`{at_bindings(step.bindings)}")
            yield Diagnostic(
                "C328",
                "a yield is handed buffers of separate rotations",
                label,
                tuple(Label(one.span, f"`{name}` rotates by itself") for one, name in zip(of, names, strict=True)),
                notes=(f"nothing holds a chunk of `{names[0]}` to the same rank's chunk of `{names[1]}`",),
                help=_one_rotation(located, of),
            )


def _one_rotation(located: Located, contracts: list[Contract]) -> str:
    """Say how to write separate rotations as one, or how to keep them apart."""
    terms = list[str]()
    for rotation in (one.rotation for one in contracts):
        assert rotation is not None
        for source, dest in zip(rotation.sources, rotation.dests, strict=True):
            names = [located.schedule.buffers[buffer].name for buffer in (source, dest)]
            terms.append(names[0] if source == dest else " -> ".join(names))
    joint = ", ".join(dict.fromkeys(terms))
    return f"say that they rotate together, `ensure rotation({joint})`, or hand each to a yield of its own"


@dataclass(frozen=True, eq=False)
class Visiting:
    """What one yield hands over of the buffers of one place of a rotation, side by side.

    `pieces`: rank * chunks + chunk in its source, or -1 where it is none of it; `buffers`, `chunks`: where it lies.
    """

    pieces: Locations  # (num_ranks, n)
    fresh: NDArray[np.bool_]  # (num_ranks, n)
    buffers: Locations  # (n,)
    chunks: Locations  # (n,)


def visiting(located: Located, rotation: Rotation, number: int, now: Handed) -> Visiting:
    """As the rotation's buffer of that number is handed over."""
    source, dest = rotation.sources[number], rotation.dests[number]
    chosen = [at for at, buffer in enumerate(now.step.reads) if buffer in (source, dest)]
    none = np.zeros((located.schedule.num_ranks, 0), np.int64)
    origins = np.concatenate([none, *(now.origins[at] for at in chosen)], axis=1)
    fresh = np.concatenate([none.astype(np.bool_), *(now.fresh[at] for at in chosen)], axis=1)
    first, end = located.first_chunk[source], located.first_chunk[source + 1]
    owner, place = np.divmod(origins, located.chunks_per_rank)
    pieces = np.where((place >= first) & (place < end), owner * (end - first) + (place - first), -1)
    sizes = [located.schedule.buffers[now.step.reads[at]].num_chunks for at in chosen]
    buffers = np.repeat(np.array([now.step.reads[at] for at in chosen], np.int64), sizes)
    chunks = np.concatenate([none[0], *(np.arange(size) for size in sizes)])
    return Visiting(pieces, fresh, buffers, chunks)


class _Counted:
    """What the yields of a rotation have handed over so far."""

    def __init__(self, located: Located, contract: Contract, rotation: Rotation) -> None:
        self.located, self.contract, self.rotation = located, contract, rotation
        ranks, self.num_chunks = located.schedule.num_ranks, located.schedule.buffers[rotation.sources[0]].num_chunks
        self.counts = np.zeros((ranks, ranks * self.num_chunks), np.int16)
        self.fault: Diagnostic | None = None  # the first that shows at a yield alone

    def see(self, now: Handed) -> None:
        if self.fault is not None or not self.rotation.buffers & {*now.step.reads}:
            return
        places = [visiting(self.located, self.rotation, at, now) for at in range(len(self.rotation.sources))]
        if not any(one.fresh.any() for one in places):  # it hands over again what it has handed over
            places = [Visiting(one.pieces, np.ones_like(one.fresh), one.buffers, one.chunks) for one in places]
        leading = places[0]
        for number, other in enumerate(places[1:], 1):
            self.fault = self.fault or self._apart(now, leading, other, number)
        self.fault = self.fault or self._foreign(now, leading)
        ranks, columns = np.nonzero(leading.fresh & (leading.pieces >= 0))
        np.add.at(self.counts, (ranks, leading.pieces[ranks, columns]), 1)

    def _apart(self, now: Handed, leading: Visiting, other: Visiting, number: int) -> Diagnostic | None:
        """What is handed over beside the first buffer's pieces is of the same rank and chunk."""
        names = [self.located.schedule.buffers[self.rotation.sources[at]].name for at in (0, number)]
        if leading.pieces.shape != other.pieces.shape:
            sizes = [one.pieces.shape[1] for one in (leading, other)]
            what = f"hands over {sizes[0]} chunks of `{names[0]}` and {sizes[1]} of `{names[1]}`"
        else:
            wrong = (leading.fresh != other.fresh) | (leading.fresh & (leading.pieces != other.pieces))
            if not wrong.any():
                return None
            rank, column = (int(one[0]) for one in np.nonzero(wrong))
            pairs = (self._words(one, at, rank, column) for one, at in ((leading, 0), (other, number)))
            what = "hands rank {} {} with {}".format(rank, *pairs)
        return Diagnostic(
            "C313",
            "what rotates together is handed over together",
            Label(now.step.span, what + at_bindings(now.step.bindings)),
            (Label(self.contract.span, f"`{names[0]}` and `{names[1]}` rotate together"),),
            help="send both alike, in the same steps",
        )

    def _words(self, visiting: Visiting, number: int, rank: int, column: int) -> str:
        """`k[1]` of rank 2, as it is handed over there."""
        if not visiting.fresh[rank, column]:
            buffer = self.located.schedule.buffers[int(visiting.buffers[column])]
            return f"nothing new in `{buffer.name}`"
        piece = int(visiting.pieces[rank, column])
        name = self.located.schedule.buffers[self.rotation.sources[number]].name
        if piece < 0:
            return f"what is no chunk of `{name}`"
        source = self._location(number, piece)
        return f"{self.located.chunk_name(source)} of rank {piece // self.num_chunks}"

    def _location(self, number: int, piece: int) -> int:
        rank, chunk = divmod(piece, self.num_chunks)
        return int(self.located.whole(self.rotation.sources[number])[rank, chunk])

    def _foreign(self, now: Handed, leading: Visiting) -> Diagnostic | None:
        """Pieces only; and without a function, which has a table of them, each at its own place."""
        wrong = leading.fresh & (leading.pieces < 0)
        out_of_place = leading.fresh & (leading.pieces % self.num_chunks != leading.chunks)
        if now.step.name is None:
            wrong |= out_of_place
        if not wrong.any():
            return None
        rank, column = (int(one[0]) for one in np.nonzero(wrong))
        where = self.located.name(int(self.located.whole(int(leading.buffers[column]))[rank, leading.chunks[column]]))
        if leading.pieces[rank, column] >= 0:
            shown = self._words(leading, 0, rank, column) + ", out of its place"
        else:
            places = [at for at, buffer in enumerate(now.step.reads) if buffer == leading.buffers[column]]
            origin = int(now.origins[places[0]][rank, leading.chunks[column]])
            shown = "a combination of several chunks, or what a function made"
            if origin >= 0:
                shown = f"{self.located.chunk_name(origin)} of rank {self.located.split(origin)[0]}"
        return self._diagnostic(f"{where} shows {shown}", ())

    def judge(self) -> Iterator[Diagnostic]:
        if self.fault is not None:
            yield self.fault
            return
        visits = self.rotation.visits
        wanted = np.ones(1, np.int16) if visits is None else visits.reshape(self.counts.shape).astype(np.int16)
        wanted = np.broadcast_to(wanted, self.counts.shape)
        if np.array_equal(self.counts, wanted):
            return
        ranks = self.located.schedule.num_ranks
        by_chunk = (self.counts != wanted).reshape(ranks, ranks, self.num_chunks).transpose(0, 2, 1)
        rank, chunk, _ = (int(one[0]) for one in np.nonzero(by_chunk))
        yield self._miscounted(rank, chunk, *(one[rank].reshape(ranks, -1)[:, chunk] for one in (wanted, self.counts)))

    def _miscounted(self, rank: int, chunk: int, wanted: NDArray[np.int16], shown: NDArray[np.int16]) -> Diagnostic:
        """Of one rank and chunk: how often each rank's is to be shown there, and was."""
        located = self.located
        sources = located.whole(self.rotation.sources[0])[:, chunk]
        dest = located.schedule.buffers[self.rotation.dests[0]]
        where = f"`{dest.name}` on rank {rank}"
        if dest.num_chunks == self.num_chunks:
            where = located.name(int(located.whole(self.rotation.dests[0])[rank, chunk]))
        excluded, repeated, missing = ((shown > 0) & (wanted == 0), shown > np.maximum(wanted, 1), shown < wanted)
        if excluded.any():
            what = f"shows {listing(located, sources[excluded])}, which the condition leaves out"
        elif repeated.any():
            what = f"shows {listing(located, sources[repeated][:1])} more than once"
        else:
            what = f"never shows {listing(located, sources[missing])}"
        counts = np.zeros((2, located.size), np.int64)
        counts[:, sources] = wanted, shown
        expected, got = (contributors(located, one) for one in counts)
        return self._diagnostic(f"{where} {what}", (f"expected {expected}", f"got {got}"))

    def _diagnostic(self, what: str, notes: tuple[str, ...]) -> Diagnostic:
        help = "yield once before the first step and once after each of the others, P times in all"
        if self.rotation.visits is not None:
            help = "send a piece to a rank where the condition holds, and nowhere else"
        return Diagnostic(
            "C309",
            "a rotation shows every rank's chunk exactly once",
            Label(self.contract.span, f"over the yields {what}"),
            notes=notes,
            help=help,
        )
