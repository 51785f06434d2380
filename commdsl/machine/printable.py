"""Turns text from outside (file names, lines of a source) into text that a terminal shows and does not obey.

Assumes nothing of the text; names that are not UTF-8 come as Python decodes them, with surrogates. Does not shorten.
"""

from __future__ import annotations

SURROGATE, BYTE = 0xDC00, range(0xDC80, 0xDD00)
"""`os.fsdecode` turns a byte that is not UTF-8 into SURROGATE plus the byte: one of BYTE."""


def printable(text: str, *, lines: bool = True) -> str:
    """Return the text with control, formatting and surrogate characters escaped as Python writes them.

    Newlines and tabs stay, unless `lines` is False: of a name, which is one line.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or (lines and char in "\n\t") else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    if ord(char) in BYTE:
        return f"\\x{ord(char) - SURROGATE:02x}"
    return char.encode("unicode_escape").decode("ascii")
