"""The parts of benchmarks/products.py that need no GPU: floors, figures, lines of a file and back; and a dry run, which
checks all contenders but async-TP on two host ranks.

Assumes a checkout. Does not measure anything.
"""

from __future__ import annotations

import csv
import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from forked import launched

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.products_report import ALONE, COLUMNS, CONTENDERS, Case, Element, Row, Way, lines_of, overview, rows_of
from benchmarks.report import Result, Timing

ROOT = Path(__file__).parent.parent
SEQUENCE, OURS = "in sequence", "commdsl"


def row(way: Way = Way.GATHER, rows: int = 4096, **times: float) -> Row:
    results = [Result(name, CONTENDERS[name], Timing(us, us - 1, us + 1)) for name, us in times.items()]
    return Row(Case(way, rows, 8192, 1024, 2), results)


def test_floor() -> None:
    """The larger of cuBLAS alone and what a rank sends: of rows before, in as many bits as they are
    multiplied in, and of sums behind."""
    gather, scatter = row(**{ALONE: 80.0}), row(Way.SCATTER, **{ALONE: 80.0})

    assert gather.case.sent_bytes == 2 * 2048 * 8192
    assert scatter.case.sent_bytes == 2 * 2048 * 1024
    of_float8 = [replace(one.case, element=Element.FLOAT8).sent_bytes for one in (gather, scatter)]
    assert of_float8 == [gather.case.sent_bytes // 2, scatter.case.sent_bytes]
    assert gather.floor == pytest.approx(2 * 2048 * 8192 / 390e3)
    assert scatter.floor == 80.0
    assert row().floor is None


def test_misses() -> None:
    """From 4096 rows on a product has its share of the floor; at any size it is no slower than the best peer."""
    fine = {ALONE: 100.0, SEQUENCE: 150.0, OURS: 109.0}

    assert row(**fine).misses() == []
    assert row(**{**fine, OURS: 111.0}).misses() == ["of floor"]
    assert row(Way.SCATTER, **{**fine, OURS: 114.0}).misses() == []
    assert row(rows=2048, **{**fine, OURS: 152.0}).misses() == []
    assert row(rows=2048, **{**fine, OURS: 154.0}).misses() == ["of peer"]
    assert row().misses() == ["of floor"]


def test_table() -> None:
    """Every contender in its column; what is wrong is never the best, and is told; a file gives the rows back."""
    found = row(**{ALONE: 100.0, SEQUENCE: 150.0, OURS: 120.0})
    found.results.append(Result("commdsl, 4", CONTENDERS[OURS], Timing(1.0, 1.0, 1.0), "wrong eagerly on ranks 1"))
    header, (line,) = overview([found])
    cells = dict(zip(header, line, strict=True))

    assert (cells[ALONE], cells[OURS], cells["of floor"], cells["of peer"]) == ("100", "120", "*1.20", "0.80")
    assert line[-1] == "commdsl, 4: wrong eagerly on ranks 1"
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    writer.writerows(lines_of([found]))
    file.seek(0)
    assert rows_of(csv.DictReader(file)) == [found]


def test_dry_run() -> None:
    """All but async-TP give what float32 gives, in all ways and types; nothing is timed, no figure is met."""
    pytest.importorskip("torch")
    script = str(ROOT / "benchmarks" / "products.py")
    done = launched(
        2,
        script,
        "--dry-run",
        "--rows",
        "32",
        "--shapes",
        "16x24",
        "--elements",
        "bfloat16",
        "float8",
        "--time-budget",
        "300",
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("a dry run: 108 contenders right, nothing timed")
