"""C640 to C642: launches, visits and tasks of a call touch memory in the order of the schedule, end, and wait for need.

Assumes a Plan that `verify` passed, and launches that are proved each by itself. Does not know how the Plan was made:
it sees phases, what they touch and what they wait for.

One rank stands for all: a buffer belongs to its rank, and what peers put there lies between the opening of the launch
that receives it and its end (C212, of each launch). The events of a call are nodes of a graph. The caller's stream runs
visits, and starts the kernel of tasks; the stream beside it opens, runs and ends launches in the order of
`visited.host_order`. Tasks are in no order but that of the counters they wait for, as workers take their tiles side by
side. An access lasts from one node to another. Two accesses of a memory, one of which writes, are in order if the end
of the first precedes the begin of the second on every path, which is what the graph says.

Workers take tasks in order and may be one alone, so whatever a task waits for must need no task but those before it.
The copies of a task are stored beside its tiles, and no counter tells of them: they are there when the kernel ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from commdsl.language.diagnostics import Diagnostic, InternalError, Label
from commdsl.language.source import Span
from commdsl.program.launches import Launch, Return, Visit
from commdsl.program.memory import Kept, words_for
from commdsl.program.plan import Plan
from commdsl.program.tasks import Counter, Over, Ready, Stored, Task, Tasks
from commdsl.program.visited import host_order, launches

HELP = "the order of a call is commdsl's, so this is its fault: report it with this file"


@dataclass(frozen=True, slots=True)
class Access:
    """An access of a phase to a memory, from one node to another. `turns`: the first and the last place where the
    schedule has it.
    """

    memory: Kept
    writes: bool
    begin: int
    end: int
    turns: tuple[int, int]
    of: str


@dataclass(frozen=True, slots=True)
class Edge:
    """An order of two nodes. `wait`: the number of the wait that makes it; None: a stream or a kernel does."""

    before: int
    wait: int | None = None
    is_late: bool = False  # from a launch that begins while an earlier one has not ended, to that end


@dataclass
class Graph:
    """The events of a call on one rank."""

    names: list[str] = field(default_factory=list)
    before: list[list[Edge]] = field(default_factory=list)  # by node
    waits: list[tuple[str, bool]] = field(default_factory=list)  # who waits for what; whether it has to be needed
    accesses: list[Access] = field(default_factory=list)
    tasks: dict[int, int] = field(default_factory=dict)  # the node in which a task is stored, by task
    claims: list[tuple[int, int]] = field(default_factory=list)  # a task, and a node that it waits for
    pushes: list[tuple[int, int, int, int]] = field(default_factory=list)  # a task and its launch; the opening, the end

    def node(self, name: str, *before: int) -> int:
        self.names.append(name)
        self.before.append([Edge(one) for one in before])
        return len(self.names) - 1

    def wait(self, node: int, what: str, before: Iterable[int], *, is_judged: bool = True) -> None:
        """Let a node wait for others, all of which one wait covers."""
        self.waits.append((f"`{self.names[node]}` waits for `{what}`", is_judged))
        self.before[node] += [Edge(one, len(self.waits) - 1) for one in before]

    def touch(self, kept: Kept, begin: int, end: int, turns: tuple[int, int], of: str, *, writes: bool) -> None:
        self.accesses.append(Access(kept, writes, begin, end, turns, of))


def order_of_visits(plan: Plan) -> Iterator[Diagnostic]:
    """Yield the first access in no order, the first wait that never ends, or the first wait without need."""
    try:
        graph = graph_of(plan)
    except InternalError as error:  # launches and visits wait for each other
        yield _fault("C641", str(error), "the host never comes to either", plan.span)
        return
    order = _sorted(graph)
    if order is None:
        circle = " -> ".join(f"`{graph.names[one]}`" for one in _circle(graph))
        yield _fault("C641", "events of a call wait for each other", circle, plan.span)
        return
    before = _before(graph, order)
    found = next(_stuck(graph, before, plan.span), None) or next(_races(graph, before, plan.span), None)
    if found is not None:
        yield found
        return
    for number, (words, is_judged) in enumerate(graph.waits):
        if is_judged and next(_races(graph, _before(graph, order, number), plan.span), None) is None:
            yield _fault("C642", "a wait orders nothing that is not in order without it", words, plan.span)
            return


# --- the graph --------------------------------------------------------------------------------------------------------


def graph_of(plan: Plan) -> Graph:
    """Return the events of a call. Raises InternalError where the host comes to no order."""
    graph = Graph()
    start = graph.node("prepare")
    ahead = launches(plan)
    opened = [graph.node(f"opening {number}") for number in range(len(ahead))]
    begun = [graph.node(f"launch {number}", opened[number]) for number in range(len(ahead))]
    ended = [graph.node(f"end of launch {number}", begun[number]) for number in range(len(ahead))]
    last, latest = start, -1
    for number, is_end in host_order(plan):
        first = ended[number] if is_end else opened[number]
        graph.before[first].append(Edge(last, is_late=is_end and last in begun and latest > number))
        graph.before[first] += [Edge((ended if is_end else begun)[number - 1])] if number else []
        last, latest = (first, latest) if is_end else (begun[number], number)
    over = _caller(graph, plan, start, opened, ended)
    for number, launch in enumerate(ahead):
        _launch(graph, number, launch, (opened[number], begun[number], ended[number]), over)
    return graph


def _launch(graph: Graph, number: int, launch: Launch, nodes: tuple[int, int, int], over: Sequence[int]) -> None:
    """Add the accesses and waits of a launch. `over`: by phase of the caller's stream, the node in which it is over."""
    opened, begun, ended = nodes
    turns, name = (launch.turn, launch.turn), f"launch {number}"
    waits_for_sms = launch.moves.is_within  # whatever it touches
    if launch.opens:
        graph.wait(opened, _phase(graph, over, launch.opens), over[: launch.opens], is_judged=not waits_for_sms)
    if launch.after > launch.opens:
        graph.wait(begun, _phase(graph, over, launch.after), over[: launch.after], is_judged=not waits_for_sms)
    for kept in launch.reads:
        graph.touch(kept, begun, ended, turns, name, writes=False)
    lands = launch.lands if launch.is_split else ()
    for kept in launch.writes:
        graph.touch(kept, opened if kept in lands else begun, ended, turns, name, writes=True)


def _phase(graph: Graph, over: Sequence[int], count: int) -> str:
    return graph.names[over[count - 1]]


def _caller(graph: Graph, plan: Plan, start: int, opened: Sequence[int], ended: Sequence[int]) -> list[int]:
    """Add the caller's stream; return by visit and task the node in which it is over."""
    last, over = start, list[int]()
    for phase in plan.phases:
        match phase:
            case Visit() | Return():
                number = len(over)
                last = graph.node(f"visit {number}", last)
                over.append(last)
                if phase.after:
                    graph.wait(last, f"end of launch {phase.after - 1}", (ended[phase.after - 1],))
                turns = phase.turn, phase.turn
                for kept in phase.reads:
                    graph.touch(kept, last, last, turns, f"visit {number}", writes=False)
                for kept in phase.frees if isinstance(phase, Return) else phase.writes:
                    graph.touch(kept, last, last, turns, f"visit {number}", writes=True)
            case Tasks(rows):
                begin, end = graph.node("tasks", last), graph.node("end of tasks", last)
                for task in rows:
                    over.append(_task(graph, task, len(over), begin, end, (opened, ended)))
                last = end
    return over


def _task(
    graph: Graph, task: Task, number: int, begin: int, end: int, beside: tuple[Sequence[int], Sequence[int]]
) -> int:
    """Add a task; return the node in which it is stored. `beside`: the nodes in which launches open, and end."""
    opened, ended = beside
    name, every = f"task {number}", (task.products[0].turn, task.products[-1].turn)
    added, stored = graph.node(f"{name}, to add", begin), graph.node(name, begin)
    graph.before[stored].append(Edge(added))
    graph.before[end].append(Edge(stored))
    graph.tasks[number] = stored

    def wait(node: int, counters: Sequence[Counter]) -> None:
        for one in counters:
            match one:
                case Over(launch):
                    awaited, what = ended[launch], f"end of launch {launch}"
                case Ready(launch):
                    awaited, what = opened[launch], f"opening {launch}"
                case Stored(other):
                    awaited, what = graph.tasks.get(other, stored), f"task {other}"
            graph.wait(node, what, (awaited,))
            graph.claims.append((number, awaited))

    for at, product in enumerate(task.products):
        turns, read = (product.turn, product.turn), graph.node(f"{name}, product {at}", begin)
        wait(read, product.waits)
        graph.before[stored].append(Edge(read))
        if at == 0:
            graph.before[added].append(Edge(read))
        bias = product.operand(product.step.epilogue.bias)
        for kept in (*product.reads[:2], *filter(None, (bias,))):
            graph.touch(kept, read, stored, turns, f"{name}, product {at}", writes=False)
        residual = product.operand(product.step.epilogue.residual)
        for kept in (*product.sums, *filter(None, (residual,))):
            if kept != task.result:
                graph.touch(kept, added, stored, turns, name, writes=False)
    wait(added, task.waits)
    graph.touch(task.result, added, stored, every, name, writes=True)
    if task.copy is not None:
        copied = graph.node(f"{name}, copies", added)
        graph.before[end].append(Edge(copied))
        graph.touch(task.copy, added, end, every, f"{name}, copies", writes=True)
    if task.push is not None:
        wait(stored, (Ready(task.push),))
        graph.pushes.append((number, task.push, opened[task.push], ended[task.push]))
    return stored


# --- what it shows ----------------------------------------------------------------------------------------------------


def _sorted(graph: Graph) -> list[int] | None:
    """Return all nodes in an order of the graph; None where some wait in a circle."""
    left = [len(edges) for edges in graph.before]
    behind: list[list[int]] = [[] for _ in left]
    for node, edges in enumerate(graph.before):
        for edge in edges:
            behind[edge.before].append(node)
    order = [node for node, count in enumerate(left) if count == 0]
    for node in order:
        for other in behind[node]:
            left[other] -= 1
            if left[other] == 0:
                order.append(other)
    return order if len(order) == len(left) else None


def _circle(graph: Graph) -> list[int]:
    """Return nodes each of which waits for the next; the first stands again at the end."""
    left = {*range(len(graph.names))}
    while free := {node for node in left if not any(edge.before in left for edge in graph.before[node])}:
        left -= free
    found = [min(left)]
    while found[-1] not in found[:-1]:
        found.append(next(edge.before for edge in graph.before[found[-1]] if edge.before in left))
    return found[found.index(found[-1]) :]


def _before(graph: Graph, order: Sequence[int], without: int | None = None) -> list[int]:
    """Return by node the set of nodes that precede it, as bits. `without`: a wait to leave out, together with the order
    that holds only because a launch ends later than it could.
    """
    found = [0] * len(order)
    for node in order:
        for edge in graph.before[node]:
            if without is None or not (edge.wait == without or edge.is_late):
                found[node] |= found[edge.before] | 1 << edge.before
    return found


def _stuck(graph: Graph, before: Sequence[int], span: Span) -> Iterator[Diagnostic]:
    """Yield C641 for each task that waits for something that needs a later task, or itself."""
    for number, awaited in graph.claims:
        known = before[awaited] | 1 << awaited
        later = [task for task, node in graph.tasks.items() if task >= number and known >> node & 1]
        if later:
            label = f"`{graph.names[awaited]}` needs task {later[0]}, which workers take no earlier"
            yield _fault("C641", f"task {number} waits for `{graph.names[awaited]}` for ever", label, span)


def _races(graph: Graph, before: Sequence[int], span: Span) -> Iterator[Diagnostic]:
    """Yield C640 for each pair of accesses in no order, and each push outside of its launch."""
    by_memory: dict[Kept, list[Access]] = {}
    for one in graph.accesses:
        by_memory.setdefault(one.memory, []).append(one)
    for memory, accesses in by_memory.items():
        for one, other in combinations(sorted(accesses, key=lambda access: access.turns), 2):
            if not (one.writes or other.writes):
                continue
            is_later = one.turns[1] < other.turns[0] and before[other.begin] >> one.end & 1
            if not is_later and not _is_same_visit(one, other):
                verbs = ["writes" if access.writes else "reads" for access in (one, other)]
                headline = f"`{one.of}` and `{other.of}` touch {words_for(memory)} in no order"
                label = f"`{one.of}` {verbs[0]} there, and `{other.of}` {verbs[1]} there when that need not be over"
                yield _fault("C640", headline, label, span)
    for number, launch, opened, ended in graph.pushes:
        stored = graph.tasks[number]
        if not (before[stored] >> opened & 1 and before[ended] >> stored & 1):
            label = "peers may read there before, or take it for all before the task has stored it"
            yield _fault("C640", f"task {number} pushes outside of launch {launch}", label, span)


def _is_same_visit(one: Access, other: Access) -> bool:
    """Return whether one visit, launch or end of a call makes both accesses, and so orders them itself."""
    return one.of == other.of and not one.of.startswith("task")


def _fault(code: str, headline: str, label: str, span: Span) -> Diagnostic:
    return Diagnostic(code, headline, Label(span, label), help=HELP)
