"""The parts of benchmarks/compressed.py that need no GPU: figures, a file and back; a dry run on two ranks.

Assumes a checkout. Does not measure anything.
"""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pytest
from forked import launched

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.compressed_report import COLUMNS, FLOAT8, NCCL, OURS, Case, Row, lines_of, overview, rows_of
from benchmarks.report import Kind, Result, Timing

ROOT = Path(__file__).parent.parent


def row(collective: str, **times: float) -> Row:
    results = [Result(name, Kind.OURS, Timing(us, us - 1, us + 1)) for name, us in times.items()]
    return Row(Case(collective, 1 << 26, 2), results, 0.0392)


def test_table() -> None:
    """float8 is held to 0.65 of our choice in bfloat16, and marked above; a file gives the rows back."""
    fine = row("all_reduce", **{NCCL: 26.0, OURS: 20.0, FLOAT8: 13.0})
    slow = row("all_gather", **{OURS: 20.0, FLOAT8: 13.3})
    slow.results.append(Result(NCCL, Kind.PEER, None, "failed: no GPU"))
    header, lines = overview([fine, slow, row("all_reduce")])
    cells = [dict(zip(header, line, strict=True)) for line in lines]

    assert [line["of ours"] for line in cells] == ["0.65", "*0.67", "-"]
    assert [line["of NCCL"] for line in cells] == ["0.50", "-", "-"]
    assert (cells[1][""], cells[1]["error"]) == ("all_gather 64 MB", "3.92 %")
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    writer.writerows(lines_of([fine, slow]))
    file.seek(0)
    assert rows_of(csv.DictReader(file)) == [fine, slow]


def test_dry_run() -> None:
    """Ours, in bfloat16 and in float8, is as near to what float64 gives as it has to be; nothing is timed."""
    pytest.importorskip("torch")
    script = str(ROOT / "benchmarks" / "compressed.py")
    done = launched(2, script, "--dry-run", "--sizes", "64K", "--collectives", "all_reduce")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("2 contenders right")
