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
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeAlias, TypeVar

from commdsl.machine.errors import CacheError
from commdsl.machine.private import FOLDER_MODE, own_file, own_folder, process_folder, refuse_others

Kind = TypeVar("Kind")
Files: TypeAlias = Mapping[str, bytes]
"""What an entry holds, by the names of files."""
Accept: TypeAlias = Callable[[Files], bool]

MANIFEST = "manifest"
HEAD = "commdsl cache 1"
OBJECT = "object.pickle"
BUILDING = ".making-"
ASIDE = ".torn-"
LOCK_PATIENCE = 60.0
"""Seconds to wait for another that makes the same; after that, it may be stopped for good. Both may make it."""
LOCK_PAUSE = 0.01
LEFT_OVER = 3600.0
"""Seconds after which what a process began to write counts as left behind by one that was killed."""
ATTEMPTS = 5


class _UnusableError(Exception):
    """The cache cannot be read or written; `made` is what was to be kept, where it was made already."""

    def __init__(self, reason: OSError, made: Files | None = None) -> None:
        super().__init__(reason.strerror or str(reason))
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
        raise CacheError(
            f"neither the cache {place} nor a temporary folder can be written ({error}): "
            "make room, or set COMMDSL_CACHE_DIR and TMPDIR"
        ) from None
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
            _sweep(final.parent)
            _write(place, final, files, accept)


@contextmanager
def _ours(made: Files | None = None) -> Iterator[None]:
    """What fails inside is the cache's to blame, not what was to be made."""
    try:
        yield
    except OSError as error:
        raise _UnusableError(error, made) from error


def _is_whole(place: Path, final: Path, accept: Accept) -> bool:
    """Whether the entry is there as it was written. Raises CacheError where another may have written it."""
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
        data = files[name] = own_file(final / name)
        if len(data) != int(size) or _sha256(data) != expected:
            return None
    return files


def _write(place: Path, final: Path, files: Files, accept: Accept) -> None:
    fresh = Path(tempfile.mkdtemp(prefix=BUILDING, dir=final.parent))
    try:
        for name, data in files.items():
            _write_file(fresh / name, data)
        listed = [HEAD, final.name, *(f"{_sha256(data)} {len(data)} {name}" for name, data in files.items())]
        text = "\n".join(listed)
        _write_file(fresh / MANIFEST, f"{text}\n{_sha256(text.encode())}".encode())
        _place(place, fresh, final, accept)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


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
            _take_away(final)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(final))


def _take_away(final: Path) -> None:
    """By a rename: whoever has loaded a file of it keeps that file."""
    aside = Path(tempfile.mkdtemp(prefix=ASIDE, dir=final.parent))
    try:
        os.rename(final, aside / "entry")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Removes what processes that were killed left unfinished."""
    for path in parent.iterdir():
        if path.name.startswith((BUILDING, ASIDE)):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > LEFT_OVER:
                    shutil.rmtree(path)


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
            if not _is_locked(path, handle):
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


def _is_locked(path: Path, handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks here
    try:
        return os.fstat(handle).st_ino == os.stat(path).st_ino  # its last holder may have removed it
    except FileNotFoundError:
        return False


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


def entries(place: Path) -> tuple[Path, ...]:
    """The folders of all entries, whole or not. What else lies in the folder is not the cache's."""
    shards = [path for path in _listed(place) if _SHARD.fullmatch(path.name)]
    return tuple(path for shard in shards for path in _listed(shard) if _ENTRY.fullmatch(path.name))


def num_bytes(place: Path) -> int:
    """What the files of all entries hold."""
    return sum(file.lstat().st_size for one in entries(place) for file in _listed(one))


def clear(place: Path) -> None:
    """Removes all entries and what was left unfinished, and nothing else: the folder may have been named by mistake.

    Raises CacheError where another user has a say, OSError.
    """
    if not place.is_dir():
        return
    refuse_others(place, os.lstat(place))
    for shard in _listed(place):
        if not _SHARD.fullmatch(shard.name):
            continue
        for path in _listed(shard):
            if _ENTRY.fullmatch(path.name) or path.name.startswith((BUILDING, ASIDE)):
                shutil.rmtree(path)
            elif path.name.endswith(".lock"):
                path.unlink()
        with contextlib.suppress(OSError):  # what is not the cache's stays
            shard.rmdir()


def _listed(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(folder.iterdir())) if folder.is_dir() and not folder.is_symlink() else ()
