"""Turns a Plan into what is wrong with its flags and barriers; nothing, if every hazard is ordered and no flag is idle.

Assumes a Plan that `verify` passed. Shares nothing with the pass that derived the flags: it sees tables only. Does not
judge what the data is (that is proved on the schedule), nor the templates that print the flags.

The laws, in order; a later one is judged only if the earlier ones hold, so that one mistake gives one message:
every wait has a signal (C203), no ranks wait for each other in a circle (C201), accesses of one place by two ranks are
ordered by flags (C202 in a round, C205 across rounds and calls), by one rank's threads by block barriers (C206), a
tensor that may be read and written in place is (C208), what is read was written in that round (C207), what a peer
writes to a tensor lies within its owner's part of the round (C212), every flag is needed (C204). Where data carries its
flags `packets` says which flags that is, and has laws of its own (C209).

What is in order is for `clocks` to find and for `order` to judge; here are the laws.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from commdsl.ir.schedules import Ints, Schedule
from commdsl.language.diagnostics import Diagnostic
from commdsl.program.actors import num_ranks_of
from commdsl.program.moves import Moves
from commdsl.program.proof import messages, packets
from commdsl.program.proof.clocks import Run
from commdsl.program.proof.flags import Flags
from commdsl.program.proof.hazards import Accesses, Reads, accesses, clobbers, hazards, places_per_rank
from commdsl.program.proof.order import Hazards, Verdict, idle_wait, judge
from commdsl.program.proof.rounds import Round
from commdsl.program.proof.timeline import Bits, Pattern, Timeline


def synchronization(_schedule: Schedule, found: Round) -> Iterator[Diagnostic]:
    """The first broken law of the Plan; its operations name the schedule's statements themselves."""
    return prove(found)


def prove(found: Round) -> Iterator[Diagnostic]:
    """The first broken law of the Plan, or nothing."""
    if not found.moves.carrier.has_flags_in_data:
        yield from _prove(found)
        return
    for law in (_waits_without_signal, packets.written_twice, packets.told_apart):
        broken = list(law(found.moves))
        yield from broken
        if broken:
            return
    broken = list(_prove(found, judge_idle=False))
    yield from broken or packets.reuse(found)


def _waits_without_signal(moves: Moves) -> Iterator[Diagnostic]:
    counts = moves.signals_per_round
    waiter = np.repeat(moves.ops.actor, np.diff(moves.ops.wait_begin))
    never = np.flatnonzero(moves.ops.wait_ordinal > counts[moves.ops.wait_peer, waiter])
    if len(never):
        yield messages.never_raised(moves, never)


def _prove(found: Round, *, judge_idle: bool = True) -> Iterator[Diagnostic]:
    """The laws of flags, on tables that say all of them."""
    moves = found.flagged
    never = list(_waits_without_signal(moves))
    if never:
        yield from never
        return
    events, shape, order = found.events, found.shape, found.order
    if order.stuck:
        yield messages.deadlock(moves, events, order)
        return
    findings = _read_data(moves, events, order)
    verdict = judge(events, order, shape, findings.far, moves.rotation)
    if len(verdict.unordered):
        yield _worst_race(moves, events, findings.far, verdict)
        return
    laws = (findings.bare, _clobbered(moves, events), findings.undefined, findings.outside)
    broken = next((law for law in laws if law is not None), None)
    if broken is None and judge_idle:
        broken = _idle(moves, events, order, shape, findings.far, verdict.needed)
    if broken is not None:
        yield broken


@dataclass(frozen=True, eq=False)
class Findings:
    """What the accesses show: hazards between ranks, still to be judged, and the first faults found on the way."""

    far: Hazards
    bare: Diagnostic | None  # a hazard within a rank without a barrier
    undefined: Diagnostic | None
    outside: Diagnostic | None  # a peer's write to a tensor that its owner has not opened, or does not take


def _read_data(moves: Moves, events: Timeline, order: Run) -> Findings:
    barriers = _barriers(moves)
    far: list[Hazards] = []
    bare = undefined = outside = None
    for found in accesses(moves, events, order):
        pairs, reads = hazards(found, moves)
        is_far = events.actor[pairs.first] != events.actor[pairs.second]
        far.append(pairs.take(is_far))
        bare = bare or _bare(moves, events, pairs.take(~is_far), *barriers)
        undefined = undefined or _undefined(moves, reads)
        outside = outside or _outside(moves, events, found)
    none = np.zeros(0, np.int32)
    return Findings(
        Hazards(
            np.concatenate((none, *(pairs.first for pairs in far))),
            np.concatenate((none, *(pairs.second for pairs in far))),
            np.concatenate((none.astype(np.bool_), *(pairs.across for pairs in far))),
        ),
        bare,
        undefined,
        outside,
    )


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


def _barriers(moves: Moves) -> tuple[Ints, Ints]:
    """Block barriers before the body of each operation, counted through the ranks; and those of a rank's round."""
    ops = moves.ops
    opening = (np.diff(ops.wait_begin) > 0) | (ops.barrier == 1)
    closing = np.diff(ops.signal_begin) > 0
    opened = np.cumsum(opening, dtype=np.int32)
    closed = np.concatenate(([0], np.cumsum(closing, dtype=np.int32))).astype(np.int32)
    total = np.concatenate(([0], opened)).astype(np.int32) + closed
    return opened + closed[:-1], np.diff(total[moves.ops.rank_begin])


def _clobbered(moves: Moves, events: Timeline) -> Diagnostic | None:
    pairs, buffer = clobbers(moves)
    before, _ = _barriers(moves)
    apart = events.actor[pairs.second] != events.actor[pairs.first]  # no barrier is between the two
    late = np.flatnonzero((before[pairs.second] <= before[pairs.first]) | apart)
    return messages.clobbered(moves, pairs, late, moves.alias_safe[buffer[late[0]]]) if len(late) else None


def _undefined(moves: Moves, reads: Reads) -> Diagnostic | None:
    """Reads of nothing, or of another size class than was written."""
    ops = moves.ops
    missing = np.flatnonzero(reads.writer < 0)
    if len(missing):
        return messages.undefined(moves, reads, missing)
    columns = (ops.cut, ops.piece, ops.length)
    other = np.logical_or.reduce([column[reads.op] != column[reads.writer] for column in columns])
    return messages.other_size(moves, reads, np.flatnonzero(other)) if other.any() else None


def _outside(moves: Moves, events: Timeline, found: Accesses) -> Diagnostic | None:
    """A tensor's chunk which, in a round, not its owner touches first or last. Accesses of a place are in order (C202):
    so all that others do to it lies between two operations of the owner, and within its launch.
    """
    owner, index = np.divmod(found.place, places_per_rank(moves))
    apart = found.place[1:] != found.place[:-1]
    is_end = np.concatenate(([True], apart)) | np.concatenate((apart, [True])) if len(owner) else np.zeros(0, np.bool_)
    far = events.actor[found.op] % num_ranks_of(moves) != owner
    late = np.flatnonzero(is_end & far & (index >= moves.num_cells))
    return messages.outside(moves, found, int(late[0])) if len(late) else None


def _idle(
    moves: Moves, events: Flags, order: Run, shape: Pattern | None, pairs: Hazards, needed: Bits
) -> Diagnostic | None:
    """A signal nobody waits for, or a wait without which everything is still in order."""
    if not events.awaited.all():
        return messages.unheard(moves, int(np.argmin(events.awaited)))
    wait = idle_wait(events, order, shape, pairs, moves.rotation, needed)
    return None if wait is None else messages.idle_wait(moves, wait)
