"""Turns words of the command line into numbers: ranks, sizes, NAME=VALUE parameters, files.

Assumes nothing. Does not know schedules; a wrong word is a `UsageError` that says what is expected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from commdsl.language.records import dataclass

UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


class UsageError(Exception):
    """The command line is at fault, not the schedule: exit code 2."""


@dataclass(frozen=True, slots=True)
class Target:
    """What to prove a schedule for. `ranks` is None where neither the command line nor the file says a number."""

    ranks: tuple[int, ...] | None
    on: str | None
    params: tuple[tuple[str, int], ...]
    tune: tuple[tuple[str, int | str], ...] = ()

    @property
    def is_sweep(self) -> bool:
        """Several numbers of ranks: those that the schedule does not admit are left out, not wrong."""
        return self.ranks is not None and len(self.ranks) > 1


def parse_ranks(text: str) -> tuple[int, ...]:
    """`8`, `2,4,8`, `2..16` (both ends included), or a mixture."""
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", part)
        if not match:
            raise UsageError(f"--ranks expects a number, a list `2,4,8` or a range `2..16`, got `{text}`")
        first, last = int(match[1]), int(match[2] or match[1])
        if first < 1 or last < first:
            raise UsageError(f"--ranks `{text}`: a range goes up, from 1 or more")
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


def split_words(words: Iterable[str]) -> tuple[tuple[Path, ...], tuple[tuple[str, int], ...]]:
    """Files and NAME=VALUE parameters, told apart by the `=`."""
    words = tuple(words)
    files = tuple(Path(word) for word in words if "=" not in word)
    for file in files:
        if not file.exists():
            raise UsageError(f"no such file: {file}")
    return files, tuple(parse_param(word) for word in words if "=" in word)


def target(ranks: str | None, on: str | None, params: tuple[tuple[str, int], ...], tune: Iterable[str] = ()) -> Target:
    return Target(parse_ranks(ranks) if ranks else None, on, params, parse_tune(tune))
