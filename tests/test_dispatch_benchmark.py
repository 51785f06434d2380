"""The parts of benchmarks/dispatch.py that need no GPU: balance, bytes, sorted rows, ratios, tables, the command line.
And benchmarks/documents.py: its plans, and all of it on processors; benchmarks/routes.py: its batches, and its lines.

Assumes a checkout. Does not measure anything.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent.parent))
from forked import launched

from benchmarks import dispatch_report, documents
from benchmarks.dispatch_plans import KEY_BYTES, QUERY_BYTES, Case, Sorted, followed
from benchmarks.dispatch_report import APART, OURS, TOGETHER, Row, Way
from benchmarks.report import Kind, Result, Timing
from benchmarks.routes import batches
from benchmarks.routes import main as new_routes
from commdsl.planner.balance import imbalance

ROOT = Path(__file__).parent.parent
COPY_ENGINE = "copy engine"
SHAPES = [(1024, 128, 4, 1), (256, 1, 4, 1), (1000, 7, 3, 1), (512, 32, 4, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_balance(shape: tuple[int, int, int, int]) -> None:
    """Every rank has the case's rows, and sends as many shards to any rank as to any other, or one more."""
    case = Case(*shape)
    shards = np.zeros((case.ranks, case.ranks), np.int64)
    np.add.at(shards, (case.plan.shards.rank, case.plan.dest[:, 0]), 1)

    assert (case.plan.shards.rows == case.rows).all()
    assert np.ptp(shards) <= 1
    assert np.ptp(shards.sum(axis=0)) <= 1
    assert (Case(*shape).plan.dest == case.plan.dest).all()


def test_bytes() -> None:
    """What a port carries are queries and keys for the other ranks; keys of a document travel once for each query."""
    alone, together = Case(1024, 128, 4), Case(1024, 128, 4, document=4)

    assert alone.traffic.port_bytes == 768 * (QUERY_BYTES + KEY_BYTES)
    assert together.traffic.sent.sum() == 4 * 1024 * (QUERY_BYTES + 5 * KEY_BYTES // 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_sorted_rows(shape: tuple[int, int, int, int]) -> None:
    """NCCL's rows: what a rank sends to another is what that one has from it, row for row; nothing is missing."""
    case = Case(*shape)
    rows = case.plan.shards.rows
    for routes in (case.routing.queries, case.routing.keys):
        assert routes is not None
        maps = followed(routes, rows, routes.counts.sum(axis=1))
        tables = [Sorted.of(routes, rows, rank) for rank in range(case.ranks)]
        base = np.cumsum(rows) - rows
        for rank, here in enumerate(tables):
            assert sorted(here.arriving) == sorted(maps[rank])
            arriving = np.split(here.arriving, np.cumsum(here.received)[:-1])
            for other, there in enumerate(tables):
                leaving = np.split(there.rows, np.cumsum(there.sent)[:-1])[rank]
                assert (leaving + base[other] == arriving[other]).all()


def row(rows: int, ours: float, nccl: float, limit: float) -> Row:
    def timed(name: str, kind: Kind, value: float) -> Result:
        return Result(name, kind, Timing(value, value, value))

    results = [
        timed(OURS[0], Kind.OURS, ours),
        Result(OURS[2], Kind.OURS, Timing(1.0, 1.0, 1.0), "wrong eagerly on ranks 1"),
        Result(OURS[3], Kind.OURS, None, "failed: RuntimeError"),
        timed(APART, Kind.PEER, nccl + 1),
        timed(TOGETHER, Kind.PEER, nccl),
        timed("push to 1 x64", Kind.LIMIT, limit + 2),
        timed(COPY_ENGINE, Kind.LIMIT, limit),
    ]
    return Row(Case(rows, 128, 4), Way.THERE, results)


def test_figures() -> None:
    """Ratios are to NCCL's better call and the sooner limit; a missed figure is said; a wrong result is never best."""
    found = row(8192, 90.0, 100.0, 85.0)
    best = found.best(Kind.OURS)

    assert best is not None
    assert best.name == OURS[0]
    assert found.over(best, Kind.PEER) == pytest.approx(0.9)
    assert found.share_of_limit(best) == pytest.approx(85 / 90)
    assert found.misses() == ["/NCCL"]
    assert row(8192, 84.0, 100.0, 70.0).misses() == ["of limit"]
    assert row(4096, 84.0, 100.0, 70.0).misses() == []
    assert row(1024, 25.5, 40.0, 20.0).misses() == ["us"]
    assert Row(Case(1024, 128, 4), Way.BACK, []).misses() == ["us"]


def test_table() -> None:
    """A line a row, every contender in its column, stars at what is missed; CSV has a line a contender."""
    header, lines = dispatch_report.overview([row(8192, 90.0, 100.0, 85.0)], OURS, (APART, TOGETHER))
    records = list(csv.DictReader(io.StringIO(dispatch_report.text_of([row(8192, 90.0, 100.0, 85.0)]))))

    assert [len(line) for line in lines] == [len(header)]
    assert dict(zip(header, lines[0], strict=True)) == {
        "way": "there",
        "rows": "8K",
        "shard": "128",
        "MB": "62.9",
        "rows kv": "90.0",
        "rows k+v": "-",
        "packed kv": "1.0",
        "packed k+v": "-",
        APART: "101.0",
        TOGETHER: "100.0",
        "limit": "85.0",
        "us": "90.0",
        "/NCCL": "*0.90",
        "of limit": "0.94",
        "GB/s": "699",
        "": "packed kv: wrong eagerly on ranks 1; packed k+v: failed: Run",
    }
    assert [record["median_us"] for record in records] == ["90", "1", "", "101", "100", "87", "85"]
    assert records[0]["ratio_to_nccl"] == "0.9"


def test_command_line() -> None:
    """It says what it can do without a GPU, and refuses to run without torchrun."""
    script = str(ROOT / "benchmarks" / "dispatch.py")
    shown = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    refused = subprocess.run([sys.executable, script], capture_output=True, text=True)

    assert "--documents" in shown.stdout
    assert refused.returncode == 1
    assert "torchrun" in refused.stderr


# --- documents.py -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_plans_of_a_batch(seed: int) -> None:
    """Three plans of the same tokens: balanced is even, unbalanced moves no query, the third keeps documents whole."""
    batch = documents.Batch(seed, 4, 64 << 10)
    made = {name: batch.plan(name) for name in documents.PLANS}
    uneven = {name: 1 + imbalance(documents.load_of(plan).attention) for name, plan in made.items()}
    whole = made["own rank"]

    assert {int(plan.shards.length.sum()) for plan in made.values()} == {4 * 64 << 10}
    assert len({tuple(plan.shards.rows.tolist()) for plan in made.values()}) == 1
    assert uneven["balanced"] < 1.03
    assert uneven["unbalanced"] > documents.UNEVEN
    assert (made["unbalanced"].dest[:, 0] == made["unbalanced"].shards.rank).all()
    assert all(len(set(whole.dest[whole.document == one, 0].tolist())) == 1 for one in set(whole.document.tolist()))


def test_documents_on_processors() -> None:
    """It goes through on processors, where results and gradients of all plans agree, and the table comes last."""
    done = launched(2, str(ROOT / "benchmarks" / "documents.py"), "--device", "cpu", "--tokens", "128", "--seeds", "1")

    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in (*documents.PLANS, "results and gradients of all plans agree"))


def test_new_routes(capsys: pytest.CaptureFixture[str]) -> None:
    """Batches fill each rank and are new each time; a line for each number of ranks and tokens."""
    drawn = list(islice(batches(3, 1024, seed=1), 4))
    assert len({*drawn}) == 4
    assert all(sum(documents) == 1024 for batch in drawn for documents in batch)

    new_routes(["--ranks", "2,3", "--tokens", "1K", "--batches", "2", "--device", "cpu"])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:]] == [["2", "1024"], ["3", "1024"]]
