"""Turns words of the command line into documents: numbers, and files of them as text, CSV or JSON, or a plan's own.

Assumes lengths in tokens. Does not decide which rank holds what, unless a file says so; `packing` does.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from commdsl.commands.arguments import UsageError
from commdsl.ir.routes import Longs

EXPECTED = "expected lengths in tokens, or files of them: .txt, .csv with a column `length`, .json, a .comm with a plan"


@dataclass(frozen=True, eq=False)
class Documents:
    """n documents in the order given; `rank` (n,) where the input says on which rank each lies."""

    length: Longs  # (n,)
    rank: Longs | None


def read(words: Iterable[str]) -> Documents:
    """All documents of all words. Raises UsageError for what is no length, and where some have a rank and some not."""
    found = [_word(word) for word in words]
    length = np.concatenate([one.length for one in found]) if found else np.zeros(0, np.int64)
    if not len(length):
        raise UsageError(f"no documents: {EXPECTED}")
    ranks = [one.rank for one in found if one.rank is not None]
    if ranks and len(ranks) < len(found):
        raise UsageError("some documents have a rank and some do not: give all of them one, or none")
    return Documents(length, np.concatenate(ranks) if ranks else None)


def _word(word: str) -> Documents:
    path = Path(word)
    if word.isdigit():
        return Documents(_numbers([word], "LENGTHS"), None)
    if not path.exists():
        raise UsageError(f"`{word}` is neither a number nor a file: {EXPECTED}")
    text = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".json":
            return _json(text, word)
        case ".csv":
            return _csv(text, word)
        case _:
            return Documents(_numbers(_without_comments(text).replace(",", " ").split(), word), None)


def _without_comments(text: str) -> str:
    return "\n".join(line.partition("#")[0] for line in text.splitlines()) if "#" in text else text


def _numbers(words: list[str], name: str) -> Longs:
    try:
        return np.array([int(word) for word in words], np.int64)
    except (ValueError, OverflowError):
        wrong = next(word for word in words if not word.lstrip("-").isdigit() or len(word) > 18)
        raise UsageError(f"{name}: `{wrong}` is no length, {EXPECTED}") from None


def _csv(text: str, name: str) -> Documents:
    """With a heading `length`, perhaps also `rank`, other columns left alone; without a heading a single column."""
    rows = [row for row in csv.reader(text.splitlines()) if row]
    if rows and all(cell.strip().isdigit() for cell in rows[0]):
        if len(rows[0]) > 1:
            raise UsageError(f"{name}: {len(rows[0])} columns without a heading, expected `length`, perhaps `rank`")
        return Documents(_numbers([row[0].strip() for row in rows], name), None)
    heading = [cell.strip() for cell in rows[0]] if rows else []
    if "length" not in heading:
        raise UsageError(
            f"{name}: expected a column `length`, perhaps `rank`; there is {', '.join(heading) or 'nothing'}"
        )
    columns = [heading.index(column) for column in ("length", "rank") if column in heading]
    for number, row in enumerate(rows[1:], 2):
        if len(row) <= max(columns):
            raise UsageError(f"{name}: row {number} has {len(row)} of {len(heading)} columns")
    values = [_numbers([row[column].strip() for row in rows[1:]], name) for column in columns]
    return Documents(values[0], values[1] if len(values) > 1 else None)


def _json(text: str, name: str) -> Documents:
    """`[4096, 512]`, or a list for each rank: `[[4096], [512, 512]]`."""
    expected = f"{name}: expected a list of lengths, or a list of such lists, one for each rank"
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{expected}; {error}") from error
    if not isinstance(value, list):
        raise UsageError(expected)
    nested = bool(value) and all(isinstance(one, list) for one in value)
    flat: list[Any] = [length for one in value for length in one] if nested else value
    if not all(type(length) is int and abs(length) < 10**18 for length in flat):
        raise UsageError(f"{expected}; {next(length for length in flat if type(length) is not int)!r} is no length")
    rank = np.repeat(np.arange(len(value)), [len(one) for one in value]).astype(np.int64) if nested else None
    return Documents(np.array(flat, np.int64), rank)
