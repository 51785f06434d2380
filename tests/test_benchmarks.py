"""The parts of benchmarks/ that need no GPU: what a command line means, bytes and ratios, tables, files, the numbers.

Assumes a checkout. Does not measure anything.
"""

from __future__ import annotations

import csv
import io
import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import report
from benchmarks.cases import (
    CALLS,
    MOST_LANES_PER_SM,
    SIZES,
    Candidate,
    CandidateError,
    Case,
    Collective,
    on_sms,
    parse_candidates,
    parse_collectives,
    parse_counts,
    parse_size,
    parse_sizes,
    size_name,
)
from benchmarks.report import CHOSEN, NCCL, NCCL_WINDOW, ONE_SHOT, Kind, Result, Row, Timing

ROOT = Path(__file__).parent.parent


def timing(value: float) -> Timing:
    return Timing(value, value - 1, value + 1)


def row() -> Row:
    return Row(
        Case(Collective.ALL_REDUCE, 1 << 20, 4),
        [
            Result("push to 3 x64", Kind.LIMIT, timing(8.0)),
            Result(NCCL, Kind.PEER, timing(20.0)),
            Result(NCCL_WINDOW, Kind.PEER, None, "failed: rank 0: RuntimeError: no windows"),
            Result(ONE_SHOT, Kind.PEER, timing(16.0)),
            Result(CHOSEN, Kind.OURS, timing(10.0), detail="allreduce_twoshot:line:64"),
            Result("allreduce_ring:bulk:8", Kind.OURS, None, "refused: CommError: too many"),
        ],
    )


def test_sizes() -> None:
    """1 KB to 1 GB in powers of four, 64 MB among them; a size is written with its unit and read back."""
    assert SIZES[0] == 1 << 10
    assert SIZES[-1] == 1 << 30
    assert 64 << 20 in SIZES
    assert all(4 * small == large for small, large in itertools.pairwise(SIZES))
    assert [parse_size(size_name(size)) for size in SIZES] == list(SIZES)
    assert parse_sizes("4M,1K,1K,100") == (100, 1 << 10, 4 << 20)
    with pytest.raises(ValueError, match="is no size"):
        parse_size("4 elephants")


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("collective", list(Collective))
def test_bytes(collective: Collective, ranks: int) -> None:
    """The larger side has the size's bytes, cut to whole blocks; what has to be sent is the bandwidth bound."""
    case = Case(collective, 64 << 20, ranks)
    share = {Collective.ALL_REDUCE: 2 * (ranks - 1) / ranks, Collective.BROADCAST: 1}.get(
        collective, (ranks - 1) / ranks
    )

    assert max(case.num_in, case.num_out) == case.numel
    assert 0 <= case.nbytes - 2 * case.numel < 2 * ranks
    assert case.sent_bytes == pytest.approx(share * case.nbytes, rel=1e-6)
    assert case.gigabytes_per_second(1000.0) == pytest.approx(case.sent_bytes / 1e6)


def test_candidates() -> None:
    """Commas multiply, empty fields stay the schedule's own, duplicates go, and a label reads back as its candidate."""
    found = parse_candidates(["allreduce_twoshot:bulk:64,128::128K", "broadcast_chain@K=2,4", "broadcast_chain@K=2"])

    assert [str(candidate) for candidate in found] == [
        "allreduce_twoshot:bulk:64::131072",
        "allreduce_twoshot:bulk:128::131072",
        "broadcast_chain@K=2",
        "broadcast_chain@K=4",
    ]
    assert parse_candidates(map(str, found)) == found
    assert found[0].tune == (("protocol", "bulk"), ("lanes", 64), ("tile", 128 << 10))
    assert (found[0].collective, found[2].collective) == (Collective.ALL_REDUCE, Collective.BROADCAST)


REFUSED = (
    "rotation_ring:bulk",
    "allreduce_ring:bulk:many",
    "broadcast_tree@root=1",
    "allreduce_ring:a:1:2:3:4:5",
    ":a",
)


@pytest.mark.parametrize("text", REFUSED)
def test_candidates_refused(text: str) -> None:
    """A candidate of no known collective, or with fields that mean nothing, is refused before anything starts."""
    with pytest.raises(CandidateError):
        parse_candidates([text])


def test_sms() -> None:
    """On k SMs the lanes are a multiple of k, as near to the candidate's own as that allows."""
    candidate = Candidate("allreduce_ring", (), (("protocol", "bulk"), ("tile", 4096)))

    assert str(on_sms(candidate, 100, 16)) == "allreduce_ring:bulk:96::4096:16"
    assert dict(on_sms(candidate, 4, 16).tune)["lanes"] == 16
    assert dict(on_sms(candidate, 128, 4).tune)["lanes"] == 4 * MOST_LANES_PER_SM


def test_collectives_by_name() -> None:
    """Collectives come in the order of the table, whatever order they are asked for."""
    assert parse_collectives("broadcast,all_reduce") == (Collective.ALL_REDUCE, Collective.BROADCAST)
    with pytest.raises(ValueError, match="no collective `reduce`"):
        parse_collectives("reduce")


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_calls_of_a_graph(ranks: int) -> None:
    """Every contender at every size has as many calls a graph, and every root of a broadcast is in it equally often."""
    cases = [Case(collective, nbytes, ranks) for collective in Collective for nbytes in SIZES]

    assert {case.calls for case in cases} == {CALLS}
    assert CALLS % ranks == 0
    assert parse_counts("6,12,24") == (6, 12, 24)
    with pytest.raises(ValueError, match="numbers from 1"):
        parse_counts("6,0")


def test_timing() -> None:
    """The median and the 10th and 90th percentile, interpolated."""
    assert Timing.of([float(value) for value in range(11)][::-1]) == Timing(5.0, 1.0, 9.0)
    assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0)


def test_ratios() -> None:
    """Our time over the best peer's and over NCCL's; the limit's over ours; a wrong result is never the best."""
    found = row()
    ours = found.of(CHOSEN)

    assert ours is not None
    assert found.ratio_to_best_peer(ours) == pytest.approx(10 / 16)
    assert found.ratio_to_nccl(ours) == pytest.approx(0.5)
    assert found.fraction_of_limit(ours) == pytest.approx(0.8)
    found.results.append(Result("fast", Kind.PEER, timing(1.0), "wrong in eager calls: 1 on rank 0"))
    assert found.ratio_to_best_peer(ours) == pytest.approx(10 / 16)


def test_tables() -> None:
    """The overview has a line a row, the matrix one a contender, and losses and the fastest are marked."""
    slow = row()
    slow.results[4] = Result(CHOSEN, Kind.OURS, timing(17.0))
    header, lines = report.overview([row(), slow])

    assert [len(line) for line in lines] == [len(header)] * 2
    assert lines[0][:5] == ["all_reduce", "1 MB", "10.0 (9.0-11.0)", "20.0", "failed"]
    assert [line[header.index("/best peer")] for line in lines] == ["0.62", "*1.06"]
    assert len(report.grid(header, lines).splitlines()) == 4
    assert report.markdown(header, lines).splitlines()[1] == "|" + " --- |" * len(header)

    header, lines = report.matrix([row()])
    assert [line[1] for line in lines] == ["8.0", "20.0", "failed", "+16.0", "*10.0", "refused"]


def test_faults() -> None:
    """What was refused is named once for all sizes; it fails the run only where it was commdsl's own choice."""
    assert report.faults([row(), row()]) == [
        "all_reduce NCCL windows at 1 MB, 1 MB: failed: rank 0: RuntimeError: no windows",
        "all_reduce allreduce_ring:bulk:8 at 1 MB, 1 MB: refused: CommError: too many",
    ]
    assert not Result("allreduce_ring", Kind.OURS, None, "refused: x").is_failure
    assert not Result(CHOSEN, Kind.OURS, None, report.NO_TIME).is_failure
    assert Result(CHOSEN, Kind.OURS, None, "refused: x").is_failure
    assert Result("allreduce_ring", Kind.OURS, None, "failed: x").is_failure


def test_csv() -> None:
    """One line a contender, every column filled or empty; it reads back as the same rows."""
    lines = list(csv.DictReader(io.StringIO(report.text_of([row()]))))

    assert len(lines) == len(row().results)
    assert tuple(lines[0]) == report.COLUMNS
    assert [line["median_us"] for line in lines] == ["8", "20", "", "16", "10", ""]
    assert lines[4]["ratio_to_nccl"] == "0.5"
    assert {line["calls"] for line in lines} == {str(CALLS)}
    assert report.rows_of(lines) == [row()]


def test_plot(tmp_path: Path) -> None:
    """A plot is a file with something in it."""
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "plot.png", [row()], "title")

    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize("collective", list(Collective))
def test_numbers(collective: Collective) -> None:
    """What every rank must hold follows from what the ranks put in, by the definition of the collective."""
    torch = pytest.importorskip("torch")
    from benchmarks import values

    ranks, call, device = 4, 5, torch.device("cpu")
    case = Case(collective, 4096, ranks)
    x = [values.given(case, rank, call, torch.bfloat16, device) for rank in range(ranks)]
    want = [values.wanted(case, rank, call, 2, torch.bfloat16, device) for rank in range(ranks)]
    blocks = [value.view(ranks, -1) for value in x] if case.num_in == case.numel else []
    definition = {
        Collective.ALL_REDUCE: lambda rank: sum(value.float() for value in x),
        Collective.REDUCE_SCATTER: lambda rank: sum(value[rank].float() for value in blocks),
        Collective.ALL_GATHER: lambda rank: torch.cat(x),
        Collective.ALL_TO_ALL: lambda rank: torch.cat([value[rank] for value in blocks]),
        Collective.BROADCAST: lambda rank: x[2],
    }[collective]

    for rank in range(ranks):
        assert torch.equal(want[rank].float(), definition(rank).float())
        assert want[rank].numel() == case.num_out
    again = values.given(case, 0, call + 1, torch.bfloat16, device)
    assert not torch.equal(x[0], x[1])
    assert not torch.equal(x[0], again)
    assert x[0].min() == -8
    assert x[0].max() == 7


def test_differences() -> None:
    """A single wrong bit shows, and so do another shape and two equal halves in the other order."""
    torch = pytest.importorskip("torch")
    from benchmarks import values

    x = values.whole_numbers(1001, 0, 0, torch.float32, torch.device("cpu"))
    y = x.clone()
    assert not values.differs(x, y)
    y.view(torch.int32)[17] ^= 1
    assert values.differs(x, y)
    assert values.differs(x, x[:-1])
    assert not torch.equal(values.fingerprint(x), values.fingerprint(y))
    assert not torch.equal(values.fingerprint(x), values.fingerprint(x.flip(0)))


def test_command_line() -> None:
    """It says what it can do without a GPU, torchrun or CuPy, and refuses to run without torchrun."""
    script = str(ROOT / "benchmarks" / "collectives.py")
    shown = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    refused = subprocess.run([sys.executable, script, "--candidates", "nothing:bulk"], capture_output=True, text=True)

    assert "--candidates" in shown.stdout
    assert refused.returncode == 2
    assert "has to start with one of" in refused.stderr


def test_mixed_calls() -> None:
    """run_mixed.py draws the same calls on every rank, of every kind it promises."""
    pytest.importorskip("torch")
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    import run_mixed

    options = run_mixed.options_of([])
    ops: dict[Collective, list[object]] = {collective: [None] for collective in Collective}

    def calls(rank: int) -> list[run_mixed.Call]:
        run = run_mixed.Run(
            rank, 4, None, None, options, None, random.Random(1), random.Random(rank), ops, [None, None], None
        )
        return [run_mixed.draw(run, number, run_mixed.MAX_BYTES, in_graph=False) for number in range(1000)]

    found = calls(0)
    assert found == calls(3)
    assert {call.case.collective for call in found} == set(Collective)
    assert {call.dtype for call in found} == set(run_mixed.DTYPES)
    assert max(call.case.nbytes for call in found) > run_mixed.MAX_BYTES // 2
    assert any(call.case.numel == 0 for call in found)
    assert any(call.case.numel % 2 for call in found)
    assert any(call.is_in_place for call in found)
    assert any(call.is_async for call in found)


def test_everything_that_is_quoted_is_run() -> None:
    """all.py writes every file of GPUs that a README quotes, by a command line that its benchmark understands."""
    from benchmarks import all as everything
    from benchmarks import collectives, dispatch, tables

    files = {run.file("h200") for run in everything.RUNS}
    pages = [path.read_text(encoding="utf-8") for path in tables.readmes()]
    quoted = {name for page in pages for _, _, names, _ in tables.BLOCK.findall(page) for name in names.split()}
    parsers = {"collectives.py": collectives.options_of, "dispatch.py": dispatch.options_of}

    assert {name.removesuffix("_host") for name in quoted if "h200" in name} == files
    for run in everything.RUNS:
        words = run.command("h200", "1a2b3c", 30.0)
        assert words[words.index("--nproc-per-node") + 1] == str(run.ranks)
        assert float(words[words.index("--time-budget") + 1]) <= 30.0
        script = run.words[0]
        if script in parsers:
            found = parsers[script](words[words.index(f"benchmarks/{script}") + 1 :])
            assert (found.save, found.commit) == (run.file("h200"), "1a2b3c")


def test_all_runs_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 4 GPUs runs on 4 go alone, runs on 2 on a pair of their own; one that fails, or writes no file, is said."""
    import threading

    from benchmarks import all as everything

    devices: list[str] = []
    both = threading.Barrier(2, timeout=20)

    def ended(command: list[str], lane: everything.Lane, seconds: float, log: object) -> str:
        devices.append(lane.devices)
        if lane.devices:
            both.wait()  # two at a time, or this breaks
        name = command[command.index("--save") + 1]
        if not name.startswith("visits"):
            (tmp_path / f"{name}.csv").write_text("")
        return "exit code 3" if name.startswith("overlap") else "ok"

    monkeypatch.setattr(everything, "_ended", ended)
    monkeypatch.setattr(everything, "MEASURED", tmp_path)
    options = everything.argparse.Namespace(seconds=1000.0, commit="1a2b3c", logs=tmp_path)
    runs = [run for run in everything.RUNS if run.name in ("host", "visits", "overlap", "collectives", "dispatch")]
    runs = [run for run in runs if run.ranks == 2 or run.name == "host"]
    outcomes = {outcome.run.file("h200"): outcome.status for outcome in everything.measured(runs, 4, "h200", options)}

    assert devices[0] == ""
    assert sorted(devices[1:]) == ["0,1", "0,1", "2,3", "2,3"]
    assert outcomes == {
        "host_h200_x4": "ok",
        "collectives_h200_x2": "ok",
        "overlap_h200_x2": "exit code 3",
        "visits_h200_x2": "ok, no file",
        "dispatch_h200_x2": "ok",
    }
    late = everything.measured(runs, 4, "h200", everything.argparse.Namespace(**{**vars(options), "seconds": 5.0}))
    assert {outcome.status for outcome in late} == {"no time left"}
