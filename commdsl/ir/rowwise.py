"""Turns a schedule that ends in a row-wise function into its moves, and the function that lanes apply behind them.

Assumes a schedule that passed the checks. Does not move anything, and leaves a schedule without one as it is.

What is left moves alone, and leaves the rows in a buffer of its own: so it is lowered and proved as any other. A lane
then has the rows that it moved, each whole, and needs nobody else to make results of them.
"""

from __future__ import annotations

from dataclasses import replace

from commdsl.ir.functions import ROWWISE, Extent
from commdsl.ir.schedules import Schedule, Statement, Step
from commdsl.language.diagnostics import CommError, Diagnostic, Label
from commdsl.language.kinds import BufferKind
from commdsl.language.records import dataclass
from commdsl.language.source import Span
from commdsl.machine.carriers import ANOTHER

NUMBER = "float32"
"""As kernels read one, whatever the rows are."""


@dataclass(frozen=True, slots=True)
class Behind:
    """A row-wise function behind the moves, of whole buffers."""

    function: str  # a name in ROWWISE
    rows: int
    given: tuple[int, ...]
    results: tuple[int, ...]
    step: int
    span: Span


def ending(schedule: Schedule) -> tuple[Schedule, Behind | None]:
    """Raises CommError (C593) where lanes cannot apply it to what they moved."""
    if not schedule.rowwise:
        return schedule, None
    found = _behind(schedule)
    buffers = tuple(
        replace(one, kind=BufferKind.OUTPUT) if number == found.rows else one
        for number, one in enumerate(schedule.buffers)
    )
    contracts = tuple(
        replace(one, dest_buffer=found.rows) if one.dest_buffer in found.results else one for one in schedule.contracts
    )
    return replace(schedule, buffers=buffers, contracts=contracts, steps=schedule.steps[:-1]), found


def _behind(schedule: Schedule) -> Behind:
    last, statements = schedule.steps[-1], schedule.rowwise
    span = statements[0].span
    if not isinstance(last, Step) or any(one.span != last.span for one in statements):
        raise _fault(span, "it is not the last step", "write it once, behind everything that moves")
    if any(not isinstance(step, Step) for step in schedule.steps) or schedule.has_products:
        raise _fault(span, "another task, a product or a yield stands beside it", "leave one of them out")
    if not schedule.tuning.carrier.runs_on_sms:
        raise _fault(span, "no lane has the rows: the copy engine moves them", ANOTHER)
    moved = [one for step in schedule.steps[:-1] if isinstance(step, Step) for one in step.moves]
    applied = statements[0].applied
    assert applied is not None
    found = Behind(
        applied.function,
        statements[0].source_buffer,
        applied.given,
        tuple(one.dest_buffer for one in statements),
        len(schedule.steps) - 1,
        span,
    )
    _check_buffers(schedule, found, moved)
    _check_types(schedule, found)
    return found


def _check_buffers(schedule: Schedule, found: Behind, moved: list[Statement]) -> None:
    buffers = schedule.buffers
    if buffers[found.rows].kind is not BufferKind.SCRATCH:
        name = buffers[found.rows].name
        raise _fault(found.span, f"it reads `{name}`, which is no scratch buffer", f"declare `scratch {name}`")
    for number in found.given:
        if buffers[number].kind is not BufferKind.INPUT:
            name = buffers[number].name
            raise _fault(found.span, f"it reads `{name}`, which is no input", f"declare `input {name}`")
        if found.given.count(number) > 1:
            raise _fault(found.span, f"it reads `{buffers[number].name}` twice", "give it an input for each")
    for number in found.results:
        if buffers[number].kind is not BufferKind.OUTPUT or any(one.dest_buffer == number for one in moved):
            name = buffers[number].name
            raise _fault(
                found.span, f"it writes `{name}`, which is not its own output", f"declare an `output {name}` for it"
            )


def _check_types(schedule: Schedule, found: Behind) -> None:
    """A number is float32, whatever the rows are; all else is as they are. The function says how long what is."""
    extents = zip(found.given, ROWWISE[found.function].given, strict=True)
    numbers = {number for number, extent in extents if extent is Extent.NUMBER}
    for number, buffer in enumerate(schedule.buffers):
        wanted = NUMBER if number in numbers else None
        if buffer.element != wanted:
            what = f"`{buffer.name}` is {'a number' if wanted else 'as the rows are'}"
            label = f"{what}, of type {buffer.element}" if buffer.element else f"{what}, of no type"
            plain = f"{buffer.kind.value} {buffer.name}"
            raise _fault(buffer.span, label, f"declare `{plain} {wanted}`" if wanted else f"declare `{plain}`")
        if buffer.like is not None:
            label = f"`{found.function}` says how long it is"
            raise _fault(buffer.span, label, f"leave `like {buffer.like}` out")


def _fault(span: Span, label: str, help: str) -> CommError:
    what = "no kernel applies this row-wise function"
    return CommError((Diagnostic("C593", what, Label(span, label), help=help),))
