"""Turns what each rank of a group is about to set up into nothing, or into one AgreementError that shows both sides.

Assumes that every rank hears what every rank said, so that all come to the same end. Does not exchange anything itself
(`bootstrap` does), and does not set up anything: when ranks do not agree, nothing was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest

from commdsl.build.emit import Emitted
from commdsl.program.plan import Plan
from commdsl.runtime.errors import AgreementError

KERNEL = "kernel"
"""The term that says nothing to a reader: it is shown only where nothing else differs."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a rank is about to set up: the same on every rank, term by term. `source`: name and text of the file behind
    it, by which a difference is shown and nothing is judged. `calls`: how many calls the rank has started before.
    """

    what: str
    terms: tuple[tuple[str, str], ...]
    source: tuple[str, str] | None = field(default=None, compare=False)
    calls: int = 0

    @property
    def detail(self) -> str:
        """The file and the digest of the kernel, where there are some."""
        digest = dict(self.terms).get(KERNEL, "")[:8]
        return "" if self.source is None else f"{self.source[0]}, digest {digest}"

    def pack(self) -> bytes:
        name = None if self.source is None else self.source[0]
        return json.dumps({"what": self.what, "terms": self.terms, "file": name, "calls": self.calls}).encode()

    def pack_source(self) -> bytes:
        return json.dumps(self.source).encode()


@dataclass(frozen=True, slots=True)
class Raised:
    """A call that a rank did not start, and why. `differs`: because ranks do not agree."""

    what: str
    why: str
    calls: int
    differs: bool

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()


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


def unpacked(packed: bytes) -> Setup | Raised:
    """Return what a rank packed; of the file behind a set-up its name alone."""
    found = json.loads(packed)
    if "why" in found:
        return Raised(**found)
    pairs = tuple((str(name), str(value)) for name, value in found["terms"])
    source = None if found["file"] is None else (str(found["file"]), "")
    return Setup(found["what"], pairs, source, found["calls"])


def disagreement(group: str, rank: int, mine: Setup, other: int, theirs: Setup, text: bytes) -> AgreementError:
    """Return what rank `rank` raises: its own side and that of rank `other`, which differs from it. `text`: what that
    rank packed of its source; empty, where it did not say that, and the error does with less.
    """
    here, there = f"rank {rank}", f"rank {other}"
    if mine.what != theirs.what:
        return AgreementError(
            f"{there} of group `{group}` sets up {theirs.what} where {here} sets up {mine.what}: all ranks of a group "
            "set up the same, in the same order"
        )
    if mine.calls != theirs.calls:
        return AgreementError(
            f"{there} of group `{group}` sets up {theirs.what} after {theirs.calls} calls, {here} after {mine.calls}: "
            "all ranks of a group make the same calls, in the same order"
        )
    known = dict(theirs.terms)
    differs = [(name, known.get(name, "none"), value) for name, value in mine.terms if known.get(name) != value]
    words = [f"{name}: {far} on {there}, {near} on {here}" for name, far, near in differs if name != KERNEL]
    if any(name == KERNEL for name, _, _ in differs):
        found = _texts(mine.source, json.loads(text or b"null"), here, there)
        sides = f"{there} has {theirs.detail}, {here} has {mine.detail}"
        words = [found, sides] if found else words or [f"{sides}, of two versions of a file or of commdsl"]
    return AgreementError(f"ranks {other} and {rank} of group `{group}` set up another {mine.what}: {'; '.join(words)}")


def _texts(mine: Sequence[str] | None, theirs: Sequence[str] | None, here: str, there: str) -> str:
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
