"""Turns paths into folders and files that are this user's alone, or into the one error that says what is wrong.

Assumes POSIX owners and modes. What lies in the cache is run, or unpickled, as the user: nobody else may have written
it. Does not look at the folders above the cache's own: whoever may rename those cannot make them the user's.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

from commdsl.machine.errors import CacheError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
FOLDER_MODE = 0o700


def refuse_others(path: Path, found: os.stat_result) -> None:
    """Raises CacheError for what another user owns or may write, and for symbolic links: those may lead anywhere."""
    instead = "or set COMMDSL_CACHE_DIR to a folder of your own"
    if stat.S_ISLNK(found.st_mode):
        raise CacheError(f"{path} is a symbolic link, and what it leads to would be run as you: remove it, {instead}")
    if found.st_uid != os.geteuid():
        raise CacheError(
            f"{path} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}, who would run what "
            f"is kept there: remove it or change its owner (chown), {instead}"
        )
    if found.st_mode & OTHERS_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        raise CacheError(
            f"others may write {path} (mode {mode:04o}), and what is kept there is run as you: "
            f"`chmod -R go-w {path}`, {instead}"
        )


def own_folder(path: Path) -> Path:
    """The folder, made where there is none. Raises CacheError where it is not the user's alone, OSError."""
    if not path.parent.exists():
        os.makedirs(path.parent, FOLDER_MODE, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, FOLDER_MODE)
    found = os.lstat(path)
    refuse_others(path, found)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return path


def own_file(path: Path) -> bytes:
    """A file's content. Raises CacheError where the file is not the user's alone, OSError where it is none."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for its writer
    try:
        handle = os.open(path, flags)
    except OSError:
        if path.is_symlink():
            refuse_others(path, os.lstat(path))
        raise
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        refuse_others(path, found)
        if not stat.S_ISREG(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return file.read()


def process_folder() -> Path:
    """A folder of this process alone, gone when it ends. Raises CacheError where there is no room for one."""
    return _folder_of(os.getpid())


@cache
def _folder_of(process: int) -> Path:
    """Known by the process: a forked child makes its own, as its parent may end first."""
    try:
        made = Path(tempfile.mkdtemp(prefix="commdsl-"))
    except OSError as error:
        raise CacheError(f"there is no cache, and no temporary folder either ({error}): set TMPDIR") from error
    atexit.register(_remove, made, process)
    return made


def _remove(made: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(made, ignore_errors=True)
