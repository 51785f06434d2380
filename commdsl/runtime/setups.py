"""Turns what each rank of a group is about to set up into nothing, or into one AgreementError that shows both sides.

Assumes that every rank hears what every rank said, so that all come to the same end. Does not exchange anything itself
(`bootstrap` does), and does not set up anything: when ranks do not agree, nothing was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from commdsl.build.emit import Emitted
from commdsl.program.plan import Plan
from commdsl.runtime.errors import AgreementError

KERNEL = "kernel"
"""The term that says nothing to a reader: it is shown only where nothing else differs."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a rank is about to set up: the same on every rank, term by term. `source`: name and text of the file behind
    it, by which a difference is shown and nothing is judged.
    """

    what: str
    terms: tuple[tuple[str, str], ...]
    source: tuple[str, str] | None = field(default=None, compare=False)

    def pack(self) -> bytes:
        return json.dumps([self.what, self.terms]).encode()

    def pack_source(self) -> bytes:
        return json.dumps(self.source).encode()


def of_plan(plan: Plan, emitted: Emitted, room: int, more: Mapping[str, object]) -> Setup:
    """Of a Plan's symmetric memory, with `room` bytes behind it, and what else ranks have to agree on."""
    terms = {
        **{name: str(value) for name, value in more.items()},
        "parameters": ", ".join(f"{name}={value}" for name, value in plan.params) or "none",
        "lanes": str(plan.comm.lanes),
        "tile": f"{plan.tile_bytes} bytes",
        "symmetric memory": f"{plan.symmetric_bytes + room} bytes",
        KERNEL: emitted.identity[:16],
    }
    source = plan.span.source
    return Setup(f"`{plan.name}`", tuple(terms.items()), (source.name, source.text))


def _unpacked(packed: bytes, source: bytes) -> Setup:
    what, terms = json.loads(packed)
    found = json.loads(source)
    pairs = tuple((str(name), str(value)) for name, value in terms)
    return Setup(what, pairs, None if found is None else (found[0], found[1]))


def disagreement(group: str, rank: int, told: Sequence[bytes], sources: Sequence[bytes]) -> AgreementError:
    """What rank `rank` raises: its own side beside that of the first rank that differs from it. `told` and `sources`
    are what all ranks packed; without sources the error does with less.
    """
    everyone = [_unpacked(*both) for both in zip(told, sources or (b"null",) * len(told), strict=True)]
    mine = everyone[rank]
    other = next(one for one, theirs in enumerate(everyone) if theirs != mine)
    theirs = everyone[other]
    here, there = f"rank {rank}", f"rank {other}"
    if mine.what != theirs.what:
        return AgreementError(
            f"{there} of group `{group}` sets up {theirs.what} where {here} sets up {mine.what}: all ranks of a group "
            "set up the same, in the same order"
        )
    known = dict(theirs.terms)
    differs = [(name, known.get(name, "none"), value) for name, value in mine.terms if known.get(name) != value]
    words = [f"{name}: {far} on {there}, {near} on {here}" for name, far, near in differs if name != KERNEL]
    if any(name == KERNEL for name, _, _ in differs):
        found = _texts(mine.source, theirs.source, here, there)
        words = [found] if found else words or [f"the kernels differ: {there} runs another version of commdsl"]
    return AgreementError(f"ranks {other} and {rank} of group `{group}` set up another {mine.what}: {'; '.join(words)}")


def _texts(mine: tuple[str, str] | None, theirs: tuple[str, str] | None, here: str, there: str) -> str:
    """The first line in which two texts differ, with the name of each; nothing where they are the same."""
    if mine is None or theirs is None or mine[1] == theirs[1]:
        return ""
    lines = zip_longest(theirs[1].splitlines(), mine[1].splitlines())
    number, (far, near) = next((number, both) for number, both in enumerate(lines, 1) if both[0] != both[1])
    sides = (
        f"{name}:{number} on {rank} {_line(text)}"
        for name, rank, text in (
            (theirs[0], there, far),
            (mine[0], here, near),
        )
    )
    return f"the texts differ: {', '.join(sides)}"


def _line(text: str | None) -> str:
    return "has ended" if text is None else f"says `{text.strip()}`"
