"""Turns a `.comm` file into its text: UTF-8, without the mark that some editors put in front, lines ended by `\\n`.

Assumes the file is there; OSError says what is wrong with it otherwise. Does not parse.
"""

from __future__ import annotations

from pathlib import Path

from commdsl.language.diagnostics import CommError, Diagnostic, Label
from commdsl.language.source import Source, Span


def text_of(path: Path, used: Span | None = None) -> str:
    """The text of a file. Raises CommError where it is not UTF-8, at the `use` that names it if there is one."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        label = Label(used or Span(Source(str(path), ""), 0, 0), f"byte {data[error.start]:#04x} in line {line}")
        help = "save it as UTF-8, or name a .comm file"
        raise CommError((Diagnostic("C015", f"`{path.name}` is not UTF-8 text", label, help=help),)) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
