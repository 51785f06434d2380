"""Turns kernels that were built ahead of time into the file to load, where one is there and is what it was.

Assumes keys that stand for all that a kernel is built from but the compiler. Does not build: `nvrtc` does.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Built:
    """A cubin in a file, by the key of what it was built from, and the digest it had then."""

    key: str
    path: Path
    digest: str


def find(kernels: tuple[Built, ...], key: str) -> Path | None:
    """The file of that key; None, and a line in the log, where it is not what was built."""
    for one in kernels:
        if one.key == key:
            try:
                if hashlib.sha256(one.path.read_bytes()).hexdigest() == one.digest:
                    return one.path
                reason = "it is not what was built"
            except OSError as error:
                reason = str(error.strerror)
            logging.getLogger("commdsl").warning("%s is not used (%s): the kernel is built anew", one.path, reason)
    return None
