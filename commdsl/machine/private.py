"""Turns paths into folders and files that are this user's alone, or into the one error that says what is wrong.

Assumes POSIX owners and modes. What lies in the cache is run, or unpickled, as the user: nobody else may have written
it, nor may put something else in its place by a rename in a folder above. Then a file that was verified is the file
that is opened by its name later. Does not keep out the superuser, nor who owns this package: they run code as the user
anyway.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from commdsl.machine.errors import CacheError
from commdsl.machine.shortage import explained

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
FOLDER_MODE = 0o700
ACCESS_LIST = "system.posix_acl_access"


def is_plain_name(name: str) -> bool:
    """Return whether a name is that of a file in a folder and of nothing elsewhere, `.` and hidden files excluded."""
    return bool(name) and not name.startswith(".") and not {"/", "\0", "\n"} & set(name)


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


def refuse_renamers(path: Path) -> None:
    """Raise CacheError where another user could give another folder the name `path`, by a rename in a folder above.

    Others can where such a folder is theirs, or where they may write it and it has no sticky bit (/tmp has one). They
    cannot below a folder that they may not enter. `path` itself is for `refuse_others`, and need not exist.
    """
    wrong = ""
    for folder in path.absolute().parents:  # from the nearest up
        try:
            found = os.lstat(folder)
        except FileNotFoundError:
            continue
        wrong = _renamer(folder, found) or wrong
        if found.st_uid in (0, os.geteuid()) and not found.st_mode & OTHERS_ENTER:
            wrong = ""
    if wrong:
        raise CacheError(
            f"{wrong}; whoever may rename what is in it can put code in place of {path}, which is run as you: "
            "set COMMDSL_CACHE_DIR, or TMPDIR for temporary files, to a folder of your own"
        )


def _renamer(folder: Path, found: os.stat_result) -> str:
    """Return who may rename what is in a folder, and how to mend it; nothing where only the user and root may."""
    if stat.S_ISLNK(found.st_mode):
        return f"{folder} is a symbolic link (name the folder that it leads to)"
    if found.st_uid not in (0, os.geteuid(), os.lstat(__file__).st_uid) and not _is_unmapped(found.st_uid):
        return f"{folder} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
    if not found.st_mode & OTHERS_WRITE or found.st_mode & stat.S_ISVTX:
        return ""
    if not found.st_mode & stat.S_IWOTH and _is_private_group(folder, found.st_gid):
        return ""
    mode = stat.S_IMODE(found.st_mode)
    return f"others may write {folder} (mode {mode:04o}, without the sticky bit: `chmod go-w` or `chmod +t` mends that)"


def _is_unmapped(user: int) -> bool:
    """Return whether a user namespace shows every foreign owner, the superuser too, as this one."""
    with contextlib.suppress(OSError, ValueError):
        mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
        return mapped < 2**32 - 1 and user == int(Path("/proc/sys/kernel/overflowuid").read_text())
    return False


def _is_private_group(folder: Path, group: int) -> bool:
    """Return whether a group has its user's name and no other member, as many systems give each user one.

    Not where an access list gives others what the mode shows as the group's.
    """
    import grp  # with the next, 1 ms that a folder which only its owner may write does not need
    import pwd

    with contextlib.suppress(OSError):  # of a file system without such lists
        if ACCESS_LIST in os.listxattr(folder):
            return False
    with contextlib.suppress(KeyError):
        name, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
        return found.gr_name == name and {*found.gr_mem} <= {name}
    return False


def own_folder(path: Path) -> Path:
    """The folder, made where there is none. Raises CacheError where it is not the user's alone, OSError."""
    if not path.parent.exists():
        refuse_renamers(path)
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
    """Return a folder of this process alone, gone when it ends. Raises as `work_folder` does."""
    return _folder_of(os.getpid())


@cache
def _folder_of(process: int) -> Path:
    """Known by the process: a forked child makes its own, as its parent may end first."""
    made = _made()
    atexit.register(_remove, made, process)
    return made


def _remove(made: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(made, ignore_errors=True)


def _made() -> Path:
    with explained("make a temporary folder"):
        above = Path(os.path.realpath(tempfile.gettempdir()))
        refuse_renamers(above / "commdsl")
        return Path(tempfile.mkdtemp(prefix="commdsl-", dir=above))


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """Yield a temporary folder that nobody else may enter or rename, removed on return.

    Raises CacheError where TMPDIR has no room, or where other users may rename what is in it; ResourceError where a
    limit of the process is reached.
    """
    made = _made()
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
