"""Turns what a check found into a diagnostic, and a diagnostic into text, one line or JSON.

Assumes a code from `codes.py`. Does not decide what is wrong; checks do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from commdsl.source import Span


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


class CommError(Exception):
    """The user's `.comm` text, parameters or machine are at fault; picklable, so that ranks can pass it on."""

    def __init__(self, diagnostics: tuple[Diagnostic, ...]) -> None:
        super().__init__(diagnostics)
        self.diagnostics = diagnostics


class InternalError(Exception):
    """commdsl is at fault: a stage handed the next one something that breaks its contract."""
