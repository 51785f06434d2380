"""Turns words of the command line into numbers: ranks, sizes, NAME=VALUE parameters, files, shipped ones by name, too.

Assumes nothing. Does not read schedules; a wrong word is a `UsageError` that says what is expected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias

from commdsl.language.records import dataclass
from commdsl.machine import resources

Params: TypeAlias = tuple[tuple[str, int], ...]
"""NAME=VALUE, each once or more."""

UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


STDIN = Path("-")
"""The file whose text comes over standard input, and which uses files of the folder where the command runs."""

MOST_NUMBERS = 1000
"""Of ranks, in a sweep."""

NEARLY = 0.8
"""How alike a shipped name is, of 1, to be meant by a path."""


class UsageError(Exception):
    """The command line is at fault, not the schedule: exit code 2."""


@dataclass(frozen=True, slots=True)
class Target:
    """What to prove a schedule for. `ranks` is None where neither the command line nor the file says a number."""

    ranks: tuple[int, ...] | None
    on: str | None
    params: Params
    tune: tuple[tuple[str, int | str], ...] = ()

    @property
    def is_sweep(self) -> bool:
        """Several numbers of ranks: those that the schedule does not admit are left out, not wrong."""
        return self.ranks is not None and len(self.ranks) > 1


def product_shape(text: str) -> tuple[int, int, int]:
    """Rows of all ranks, depth and columns: `8192x4096x1024`."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if match is None or not all(map(int, match.groups())):
        raise UsageError(f"a product is of rows, depth and columns as in 8192x4096x1024, not `{text}`")
    rows, depth, columns = map(int, match.groups())
    return rows, depth, columns


def parse_ranks(text: str) -> tuple[int, ...]:
    """`8`, `2,4,8`, `2..16` (both ends included), or a mixture."""
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", part)
        if not match:
            raise UsageError(f"--ranks expects a number, a list 2,4,8 or a range 2..16, got `{text}`")
        first, last = int(match[1]), int(match[2] or match[1])
        if first < 1 or last < first:
            raise UsageError(f"--ranks {text}: there is 1 rank at least, and a range goes up")
        if len(ranks) + last - first >= MOST_NUMBERS:
            raise UsageError(f"--ranks {text}: more than {MOST_NUMBERS:,} numbers to prove, one after another")
        ranks += range(first, last + 1)
    return tuple(dict.fromkeys(ranks))


def parse_bytes(text: str, option: str = "--bytes") -> int:
    """`4096`, `64KB`, `1 MB`; a KB is 1024 bytes, as in a `tune` block."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?b?)\s*", text.lower())
    unit = match[2] if match else ""
    if not match or (unit and not unit.endswith("b")):
        raise UsageError(f"{option} expects a size such as `4096`, `64KB` or `1MB`, got `{text}`")
    size = float(match[1]) * UNITS[unit]
    if size != int(size):
        raise UsageError(f"{option} `{text}` is not a whole number of bytes")
    return int(size)


def parse_param(word: str) -> tuple[str, int]:
    """`K=4`."""
    name, _, value = word.partition("=")
    if not name.isidentifier() or not re.fullmatch(r"-?\d+", value):
        raise UsageError(f"a parameter is NAME=VALUE with a whole number, got `{word}`")
    return name, int(value)


def parse_tune(words: Iterable[str]) -> tuple[tuple[str, int | str], ...]:
    """`lanes=16`, `tile=4KB`, `protocol=packet`; which keys and values there are is the language's to say."""
    found: dict[str, int | str] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key.isidentifier() or not value:
            raise UsageError(f"--tune expects KEY=VALUE, for example `lanes=16` or `tile=4KB`, got `{word}`")
        if key in found:
            raise UsageError(f"--tune gives `{key}` twice")
        found[key] = parse_bytes(value, "--tune tile") if key == "tile" else int(value) if value.isdigit() else value
    return tuple(found.items())


@dataclass(frozen=True, slots=True)
class Place:
    """A file, and one of its declarations where the word names it: `FILE.comm:NAME`."""

    path: Path
    name: str | None = None


def place_of(word: str) -> Place:
    """A file, a shipped one by its name, or `-`. Raises UsageError with what comes near where there is none."""
    if Path(word) == STDIN:
        return Place(STDIN)
    if Path(word).exists():
        return Place(_text_file(Path(word)))
    file, name = resources.split_place(word)
    if name is not None and Path(file).exists():
        return Place(_text_file(Path(file)), name)
    shipped = resources.shipped_file(file) if Path(file).name == file else None
    if shipped is not None:
        return Place(shipped, name)
    raise UsageError(_nothing_there(file))


def in_folders(words: Iterable[str]) -> Iterator[str]:
    """Yield the words, with the .comm files below it, in the order of their names, in place of each folder. Raises
    UsageError for a folder without any. Hidden folders are not looked into.
    """
    for word in words:
        if not word or not Path(word).is_dir():
            yield word
            continue
        below = sorted(Path(word).rglob(f"*{resources.SUFFIX}"))
        hidden = (any(part.startswith(".") for part in path.relative_to(word).parts) for path in below)
        found = [path for path, is_hidden in zip(below, hidden, strict=True) if path.is_file() and not is_hidden]
        if not found:
            raise UsageError(f"{word} is a folder with no {resources.SUFFIX} file in it")
        yield from map(str, found)


def _text_file(path: Path) -> Path:
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name files in it, as in {path / '*.comm'}")
    if path.suffix not in ("", resources.SUFFIX):
        raise UsageError(f"{path} is no {resources.SUFFIX} file")
    return path


def _nothing_there(word: str) -> str:
    """What to do about a word that is no file, in a line."""
    path = Path(word)
    if path.is_symlink():
        return f"{word} is a link to nothing"
    if word.isdigit():
        return f"expected a file or a shipped name, got the number {word}; ranks are given as --ranks {word}"
    if path.name != word or path.suffix:
        here = path.parent.glob(f"*{resources.SUFFIX}") if path.parent.is_dir() else ()
        near = get_close_matches(path.name, [one.name for one in here], n=1)
        known = [one.name for one in resources.shipped_files()]
        shipped = get_close_matches(path.name, known, n=1, cutoff=NEARLY)
        hint = f"did you mean {path.with_name(near[0])}?" if near else ""
        hint = hint or (f"did you mean {Path(shipped[0]).stem}, which is shipped?" if shipped else "")
        return f"no such file: {word}" + (f"; {hint}" if hint else "")
    near = get_close_matches(word, [one.stem for one in resources.shipped_files()], n=1)
    hint = f"did you mean {near[0]}?" if near else "`commdsl list` says what is shipped"
    return f"no file, and nothing shipped, has the name {word}; {hint}"


def split_words(words: Iterable[str]) -> tuple[tuple[Place, ...], Params]:
    """Files and NAME=VALUE parameters, told apart by the `=`."""
    words = tuple(words)
    is_param = {word: "=" in word and not Path(word).exists() for word in words}
    files = tuple(dict.fromkeys(place_of(word) for word in words if not is_param[word]))
    return files, tuple(parse_param(word) for word in words if is_param[word])


def named(
    places: tuple[Place, ...], params: Params, schedule: str | None
) -> tuple[tuple[Path, ...], Params, str | None]:
    """Files, parameters, and the one declaration that is asked for, by --schedule or as FILE.comm:NAME."""
    if schedule is not None and not (schedule and places):
        raise UsageError("--schedule names a declaration of a FILE, and there is no file, or an empty name")
    names = {place.name for place in places if place.name is not None} | ({schedule} if schedule else set())
    if len(names) > 1 or (names and schedule is None and len(places) > 1):
        raise UsageError("one declaration of one file at a time, or all of several files")
    return tuple(place.path for place in places), params, next(iter(names), None)


def files_and_params(words: Iterable[str], schedule: str | None) -> tuple[tuple[Path, ...], Params, str | None]:
    places, params = split_words(words)
    if not places:
        raise UsageError("no file given, nor the name of a shipped one (commdsl list)")
    return named(places, params, schedule)


def file_and_params(words: Iterable[str], schedule: str | None) -> tuple[Path, Params, str | None]:
    files, params, name = files_and_params(words, schedule)
    if len(files) > 1:
        raise UsageError(f"one file at a time, got {', '.join(map(str, files))}")
    return files[0], params, name


def target(ranks: str | None, on: str | None, params: Params, tune: Iterable[str] = ()) -> Target:
    return Target(None if ranks is None else parse_ranks(ranks), parse_on(on), params, parse_tune(tune))


def parse_on(text: str | None) -> str | None:
    """Return a topology's name, or a place in a file: `box.comm`, `box.comm:name`.

    Raises UsageError where the name is empty, or there is no such file; names the nearest files and shipped topologies.
    """
    if text is None:
        return None
    file, _ = resources.split_place(text)
    if not file or file.isspace():
        raise UsageError("--on expects the name of a topology, such as h200_2x8, or a .comm file; got an empty one")
    if not file.endswith(resources.SUFFIX) or Path(file).is_file():
        return text
    if Path(file).is_dir():
        raise UsageError(f"--on {text}: {file} is a folder")
    here = [one for one in Path(file).parent.glob(f"*{resources.SUFFIX}") if _has_topology(one)]
    own = get_close_matches(Path(file).stem, [one.stem for one in here], n=1)
    shipped = [one.stem for one in resources.shipped_files() if one.parent.name == "topologies"]
    near = [str(Path(file).with_name(f"{name}{resources.SUFFIX}")) for name in own] + get_close_matches(
        Path(file).stem, shipped, n=1
    )
    hint = f"did you mean {near[0]}?" if near else f"shipped topologies: {', '.join(shipped)}"
    raise UsageError(f"--on {text}: no such file: {file}; {hint}")


def _has_topology(path: Path) -> bool:
    """Return whether a file seems to declare a topology."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return b"topology" in file.read(1 << 16)
    except OSError:
        return False
