"""Turns a folder that is being filled into one that stays while its process lives, and is removed if that is killed.

Assumes `flock`, which Linux makes a lock among hosts on a network file system. Where a file system has no locks, age
alone decides, by the file server's clock; who fills a folder that is removed all the same is told so, and loses work,
not correctness. Does not know what the files are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUILDING = ".making-"
ASIDE = ".torn-"
LEFT_OVER = 3600.0
"""Seconds after which a folder that no process holds was left behind by one that was killed."""

ATTEMPTS = 5


@contextmanager
def unfinished(place: Path, first: str, mode: int) -> Iterator[tuple[Path, int]]:
    """Yield a new folder in `place` and a handle to write its file `first`, whose lock says that this process lives.

    What is still there on return is removed. Raises OSError, FileNotFoundError where others keep removing it.
    """
    sweep(place)
    for _ in range(ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=BUILDING, dir=place))
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            try:
                handle = os.open(folder / first, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            except FileNotFoundError:
                continue  # it was swept before it was locked
            stack.callback(os.close, handle)
            if is_locked(folder / first, handle):
                yield folder, handle
                return
    raise FileNotFoundError(f"{place}: folders in it are removed as soon as they are made")


def is_locked(path: Path, handle: int) -> bool:
    """Lock an open file, and return whether it is still the one at `path`; True as well where there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    try:
        return os.fstat(handle).st_ino == os.stat(path).st_ino  # its last holder may have removed it
    except FileNotFoundError:
        return False


def is_unfinished(path: Path) -> bool:
    """Return whether a name is one of those that this module gives."""
    return path.name.startswith((BUILDING, ASIDE))


def sweep(place: Path) -> None:
    """Remove what processes that were killed left in a folder: what is older than LEFT_OVER and held by nobody."""
    old = [path for path in place.iterdir() if is_unfinished(path)]
    if not old:
        return
    with tempfile.TemporaryFile(dir=place) as probe:
        now = os.fstat(probe.fileno()).st_mtime  # the server's, as that of the folders is
    for path in old:
        with contextlib.suppress(OSError):
            if now - path.lstat().st_mtime > LEFT_OVER:
                discard(path)


def discard(path: Path) -> bool:
    """Remove a file, a link (not where it leads) or a folder with all in it; return False where a process fills it.

    Raises OSError; what is gone already is no error.
    """
    with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return True
        if is_unfinished(path):
            for file in path.iterdir():
                if not _is_free(file, stack):
                    return False
        shutil.rmtree(path)
    return True


def _is_free(path: Path, stack: contextlib.ExitStack) -> bool:
    """Return whether no process has the lock of a file, and keep it until the stack is unwound."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return True  # a folder, a link, or gone: none of these has a lock
    stack.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # no locks here
    return True
