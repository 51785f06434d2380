"""Turns a `.comm` file into its text: UTF-8, without the mark that some editors put in front, lines ended by `\\n`.

Assumes the file is there; OSError says what is wrong with it otherwise. Does not parse.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from commdsl.language.diagnostics import CommError, Diagnostic, Label, too_much
from commdsl.language.source import Source, Span

MOST_BYTES = 4_000_000
"""Of a text: some ten seconds to parse, the first time."""


def text_of(path: Path, used: Span | None = None) -> str:
    """The text of a file. Raises CommError where it is too long or not UTF-8, at the `use` that names it, if any."""
    with path.open("rb") as file:
        return text_in(file, path.name, used or Span(Source(str(path), ""), 0, 0))


def text_in(file: BinaryIO, name: str, whole: Span) -> str:
    """As `text_of`, of a file that is open; what is wrong with it is said of `name`, at `whole`."""
    data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        help = (
            "write loops in place of what they repeat; a plan that a program makes is `commdsl.dispatch.plan(lengths)`"
        )
        raise CommError((too_much(whole, f"`{name}` has more than {MOST_BYTES:,} bytes", help),))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        label = Label(whole, f"byte {data[error.start]:#04x} in line {line}")
        help = "save it as UTF-8, or name a .comm file"
        raise CommError((Diagnostic("C015", f"`{name}` is not UTF-8 text", label, help=help),)) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


STANDARD_INPUT = "standard input"


def standard_input() -> Source:
    """What comes over standard input, as `text_of` a file."""
    return Source(STANDARD_INPUT, text_in(sys.stdin.buffer, STANDARD_INPUT, Span(Source(STANDARD_INPUT, ""), 0, 0)))
