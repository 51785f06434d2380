"""Each law on the routes of a plan that no text can break: routes with one change give one message, as committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commdsl import compiler
from commdsl.checks import check_routing
from commdsl.compiler import CheckedPlan
from commdsl.ir.plans import Routing
from commdsl.ir.routes import Longs, Routes
from commdsl.language import codes
from commdsl.language.diagnostics import render_full

TEXT = """\
plan proved for 3 ranks {
  causal
  send once per rank
  rank 0 { doc 4096 as 4 shards -> 0 1 1 0 }
  rank 1 { doc story 1024 -> 2 }
  rank 2 { doc story 512 as 2 shards -> none 2   doc 0 -> 1 }
}
"""


def right() -> CheckedPlan:
    return compiler.check(compiler.read_text(TEXT, "example.comm", Path()))


def changed(column: Longs, row: int, by: int) -> Longs:
    found = column.copy()
    found[row] += by
    return found


def without(routes: Routes, row: int) -> Routes:
    columns = {name: np.delete(getattr(routes, name), row) for name in COLUMNS}
    return replace(routes, **columns)


COLUMNS = ("source", "source_row", "dest", "dest_row", "length", "shard", "copy", "place")
FAULTS: dict[str, Callable[[Routing], Routing]] = {
    "C620": lambda r: replace(r, queries=without(r.queries, 1)),
    "C621": lambda r: replace(r, queries=replace(r.queries, dest_row=changed(r.queries.dest_row, 2, 1))),
    "C622": lambda r: replace(r, queries_back=replace(r.queries_back, dest_row=changed(r.queries_back.dest_row, 0, 7))),
    "C623": lambda r: replace(r, stretches=replace(r.stretches, length=changed(r.stretches.length, 1, -1024))),
}
FURTHER: tuple[tuple[str, Callable[[Routing], Routing]], ...] = (
    ("C620", lambda r: replace(r, queries=replace(r.queries, dest=changed(r.queries.dest, 0, 5)))),
    ("C620", lambda r: replace(r, queries=replace(r.queries, dest=changed(r.queries.dest, 0, 1)))),
    ("C620", lambda r: replace(r, queries=replace(r.queries, length=changed(r.queries.length, 0, 1)))),
    ("C620", lambda r: replace(r, keys=replace(r.keys, source_row=changed(r.keys.source_row, 1, 1)))),
    ("C621", lambda r: replace(r, queries=replace(r.queries, place=changed(r.queries.place, 0, 1)))),
    ("C622", lambda r: replace(r, keys_back=replace(r.keys_back, dest_row=changed(r.keys_back.dest_row, 1, 1)))),
    ("C623", lambda r: replace(r, stretches=replace(r.stretches, row=changed(r.stretches.row, 2, 1024)))),
)


@pytest.mark.parametrize("code", FAULTS)
def test_one_change_one_message(code: str, golden: Callable[[str, str], None]) -> None:
    """The right routes pass; the changed ones break this law first."""
    proved = right()
    assert check_routing(proved.plan, proved.routing) == ()

    (found,) = check_routing(proved.plan, FAULTS[code](proved.routing))

    assert found.code == code
    assert len(found.headline) <= 70
    golden(f"{code}.txt", render_full(found) + "\n")


@pytest.mark.parametrize(("code", "change"), FURTHER)
def test_every_column_is_proved(code: str, change: Callable[[Routing], Routing]) -> None:
    """Whatever number of a route is changed, the law it is under says so, at a document of the file."""
    proved = right()

    (found,) = check_routing(proved.plan, change(proved.routing))

    assert found.code == code
    assert found.primary.span.text.startswith("doc")


@pytest.mark.parametrize("code", FAULTS)
def test_pages_say_that_no_text_breaks_the_law(code: str) -> None:
    """A reader who meets the code learns that the fault is the compiler's."""
    assert "No plan can break this law" in codes.page(code)
