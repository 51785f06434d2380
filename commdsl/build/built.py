"""Turns kernels that were built ahead of time into the cubin to load, where one is there and is what it was.

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


def find(kernels: tuple[Built, ...], key: str) -> bytes | None:
    """Return the cubin of that key; None, and a line in the log, where it is not what was built.

    Others may write the folder it lies in, so the bytes that were verified are returned, not the name of the file.
    """
    for one in kernels:
        if one.key == key:
            try:
                content = one.path.read_bytes()
                if hashlib.sha256(content).hexdigest() == one.digest:
                    return content
                reason = "it is not what was built"
            except OSError as error:
                reason = str(error.strerror)
            logging.getLogger("commdsl").warning("%s is not used (%s): the kernel is built anew", one.path, reason)
    return None
