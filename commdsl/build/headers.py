"""Turns the headers that kernels include into one digest, part of every text and of every key of what is built.

Assumes that a file that is written to anew has another time or size. Does not know what is in them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from commdsl.machine.resources import data_dir
from commdsl.machine.shortage import explained

_File: TypeAlias = tuple[str, int, int]
"""A path below a folder, when it was last written to in nanoseconds, its bytes."""


def include_dir() -> Path:
    """The folder that both compilers search for `commdsl/...`."""
    return data_dir("templates") / "include"


@explained("read the headers of kernels")
def headers_digest() -> str:
    """One SHA-256 over the names and contents of all headers."""
    return _digest(str(include_dir()), tuple(sorted(_files(str(include_dir())))))


def _files(folder: str, below: str = "") -> Iterator[_File]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = f"{below}{entry.name}"
            if entry.is_dir():
                yield from _files(entry.path, f"{name}/")
            else:
                found = entry.stat()
                yield name, found.st_mtime_ns, found.st_size


@lru_cache(maxsize=4)
def _digest(root: str, files: tuple[_File, ...]) -> str:
    """Read once: every text and every look into the cache asks for it."""
    digest = hashlib.sha256()
    for name, _, _ in files:
        content = Path(root, name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
