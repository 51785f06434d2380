"""Turns what a build depends on into the folder that holds its result, built once.

Assumes the builder is deterministic: whoever loses a race uses the winner's folder. Does not expire entries; the cache
may be deleted at any time no build runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from commdsl.language.diagnostics import InternalError


def key(parts: Sequence[str]) -> str:
    """One SHA-256 over a sequence of texts, none of which can run into the next."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(f"{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def entry(cache_dir: Path, entry_key: str, build: Callable[[Path], None]) -> Path:
    """The folder of a key; `build` fills a fresh one, which then appears whole under its name or not at all."""
    final = cache_dir / entry_key[:2] / entry_key
    if final.is_dir():
        return final
    package = Path(__file__).resolve().parents[1]
    if cache_dir.resolve().is_relative_to(package):
        raise InternalError(f"the cache {cache_dir} lies inside the package")
    final.parent.mkdir(parents=True, exist_ok=True)
    with (final.parent / f".{entry_key}.lock").open("w") as lock:
        # The ranks of a job ask for the same thing at once: one builds, the others wait for it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.is_dir():
            _fill(final, build)
    return final


def _fill(final: Path, build: Callable[[Path], None]) -> None:
    fresh = Path(tempfile.mkdtemp(prefix=".building-", dir=final.parent))
    try:
        build(fresh)
        os.rename(fresh, final)
    except OSError:
        if not final.is_dir():
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
