"""Resolving: what a text means as arrays, and every mistake of a file in one run."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commdsl.ir import resolve
from commdsl.ir.resolve import fn
from commdsl.ir.resolve.evaluate import Evaluator
from commdsl.ir.resolve.faults import Faults
from commdsl.ir.schedules import Schedule, Statement, Step, Yield
from commdsl.language import parser
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import CommError
from commdsl.language.kinds import MoveKind
from commdsl.language.source import Source
from commdsl.machine.topology import Topology, switch


def _resolve(text: str, ranks: int = 4, topology: Topology | None = None, **params: int) -> Schedule:
    file = parser.parse(Source("test.comm", text))
    decl = next(item for item in file.items if isinstance(item, syn.ScheduleDecl))
    return resolve.resolve((file,), decl, ranks, topology or switch(ranks), params)


def _codes(text: str, ranks: int = 4, topology: Topology | None = None, **params: int) -> list[tuple[str, int]]:
    """The codes of all faults with their lines."""
    with pytest.raises(CommError) as caught:
        _resolve(text, ranks, topology, **params)
    return [(found.code, found.primary.span.position[0]) for found in caught.value.diagnostics]


def _schedule(body: str, head: str = "schedule s for P ranks") -> str:
    return f"{head} {{\n{body}\n}}\n"


def _moves(schedule: Schedule) -> list[Statement]:
    return [moves for step in schedule.steps if isinstance(step, Step) for moves in step.moves]


def _rows(moves: Statement) -> list[tuple[int, list[tuple[int, int]], tuple[int, int]]]:
    """(actor, [(source rank, source chunk)], (destination rank, destination chunk)) for each row."""
    valid = np.ones(moves.source_rank.shape, bool) if moves.source_valid is None else moves.source_valid
    return [
        (
            int(moves.actor[i]),
            [
                (int(moves.source_rank[i, k]), int(moves.source_chunk[i, k]))
                for k in range(moves.source_rank.shape[1])
                if valid[i, k]
            ],
            (int(moves.dest_rank[i]), int(moves.dest_chunk[i])),
        )
        for i in range(len(moves.actor))
    ]


FREE = "ensure each r where r == 0 { y == x }\n"  # any contract, for tests of steps alone
BLOCK = "ensure each r where r == 0 { y[0] == x }\n"


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_step_has_a_row_for_each_binding() -> None:
    """Rows come in the order of nested loops, without those that `where` leaves out."""
    text = _schedule(f"input x[P]\noutput y[P]\n{FREE}each r, q where q != r {{ put x[q] -> y[r] @ q }}")
    (moves,) = _moves(_resolve(text, 3))
    assert moves.kind is MoveKind.PUT
    assert _rows(moves) == [(r, [(r, q)], (q, r)) for r in range(3) for q in range(3) if q != r]
    assert all(
        array.dtype == np.int32 for array in (moves.actor, moves.source_chunk, moves.dest_rank, moves.dest_chunk)
    )


def test_binders_may_depend_on_earlier_ones() -> None:
    """A range is evaluated for each row of the binders before it."""
    text = _schedule(f"input x[P]\noutput y[P]\n{FREE}each r, i in r ..< P {{ copy x[i] -> y[i] }}")
    (moves,) = _moves(_resolve(text, 4))
    assert _rows(moves) == [(r, [(r, i)], (r, i)) for r in range(4) for i in range(r, 4)]


def test_missing_indices_mean_every_chunk() -> None:
    """A reference that leaves out trailing extents moves a row of chunks for each binding."""
    text = _schedule(f"input x[3]\noutput y[P blocks, 3]\n{BLOCK}each r {{ put x -> y[r] @ (r + 1) % P }}")
    (moves,) = _moves(_resolve(text, 2))
    assert _rows(moves) == [(r, [(r, c)], ((r + 1) % 2, 3 * r + c)) for r in range(2) for c in range(3)]


def test_let_and_if_inside_each() -> None:
    """`let` names a value a row, `if` picks rows; what is left out is not evaluated."""
    text = _schedule(
        f"""input x[P]\noutput y[P]\n{FREE}
        each r {{
          let next = (r + 1) % P
          if r > 0 {{ put x[12 / r % P] -> y[0] @ next }} else {{ let two = 2  put x[two] -> y[1] @ next }}
        }}"""
    )
    first, second = _moves(_resolve(text, 4))
    assert _rows(first) == [(r, [(r, 12 // r % 4)], ((r + 1) % 4, 0)) for r in (1, 2, 3)]
    assert _rows(second) == [(0, [(0, 2)], (1, 1))]


def test_reduce_of_one_source_accumulates() -> None:
    """`reduce a -> b` has the old b as its first operand; it is no list."""
    text = _schedule(
        f"inout x[P]\noutput y\ninput z\n{FREE.replace('== x', '== z')}each r {{ reduce x[r] -> x[r] @ (r + 1) % P }}"
    )
    (moves,) = _moves(_resolve(text))
    assert (moves.accumulate, moves.is_list) == (True, False)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x[r] @ all", lambda r: [(q, r) for q in range(4)]),
        ("x[q] for q in 0 ..< P if q != r", lambda r: [(r, q) for q in range(4) if q != r]),
        ("x[q] @ q for q in 0 ..< r", lambda r: [(q, q) for q in range(r)]),
        ("x[r] @ (r + q) % P for q in 0 ..< 2", lambda r: [((r + q) % 4, r) for q in range(2)]),
    ],
)
def test_reduce_of_a_list(source: str, expected) -> None:
    """A list has its sources in order; the length and the condition may differ from rank to rank."""
    text = _schedule(
        "input x[P]\noutput y\noutput w[P]\nensure each r where r == 0 { w == x }\n"
        f"each r where r > 0 {{ reduce {source} -> y }}"
    )
    (moves,) = _moves(_resolve(text))
    assert (moves.accumulate, moves.is_list) == (False, True)
    assert _rows(moves) == [(r, expected(r), (r, 0)) for r in (1, 2, 3)]


def test_reduce_of_a_list_over_partial_references() -> None:
    """Every chunk left out gets a list of its own."""
    text = _schedule(
        "input x[P blocks, 2]\noutput y[2]\nensure reduce_scatter(x -> y)\neach r { reduce x[r] @ all -> y }"
    )
    (moves,) = _moves(_resolve(text, 3))
    assert _rows(moves) == [(r, [(q, 2 * r + c) for q in range(3)], (r, c)) for r in range(3) for c in range(2)]


def test_cycles_move_along_their_arcs() -> None:
    """`next` and `prev` are inverse, `at` and `position` too; a cycle as a number is its index."""
    text = _schedule(
        f"""cycles C = hamilton(P)
        input x[len(C)]\noutput y[len(C)]\n{FREE}
        each r, c in C {{
          put x[c] -> y[c] @ c.next(r)
          put x[c] -> y[c] @ c.prev(c.next(r))
          put x[c] -> y[c] @ c.at(c.position(r) + 1)
          put x[c] -> y[c] @ C[c].next(r)
        }}"""
    )
    schedule = _resolve(text, 5)
    along, home, at, indexed = _moves(schedule)
    orders = schedule.cycles[0].orders
    arcs = {(int(a), c): int(b) for c, row in enumerate(orders) for a, b in zip(row, np.roll(row, -1), strict=True)}
    assert _rows(along) == [(r, [(r, c)], (arcs[r, c], c)) for r in range(5) for c in range(4)]
    assert (home.dest_rank == home.actor).all()
    assert (at.dest_rank == along.dest_rank).all()
    assert (indexed.dest_rank == along.dest_rank).all()


def test_a_path_has_no_arc_at_its_end() -> None:
    """Beyond the end of a path there is no rank: -1, for the bounds law to report."""
    text = _schedule(
        f"cycles C = paths(P)\ninput x[P]\noutput y[P]\n{FREE}each r, c in C {{ put x[c] -> y[c] @ c.next(r) }}"
    )
    schedule = _resolve(text, 4)
    (moves,) = _moves(schedule)
    ends = set(zip(schedule.cycles[0].orders[:, -1].tolist(), range(4), strict=True))
    for actor, sources, dest in _rows(moves):
        assert (dest[0] == -1) == ((actor, sources[0][1]) in ends)
    assert not schedule.cycles[0].closed


def test_loops_name_their_iteration() -> None:
    """Each step carries the variables of the loops around it, cycles by index; yields too."""
    text = _schedule(
        "inout x\nensure rotation(x)\ncycles C = (0 1) (1 0)\n"
        "for s in 0 ..< 2 { for c in C { if s == c { each r { put x -> x @ c.next(r) } } } yield x }"
    )
    schedule = _resolve(text, 2)
    assert [(type(step), step.bindings) for step in schedule.steps] == [
        (Step, (("s", 0), ("c", 0))),
        (Yield, (("s", 0),)),
        (Step, (("s", 1), ("c", 1))),
        (Yield, (("s", 1),)),
    ]


def test_indices_out_of_range_are_left_for_the_checks() -> None:
    """One index stays as written; of several, one out of range must not become another chunk."""
    text = _schedule(f"input x[2]\noutput y[P blocks, 2]\n{BLOCK}each r {{ put x[r] -> y[r, 2] @ r + 1 }}")
    (moves,) = _moves(_resolve(text, 3))
    assert moves.source_chunk[:, 0].tolist() == [0, 1, 2]
    assert (moves.dest_chunk < 0).all()
    assert moves.dest_rank.tolist() == [1, 2, 3]


def test_steps_share_what_does_not_change() -> None:
    """An array that does not depend on the loop is the same object in every step."""
    text = _schedule(
        "inout x[P]\nensure allreduce(x)\n"
        "for s in 0 ..< P { each r { put x[(r - s) % P] -> x[(r - s) % P] @ (r + 1) % P } }"
    )
    first, second, *_ = _moves(_resolve(text, 4))
    assert first.dest_rank is second.dest_rank
    assert first.dest_chunk is not second.dest_chunk
    assert second.dest_chunk.base is second.source_chunk.base or np.shares_memory(
        second.dest_chunk, second.source_chunk
    )


def test_a_large_ring_resolves_fast() -> None:
    """2,046 steps of 1,024 transfers each: about two million in well under two seconds."""
    text = _schedule(
        "inout x[P]\nensure allreduce(x)\n"
        "for s in 0 ..< P - 1 { each r { reduce x[(r - s) % P] -> x[(r - s) % P] @ (r + 1) % P } }\n"
        "for s in 0 ..< P - 1 { each r { put x[(r + 1 - s) % P] -> x[(r + 1 - s) % P] @ (r + 1) % P } }"
    )
    start = time.thread_time()
    schedule = _resolve(text, 1024)
    assert time.thread_time() - start < 2
    assert len(schedule.steps) == 2046


# --- contracts --------------------------------------------------------------------------------------------------------


def _promises(schedule: Schedule, index: int = 0) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
    """Destination (rank, chunk) -> the initial chunks it is the combination of."""
    contract = schedule.contracts[index]
    valid = np.ones(contract.source_rank.shape, bool) if contract.source_valid is None else contract.source_valid
    found = {}
    for rank, chunk, value in zip(
        contract.dest_rank.tolist(), contract.dest_chunk.tolist(), contract.value.tolist(), strict=True
    ):
        pairs = zip(
            contract.source_rank[value].tolist(), contract.source_chunk[value].tolist(), valid[value], strict=True
        )
        found[rank, chunk] = tuple((r, c) for r, c, there in pairs if there)
    return found


P3 = range(3)
NAMED = {
    "inout x[P]|allreduce(x)": ({(r, c): tuple((q, c) for q in P3) for r in P3 for c in P3}, True),
    "input x[2]  output y[2]|allreduce(x -> y)": (
        {(r, c): tuple((q, c) for q in P3) for r in P3 for c in (0, 1)}, True),
    "input x[P blocks, 2]  output y[2]|reduce_scatter(x -> y)": (
        {(r, c): tuple((q, 2 * r + c) for q in P3) for r in P3 for c in (0, 1)}, True),
    "inout x[P]|reduce_scatter(x)": ({(r, r): tuple((q, r) for q in P3) for r in P3}, True),
    "input x[2]  output y[P blocks, 2]|allgather(x -> y)": (
        {(r, 2 * q + c): ((q, c),) for r in P3 for q in P3 for c in (0, 1)}, False),
    "inout x[P blocks]|allgather(x)": ({(r, q): ((q, q),) for r in P3 for q in P3}, False),
    "input x[P blocks]  output y[P blocks]|alltoall(x -> y)": ({(r, q): ((q, r),) for r in P3 for q in P3}, False),
    "inout x[2]|broadcast(x, 1)": ({(r, c): ((1, c),) for r in P3 for c in (0, 1)}, False),
    "inout x[2]|reduce(x, 2)": ({(2, c): tuple((q, c) for q in P3) for c in (0, 1)}, True),
    "input x  output y[P blocks]|gather(x -> y, 1)": ({(1, q): ((q, 0),) for q in P3}, False),
    "input x[P blocks]  output y|scatter(x -> y, 1)": ({(r, 0): ((1, r),) for r in P3}, False),
    "input x  output y|permutation(x -> y) r -> (r + 1) % P": ({((r + 1) % 3, 0): ((r, 0),) for r in P3}, False),
}  # fmt: skip


@pytest.mark.parametrize("text", NAMED)
def test_named_contracts(text: str) -> None:
    """A collective promises for each chunk of the result exactly the chunks that its definition says."""
    buffers, ensure = text.split("|")
    schedule = _resolve(_schedule(f"{buffers}\nensure {ensure}"), 3)
    promises, combines = NAMED[text]
    assert _promises(schedule) == promises
    assert schedule.contracts[0].operation == ("sum" if combines else None)
    assert schedule.contracts[0].name == ensure.split("(")[0]


@pytest.mark.parametrize(
    ("buffers", "named", "general"),
    [
        ("input x[2]  output y[2]", "allreduce(x -> y)", "each r { y == sum(x @ q for q in 0 ..< P) }"),
        ("input x[2]  output y[2]", "allreduce(x -> y)", "each r, c in 0 ..< 2 { y[c] == sum(x[c] @ all) }"),
        ("input x  output y[P blocks]", "allgather(x -> y)", "each r, q { y[q] == x @ q }"),
        ("input x[P blocks]  output y", "scatter(x -> y, 0)", "each r { y == x[r] @ 0 }"),
        ("input x  output y[P blocks]", "gather(x -> y, 0)", "each r, q where r == 0 { y[q] == x @ q }"),
    ],
)
def test_the_general_form_says_the_same(buffers: str, named: str, general: str) -> None:
    """A collective and its spelled-out form promise the same."""
    first = _resolve(_schedule(f"{buffers}\nensure {named}"), 3)
    second = _resolve(_schedule(f"{buffers}\nensure {general}"), 3)
    assert _promises(first) == _promises(second)
    assert first.contracts[0].operation == second.contracts[0].operation


def test_what_a_condition_leaves_out_need_not_be_there() -> None:
    """A list may run over more ranks and chunks than there are, where its condition leaves those out."""
    text = _schedule(
        "input x[2]\noutput y[2]\nensure each r, c in 0 ..< 2 { y[c] == sum(x[c] @ q for q in 0 ..< 9 if q < P) }\n"
        "each r, c in 0 ..< 2 { reduce x[c + q / 2] @ q for q in 0 ..< 9 if q < 2 -> y[c] }"
    )
    schedule = _resolve(text, 3)
    assert _promises(schedule)[1, 1] == ((0, 1), (1, 1), (2, 1))
    (moves,) = _moves(schedule)
    assert _rows(moves)[1] == (0, [(0, 1), (1, 1)], (0, 1))
    assert {int(moves.source_rank.max()), int(moves.source_chunk.max())} == {2, 1}


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("each r { y == sum(x @ q for q in 0 ..< r) }", "where r > 0"),
        ("each r { y == sum(x @ q for q in r + 2 ..< P) }", "where r < 2"),
        ("each me { y == sum(x @ q for q in 0 ..< P if me != 1) }", "where me != 1"),
    ],
)
def test_an_empty_sum_is_mended_as_its_message_says(text: str, mend: str) -> None:
    """The condition that the help names leaves out the ranks that sum nothing, and no other."""
    with pytest.raises(CommError) as caught:
        _resolve(_schedule(f"input x\noutput y\nensure {text}"), 4)
    (found,) = caught.value.diagnostics
    assert found.code == "C315"
    assert found.help.endswith(f"out: `{mend}`")
    mended = _resolve(_schedule(f"input x\noutput y\nensure {text.replace(' {', f' {mend} {{')}"), 4)
    assert len(_promises(mended)) == {"where r < 2": 2}.get(mend, 3)
    assert all(_promises(mended).values())


def test_a_rotation_has_no_rows() -> None:
    """What a rotation promises is judged over its yields."""
    contract = _resolve(_schedule("inout kv[2]\nensure rotation(kv)\nyield kv"), 3).contracts[0]
    assert (len(contract.dest_rank), contract.source_rank.shape) == (0, (0, 1))


# --- parameters, ranks, topology --------------------------------------------------------------------------------------

SHIFT = "input x\noutput y\nensure permutation(x -> y) r -> (r + K) % P\neach r { put x -> y @ (r + K) % P }"


def test_parameters_take_defaults_from_the_topology() -> None:
    """`gpus` and `nodes` are the topology's, nodes as many as the ranks fill; a given value wins."""
    machine = Topology("m", 4, 8, 132, switch(8).links)
    head = "schedule s(G = gpus, N = nodes, K = G + N) for P ranks"
    assert _resolve(_schedule(SHIFT, head), 16, machine).params == (("G", 8), ("N", 2), ("K", 10))
    assert _resolve(_schedule(SHIFT, head), 16, machine, G=4).params == (("G", 4), ("N", 2), ("K", 6))


@pytest.mark.parametrize(("ranks", "help"), [(7, "6 and 8"), (1, "2 ranks")])
def test_where_names_the_nearest_rank_counts(ranks: int, help: str) -> None:
    """A rank count that `where` refuses is answered with those that fit."""
    with pytest.raises(CommError) as caught:
        _resolve(_schedule(SHIFT, "schedule s(K = 1) for P ranks where P % 2 == 0"), ranks)
    (found,) = caught.value.diagnostics
    assert found.code == "C501"
    assert help in found.help


def test_nearest_rank_counts_fit() -> None:
    """What is said to fit does, with the parameters as they then are; none does where a node always has all ranks, and
    none beyond the ranks of a machine.
    """
    head = "schedule s(G = gpus, K = 1) for P ranks where P > G and P % G == 0"
    box = Topology("box", 2, 4, 132, switch(8).links)
    for machine, said in ((switch(8), "or say with `--on` for which machine"), (box, "8 ranks would fit")):
        with pytest.raises(CommError, match="C501") as caught:
            _resolve(_schedule(SHIFT, head), 4 if machine is box else 8, machine)
        assert said in caught.value.diagnostics[0].help


def test_fewer_ranks_than_gpus_are_the_first_ones() -> None:
    """A topology may be larger than the schedule."""
    assert _resolve(_schedule(SHIFT, "schedule s(K = 1) for P ranks"), 3, switch(8)).num_ranks == 3


# --- faults -----------------------------------------------------------------------------------------------------------


def test_all_faults_in_one_run() -> None:
    """Mistakes of different statements are all reported, in the order of the text."""
    text = _schedule(
        """input x[P]
output y[P]
ensure permutation(x -> y)
let z = unknwon + 1
tune { threads 5 }
each r { put x[z] -> y[r, 0] @ q }
each r { get x[0] -> y[0] @ r }
copy x -> y"""
    )
    assert _codes(text) == [("C105", 4), ("C101", 5), ("C505", 6), ("C103", 7), ("C101", 7), ("C112", 8), ("C110", 9)]


def test_a_poisoned_value_is_silent() -> None:
    """What depends on a value that has no value is not reported again."""
    text = _schedule(
        f"input x\noutput y\n{FREE}let a = log2(P)\nlet b = a + 1\n"
        "for s in 0 ..< b { each r { put x -> y @ (r + a) % P } }"
    )
    assert _codes(text, 6) == [("C508", 5)]


@pytest.mark.parametrize(
    "size", ["len()", "min()", "C[0].next()", "C.next(0)", "x", "C", "y[0]", "log(2)", "C[9].at(0)"]
)
def test_a_broken_extent_is_one_message(size: str) -> None:
    """Whatever stands where a number is meant, it is told once and nothing else is."""
    text = _schedule(
        f"cycles C = ring\ninput x[{size}]\noutput y\nensure permutation(x -> y) r -> r\neach r {{ put x -> y @ r }}"
    )
    assert [line for _, line in _codes(text)] == [3]


def test_one_mistake_in_a_loop_is_one_message() -> None:
    """A statement that fails in every iteration is reported for the first one."""
    text = _schedule(f"input x\noutput y\n{FREE}for s in 1 ..< P {{ each r {{ put x -> y @ r / (s - s) }} }}")
    with pytest.raises(CommError) as caught:
        _resolve(text)
    (found,) = caught.value.diagnostics
    assert (found.code, found.notes) == ("C508", ("with s = 1",))


def test_near_names_are_suggested() -> None:
    """A misspelt name is answered with the nearest one of its kind."""
    with pytest.raises(CommError) as caught:
        _resolve(
            _schedule("input tokens\noutput y\nensure permutation(tokens -> y) r -> r\neach r { put toknes -> y @ r }")
        )
    assert caught.value.diagnostics[0].help == "did you mean `tokens`?"


def test_names_end_with_their_block() -> None:
    """A name of a loop's body is not known after it, and two loops may use the same."""
    body = "for s in 0 ..< 1 { let a = s each r { put x -> y @ a } }\n"
    assert _resolve(_schedule(f"input x\noutput y\n{FREE}{body}{body}"))
    assert _codes(_schedule(f"input x\noutput y\n{FREE}{body}each r {{ put x -> y @ a }}")) == [("C101", 6)]


def test_unused_names_are_warned_of() -> None:
    """Only warnings: the schedule resolves."""
    text = _schedule(
        f"input x\noutput y\nscratch t\n{FREE}let a = 1\nlet b = 2\neach r, i in 0 ..< b {{ put x -> y @ r }}"
    )
    file = parser.parse(Source("test.comm", text))
    (decl,) = file.items
    assert isinstance(decl, syn.ScheduleDecl)
    assert [found.headline for found in resolve.warnings((file,), decl)] == ["`t` is never used", "`a` is never used"]
    assert _resolve(text)


# --- expressions ------------------------------------------------------------------------------------------------------

NAMES = ("r", "i", "P")


def _expressions() -> st.SearchStrategy[str]:
    leaves = st.sampled_from(NAMES) | st.integers(0, 9).map(str)
    binary = st.sampled_from(["+", "-", "*", "/", "%", "<<", ">>", "&", "^", "|", "**"])
    comparison = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])

    def extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return (
            st.builds(lambda a, o, b: f"({a} {o} {b})", inner, binary, inner)
            | st.builds(lambda a, b, f: f"{f}({a}, {b})", inner, inner, st.sampled_from(["min", "max"]))
            | st.builds(lambda a: f"(-{a})", inner)
            | st.builds(lambda a, f: f"{f}({a})", inner, st.sampled_from(["abs", "floor_log2"]))
            | st.builds(lambda a, b, i: f"[3, {a}, {b}][{i}]", st.integers(0, 9), st.sampled_from(["P", "7"]), inner)
            | st.builds(lambda a, b, c: f"({a} if {b} < {c} else {b} / {a})", inner, inner, inner)
            | st.builds(lambda a, b: f"far({a}, {b})", inner, inner)
        )

    numbers = st.recursive(leaves, extend, max_leaves=6)
    return numbers | st.builds(lambda a, o, b: f"({a} {o} {b})", numbers, comparison, numbers)


@given(_expressions())
def test_vectors_and_numbers_agree(text: str) -> None:
    """An expression over arrays is what it is for each row alone, and what Python says, where it has a value."""
    far = "fn far(a, b) = a - b if a > b else b - a"
    file = parser.parse(Source("e.comm", f"{far} schedule s for P ranks {{ let v = {text} }}"))
    function, decl = file.items
    assert isinstance(function, syn.FnDecl)
    assert isinstance(decl, syn.ScheduleDecl)
    let = decl.body[0]
    assert isinstance(let, syn.Let)
    known = fn.functions([function], Faults())
    evaluator = Evaluator(Faults())
    rows = [(r, i) for r in range(4) for i in range(3)]

    def attempt(scope: dict) -> object:
        try:
            return evaluator.number(let.value, {**known, **scope})
        except Exception as error:
            return type(error)

    singles = [attempt({"P": 4, "r": r, "i": i}) for r, i in rows]
    columns = {"P": 4, "r": np.array([r for r, _ in rows]), "i": np.array([i for _, i in rows])}
    together = attempt(columns)
    if any(isinstance(single, type) for single in singles):
        return
    names = {"min": min, "max": max, "abs": abs, "far": lambda a, b: abs(a - b)}
    names["floor_log2"] = lambda number: number.bit_length() - 1
    python = [eval(text.replace("/", "//"), {**names, "P": 4, "r": r, "i": i}) for r, i in rows]
    assert singles == python
    if not isinstance(together, type):
        assert np.broadcast_to(np.asarray(together), len(rows)).tolist() == python
