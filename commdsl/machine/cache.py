"""Turns what something depends on into what was made of it: kept by an earlier run, or made now and kept for the next.

An entry is a folder of files, and a manifest with their sizes and digests. It appears whole, by a rename, and is
verified whenever it is used: one that is torn, cut short, empty or another's is made anew. Where the cache cannot be
written, files lie in a folder of the process, and objects nowhere.

Assumes that what is made depends on the key alone: whoever loses a race uses the winner's entry. Does not expire
entries; the cache may be deleted at any time when nothing is made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import pickle
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeAlias, TypeVar

from commdsl.machine.errors import CacheError
from commdsl.machine.private import (
    FOLDER_MODE,
    is_plain_name,
    own_file,
    own_folder,
    process_folder,
    refuse_others,
    refuse_renamers,
)
from commdsl.machine.shortage import explain, explained
from commdsl.machine.unfinished import ASIDE, ATTEMPTS, discard, is_locked, is_unfinished, unfinished

Kind = TypeVar("Kind")
Files: TypeAlias = Mapping[str, bytes]
"""What an entry holds, by the names of files."""
Accept: TypeAlias = Callable[[Files], bool]

MANIFEST = "manifest"
HEAD = "commdsl cache 1"
OBJECT = "object.pickle"
LOCK_PATIENCE = 60.0
"""Seconds to wait for another that makes the same; after that, it may be stopped for good. Both may make it."""
LOCK_PAUSE = 0.01


class _UnusableError(Exception):
    """The cache cannot be read or written; `made` is what was to be kept, where it was made already."""

    def __init__(self, reason: OSError, made: Files | None = None) -> None:
        super().__init__(reason.strerror or str(reason))
        self.reason = reason
        self.made = made


def key(parts: Sequence[str]) -> str:
    """One SHA-256 over a sequence of texts, none of which can run into the next."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(f"{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def entry(place: Path | None, entry_key: str, make: Callable[[], Files]) -> Path:
    """The folder with the files of a key, verified. `make` is called where none are kept.

    `place`: the cache, None where there is none; then, or where it cannot be written, the folder lies in one of this
    process. Raises CacheError where others may write the cache, or where nothing can be written anywhere.
    """
    made: Files | None = None
    try:
        _obtain(_known(place), entry_key, make, _anything)
        assert place is not None
        return _folder_of(place, entry_key)
    except _UnusableError as error:
        _tell_once(place, str(error))
        made = error.made
    try:
        with _ours(made):
            own = process_folder()
        _obtain(own, entry_key, make if made is None else lambda: made or {}, _anything)
    except _UnusableError as error:
        raise explain(
            error.reason, f"keep a build in the cache {place} or a temporary folder", "COMMDSL_CACHE_DIR and TMPDIR"
        ) from error.reason
    return _folder_of(own, entry_key)


def kept(place: Path | None, entry_key: str, kind: type[Kind], make: Callable[[], Kind]) -> Kind:
    """The object of a key, by way of pickle; without a cache it is made. Raises CacheError as `entry` does."""
    found: list[Kind] = []

    def loads(files: Files) -> bool:
        # Whole, as its digest says, but of another version of a package, it may raise anything.
        with contextlib.suppress(Exception):
            value = pickle.loads(files[OBJECT])
            if isinstance(value, kind):
                found[:] = [value]
                return True
        return False

    def dumped() -> Files:
        found[:] = [make()]
        return {OBJECT: pickle.dumps(found[0], pickle.HIGHEST_PROTOCOL)}

    try:
        _obtain(_known(place), entry_key, dumped, loads)
    except _UnusableError as error:
        _tell_once(place, str(error))
    return found[0] if found else make()


def _known(place: Path | None) -> Path:
    if place is None:
        raise _UnusableError(FileNotFoundError(errno.ENOENT, "this user has no home folder"))
    package = Path(__file__).resolve().parents[1]
    if place.is_relative_to(package):
        raise CacheError(f"the cache {place} lies inside the package: set COMMDSL_CACHE_DIR to another place")
    return place


def _anything(_: Files) -> bool:
    return True


# --- one entry --------------------------------------------------------------------------------------------------------


def _folder_of(place: Path, entry_key: str) -> Path:
    return place / entry_key[:2] / entry_key


def _obtain(place: Path, entry_key: str, make: Callable[[], Files], accept: Accept) -> None:
    """Sees to it that the entry is there, whole and accepted. Raises _UnusableError, and what `make` raises."""
    final = _folder_of(place, entry_key)
    with _ours():
        if _is_whole(place, final, accept):
            return
        own_folder(place)
        own_folder(final.parent)
    with contextlib.ExitStack() as stack:
        with _ours():
            stack.enter_context(_lock(final.parent / f".{entry_key}.lock"))
            if _is_whole(place, final, accept):
                return
        files = make()
        with _ours(files):
            _write(place, final, files, accept)


@contextmanager
def _ours(made: Files | None = None) -> Iterator[None]:
    """What fails inside is the cache's to blame, not what was to be made."""
    try:
        yield
    except OSError as error:
        raise _UnusableError(error, made) from error


def _is_whole(place: Path, final: Path, accept: Accept) -> bool:
    """Return whether the entry is there as it was written, and stays so until others open its files by name.

    Raises CacheError where another user may have written it, or may rename a folder above it.
    """
    refuse_renamers(place)
    for folder in (place, final.parent, final):
        try:
            refuse_others(folder, os.lstat(folder))
        except FileNotFoundError:
            return False
    try:
        files = _read(final)
        whole = files is not None and accept(files)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        whole = False
    if not whole:
        import logging  # 5 ms that a run in which nothing is amiss does not need

        logging.getLogger("commdsl").info("the cache entry %s is damaged, and is made anew", final)
    return whole


def _read(final: Path) -> Files | None:
    """The files that the manifest names; None unless each is as it says."""
    lines = own_file(final / MANIFEST).decode("utf-8", "replace").split("\n")
    *listed, digest = lines
    if digest != _sha256("\n".join(listed).encode()) or listed[:2] != [HEAD, final.name]:
        return None
    files: dict[str, bytes] = {}
    for line in listed[2:]:
        expected, size, name = line.split(" ", 2)
        if not is_plain_name(name):
            return None
        data = files[name] = own_file(final / name)
        if len(data) != int(size) or _sha256(data) != expected:
            return None
    return files


def _write(place: Path, final: Path, files: Files, accept: Accept) -> None:
    if not all(map(is_plain_name, files)):
        raise ValueError(f"an entry has plain files, not {', '.join(map(repr, files))}")
    with unfinished(place, MANIFEST, FOLDER_MODE) as (fresh, manifest):
        for name, data in files.items():
            _write_file(fresh / name, data)
        listed = [HEAD, final.name, *(f"{_sha256(data)} {len(data)} {name}" for name, data in files.items())]
        text = "\n".join(listed)
        with open(manifest, "wb", closefd=False) as file:
            file.write(f"{text}\n{_sha256(text.encode())}".encode())
        _place(place, fresh, final, accept)


def _write_file(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(path, flags, FOLDER_MODE)  # some are programs
    with open(handle, "wb") as file:
        file.write(data)


def _place(place: Path, fresh: Path, final: Path, accept: Accept) -> None:
    """Gives what was written its name, in place of what is not whole there."""
    for _ in range(ATTEMPTS):
        try:
            os.rename(fresh, final)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if _is_whole(place, final, accept):
            return  # another process that did not wait was quicker
        with contextlib.suppress(FileNotFoundError):
            _take_away(place, final)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(final))


def _take_away(place: Path, final: Path) -> None:
    """By a rename: whoever has loaded a file of it keeps that file."""
    aside = Path(tempfile.mkdtemp(prefix=ASIDE, dir=place))
    try:
        os.rename(final, aside / "entry")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one that makes the entry, as long as it lives; the ranks of a job ask for the same thing at once.

    Saves work, and nothing else depends on it: where a file system has no locks, and where its holder stands still, one
    goes on without.
    """
    deadline, handle = time.monotonic() + LOCK_PATIENCE, -1
    try:
        while handle < 0 and time.monotonic() < deadline:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if not is_locked(path, handle):
                os.close(handle)
                handle = -1
                time.sleep(LOCK_PAUSE)
        yield
    finally:
        if handle >= 0:
            with contextlib.suppress(OSError):
                os.unlink(path)
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # said, as a child that was forked meanwhile has the file open, too
            os.close(handle)


# --- what is said of it -----------------------------------------------------------------------------------------------


@cache
def _told() -> list[str]:
    """What was said already in this process."""
    return []


def _tell_once(place: Path | None, reason: str) -> None:
    if _told():
        return
    import logging  # as above

    _told().append(reason)
    where = "there is no cache" if place is None else f"the cache {place} cannot be used"
    logging.getLogger("commdsl").warning(
        "%s (%s): what is made now is made again by the next run; COMMDSL_CACHE_DIR names another place",
        where,
        reason,
    )


def trouble(place: Path | None) -> str:
    """Why the cache cannot be used, in words; nothing where it can. Writes an entry and removes it."""
    probe = key(["probe", str(os.getpid())])
    try:
        known = _known(place)
        _obtain(known, probe, lambda: {"probe": b""}, _anything)
        shutil.rmtree(_folder_of(known, probe))
    except (_UnusableError, CacheError, OSError) as error:
        return str(error)
    return ""


# --- all of them ------------------------------------------------------------------------------------------------------

_SHARD = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{64}")
_LOCK = re.compile(r"\.[0-9a-f]{64}\.lock")


@explained("look into the cache", "COMMDSL_CACHE_DIR")
def entries(place: Path) -> tuple[Path, ...]:
    """The folders of all entries, whole or not. What else lies in the folder is not the cache's."""
    shards = [path for path in _listed(place) if _SHARD.fullmatch(path.name)]
    return tuple(path for shard in shards for path in _listed(shard) if _ENTRY.fullmatch(path.name))


@explained("look into the cache", "COMMDSL_CACHE_DIR")
def num_bytes(place: Path) -> int:
    """What the files of all entries hold."""
    total = 0
    for path in (file for one in entries(place) for file in _listed(one)):
        with contextlib.suppress(FileNotFoundError):  # another process replaces it
            total += path.lstat().st_size
    return total


@explained("clear the cache", "COMMDSL_CACHE_DIR")
def clear(place: Path) -> None:
    """Remove all entries, locks and unfinished folders; the folder may have been named by mistake, so nothing else.

    A symbolic link that has the name of one of these is removed itself; where it leads, nothing is touched. A folder
    that a living process fills stays, and so do entries that appear meanwhile. What another user owns, or what cannot
    be removed, stays too: when all else is gone, CacheError names it. CacheError as well, with nothing removed, where
    others may write the cache or it is itself a link.
    """
    if not os.path.lexists(place):
        return
    refuse_renamers(place)
    refuse_others(place, os.lstat(place))
    stayed: list[str] = []
    for path in _listed(place):
        if _SHARD.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            for inner in _listed(path):
                if _ENTRY.fullmatch(inner.name) or _LOCK.fullmatch(inner.name) or is_unfinished(inner):
                    _clear_one(inner, stayed)
            with contextlib.suppress(OSError):  # what is not the cache's stays
                path.rmdir()
        elif is_unfinished(path) or (_SHARD.fullmatch(path.name) and path.is_symlink()):
            _clear_one(path, stayed)
    if stayed:
        raise CacheError(f"not all of the cache {place} could be removed: {'; '.join(stayed)}")


def _clear_one(path: Path, stayed: list[str]) -> None:
    try:
        found = os.lstat(path)
        if found.st_uid != os.geteuid() and not stat.S_ISLNK(found.st_mode):
            stayed.append(f"{path} belongs to user {found.st_uid}, who can remove it")
        else:
            discard(path)
    except FileNotFoundError:
        pass  # another process was quicker
    except OSError as error:
        stayed.append(f"{path}: {error.strerror}")


def _listed(folder: Path) -> tuple[Path, ...]:
    try:
        return tuple(sorted(folder.iterdir())) if not folder.is_symlink() else ()
    except (FileNotFoundError, NotADirectoryError):
        return ()
