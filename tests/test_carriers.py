"""A carrier is one record: few files name one, a copy of a record is accepted everywhere, every capability is read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import changed

from commdsl import compiler
from commdsl.build.emit import defines
from commdsl.commands.arguments import UsageError
from commdsl.commands.cubins import Variants, _macros
from commdsl.language.diagnostics import CommError
from commdsl.machine import carriers
from commdsl.machine.carriers import BULK, CARRIERS, ENGINE, LINE, PACKET, TMA, Carrier
from commdsl.planner.tuning.search_space import FAMILIES, first_candidates, in_range, neighbours
from commdsl.planner.tuning.selection import Candidate
from commdsl.program.legal import InternalError
from commdsl.program.memory import Transport
from commdsl.program.sizes import device_launch, host_launch
from commdsl.program.verify import verify

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "commdsl"
SCHEDULES = ROOT / "schedules"

NAMING = {
    "machine/carriers.py": "the records",
    "planner/tuning/selection.py": "stated defaults where no table speaks",
    "attention/machines.py": "measured ways to move keys and values",
    "overlap/programs.py": "a measured choice for few rows",
}
"""The modules that name a carrier, as a choice of one; none asks which carrier it was given."""

OTHER_SENSES = ("cost/canvas.py", "commands/lsp/positions.py", "language/diagnostics.py")
"""Modules with another `line`: an element of SVG, a line of text."""

MOVING = ("collectives/allgather_direct", "attention/rotation_ring", "attention/attention_ring")
REDUCING = ("collectives/allreduce_ring", "collectives/allreduce_twoshot")


def texts(tree: ast.Module) -> Iterator[str]:
    """The string constants of a module but for its docstrings."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.value


def names_a_carrier(path: Path) -> bool:
    """Whether a module has a carrier's name in a string, or takes a record from the registry by its name."""
    tree, name = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(PACKAGE).as_posix()
    words = "|".join(one.name for one in CARRIERS if one is not LINE or name not in OTHER_SENSES)
    spelled = re.compile(rf"(?s)({words})|.*(`|protocol )({words})\b.*")
    if any(spelled.fullmatch(text) for text in texts(tree)):
        return True
    records = {one.name.upper() for one in CARRIERS}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="commdsl.machine.carriers", names=names):
                if records & {one.name for one in names}:
                    return True
            case ast.Attribute(value=ast.Name(id="carriers"), attr=attr) if attr in records:
                return True
    return False


def test_few_modules_name_a_carrier() -> None:
    """A new carrier is a record, and an entry in a table of choices where one is measured to be the best."""
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if names_a_carrier(path)}

    assert found == NAMING.keys()
    assert len(NAMING) <= 4


# --- a further carrier ------------------------------------------------------------------------------------------------


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Adds a record to the registry for one test, under a name of its own."""

    def add(one: Carrier, **other: Any) -> Carrier:
        made = replace(one, name="pigeon", **other)
        monkeypatch.setattr(carriers, "CARRIERS", (*CARRIERS, made))
        return made

    return add


def compiled(name: str, protocol: str, **given: Any) -> Any:
    tune = {"protocol": protocol, **given.pop("tune", {})}
    return compiler.compile(SCHEDULES / f"{name}.comm", ranks=given.pop("ranks", 4), tune=tune, **given)


def printed(checked: Any) -> list[str]:
    """The texts of all launches, the macros of a build, and how calls run."""
    found = [text.text for text in (checked.emitted, *checked.launched)]
    plan = checked.plan
    if not plan.is_visited:
        found += [repr(defines(plan, "float32", "sum", 1))]
        found += [repr(launch(plan.moves, 1 << 20)) for launch in (device_launch, host_launch)]
    return found


@pytest.mark.parametrize("one", CARRIERS, ids=lambda one: one.name)
@pytest.mark.parametrize("name", [*MOVING, *REDUCING])
def test_a_further_carrier_compiles(name: str, one: Carrier, added: Any) -> None:
    """A copy of a record is resolved, checked, lowered, proved and printed as the record is."""
    if name in REDUCING and not one.combines:
        with pytest.raises(CommError, match="C510"):
            compiled(name, added(one).name)
        return
    expected = compiled(name, one.name)
    found = compiled(name, added(one).name)

    assert printed(found) == printed(expected)
    if not found.plan.is_visited:
        assert found.plan.moves.carrier.name == "pigeon"
        assert replace(found.plan.moves.carrier, name=one.name) == one


def test_an_unknown_carrier_is_refused() -> None:
    """Without a record there is no such protocol."""
    with pytest.raises(CommError, match="C505"):
        compiled(MOVING[0], "pigeon")


@pytest.mark.parametrize("one", carriers.measured(), ids=lambda one: one.name)
def test_a_further_carrier_is_measured(one: Carrier, added: Any) -> None:
    """The tuner's space has it wherever it has the record it copies, with the same settings and sizes."""

    def renamed(candidate: Candidate) -> Candidate:
        tune = (("protocol", "pigeon") if entry == ("protocol", one.name) else entry for entry in candidate.tune)
        return replace(candidate, tune=tuple(tune))

    copy = added(one)
    assert copy in carriers.measured()
    for families in FAMILIES.values():
        known = [found for found in first_candidates(families, (one,)) if found.tune]
        anew = [found for found in first_candidates(families, (copy,)) if found.tune]
        assert anew == [renamed(found) for found in known]
        for old, new in zip(known, anew, strict=True):
            assert [*neighbours(new)] == [renamed(found) for found in neighbours(old)]
            for size in (1 << 10, 1 << 20, 1 << 26, 1 << 30):
                ways = (in_range(families, old, size, CARRIERS), in_range(families, new, size, (*CARRIERS, copy)))
                assert ways[0] is ways[1]


def test_what_the_tuner_measures() -> None:
    """The carriers of every shipped family, as they were chosen by measurements."""
    found = {
        family.schedule: tuple(one.name for one in carriers.measured() if first_candidates((family,), (one,)))
        for families in FAMILIES.values()
        for family in families
    }

    soon, any_sms = ("packet", "line"), ("packet", "line", "bulk")
    assert found == {
        "allreduce_oneshot": soon,
        "allreduce_twoshot": any_sms,
        "allreduce_ring": ("bulk",),
        "allgather_direct": (*any_sms, "engine"),
        "allgather_ring": ("bulk",),
        "reducescatter_direct": any_sms,
        "reducescatter_ring": ("bulk",),
        "alltoall_direct": (*any_sms, "engine"),
        "broadcast_direct": soon,
        "broadcast_tree": ("line",),
        "broadcast_scatter": ("line", "bulk"),
        "broadcast_chain": ("bulk",),
    }


# --- every capability is read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lacks", "code", "tune"),
    [
        ("collectives/allreduce_ring", {"combines": False}, "C510", {}),
        ("collectives/allgather_ring", {"runs_on_sms": False}, "C506", {"lanes": 8}),
        ("compressed/allreduce_float8", {"rounds": False}, "C594", {}),
        ("overlap/add_reduce_scatter", {"waits_for_tasks": False}, "C591", {}),
        ("overlap/allreduce_rms_norm", {"runs_on_sms": False}, "C593", {}),
        ("attention/attention_ring", {"payload_bytes": 8}, "C506", {"landing": "place"}),
        ("uneven/allgather_uneven", {"length_axes": 0}, "C595", {}),
        ("uneven/alltoall_uneven", {"length_axes": 1}, "C595", {}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_a_text_asks_more_than_a_carrier_can(
    name: str, lacks: dict[str, Any], code: str, tune: dict[str, Any], added: Any
) -> None:
    """Without one of its capabilities a copy of `bulk` is refused, by the code that says so."""
    with pytest.raises(CommError) as caught:
        compiled(name, added(BULK, **lacks).name, tune=tune)

    assert {found.code for found in caught.value.diagnostics} == {code}


def test_a_carrier_of_one_node(added: Any) -> None:
    """Ranks of several nodes are refused one that stays within a node, and told which reach further."""
    with pytest.raises(CommError, match=r"`packet`, `bulk`, `tma` reach other nodes"):
        compiled("collectives/allreduce_two_level", added(BULK, crosses_nodes=False).name, ranks=16, on="h200_2x8")


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ({"combines": False}, "moves bytes only"),
        ({"runs_on_sms": False}, "the copy engine has one lane"),
    ],
    ids=str,
)
def test_a_plan_asks_more_than_a_carrier_can(lacks: dict[str, Any], words: str) -> None:
    """A Plan of what its carrier cannot do is not legal."""
    plan = compiled("collectives/allreduce_ring", "bulk").plan
    with pytest.raises(InternalError, match=words):
        verify(changed(plan, carrier=replace(BULK, **lacks)))


def test_a_plan_for_far_ranks_needs_whole_tiles() -> None:
    """NVSHMEM's Plans have a carrier that it can put."""
    plan = compiled("collectives/allgather_ring", "packet", transport=Transport.NVSHMEM).plan
    assert plan.moves.carrier == carriers.DEFAULT
    with pytest.raises(InternalError, match="NVSHMEM moves no words"):
        verify(changed(plan, carrier=replace(BULK, goes_by_nvshmem=False)))


@pytest.mark.parametrize("one", [BULK, TMA], ids=lambda one: one.name)
def test_gpus_without_a_carrier(one: Carrier) -> None:
    """A kernel is built ahead of time for the GPUs that have its carrier, and for no others."""
    plan = compiled("collectives/allgather_ring", one.name).plan
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120"):
        variants = Variants((arch,), ("float32",), ("sum",))
        if one.runs_on(int(arch.removeprefix("sm_")) // 10):
            assert _macros(plan, variants)
        else:
            with pytest.raises(UsageError, match=f"protocol {one.name}`, which {arch} does not have"):
                _macros(plan, variants)
    assert [major for major in (8, 9, 10, 12) if TMA.runs_on(major)] == [9, 10]


def test_flags_in_data() -> None:
    """Words with flags are longer than their payload, of which each thread has an equal part."""
    assert [one for one in CARRIERS if one.has_flags_in_data] == [PACKET, LINE]
    assert [one for one in CARRIERS if not one.is_dense] == [PACKET]
    assert [one for one in CARRIERS if one.streams] == [BULK, TMA]
    for one in CARRIERS:
        assert bool(one.thread_bytes) is one.has_flags_in_data
        assert not one.thread_bytes or one.payload_bytes % one.thread_bytes == 0
    assert [one for one in CARRIERS if not one.runs_on_sms] == [ENGINE]
