"""Turns a collective, a size, a number of ranks and a device into the schedule to run, its tuning, and why that one.
Tables have rows of products beside what travels, too (`PRODUCTS`); `overlap.auto` chooses these.

Assumes tables that `commdsl tune` wrote, and that all ranks have the same ones: nothing else goes into a choice, so
ranks agree by construction. Does not load schedules and needs no torch. Where no table speaks, a stated default does.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from commdsl.machine import devices
from commdsl.machine.errors import ArgumentError, CodedError
from commdsl.machine.resources import SUFFIX, split_place

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

ROOTED = ("broadcast",)
"""Their schedules take a parameter `root`; a table is measured with root 0 and serves every root."""

PRODUCTS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "all_to_all_matmul",
)
"""Each of its depth and columns is a name of its own in a table: `all_gather_matmul 8192x3584`."""

SEQUENCE = "sequence"
"""In place of a schedule: the collective that a table chooses, and a product of torch's, one after the other."""

FORMAT = 1
SHIPPED = Path(__file__).parent / "tables"

Params: TypeAlias = tuple[tuple[str, int], ...]
Tune: TypeAlias = tuple[tuple[str, int | str], ...]


class TableError(CodedError, ValueError):
    """A table that cannot be read, with the place in it."""

    code = "C959"

    def __init__(self, path: Path, where: str, message: str) -> None:
        super().__init__(f"{path}: {where + ': ' if where else ''}{message}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a collective: a schedule, its parameters, and what stands in place of its tuning.

    `schedule`: the name of a shipped one, or `FILE.comm:NAME`, which in the file of a table is beside that file.
    """

    schedule: str
    params: Params = ()
    tune: Tune = ()

    def __str__(self) -> str:
        return " ".join((self.schedule, *(f"{key}={value}" for key, value in (*self.params, *self.tune))))


@dataclass(frozen=True, slots=True)
class Measured:
    """Why a row says what it says: median times, the slowest rank's, at one size."""

    nbytes: int
    us: float
    candidates: int  # how many were measured at this size
    second: Candidate | None  # the runner-up
    second_us: float


@dataclass(frozen=True, slots=True)
class Row:
    """What to run up to a size; None: for all that is larger."""

    max_bytes: int | None
    candidate: Candidate
    measured: Measured | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """What was measured on one kind of device with one number of ranks."""

    device: str
    ranks: int
    about: tuple[tuple[str, str], ...]  # with what it was measured
    rows: tuple[tuple[str, tuple[Row, ...]], ...]  # by collective
    path: Path | None = None

    def of(self, collective: str) -> tuple[Row, ...] | None:
        return dict(self.rows).get(collective)


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows for one collective, and where they come from."""

    rows: tuple[Row, ...]
    source: str
    bounds: tuple[int, ...]

    def index(self, nbytes: int) -> int:
        return bisect_left(self.bounds, nbytes)


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs for one call. `nbytes` is the larger side on one rank."""

    collective: str
    nbytes: int
    ranks: int
    device: str
    schedule: str
    params: Params
    tune: Tune
    reason: str

    def __str__(self) -> str:
        return f"{Candidate(self.schedule, self.params, self.tune)}: {self.reason}"


# --- choosing ---------------------------------------------------------------------------------------------------------


def choose(tables: Sequence[Table], collective: str, nbytes: int, ranks: int, device: str, *, plain: bool) -> Choice:
    """Return the row for a size. `plain`: only `bulk` is available (see `default_rows`). Raises ArgumentError."""
    device = devices.named(device)
    return chosen(rows_for(tables, collective, ranks, device, plain=plain), collective, nbytes, ranks, device)


def chosen(found: Rows, name: str, nbytes: int, ranks: int, device: str) -> Choice:
    """The row for a size among all of that name."""
    row = found.rows[found.index(nbytes)]
    candidate, reason = row.candidate, _reason(found.source, row)
    return Choice(name, nbytes, ranks, device, candidate.schedule, candidate.params, candidate.tune, reason)


def rows_for(tables: Sequence[Table], collective: str, ranks: int, device: str, *, plain: bool) -> Rows:
    """The rows of the first table for this device and number of ranks, else the stated default."""
    if collective not in COLLECTIVES:
        raise ArgumentError(f"expected one of {', '.join(COLLECTIVES)}, got `{collective}`")
    found = None if plain else measured(tables, collective, ranks, device)
    if found is not None:
        return found
    where = "over NVSHMEM" if plain and device != devices.CPU else f"on {device} x{ranks}"
    default = default_rows(collective, plain=plain, host=device == devices.CPU)
    doubt = f"{devices.doubt(device)}; ".removeprefix("; ")
    return _rows(default, f"{doubt}no table for {collective} {where}: the stated default")


def measured(tables: Sequence[Table], name: str, ranks: int, device: str) -> Rows | None:
    """Return the rows of the first table for this device and number of ranks that has the name, None without one."""
    for table in tables:
        rows = table.of(name)
        if table.ranks == ranks and rows is not None and devices.same(table.device, device):
            return _rows(rows, _name(table.path))
    return None


def is_known(name: str) -> bool:
    """Whether a table may have rows of that name."""
    operator, _, shape = name.partition(" ")
    return name in COLLECTIVES or (operator in PRODUCTS and re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape) is not None)


def _rows(rows: tuple[Row, ...], source: str) -> Rows:
    return Rows(rows, source, tuple(row.max_bytes for row in rows if row.max_bytes is not None))


def _reason(source: str, row: Row) -> str:
    measured = row.measured
    if measured is None:
        return source + (f" up to {size_text(row.max_bytes)}" if row.max_bytes is not None else " for all larger sizes")
    first = f"{source}: fastest of {measured.candidates} at {size_text(measured.nbytes)}, {measured.us:.2f} us"
    return first if measured.second is None else f"{first}; next {measured.second} {measured.second_us:.2f} us"


def _name(path: Path | None) -> str:
    if path is None:
        return "a table in memory"
    return f"commdsl/planner/tuning/tables/{path.name}" if path.parent == SHIPPED else str(path)


def size_text(nbytes: int) -> str:
    """`64 KB`; exact where that is short."""
    for unit, scale in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"


# --- the default ------------------------------------------------------------------------------------------------------

SMALL, MIDDLE, LARGE = 32 << 10, 1 << 20, 16 << 20

TILES = {SMALL: 4 << 10, MIDDLE: 32 << 10, LARGE: 32 << 10}
"""Of `bulk` up to a size: what 128 lanes own of a chunk there is no more, or little. Each is symmetric memory."""

HOST_TILE = 16 << 10
"""On the processor, where larger ones are no faster: so eight ranks and all collectives fit 64 MB."""


def default_rows(collective: str, *, plain: bool, host: bool = False) -> tuple[Row, ...]:
    """Where nothing was measured: least latency for small tensors, least traffic for large ones, for any rank count.

    `plain`: with the one protocol that runs everywhere, for NVSHMEM's transport (which has its own way to signal).
    `host`: for the processor (where a protocol changes no speed), with little memory.
    """
    match collective:
        case "all_reduce":
            steps = [
                (SMALL, "allreduce_oneshot", "packet"),
                (MIDDLE, "allreduce_twoshot", "line"),
                (LARGE, "allreduce_twoshot", "bulk"),
                (None, "allreduce_ring", "bulk"),
            ]
        case "broadcast":
            steps = [
                (SMALL, "broadcast_direct", "packet"),
                (LARGE, "broadcast_scatter", "line"),
                (None, "broadcast_chain", "bulk"),
            ]
        case _:
            direct = f"{collective.replace('_', '')}_direct"
            steps = [(SMALL, direct, "packet"), (MIDDLE, direct, "line"), (None, direct, "bulk")]
    found: list[Row] = []
    for most, schedule, protocol in steps:
        tune: Tune = (("protocol", "bulk" if plain or host else protocol),)
        tile = HOST_TILE if host else None if most is None or tune[0][1] != "bulk" else TILES[most]
        found.append(Row(most, Candidate(schedule, (), tune if tile is None else (*tune, ("tile", tile)))))
    return tuple(found)


# --- tables as files --------------------------------------------------------------------------------------------------


@cache
def known_tables(own: tuple[Path, ...]) -> tuple[Table, ...]:
    """The tables at these paths, then the shipped ones; read once a process."""
    return tuple(read_table(path) for path in (*own, *sorted(SHIPPED.glob("*.json"))))


def read_table(path: Path) -> Table:
    """Raises TableError where the file is none or says something that a table does not."""
    try:
        return _table(json.loads(path.read_text(encoding="utf-8")), path)
    except OSError as error:
        raise TableError(path, "", f"cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TableError(path, "", f"is not JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class _At:
    """A place in a file, for messages, and the value there."""

    path: Path
    where: str
    value: Any

    def wrong(self, expected: str) -> TableError:
        return TableError(self.path, self.where, f"expected {expected}, got {json.dumps(self.value)[:60]}")

    def fields(self, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, _At]:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        for name in sorted(self.value.keys() - {*required, *optional}):
            raise TableError(self.path, self.where, f"there is no field `{name}`")
        for name in required:
            if name not in self.value:
                raise TableError(self.path, self.where, f"the field `{name}` is missing")
        return self.items()

    def items(self) -> dict[str, _At]:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        prefix = f"{self.where}." if self.where else ""
        return {name: _At(self.path, f"{prefix}{name}", value) for name, value in self.value.items()}

    def each(self) -> list[_At]:
        if not isinstance(self.value, list) or not self.value:
            raise self.wrong("a list that is not empty")
        return [_At(self.path, f"{self.where}[{index}]", value) for index, value in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise self.wrong("a text")
        return self.value

    def whole(self, least: int) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < least:
            raise self.wrong(f"a whole number from {least}")
        return self.value

    def time(self) -> float:
        if not isinstance(self.value, int | float) or isinstance(self.value, bool) or not 0 < self.value < 1e12:
            raise self.wrong("a time in microseconds")
        return float(self.value)


def _table(value: Any, path: Path) -> Table:
    fields = _At(path, "", value).fields(("format", "device", "ranks", "measured_with", "collectives"))
    if fields["format"].whole(1) != FORMAT:
        raise fields["format"].wrong(f"{FORMAT}, the format of this version: measure again with `commdsl tune`")
    about = tuple((name, at.text()) for name, at in sorted(fields["measured_with"].items().items()))
    rows = []
    for name, at in sorted(fields["collectives"].items().items()):
        if not is_known(name):
            known = f"{', '.join(COLLECTIVES)}, and {', '.join(PRODUCTS)} with a shape as in `{PRODUCTS[0]} 8192x3584`"
            raise TableError(path, at.where, f"no such collective; there are {known}")
        rows.append((name, _checked_rows(at)))
    return Table(fields["device"].text(), fields["ranks"].whole(1), about, tuple(rows), path)


def _checked_rows(at: _At) -> tuple[Row, ...]:
    places = at.each()
    rows = tuple(_row(place) for place in places)
    for index, (place, row) in enumerate(zip(places, rows, strict=True)):
        is_last = index == len(rows) - 1
        if (row.max_bytes is None) != is_last:
            raise TableError(place.path, f"{place.where}.max_bytes", "null in the last row, and only there")
        before = rows[index - 1].max_bytes if index else 0
        if row.max_bytes is not None and before is not None and row.max_bytes <= before:
            raise TableError(place.path, f"{place.where}.max_bytes", f"rows grow: this is not above {before}")
    return rows


def _row(at: _At) -> Row:
    fields = at.fields(("max_bytes", "schedule", "params", "tune", "bytes", "us", "candidates"), ("next",))
    most = fields["max_bytes"]
    second, second_us = None, 0.0
    if "next" in fields:
        following = fields["next"].fields(("schedule", "params", "tune", "us"))
        second, second_us = _candidate(following), following["us"].time()
    measured = Measured(fields["bytes"].whole(1), fields["us"].time(), fields["candidates"].whole(1), second, second_us)
    return Row(None if most.value is None else most.whole(1), _candidate(fields), measured)


def _candidate(fields: Mapping[str, _At]) -> Candidate:
    params = tuple((name, at.whole(0)) for name, at in sorted(fields["params"].items().items()))
    tune: list[tuple[str, int | str]] = [
        (name, at.text() if isinstance(at.value, str) else at.whole(1))
        for name, at in sorted(fields["tune"].items().items())
    ]
    return Candidate(_from_table(fields["schedule"].text(), fields["schedule"].path), params, tuple(tune))


def _from_table(schedule: str, table: Path) -> str:
    file, _ = split_place(schedule)
    return os.path.normpath(table.parent / schedule) if file.endswith(SUFFIX) else schedule


def _to_table(schedule: str, table: Path | None) -> str:
    file, _ = split_place(schedule)
    if table is None or not file.endswith(SUFFIX):
        return schedule
    return Path(os.path.relpath(schedule, table.parent)).as_posix()


def table_text(table: Table) -> str:
    """The file of a table: the same table gives the same bytes."""
    collectives = {name: [_row_json(row, table.path) for row in rows] for name, rows in table.rows}
    head = {"format": FORMAT, "device": table.device, "ranks": table.ranks, "measured_with": dict(table.about)}
    return json.dumps({**head, "collectives": collectives}, indent=1, sort_keys=True) + "\n"


def _row_json(row: Row, table: Path | None) -> dict[str, object]:
    measured = row.measured
    assert measured is not None, "a default is no measurement"
    made = {"max_bytes": row.max_bytes, **_candidate_json(row.candidate, table)}
    made |= {"bytes": measured.nbytes, "us": round(measured.us, 3), "candidates": measured.candidates}
    if measured.second is not None:
        made["next"] = {**_candidate_json(measured.second, table), "us": round(measured.second_us, 3)}
    return made


def _candidate_json(candidate: Candidate, table: Path | None) -> dict[str, object]:
    return {
        "schedule": _to_table(candidate.schedule, table),
        "params": dict(candidate.params),
        "tune": dict(candidate.tune),
    }
