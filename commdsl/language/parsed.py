"""Turns `.comm` text into its Syntax as `parser` does, and keeps it: the same text is not parsed twice on one machine.

Assumes that the Syntax depends on the text, its name, the grammar and the code named in `MAKERS`; a fault is not kept.
Does not import the parser, nor lark, unless there is something to parse: that would be a third of a short check.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
from pathlib import Path

from commdsl.language import collection
from commdsl.language.source import Source
from commdsl.language.syntax import File
from commdsl.machine.config import from_environment
from commdsl.machine.resources import data_dir

MAKERS = (
    "records.py",
    "source.py",
    "kinds.py",
    "syntax/__init__.py",
    "syntax/dispatches.py",
    "syntax/expressions.py",
    "syntax/machines.py",
    "syntax/schedules.py",
    "parser/__init__.py",
    "parser/build_syntax.py",
    "parser/build_dispatches.py",
)
"""What a kept Syntax depends on besides the grammar."""

DAMAGED = (pickle.PickleError, EOFError, KeyError, TypeError, AttributeError, ValueError, IndexError, ImportError)


def parse(source: Source) -> File:
    """The Syntax of a text; raises CommError with the first syntax fault."""
    path = from_environment().cache_dir / "syntax" / f"{_key(source)}.pickle"
    with contextlib.suppress(OSError, *DAMAGED), collection.paused():
        kept = pickle.loads(path.read_bytes())
        if isinstance(kept, File) and kept.source == source:
            return kept
    from commdsl.language import parser  # 60 ms, most of it lark

    file = parser.parse(source)
    with contextlib.suppress(OSError):  # a home that cannot be written costs time, not the run
        _keep(path, pickle.dumps(file, pickle.HIGHEST_PROTOCOL))
    return file


def _key(source: Source) -> str:
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    folder = Path(__file__).parent
    for path in (data_dir("grammar") / "comm.lark", *(folder / name for name in MAKERS)):
        digest.update(path.read_bytes() + b"\0")
    digest.update(f"{source.name}\0{source.text}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


def _keep(path: Path, data: bytes) -> None:
    """Write whole or not at all: other processes may be reading."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)
