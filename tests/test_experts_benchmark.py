"""The parts of benchmarks/experts.py that need no GPU: keys, least bytes, ratios, tables; that its checks see what is
wrong; and a dry run, which checks all contenders but DeepEP's on two host ranks.

Assumes a checkout. Does not measure anything.
"""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from forked import launched

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.experts_report import DEEPEP, DEEPEP_CACHED, NCCL, PEERS, Case, Form, Row, Way, overview, text_of
from benchmarks.report import Kind, Result, Timing

ROOT = Path(__file__).parent.parent
SMALL = Case(24, 3, hidden=64, topk=4, experts_a_rank=5)


def test_keys_and_least_bytes() -> None:
    """The experts of a token differ, every rank draws the same; a row crosses once for each rank that it goes to."""
    keys = SMALL.keys
    assert keys.shape == (3, 24, 4)
    assert (keys == Case(24, 3, hidden=64, topk=4, experts_a_rank=5).keys).all()
    assert all(len(set(token.tolist())) == 4 for token in keys.reshape(-1, 4))
    crossing = np.zeros((3, 3), int)
    for source in range(3):
        for token in keys[source]:
            for rank in {int(key) // 5 for key in token} - {source}:
                crossing[source, rank] += 1
    most = max(*crossing.sum(axis=0), *crossing.sum(axis=1))
    assert SMALL.sent_bytes == most * 128
    assert SMALL.received == max((keys // 5 == rank).sum() for rank in range(3))
    eighth = Case(24, 3, Form.FP8, hidden=64, topk=4, experts_a_rank=5)
    assert eighth.sent_bytes == most * (64 + 4)


def row(tokens: int, way: Way = Way.THERE, ranks: int = 2, **times: float) -> Row:
    kinds = {"commdsl": Kind.OURS, "copy engine": Kind.LIMIT}
    found = Row(Case(tokens, ranks, hidden=64, topk=4, experts_a_rank=5, way=way))
    found.results = [Result(name, kinds.get(name, Kind.PEER), Timing(us, us - 1, us + 1)) for name, us in times.items()]
    return found


def test_misses() -> None:
    """A figure for many tokens is a share of the limit, for few so many microseconds; peers have to be slower."""
    many = {"commdsl": 100.0, "copy engine": 86.0, DEEPEP: 170.0, DEEPEP_CACHED: 101.0, NCCL: 200.0}

    assert row(4096, **many).misses() == []
    assert row(4096, **{**many, "copy engine": 84.0}).misses() == ["of limit"]
    assert row(4096, **{**many, DEEPEP: 160.0, NCCL: 99.0}).misses() == [f"/{DEEPEP}", f"/{NCCL}"]
    assert row(128, commdsl=24.0).misses() == []
    assert row(128, commdsl=26.0).misses() == ["us"]
    assert row(128, Way.BACK, commdsl=26.0).misses() == []
    assert row(128, Way.BACK, 8, commdsl=46.0).misses() == ["us"]
    assert row(128, ranks=8, commdsl=34.0).misses() == []
    assert row(4096).misses() == ["us"]


def test_table() -> None:
    """A line a row, every contender in its column; of what is wrong no time is the best; CSV has a line a contender."""
    found = row(4096, **{"commdsl": 100.0, "copy engine": 86.0, NCCL: 50.0})
    found.results.append(Result("16 SMs", Kind.OURS, Timing(1.0, 1.0, 1.0), "wrong eagerly on ranks 1"))
    header, lines = overview([found], ("commdsl", "16 SMs"))
    cells = dict(zip(header, lines[0], strict=True))

    assert (cells["us"], cells[f"/{NCCL}"], cells["of limit"]) == ("100.0", "*2.00", "0.86")
    assert cells[""] == "16 SMs: wrong eagerly on ranks 1"
    assert all(f"/{name}" in header for name in PEERS)
    records = list(csv.DictReader(io.StringIO(text_of([found]))))
    assert [one["contender"] for one in records] == ["commdsl", "copy engine", NCCL, "16 SMs"]
    assert [one["ratio_to_all_to_all"] for one in records] == ["2", "1.72", "1", "0.02"]


def test_checks_see_what_is_wrong() -> None:
    """One byte of one row there, and one number of a sum by more than a few roundings."""
    torch = pytest.importorskip("torch")
    from benchmarks.experts_calls import Stage

    bench = SimpleNamespace(rank=1, ranks=3, device=torch.device("cpu"))
    for form in Form:
        stage = Stage(bench, Case(24, 3, form, hidden=64, topk=4, experts_a_rank=5))
        token, _ = stage.coming
        parts = [stage.rows(token, part, width) for part, width in enumerate(stage.case.widths)]
        assert not stage.wrong_there(parts)
        parts[-1][-1, -1] ^= 1
        assert stage.wrong_there(parts)
    total = stage.summed[0].clone()
    assert not stage.wrong_back(total.bfloat16())
    total[3, 5] *= 1.02
    assert stage.wrong_back(total.bfloat16())


def test_dry_run() -> None:
    """Ours and all_to_all_single are right in both ways and forms; nothing is timed, no figure is said to be met."""
    pytest.importorskip("torch")
    script = str(ROOT / "benchmarks" / "experts.py")
    sizes = ["--tokens", "11", "--hidden", "32", "--topk", "3", "--experts", "3"]
    done = launched(2, script, "--dry-run", *sizes, "--only", "commdsl", "once", "index", "index, halves")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "a dry run: 15 contenders right, nothing timed" in done.stdout
