"""benchmarks/scaling.py on times made up by the model's own law: it finds the constants again, and the paper follows.

Assumes a checkout. Does not measure anything.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import report, scaling
from benchmarks.cases import Case, Collective
from benchmarks.report import CHOSEN, NCCL, Kind, Result, Row, Timing
from benchmarks.scaling_model import (
    Family,
    Rail,
    Reading,
    RowsError,
    better_reading,
    errors,
    fit,
    left_out,
    machine,
    on_paper,
    read,
    root_mean_square,
    schedule_on,
)

ROOT = Path(__file__).parent.parent
RAIL = Rail(4.0, 50.0)
LAW = {"packet": (3.0, 1.2, 150.0), "line": (4.0, 1.6, 280.0), "bulk": (6.0, 3.0, 360.0)}
"""By protocol: microseconds of a base and of a step, GB/s of a port."""

RAN = {
    Collective.ALL_REDUCE: (
        (16 << 10, "allreduce_oneshot", "packet", lambda p: (1, p - 1)),
        (64 << 10, "allreduce_twoshot", "packet", lambda p: (2, 2 * (p - 1) / p)),
        (1 << 20, "allreduce_twoshot", "line", lambda p: (2, 2 * (p - 1) / p)),
        (1 << 40, "allreduce_ring", "bulk", lambda p: (2 * (p - 1), 2 * (p - 1) / p)),
    ),
    Collective.ALL_GATHER: (
        (64 << 10, "allgather_direct", "packet", lambda p: (1, (p - 1) / p)),
        (1 << 20, "allgather_direct", "line", lambda p: (1, (p - 1) / p)),
        (1 << 40, "allgather_direct", "bulk", lambda p: (1, (p - 1) / p)),
    ),
    Collective.REDUCE_SCATTER: (
        (1 << 20, "reducescatter_direct", "packet", lambda p: (1, (p - 1) / p)),
        (1 << 40, "reducescatter_direct", "bulk", lambda p: (1, (p - 1) / p)),
    ),
}
"""By collective: up to which size which schedule ran, with its steps and the bytes of its busiest port."""


def result(case: Case, wobble: float = 1.0) -> Result:
    """Our row for a case, by LAW."""
    _, name, protocol, load = next(entry for entry in RAN[case.collective] if case.nbytes <= entry[0])
    base, step, gb_per_s = LAW[protocol]
    steps, port = load(case.ranks)
    us = wobble * (base + step * steps + 1e-3 * port * case.nbytes / gb_per_s)
    return Result(CHOSEN, Kind.OURS, Timing(us, us, us), detail=f"{name}:{protocol}:64:256:4096")


def write(folder: Path, ranks: tuple[int, ...] = (2, 3, 4), noise: float = 0.0) -> list[Path]:
    """A CSV for every number of ranks, with rows that are none of ours, or wrong, or slower tunings beside ours."""
    random = np.random.default_rng(7)
    paths = []
    for count in ranks:
        rows = []
        for collective in RAN:
            for nbytes in (12 << 10, 48 << 10, 768 << 10, 12 << 20, 768 << 20, 64 << 10, 16 << 20, 1 << 30):
                ours = result(Case(collective, nbytes, count), 1 + noise * random.standard_normal())
                assert ours.timing is not None
                slow = Timing(9 * ours.timing.median, 0, 0)
                fast = Timing(0.1, 0, 0)
                others = [
                    Result(NCCL, Kind.PEER, fast),
                    Result("push to 1 x64", Kind.LIMIT, fast),
                    replace(ours, name=ours.detail.replace(":64:", ":8:"), detail="", timing=slow),
                    replace(ours, name=ours.detail.replace(":64:", ":9:"), timing=fast, status="wrong in a graph"),
                    replace(ours, name=ours.detail.replace(":64:", ":7:"), timing=None, status="refused: x"),
                ]
                rows.append(Row(Case(collective, nbytes, count), [*others, ours]))
        paths.append(folder / f"x{count}.csv")
        paths[-1].write_text(report.text_of(rows), encoding="utf-8")
    return paths


def test_constants_come_back(tmp_path: Path) -> None:
    """Times that follow the law exactly give its constants, with no error, also for a P that the fit has not seen."""
    samples = read(write(tmp_path))
    for reading in Reading:
        model = fit(samples, reading)
        assert len(samples) == 3 * 3 * 8
        assert set(model) == set(LAW)
        for protocol, (base, step, gb_per_s) in LAW.items():
            known = model[protocol]
            assert not known.step_is_stated
            assert (known.base_us, known.step_us, known.gb_per_s) == pytest.approx((base, step, gb_per_s), rel=0.02)
        assert max(map(abs, errors(samples, model, reading).values())) < 0.005
        unseen = left_out(samples, reading)
        assert len(unseen) == len(samples)
        assert max(map(abs, unseen.values())) < 0.01


def test_noise(tmp_path: Path) -> None:
    """5 % noise on the times moves the constants and the errors by about as much, and no constant below 0."""
    samples = read(write(tmp_path, noise=0.05))
    model = fit(samples, Reading.OVERLAP)

    assert all(known.base_us >= 0 and known.step_us >= 0 and known.us_per_byte > 0 for known in model.values())
    assert model["bulk"].gb_per_s == pytest.approx(LAW["bulk"][2], rel=0.1)
    assert root_mean_square(left_out(samples, Reading.OVERLAP).values()) < 0.15


def test_one_number_of_ranks(tmp_path: Path) -> None:
    """With one P nothing is left out and the fit alone decides; rows with as many steps take the stated latency."""
    samples = read(write(tmp_path, ranks=(2,)))
    gathers = [sample for sample in samples if sample.case.collective is Collective.ALL_GATHER]

    assert left_out(samples, Reading.OVERLAP) == {}
    assert better_reading(samples) in Reading
    known = fit(gathers, Reading.OVERLAP)["bulk"]
    assert known.step_is_stated
    assert known.base_us + known.step_us == pytest.approx(9.0, rel=0.01)
    assert fit(gathers[:1], Reading.OVERLAP) == {}


def test_readings(tmp_path: Path) -> None:
    """Where a schedule's busiest port changes from step to step, steps in turn carry more bytes than steps that
    overlap; elsewhere both readings are the same."""
    case = Case(Collective.BROADCAST, 1 << 20, 4)
    one = Result("broadcast_scatter:bulk:8", Kind.OURS, Timing(5.0, 5.0, 5.0))
    (tmp_path / "b.csv").write_text(report.text_of([Row(case, [one])]), encoding="utf-8")
    (sample,) = read([tmp_path / "b.csv"])

    assert sample.is_choice
    assert sample.load(Reading.OVERLAP) == pytest.approx(1 << 20)
    assert sample.load(Reading.IN_TURN) == pytest.approx((1 + 2 / 3) * (1 << 20))
    for other in read(write(tmp_path)):
        assert other.load(Reading.OVERLAP) == pytest.approx(other.load(Reading.IN_TURN))
    assert better_reading(read(write(tmp_path, noise=0.05))) is Reading.OVERLAP  # the first where they are the same


def test_paper(tmp_path: Path) -> None:
    """The two-level all-reduce on 64 nodes: two steps of each kind, and its time by hand."""
    model = fit(read(write(tmp_path)), Reading.OVERLAP)
    family = Family(Collective.ALL_REDUCE, "allreduce_two_level", (), "bulk")
    (found,) = on_paper([family], 64, model, RAIL)
    base, step, gb_per_s = LAW["bulk"]
    latency = base + 2 * step + 2 * (step + 4.0 - 0.7)
    inside, across = (1 << 30) * 1.75 / gb_per_s / 1e3, (1 << 30) * 2 * 63 / 512 / 50 / 1e3

    assert found.steps == (2, 2)
    assert found.shares() == pytest.approx((1.75, 2 * 63 / 512))
    assert found.us(1 << 30, Reading.OVERLAP) == pytest.approx(latency + max(inside, across), rel=0.01)
    assert found.us(1 << 30, Reading.IN_TURN) == pytest.approx(latency + inside + across, rel=0.01)


def test_what_fits_on_paper(tmp_path: Path) -> None:
    """Across nodes only what has a rail under every transfer, and only in a protocol that was fitted."""
    model = fit(read(write(tmp_path)), Reading.OVERLAP)
    flat = Family(Collective.ALL_REDUCE, "allreduce_twoshot", (), "bulk")

    assert [len(on_paper([flat], nodes, model, RAIL)) for nodes in (1, 2)] == [1, 0]
    assert on_paper([replace(flat, protocol="line")], 1, {"bulk": model["bulk"]}, RAIL) == []
    assert schedule_on(Family(Collective.ALL_REDUCE, "no_such", (), "bulk"), machine(1, (1, 1), (4, 50))) is None


def test_tables(tmp_path: Path) -> None:
    """Tables are full, say what is measured and what is on paper, and name what no schedule can do."""
    found = scaling.study(write(tmp_path), RAIL)
    for make in (scaling.constants, scaling.beside, scaling.details, scaling.growth):
        header, lines = make(found)
        assert lines
        assert {len(line) for line in lines} == {len(header)}
    header, lines = scaling.growth(found)
    first = dict(zip(header, lines[0], strict=True))

    assert len(scaling.beside(found)[1]) == len(found.samples)
    assert first["P=2 measured"] == report.number(5.4 + 1e-3 * (64 << 10) / 150)
    assert [float(first[name].split("-")[0]) > 0 for name in header[2:]] == [True] * 7
    assert {name.rpartition(" ")[2] for name in header[2:]} == {"measured", "paper"}
    assert lines[-1][-3:] == ["-"] * 3  # reduce-scatter
    assert "No shipped schedule runs over rails: reduce_scatter." in scaling.notes(found)


def test_refused(tmp_path: Path) -> None:
    """Files of another shape, rows that do not say what ran, schedules that are not shipped: a sentence, no table."""
    case = Case(Collective.ALL_REDUCE, 1 << 20, 4)
    timed = Timing(5.0, 5.0, 5.0)
    bad = {
        "says which": Result(CHOSEN, Kind.OURS, timed),
        "no shipped": Result("allreduce_mine:bulk:8", Kind.OURS, timed),
        "no row": Result(NCCL, Kind.PEER, timed),
    }
    for message, one in bad.items():
        (tmp_path / "b.csv").write_text(report.text_of([Row(case, [one])]), encoding="utf-8")
        with pytest.raises(RowsError, match="does not say which" if message == "says which" else message):
            read([tmp_path / "b.csv"])
    (tmp_path / "b.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RowsError, match="not written by"):
        read([tmp_path / "b.csv"])


def test_command(tmp_path: Path) -> None:
    """The command prints the four tables; a file that is not there is a sentence and exit code 1."""
    script = str(ROOT / "benchmarks" / "scaling.py")
    paths = list(map(str, write(tmp_path)))
    shown = subprocess.run([sys.executable, script, *paths, "--markdown"], capture_output=True, text=True, check=True)
    missing = subprocess.run([sys.executable, script, str(tmp_path / "no.csv")], capture_output=True, text=True)

    assert shown.stdout.count("| --- |") >= 4
    assert "On paper, not measured" in shown.stdout
    assert missing.returncode == 1
    assert "Traceback" not in missing.stderr


def test_plot(tmp_path: Path) -> None:
    """A plot is a file with something in it."""
    pytest.importorskip("matplotlib")
    scaling.plot(tmp_path / "plot.png", scaling.study(write(tmp_path), RAIL))

    assert (tmp_path / "plot.png").stat().st_size > 1000
