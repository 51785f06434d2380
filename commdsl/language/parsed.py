"""Turns `.comm` text into its Syntax as `parser` does, and keeps it: the same text is not parsed twice on one machine.

Assumes that the Syntax depends on the text, its name, the grammar and the code named in `MAKERS`; a fault is not kept.
Does not import the parser, nor lark, unless there is something to parse: that would be a third of a short check.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from commdsl.language import collection
from commdsl.language.source import Source
from commdsl.language.syntax import File
from commdsl.machine.cache import kept, key
from commdsl.machine.config import from_environment
from commdsl.machine.resources import data_dir

MAKERS = (
    "records.py",
    "source.py",
    "kinds.py",
    "syntax/__init__.py",
    "syntax/contracts.py",
    "syntax/dispatches.py",
    "syntax/expressions.py",
    "syntax/machines.py",
    "syntax/references.py",
    "syntax/schedules.py",
    "parser/__init__.py",
    "parser/tables.py",
    "parser/shift_reduce.py",
    "parser/build_syntax.py",
    "parser/build_calls.py",
    "parser/build_contracts.py",
    "parser/build_dispatches.py",
    "parser/build_machines.py",
)
"""What a kept Syntax depends on besides the grammar."""


def parse(source: Source) -> File:
    """The Syntax of a text; raises CommError with the first syntax fault."""
    with collection.paused():
        return kept(from_environment().cache_dir, _key(source), File, lambda: _parse(source))


def _parse(source: Source) -> File:
    from commdsl.language import parser  # 60 ms, most of it lark

    return parser.parse(source)


def _key(source: Source) -> str:
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in (data_dir("grammar") / "comm.lark", *(folder / name for name in MAKERS)):
        digest.update(path.read_bytes() + b"\0")
    return key(["syntax", f"{sys.version_info[:2]}", digest.hexdigest(), source.name, source.text])
