"""The parts of benchmarks/uneven.py that need no GPU: lengths, figures, a file and back.

Assumes a checkout. Does not measure anything.
"""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.report import Kind, Result, Timing
from benchmarks.uneven_report import COLUMNS, NCCL, OURS, ROW_BYTES, Case, Row, lines_of, overview, rows_of


def row(nbytes: int, **times: float) -> Row:
    results = [Result(name, Kind.OURS, Timing(us, us - 1, us + 1)) for name, us in times.items()]
    return Row(Case("all_gather", nbytes, 2), results)


def test_table() -> None:
    """Up to 16 MB ours is held to 0.85 of NCCL's time, above to 0.97, and marked where it takes more; a file gives the
    rows back.
    """
    times = [(1 << 24, 17.0), (1 << 24, 17.2), (1 << 26, 19.0), (1 << 26, 19.6)]
    rows = [row(nbytes, **{NCCL: 20.0, OURS: ours}) for nbytes, ours in times]
    header, lines = overview([*rows, row(1 << 20)])

    assert header == ["", NCCL, OURS, "of NCCL"]
    assert [line[-1] for line in lines] == ["0.85", "*0.86", "0.95", "*0.98", "-"]
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    writer.writerows(lines_of([rows[0], rows[2]]))
    file.seek(0)
    assert rows_of(csv.DictReader(file)) == [rows[0], rows[2]]


def test_lengths() -> None:
    """All rows are somebody's, and odd ranks have three times as many as even ones."""
    assert Case("all_to_all", 1 << 20, 2).lengths == [2048, 6144]
    for ranks in (2, 3, 4, 8):
        assert sum(Case("all_to_all", 1 << 20, ranks).lengths) == (1 << 20) // ROW_BYTES
