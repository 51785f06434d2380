"""Turns an OSError into an error of commdsl that says which limit is reached and how to raise it.

Assumes the errno of a system call, or the text of the loader, which has none. Does not retry, and leaves errors that
commdsl raised itself as they are.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from commdsl.machine.errors import CacheError, CodedError, Error, ResourceError

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR}
"""A folder is full, too small, or not there to be written."""

FILES = {errno.EMFILE, errno.ENFILE}
MEMORY = {errno.ENOMEM, errno.EAGAIN}


def explain(error: OSError, doing: str, folder: str = "TMPDIR") -> CodedError:
    """Return the error to raise: CacheError (C970) where a folder cannot be written, else ResourceError (C975).

    `doing`: what failed, as in "build a host library"; `folder`: the variable that names another folder.
    """
    number = number_of(error)
    reason = f"cannot {doing}: {error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    if number in DISK:
        return CacheError(f"{reason}; make room there, or set {folder} to another folder")
    if number in FILES:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return ResourceError(f"{reason}; a process may have {most} files open here: raise that (`ulimit -n`)")
    if number in MEMORY:
        return ResourceError(f"{reason}; free memory, or raise the limits on memory and processes (`ulimit -v -u`)")
    return ResourceError(reason)


def number_of(error: OSError) -> int:
    """Return the errno; the loader of libraries gives it in words alone. 0 where there is none."""
    named = (number for number in sorted(FILES | MEMORY) if os.strerror(number) in str(error))
    return error.errno or next(named, 0)


@contextmanager
def explained(doing: str, folder: str = "TMPDIR") -> Iterator[None]:
    """Raise what `explain` makes of an OSError inside; also a decorator."""
    try:
        yield
    except Error:
        raise
    except OSError as error:
        raise explain(error, doing, folder) from error
