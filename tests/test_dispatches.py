"""Dispatches: what is declared is what is meant, role and tuning fit the machine, a damaged one is refused."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from commdsl import compiler
from commdsl.compiler import CheckedDispatch
from commdsl.ir import resolve
from commdsl.ir.dispatches import BY_KEY, BY_SOURCE, Back, ByKey, ByTable, Dispatch, Often, Put, RowTensor, Sort
from commdsl.ir.schedules import Tuning
from commdsl.language.diagnostics import CommError
from commdsl.language.format import format_file
from commdsl.language.parser import parse
from commdsl.language.source import Source
from commdsl.language.syntax import DispatchDecl

QKV = """dispatch qkv for P ranks {
  rows q[T]   rows k[T]   rows v[T]
  route home[S] for q
  route reader[S, C] for k, v
  place home by (source rank, shard)   place reader by (query, shard)
  back q, k, v by sum
  tune { threads 512   sms P   tile 16 KB   put packed }
}
"""
ROLES = "roles wide { compute sms 0 ..< 100   comm sms 100 ..< 132 }\n"


def checked(text: str, name: str | None = None, ranks: int = 4) -> CheckedDispatch:
    files = (parse(Source("dispatch.comm", text)),)
    return compiler.check_dispatch(files, compiler.choose_kind(files, name, DispatchDecl), compiler.Given(ranks))


def codes_of(text: str, ranks: int = 4) -> list[str]:
    with pytest.raises(CommError) as caught:
        checked(text, ranks=ranks)
    return [diagnostic.code for diagnostic in caught.value.diagnostics]


def test_meaning() -> None:
    """Tensors, routes, orders, tuning and the way back come out as written."""
    found = checked(QKV)
    dispatch = found.dispatch

    assert (dispatch.name, dispatch.num_ranks, dispatch.put, dispatch.role) == ("qkv", 4, Put.PACKED, None)
    assert dispatch.tensors == (RowTensor("q", 0), RowTensor("k", 1), RowTensor("v", 1))
    assert dispatch.routes == (
        ByTable("home", False, (Sort.SOURCE_RANK, Sort.SHARD)),
        ByTable("reader", True, (Sort.QUERY, Sort.SHARD)),
    )
    assert dispatch.tuning == Tuning(threads=512, tile_bytes=16384, sms=4, put="packed")
    assert dispatch.back == Back(("q", "k", "v"), None, False, dispatch.span)


def test_left_out() -> None:
    """Rows go straight to their places unless said, one route needs no name where it is placed, and what is not said to
    come back does not.
    """
    dispatch = checked(
        "dispatch d for P ranks { rows x[T] route h[S, C] for x place by (source rank, shard) }"
    ).dispatch

    assert dispatch.put is Put.ROWS
    assert dispatch.routes == (ByTable("h", True, BY_SOURCE),)
    assert dispatch.back is None
    assert dispatch.tuning == Tuning()


def test_role() -> None:
    """A dispatch runs on a role as a schedule does, and a role that one runs on does work."""
    text = ROLES + QKV.replace("  sms P ", " ").replace("  tune", "  on comm   tune")
    found = checked(text)

    assert found.dispatch.role == "comm"
    assert [roles.name for roles in found.dispatch.roles] == ["wide"]
    assert found.warnings == ()


def test_machine() -> None:
    """The same dispatch means something for every number of ranks that a topology has."""
    path = Path("dispatch.comm")
    files = compiler.read_text(QKV, path.name, path.parent)
    on_node = compiler.check(files, "qkv", 8, "h200_1x8").dispatch

    assert (on_node.topology.name, on_node.tuning.sms) == ("h200_1x8", 8)
    with pytest.raises(CommError, match="C502"):
        compiler.check(files, "qkv", 9, "h200_1x8")


@pytest.mark.parametrize(
    ("old", "new", "codes"),
    [
        ("route home[S] for q", "route home[S] for q, x", ["C101"]),
        ("place home", "place hom", ["C101"]),
        ("sms P", "sms 133", ["C505"]),
        ("sms P", "sms R", ["C101"]),
        ("sms P", "lanes 4", ["C506"]),
        ("sms P", "protocol bulk", ["C506"]),
        ("threads 512", "threads 500", ["C505"]),
        ("tile 16 KB", "tile 16", ["C109"]),
        ("tile 16 KB", "tile 16 KB   tile 32 KB", ["C506"]),
        ("put packed", "put", ["C002"]),
        ("put packed", "put packe", ["C505"]),
        ("put packed", "put 64", ["C505"]),
        ("put packed", "put packed   put rows", ["C506"]),
        ("by sum", "by sum   on comm", ["C117"]),
        ("rows v[T]", "rows k[T]", ["C102", "C101", "C635"]),
        ("route reader[S, C]", "route home[S, C]", ["C102", "C101"]),
        ("back q, k, v", "back q, y", ["C635"]),
        ("by sum", "by max", ["C636"]),
        ("by sum", "by sum(weight[T, K])", ["C636"]),
        ("by sum", "by sum   once per rank", ["C650"]),
        ("place home by (source rank, shard)", "place home by (shard, source rank)", ["C639"]),
        ("place home by (source rank, shard)", "place home by (source rank)", ["C639"]),
        ("(query, shard)", "(quer, shard)", ["C101"]),
        ("route reader[S, C]", "route reader[S, S]", ["C634"]),
        ("rows q[T]   rows k[T]   rows v[T]", "", ["C631", *["C101"] * 3, *["C635"] * 3]),
    ],
)
def test_refused(old: str, new: str, codes: list[str]) -> None:
    """Each mistake is found."""
    assert old in QKV
    assert sorted(codes_of(QKV.replace(old, new))) == sorted(codes)


EXPERTS = """dispatch experts(E = 32 * P) for P ranks {
  rows x[T]   rows scale[T]
  key expert[T, K] of E
  route x, scale by expert / (E / P)
  place by (expert, source rank, row)
  back y by sum(weight[T, K])
}
"""


def with_keys(text: str = EXPERTS, ranks: int = 4, **params: int) -> CheckedDispatch:
    return compiler.check((parse(Source("dispatch.comm", text)),), None, ranks, params=params)


def test_keys() -> None:
    """A route by keys knows the rank of each of them; how many there are is a parameter, known before a call."""
    dispatch = with_keys(E=8).dispatch

    assert dispatch.params == (("E", 8),)
    assert dispatch.tensors == (RowTensor("x", 0), RowTensor("scale", 0))
    assert dispatch.routes == (ByKey("expert", (0, 0, 1, 1, 2, 2, 3, 3), BY_KEY),)
    assert dispatch.back == Back(("y",), "weight", False, dispatch.span)
    (route,) = with_keys(EXPERTS.replace("expert / (E / P)", "(expert + 1) % P"), ranks=2, E=4).dispatch.routes
    assert isinstance(route, ByKey)
    assert route.rank_of == (1, 0, 1, 0)
    (route,) = with_keys(ranks=3).dispatch.routes
    assert isinstance(route, ByKey)
    assert route.num_keys == 96


ONCE = """dispatch experts(E = 32 * P, A = 1) for P ranks {
  rows x[T]   rows scale[T]
  key expert[T, K] of E
  value weight[T, K]
  route x, scale, weight by expert / (E / P)   once per rank
  place by (expert, source rank, row)   aligned A
  back y by sum(weight[T, K])   once per rank
}
"""


def meant(text: str, ranks: int = 4, **params: int) -> Dispatch:
    """Before anything is made of it."""
    files = (parse(Source("dispatch.comm", text)),)
    decl = compiler.choose_kind(files, None, DispatchDecl)
    return resolve.dispatch(files, decl, ranks, compiler.find_topology(files, None, ranks), params, {})


def test_once_per_rank() -> None:
    """How often a row travels, what comes beside it, where a key's rows begin, and where they are added up."""
    dispatch = meant(ONCE, E=8, A=16)

    assert dispatch.tensors == (RowTensor("x", 0), RowTensor("scale", 0))
    assert dispatch.routes == (ByKey("expert", (0, 0, 1, 1, 2, 2, 3, 3), BY_KEY, Often.ONCE, 16, "weight"),)
    assert dispatch.back == Back(("y",), "weight", True, dispatch.span)
    (route,) = meant(ONCE.replace("P)   once per rank", "P)   once per rank by index")).routes
    assert isinstance(route, ByKey)
    assert (route.often, route.aligned) == (Often.INDEX, 1)
    plain = meant(ONCE.replace("   once per rank", "").replace("scale, weight", "scale"))
    (route,) = plain.routes
    assert isinstance(route, ByKey)
    assert (route.often, route.value) == (Often.EACH, None)  # the weight is one of the way back
    assert plain.back == Back(("y",), "weight", False, plain.span)
    assert meant(ONCE.replace("(weight[T, K])", "")).back == Back(("y",), None, True, plain.span)


@pytest.mark.parametrize(
    ("old", "new", "codes"),
    [
        ("scale, weight by", "scale by", ["C650"]),
        ("P)   once per rank", "P)", ["C650"]),
        ("value weight[T, K]", "", ["C101"]),
        ("value weight[T, K]", "value weight[T, M]", ["C634"]),
        ("value weight[T, K]", "value scale[T, K]", ["C101", "C102"]),
        ("value weight[T, K]", "value weight[T, K]   value w[T, K]", ["C631"]),
        ("value weight[T, K]", "value w[T, K]", ["C101", "C630"]),
        ("aligned A", "aligned 1025", ["C509"]),
        ("aligned A", "aligned K", ["C101"]),
        ("aligned A", "aligned", ["C002"]),
        ("once per rank\n  place", "once per rank by\n  place", ["C002"]),
        ("once per rank\n  place", "once per nodes\n  place", ["C005"]),
        ("once per rank\n  place", "once per node\n  place", ["C650"]),
        ("row)   aligned A", "row)   aligned A   aligned 2", ["C002"]),
        ("rows x[T]   rows scale[T]", "rows scale[T]   rows index[T]", ["C101", "C102", "C630"]),
    ],
)
def test_once_per_rank_refused(old: str, new: str, codes: list[str]) -> None:
    """Each mistake about the words of keys is found."""
    assert old in ONCE
    with pytest.raises(CommError) as caught:
        meant(ONCE.replace(old, new))
    assert sorted(diagnostic.code for diagnostic in caught.value.diagnostics) == sorted(codes)


@pytest.mark.parametrize(("ranks", "node"), [(4, 0), (8, 0), (16, 8)])
def test_once_per_node(ranks: int, node: int) -> None:
    """Nodes are the topology's; on one of them nothing crosses."""
    text = ONCE.replace("once per rank", "once per node")
    files = (parse(Source("dispatch.comm", text)),)
    decl, machine = compiler.choose_kind(files, None, DispatchDecl), compiler.find_topology(files, "h200_2x8", ranks)
    dispatch = resolve.dispatch(files, decl, ranks, machine, {}, {})
    (route,) = dispatch.routes

    assert isinstance(route, ByKey)
    assert (route.often, route.node) == (Often.ONCE, node)
    assert dispatch.back is not None
    assert dispatch.back.once


def test_keys_have_two_plans() -> None:
    """What goes by keys has a kernel for the way there, and one for the way back if there is one."""
    there, both = EXPERTS.replace("back y by sum(weight[T, K])", ""), EXPERTS

    assert with_keys(both).plan.name == "experts"
    assert with_keys(both).back.name == "experts_back"
    assert with_keys(there).back is None
    assert with_keys(both).warnings == ()


def test_overriding() -> None:
    """From outside every setting can be said anew, under the same laws."""
    files = (parse(Source("dispatch.comm", QKV)),)
    tuned = compiler.check(files, tune={"put": "rows", "tile": 4096}).dispatch

    assert tuned.put is Put.ROWS
    assert tuned.tuning == Tuning(threads=512, tile_bytes=4096, sms=8, put="rows")
    for given, code in (({"put": "x"}, "C505"), ({"lanes": 4}, "C506"), ({"threads": "many"}, "C109")):
        with pytest.raises(CommError, match=code):
            compiler.check(files, tune=given)


@pytest.mark.parametrize(
    ("old", "new", "codes"),
    [
        ("E = 32 * P", "E", ["C503"]),
        ("E = 32 * P", "E = 32 * P, E = 4", ["C102"]),
        ("E = 32 * P", "E = F", ["C101"]),
        ("E = 32 * P", "E = 6", ["C638"]),
        ("E = 32 * P", "E = 0", ["C509"]),
        ("E = 32 * P", "E = 2048", ["C509"]),
        ("back y", "tune { put rows } back y", ["C506"]),
        ("back y", "tune { tile 4096 B } back y", ["C506"]),
        ("of E", "of F", ["C101"]),
        ("expert / (E / P)", "expert / (E / P) + 1", ["C638"]),
        ("expert / (E / P)", "expert / 0", ["C508"]),
        ("expert / (E / P)", "exper / (E / P)", ["C101"]),
        ("key expert[T, K] of E", "key E[T, K] of E", ["C102", "C101", "C101"]),
        ("(expert, source rank, row)", "(source rank, shard)", ["C639"]),
        ("(expert, source rank, row)", "(expert, source rank, row, row)", ["C639"]),
        ("place by (expert, source rank, row)", "", ["C632"]),
        ("expert[T, K]", "expert[K, T]", ["C634", "C634"]),
        ("expert[T, K]", "expert[T, E]", ["C634"]),
        ("weight[T, K]", "weight[T, M]", ["C634"]),
        ("back y", "back x", ["C635"]),
        ("back y", "back y, z", ["C635"]),
    ],
)
def test_keys_refused(old: str, new: str, codes: list[str]) -> None:
    """Each mistake about keys is found."""
    assert old in EXPERTS
    assert sorted(codes_of(EXPERTS.replace(old, new))) == sorted(codes)


def test_schedule_and_dispatch_of_one_name() -> None:
    """What becomes an op has a name of its own, whatever declares it."""
    text = (
        QKV + "schedule qkv for P ranks { input x output y ensure permutation(x -> y) r -> r each r { copy x -> y } }"
    )

    assert codes_of(text) == ["C102"]


WORDS = re.compile(r"\w+|[^\w\s]")


def test_corruptions() -> None:
    """A damaged dispatch is refused with a place in it, or means one that the formatter keeps."""
    rng = random.Random(4)
    whole = QKV + EXPERTS
    signs = list(WORDS.finditer(whole))
    refused = kept = 0
    for _ in range(1000):
        sign, other = rng.choice(signs), rng.choice(signs)
        text = whole[: sign.start()] + rng.choice(["", f"{sign[0]} {sign[0]}", other[0]]) + whole[sign.end() :]
        try:
            file = parse(Source("damaged.comm", text))
            meant = [compiler.check((file,), decl.name.text, 4) for decl in compiler.declared((file,), DispatchDecl)]
        except CommError as error:
            refused += 1
            for diagnostic in error.diagnostics:
                assert 0 <= diagnostic.primary.span.start <= diagnostic.primary.span.end <= len(text)
            continue
        kept += 1
        again = parse(Source("damaged.comm", format_file(file)))
        for found in meant:
            once_more = compiler.check((again,), found.dispatch.name, 4).dispatch
            assert replace(once_more, topology=found.dispatch.topology) == found.dispatch
            assert 1 <= len(found.dispatch.tensors) <= 3
            assert {tensor.route for tensor in found.dispatch.tensors} <= set(range(len(found.dispatch.routes)))

    assert refused > 500
    assert kept > 10
