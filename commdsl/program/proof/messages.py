"""Turns what the proofs on a Plan found into diagnostics: the accesses, the ranks, the rounds, what is wrong.

Assumes each finding is real and shows the first of several. Does not look for faults; `synchronization` and `computes`
do.

A fault here is commdsl's, not the schedule's: the flags are derived. The statements are shown to make a report useful.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import Diagnostic, InternalError, Label
from commdsl.language.source import Span
from commdsl.program.actors import name_of
from commdsl.program.launches import Return, Visit
from commdsl.program.memory import Tensor
from commdsl.program.moves import Moves
from commdsl.program.proof.clocks import Run, chain
from commdsl.program.proof.flags import signal_owners
from commdsl.program.proof.hazards import Accesses, Reads, place_name, places_per_rank, touched
from commdsl.program.proof.order import Hazards, Longs
from commdsl.program.proof.timeline import Timeline
from commdsl.program.tasks import Product

HELP = "the compiler derives flags and barriers, so this is its fault: report it with this file"
HELP_TABLES = "the compiler makes the tables, so this is its fault: report it with this file"


def _rank(moves: Moves, op: int) -> int:
    return int(np.searchsorted(moves.ops.rank_begin, op, side="right")) - 1


def _where(moves: Moves, op: int) -> str:
    """`operation 3 of rank 1 (s = 2) [copy out]`."""
    rank = _rank(moves, op)
    origin = moves.origins[moves.ops.origin[op]]
    bindings = ", ".join(f"{name} = {value}" for name, value in origin.bindings)
    text = f"operation {op - int(moves.ops.rank_begin[rank])} of {name_of(moves, rank)}"
    return text + (f" ({bindings})" if bindings else "") + (f" [{origin.note}]" if origin.note else "")


def _label(moves: Moves, op: int, text: str) -> Label:
    return Label(moves.origins[moves.ops.origin[op]].span, text)


def _more(count: int, what: str) -> tuple[str, ...]:
    return (f"{count - 1} more {what}",) if count > 1 else ()


def _wait(moves: Moves, wait: int) -> tuple[int, int, int, int]:
    """Its operation, peer, ordinal and rounds back."""
    ops = moves.ops
    op = int(np.searchsorted(ops.wait_begin, wait, side="right")) - 1
    return op, int(ops.wait_peer[wait]), int(ops.wait_ordinal[wait]), int(ops.wait_rounds_back[wait])


def _round_name(back: int) -> str:
    return "" if back == 0 else f" of {_rounds(back)} before"


def _rounds(count: int) -> str:
    return f"{count} round{'s' if count > 1 else ''}"


def never_raised(moves: Moves, waits: Longs) -> Diagnostic:
    """C203."""
    op, peer, ordinal, back = _wait(moves, int(waits[0]))
    raised = int(moves.signals_per_round[peer, _rank(moves, op)])
    return Diagnostic(
        "C203",
        f"{name_of(moves, _rank(moves, op))} waits for a signal that {name_of(moves, peer)} never raises",
        _label(
            moves, op, f"{_where(moves, op)} waits for signal {ordinal}{_round_name(back)}; {raised} are raised a round"
        ),
        notes=_more(len(waits), "waits have no signal"),
        help=HELP,
    )


def deadlock(moves: Moves, events: Timeline, order: Run) -> Diagnostic:
    """C201: follows the first stuck rank to the rank it waits for, until the circle closes."""
    ops = moves.ops
    found = chain(events, order, int(np.argmax(order.done < events.lengths)))
    closes = int(events.wait_peer[found[-1][1]])
    circle = found[[int(events.actor[op]) for op, _ in found].index(closes) :]
    notes = []
    for op, wait in circle:
        peer = int(ops.wait_peer[wait])
        raiser = int(ops.rank_begin[peer] + events.wait_signal[wait])
        notes.append(f"{_where(moves, op)} waits for {_where(moves, raiser)}, which has not run")
    ranks = " -> ".join(str(_rank(moves, op)) for op, _ in circle)
    op, wait = circle[0]
    peer, signal = int(ops.wait_peer[wait]), int(ops.wait_ordinal[wait])
    return Diagnostic(
        "C201",
        f"{len(circle)} ranks wait for each other",
        _label(moves, op, f"{_where(moves, op)} waits for signal {signal} of {name_of(moves, peer)}"),
        tuple(_label(moves, op, f"{_where(moves, op)} waits too") for op, _ in circle[1:2]),
        notes=(f"the circle: {ranks} -> {_rank(moves, op)}", *notes[:8]),
        help=HELP,
    )


def race(moves: Moves, events: Timeline, pairs: Hazards, found: int, more: int, known: int) -> Diagnostic:
    """C202 in a round, C205 across rounds. `known`: operations of the first rank that the second knows done by then."""
    first, second, across = int(pairs.first[found]), int(pairs.second[found]), bool(pairs.across[found])
    a, b = int(events.actor[first]), int(events.actor[second])
    length = int(events.lengths[a])
    later = f"round {moves.rotation}" if across else "round 0"
    place, first_verb, second_verb = _conflict(moves, first, second)
    if known:
        last = _where(moves, int(moves.ops.rank_begin[a]) + (known - 1) % length)
        done = f"{last} in round {(known - 1) // length}"
        knows = f"the last that {name_of(moves, b)} then knows done of {name_of(moves, a)} is {done}"
    else:
        knows = f"{name_of(moves, b)} then knows nothing done of {name_of(moves, a)}"
    return Diagnostic(
        "C205" if across else "C202",
        f"two ranks touch {place} in no order" + (", in two calls" if across else ""),
        _label(moves, second, f"{_where(moves, second)} {second_verb} it in {later}"),
        (_label(moves, first, f"{_where(moves, first)} {first_verb} it in round 0"),),
        notes=(
            f"no chain of flags leads from operation {int(events.local[first])} of {name_of(moves, a)}"
            f" to operation {int(events.local[second])} of {name_of(moves, b)}: {knows}",
            *_more(more, "pairs are not ordered"),
        ),
        help=HELP,
    )


def _conflict(moves: Moves, first: int, second: int) -> tuple[str, str, str]:
    """The place where two operations conflict, and what each does to it."""
    (dests, sources), (other_dests, other_sources) = touched(moves, first), touched(moves, second)
    for place in sorted(dests & other_dests):
        return place_name(moves, place), "writes", "writes"
    for place in sorted(dests & other_sources):
        return place_name(moves, place), "writes", "reads"
    for place in sorted(sources & other_dests):
        return place_name(moves, place), "reads", "writes"
    raise InternalError(f"operations {first} and {second} do not conflict")


def no_barrier(moves: Moves, pairs: Hazards, found: Longs) -> Diagnostic:
    """C206."""
    first, second, across = (int(x[found[0]]) for x in (pairs.first, pairs.second, pairs.across))
    place, first_verb, second_verb = _conflict(moves, first, second)
    return Diagnostic(
        "C206",
        f"threads of one block race on {place}",
        _label(moves, second, f"{_where(moves, second)} {second_verb} it in round {across * moves.rotation}"),
        (_label(moves, first, f"{_where(moves, first)} {first_verb} it in round 0"),),
        notes=("no block barrier lies between the two",),
        help=HELP,
    )


def clobbered(moves: Moves, pairs: Hazards, found: Longs, name: str) -> Diagnostic:
    """C208."""
    first, second = int(pairs.first[found[0]]), int(pairs.second[found[0]])
    return Diagnostic(
        "C208",
        f"`{name}` is overwritten where it may still be read",
        _label(moves, second, f"{_where(moves, second)} writes over a chunk of it"),
        (_label(moves, first, f"{_where(moves, first)} reads the chunk as it came in"),),
        notes=(
            f"the Plan says that `{name}` may be read and written in one memory",
            *_more(len(found), "reads are not safe"),
        ),
        help=HELP,
    )


def undefined(moves: Moves, reads: Reads, found: Longs) -> Diagnostic:
    """C207, nothing written."""
    op = int(reads.op[found[0]])
    return Diagnostic(
        "C207",
        f"{place_name(moves, int(reads.place[found[0]]))} is read before it is written",
        _label(moves, op, f"{_where(moves, op)} reads it, no operation of the round writes it before"),
        help=HELP,
    )


def other_size(moves: Moves, reads: Reads, found: Longs) -> Diagnostic:
    """C207, another size class."""
    ops = moves.ops
    op, writer = int(reads.op[found[0]]), int(reads.writer[found[0]])
    return Diagnostic(
        "C207",
        f"{place_name(moves, int(reads.place[found[0]]))} is read in another size than written",
        _label(moves, op, f"{_where(moves, op)} reads piece {int(ops.piece[op])} of {int(ops.cut[op])}"),
        (
            _label(
                moves, writer, f"{_where(moves, writer)} wrote piece {int(ops.piece[writer])} of {int(ops.cut[writer])}"
            ),
        ),
        help=HELP,
    )


def outside(moves: Moves, found: Accesses, at: int) -> Diagnostic:
    """C212."""
    op, place = int(found.op[at]), int(found.place[at])
    is_first = at == 0 or int(found.place[at - 1]) != place
    owner = name_of(moves, place // places_per_rank(moves))
    what = "before" if is_first else "after"
    return Diagnostic(
        "C212",
        f"{place_name(moves, place)} is written when {owner} may be outside",
        _label(moves, op, f"{_where(moves, op)} writes it {what} all that {owner} does to it in the round"),
        notes=(f"so nothing says that the launch of {owner} {'has begun' if is_first else 'is not over'} by then",),
        help=HELP,
    )


def unheard(moves: Moves, place: int) -> Diagnostic:
    """C204, a signal."""
    signals, begin = signal_owners(moves)
    op = int(np.searchsorted(moves.ops.signal_begin, place, side="right")) - 1
    rank, peer = _rank(moves, op), int(moves.ops.signal_peer[place])
    pair = rank * moves.num_ranks + peer
    ordinal = int(np.flatnonzero(signals[begin[pair] : begin[pair + 1]] == place)[0]) + 1
    return Diagnostic(
        "C204",
        "a signal is raised that nobody waits for",
        _label(
            moves,
            op,
            f"{_where(moves, op)} raises signal {ordinal} to {name_of(moves, peer)}, which has no wait for it",
        ),
        help=HELP,
    )


def idle_wait(moves: Moves, wait: int) -> Diagnostic:
    """C204, a wait."""
    op, peer, ordinal, back = _wait(moves, wait)
    return Diagnostic(
        "C204",
        "a wait orders nothing that is not in order without it",
        _label(
            moves, op, f"{_where(moves, op)} waits for signal {ordinal} of {name_of(moves, peer)}{_round_name(back)}"
        ),
        help=HELP,
    )


def written_twice(moves: Moves, first: int, second: int) -> Diagnostic:
    """C209, in a round."""
    cell = f"cell {int(moves.ops.dest_index[second])} of rank {int(moves.ops.dest_rank[second])}"
    return Diagnostic(
        "C209",
        f"{cell} is written twice in a round, and its flag cannot tell which data it holds",
        _label(moves, second, f"{_where(moves, second)} writes it"),
        (_label(moves, first, f"{_where(moves, first)} does, too"),),
        help=HELP,
    )


def mistaken(moves: Moves, write: int, numbers: int) -> Diagnostic:
    """C209, of the word that carries the call."""
    return Diagnostic(
        "C209",
        f"a cell comes round again after {moves.rotation} rounds, whose first words look alike",
        _label(moves, write, f"{_where(moves, write)} writes it"),
        notes=(f"beside the digest of a call there is room for {numbers} numbers of rounds",),
        help=HELP,
    )


def overwritten(moves: Moves, write: int, read: int, count: int) -> Diagnostic:
    """C209, across rounds."""
    writer, reader = _rank(moves, write), _rank(moves, read)
    if moves.rotation < 2:
        why = f"what rank {writer} hears of rank {reader} in a round tells it that rounds before are over, not this one"
    else:
        why = f"by the end of a round rank {writer} has heard nothing of rank {reader}'s part in it"
    return Diagnostic(
        "C209",
        f"rank {writer} may overwrite what rank {reader} has not read {_rounds(moves.rotation)} before",
        _label(moves, write, f"{_where(moves, write)} writes a cell of rank {reader} in round {moves.rotation}"),
        (_label(moves, read, f"{_where(moves, read)} reads what rank {writer} wrote in round 0"),),
        notes=(f"{why}, and it waits for no credit", *_more(count, "pairs of ranks are like this")),
        help=HELP,
    )


@dataclass(frozen=True, slots=True)
class WrongData:
    """A chunk that the caller gets back, what it should hold and holds, and where that comes from."""

    tensor: str
    rank: int
    chunk: int
    expected: str
    got: str
    inner: tuple[str, str] | None  # the one part in which they differ, expected and got
    count: int  # of chunks that are wrong
    op: int | None  # that stores it last
    first: tuple[int, str] | None  # the first operation on the way that makes what is nowhere meant, and what it makes


def wrong_data(schedule: Schedule, moves: Moves, found: WrongData) -> Diagnostic:
    """C210."""
    if found.op is None:
        label = Label(schedule.span, "no operation stores to it")
    else:
        label = _label(moves, found.op, f"{_where(moves, found.op)} stores it")
    origins = [] if found.first is None else [found.first]
    return Diagnostic(
        "C210",
        f"chunk {found.chunk} of `{found.tensor}` on rank {found.rank} is not what the schedule says",
        label,
        tuple(_label(moves, op, f"wrong since {_where(moves, op)}, which makes {made}") for op, made in origins),
        notes=(
            f"expected {found.expected}",
            f"got {found.got}",
            *([] if found.inner is None else [f"they differ in {found.inner[1]}, expected {found.inner[0]}"]),
            *([f"{found.count} chunks are wrong in all"] if found.count > 1 else []),
        ),
        help=HELP_TABLES,
    )


def other_tensors(schedule: Schedule, moves: Moves, unlike: Collection[Tensor]) -> Diagnostic:
    """C210, before any data."""
    first = min(unlike, key=lambda tensor: (tensor.name, tensor.access.value, tensor.blocks, tensor.cut))
    shape = f"{first.blocks} x {first.cut} chunks that are {'read' if first.access.value == 'read' else 'written'}"
    where = "the Plan alone" if first in moves.tensors else "the schedule alone"
    return Diagnostic(
        "C210",
        f"the tensors of the Plan of `{moves.name}` are not those of the schedule",
        Label(schedule.span, f"{where} has `{first.name}` of {shape}"),
        help=HELP_TABLES,
    )


def wrong_visit(span: Span, name: str, at: tuple[int, int]) -> Diagnostic:
    """C210, of what the caller is handed at a yield, or gets back from launches."""
    rank, chunk = at
    return Diagnostic(
        "C210",
        f"chunk {chunk} of `{name}` on rank {rank} is not what the schedule says",
        Label(span, "when the caller's function has it"),
        help=HELP_TABLES,
    )


def other_unit(schedule: Schedule, name: str) -> Diagnostic:
    """C210, of what a copy of a buffer is made of."""
    what = f"`{name}` is of another type or length in the Plan"
    return Diagnostic("C210", what, Label(schedule.span, "than the schedule says"), help=HELP_TABLES)


def other_visit(schedule: Schedule, phase: Visit | Product | Return) -> Diagnostic:
    """C210, before any data."""
    what = "returns other buffers, or too soon" if isinstance(phase, Return) else "hands over other buffers"
    return Diagnostic(
        "C210",
        f"the visits of the Plan of `{schedule.name}` are not the yields of the schedule",
        Label(schedule.span if isinstance(phase, Return) else phase.step.span, f"the Plan {what}"),
        help=HELP_TABLES,
    )
