"""C640 to C642: the protocol of a dispatch lets no accesses race and no rank wait for ever, and has no idle wait.

Assumes the protocol as data (`dispatch_protocol`). Does not know tables: a hazard between rows is one between the
regions that they may be in, so the proof holds for every table that obeys the laws of routes.

Three calls are unrolled, joined only by each rank's stream. Counters only grow and have one writer each, so one greedy
run decides whether all calls end, and one pass of vector clocks what is ordered. Exact for every number of lanes: what
lanes other than the first learn is not handed on, and what they learn in a spare step is forgotten after it, so no
order leads through a lane that another call may lack, or that has nothing to finish. Exact for every number of ranks: a
hazard is between two ranks at the memory of a third, and the flags among some ranks are the same whoever else is there;
so of more than MOST ranks MOST are proved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.source import Span
from commdsl.program.memory import Rows, words_for
from commdsl.program.phases import Ranks, Touch, is_same_region
from commdsl.program.plan import Plan
from commdsl.program.proof.events import Bits, Events, Step, events, steps

CALLS = 3
MOST = 8
HELP = "the protocol of a dispatch is commdsl's, so this is its fault: report it with this file"

Clocks = NDArray[np.int16]
"""How many of its events, counted through the calls, each thread has done: as far as each other thread knows."""


def order_of_regions(plan: Plan) -> Iterator[Diagnostic]:
    """The first broken law of the phases of a Plan, on its ranks."""
    yield from prove(events(steps(plan), min(plan.num_ranks, MOST)), plan.span)


def prove(found: Events, span: Span) -> Iterator[Diagnostic]:
    """The first broken law: C641, C640, C642."""
    order = run(found)
    if order.is_stuck:
        yield _stuck(found, order, span)
        return
    pairs = hazards(found)
    race = first_race(found, order, pairs)
    if race is not None:
        yield _race(found, order, race, span)
        return
    for step, waiter, awaited in idle_waits(found, order, pairs):
        yield _idle(found, step, waiter, awaited, span)
        return


# --- the run, and what is known in it ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Order:
    """The greedy run of three calls."""

    position: Ints  # (T,): events done
    num_events: int
    known: Clocks  # (calls, S, T, T): what a thread knows of another when it has waited in a step
    otherwise: Clocks  # (S, T, T): the same in the last call, but for what the other thread tells itself in this step

    @property
    def is_stuck(self) -> bool:
        return bool((self.position < self.num_events).any())


def run(found: Events) -> Order:
    """Every thread goes on until it waits for what is not done, or never told."""
    steps, threads = found.acts.shape
    position = np.zeros(threads, np.int32)
    clock: Clocks = np.zeros((threads, threads), np.int16)
    otherwise: Clocks = np.zeros(found.waits.shape, np.int16)
    known, told = (np.zeros((CALLS, *found.waits.shape), np.int16) for _ in range(2))
    keeps = ~(np.eye(threads, dtype=np.bool_) | (found.role <= 0)[:, None])
    alone = np.eye(threads, dtype=np.bool_)
    lent = np.zeros(threads, np.bool_)  # threads that know more than they may keep
    kept = clock.copy()
    moves = True
    while moves:
        moves = False
        for at in np.unique(position[position < CALLS * steps]).tolist():
            call, step = divmod(at, steps)
            here = _ready(found, position, at)
            spare = here[found.steps[step].spare & (found.role[here] > 0)]
            kept[spare[~lent[spare]]] = clock[spare[~lent[spare]]]
            back = here[lent[here] & found.acts[step][here] & (not found.steps[step].spare)]
            clock[back] = kept[back]
            lent[spare], lent[back] = True, False
            since = call - _calls_back(found.steps[step])
            if since >= 0 and found.waits[step].any():
                waits, tells = found.waits[step][here], told[since, found.awaited[step]]
                if call == CALLS - 1:
                    otherwise[step, here] = np.maximum(clock[here], _joined(waits, np.where(alone, 0, tells)))
                clock[here] = np.maximum(clock[here], _joined(waits, tells))
            clock[here, here] = at + 1
            known[call, step, here] = clock[here]
            told[call, step, here] = np.where(keeps[here], 0, clock[here])
            position[here] += 1
            moves |= len(here) > 0
    return Order(position, CALLS * steps, known, otherwise)


def _ready(found: Events, position: Ints, at: int) -> NDArray[np.intp]:
    """The threads that have come to event `at` and need not wait there any more."""
    call, step = divmod(at, len(found.steps))
    here = np.flatnonzero(position == at)
    source = int(found.awaited[step])
    since = call - _calls_back(found.steps[step])
    if since < 0 or not found.waits[step].any():
        return here
    late = position <= since * len(found.steps) + source
    silent = ~found.tells[source][:, found.rank[here]].T
    ready: NDArray[np.intp] = here[~(found.waits[step][here] & (late | silent)).any(axis=1)]
    return ready


def _calls_back(step: Step) -> int:
    return 0 if step.wait is None else step.wait.calls_back


def _joined(waits: Bits, told: Clocks) -> Clocks:
    """(n, T): what n threads learn, each from the threads it waits for."""
    learned = np.zeros((len(waits), len(told)), np.int16)
    for row, mask in enumerate(waits):
        learned[row] = told[mask].max(axis=0, initial=0)
    return learned


# --- hazards ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Hazard:
    """Accesses of two steps, in that order: by which threads they meet, and whether they do within a call."""

    first: int  # step
    second: int
    accesses: tuple[Touch, Touch]
    within: bool  # the first has its turn before the second; otherwise they meet only if the second's call is later
    meets: Bits  # (T, T): thread of the first, thread of the second


def hazards(found: Events) -> tuple[Hazard, ...]:
    all_accesses = [(at, access) for at, step in enumerate(found.steps) for access in step.touches]
    pairs = []
    for (i, one), (j, other) in product(all_accesses, repeat=2):
        if is_same_region(one.memory, other.memory) and (one.writes or other.writes):
            meets = _meets(found, one, other) & found.acts[i][:, None] & found.acts[j]
            if meets.any():
                pairs.append(Hazard(i, j, (one, other), one.turn < other.turn, meets))
    return tuple(pairs)


def _meets(found: Events, one: Touch, other: Touch) -> Bits:
    """Whether two threads touch one segment of one region."""
    same: Bits = found.rank[:, None] == found.rank
    match one.on, other.on:
        case Ranks.OWN, Ranks.OWN:
            return same
        case (Ranks.OWN, Ranks.OTHERS) | (Ranks.OTHERS, Ranks.OWN):
            return ~same
        case (Ranks.OWN, _) | (_, Ranks.OWN):
            return np.ones_like(same)
    if isinstance(one.memory, Rows) and Ranks.OTHERS not in (one.on, other.on):
        return np.ones_like(same)
    return same


@dataclass(frozen=True, slots=True)
class Race:
    hazard: Hazard
    calls: tuple[int, int]
    threads: tuple[int, int]
    known: int  # events of the first thread that the second knows done


def first_race(found: Events, order: Order, pairs: tuple[Hazard, ...]) -> Race | None:
    """Two accesses of which the first need not be over before the second: rather of two ranks, then the earliest."""
    far = found.rank[:, None] != found.rank
    steps = len(found.steps)
    ends = np.arange(CALLS) * steps + 1  # events done once step 0 of a call is
    worst: tuple[tuple[int, ...], Race] | None = None
    for pair in pairs:
        known = order.known[:, pair.second].swapaxes(1, 2)  # by call, first thread, second thread
        done = known[None] >= (ends + pair.first)[:, None, None, None]
        calls = np.less_equal if pair.within else np.less
        judged = calls.outer(np.arange(CALLS), np.arange(CALLS))
        wrong = pair.meets & ~done & judged[:, :, None, None]
        if wrong.any():
            is_far = bool((wrong & far).any())
            first_call, second_call, first, second = np.argwhere(wrong & far if is_far else wrong)[0].tolist()
            key = (not is_far, second_call, pair.second, first_call, pair.first)
            if worst is None or key < worst[0]:
                seen = int(known[second_call, first, second])
                worst = key, Race(pair, (first_call, second_call), (first, second), seen)
    return None if worst is None else worst[1]


# --- waits that order nothing -----------------------------------------------------------------------------------------


def idle_waits(found: Events, order: Order, pairs: tuple[Hazard, ...]) -> Iterator[tuple[int, int, int]]:
    """Step, waiter, awaited of each wait without which everything is ordered all the same.

    Most waits are proved needed by an access of the awaited thread that the waiter, with its own next accesses, would
    meet unordered; what has no such witness may still be needed by a third thread, and is left out to see.
    """
    for step, wait in enumerate(found.waits):
        if found.steps[step].given or not wait.any():
            continue
        for waiter, awaited in np.argwhere(wait & ~_witnessed(found, order, pairs, step)).tolist():
            waits = found.waits.copy()
            waits[step, waiter, awaited] = False
            without = replace(found, waits=waits)
            again = run(without)
            if not again.is_stuck and first_race(without, again, pairs) is None:
                yield step, waiter, awaited


def _witnessed(found: Events, order: Order, pairs: tuple[Hazard, ...], step: int) -> Bits:
    """(T, T): the waits of a step that order a hazard which, up to the waiter's next wait, nothing else orders."""
    steps = len(found.steps)
    needed: Bits = np.zeros_like(found.waits[step])
    later = [at for at in range(step + 1, steps) if found.waits[at].any()]
    otherwise = order.otherwise[step].T
    known = order.known[CALLS - 1, step].T
    for pair in pairs:
        if step <= pair.second < min([*later, steps]):
            last = CALLS - 1 if pair.within else CALLS - 2
            done = last * steps + pair.first + 1
            needed |= (pair.meets & (otherwise < done) & (done <= known)).T
    return needed


# --- in words ---------------------------------------------------------------------------------------------------------


def _thread(found: Events, thread: int) -> str:
    rank, role = int(found.rank[thread]), int(found.role[thread])
    return f"the stream of rank {rank}" if role < 0 else f"lane {role} of rank {rank}"


def _event(found: Events, thread: int, count: int) -> str:
    call, step = divmod(count, len(found.steps))
    return f"`{found.steps[step].name}` of {_thread(found, thread)} in call {call}"


def _owner(found: Events, race: Race) -> int:
    """A rank at whose memory the two meet."""
    one, other = race.hazard.accesses
    first, second = (int(found.rank[thread]) for thread in race.threads)
    if one.on is Ranks.OWN:
        return first
    if other.on is Ranks.OWN or Ranks.OTHERS not in (one.on, other.on):
        return second
    return next(rank for rank in range(found.num_ranks) if rank not in (first, second))


def _race(found: Events, order: Order, race: Race, span: Span) -> Diagnostic:
    """C640."""
    steps = len(found.steps)
    (first, second), (first_call, second_call) = race.threads, race.calls
    one, other = race.hazard.accesses
    ranks = sorted({int(found.rank[thread]) for thread in race.threads})
    who = f"ranks {ranks[0]} and {ranks[1]}" if len(ranks) > 1 else f"threads of rank {ranks[0]}"
    names = [
        _event(found, thread, call * steps + step)
        for thread, call, step in (
            (first, first_call, race.hazard.first),
            (second, second_call, race.hazard.second),
        )
    ]
    verbs = ["writes" if access.writes else "reads" for access in (one, other)]
    place = f"{words_for(other.memory)} of rank {_owner(found, race)}"
    back = order.known[first_call, race.hazard.first, first, second] > second_call * steps + race.hazard.second
    how = "in the wrong order" if back or first == second else "in no order"
    knows = f"{_thread(found, second)} then knows nothing done of {_thread(found, first)}"
    if race.known:
        last = _event(found, first, race.known - 1)
        knows = f"the last that {_thread(found, second)} then knows done of {_thread(found, first)} is {last}"
    return Diagnostic(
        "C640",
        f"{who} touch {place} {how}",
        Label(span, f"{names[1]} {verbs[1]} there"),
        (Label(span, f"{names[0]} {verbs[0]} there, and has to be over by then"),),
        notes=(knows,),
        help=HELP,
    )


def _stuck(found: Events, order: Order, span: Span) -> Diagnostic:
    """C641: from a stuck thread to the one it waits for, until the circle closes or one does not tell."""
    steps = len(found.steps)
    stuck = np.flatnonzero(order.position < order.num_events)
    at_flags = [one for one in stuck if not found.steps[int(order.position[one]) % steps].given]
    thread = int((at_flags or stuck)[0])
    chain: list[int] = []
    notes: list[str] = []
    while thread not in chain:
        chain.append(thread)
        at = int(order.position[thread])
        call, step = divmod(at, steps)
        source = int(found.awaited[step])
        event = (call - _calls_back(found.steps[step])) * steps + source
        tells = found.tells[source, :, found.rank[thread]]
        missing = found.waits[step, thread] & ((order.position <= event) | ~tells)
        silent = np.flatnonzero(missing & ~tells)
        peer = int(silent[0]) if len(silent) else int(np.argmax(missing))
        waits = f"{_event(found, thread, at)} waits for {_event(found, peer, event)}"
        if len(silent):
            notes.append(f"{waits}, which does not tell it")
            break
        notes.append(f"{waits}, which has not run" + (", and so in a circle" if peer in chain else ""))
        thread = peer
    return Diagnostic(
        "C641",
        f"{_thread(found, chain[0])} waits for ever",
        Label(span, notes[0]),
        notes=tuple(notes[1:]),
        help=HELP,
    )


def _idle(found: Events, step: int, waiter: int, awaited: int, span: Span) -> Diagnostic:
    """C642."""
    what = found.steps[int(found.awaited[step])].name
    back = _calls_back(found.steps[step])
    when = f" {back} call{'s' if back > 1 else ''} before" if back else ""
    event = f"`{found.steps[step].name}` of {_thread(found, waiter)}"
    return Diagnostic(
        "C642",
        "a wait of a dispatch orders nothing that is not in order without it",
        Label(span, f"{event} waits for `{what}` of {_thread(found, awaited)}{when}"),
        help=HELP,
    )
