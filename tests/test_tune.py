"""`commdsl tune`: the search on a machine whose costs are known, and a tiny run of the command on processor ranks."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from forked import Done, launched

import commdsl
from commdsl import compiler
from commdsl.commands.arguments import Place
from commdsl.commands.candidates import families_of
from commdsl.commands.cli import run_command
from commdsl.ir.resolve import resolve
from commdsl.machine import resources
from commdsl.machine.carriers import BULK, measured
from commdsl.machine.resources import data_dir
from commdsl.machine.topology import switch
from commdsl.planner.tuning import selection
from commdsl.planner.tuning.search import SETTLED, Failure, Search, Times
from commdsl.planner.tuning.search_space import FAMILIES, LADDERS, first_candidates, in_range, neighbours
from commdsl.planner.tuning.selection import COLLECTIVES, Candidate, Measured, Row

SIZES = tuple(1 << power for power in range(10, 31, 2))
CARRIERS = measured()
PROTOCOLS = ("packet", "line", "bulk", "engine")
ROOT = Path(__file__).parent.parent


def cost(candidate: Candidate, nbytes: int) -> float:
    """Microseconds: packets start soonest, bulk moves most, few lanes do not fill the link, odd tiles cost a little.

    Lanes that a size cannot fill stay idle and cost nothing.
    """
    tune = dict(candidate.tune)
    start, rate = {"packet": (3.0, 100e3), "line": (5.0, 250e3), "bulk": (9.0, 340e3), "engine": (30.0, 340e3)}[
        str(tune.get("protocol", "bulk"))
    ]
    hops, traffic = (
        (1, 3.0) if "oneshot" in candidate.schedule else (6, 1.5) if "ring" in candidate.schedule else (2, 1.5)
    )
    lanes, tile = int(tune.get("lanes", 16)), int(tune.get("tile", 65536))
    filled, busy = min(1.0, lanes / 48), min(lanes, nbytes >> 12)
    return start * hops + 0.01 * busy + nbytes * traffic / (rate * filled) + 0.1 * abs(math.log2(tile / 65536))


@dataclass
class FakeBench:
    """Measures by `cost`, and remembers what it was asked."""

    broken: str = ""  # candidates with this in their text fail
    pace: float = 0.0  # the share of the time that a candidate takes
    asked: list[tuple[Candidate, tuple[int, ...]]] = field(default_factory=list)
    announced: int = 0

    def announce(self, candidates: tuple[Candidate, ...]) -> None:
        self.announced += len(candidates)

    def measure(self, candidate: Candidate, sizes: tuple[int, ...]) -> Times | Failure:
        self.asked.append((candidate, sizes))
        if self.broken and self.broken in str(candidate):
            return Failure("DeviceError: no")
        return {size: cost(candidate, size) for size in sizes}

    def spent(self) -> float:
        return self.pace * len(self.asked)


def search(bench: FakeBench, sizes: tuple[int, ...] = SIZES) -> Search:
    return Search("all_reduce", 4, sizes, CARRIERS, bench, lambda stage, done, total: None)


def everything() -> set[Candidate]:
    """The whole of the space that single steps reach."""
    reached = set(first_candidates(FAMILIES["all_reduce"], CARRIERS))
    edge = set(reached)
    while edge:
        edge = {one for candidate in edge for one in neighbours(candidate)} - reached
        reached |= edge
    return reached


def test_the_search_finds_what_is_fast() -> None:
    """Its choice is near the best of the whole space at every size, after a small part of the measurements."""
    bench = FakeBench()
    rows = search(bench).run()
    space = everything()

    assert len(rows) == len(SIZES)
    for row in rows:
        assert row.measured is not None
        best = min(
            cost(one, row.measured.nbytes)
            for one in space
            if in_range(FAMILIES["all_reduce"], one, row.measured.nbytes, CARRIERS)
        )
        assert row.measured.us <= 1.1 * best
        assert row.measured.second is not None
        assert row.measured.second_us >= row.measured.us / SETTLED
    assert len({candidate for candidate, _ in bench.asked}) < len(space) / 10
    assert bench.announced == len(bench.asked)


def test_rows_meet_between_sizes() -> None:
    """A row ends at the geometric mean of its size and the next, the last nowhere; few candidates serve many rows."""
    rows = search(FakeBench()).run()

    assert [row.max_bytes for row in rows] == [2 * size for size in SIZES[:-1]] + [None]
    assert len({row.candidate for row in rows}) < len(rows)


def test_the_search_is_deterministic() -> None:
    """The same measurements are made in the same order, so ranks with the same numbers stay together."""
    first, second = FakeBench(), FakeBench()

    assert search(first).run() == search(second).run()
    assert first.asked == second.asked


def test_failures_are_kept() -> None:
    """A candidate that fails is counted with its reason, asked once, and chosen nowhere."""
    bench = FakeBench(broken="protocol=line")
    made = search(bench)
    rows = made.run()

    assert made.failures
    assert {failure.reason for failure in made.failures.values()} == {"DeviceError: no"}
    assert len([one for one, _ in bench.asked if "line" in str(one)]) == len(made.failures)
    assert not any("line" in str(row.candidate) for row in rows)
    assert search(FakeBench(broken="allreduce")).run() == ()


def test_time_runs_out() -> None:
    """Short of time the stages are cut, and every size that a candidate reached still has a row."""
    bench = FakeBench(pace=0.05)
    made = search(bench)
    rows = made.run()

    assert made.skipped > 0
    assert len(bench.asked) < 40
    assert rows[-1].max_bytes is None


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_space_is_legal(collective: str) -> None:
    """The language admits every first candidate and its neighbours, and some candidate serves every size."""
    first = first_candidates(FAMILIES[collective], CARRIERS)
    reached = {one for candidate in first for one in (candidate, *neighbours(candidate))}
    schedules = {path.stem: path for path in (data_dir("schedules") / "collectives").glob("*.comm")}
    files = compiler.read(schedules["alltoall_direct"])
    for tune in sorted({one.tune for one in reached}, key=str):
        resolve(files, compiler.choose(files, None), 4, switch(4), {}, dict(tune))
    for schedule, params in sorted({(one.schedule, one.params) for one in reached}):
        compiler.check(schedules[schedule], ranks=4, params=dict(params))
    assert all(any(in_range(FAMILIES[collective], one, size, CARRIERS) for one in first) for size in SIZES)


def test_the_grid_is_on_the_ladders() -> None:
    """Refinement can leave every value of the grid both ways."""
    grids = [carrier.grid for carrier in CARRIERS if carrier.grid is not None]
    assert len(grids) == len(PROTOCOLS)
    for grid in grids:
        tiles = grid.ladder
        for values, ladder in ((grid.lanes, LADDERS["lanes"]), (grid.threads, LADDERS["threads"]), (grid.tiles, tiles)):
            assert all(ladder[0] < value < ladder[-1] and value in ladder for value in values if value is not None)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--collectives", "reduce"], "--collectives expects all_reduce"),
        (["--sizes", "1MB..1KB"], "--sizes goes up"),
        (["--sizes", "few"], "--sizes expects a size"),
        (["--factor", "1"], "by a --factor of 2"),
        (["--time-budget", "0"], "above 0"),
        (["--dtype", "uint8"], "--dtype expects one of float32"),
        (["--dtype", "float8_e5m2"], "--dtype expects one of float32"),
        (["--shapes", "8192"], "--shapes is depth and columns as in 8192x3584,8192x1280, not `8192`"),
        (["--collectives", "all_gather_matmul"], "--shapes goes with all_gather_matmul, matmul_reduce_scatter"),
        (["--collectives", "all_reduce", "--shapes", "16x24"], "and these with --shapes"),
        (["--output", "no/such/table.json"], "there is no folder no/such"),
    ],
)
def test_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong word is a usage error that says what is expected."""
    assert run_command(["tune", *words]) == 2
    assert message in capsys.readouterr().err


def test_choice_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`commdsl choice` prints what runs, and why; --json says the same."""
    words = ["choice", "all_reduce", "64KB", "--ranks", "4", "--device", "A GPU that nobody measured"]
    assert run_command(words) == 0
    said = capsys.readouterr().out
    assert run_command([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert said.splitlines() == ["allreduce_twoshot protocol=line", found["reason"]]
    assert (found["schedule"], found["tune"], found["bytes"]) == ("allreduce_twoshot", {"protocol": "line"}, 65536)
    assert run_command(["choice", "reduce", "64KB", "--ranks", "4"]) == 2


def run_tune(*words: str) -> Done:
    return launched(2, "commdsl", "tune", "--sizes", "1KB..8KB", "--factor", "8", "--time-budget", "4", *words)


def test_run(tmp_path: Path) -> None:
    """Under torchrun the command checks and times candidates and writes a table to choose from, or to add to; one's own
    schedules are among them, and products beside what travels."""
    pytest.importorskip("torch")
    path = tmp_path / "here.json"
    both = ("--collectives", "all_reduce,all_gather_matmul", "--shapes", "16x24")
    done = run_tune(str(own_ring(tmp_path)), *both, "--output", str(path))
    assert done.returncode == 0, done.stderr
    assert "no GPU that torch can use" in done.stderr
    table = selection.read_table(path)
    rows = table.of("all_reduce")

    assert (table.device, table.ranks) == ("cpu", 2)
    assert rows is not None
    assert [row.measured.nbytes for row in rows if row.measured] == [1024, 8192]
    products = table.of("all_gather_matmul 16x24")
    assert products is not None
    assert {row.measured.candidates for row in products if row.measured} == {4}  # three cuts, and one after the other
    assert "all_reduce" in done.stdout
    assert "measured" in done.stderr
    chosen = selection.choose((table,), "all_reduce", 1000, 2, "cpu", plain=False)
    assert chosen.reason.startswith(f"{path}: fastest of ")

    again = run_tune("--collectives", "broadcast", "--output", str(path), "--memory", "1KB")
    assert again.returncode != 0
    assert "more than 1 KB of symmetric memory" in again.stderr
    assert selection.read_table(path).rows == table.rows


def test_it_needs_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Without torchrun the command says how it is started."""
    pytest.importorskip("torch")

    assert run_command(["tune"]) == 2
    assert "torchrun --nproc-per-node" in capsys.readouterr().err


def test_built_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share the candidates that come next, and processes without torch bring each into the cache."""
    torch = pytest.importorskip("torch")
    from commdsl.runtime import ahead

    monkeypatch.setenv("COMMDSL_CACHE_DIR", str(tmp_path))
    candidates = first_candidates(FAMILIES["all_gather"], (BULK,))[:3]
    first, second = (ahead.Ahead(rank, 2, workers=1) for rank in range(2))
    for one in (first, second):
        one.build(candidates, torch.device("cpu"), "float32")
    assert (len(first.started), len(second.started)) == (2, 1)
    for job in (*first.started, *second.started):
        job.result(timeout=120)
    first.close()
    second.close()

    kept = [path.read_bytes() for path in tmp_path.glob("??/*/object.pickle")]
    assert sum(b"commdsl.runtime.program" in one for one in kept) == 3
    assert len(list(tmp_path.glob("??/*/*.so"))) == 3


def test_row_is_kept_within_noise() -> None:
    """A row takes over the candidate of the one before where that is as fast but for noise."""
    first, second = Candidate("a"), Candidate("b")
    made = search(FakeBench(), (1024, 4096))
    made.times = {first: {1024: 5.0, 4096: 6.1}, second: {1024: 5.5, 4096: 6.0}}
    rows: tuple[Row, ...] = made._rows()

    assert [row.candidate for row in rows] == [first, first]


# --- one's own schedules ----------------------------------------------------------------------------------------------


def own_ring(folder: Path) -> Path:
    """A schedule that is not shipped: the ring under another name."""
    shipped = resources.shipped_file("allreduce_ring")
    assert shipped is not None
    path = folder / "mine.comm"
    path.write_text(shipped.read_text().replace("allreduce_ring", "my_ring"))
    return path


def test_own_schedules_are_candidates(tmp_path: Path) -> None:
    """One's own schedule is measured in every protocol and as it is written, beside the shipped ones."""
    ((collective, family),) = families_of((Place(own_ring(tmp_path)),), ())
    assert (collective, family.schedule) == ("all_reduce", f"{tmp_path}/mine.comm:my_ring")

    bench = FakeBench()
    made = search(bench)
    made.own = (family,)
    made.run()
    asked = {candidate for candidate, _ in bench.asked}
    assert Candidate(family.schedule) in asked
    assert {dict(one.tune).get("protocol") for one in asked if one.schedule == family.schedule} == {None, *PROTOCOLS}
    assert {one.schedule for one in asked} > {"allreduce_ring", "allreduce_twoshot"}


def test_own_schedules_in_a_table(tmp_path: Path) -> None:
    """A table names them beside itself, so that both can be moved together."""
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "tables").mkdir(parents=True)
    schedule = f"{own_ring(here)}:my_ring"
    row = Row(None, Candidate(schedule, (("K", 2),)), Measured(1024, 5.0, 2, Candidate("allreduce_ring"), 6.0))
    table = selection.Table("cpu", 2, (), (("all_reduce", (row,)),), here / "tables" / "table.json")
    assert table.path is not None
    table.path.write_text(selection.table_text(table))
    assert str(tmp_path) not in table.path.read_text()
    here.rename(there)
    read = selection.read_table(there / "tables" / "table.json").of("all_reduce")
    assert read is not None
    assert read[0].candidate == Candidate(f"{there}/mine.comm:my_ring", (("K", 2),))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rotation_ring"], "does not ensure one of allreduce"),
        (["spanning"], "declares no schedule"),
        (["allreduce_ring", "--collectives", "broadcast"], "--collectives leaves allreduce_ring out"),
        (["allreduce_rin"], "did you mean allreduce_ring?"),
        (["--sizes", "1GB..1KB"], "--sizes goes up"),
        (["--sizes", "x"], "--sizes expects a size"),
        (["--factor", "1"], "a --factor of 2 or more"),
        (["--factor", "x"], "is not a valid integer"),
        (["--collectives", "allreduce"], "--collectives expects"),
        (["--time-budget", "0"], "above 0"),
        (["--dtype", "float"], "--dtype expects"),
        (["--memory", "much"], "--memory expects a size"),
    ],
)
def test_what_cannot_be_tuned(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong word is said before torch is loaded."""
    assert run_command(["tune", *words]) == 2
    assert said in capsys.readouterr().err


def test_it_needs_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without torch it says what to install."""
    for name in [name for name in sys.modules if name.startswith("commdsl.runtime")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run_command(["tune"]) == 2
    assert capsys.readouterr().err.startswith("usage: tune needs torch: pip install")


def test_one_of_several_is_loaded(tmp_path: Path) -> None:
    """What a table names is what `commdsl.load` takes: FILE.comm:NAME."""
    pytest.importorskip("torch")
    mine = own_ring(tmp_path)
    mine.write_text(mine.read_text() + mine.read_text().replace("my_ring", "other"))
    assert commdsl.load(f"{mine}:other", ranks=2).name.startswith("other")
