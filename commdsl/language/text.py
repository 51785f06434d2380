"""Turns a `.comm` file into its text: UTF-8, without the mark that some editors put in front, lines ended by `\\n`.

Assumes the file is there; OSError says what is wrong with it otherwise. Does not parse.
"""

from __future__ import annotations

from pathlib import Path

from commdsl.language.diagnostics import CommError, Diagnostic, Label
from commdsl.language.source import Source, Span

MOST_BYTES = 4_000_000
"""Of a text: half a minute to parse, the first time."""


def text_of(path: Path, used: Span | None = None) -> str:
    """The text of a file. Raises CommError where it is too long or not UTF-8, at the `use` that names it, if any."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    whole = used or Span(Source(str(path), ""), 0, 0)
    if len(data) > MOST_BYTES:
        help = (
            "write loops in place of what they repeat; a plan that a program makes is `commdsl.dispatch.plan(lengths)`"
        )
        label = Label(whole, f"`{path.name}` has more than {MOST_BYTES:,} bytes")
        raise CommError((Diagnostic("C511", "more than is proved at once", label, help=help),))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        label = Label(whole, f"byte {data[error.start]:#04x} in line {line}")
        help = "save it as UTF-8, or name a .comm file"
        raise CommError((Diagnostic("C015", f"`{path.name}` is not UTF-8 text", label, help=help),)) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
