"""The parts of benchmarks/rms_norm.py that need no GPU: figures, lines of a file and back; and a dry run on two ranks.

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
from benchmarks.report import Result, Timing
from benchmarks.rms_norm_report import COLUMNS, COMPILED, CONTENDERS, NCCL, OURS, Case, Row, lines_of, overview, rows_of

ROOT = Path(__file__).parent.parent


def row(**times: float) -> Row:
    results = [Result(name, CONTENDERS[name], Timing(us, us - 1, us + 1)) for name, us in times.items()]
    return Row(Case(8, 8192, 2), results)


def test_table() -> None:
    """Ours is held to the better of NCCL's, and marked above 0.6 of it; a file gives the rows back."""
    fine, slow = row(**{NCCL: 20.0, COMPILED: 10.0, OURS: 6.0}), row(**{COMPILED: 10.0, OURS: 6.1})
    slow.results.append(Result(NCCL, CONTENDERS[NCCL], None, "failed: no GPU"))
    header, lines = overview([fine, slow, row()])

    assert [dict(zip(header, line, strict=True))["of NCCL"] for line in lines] == ["0.60", "*0.61", "-"]
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    writer.writerows(lines_of([slow]))
    file.seek(0)
    assert rows_of(csv.DictReader(file)) == [slow]


def test_dry_run() -> None:
    """Ours gives what float64 gives; nothing is timed."""
    pytest.importorskip("torch")
    done = launched(2, str(ROOT / "benchmarks" / "rms_norm.py"), "--dry-run", "--rows", "3", "--columns", "64")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("1 contenders right")
