"""Turns a schedule whose products travel beside what they need, and a shape, into its timeline on paper: when each
product and each launch begins and ends by the model that chooses among schedules (`overlap.auto`).

Assumes what `show` assumes. Does not run or time anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from commdsl.attention.machines import machine_on
from commdsl.commands import output
from commdsl.commands.arguments import Target, UsageError, product_shape
from commdsl.commands.choice import device_of
from commdsl.commands.jobs import jobs_of, merge, prove_all, read, some, topology_of
from commdsl.commands.output import Exit
from commdsl.commands.show import fail
from commdsl.cost.bars import Bar, drawn
from commdsl.language.diagnostics import CommError
from commdsl.machine import devices
from commdsl.machine.errors import ArgumentError
from commdsl.overlap import auto
from commdsl.overlap.auto import Event, Product


def timeline(path: Path, target: Target, name: str | None, shape: str, device: str | None, *, as_json: bool) -> Exit:
    """Prints a picture and a line an event, for every number of ranks. `shape`: rows of all ranks, depth, columns."""
    pieces, where = dict(target.params).get("C", 1), devices.named(device_of(device, target.on))
    try:
        files = read(path)
        jobs = jobs_of(path, files, target, name)
    except CommError as error:
        return fail(error.diagnostics, as_json=as_json)
    some(jobs, "show")
    operators = {one.schedule: operator for operator, one in auto.OPERATORS.items()}
    if unknown := [job.name for job in jobs if job.name not in operators]:
        raise UsageError(f"a timeline is of {', '.join(operators)}, not of {unknown[0]}")
    outcomes = tuple(prove_all(jobs, target, emit=False))
    if failed := [outcome for outcome in outcomes if outcome.checked is None]:
        return fail(merge(failed), as_json=as_json)
    pages = []
    for job in jobs:
        product = Product(operators[job.name], *product_shape(shape), job.ranks)
        if product.rows % job.ranks or not product.admits(pieces):
            raise UsageError(f"{product.rows} rows cannot be cut into {pieces} of each of {job.ranks} ranks")
        topology = None if target.on is None else topology_of(files, target.on, job.ranks)
        machine = auto.machine_of(product, where, None) if topology is None else machine_on(topology)
        try:
            events = tuple(auto.timeline(product, machine, pieces))
        except ArgumentError as error:
            raise UsageError(str(error)) from error
        on = f"{target.on or where} ({machine.kind.source})"
        head = f"{job.name} C={pieces} for {job.ranks} ranks, {shape} of 16 bits on {on}: {_sums(events)}"
        pages.append((head, events))
    if as_json:
        output.say_json([{"what": head, "events": [_json(event) for event in events]} for head, events in pages])
    else:
        output.say("\n".join("\n".join((head, *drawn(_bars(events)), *map(_line, events))) for head, events in pages))
    return Exit.FINE


def _bars(events: Sequence[Event]) -> list[list[Bar]]:
    return [[Bar(one.begin, one.end) for one in events if one.is_product is kind] for kind in (True, False)]


def _sums(events: Sequence[Event]) -> str:
    whole = max(event.end for event in events)
    products, travels = (sum(one.end - one.begin for one in events if one.is_product is kind) for kind in (True, False))
    parts = {"products": products, "travels": travels, "exposed": whole - products}
    return f"{_us(whole)} us by the model; {', '.join(f'{name} {_us(time)}' for name, time in parts.items())}"


def _line(event: Event) -> str:
    if event.is_product:
        rows, factor, *sums = event.reads
        what = " + ".join((f"product {rows} x {factor}", *sums))
    else:
        what = f"travels {', '.join(event.reads)}"
    return f"  {_us(event.begin):>10} to {_us(event.end):>10} us  {what} -> {', '.join(event.writes)}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _json(event: Event) -> dict[str, object]:
    kind = "product" if event.is_product else "launch"
    ends = {"begin_us": event.begin * 1e6, "end_us": event.end * 1e6}
    return {"kind": kind, "reads": event.reads, "writes": event.writes, **ends}
