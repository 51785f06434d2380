"""Turns what a check found into a diagnostic, and a diagnostic into text, one line or JSON.

Assumes a code from `codes.py`. Does not decide what is wrong; checks do. Control characters of a name or a source line
are escaped in text for people; JSON has them as they are, escaped as JSON does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import TypedDict

from commdsl.language.records import dataclass
from commdsl.language.source import Source, Span
from commdsl.machine.errors import Error
from commdsl.machine.printable import printable


class Severity(Enum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Label:
    """A place in a source and a short remark about it."""

    span: Span
    text: str = ""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One mistake: a stable code, a headline, where it is, what would mend it."""

    code: str
    headline: str
    primary: Label
    secondary: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()
    help: str = ""
    severity: Severity = Severity.ERROR


def too_much(span: Span, label: str, help: str, notes: tuple[str, ...] = ()) -> Diagnostic:
    """C511: what a text, a function, a schedule or its order takes, each found where it is counted."""
    return Diagnostic("C511", "more than is proved at once", Label(span, label), notes=notes, help=help)


class CommError(Error):
    """The user's `.comm` text, parameters or machine are at fault; picklable, so that ranks can pass it on."""

    def __init__(self, diagnostics: tuple[Diagnostic, ...]) -> None:
        super().__init__(diagnostics)
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        """A line for each, with what its place and its help say; `render_full` shows the text as well."""
        return "\n".join(_in_one_line(diagnostic) for diagnostic in self.diagnostics)


class InternalError(Exception):
    """commdsl is at fault: a stage handed the next one something that breaks its contract."""


# --- one line, and JSON -----------------------------------------------------------------------------------------------


class LabelJson(TypedDict):
    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    label: str


class DiagnosticJson(TypedDict):
    code: str
    severity: str
    headline: str
    primary: LabelJson
    secondary: list[LabelJson]
    notes: list[str]
    help: str


def render_concise(diagnostic: Diagnostic) -> str:
    """`path:line:column: error[C203]: headline`."""
    span = diagnostic.primary.span
    line, column = span.position
    name, headline = (printable(text, lines=False) for text in (span.source.name, diagnostic.headline))
    return f"{name}:{line}:{column}: {diagnostic.severity.value}[{diagnostic.code}]: {headline}"


def _in_one_line(diagnostic: Diagnostic) -> str:
    texts = (printable(text.replace("\n", " ")) for text in (diagnostic.primary.text, diagnostic.help))
    rest = "; ".join(filter(None, texts))
    return render_concise(diagnostic) + (f": {rest}" if rest else "")


def to_json(diagnostic: Diagnostic) -> DiagnosticJson:
    """The same fields for programs; lines and columns from 1, the end exclusive."""
    return {
        "code": diagnostic.code,
        "severity": diagnostic.severity.value,
        "headline": diagnostic.headline,
        "primary": _label_json(diagnostic.primary),
        "secondary": [_label_json(label) for label in diagnostic.secondary],
        "notes": list(diagnostic.notes),
        "help": diagnostic.help,
    }


def _label_json(label: Label) -> LabelJson:
    line, column = label.span.position
    end_line, end_column = label.span.source.position(label.span.end)
    return {
        "file": label.span.source.name,
        "line": line,
        "column": column,
        "end_line": end_line,
        "end_column": end_column,
        "label": label.text,
    }


# --- for people -------------------------------------------------------------------------------------------------------

_RESET = "\x1b[0m"
_BOLD = "\x1b[1m"
_BLUE = "\x1b[1;34m"
_SEVERITY_COLOR = {Severity.ERROR: "\x1b[1;31m", Severity.WARNING: "\x1b[1;33m"}


def render_full(diagnostic: Diagnostic, color: bool = False) -> str:
    """Headline, the lines at fault with their labels, notes and help; no newline at the end."""
    strong = _SEVERITY_COLOR[diagnostic.severity]
    places = [(diagnostic.primary, True), *((label, False) for label in diagnostic.secondary)]
    width = max(len(str(label.span.position[0])) for label, _ in places)
    bar = f"{' ' * (width + 1)}|"

    name = f"{diagnostic.severity.value}[{diagnostic.code}]"
    lines = [_paint(name, strong, color) + _paint(f": {printable(diagnostic.headline, lines=False)}", _BOLD, color)]
    sources = list(dict.fromkeys(label.span.source.name for label, _ in places))
    for source in sources:
        here = [(label, primary) for label, primary in places if label.span.source.name == source]
        line, column = here[0][0].span.position
        arrow = "-->" if source == sources[0] else ":::"
        name = printable(source, lines=False)
        lines.append(f"{_paint(' ' * width + arrow, _BLUE, color)} {name}:{line}:{column}")
        lines.append(_paint(bar, _BLUE, color))
        lines.extend(_excerpt(here, width, strong, color))
    remarks = [("note", text) for text in diagnostic.notes] + [("help", text) for text in (diagnostic.help,) if text]
    if remarks:
        lines.append(_paint(bar, _BLUE, color))
    for kind, text in remarks:
        head = f"{' ' * (width + 1)}{_paint('=', _BLUE, color)} {_paint(kind, _BOLD, color)}: "
        indent = "\n" + " " * (width + 1 + len(f"= {kind}: "))
        lines.append(head + printable(text).replace("\n", indent))
    return "\n".join(lines)


def _excerpt(places: Iterable[tuple[Label, bool]], width: int, strong: str, color: bool) -> Iterator[str]:
    """The lines of one source that carry labels, in order, each followed by its marks."""
    last = 0
    for label, primary in sorted(places, key=lambda place: (place[0].span.start, not place[1])):
        number, column = label.span.position
        line = _line(label.span.source, number)
        if number != last:
            if last and number > last + 1:
                yield _paint("...", _BLUE, color)
            yield f"{_paint(f'{number:>{width}} |', _BLUE, color)} {printable(line)}".rstrip()
            last = number
        before, marked = line[: column - 1].ljust(column - 1), line[column - 1 :][: label.span.end - label.span.start]
        marks = ("^" if primary else "-") * max(1, len(printable(marked)))
        remark = _paint(f"{marks} {printable(label.text)}".rstrip(), strong if primary else _BLUE, color)
        yield f"{_paint(' ' * (width + 1) + '|', _BLUE, color)} {' ' * len(printable(before))}{remark}"


def _line(source: Source, number: int) -> str:
    """One character a column, so that marks stand under what they mean; a span over several lines marks its first."""
    return source.line(number).replace("\t", " ").rstrip()


def _paint(text: str, escape: str, color: bool) -> str:
    return f"{escape}{text}{_RESET}" if color else text
