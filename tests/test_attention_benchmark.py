"""What is made of times of attention: lines of a file and back, floors, and the table with what is missed.

Assumes a checkout. Does not measure anything.
"""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.attention_report import COLUMNS, Case, Kind, Pass, Result, best, floor_of, long, results_of, short
from benchmarks.report import Timing

SMALL = Case((32, 8), 2048, 4, Pass.FORWARD)
LARGE = Case((32, 32), 8192, 4, Pass.BOTH)


def result(case: Case, name: str, kind: Kind, us: float, kernel: str = "cudnn", **more: str) -> Result:
    return Result(case, name, kind, kernel, 8, "graph", Timing(us, us - 1, us + 1), 1e-3, **more)


def rows() -> list[Result]:
    return [
        result(SMALL, "copies", Kind.LINK, 260.0, ""),
        result(SMALL, "alone", Kind.ALONE, 210.0),
        result(SMALL, "direct, engine", Kind.OURS, 300.0),
        result(SMALL, "ring, 8 SMs", Kind.OURS, 100.0, status="wrong: 1.0e-01 from one GPU's"),
        result(SMALL, "zigzag", Kind.RING, 290.0),
        result(SMALL, "all-gather", Kind.TORCH, 1240.0),
        result(SMALL, "all-to-all", Kind.TORCH, 1330.0, "flash"),
        result(LARGE, "copies", Kind.LINK, 1050.0, ""),
        result(LARGE, "alone", Kind.ALONE, 3000.0),
        result(LARGE, "alone", Kind.ALONE, 6000.0, "auto"),
        result(LARGE, "direct, engine", Kind.OURS, 3300.0),
        result(LARGE, "direct, engine", Kind.OURS, 6100.0, "auto"),
        Result(LARGE, "zigzag", Kind.RING, "cudnn", status="failed: rank 0: RuntimeError"),
    ]


def test_a_file_reads_back() -> None:
    """A line a contender, and the same results of it."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    writer.writerows(one.line() for one in rows())
    file.seek(0)

    assert results_of(csv.DictReader(file)) == rows()


def test_floor() -> None:
    """The larger of the same kernel alone and the link; what is wrong is never the best."""
    found = rows()
    small = [one for one in found if one.case == SMALL]
    large = [one for one in found if one.case == LARGE]

    assert [floor_of(one, small) for one in small if one.kind is Kind.OURS] == [260.0, 260.0]
    assert [floor_of(one, large) for one in large if one.kind is Kind.OURS] == [3000.0, 6000.0]
    fastest = best(small, Kind.OURS)
    assert fastest is not None
    assert fastest.name == "direct, engine"
    assert best(large, Kind.RING, Kind.TORCH) is None


def test_traffic() -> None:
    """Keys and values of P - 1 others forward; backward as much again, and gradients that are twice as long beside the
    half of what the first rank has.
    """
    assert SMALL.traffic == 3
    assert LARGE.traffic == pytest.approx(3 * 3.5)


def test_table() -> None:
    """A line a row; `*` where the floor is missed, a peer is faster, or torch's is not slower by what is asked."""
    header, lines = short(rows())
    first, second = (dict(zip(header, line, strict=True)) for line in lines)

    assert (first["tokens"], first["pass"], second["heads"]) == ("2K", "forward", "32:32")
    assert (first["commdsl"], first["by"]) == ("0.300", "direct, engine, cudnn")
    assert (first["of the floor"], second["of the floor"]) == ("1.15", "*1.10")
    assert [line[header.index("NCCL ring") : header.index("NCCL ring") + 2] for line in lines] == [
        ["0.290", "*0.97"],
        ["failed", "-"],
    ]
    assert lines[0][-2:] == ["1.240", "4.13"]
    assert lines[1][-2:] == ["-", "-"]
    assert len(long(rows())[1]) == len(rows())
