"""Turns a collective and a size into what `commdsl.all_reduce` and its friends would run, and why; attention and
products beside what travels, too.

Assumes the tables that this process sees; every rank of a program sees them alike. Does not load or run it.
"""

from __future__ import annotations

import re

from commdsl import compiler
from commdsl.attention import auto
from commdsl.commands import output
from commdsl.commands.arguments import UsageError, parse_on, product_shape
from commdsl.commands.doctor import query_nvidia
from commdsl.commands.jobs import topology_of
from commdsl.commands.output import Exit
from commdsl.machine import devices
from commdsl.machine.config import from_environment
from commdsl.machine.errors import ArgumentError
from commdsl.overlap import auto as products
from commdsl.planner.tuning import selection


def choice(collective: str, nbytes: int, ranks: int, device: str | None, *, as_json: bool) -> Exit:
    """Prints the schedule with its tuning on one line, the reason on the next."""
    config = from_environment()
    where = this_device() if device is None else device
    plain = config.has_far
    try:
        tables = selection.known_tables(config.tables)
        found = selection.choose(tables, collective, nbytes, ranks, where, plain=plain)
    except ValueError as error:
        raise UsageError(str(error)) from error
    said = {"collective": collective, "bytes": nbytes, "ranks": ranks, "device": where}
    return tell(found, said, as_json=as_json)


def product(
    operator: str, shape: str, ranks: int, device: str | None, *, is_float8: bool, on: str | None, as_json: bool
) -> Exit:
    """As `choice`, of `8192x4096x1024`: rows of all ranks, depth and columns."""
    rows, depth, columns = product_shape(shape)
    where, on = device_of(device, on), checked_on(on)
    try:
        found = products.choice(operator, rows, depth, columns, ranks=ranks, device=where, is_float8=is_float8, on=on)
    except ValueError as error:
        raise UsageError(str(error)) from error
    said = {"operator": operator, "rows": rows, "depth": depth, "columns": columns, "ranks": ranks}
    said |= {"device": found.device, "on": on, "float8": is_float8}
    return tell(found, said, as_json=as_json)


def tell(found: selection.Choice, said: dict[str, object], *, as_json: bool) -> Exit:
    """`said`: what was asked for."""
    if as_json:
        params, tune = dict(found.params), dict(found.tune)
        output.say_json({**said, "schedule": found.schedule, "params": params, "tune": tune, "reason": found.reason})
        return Exit.FINE
    output.say(str(selection.Candidate(found.schedule, found.params, found.tune)))
    output.say(found.reason)
    return Exit.FINE


def attention(
    size: str,
    ranks: int,
    device: str | None,
    *,
    heads: str | None,
    head_dim: int | None,
    causal: bool,
    window: str | None,
    placement: str | None,
    backward: bool,
    on: str | None,
    as_json: bool,
) -> Exit:
    """Prints what `schedule="auto"` runs on one line, the reason on the next, then what else was looked at."""
    where = device_of(device, on)
    (query, key), length = counts("32:8" if heads is None else heads), tokens(size)
    try:
        found = auto.choice(
            length,
            query,
            head_dim or 128,
            ranks=ranks,
            kv_heads=key,
            causal=causal,
            window=None if window is None else sides(window),
            placement="zigzag" if placement is None else placement,
            backward=backward,
            device=where,
            on=checked_on(on),
        )
    except ArgumentError as error:
        raise UsageError(str(error)) from error
    looked = [{"schedule": one.schedule, "params": dict(one.params), "seconds": one.seconds} for one in found.estimates]
    if as_json:
        tune = {"tune": dict(found.tune), "tune_backward": dict(found.tune_backward)}
        said = {"schedule": found.schedule, "params": dict(found.params), **tune, "reason": found.reason}
        output.say_json({"tokens": length, "ranks": ranks, **said, "estimates": looked})
        return Exit.FINE
    output.say(str(selection.Candidate(found.schedule, found.params, found.tune)))
    output.say(found.reason)
    for one in found.estimates[1:]:
        output.say(f"  {auto.ms(one.seconds):>9}  {one}")
    return Exit.FINE


def tokens(size: str) -> int:
    """`8192` or `8K`, which is as many."""
    match = re.fullmatch(r"(\d+)([KM]?)", size.strip().upper())
    if match is None:
        raise UsageError(f"expected a number of tokens such as 8192 or 8K, got `{size}`")
    return int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]]


def counts(heads: str) -> tuple[int, int]:
    """`32:8`, or `32` of each."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", heads)
    query, key = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if key == 0 or query % key:
        raise UsageError(f"--heads is a number, or a multiple of another and that as in 32:8, not `{heads}`")
    return query, key


def sides(window: str) -> tuple[int | None, int | None]:
    """`4095,0`; `*` is any number."""
    found = re.fullmatch(r"(\d+|\*),(\d+|\*)", window)
    if found is None:
        raise UsageError(f"--window is two numbers of tokens, before and after, as in 4095,0 or 4095,*, not `{window}`")
    left, right = (None if side == "*" else int(side) for side in found.groups())
    return left, right


def device_of(device: str | None, on: str | None) -> str:
    """Return the device of a model: the named one, or this machine's; a topology stands in place of both.

    Raises UsageError where both --device and --on are given.
    """
    if device is not None and on is not None:
        raise UsageError("--device or --on, not both: a topology's name says its GPU, as in h100_2x8")
    return device if device is not None else devices.CPU if on is not None else this_device()


def checked_on(on: str | None) -> str | None:
    """Return the name of a topology as it is. Raises UsageError where there is none of that name."""
    topology_of((), parse_on(on), compiler.DEFAULT_RANKS)
    return on


def this_device() -> str:
    """Return the name of the first GPU by the driver's own tool, else the processor."""
    names = query_nvidia("--query-gpu=name", "--format=csv,noheader")
    return names[0].strip() if names else devices.CPU
