"""Draws random valid schedules and plans as `.comm` text, with what they must leave behind.

Assumes that what is drawn is right by construction: the values every chunk holds are followed while the steps are
drawn, and the contract is written from them; a plan's shards are listed while it is written. Does not use any stage of
commdsl.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from drawn_machines import SWITCH, Arcs, DrawnMachine, machines
from hypothesis import strategies as st

OPERATIONS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
"""Those that a text may name."""


@dataclass(frozen=True, order=True)
class Value:
    """The combination of chunk (block, piece) of `origin`, as it was at the start, over some ranks in order."""

    origin: str
    block: int
    piece: int
    ranks: tuple[int, ...]
    operation: str = ""  # that combined it, if the text names one


@dataclass(frozen=True, order=True)
class Place:
    buffer: str
    rank: int
    block: int  # of a scratch buffer: the slot
    piece: int  # of a scratch buffer: 0


@dataclass(frozen=True)
class Program:
    """A schedule that is right, and what some chunks must hold at the end; no values: its contract says it all."""

    text: str
    ranks: int
    cut: int = 1
    values: tuple[tuple[Place, Value], ...] = ()
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()  # by buffer, what its blocks' lengths are looked up by
    machine: DrawnMachine = SWITCH
    arcs: Arcs = ()  # ordered pairs of ranks between which something moves, where that is known
    rounds: bool = False  # some of what moves

    def length(self, table: Sequence[int], buffer: str, rank: int, block: int) -> int:
        """Of a block, where they have lengths of their own."""
        axes, at = dict(self.axes)[buffer], {"rank": rank, "block": block}
        return int(table[at[axes[0]] if len(axes) == 1 else at[axes[0]] * self.ranks + at[axes[1]]])

    @property
    def protocols(self) -> tuple[str, ...]:
        """Those that have a kernel for it: one alone rounds, or moves blocks whose lengths pairs alone know; lines
        do not leave a node.
        """
        if self.rounds or any(len(axes) == 2 for _, axes in self.axes):
            return ("bulk",)
        return ("bulk", "packet", "line") if self.machine.nodes == 1 else ("bulk", "packet")


@dataclass(frozen=True)
class Drawn:
    """A move: the acting rank, its statement, what it reads, where it writes and what."""

    actor: int
    statement: str
    reads: frozenset[Place]
    dest: Place
    value: Value
    rounds: bool = False

    @property
    def is_sum(self) -> bool:
        return self.statement.startswith("reduce")

    @property
    def adds(self) -> bool:
        """Whether what is there already stays in the sum; lists have it among their sources."""
        return self.is_sum and " for " not in self.statement and "@ all" not in self.statement


@dataclass
class Draft:
    """A schedule while its steps are drawn: what every place holds now, and the steps so far."""

    ranks: int
    cut: int
    blocks: dict[str, int]  # of x, y, z; slots of t; 0: no such buffer
    axes: dict[str, str] = field(default_factory=dict)  # of x, y, z, where blocks have lengths of their own
    held: dict[Place, Value] = field(default_factory=dict)
    written: set[Place] = field(default_factory=set)
    steps: list[list[Drawn]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held = self.initial()

    def initial(self) -> dict[Place, Value]:
        given = [place for buffer in "xz" for place in self.places(buffer)]
        return {place: Value(place.buffer, place.block, place.piece, (place.rank,)) for place in given}

    def places(self, buffer: str) -> list[Place]:
        pieces = range(1 if buffer == "t" else self.cut)
        return [
            Place(buffer, rank, block, piece)
            for rank in range(self.ranks)
            for block in range(self.blocks[buffer])
            for piece in pieces
        ]

    def entry(self, buffer: str, rank: int, block: int) -> int:
        """Which of the lengths of a call a block has."""
        return {"rank": rank, "block": block}.get(self.axes.get(buffer, ""), 0)

    def size_class(self, value: Value) -> tuple[int, int]:
        return value.piece, self.entry(value.origin, value.ranks[0], value.block)

    def fits(self, value: Value, place: Place) -> bool:
        """Whether the place has the size of the chunk; a slot has any."""
        of_place = place.piece, self.entry(place.buffer, place.rank, place.block)
        return place.buffer == "t" or of_place == self.size_class(value)

    def targets(self, value: Value) -> list[Place]:
        """Where a chunk of this size may be written in the step at hand."""
        found = [place for buffer in "yzt" for place in self.places(buffer)]
        return [place for place in found if place not in self.written and self.fits(value, place)]

    def disjoint(self, values: list[Value]) -> bool:
        """Whether the values can be combined to one that a clause can name: the same chunk, of different ranks and one
        length, what is combined already by one operation.
        """
        same = len({(v.origin, v.block, v.piece) for v in values}) == 1
        same &= len({self.size_class(v) for v in values}) == 1
        same &= len({v.operation for v in values if len(v.ranks) > 1}) <= 1
        return same and sum(len(v.ranks) for v in values) == len({rank for v in values for rank in v.ranks})

    def index(self, place: Place) -> str:
        return f"t[{place.block}]" if place.buffer == "t" else f"{place.buffer}[{place.block}, {place.piece}]"


def pruned(draft: Draft) -> list[list[Drawn]]:
    """The steps without the moves whose result nobody uses or that change nothing: the checker refuses those."""
    steps = draft.steps
    while True:
        live = {place for place in draft.held if place.buffer in "yz"}
        used: list[list[Drawn]] = []
        for step in reversed(steps):
            kept = [move for move in step if move.dest in live]
            live -= {move.dest for move in kept}
            live |= {place for move in kept for place in move.reads}
            used.append(kept)
        held = draft.initial()
        left: list[list[Drawn]] = []
        for step in reversed(used):
            left.append([move for move in step if held.get(move.dest) != move.value])
            held |= {move.dest: move.value for move in step}
        left = [step for step in left if step]
        if left == steps:
            return left
        steps = left


def term(draft: Draft, value: Value) -> str:
    """The right side of a clause: a copy or a combination."""
    ref, operation = f"{value.origin}[{value.block}, {value.piece}]", value.operation or "sum"
    if len(value.ranks) == 1:
        return f"{ref} @ {value.ranks[0]}"
    if len(value.ranks) == draft.ranks:
        return f"{operation}({ref} @ q for q in 0 ..< P)"
    return f"{operation}({ref} @ q for q in 0 ..< P if {' or '.join(f'q == {rank}' for rank in value.ranks)})"


@st.composite
def united(draw: st.DrawFn, values: list[Value]) -> Value:
    """By the operation of those that are combined already, or by any."""
    first, ranks = values[0], tuple(sorted(rank for v in values for rank in v.ranks))
    known = {v.operation for v in values if len(v.ranks) > 1}
    operation = known.pop() if known else draw(st.sampled_from(["", "", *OPERATIONS])) if len(ranks) > 1 else ""
    return Value(first.origin, first.block, first.piece, ranks, operation)


def named(value: Value) -> str:
    """How a statement says by which operation it combines."""
    return f" by {value.operation}" if value.operation else ""


def addends(draft: Draft, place: Place) -> Iterator[list[Place]]:
    """Chunks with this index on several ranks that can be added up: as many as fit, and every start of that list."""
    chosen: list[Place] = []
    for rank in range(draft.ranks):
        peer = Place(place.buffer, rank, place.block, place.piece)
        if peer in draft.held and draft.disjoint([draft.held[q] for q in [*chosen, peer]]):
            chosen.append(peer)
            yield list(chosen)


@st.composite
def one_list(draw: st.DrawFn, draft: Draft, source: Place, dest: Place) -> Drawn | None:
    """A reduction of several sources; None when the destination is of another size class."""
    chosen = draw(st.sampled_from(list(addends(draft, source))))
    value = draw(united([draft.held[place] for place in chosen]))
    if not draft.fits(value, dest):
        return None
    choice = " or ".join(f"q == {place.rank}" for place in chosen)
    several = "all" if len(chosen) == draft.ranks else f"q for q in 0 ..< P if {choice}"
    statement = f"reduce {draft.index(source)} @ {several} -> {draft.index(dest)}{named(value)}"
    return Drawn(dest.rank, statement, frozenset(chosen), dest, value)


@st.composite
def one_move(draw: st.DrawFn, draft: Draft) -> Drawn | None:
    """Any legal move; None when this draw has none."""
    source = draw(st.sampled_from(sorted(draft.held)))
    value = draft.held[source]
    targets = draft.targets(value)
    if not targets:
        return None
    dest = draw(st.sampled_from(targets))
    kind = draw(st.sampled_from(["put", "get", "reduce", "list"]))
    left, right = draft.index(source), draft.index(dest)
    reads = frozenset({source})
    if kind == "list":
        return draw(one_list(draft, source, dest))
    if kind == "reduce":
        if dest not in draft.held or not draft.disjoint([value, draft.held[dest]]):
            return None
        value = draw(united([draft.held[dest], value]))
        reads |= {dest}
    how = named(value) if kind == "reduce" else ""
    if source.rank == dest.rank and kind != "reduce":
        return Drawn(source.rank, f"copy {left} -> {right}", reads, dest, value)
    if kind == "get" or (kind == "reduce" and draw(st.booleans())):
        return Drawn(dest.rank, f"{kind} {left} @ {source.rank} -> {right}{how}", reads, dest, value)
    return Drawn(source.rank, f"{kind} {left} -> {right} @ {dest.rank}{how}", reads, dest, value)


@st.composite
def one_step(draw: st.DrawFn, draft: Draft) -> None:
    """Some moves at once: every read sees what was there before the step."""
    draft.written.clear()
    drawn = []
    for _ in range(draw(st.integers(1, 6))):
        move = draw(one_move(draft))
        if move is not None:
            draft.written.add(move.dest)
            drawn.append(move)
    draft.steps.append(drawn)
    draft.held |= {move.dest: move.value for move in drawn}


def roundings(steps: list[list[Drawn]]) -> dict[Place, int]:
    """How often the most rounded contribution to every place is so; what was rounded is not again until it is added."""
    times, narrow = dict[Place, int](), set[Place]()
    for step in steps:
        made, copied = dict[Place, int](), set[Place]()
        for move in step:
            sources = move.reads - {move.dest} if move.adds else move.reads
            made[move.dest] = max(times.get(one, 0) + (move.rounds and one not in narrow) for one in sources)
            if move.adds:
                made[move.dest] = max(made[move.dest], times.get(move.dest, 0))
            if not move.is_sum and (move.rounds or sources <= narrow):
                copied.add(move.dest)
        times |= made
        narrow = (narrow - set(made)) | copied
    return times


CASTS = {"float8": "as float8 by 16", "float16": "as float16", "bfloat16": "as bfloat16"}


@st.composite
def buffers(draw: st.DrawFn, ranks: int, *, uneven: bool) -> tuple[dict[str, int], dict[str, str]]:
    """Blocks of x, y, z, slots of t, and what lengths are looked up by: by block there is one for each rank."""
    blocks = {
        "x": draw(st.integers(1, 2)),
        "y": draw(st.integers(1, 3)),
        "z": draw(st.integers(0, 1)),
        "t": draw(st.integers(0, 2)),
    }
    axes = {name: draw(st.sampled_from(["rank", "block"])) for name in "xyz"} if uneven else {}
    return blocks | {name: ranks for name, axis in axes.items() if axis == "block" and blocks[name]}, axes


@st.composite
def random_moves(draw: st.DrawFn, element: str = "", *, uneven: bool = False) -> Program:
    """Any moves between any ranks, with the contract in its general form; some round to this element type, or blocks
    have lengths of their own.
    """
    ranks = draw(st.integers(2, 6))
    cut = draw(st.integers(1, 3))
    blocks, axes = draw(buffers(ranks, uneven=uneven))
    draft = Draft(ranks, cut, blocks, axes)
    for _ in range(draw(st.integers(1, 6))):
        draw(one_step(draft))
    if not any(place.buffer == "y" for place in draft.held):
        draft.written.clear()
        here = Place("x", 0, 0, 0)
        there = [place for place in draft.targets(draft.held[here]) if place.buffer == "y"][-1]
        move = f"put {draft.index(here)} -> {draft.index(there)} @ {there.rank}"
        draft.steps.append([Drawn(0, move, frozenset({here}), there, draft.held[here])])
        draft.held[there] = draft.held[here]
    values = tuple((place, value) for place, value in sorted(draft.held.items()) if place.buffer in "yz")
    steps = pruned(draft)
    if element:
        steps = [[replace(move, rounds=draw(st.booleans())) for move in step] for step in steps]
    times = roundings(steps)
    crossed = {(one.rank, move.dest.rank) for step in steps for move in step for one in move.reads}
    arcs = tuple(sorted(pair for pair in crossed if pair[0] != pair[1]))
    machine = draw(machines(ranks, arcs))
    lines = [*machine.lines, f"schedule drawn for P ranks where P == {ranks} {{"]
    for name, kind in (("x", "input"), ("y", "output"), ("z", "inout")):
        lengths = f" of n[{axes[name]}]" if axes else ""
        dim = "P" if axes.get(name) == "block" else str(blocks[name])
        lines += [f"  {kind} {name}[{dim} blocks, {cut}]{lengths}"] if blocks[name] else []
    if any(move.dest.buffer == "t" for step in steps for move in step):
        lines += [f"  scratch t[{blocks['t']}]"]
    looked_up = tuple((name, (axis,)) for name, axis in axes.items())
    for place, value in values:
        clause = f"{draft.index(place)} == {term(draft, value)}"
        rounded = f" rounded({element}, {times[place]})" if times.get(place) else ""
        lines.append(f"  ensure each r where r == {place.rank}{rounded} {{ {clause} }}")
    for step in steps:
        moves = [(move.actor, move.statement + (f" {CASTS[element]}" if move.rounds else "")) for move in step]
        lines += ["  each r {", *(f"    if r == {actor} {{ {statement} }}" for actor, statement in moves), "  }"]
    return Program("\n".join([*lines, "}", ""]), ranks, cut, values, looked_up, machine, arcs, bool(element))


CYCLE_PROGRAMS = {
    "allgather": """  input x
  output y[P blocks]
  ensure allgather(x -> y)
  each r { copy x -> y[r]  put x -> y[r] @ C[0].next(r) }
  for s in 1 ..< P - 1 {
    each r, c in C { let q = c.at((c.position(r) - s) % P)  put y[q] -> y[q] @ c.next(r) }
  }
""",
    "rotation": """  inout x[2]
  ensure rotation(x)
  yield x
  for s in 1 ..< P {
    each r, c in C { get x @ c.prev(r) -> x }
    yield x
  }
""",
    "allreduce": """  inout x[P]
  ensure allreduce(x)
  for s in 0 ..< P - 1 {
    each r, c in C { let j = (c.position(r) - s) % P  reduce x[j] -> x[j] @ c.next(r) }
  }
  for s in 0 ..< P - 1 {
    each r, c in C { let j = (c.position(r) - s) % P  get x[j] @ c.prev(r) -> x[j] }
  }
""",
    "permutation": """  input x[3]
  output y[3]
  ensure permutation(x -> y) r -> C[0].next(r)
  each r, i in 0 ..< 3 { put x[i] -> y[i] @ C[0].next(r) }
""",
}


PATH_PROGRAMS = {
    "broadcast": """  inout x[2]
  ensure broadcast(x, C[0].at(0))
  pipeline i in 0 ..< 2 {
    for s in 0 ..< P - 1 {
      each r where C[0].position(r) == s { put x[i] -> x[i] @ C[0].next(r) }
    }
  }
""",
    "reduce": """  inout x
  ensure reduce(x, C[0].at(P - 1)) by max
  for s in 0 ..< P - 1 {
    each r where C[0].position(r) == s { reduce x -> x @ C[0].next(r) by max }
  }
""",
}
"""Along what has a first rank and a last."""


@st.composite
def along_a_cycle(draw: st.DrawFn) -> Program:
    """A collective along a random directed cycle through all ranks, or an open one; the machine may have its arcs."""
    ranks = draw(st.integers(2, 6))
    order = draw(st.permutations(range(ranks)))
    name = draw(st.sampled_from([*CYCLE_PROGRAMS, *PATH_PROGRAMS]))
    is_open = name in PATH_PROGRAMS
    body = (CYCLE_PROGRAMS | PATH_PROGRAMS)[name]
    arcs = tuple((order[at - 1], order[at]) for at in range(int(is_open), ranks))
    machine = draw(machines(ranks, arcs))
    head = f"schedule drawn for P ranks where P == {ranks} {{"
    cycle = f"  cycles C = {'open ' if is_open else ''}({' '.join(map(str, order))})"
    return Program("\n".join([*machine.lines, head, cycle, f"{body}}}", ""]), ranks, machine=machine, arcs=arcs)


@st.composite
def along_a_tree(draw: st.DrawFn) -> Program:
    """A broadcast along a random tree, a reduction along one, or first the one, then the other: an all-reduce; of
    several pieces, one behind the other.
    """
    ranks, pieces = draw(st.integers(2, 6)), draw(st.sampled_from([1, 1, 2, 3]))
    order = draw(st.permutations(range(ranks)))
    edges = [(order[draw(st.integers(0, i - 1))], order[i]) for i in range(1, ranks)]
    up = [f"  each r where r == {child} {{ reduce x[i] -> x[i] @ {parent} }}" for parent, child in reversed(edges)]
    down = [f"  each r where r == {parent} {{ put x[i] -> x[i] @ {child} }}" for parent, child in edges]
    rising, falling = [(child, parent) for parent, child in edges], edges
    ensure, lines, arcs = draw(
        st.sampled_from(
            [
                (f"broadcast(x, {order[0]})", down, falling),
                (f"reduce(x, {order[0]})", up, rising),
                ("allreduce(x)", up + down, rising + falling),
                (
                    f"each r, i in 0 ..< {pieces} {{ x[i] == sum(x[i] @ q for q in 0 ..< P) }}",
                    up + down,
                    rising + falling,
                ),
            ]
        )
    )
    machine = draw(machines(ranks, tuple(sorted(arcs))))
    head = f"schedule drawn for P ranks where P == {ranks} {{"
    loop = draw(st.sampled_from(["for", "pipeline"]))
    body = [f"  {loop} i in 0 ..< {pieces} {{", *lines, "  }"]
    text = "\n".join([*machine.lines, head, f"  inout x[{pieces}]", f"  ensure {ensure}", *body, "}", ""])
    return Program(text, ranks, machine=machine, arcs=tuple(sorted(arcs)))


@st.composite
def by_calls(draw: st.DrawFn) -> Program:
    """Pieces that are reduced to a root, then sent to all, each by a schedule that is called with parameters; a wave of
    pieces at a time, by an operation of the text's own or of the call's.
    """
    ranks, pieces = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    root = draw(st.sampled_from(["0", "i % P", "(P - 1 if i == 0 else 0)", "([1, 0][i % 2])", "turn(i, P)"]))
    by = draw(st.sampled_from(["", " by max", " by prod"]))
    spread = draw(st.sampled_from(["broadcast_tree(x[i]) with root = q", "broadcast_chain(x[i]) with root = q, K = 1"]))
    loop = draw(st.sampled_from(["for", "pipeline"]))
    lines = [
        'use "collectives/reduce_tree.comm"',
        f'use "collectives/{spread.split("(")[0]}.comm"',
        "fn turn(i, P) = (3 * i + 1) % P",
        f"schedule drawn for P ranks where P == {ranks} {{",
        f"  inout x[{pieces}]",
        f"  ensure allreduce(x){by}",
        f"  {loop} i in 0 ..< {pieces} {{",
        f"    let q = {root}",
        f"    do reduce_tree(x[i]){by} with root = q",
        f"    do {spread}",
        "  }",
    ]
    return Program("\n".join([*lines, "}", ""]), ranks)


@st.composite
def to_all(draw: st.DrawFn) -> Program:
    """An all-to-all of blocks that each have a length of their own, each put or fetched straight, in any order."""
    ranks = draw(st.integers(2, 5))
    steps, lines = draw(st.permutations(range(ranks))), list[str]()
    for shift in steps:
        sign, way = draw(st.sampled_from([("+", "put x[q] -> y[r] @ q"), ("-", "get x[r] @ q -> y[q]")]))
        lines += [f"  each r {{ let q = (r {sign} {shift}) % P   {way} }}"]
    if draw(st.booleans()):  # all at once
        lines = ["  each r, i in 0 ..< P { put x[(r + i) % P] -> y[r] @ (r + i) % P }"]
    head = f"schedule drawn for P ranks where P == {ranks} {{"
    given = ["  input x[P blocks] of n[rank, block]", "  output y[P blocks] of n[block, rank]"]
    text = "\n".join([head, *given, "  ensure alltoall(x -> y)", *lines, "}", ""])
    every = [(rank, peer) for rank in range(ranks) for peer in range(ranks)]
    values = tuple((Place("y", rank, peer, 0), Value("x", rank, 0, (peer,))) for rank, peer in every)
    return Program(text, ranks, values=values, axes=(("x", ("rank", "block")), ("y", ("block", "rank"))))


@st.composite
def along_axes(draw: st.DrawFn) -> Program:
    """An all-reduce over the axes of a torus, one after another, each by a schedule that is called."""
    sizes = draw(st.sampled_from([(2,), (3,), (2, 2), (2, 3), (3, 2), (4, 2), (2, 2, 2)]))
    ranks = prod(sizes)
    uses, lines, how = set[str](), [], draw(st.sampled_from(["", "", " by min"]))
    for axis in draw(st.permutations(range(len(sizes)))):
        size, stride = sizes[axis], prod(sizes[:axis])
        runs = f"in runs of {stride * size}" if stride * size < ranks or draw(st.booleans()) else ""
        by = f"by stride {stride}" if stride > 1 or not runs else ""
        name = draw(st.sampled_from(["allreduce_ring", "allreduce_twoshot"]))
        uses.add(name)
        across = draw(st.sampled_from(["i * (P / n) + j", "j * n + i", "place(i, j, n, P)"])).replace("n", str(size))
        given = f"(x[{across}] for i in 0 ..< {size}, j in 0 ..< {ranks // size})"
        acting = draw(st.sampled_from(["", "each r "]))
        lines += [f"  group axis{axis} = ranks {runs} {by}", f"  {acting}do {name}({given}) over axis{axis}{how}"]
    used = [f'use "collectives/{name}.comm"' for name in sorted(uses)]
    place = "fn place(i, j, n, P) = (j * n + i if n % 2 == 0 else i * (P / n) + j + [1, 0][n - 2])"
    head = f"schedule drawn for P ranks where P == {ranks} {{\n  inout x[P]\n  ensure allreduce(x){how}"
    return Program("\n".join([*used, place, head, *lines, "}", ""]), ranks)


def programs() -> st.SearchStrategy[Program]:
    """The one strategy for valid schedules of equal blocks."""
    return st.one_of(random_moves(), along_a_cycle(), along_a_tree(), along_axes(), by_calls())


def uneven_programs() -> st.SearchStrategy[Program]:
    """Valid schedules of blocks that have lengths of their own."""
    return st.one_of(random_moves(uneven=True), random_moves(uneven=True), to_all())


def tried(programs: st.SearchStrategy[Program]) -> st.SearchStrategy[tuple[Program, str]]:
    """In every protocol that has a kernel for it."""
    return programs.flatmap(lambda program: st.tuples(st.just(program), st.sampled_from(program.protocols)))


def all_programs() -> st.SearchStrategy[tuple[Program, str]]:
    """Of equal blocks and of others, in every protocol."""
    return tried(st.one_of(programs(), programs(), uneven_programs()))


def rounding_programs() -> st.SearchStrategy[Program]:
    """Valid schedules, some of whose moves round what travels."""
    return st.sampled_from(sorted(CASTS)).flatmap(random_moves)


# --- plans ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnShard:
    """A shard as it must come out: whose document it is of (a name or a number of its own), where it goes."""

    rank: int
    document: str | int
    length: int
    dests: tuple[int, ...]


@dataclass(frozen=True)
class DrawnPlan:
    """A plan that is right, and its shards in the order written."""

    text: str
    ranks: int
    mask: str  # "" for none
    sharing: str
    shards: tuple[DrawnShard, ...]


@dataclass
class PlanDraft:
    """A plan while its documents are drawn."""

    ranks: int
    several: bool  # a shard may go to several ranks
    shards: list[DrawnShard] = field(default_factory=list)
    documents: int = 0

    def add(self, rank: int, name: str, lengths: list[int], dests: list[tuple[int, ...]]) -> None:
        self.documents += 1
        document = name or self.documents
        self.shards += [DrawnShard(rank, document, length, dest) for length, dest in zip(lengths, dests, strict=True)]


def number_text(draw: st.DrawFn, number: int) -> str:
    """A number as it may be written where a plan takes one."""
    return draw(st.sampled_from([str(number), str(number), f"({number})", f"({number + 3} - 3)"]))


def dest_text(dest: tuple[int, ...]) -> str:
    return "none" if not dest else str(dest[0]) if len(dest) == 1 else f"[{' '.join(map(str, dest))}]"


@st.composite
def one_document(draw: st.DrawFn, draft: PlanDraft, rank: int, times: int = 1) -> str:
    """A `doc` on a rank, which is written once and stands there `times` times."""
    name = draw(st.sampled_from(["", "", "story", "tale"]))
    if draw(st.booleans()):
        length, many = draw(st.integers(0, 40)), draw(st.integers(1, 5))
        lengths = [length // many + (number < length % many) for number in range(many)]
        cut = "" if many == 1 and draw(st.booleans()) else f" as {number_text(draw, many)} shards"
    else:
        lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
        cut = f" as {' '.join(number_text(draw, length) for length in lengths)}"
    ranks = st.integers(0, draft.ranks - 1)
    one = st.tuples() | st.tuples(ranks) | (st.tuples(ranks, ranks) if draft.several else st.tuples(ranks))
    if draw(st.booleans()):
        dests = [draw(one)] * len(lengths)
        written = dest_text(dests[0])
    else:
        dests = [draw(one) for _ in lengths]
        written = " ".join(map(dest_text, dests))
    for _ in range(times):
        draft.add(rank, name, lengths, dests)
    words = [name] * bool(name) + [number_text(draw, sum(lengths))]
    return f"doc {' '.join(words)}{cut} -> {written}"


@st.composite
def one_block(draw: st.DrawFn, draft: PlanDraft) -> list[str]:
    """The block of a rank, or one of each rank in a loop."""
    if draw(st.integers(0, 3)) == 0:
        first = draw(st.integers(0, draft.ranks))
        length = draw(st.integers(0, 9))
        for rank in range(first, draft.ranks):
            draft.add(rank, "", [length + rank], [((rank + 1) % draft.ranks,)])
        doc = f"doc (r + {length}) -> ((r + 1) % {draft.ranks})"
        return [f"  for r in {first} ..< {draft.ranks} {{ rank r {{ {doc} }} }}"]
    rank = draw(st.integers(0, draft.ranks - 1))
    lines = []
    for _ in range(draw(st.integers(0, 3))):
        times = draw(st.sampled_from([1, 1, 1, 0, 3]))
        doc = draw(one_document(draft, rank, times))
        lines.append(doc if times == 1 else f"repeat {times} {{ {doc} }}")
    return [f"  rank {number_text(draw, rank)} {{", *(f"    {line}" for line in lines), "  }"]


@st.composite
def plans(draw: st.DrawFn) -> DrawnPlan:
    """The one strategy for valid plans: documents that span ranks, empty ranks and shards, copies, what stays."""
    ranks, mask = draw(st.integers(1, 5)), draw(st.sampled_from(["", "causal", "causal", "full"]))
    sharing = draw(st.sampled_from(["rank", "query"])) if mask else ""
    draft = PlanDraft(ranks, several=not mask)
    blocks = [line for _ in range(draw(st.integers(0, 5))) for line in draw(one_block(draft))]
    settings = [f"  {mask}"] * bool(mask) + [f"  send once per {sharing}"] * bool(sharing)
    text = "\n".join([f"plan drawn for {ranks} ranks {{", *settings, *blocks, "}", ""])
    return DrawnPlan(text, ranks, mask, sharing or "query", tuple(draft.shards))


@st.composite
def untidy(draw: st.DrawFn, text: str) -> str:
    """The same schedule, written carelessly: blanks, empty lines and comments where they may stand."""
    lines = []
    for line in text.splitlines():
        lines += draw(st.lists(st.sampled_from(["", "   # a line of its own"]), max_size=1))
        tail = draw(st.sampled_from(["", "", "   ", "  # at the end of a line", "  #"]))
        lines.append(line.replace(" ", draw(st.sampled_from([" ", "  "]))) + tail)
    return "\n".join(lines) + "\n"
