"""Turns a schedule with yields or products into a Plan of launches, with the caller's visits, or tasks, beside them.

Assumes a schedule that passed the checks, without element-wise tasks. Does not prove the Plan (`proof.hosted` and
`proof.visits` do). The stacked form, one launch that hands all yields over at its end, is `lower`'s.

Every write of a launch goes to the copy that is not read: so what visits stays until its visit is over, while the next
one travels. Written where it is, is only what no visit touches, what comes piece by piece and visits nobody before all
of it is there, and a sum to which others of another type are added. What the caller's function reads and writes stays
where it is, and so does what it writes anew until a launch reads that; the caller's tensors are never written. A launch
and a visit wait for the last phase of the other stream that touches the same copy, where one of them writes, unless the
phase before them has waited for it. What the copy engine puts to where it belongs a launch opens first, behind those
alone that touch that: ranks have told each other what is free by the time that there is something to put.

Where `landing` is tuned to `place` peers put straight into the copies of what visits, within the owner's launch. What
they put and visits nobody lands in the copy that has visited, where that is free until it is read: launches go one
after the other, so this costs no time, and symmetric memory is that of what visits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from commdsl.ir.classes import joining, units
from commdsl.ir.landing import landing
from commdsl.ir.schedules import Buffer, Schedule, Tuning, Yield
from commdsl.language.diagnostics import CommError, Diagnostic, InternalError, Label
from commdsl.language.kinds import GIVEN, RETURNED, BufferKind, MoveKind
from commdsl.program.agree import none_heard
from commdsl.program.launches import Launch, Return, Visit, opening, touches
from commdsl.program.lower import SYMMETRIC_BYTES, lower_moves
from commdsl.program.lower.segments import Part, Segment, parts
from commdsl.program.lower.task_waits import TaskWaits
from commdsl.program.memory import Kept, Transport
from commdsl.program.moves import Moves
from commdsl.program.plan import Plan, Role
from commdsl.program.tasks import Counter, Product, Task, Tasks, joins
from commdsl.program.touches import Touch

COMBINING = Tuning(sms=16)
"""Of a launch that combines where the copy engine is asked for, and of one that adds to sums of another type where no
number of SMs is tuned: few, for a computation has the others.
"""


def lower_visits(schedule: Schedule, transport: Transport = Transport.PEER) -> Plan:
    """The Plan that stops at each yield."""
    found = tuple(parts(schedule))
    contents = {part.content for part in found if isinstance(part, Segment)}
    walk = _Walk(schedule, transport, SYMMETRIC_BYTES // max(len(contents), 1), found)
    stops = [at for at, part in enumerate(found) if isinstance(part, Yield)]
    for at, part in enumerate(found):
        match part:
            case Segment():
                walk.launch(part, is_alone=at > stops[-1])
            case Yield(is_product=True):
                walk.product(part)
            case _:
                walk.visit(part)
    walk.end()
    moves = tuple(walk.moves.values())
    roles: tuple[Role, ...] = (Role("caller", 0, 0, 0, tuple(_phases(walk.caller))),)
    if moves:
        lanes, sms, threads = (max(getattr(one, of) for one in moves) for of in ("lanes", "sms", "threads"))
        roles += (Role(schedule.role or "comm", lanes, sms, threads, tuple(walk.comm)),)
    return Plan(
        name=schedule.name,
        num_ranks=schedule.num_ranks,
        params=schedule.params,
        topology=schedule.topology.name,
        contract=schedule.contracts[0].name,
        roles=roles,
        tile_bytes=max((one.tile_bytes for one in moves), default=0),
        span=schedule.span,
        transport=transport,
        agree=none_heard(schedule.num_ranks),
    )


class _Walk:
    """Goes through the parts once; holds where buffers are and who touched them last (private to this pass)."""

    def __init__(self, schedule: Schedule, transport: Transport, most_bytes: int, found: Sequence[Part]) -> None:
        self.schedule = schedule
        self.transport = transport
        self.most_bytes = most_bytes  # of symmetric memory for each of the moves
        self.moves: dict[tuple[object, ...], Moves] = {}
        self.comm: list[Launch] = []
        self.caller: list[Visit | Task | Return] = []
        self.turn = 0
        self.units = units(schedule)
        self.landing = landing(schedule) if schedule.tuning.landing == "place" else frozenset()
        self.lent = _lent(schedule, found, self.landing)
        self.at = {b.name: self._kept(b, 0) for b in schedule.buffers if b.kind in GIVEN}
        self.seen = dict.fromkeys(self.at.values())  # every copy there is, in order
        # By whether a launch did: for each copy how many phases of that stream there were when it was last read, and
        # last written; and how many phases of the other stream are known to be over.
        self.read: tuple[dict[Kept, int], dict[Kept, int]] = ({}, {})
        self.written: tuple[dict[Kept, int], dict[Kept, int]] = ({}, {})
        self.known = [0, 0]
        self.unread: set[Kept] = set()  # what a visit wrote, and no launch has read
        self.waits = TaskWaits()
        self.is_open = False  # whether the last task may get another product: no launch waits for it
        # Of the last task, counters: before it writes, before each product reads, before anything is added.
        self.needs: tuple[tuple[Counter, ...], list[tuple[Counter, ...]], list[Counter]] = ((), [], [])

    def launch(self, segment: Segment, *, is_alone: bool) -> None:
        """`is_alone`: no visit computes beside it."""
        name = f"{self.schedule.name}_segment{len(self.moves) + 1}"
        tuning = _tuning(segment, is_alone=is_alone)
        content = (segment.content, tuple(one.name in self.landing for one in segment.schedule.buffers), tuning)
        if content not in self.moves:
            named = replace(segment.schedule, name=name, tuning=tuning)
            self.moves[content] = lower_moves(named, self.transport, self.most_bytes, self.landing, segment.sums)
        moves = self.moves[content]
        reads = tuple(self.at[one] for one in segment.names(*GIVEN))
        here = {one for one in segment.in_place | (segment.sums & {*moves.alias_safe}) if self._has_own(one)}
        here -= self.lent.keys()
        written = segment.names(*RETURNED)
        writes = tuple(self.at[one] if one in here else self._other(self.lent.get(one, one)) for one in written)
        made = Launch(moves, reads, writes, self.turn, 0, 0)
        least = len(self.caller) if is_alone and moves.is_within else 0
        opens = self._after(made, opening(made)) if made.is_split else 0
        after = self._after(made, touches(made), least) or opens
        self.comm.append(replace(made, after=after, opens=opens if made.is_split else after))
        self.is_open &= self.known[True] < len(self.caller)
        self._note(made, written)
        if self.schedule.has_products:
            self.waits.launch(reads, writes, self.known[True])

    def visit(self, step: Yield) -> None:
        names = [buffer.name for buffer in self.schedule.buffers]
        reads = tuple(self.at[names[one]] for one in step.reads)
        writes = tuple(self._own(names[one]) if one in step.reads else self._anew(names[one]) for one in step.writes)
        made = Visit(step.name, reads, writes, self.turn, 0, step)
        self.caller.append(replace(made, after=self._after(made, touches(made))))
        self._note(made, [names[one] for one in step.writes])

    def product(self, step: Yield) -> None:
        """A term of the last task where it is added to what that makes, else a task of its own."""
        names = [buffer.name for buffer in self.schedule.buffers]
        reads = tuple(self.at[names[one]] for one in step.reads)
        writes = tuple(self._result(names[one], step, reads) for one in step.writes)
        made = Product(reads, writes, self.turn, step, ())
        operands = (*reads[:2], *filter(None, (made.operand(step.epilogue.bias),)))
        last = self.caller[-1] if self.is_open else None
        if isinstance(last, Task) and last.writes == writes and writes[0] in reads[step.sums] and joins(last, made):
            task, number = replace(last, products=(*last.products, made)), len(self.caller) - 1
            self.caller.pop()
        else:
            task, number = Task((made,)), len(self.caller)
            self.needs = self.waits.touched((), writes), [], []
        residual = filter(None, (made.operand(step.epilogue.residual),))
        added = (*(kept for kept in made.sums if kept != writes[0] or len(task.products) == 1), *residual)
        self.needs[1].append(self.waits.touched(operands))
        self.needs[2].extend(self.waits.touched(added))
        if task.activation and task.added:
            label = Label(step.span, f"`{task.activation}` is of products and a bias, and more is added before it")
            raise CommError((Diagnostic("C592", "no kernel runs this product", label),))
        task = self._with_waits(task, number)
        self.caller.append(task)
        self.waits.task(number, (*operands, *added), writes, task.counters)
        self.known[False] = max(self.known[False], task.after)
        self.is_open = True
        self._note(made, [names[one] for one in step.writes])

    def _with_waits(self, task: Task, number: int) -> Task:
        """The task with all waits, which are those of every product: what is written waits where something is added."""
        result, operands, added = self.needs
        is_added = bool(task.added or task.residual)
        first = (*operands[0], *(() if is_added else result))
        products = [
            replace(product, waits=self.waits.needed(number, first if at == 0 else operands[at]))
            for at, product in enumerate(task.products)
        ]
        known = self.waits.behind(*products[0].waits)
        waits = self.waits.needed(number, (*result, *added), known) if is_added else ()
        return replace(task, products=tuple(products), waits=waits)

    def end(self) -> None:
        results = (b.name for b in self.schedule.buffers if b.kind in RETURNED)
        reads = tuple(self.at[name] for name in results if name in self.at)
        made = Return(reads, tuple(self.seen), self.turn, 0)
        self.caller.append(replace(made, after=self._after(made, touches(made))))

    def _has_own(self, name: str) -> bool:
        """Whether it is in a copy that is not the caller's."""
        return name in self.at and self.at[name].copy > 0

    def _other(self, name: str) -> Kept:
        """The copy for what is written anew: not the one that is there, which may still be read."""
        here = self.at.get(name)
        is_lent = here is None and any(one.name == name and one.copy == 1 for one in self.at.values())
        return self._copy(name, 2 if is_lent or (here is not None and here.copy == 1) else 1)

    def _anew(self, name: str) -> Kept:
        """Where the caller's function writes what it did not read: as before, until a launch has read that."""
        here = self.at.get(name)
        return here if here is not None and here in self.unread else self._other(name)

    def _result(self, name: str, step: Yield, reads: Sequence[Kept]) -> Kept:
        """Where a product writes: where that lies to which it is added, tile by tile, but not where it reads rows."""
        here = self.at.get(name)
        if here is not None and here not in reads[:2] and here in reads[step.sums]:
            return self._own(name)
        if here is not None and (here in reads or self.waits.is_read(here)):
            return self._other(name)
        return self._anew(name)

    def _own(self, name: str) -> Kept:
        """Where the caller's function writes what it has read: in place, but for what is the caller's own."""
        here = self.at.get(name)
        return self._copy(name, here.copy if here is not None and here.copy else 1)

    def _copy(self, name: str, copy: int) -> Kept:
        made = self._kept(next(buffer for buffer in self.schedule.buffers if buffer.name == name), copy)
        self.seen[made] = None
        return made

    def _kept(self, buffer: Buffer, copy: int) -> Kept:
        unit = self.units[buffer.name]
        if unit is None:
            raise InternalError(f"nothing says how long a block of `{buffer.name}` is, yet it passed the checks")
        return Kept(buffer.name, buffer.blocks, copy, unit)

    def _after(self, phase: Launch | Visit | Return, touched: Sequence[Touch], least: int = 0) -> int:
        """How many phases of the other stream it waits for before it touches this, `least` of them whatever they touch;
        0 where it has, or the phase before.
        """
        launches = isinstance(phase, Launch)
        other = int(not launches)
        needed = least
        for touch in touched:
            assert isinstance(touch.memory, Kept)
            needed = max(needed, self.written[other].get(touch.memory, 0))
            if touch.writes:
                needed = max(needed, self.read[other].get(touch.memory, 0))
        if needed <= self.known[launches]:
            return 0
        self.known[launches] = needed
        return needed

    def _note(self, phase: Launch | Visit | Product, written: Sequence[str]) -> None:
        self.turn += 1
        launches = isinstance(phase, Launch)
        number = len(self.comm) if launches else len(self.caller)
        for touch in touches(phase):
            assert isinstance(touch.memory, Kept)
            (self.written if touch.writes else self.read)[launches][touch.memory] = number
        self.unread = self.unread.difference(phase.reads, phase.writes) if launches else self.unread | {*phase.writes}
        self.at |= zip(written, phase.writes, strict=True)


def _phases(caller: Sequence[Visit | Task | Return]) -> Iterator[Visit | Tasks | Return]:
    """Tasks with no visit between them are of one kernel."""
    for is_task, some in groupby(caller, lambda one: isinstance(one, Task)):
        if is_task:
            yield Tasks(tuple(one for one in some if isinstance(one, Task)))
        else:
            yield from (one for one in some if not isinstance(one, Task))


def _lent(schedule: Schedule, found: Sequence[Part], landing: frozenset[str]) -> dict[str, str]:
    """Of what lands and visits nobody, where: a buffer made of the same that visits, each of one alone."""
    visiting = {schedule.buffers[at].name for part in found if isinstance(part, Yield) for at in part.reads}
    written = {schedule.buffers[at].name for part in found if isinstance(part, Yield) for at in part.writes}
    lands = [one for one in schedule.buffers if one.name in landing]
    of = units(schedule)
    lent: dict[str, str] = {}
    for one in (one for one in lands if one.kind is BufferKind.SCRATCH and one.name not in visiting | written):
        for other in (other for other in lands if other.name in visiting - {*lent.values()}):
            alike = (one.blocks, one.cut, of[one.name]) == (other.blocks, other.cut, of[other.name])
            if alike and _passes(schedule, found, one.name, other.name):
                lent[one.name] = other.name
                break
    return lent


def _passes(schedule: Schedule, found: Sequence[Part], name: str, other: str) -> bool:
    """Whether nothing is written to the other buffer from when something is written to this one until that is read."""
    is_over = False  # whether the other was written since this one was
    for part in found:
        if isinstance(part, Yield):
            is_over |= other in (schedule.buffers[at].name for at in part.writes)
            continue
        reads, writes = part.names(*GIVEN), part.names(*RETURNED)
        if (is_over and name in reads) or (name in writes and (name in part.stays or other in reads + writes)):
            return False
        is_over = (is_over and name not in writes) or other in writes
    return True


def _tuning(segment: Segment, *, is_alone: bool) -> Tuning:
    """As the schedule says, but for what the copy engine cannot do and for sums of another type: these take few SMs,
    and all where no visit computes beside them and nothing crosses ranks.
    """
    schedule = segment.schedule
    moves = list(joining(schedule))
    combines = any(one.kind is MoveKind.REDUCE for one in moves)
    if not segment.sums and (schedule.tuning.carrier.combines or not combines):
        return schedule.tuning
    is_local = all((one.source_rank == one.dest_rank[:, None]).all() for one in moves)
    sms = schedule.topology.num_sms if is_alone and is_local else schedule.tuning.sms or COMBINING.sms
    return replace(COMBINING, sms=sms)
