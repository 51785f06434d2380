"""The cache: keys, races, damage, owners, disks that are full, and where it may be.

Assumes POSIX. Other owners and full disks are played at the calls of the system; one test limits the size of files for
real. What the builders keep in it, and that it heals, is in test_torn.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import pwd
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import commdsl
from commdsl.commands.cli import run_command
from commdsl.language import parsed, parser
from commdsl.language.diagnostics import InternalError
from commdsl.language.source import Source
from commdsl.machine import cache, private, unfinished
from commdsl.machine.config import from_environment
from commdsl.machine.errors import CacheError

ROOT = Path(__file__).parent.parent
RING = ROOT / "schedules/collectives/allreduce_ring.comm"
KEY = cache.key(["a"])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def said() -> Iterator[None]:
    """What is said once in a process is said once in a test."""
    cache._told().clear()
    yield
    cache._told().clear()


def simple() -> dict[str, bytes]:
    return {"result": b"x" * 1000, "more": b""}


def never() -> dict[str, bytes]:
    raise AssertionError("made once more")


# --- keys and races ---------------------------------------------------------------------------------------------------


def test_key_separates_its_parts() -> None:
    """Moving a character from one part to the next is another key; the same parts are the same key."""
    assert cache.key(["ab", "c"]) == cache.key(["ab", "c"])
    assert len({cache.key(parts) for parts in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], [])}) == 5


def test_made_once(place: Path) -> None:
    """The second caller finds the folder of the first, files and all."""
    first = cache.entry(place, KEY, simple)

    assert cache.entry(place, KEY, never) == first
    assert {path.name: path.read_bytes() for path in first.iterdir() if path.name != cache.MANIFEST} == simple()


def test_objects(place: Path) -> None:
    """An object comes back equal; one of another class is made anew, and so is what this Python cannot read."""
    assert cache.kept(place, KEY, list, lambda: [1, 2]) == [1, 2]
    assert cache.kept(place, KEY, list, list) == [1, 2]
    assert cache.kept(place, KEY, dict, lambda: {3: 4}) == {3: 4}
    assert cache.kept(place, KEY, dict, dict) == {3: 4}

    gone = b"cno_such_module\nThing\n."
    for path in cache.entries(place):
        os.rename(path, place / "away")
    cache.entry(place, KEY, lambda: {cache.OBJECT: gone})
    assert cache.kept(place, KEY, dict, lambda: {5: 6}) == {5: 6}
    assert cache.kept(place, KEY, dict, dict) == {5: 6}


def test_one_makes_for_all(place: Path) -> None:
    """Callers that ask at the same time get one folder, whole, made once; nothing half made and no lock is left."""
    together = threading.Barrier(4)
    made: list[int] = []
    found: list[Path] = []

    def make() -> dict[str, bytes]:
        made.append(1)
        time.sleep(0.05)
        return simple()

    def ask() -> None:
        together.wait(timeout=10)
        found.append(cache.entry(place, KEY, make))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(found) == 4
    assert len(set(found)) == 1
    assert list(found[0].parent.iterdir()) == [found[0]]


MAKER = """
import sys, time
from pathlib import Path
from commdsl.machine import cache
place, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def make():
    with log.open("a") as file:
        file.write("made\\n")
    time.sleep(seconds)
    return {"result": b"x"}
print(cache.entry(place, cache.key(["a"]), make))
"""


def maker(place: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAKER, str(place), str(log), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_processes(place: Path, tmp_path: Path) -> None:
    """One of two processes makes the entry, and both have it."""
    both = [maker(place, tmp_path / "log", 0.2) for _ in range(2)]

    assert {one.communicate(timeout=60)[0] for one in both} == {f"{cache.entry(place, KEY, never)}\n"}
    assert (tmp_path / "log").read_text() == "made\n"


def test_a_maker_that_is_killed(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the dead, and what they left behind is removed in time."""
    log = tmp_path / "log"
    killed = maker(place, log, 600)
    while not log.is_file():
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    left = place / f"{unfinished.BUILDING}left"
    fresh = place / f"{unfinished.BUILDING}fresh"
    for folder in (left, fresh):
        folder.mkdir()
        (folder / "half").write_text("x")
    os.utime(left, (0, 0))
    monkeypatch.setattr(cache.time, "sleep", lambda _: pytest.fail("it waits"))
    found = cache.entry(place, KEY, simple)

    assert set(found.parent.iterdir()) == {found}
    assert set(place.iterdir()) == {found.parent, fresh}


FILLER = """
import sys
from pathlib import Path
from commdsl.machine import cache
def slowly(path, data):
    path.write_bytes(data[:3])
    print(path.parent, flush=True)
    sys.stdin.read()
cache._write_file = slowly
cache.entry(Path(sys.argv[1]), cache.key(["a"]), lambda: {"result": b"x" * 9})
"""


def test_a_folder_stays_while_it_is_filled(place: Path) -> None:
    """However old it is, a folder that a living process fills stays; that of a killed one goes, in any shard's name."""
    command = [sys.executable, "-c", FILLER, str(place)]
    filler = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert filler.stdout is not None
    folder = Path(filler.stdout.readline().strip())
    assert folder.name.startswith(unfinished.BUILDING)
    os.utime(folder, (0, 0))
    for name in "bcd":
        cache.entry(place, cache.key([name]), simple)
    cache.clear(place)
    assert folder.is_dir()
    filler.kill()
    filler.communicate()
    assert folder.is_dir()
    os.utime(folder, (0, 0))
    cache.entry(place, cache.key(["b"]), simple)
    assert not folder.exists()


def test_a_folder_that_is_swept_too_early(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has made a folder and not locked it yet makes another where it is removed; the entry is kept all the same."""
    real, taken = os.open, []

    def opened(path: object, flags: int, *rest: int, **more: int) -> int:
        if str(path).endswith(cache.MANIFEST) and flags & os.O_EXCL and len(taken) < 2:
            taken.append(Path(str(path)).parent)
            taken[-1].rmdir()
        return real(path, flags, *rest, **more)  # type: ignore[arg-type] # as os.open takes it

    monkeypatch.setattr(os, "open", opened)
    found = cache.entry(place, KEY, simple)

    assert len(taken) == 2
    assert found.is_relative_to(place)
    assert set(place.iterdir()) == {found.parent}


def test_without_locks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system has no locks, age alone decides, and entries are kept as elsewhere."""

    def none(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    (private.own_folder(place) / f"{unfinished.BUILDING}new").mkdir()
    (place / f"{unfinished.BUILDING}old").mkdir()
    os.utime(place / f"{unfinished.BUILDING}old", (0, 0))

    assert cache.entry(place, KEY, simple).is_relative_to(place)
    assert {path.name for path in place.glob(".*")} == {f"{unfinished.BUILDING}new"}


def test_a_maker_that_stands_still(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is not given back costs its patience, not the run."""
    monkeypatch.setattr(cache, "LOCK_PATIENCE", 0.1)
    lock = private.own_folder(private.own_folder(place) / KEY[:2]) / f".{KEY}.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        assert (cache.entry(place, KEY, simple) / "result").is_file()


def test_what_fails_leaves_nothing(place: Path) -> None:
    """What could not be made is not found later, and the next caller makes it anew."""

    def make() -> dict[str, bytes]:
        raise InternalError("no")

    with pytest.raises(InternalError):
        cache.entry(place, KEY, make)
    assert list(place.rglob("*")) == [place / KEY[:2]]
    assert cache.entry(place, KEY, simple).is_dir()


# --- damage -----------------------------------------------------------------------------------------------------------


def replaced_by_file(entry: Path) -> None:
    os.rename(entry, entry.parent / "away")
    entry.write_text("a file")


def emptied(entry: Path) -> None:
    for path in entry.iterdir():
        path.unlink()


def of_another_key(entry: Path) -> None:
    other = cache.entry(entry.parents[1], cache.key(["b"]), lambda: {"result": b"y"})
    emptied(entry)
    for path in other.iterdir():
        (entry / path.name).write_bytes(path.read_bytes())


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": lambda entry: os.truncate(entry / "result", 999),
    "empty": lambda entry: os.truncate(entry / "result", 0),
    "longer": lambda entry: (entry / "result").write_bytes(b"x" * 1001),
    "another byte": lambda entry: (entry / "result").write_bytes(b"x" * 999 + b"y"),
    "a file is gone": lambda entry: (entry / "more").unlink(),
    "a folder for a file": lambda entry: ((entry / "more").unlink(), (entry / "more").mkdir()),
    "a pipe for a file": lambda entry: ((entry / "more").unlink(), os.mkfifo(entry / "more", 0o600)),
    "no manifest": lambda entry: (entry / cache.MANIFEST).unlink(),
    "half a manifest": lambda entry: os.truncate(entry / cache.MANIFEST, 200),
    "a line of the manifest is gone": lambda entry: (entry / cache.MANIFEST).write_bytes(
        b"\n".join((entry / cache.MANIFEST).read_bytes().split(b"\n")[:-2])
    ),
    "no text": lambda entry: (entry / cache.MANIFEST).write_bytes(b"\xff\xfe\x00" * 50),
    "nothing in it": emptied,
    "a file for the entry": replaced_by_file,
    "another's entry": of_another_key,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_heals(damage: str, place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is not as it was written is made anew, once, and nobody hears of it but the log."""
    entry = cache.entry(place, KEY, simple)
    DAMAGE[damage](entry)
    with caplog.at_level(logging.INFO, "commdsl"):
        again = cache.entry(place, KEY, simple)

    assert again == entry
    assert {path.name: path.read_bytes() for path in again.iterdir() if path.name != cache.MANIFEST} == simple()
    assert cache.entry(place, KEY, never) == entry
    assert {(record.name, record.levelno) for record in caplog.records} == {("commdsl", logging.INFO)}
    assert not list(place.rglob(f"{unfinished.ASIDE}*"))


def test_who_has_it_loaded_keeps_it(place: Path) -> None:
    """A damaged file is replaced, never written over: what is mapped does not change under its user."""
    path = cache.entry(place, KEY, simple) / "result"
    os.truncate(path, 500)
    with path.open("rb") as file:
        cache.entry(place, KEY, simple)

        assert len(file.read()) == 500
    assert path.stat().st_size == 1000


def test_names_that_lead_out(place: Path, tmp_path: Path) -> None:
    """A manifest names files of its folder alone: one with a path in it is damaged, and no such entry is written."""
    entry = cache.entry(place, KEY, simple)
    for name in ("../outside", str(tmp_path / "outside"), "..", ".hidden", "", "sub/outside"):
        (entry / "sub").mkdir(exist_ok=True)
        for path in (entry.parent / "outside", tmp_path / "outside", entry / "sub" / "outside", entry / ".hidden"):
            path.write_bytes(b"foreign")
        digest = hashlib.sha256(b"foreign").hexdigest()
        text = f"{cache.HEAD}\n{KEY}\n{digest} 7 {name}"
        (entry / cache.MANIFEST).write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}")

        assert cache.entry(place, KEY, simple) == entry
        assert {path.name for path in entry.iterdir()} == {*simple(), cache.MANIFEST}
        with pytest.raises(ValueError, match="plain files"):
            cache.entry(place, cache.key([name]), lambda name=name: {name: b""})


# --- owners -----------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Path], Path]] = {
    "the cache": lambda entry: entry.parents[1],
    "the folder above": lambda entry: entry.parent,
    "the entry": lambda entry: entry,
    "the manifest": lambda entry: entry / cache.MANIFEST,
    "a file": lambda entry: entry / cache.OBJECT,
}


def kept_list(place: Path) -> list[int]:
    return cache.kept(place, KEY, list, lambda: [7])


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_others_may_write(part: str, mode: int, place: Path) -> None:
    """What the group or others may write is refused, with its path and what to do, and is not unpickled."""
    kept_list(place)
    path = PARTS[part](cache.entries(place)[0])
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(CacheError, match=re.escape(str(path))) as found:
        kept_list(place)

    assert "chmod -R go-w" in str(found.value)
    assert "COMMDSL_CACHE_DIR" in str(found.value)
    path.chmod(path.stat().st_mode & ~mode)
    assert kept_list(place) == [7]


@pytest.mark.parametrize("part", PARTS)
def test_another_owner(part: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another user owns is refused, and the error says whose it is."""
    kept_list(place)
    path = PARTS[part](cache.entries(place)[0])
    inode, mine, real = path.stat().st_ino, os.geteuid(), (os.lstat, os.fstat)

    def owned(found: os.stat_result) -> os.stat_result:
        fields = list(found)
        fields[4] = mine + 1 if found.st_ino == inode else mine
        return os.stat_result(fields)

    monkeypatch.setattr(os, "lstat", lambda path: owned(real[0](path)))
    monkeypatch.setattr(os, "fstat", lambda handle: owned(real[1](handle)))
    with pytest.raises(CacheError, match=f"{re.escape(str(path))} belongs to user {mine + 1}"):
        kept_list(place)


@pytest.mark.parametrize("part", [part for part in PARTS if part != "the cache"])
def test_links(part: str, place: Path, tmp_path: Path) -> None:
    """A symbolic link in the cache is refused: it leads where others may write."""
    kept_list(place)
    path = PARTS[part](cache.entries(place)[0])
    os.rename(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="symbolic link"):
        kept_list(place)


def others_rename(folder: Path) -> None:
    folder.chmod(0o777)


def of_another(folder: Path) -> None:
    os.chown(folder, 12345, -1)


def of_a_group(folder: Path) -> None:
    os.chown(folder, -1, 12345)
    folder.chmod(0o775)


def with_a_list(folder: Path) -> None:
    folder.chmod(0o775)
    entry = struct.Struct("<HHI")
    rows = ((1, 7, -1), (2, 7, 12345), (4, 5, -1), (16, 7, -1), (32, 5, -1))  # 12345 may write
    text = struct.pack("<I", 2) + b"".join(entry.pack(tag, mode, who & 0xFFFFFFFF) for tag, mode, who in rows)
    os.setxattr(folder, private.ACCESS_LIST, text)


ABOVE: dict[str, tuple[Callable[[Path], None], str]] = {
    "anybody may write it": (others_rename, r"others may write .* \(mode 0777, without the sticky bit"),
    "another user's": (of_another, "belongs to user 12345"),
    "a group may write it": (of_a_group, r"others may write .* \(mode 0775"),
    "its own group, and a list": (with_a_list, r"others may write .* \(mode 0775"),
    "its own group": (lambda folder: folder.chmod(0o775), ""),
    "anybody, but sticky": (lambda folder: folder.chmod(0o1777), ""),
    "anybody, where nobody comes": (lambda folder: (folder.chmod(0o777), folder.parent.chmod(0o700))[0], ""),
    "another user's, below": (lambda folder: (of_another(folder), folder.parent.chmod(0o700))[0], ""),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="folders of other users are made by root")
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("kind", ABOVE)
def test_folders_above(kind: str, deep: bool) -> None:
    """A cache, there or still to be made, is refused where another user may rename a folder above it, only there."""
    change, said = ABOVE[kind]
    with opened_up() as top:
        folder = top / "open" / "shared"
        place = folder / "mine" / "cache" if deep else folder / "cache"
        for path in (folder.parent, folder):
            path.mkdir()
            path.chmod(0o755)
        made = cache.entry(place, KEY, simple) if deep else None
        change(folder)
        if said:
            with pytest.raises(CacheError, match=f"C970.*{said}.*COMMDSL_CACHE_DIR"):
                cache.entry(place, KEY, never if made else simple)
            if deep:
                with pytest.raises(CacheError, match=said):
                    cache.clear(place)
        else:
            assert cache.entry(place, KEY, never if made else simple).is_dir()


@contextlib.contextmanager
def opened_up() -> Iterator[Path]:
    """A folder that other users may enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="commdsl-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_owners_of_a_user_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container that shows every foreign owner as `nobody`, the folders of the system are not refused."""
    real = os.lstat

    def owned(path: object) -> os.stat_result:
        fields = list(real(path))  # type: ignore[call-overload] # as os.lstat takes it
        if Path(str(path)) in tmp_path.parents:
            fields[0], fields[4] = 0o40755, 65534
        return os.stat_result(fields)

    monkeypatch.setattr(os, "lstat", owned)
    place = tmp_path / "cache"
    with pytest.raises(CacheError, match="belongs to user 65534"):
        cache.entry(place, KEY, simple)
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path: "0 1000 1\n" if str(path) == "/proc/self/uid_map" else read(path)
    )
    assert cache.entry(place, KEY, simple).is_dir()


def renaming(folder: Path, names: tuple[str, str], done: threading.Event | None) -> None:
    """Give two folders each other's name, over and over; where that is not allowed, try."""
    first, second = (folder / name for name in names)
    while done is None or not done.is_set():
        for source, dest in ((first, folder / "aside"), (second, first), (folder / "aside", second)):
            with contextlib.suppress(OSError):
                os.rename(source, dest)


def attacked(folder: Path) -> tuple[Path, list[str]]:
    """A cache with a program in it, and one beside it in which the program is another; and what was run."""
    ran: list[str] = []
    place = folder / "mine" / "cache"
    cache.entry(place, KEY, lambda: {"program.py": b"ran.append('own')"})
    shutil.copytree(folder / "mine", folder / "other")
    for path in (folder / "other").rglob("program.py"):
        path.write_text("ran.append('foreign')")
    return place, ran


def loads(place: Path, ran: list[str], count: int) -> int:
    """Load and run what the cache has; how often it was refused."""
    refused = 0
    for _ in range(count):
        try:
            program = cache.entry(place, KEY, lambda: {"program.py": b"ran.append('own')"}) / "program.py"
            exec(program.read_bytes())
        except (CacheError, OSError):
            refused += 1
    return refused


def test_folders_renamed_while_loads_happen() -> None:
    """Where others may rename the folder of the cache, nothing of it is run: what was verified may not be what is."""
    with opened_up() as folder:
        place, ran = attacked(folder)
        folder.chmod(0o777)
        done = threading.Event()
        attacker = threading.Thread(target=renaming, args=(folder, ("mine", "other"), done))
        attacker.start()
        try:
            refused = loads(place, ran, 300)
        finally:
            done.set()
            attacker.join()
    assert "foreign" not in ran
    assert (refused, ran) == (300, [])


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is played by a child of root")
def test_another_user_renames() -> None:
    """In a folder such as /tmp another user tries the same and gets nowhere: all is run, and it is the user's own."""
    with opened_up() as folder:
        place, ran = attacked(folder)
        folder.chmod(0o1777)
        child = os.fork()
        if child == 0:
            os.setgid(12345)
            os.setuid(12345)
            renaming(folder, ("mine", "other"), None)
        try:
            refused = loads(place, ran, 300)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert (refused, ran) == (0, ["own"] * 300)


def test_new_is_private(place: Path) -> None:
    """Folders are made with mode 0700, and files that nobody else may write, whatever the umask."""
    before = os.umask(0)
    try:
        entry = cache.entry(place, KEY, simple)
    finally:
        os.umask(before)

    assert {path.stat().st_mode & 0o777 for path in (place, entry.parent, entry)} == {0o700}
    assert not any(path.stat().st_mode & 0o077 for path in entry.iterdir())


def test_refused_in_a_line(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line a refused cache is one line, and no bug in commdsl."""
    place.mkdir()
    place.chmod(0o777)
    monkeypatch.setenv("COMMDSL_CACHE_DIR", str(place))

    assert run_command(["check", str(RING)]) == 2
    assert capsys.readouterr().err.startswith(f"usage: error[C970]: others may write {place} (mode 0777)")


# --- no place to write to ---------------------------------------------------------------------------------------------

REASONS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def fail_below(place: Path, reason: int, patch: pytest.MonkeyPatch) -> None:
    """What is made in the cache fails."""
    mkdir, opened = os.mkdir, os.open

    def deny(path: object) -> None:
        if isinstance(path, str | os.PathLike) and Path(path).is_relative_to(place):
            raise OSError(reason, os.strerror(reason), str(path))

    def mkdir_or_not(path: object, *rest: int) -> None:
        deny(path)
        mkdir(path, *rest)  # type: ignore[arg-type] # as os.mkdir takes it

    def open_or_not(path: object, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_CREAT:
            deny(path)
        return opened(path, flags, *rest, **more)  # type: ignore[arg-type] # as os.open takes it

    patch.setattr(os, "mkdir", mkdir_or_not)
    patch.setattr(os, "open", open_or_not)


@pytest.mark.parametrize("reason", REASONS, ids=errno.errorcode.get)
def test_without_a_cache(
    reason: int, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk, a quota, a read-only folder: files lie in a folder of the process, and it is said once."""
    cache.entry(place, cache.key(["before"]), simple)
    fail_below(place, reason, monkeypatch)
    found = cache.entry(place, KEY, simple)

    assert not found.is_relative_to(place)
    assert found.is_relative_to(private.process_folder())
    assert (found / "result").read_bytes() == simple()["result"]
    assert cache.entry(place, KEY, never) == found
    assert cache.entry(place, cache.key(["before"]), never).is_relative_to(place)
    assert cache.kept(place, cache.key(["object"]), list, lambda: [7]) == [7]
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.name == "commdsl"
    assert os.strerror(reason) in said.getMessage()
    assert str(place) in said.getMessage()


def test_no_place_at_all(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the temporary folder cannot be written either, the error says both."""
    place.write_text("a file")
    private.process_folder()
    fail_below(private.process_folder(), errno.ENOSPC, monkeypatch)
    with pytest.raises(CacheError, match=r"C970.*No space left on device.*TMPDIR"):
        cache.entry(place, cache.key(["nowhere"]), simple)


def test_the_folder_of_the_process_goes_with_it(place: Path) -> None:
    """It is there while the process runs, and not after."""
    place.write_text("a file")
    code = (
        "import sys; from pathlib import Path; from commdsl.machine import cache\n"
        "found = cache.entry(Path(sys.argv[1]), cache.key(['a']), lambda: {'result': b'x'})\n"
        "print(found, found.is_dir())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(place)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found, was_there = done.stdout.split()

    assert was_there == "True"
    assert not Path(found).parents[1].exists()
    assert done.stderr.count(f"the cache {place} cannot be used (Not a directory)") == 1


@pytest.mark.parametrize("command", [["check"], ["show", "--stage", "plan"]])
def test_files_that_cannot_grow(command: list[str], tmp_path: Path) -> None:
    """With a limit on the size of files, as on a full disk, a command does its work, and says once what is amiss."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "from commdsl.commands.cli import run_command; sys.exit(run_command(sys.argv[1:]))"
    )
    environment = {**os.environ, "COMMDSL_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-c", code, *command, str(RING)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be used (File too large)") == 1
    assert cache.entries(tmp_path / "cache") == ()


def test_nobody_at_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without HOME, and with a user that the system does not know, there is no cache and everything else."""

    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "COMMDSL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert from_environment().cache_dir is None
    source = Source("ring.comm", RING.read_text())

    assert parsed.parse(source) == parser.parse(source)
    assert cache.entry(from_environment().cache_dir, KEY, simple).is_relative_to(private.process_folder())
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


# --- where, and how much ----------------------------------------------------------------------------------------------


def test_never_under_the_package() -> None:
    """A cache inside the package would be shipped with it."""
    inside = Path(commdsl.__file__).parent / "cache"
    with pytest.raises(CacheError, match="inside the package"):
        cache.entry(inside, KEY, simple)
    assert not inside.exists()


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """COMMDSL_CACHE_DIR, else the user's folder for caches, by XDG_CACHE_HOME or below the home; links are followed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "link").symlink_to(tmp_path / "real")

    assert from_environment({}).cache_dir == tmp_path / ".cache" / "commdsl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert from_environment({}).cache_dir == tmp_path / "xdg" / "commdsl"
    assert from_environment({"COMMDSL_CACHE_DIR": str(tmp_path / "link")}).cache_dir == tmp_path / "real"
    assert from_environment({"COMMDSL_CACHE_DIR": "~/mine"}).cache_dir == tmp_path / "mine"


def test_trouble(place: Path) -> None:
    """What is wrong with a cache is said in words, and a good one is left as it was."""
    assert cache.trouble(place) == ""
    assert cache.entries(place) == ()
    place.chmod(0o777)
    assert "others may write" in cache.trouble(place)
    assert "no home" in cache.trouble(None)
    (place.parent / "file").write_text("")
    assert "Not a directory" in cache.trouble(place.parent / "file")


def test_cleared(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`commdsl cache` counts entries and bytes; `--clear` removes them, and nothing that is not the cache's."""
    monkeypatch.setenv("COMMDSL_CACHE_DIR", str(place))
    for name in "abc":
        cache.entry(place, cache.key([name]), simple)
    (place / "mine.txt").write_text("x")
    (place / KEY[:2] / "mine.txt").write_text("x")
    (place / "ab").mkdir(exist_ok=True)
    (place / "ab" / "mine").mkdir()
    (place / KEY[:2] / f"{unfinished.BUILDING}left").mkdir()
    (place / f"{unfinished.BUILDING}left").mkdir()

    assert run_command(["cache"]) == 0
    assert capsys.readouterr().out.startswith(f"{place}: 3 entries, 3.")
    assert run_command(["cache", "--json"]) == 0
    assert '"entries": 3' in capsys.readouterr().out
    assert run_command(["cache", "--clear"]) == 0
    assert cache.entries(place) == ()
    left = {path.relative_to(place).as_posix() for path in place.rglob("*")}
    assert left == {"mine.txt", KEY[:2], f"{KEY[:2]}/mine.txt", "ab", "ab/mine"}


def test_links_are_cleared_and_not_followed(place: Path, tmp_path: Path) -> None:
    """Of links that have the names of entries, shards, locks or unfinished folders the links go, and nothing else."""
    entry = cache.entry(place, KEY, simple)
    outside = tmp_path / "outside"
    (outside / KEY).mkdir(parents=True)
    (outside / KEY / "mine.txt").write_text("x")
    other = next(name for name in ("00", "01") if name != KEY[:2])
    links = (
        entry.parent / cache.key(["b"]),
        entry.parent / f".{KEY}.lock",
        entry.parent / f"{unfinished.BUILDING}x",
        place / f"{unfinished.BUILDING}x",
        place / other,
    )
    for link in links:
        link.symlink_to(outside)
    (place / "mine").symlink_to(outside)
    cache.clear(place)

    assert list(place.iterdir()) == [place / "mine"]
    assert (outside / KEY / "mine.txt").read_text() == "x"


def test_a_cache_that_is_a_link_is_not_cleared(place: Path, tmp_path: Path) -> None:
    """It is refused with what to do, and what it leads to is untouched; a cache that is not there is clear."""
    entry = cache.entry(tmp_path / "real", KEY, simple)
    place.symlink_to(tmp_path / "real")
    with pytest.raises(CacheError, match="symbolic link"):
        cache.clear(place)
    assert entry.is_dir()
    cache.clear(tmp_path / "none")


@pytest.mark.skipif(os.geteuid() != 0, reason="entries of other users are made by root")
def test_what_is_anothers_is_not_cleared(place: Path) -> None:
    """An entry of another user stays and is named; all others go."""
    mine, theirs = (cache.entry(place, cache.key([name]), simple) for name in "ab")
    os.chown(theirs, 12345, -1)
    with pytest.raises(CacheError, match=f"{theirs} belongs to user 12345"):
        cache.clear(place)
    assert not mine.exists()
    assert (theirs / "result").is_file()


def test_what_cannot_be_removed_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest goes, and the error says what stayed and why."""
    first, second = (cache.entry(place, cache.key([name]), simple) for name in "ab")
    real = shutil.rmtree

    def removed(path: Path, **more: bool) -> None:
        if path == first:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        real(path, **more)

    monkeypatch.setattr(shutil, "rmtree", removed)
    with pytest.raises(CacheError, match=f"{first}: Permission denied"):
        cache.clear(place)
    assert not second.exists()


def test_entries_that_appear_while_clearing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay, whole; and what another process removes first is no error."""
    for name in "ab":
        cache.entry(place, cache.key([name]), simple)
    late, real, cleared = cache.key(["late"]), shutil.rmtree, cache.entries(place)

    def removed(path: Path, **more: bool) -> None:
        if path in cleared:
            real(path)
            cache.entry(place, late, simple)
        real(path, **more)

    monkeypatch.setattr(shutil, "rmtree", removed)
    cache.clear(place)
    assert not any(path.exists() for path in cleared)
    assert cache.entry(place, late, never).is_dir()


def test_config_reads_the_environment(tmp_path: Path) -> None:
    """Every variable has its effect, and a value that means nothing is refused."""
    config = from_environment(
        {"COMMDSL_CACHE_DIR": str(tmp_path), "COMMDSL_TIMEOUT": "2.5", "COMMDSL_DEBUG": "1", "CXX": " clang++ -m64 "}
    )
    assert (config.cache_dir, config.timeout, config.debug, config.cxx) == (tmp_path, 2.5, True, "clang++ -m64")
    plain = from_environment({})
    assert (plain.timeout, plain.debug) == (None, False)
    for name, value in (("COMMDSL_TIMEOUT", "soon"), ("COMMDSL_TIMEOUT", "-1"), ("COMMDSL_DEBUG", "yes")):
        with pytest.raises(ValueError, match=name):
            from_environment({name: value})
