"""The choice of a schedule by size: tables as files, what is refused in them, and the default where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commdsl import compiler
from commdsl.machine import devices
from commdsl.machine.config import from_environment
from commdsl.machine.errors import ArgumentError
from commdsl.machine.resources import data_dir
from commdsl.planner.tuning import selection
from commdsl.planner.tuning.selection import COLLECTIVES, Candidate, Measured, Row, Table, TableError

ONESHOT = Candidate("allreduce_oneshot", (), (("lanes", 8), ("protocol", "packet")))
RING = Candidate("allreduce_ring", (), (("lanes", 64), ("protocol", "bulk"), ("tile", 65536)))
TABLE = Table(
    "Some GPU",
    4,
    (("dtype", "bfloat16"),),
    (
        (
            "all_reduce",
            (
                Row(131072, ONESHOT, Measured(65536, 5.125, 37, RING, 9.5)),
                Row(None, RING, Measured(1 << 20, 12.0, 1, None, 0.0)),
            ),
        ),
    ),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some_gpu_x4.json"
    path.write_text(selection.table_text(TABLE))
    return path


def choose(table: Table, nbytes: int, ranks: int = 4, device: str = "Some GPU", plain: bool = False) -> Any:
    return selection.choose((table,), "all_reduce", nbytes, ranks, device, plain=plain)


def test_file(path: Path) -> None:
    """A table read is the table written, and the same table gives the same bytes."""
    read = selection.read_table(path)

    assert (read.device, read.ranks, read.about, read.rows) == (TABLE.device, TABLE.ranks, TABLE.about, TABLE.rows)
    assert selection.table_text(read) == path.read_text()


def test_choice(path: Path) -> None:
    """The first row that reaches the size is chosen, and the reason is what was measured."""
    table = selection.read_table(path)
    small, large = choose(table, 131072), choose(table, 131073)

    assert (small.schedule, small.tune) == (ONESHOT.schedule, ONESHOT.tune)
    assert small.reason == f"{path}: fastest of 37 at 64 KB, 5.12 us; next {RING} 9.50 us"
    assert (large.schedule, large.params, large.tune) == (RING.schedule, RING.params, RING.tune)
    assert large.reason == f"{path}: fastest of 1 at 1 MB, 12.00 us"
    assert choose(table, 1).schedule == ONESHOT.schedule
    assert str(small).startswith("allreduce_oneshot lanes=8 protocol=packet: ")


@pytest.mark.parametrize(
    ("ranks", "device", "plain"), [(8, "Some GPU", False), (4, "cpu", False), (4, "Some GPU", True)]
)
def test_default(path: Path, ranks: int, device: str, plain: bool) -> None:
    """Another number of ranks, device or transport was not measured: the default says so."""
    chosen = choose(selection.read_table(path), 1024, ranks, device, plain)

    assert "no table for all_reduce" in chosen.reason
    assert chosen.reason.endswith("the stated default up to 32 KB")
    assert dict(chosen.tune)["protocol"] == ("packet" if (ranks, plain) == (8, False) else "bulk")


@pytest.mark.parametrize(
    ("name", "known", "is_whole"),
    [
        ("H200", "H200", True),
        ("nvidia h200", "H200", True),
        ("NVIDIA H200", "H200", True),
        ("NVIDIA H200 141GB HBM3e", "H200", True),
        ("NVIDIA H200 NVL", "H200", False),
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA H100 PCIe", "H100", False),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100", False),
        ("NVIDIA A100-SXM4-40GB", "A100", True),
        ("AMD Instinct MI300X OAM", "MI300X", True),
        ("h100_2x8", "H100", False),
        ("NVIDIA GH200 480GB", None, False),
        ("NVIDIA H20", None, False),
        ("NVIDIA", None, False),
        ("foo", None, False),
    ],
)
def test_names_of_devices(name: str, known: str | None, is_whole: bool) -> None:
    """A name is a known GPU by one of its words; makers, memory, modules and case do not count, other words do."""
    assert devices.known(name) == known
    assert bool(devices.doubt(name)) == (known is None)
    assert any(devices.same(name, gpu) for gpu in devices.GPUS) == is_whole


def test_a_device_of_another_spelling() -> None:
    """A shipped table speaks for its GPU however that is spelt, and for no variant; an unknown GPU is named as such."""
    tables = selection.known_tables(())

    def reason(device: str) -> str:
        return selection.choose(tables, "all_reduce", 65536, 4, device, plain=False).reason

    assert reason("h200") == reason("NVIDIA H200")
    assert "fastest of" in reason("H200")
    assert reason("NVIDIA H200 NVL").startswith("no table for all_reduce on NVIDIA H200 NVL x4")
    assert reason("foo").startswith("`foo` is not a known GPU (H200, H100, A100, MI300X); no table for all_reduce")


@pytest.mark.parametrize("device", ["", "  ", "cuda", "cuda:0", 3])
def test_no_device(device: Any) -> None:
    """A name that cannot be a GPU's is refused."""
    with pytest.raises(ArgumentError, match="a device is named as torch names the GPU"):
        selection.choose((), "all_reduce", 65536, 4, device, plain=False)


@pytest.mark.parametrize("ranks", [2, 3, 6, 8, 13])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_default_is_for_any_number_of_ranks(collective: str, ranks: int) -> None:
    """Every schedule of the default is proved for every number of ranks."""
    for row in selection.default_rows(collective, plain=True) + selection.default_rows(
        collective, plain=False, host=True
    ):
        (path,) = (data_dir("schedules") / "collectives").glob(f"{row.candidate.schedule}.comm")
        root = {"root": ranks - 1} if collective in selection.ROOTED else {}
        compiler.check(path, ranks=ranks, params=root, tune=dict(row.candidate.tune))


def spoil(change: Callable[[Any], None]) -> str:
    value = json.loads(selection.table_text(TABLE))
    change(value)
    return json.dumps(value)


def row(value: Any) -> Any:
    return value["collectives"]["all_reduce"][0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "expected an object, got \\[\\]"),
        (spoil(lambda value: value.pop("ranks")), "the field `ranks` is missing"),
        (spoil(lambda value: value.update(gpu="x")), "there is no field `gpu`"),
        (spoil(lambda value: value.update(format=2)), "format: expected 1, the format of this version"),
        (spoil(lambda value: value.update(ranks=True)), "ranks: expected a whole number from 1, got true"),
        (spoil(lambda value: value["collectives"].update(reduce=[])), "collectives.reduce: no such collective"),
        (spoil(lambda value: value["collectives"].update(all_reduce=[])), "expected a list that is not empty"),
        (spoil(lambda value: row(value).update(us=-1)), "all_reduce\\[0\\].us: expected a time"),
        (spoil(lambda value: row(value).update(max_bytes=None)), "null in the last row, and only there"),
        (spoil(lambda value: value["collectives"]["all_reduce"].insert(0, row(value))), "rows grow"),
        (spoil(lambda value: row(value)["tune"].update(lanes=[])), "tune.lanes: expected a whole number"),
        (spoil(lambda value: row(value)["next"].pop("us")), "next: the field `us` is missing"),
    ],
)
def test_refused(tmp_path: Path, text: str, message: str) -> None:
    """What is no table is refused with the file and the place in it."""
    path = tmp_path / "wrong.json"
    path.write_text(text)

    with pytest.raises(TableError, match=f"C959.*wrong.json: .*{message}"):
        selection.read_table(path)


def test_no_file(tmp_path: Path) -> None:
    """A file that is not there is named."""
    with pytest.raises(TableError, match=r"none\.json: cannot be read: No such file"):
        selection.read_table(tmp_path / "none.json")


def test_shipped() -> None:
    """Every shipped table can be read, is written as `tune` writes it, and names schedules that are shipped."""
    shipped = {path.stem for path in data_dir("schedules").rglob("*.comm")}
    for path in selection.SHIPPED.glob("*.json"):
        table = selection.read_table(path)
        assert selection.table_text(table) == path.read_text()
        assert {row.candidate.schedule for _, rows in table.rows for row in rows} <= shipped


def test_own_tables_come_first(path: Path) -> None:
    """The files of COMMDSL_TABLES are looked at before the shipped ones."""
    config = from_environment({"COMMDSL_TABLES": str(path)})

    assert selection.known_tables(config.tables)[0].path == path
    assert from_environment({}).tables == ()
