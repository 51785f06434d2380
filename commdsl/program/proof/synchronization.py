"""Turns a Plan into what is wrong with its flags and barriers; nothing, if every hazard is ordered and no flag is idle.

Assumes a Plan that `verify` passed. Shares nothing with the pass that derived the flags: it sees tables only. Does not
judge what the data is (that is proved on the schedule), nor the templates that print the flags.

The laws, in order; a later one is judged only if the earlier ones hold, so that one mistake gives one message:
every wait has a signal (C203), no ranks wait for each other in a circle (C201), accesses of one place by two ranks are
ordered by flags (C202 in a round, C205 across rounds and calls), by one rank's threads by block barriers (C206), a
tensor that may be read and written in place is (C208), what is read was written in that round (C207), every flag is
needed (C204). Where data carries its flags `checks.packets` says which flags that is, and has laws of its own (C209).

Rounds 0 .. rotation suffice: see `checks.clocks` for why what holds between them holds between all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints, Schedule
from commdsl.language.diagnostics import Diagnostic
from commdsl.program.moves import Moves
from commdsl.program.proof import messages, packets
from commdsl.program.proof.clocks import NONE, Pattern, Run, Timeline, clocks, pattern, row_begin, run, timeline
from commdsl.program.proof.hazards import SLICE, Hazards, Longs, Reads, accesses, clobbers, hazards


def synchronization(_schedule: Schedule, moves: Moves) -> Iterator[Diagnostic]:
    """The first broken law of the Plan; its operations name the schedule's statements themselves."""
    return prove(moves)


def prove(moves: Moves) -> Iterator[Diagnostic]:
    """The first broken law of the Plan, or nothing."""
    if not moves.protocol.carries_flags:
        yield from _prove(moves)
        return
    for law in (_waits_without_signal, packets.written_twice):
        broken = list(law(moves))
        yield from broken
        if broken:
            return
    brought = packets.deliveries(moves)
    with_flags = packets.flagged(moves, brought)
    broken = list(_prove(with_flags, judge_idle=False))
    yield from broken or packets.reuse(moves, brought, with_flags)


def _waits_without_signal(moves: Moves) -> Iterator[Diagnostic]:
    counts = moves.signals_per_round
    waiter = np.repeat(_actors(moves), np.diff(moves.ops.wait_begin))
    never = np.flatnonzero(moves.ops.wait_ordinal > counts[moves.ops.wait_peer, waiter])
    if len(never):
        yield messages.never_raised(moves, never)


def _prove(moves: Moves, *, judge_idle: bool = True) -> Iterator[Diagnostic]:
    """The laws of flags, on tables that say all of them."""
    never = list(_waits_without_signal(moves))
    if never:
        yield from never
        return
    events = timeline(moves)
    shape = pattern(events)
    order = run(events, shape)
    if order.stuck:
        yield messages.deadlock(moves, events, order)
        return
    findings = _read_data(moves, events, order)
    verdict = _judge(moves, events, order, shape, findings.far)
    if len(verdict.unordered):
        yield _worst_race(moves, events, findings.far, verdict)
        return
    laws = (findings.bare, _clobbered(moves, events), findings.undefined)
    broken = next((law for law in laws if law is not None), None)
    if broken is None and judge_idle:
        broken = _idle(moves, events, order, shape, findings.far, verdict.needed)
    if broken is not None:
        yield broken


def _actors(moves: Moves) -> Ints:
    return np.repeat(np.arange(moves.num_ranks, dtype=np.int32), np.diff(moves.ops.rank_begin))


@dataclass(frozen=True, eq=False)
class Findings:
    """What the accesses show: hazards between ranks, still to be judged, and the first faults found on the way."""

    far: Hazards
    bare: Diagnostic | None  # a hazard within a rank without a barrier
    undefined: Diagnostic | None


def _read_data(moves: Moves, events: Timeline, order: Run) -> Findings:
    barriers = _barriers(moves, events)
    far: list[Hazards] = []
    bare = undefined = None
    for found in accesses(moves, events, order):
        pairs, reads = hazards(found, moves)
        is_far = events.actor[pairs.first] != events.actor[pairs.second]
        far.append(_take(pairs, is_far))
        bare = bare or _bare(moves, events, _take(pairs, ~is_far), *barriers)
        undefined = undefined or _undefined(moves, reads)
    none = np.zeros(0, np.int32)
    return Findings(
        Hazards(
            np.concatenate((none, *(pairs.first for pairs in far))),
            np.concatenate((none, *(pairs.second for pairs in far))),
            np.concatenate((none.astype(np.bool_), *(pairs.across for pairs in far))),
        ),
        bare,
        undefined,
    )


def _take(pairs: Hazards, rows: NDArray[np.bool_]) -> Hazards:
    return Hazards(pairs.first[rows], pairs.second[rows], pairs.across[rows])


@dataclass(frozen=True, eq=False)
class Verdict:
    """Which hazards are not ordered, and which waits order a hazard that nothing else orders."""

    unordered: Longs  # rows of the hazards
    known: Ints  # beside each, what the second rank knows done of the first
    needed: NDArray[np.bool_]


def _judge(
    moves: Moves, events: Timeline, order: Run, shape: Pattern | None, pairs: Hazards, dropped: int = NONE
) -> Verdict:
    """Compares every hazard between two ranks with the clocks. `dropped`: see `clocks`."""
    needed = np.zeros(len(events.wait_op), np.bool_)
    unordered: list[Longs] = [np.zeros(0, np.int64)]
    knows: list[Ints] = [np.zeros(0, np.int32)]
    rounds = moves.rotation + 1
    begin = row_begin(events, rounds)
    if not len(pairs.first):
        return Verdict(unordered[0], knows[0], needed)
    for table in clocks(events, order, shape, rounds, dropped):
        width = table.known.shape[1]
        known, otherwise, teller = table.known.reshape(-1), table.otherwise.reshape(-1), table.teller.reshape(-1)
        for start in range(0, len(pairs.first), SLICE):
            pair = np.arange(start, min(start + SLICE, len(pairs.first)))
            first, second = pairs.first[pair], pairs.second[pair]
            a, b = events.actor[first], events.actor[second]
            if table.shifted:
                column = (a - b) % np.int32(events.num_ranks)
            else:
                column = a - np.int32(table.first_column)
                inside = np.flatnonzero((column >= 0) & (column < width))
                pair = pair[inside]
                first, second, a, b, column = (x[inside] for x in (first, second, a, b, column))
            row = events.joins[second].astype(np.int64)
            row += pairs.across[pair] * (moves.rotation * events.joins_per_round[b])
            if not table.shifted:
                row += begin[b]
            row *= width
            row += column
            done = events.local[first] + 1
            ordered = known[row] >= done
            unordered.append(pair[~ordered])
            knows.append(known[row[~ordered]])
            sole = np.flatnonzero(ordered & (otherwise[row] < done))
            by = teller[row[sole]]
            needed[by if shape is None else shape.wait[b[sole], by]] = True
    return Verdict(np.concatenate(unordered), np.concatenate(knows), needed)


def _worst_race(moves: Moves, events: Timeline, pairs: Hazards, verdict: Verdict) -> Diagnostic:
    """One counterexample: a race in a round before one across rounds, then what happens first."""
    found = verdict.unordered
    worst = np.lexsort((found, events.local[pairs.second[found]], pairs.across[found]))[0]
    return messages.race(moves, events, pairs, int(found[worst]), len(found), int(verdict.known[worst]))


def _bare(moves: Moves, events: Timeline, pairs: Hazards, before: Ints, per_round: Ints) -> Diagnostic | None:
    """Two operations of one rank without a block barrier between."""
    distance = before[pairs.second] - before[pairs.first]
    distance += pairs.across * (moves.rotation * per_round[events.actor[pairs.second]])
    bare = np.flatnonzero(distance <= 0)
    return messages.no_barrier(moves, pairs, bare) if len(bare) else None


def _barriers(moves: Moves, events: Timeline) -> tuple[Ints, Ints]:
    """Block barriers before the body of each operation, counted through the ranks; and those of a rank's round."""
    ops = moves.ops
    opening = (np.diff(ops.wait_begin) > 0) | (ops.barrier == 1)
    closing = np.diff(ops.signal_begin) > 0
    opened = np.cumsum(opening, dtype=np.int32)
    closed = np.concatenate(([0], np.cumsum(closing, dtype=np.int32))).astype(np.int32)
    total = np.concatenate(([0], opened)).astype(np.int32) + closed
    return opened + closed[:-1], np.diff(total[events.rank_begin])


def _clobbered(moves: Moves, events: Timeline) -> Diagnostic | None:
    pairs, buffer = clobbers(moves)
    before, _ = _barriers(moves, events)
    late = np.flatnonzero(before[pairs.second] <= before[pairs.first])
    return messages.clobbered(moves, pairs, late, moves.alias_safe[buffer[late[0]]]) if len(late) else None


def _undefined(moves: Moves, reads: Reads) -> Diagnostic | None:
    """Reads of nothing, or of another size class than was written."""
    ops = moves.ops
    missing = np.flatnonzero(reads.writer < 0)
    if len(missing):
        return messages.undefined(moves, reads, missing)
    other = (ops.cut[reads.op] != ops.cut[reads.writer]) | (ops.piece[reads.op] != ops.piece[reads.writer])
    return messages.other_size(moves, reads, np.flatnonzero(other)) if other.any() else None


def _idle(
    moves: Moves, events: Timeline, order: Run, shape: Pattern | None, pairs: Hazards, needed: NDArray[np.bool_]
) -> Diagnostic | None:
    """A signal nobody waits for, or a wait without which everything is still in order.

    A wait that alone orders some hazard is needed. The others are left out one by one and the Plan is judged again: a
    hazard of other ranks may still hang on it. With a Pattern, first on all ranks at once, which is cheap.
    """
    if not events.awaited.all():
        return messages.unheard(moves, int(np.argmin(events.awaited)))
    if shape is not None:
        idle = ~needed[shape.wait].any(axis=0)
        for place in np.flatnonzero(idle).tolist():
            if not len(_judge(moves, events, order, shape, pairs, place).unordered):
                return messages.idle_wait(moves, int(shape.wait[:, place].min()))
    for wait in np.flatnonzero(~needed).tolist():
        if not len(_judge(moves, events, order, None, pairs, wait).unordered):
            return messages.idle_wait(moves, wait)
    return None
