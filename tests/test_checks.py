"""The laws on the IR other than conservation: each accepts what is legal and names what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ir_builder as build
import numpy as np
import pytest

from commdsl import compiler
from commdsl.checks import check_schedule
from commdsl.checks.roles import unused_roles
from commdsl.ir.schedules import AnyStep, Buffer, CycleSet, RoleSet, Schedule, Statement, Yield
from commdsl.language.diagnostics import CommError, Diagnostic, Severity
from commdsl.language.kinds import BufferKind, LinkScope, MoveKind
from commdsl.language.parser import parse
from commdsl.language.source import Source
from commdsl.machine.topology import Link, Topology

RANKS = 4
ME = np.arange(RANKS)
X = build.buffer(BufferKind.INPUT, "x", cut=RANKS)
Y = build.buffer(BufferKind.OUTPUT, "y", cut=RANKS)
T = build.buffer(BufferKind.SCRATCH, "t", cut=RANKS)


def put(source: tuple[int, object, object], dest: tuple[int, object, object], line: int = 5) -> Statement:
    return build.move(MoveKind.PUT, source, dest, ME, line)  # type: ignore[arg-type]


def made(*steps: AnyStep, buffers: tuple[Buffer, ...] = (X, Y, T), wanted: int = 1) -> Schedule:
    """A schedule that promises chunk 0 of the left neighbour's x in chunk 0 of y."""
    contract = build.copies_contract("general", 0, wanted, [(r, 0, (r - 1) % RANKS, 0) for r in range(RANKS)])
    return build.schedule(RANKS, buffers, (contract,), steps)


def broken(schedule: Schedule) -> tuple[Diagnostic, ...]:
    """All that is wrong, but for chunks that nobody touches, of which there are many here."""
    return tuple(one for one in check_schedule(schedule) if one.code != "C181")


def only(schedule: Schedule) -> Diagnostic:
    (diagnostic,) = broken(schedule)
    return diagnostic


RIGHT = put((0, ME, 0), (1, (ME + 1) % RANKS, 0))


def test_legal_schedules_pass() -> None:
    """Rings of several sizes, a rotation, and a plain neighbour copy break no law."""
    assert broken(made(build.step(RIGHT))) == ()
    for ranks in (1, 2, 3, 5, 6, 7, 8, 16):
        assert broken(build.ring_allreduce(ranks)) == ()
        assert broken(build.ring_rotation(ranks)) == ()


@pytest.mark.parametrize(
    ("moves", "named"),
    [
        (put((0, ME, ME + 1), (1, ME, ME)), "`x[4]` does not exist"),
        (put((0, ME, -1), (1, ME, ME)), "`x[-1]` does not exist"),
        (put((0, ME, ME), (1, ME, ME + 2)), "`y[4]` does not exist"),
        (put((0, ME, ME), (1, ME + 1, ME)), "rank 4 does not exist"),
    ],
)
def test_bounds(moves: Statement, named: str) -> None:
    """An index past the end names the value, the rank and the loop variables, once for all iterations."""
    found = only(made(build.step(RIGHT), build.step(moves, s=2), build.step(moves, s=3)))
    assert found.code == "C301"
    assert named in found.primary.text
    assert "s = 2" in found.primary.text


def test_indices_left_out_of_a_list_are_not_out_of_bounds() -> None:
    """Sources that a condition leaves out may have any index."""
    every = np.tile(np.arange(RANKS), (RANKS, 1))
    valid = every != ME[:, None]
    chunk = np.where(valid, 0, 99)
    move = build.move(MoveKind.REDUCE, (0, every, chunk), (1, ME, 0), ME, is_list=True, valid=valid)
    assert {found.code for found in broken(made(build.step(move)))} == {"C308"}


def test_two_writes_of_one_step() -> None:
    """One statement that writes a place from several ranks, and two statements that write one place, are overlaps."""
    gathered = put((0, ME, 0), (1, 0, 0))
    found = only(made(build.step(gathered, s=1)))
    assert found.code == "C302"
    assert found.primary.text == "rank 0 and rank 3, s = 1: both write `y[0]` on rank 0"
    twice = only(made(build.step(RIGHT, put((0, ME, 1), (1, (ME + 1) % RANKS, 0), 6))))
    assert twice.code == "C302"
    assert [label.span for label in twice.secondary] == [build.span(5)]


def test_two_reduces_into_one_place() -> None:
    """The order of two reduces of one step is nobody's: an overlap too, with a list as the way out."""
    reduce = build.move(MoveKind.REDUCE, (0, ME, 0), (1, 0, 0), ME)
    found = only(made(build.step(put((0, ME, 0), (1, ME, 0), 4)), build.step(reduce)))
    assert found.code == "C302"
    assert "reduce a list" in found.help


def test_reading_and_writing_one_place_in_one_step_is_legal() -> None:
    """Reads come before writes: a rotation in place sends and receives the same chunk at once."""
    assert broken(build.ring_rotation(3)) == ()


def test_writes_to_inputs() -> None:
    """An input is the caller's."""
    found = only(made(build.step(put((0, ME, 0), (0, ME, 1)))))
    assert found.code == "C303"
    assert found.secondary[0].span == X.span


def test_undefined_reads() -> None:
    """A slot nobody wrote, an output nobody wrote, a sum into nothing, a yield of nothing: one message each."""
    pull = put((2, ME, 1), (1, ME, 0))
    assert "`t[1]` on rank 0" in only(made(build.step(pull, s=0), build.step(pull, s=1))).primary.text
    reduce = build.move(MoveKind.REDUCE, (0, ME, 0), (1, ME, 0), ME)
    assert "reduces into `y[0]`" in only(made(build.step(reduce))).primary.text
    shown = only(made(build.step(RIGHT), Yield((1,), (("s", 1),), build.span(7))))
    assert shown.code == "C304"
    assert shown.primary.text == "s = 1: yields `y[1]` on rank 0"


def test_what_reads_undefined_data_does_not_spread_the_blame() -> None:
    """Data made from undefined data counts as defined: one mistake, one message."""
    first, then = put((2, ME, 1), (2, ME, 2), 5), put((2, ME, 2), (1, ME, 0), 6)
    assert only(made(build.step(first), build.step(then))).primary.span == build.span(5)


def test_empty_lists() -> None:
    """A reduction whose condition leaves out every source makes nothing."""
    every = np.tile(np.arange(RANKS), (RANKS, 1))
    move = build.move(
        MoveKind.REDUCE, (0, every, 0), (1, ME, 0), ME, is_list=True, valid=np.zeros((RANKS, RANKS), np.bool_)
    )
    found = only(made(build.step(move)))
    assert found.code == "C304"
    assert "no sources" in found.headline


def test_size_classes() -> None:
    """Pieces of different index or cut differ in length for some tensor; scratch takes any, and keeps it."""
    assert only(made(build.step(put((0, ME, 1), (1, ME, 0))))).code == "C305"
    whole = build.buffer(BufferKind.OUTPUT, "y")
    assert only(made(build.step(RIGHT), buffers=(X, whole))).code == "C305"
    through = (put((0, ME, 1), (2, ME, 3), 5), put((2, ME, 3), (1, ME, 1), 6), put((2, ME, 3), (1, ME, 2), 7))
    steps = [build.step(move) for move in through]
    assert only(made(build.step(RIGHT), *steps)).primary.span == build.span(7)
    added = build.move(MoveKind.REDUCE, (0, ME, 2), (2, ME, 3), ME, 6)
    assert only(made(build.step(RIGHT), steps[0], build.step(added))).primary.span == build.span(6)


def test_lists_of_unequal_sizes() -> None:
    """A list combines pieces of one size."""
    here = np.repeat(ME[:, None], 2, axis=1)
    move = build.move(MoveKind.REDUCE, (0, here, np.tile([0, 1], (RANKS, 1))), (2, ME, 0), ME, is_list=True)
    found = only(made(build.step(RIGHT), build.step(move)))
    assert found.code == "C305"
    assert "sources" in found.headline


def test_links() -> None:
    """On a ring of links only neighbours talk; copies need no link."""
    machine = build.ring_machine(RANKS)
    far = put((0, ME, 0), (1, (ME + 2) % RANKS, 0))
    assert broken(replace(made(build.step(RIGHT)), topology=machine)) == ()
    found = only(replace(made(build.step(far)), topology=machine))
    assert found.code == "C401"
    assert found.primary.text == "rank 0: no link from rank 0 to rank 2"
    hole = replace(build.switch(RANKS), missing=frozenset({(2, 3)}))
    assert "from rank 2 to rank 3" in only(replace(made(build.step(RIGHT)), topology=hole)).primary.text


def test_a_link_is_missed_once() -> None:
    """Two statements over the same missing link are one mistake: the wrong machine."""
    hole = replace(build.switch(RANKS), missing=frozenset({(3, 0)}))
    assert only(build.ring_allreduce(RANKS, hole)).primary.span == build.span(5)


def test_rails_join_equal_gpus_only() -> None:
    """Across nodes a rail reaches the GPU of the same index."""
    machine = build.two_nodes(2)
    assert broken(replace(made(build.step(RIGHT)), topology=machine))[0].code == "C401"


def with_cycles(*orders: list[int], closed: bool = True, topology: Topology | None = None) -> Schedule:
    cycles = CycleSet("C", np.array(orders, dtype=np.int32), closed, span=build.span(8))
    return replace(made(build.step(RIGHT)), cycles=(cycles,), topology=topology or build.switch(RANKS))


def test_cycles() -> None:
    """Cycles visit every rank once, share no arc and follow links; the arcs of opposite directions are different."""
    assert broken(with_cycles([0, 1, 2, 3], [3, 2, 1, 0])) == ()
    assert only(with_cycles([0, 1, 2, 2])).primary.text == "cycle 0 misses rank 3, visits rank 2 more than once"
    assert "rank 7, which there is not" in only(with_cycles([0, 1, 2, 7])).primary.text
    assert only(with_cycles([0, 1, 2])).code == "C402"
    shared = only(with_cycles([0, 1, 2, 3], [0, 2, 3, 1]))
    assert shared.code == "C403"
    assert shared.primary.text == "cycles 0 and 1 both go 2 -> 3"
    unlinked = only(with_cycles([0, 2, 1, 3], topology=build.ring_machine(RANKS)))
    assert unlinked.code == "C405"
    assert unlinked.primary.text == "cycle 0 goes 0 -> 2"


def test_paths_are_open() -> None:
    """A path has no arc from its last rank to its first, and stands for the same path in every node."""
    line = np.array([(0, 1), (1, 0)], dtype=np.int32)
    pair = Topology("pairs", 2, 2, 100, (
        Link("wire", LinkScope.PAIRS, np.inf, 1e9, 1e-6, line), Link("rail", LinkScope.ACROSS_NODES, 1e9, np.inf, 1e-6),
    ))  # fmt: skip
    assert broken(with_cycles([0, 1], [1, 0], closed=False, topology=pair)) == ()
    cut = replace(pair, missing=frozenset({(2, 3)}))
    found = broken(with_cycles([0, 1], closed=False, topology=cut))
    assert [item.code for item in found] == ["C405"]
    assert found[0].primary.text == "path 0 goes 2 -> 3"


def with_roles(*roles: tuple[str, int, int]) -> Schedule:
    spans = tuple(build.span(10 + index) for index in range(len(roles)))
    declared = RoleSet("overlap", roles, spans=spans, span=build.span(9))
    return replace(made(build.step(RIGHT)), roles=(declared,), role="comm")


def test_roles() -> None:
    """Roles tile the SMs of the device."""
    assert broken(with_roles(("compute", 0, 116), ("comm", 116, 132))) == ()
    assert only(with_roles(("compute", 0, 120), ("comm", 116, 132))).code == "C410"
    assert only(with_roles(("compute", 0, 116), ("comm", 116, 140))).code == "C411"
    assert only(with_roles(("compute", 0, 132), ("comm", 132, 132))).code == "C411"
    gap = only(with_roles(("compute", 0, 100), ("comm", 116, 132)))
    assert gap.code == "C412"
    assert "SMs 100 ..< 116" in gap.primary.text


def test_useless_statements() -> None:
    """Data that nobody reads, and data that is there already, is moved for nothing."""
    unread = only(made(build.step(RIGHT), build.step(put((0, ME, 1), (2, ME, 0), 6))))
    assert unread.code == "C310"
    assert unread.primary.span == build.span(6)
    doubled = only(made(build.step(RIGHT), build.step(put((0, ME, 0), (1, (ME + 1) % RANKS, 0), 6))))
    assert doubled.code == "C310"
    assert doubled.primary.span == build.span(5)
    again = (put((1, ME, 0), (2, ME, 0), 6), put((2, ME, 0), (1, ME, 0), 7))
    idle = only(made(build.step(RIGHT), *(build.step(move) for move in again)))
    assert idle.code == "C311"
    assert idle.primary.span == build.span(7)


AGREE = """schedule agree for P ranks where P >= 2 {
  input x
  output y
  ensure allreduce(x -> y)
  each r { copy x -> y }
  for s in 1 ..< P { each r { reduce x @ (r + s) % P -> y } }
  each r { get y @ 0 -> y }
}
"""
"""Each rank adds up in an order of its own; then all take what rank 0 has."""


def test_sums_in_another_order_are_other_data() -> None:
    """Ranks may take the sum of one in place of their own; of two, whose order gives the same bits, it is idle."""
    files = compiler.read_text(AGREE, "agree.comm", Path())
    checked = compiler.check(files, ranks=3)
    assert isinstance(checked, compiler.CheckedSchedule)
    assert checked.report.same_bits
    with pytest.raises(CommError, match="C311"):
        compiler.check(files, ranks=2)


def test_repeated_promises() -> None:
    """A contract said twice is refused, two different ones are not."""
    schedule = made(build.step(RIGHT))
    (contract,) = schedule.contracts
    assert only(replace(schedule, contracts=(contract, contract))).code == "C312"
    part = build.copies_contract("general", 0, 1, [(1, 0, 0, 0)])
    assert broken(replace(schedule, contracts=(contract, part))) == ()


def test_a_row_may_be_useless() -> None:
    """A statement that does something for one rank is not useless for doing nothing for another."""
    x = build.buffer(BufferKind.INOUT, "x")
    contract = build.copies_contract("broadcast", 0, 0, [(r, 0, 0, 0) for r in range(RANKS)], root=0)
    everywhere = build.move(MoveKind.PUT, (0, 0, 0), (0, ME, 0), np.zeros(RANKS, np.int32))
    assert broken(build.schedule(RANKS, (x,), (contract,), (build.step(everywhere),))) == ()


def test_later_laws_wait_for_earlier_ones() -> None:
    """An index out of range is told alone, though it also breaks the contract."""
    assert [found.code for found in broken(made(build.step(put((0, ME, 9), (1, ME, 0)))))] == ["C301"]


ROLES = "roles overlap { compute sms 0 ..< 116   comm sms 116 ..< 132 }\n"
PUT = "schedule s for P ranks {{ {on} inout x ensure broadcast(x, 0) each r where r > 0 {{ get x @ 0 -> x }} }}\n"


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (ROLES + PUT.format(on="on comm"), []),
        (ROLES + PUT.format(on=""), ["C413"]),
        (ROLES, []),
    ],
)
def test_roles_without_work(text: str, codes: list[str]) -> None:
    """Every role but `compute` has a schedule on it; a file of roles alone is a library."""
    file = parse(Source("roles.comm", text))
    assert [found.code for found in unused_roles((file,))] == codes


@pytest.mark.parametrize(
    ("text", "ranks", "code"),
    [
        ("schedule one for P ranks { inout x  ensure allreduce(x)  each r { reduce x @ all -> x } }", 1, "C311"),
        ("schedule one for P ranks { input x  output y  scratch t  ensure permutation(x -> y) r -> r"
         "  each r { put x -> y @ r  put x -> t @ (r + 1) % P } }", 1, "C310"),
        ("schedule some(N = 1) for P ranks { input x  output y  scratch t  ensure permutation(x -> y) r -> r"
         "  each r { put x -> t @ (r + 1) % P }  each r { put x -> y @ r }"
         "  for s in 1 ..< N { each r { reduce t -> y } } }", 4, "C310"),
    ],
)  # fmt: skip
def test_what_is_useless_at_a_degenerate_number_of_ranks_is_warned_of(text: str, ranks: int, code: str) -> None:
    """With one rank, and where a loop has no iteration, such statements are warned of; what is there is proved."""
    checked = compiler.check(compiler.read_text(text, "one.comm", Path()), ranks=ranks)
    assert [(one.code, one.severity) for one in checked.warnings] == [(code, Severity.WARNING)]


def test_what_is_useless_elsewhere_is_an_error() -> None:
    """With two ranks, and loops that have iterations, it is a mistake."""
    moves = "each r { put x -> y @ r  put x -> t @ (r + 1) % P }"
    text = f"schedule s for P ranks {{ input x  output y  scratch t  ensure permutation(x -> y) r -> r  {moves} }}"
    with pytest.raises(CommError, match="C310"):
        compiler.check(compiler.read_text(text, "one.comm", Path()), ranks=2)
