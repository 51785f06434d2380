"""Dispatches: what is declared is what is meant, role and tuning fit the machine, a damaged one is refused."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from commdsl import compiler
from commdsl.compiler import CheckedDispatch
from commdsl.ir.dispatches import Order, Put, Route, RowTensor
from commdsl.ir.schedules import Tuning
from commdsl.language.diagnostics import CommError
from commdsl.language.format import format_file
from commdsl.language.parser import parse
from commdsl.language.source import Source

QKV = """dispatch qkv for P ranks {
  rows q[T]   rows k[T]   rows v[T]
  route home[S] for q
  route reader[S, C] for k, v
  place home by (source rank, shard)   place reader by (query, shard)
  put packed
  tune { threads 512   sms P   tile 16 KB }
}

combine back inverts qkv by sum
"""
ROLES = "roles wide { compute sms 0 ..< 100   comm sms 100 ..< 132 }\n"


def checked(text: str, name: str | None = None, ranks: int = 4) -> CheckedDispatch:
    return compiler.check_dispatch((parse(Source("dispatch.comm", text)),), name, ranks)


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
    assert dispatch.routes == (Route("home", False, Order.SOURCE), Route("reader", True, Order.QUERY))
    assert dispatch.tuning == Tuning(threads=512, tile_bytes=16384, sms=4)
    assert [(combine.name, combine.inverts, combine.reduction) for combine in found.combines] == [
        ("back", "qkv", "sum")
    ]


def test_left_out() -> None:
    """Rows go straight to their places unless said, and one route needs no name where it is placed."""
    dispatch = checked(
        "dispatch d for P ranks { rows x[T] route h[S, C] for x place by (source rank, shard) }"
    ).dispatch

    assert dispatch.put is Put.ROWS
    assert dispatch.routes == (Route("h", True, Order.SOURCE),)
    assert dispatch.tuning == Tuning()


def test_role() -> None:
    """A dispatch runs on a role as a schedule does, and a role that one runs on does work."""
    text = ROLES + QKV.replace("  sms P ", " ").replace("put packed", "put packed   on comm")
    found = checked(text)

    assert found.dispatch.role == "comm"
    assert [roles.name for roles in found.dispatch.roles] == ["wide"]
    assert found.warnings == ()


def test_machine() -> None:
    """The same dispatch means something for every number of ranks that a topology has."""
    path = Path("dispatch.comm")
    files = compiler.read_text(QKV, path.name, path.parent)
    on_node = compiler.check_dispatch(files, "qkv", 8, "h200_1x8").dispatch

    assert (on_node.topology.name, on_node.tuning.sms) == ("h200_1x8", 8)
    with pytest.raises(CommError, match="C502"):
        compiler.check_dispatch(files, "qkv", 9, "h200_1x8")


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
        ("put packed", "put packed   on comm", ["C117"]),
        ("rows v[T]", "rows k[T]", ["C102", "C101"]),
        ("route reader[S, C]", "route home[S, C]", ["C102", "C101"]),
        ("inverts qkv", "inverts back", ["C635"]),
        ("combine back", "combine qkv", ["C102"]),
        ("route reader[S, C]", "route reader[S, S]", ["C634"]),
        ("rows q[T]   rows k[T]   rows v[T]", "", ["C631", "C101", "C101", "C101"]),
    ],
)
def test_refused(old: str, new: str, codes: list[str]) -> None:
    """Each mistake is found."""
    assert old in QKV
    assert sorted(codes_of(QKV.replace(old, new))) == sorted(codes)


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
    signs = list(WORDS.finditer(QKV))
    refused = kept = 0
    for _ in range(1000):
        sign, other = rng.choice(signs), rng.choice(signs)
        text = QKV[: sign.start()] + rng.choice(["", f"{sign[0]} {sign[0]}", other[0]]) + QKV[sign.end() :]
        try:
            file = parse(Source("damaged.comm", text))
            meant = [compiler.check_dispatch((file,), decl.name.text, 4) for decl in compiler.dispatches((file,))]
        except CommError as error:
            refused += 1
            for diagnostic in error.diagnostics:
                assert 0 <= diagnostic.primary.span.start <= diagnostic.primary.span.end <= len(text)
            continue
        kept += 1
        again = parse(Source("damaged.comm", format_file(file)))
        for found in meant:
            once_more = compiler.check_dispatch((again,), found.dispatch.name, 4).dispatch
            assert replace(once_more, topology=found.dispatch.topology) == found.dispatch
            assert 1 <= len(found.dispatch.tensors) <= 3
            assert {tensor.route for tensor in found.dispatch.tensors} <= set(range(len(found.dispatch.routes)))

    assert refused > 500
    assert kept > 10
