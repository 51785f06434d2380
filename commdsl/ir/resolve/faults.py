"""Turns mistakes met while a file is being understood into one list of diagnostics, one a mistake.

Assumes callers give up the value that a mistake spoils: `fail` raises `Poisoned`, and whoever holds the dependant
lets it go in silence. Does not decide what is wrong and does not render.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from typing import NoReturn

from commdsl.language.diagnostics import CommError, Diagnostic, Label, Severity
from commdsl.language.source import Span


class Poisoned(Exception):  # noqa: N818 - nothing is wrong with commdsl; a value is gone
    """A value is missing because of a mistake that has been reported already."""


class Spent(Exception):  # noqa: N818 - nothing is wrong with commdsl; the rest of a file is not looked at
    """The budget is at an end, which has been reported."""


class Faults:
    """Collects diagnostics; the same code at the same place is kept once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, int, int], Diagnostic] = {}
        self._called: list[Label] = []
        self.reports = 0  # also those of a place that has one already

    def report(
        self,
        code: str,
        headline: str,
        span: Span,
        label: str = "",
        *,
        help: str = "",
        notes: tuple[str, ...] = (),
        secondary: tuple[Label, ...] = (),
        severity: Severity = Severity.ERROR,
    ) -> None:
        self.add(Diagnostic(code, headline, Label(span, label), secondary, notes, help, severity))

    @contextmanager
    def called(self, span: Span) -> Iterator[None]:
        """What is reported in here is shown with the place of the call."""
        self._called.append(Label(span, "called here"))
        try:
            yield
        finally:
            self._called.pop()

    def add(self, diagnostic: Diagnostic) -> None:
        span = diagnostic.primary.span
        self.reports += 1
        calls = [label for label in self._called if not span.is_in(label.span)]
        diagnostic = replace(diagnostic, secondary=(*diagnostic.secondary, *calls))
        self._found.setdefault((diagnostic.code, span.source.name, span.start, span.end), diagnostic)

    def fail(
        self, code: str, headline: str, span: Span, label: str = "", *, help: str = "", notes: tuple[str, ...] = ()
    ) -> NoReturn:
        self.report(code, headline, span, label, help=help, notes=notes)
        raise Poisoned

    @property
    def found(self) -> tuple[Diagnostic, ...]:
        """In the order of the text, not of discovery."""
        return tuple(
            diagnostic for _, diagnostic in sorted(self._found.items(), key=lambda item: item[0][1:] + item[0][:1])
        )

    def drop_warnings(self) -> None:
        self._found = {key: found for key, found in self._found.items() if found.severity is Severity.ERROR}

    def raise_if_any(self) -> None:
        if self._found:
            raise CommError(self.found)


def nearest(name: str, names: Iterable[str]) -> str:
    """A help text with the most similar of `names`, or the names themselves when there are few, or nothing."""
    known = sorted(set(names))
    close = get_close_matches(name, known, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    return "there is " + ", ".join(f"`{item}`" for item in known) if 0 < len(known) <= 8 else ""
