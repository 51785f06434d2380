"""Turns the shipped files into a list: what each declares, in the words it opens with, and for which ranks.

Assumes one declaration a file, under the file's name. Does not prove: `where` is held against the ranks up to 40.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TypeAlias, assert_never

from commdsl import compiler
from commdsl.commands import output
from commdsl.commands.jobs import read
from commdsl.commands.output import Exit
from commdsl.ir import resolve
from commdsl.language.diagnostics import CommError
from commdsl.language.records import dataclass
from commdsl.language.syntax import DispatchDecl, File, PlanDecl, ScheduleDecl, TopologyDecl
from commdsl.machine import resources
from commdsl.machine.topology import Topology, switch

Listed: TypeAlias = ScheduleDecl | DispatchDecl | PlanDecl | TopologyDecl

TRIED = range(2, 41)
GPUS = 4
"""Of the nodes on which a schedule is tried that may ask for whole ones."""

FEW = 3
"""So many numbers of ranks that are left out are named; beyond, those that are admitted."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One shipped declaration."""

    path: Path
    kind: str
    name: str
    params: tuple[str, ...]  # `root = 0`
    ranks: str
    about: str


def list_shipped(*, as_json: bool) -> Exit:
    """One line for each, under the folder it lies in."""
    found = tuple(entry(path) for path in resources.shipped_files())
    if as_json:
        output.say_json([to_json(one) for one in found])
        return Exit.FINE
    name_width = max(len(one.name) for one in found)
    ranks_width = max(len(one.ranks) for one in found)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for folder, entries in groupby(found, key=lambda one: one.path.parent.name):
        output.say(output.style(folder, "strong"), styled=True)
        for one in entries:
            head = f"  {one.name:<{name_width}}  {one.ranks:<{ranks_width}}  "
            room = None if columns is None else max(columns - len(head), 20)
            output.say(output.style(head, "accent") + cut(one.about, room), styled=True)
    output.say()
    output.say("Each runs by its name: commdsl run allreduce_ring --ranks 4; --on takes a topology; --json says more.")
    return Exit.FINE


def cut(text: str, room: int | None) -> str:
    return text if room is None or len(text) <= room else text[: room - 1] + "…"


def entry(path: Path) -> Entry:
    """What a file declares first."""
    files = read(path)
    decl = next(item for item in files[0].items if isinstance(item, Listed))
    declared = decl.params if isinstance(decl, ScheduleDecl | DispatchDecl) else ()
    params = tuple(param.span.text for param in declared)
    kind = "topology" if isinstance(decl, TopologyDecl) else compiler.KINDS[type(decl)]
    return Entry(path, kind, decl.name.text, params, ranks_text(files, decl), about(files[0]))


def about(file: File) -> str:
    """The first sentence of the comment that a text opens with."""
    lines: list[str] = []
    for line in file.source.text.split("\n"):
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return re.split(r"(?<=\.)\s+(?=[A-Z0-9]|\w+\()", " ".join(lines), maxsplit=1)[0].rstrip(".")


def ranks_text(files: tuple[File, ...], decl: Listed) -> str:
    """For which ranks, in few words."""
    match decl:
        case ScheduleDecl():
            return admitted(files, decl)
        case DispatchDecl():
            most = max(ranks for ranks in TRIED if resolves(files, decl, ranks))
            return "any" if most == TRIED[-1] else f"up to {most}"
        case PlanDecl(ranks=ranks):
            return str(ranks.value)
        case TopologyDecl(name=name):
            machine = resolve.topologies(files)[name.text]
            return f"{machine.num_nodes} x {machine.gpus_per_node}"
        case _:
            assert_never(decl)


def resolves(files: tuple[File, ...], decl: DispatchDecl, ranks: int) -> bool:
    try:
        resolve.dispatch(files, decl, ranks, switch(ranks))
    except CommError:
        return False
    return True


def admitted(files: tuple[File, ...], decl: ScheduleDecl) -> str:
    """`any`, `any but 4, 6`, `powers of 2`, `whole nodes`: by what `where` says of 2 ranks to 40, on a switch and on
    nodes of four."""
    found = [ranks for ranks in TRIED if resolve.admits(files, decl, ranks, switch(ranks))]
    nodes = [ranks for ranks in TRIED if resolve.admits(files, decl, ranks, Topology("nodes", len(TRIED), GPUS, 1, ()))]
    if nodes != found and nodes == [ranks for ranks in TRIED if ranks % GPUS == 0]:
        return "whole nodes"
    left_out = [ranks for ranks in TRIED if ranks not in found]
    if not left_out:
        return "any"
    if len(left_out) <= FEW:
        return f"any but {', '.join(map(str, left_out))}"
    if found == [ranks for ranks in TRIED if ranks & (ranks - 1) == 0]:
        return "powers of 2"
    return ", ".join(_shown(found))


def _shown(numbers: list[int]) -> Iterator[str]:
    yield from map(str, numbers[: 2 * FEW])
    if len(numbers) > 2 * FEW:
        yield "..."


def to_json(one: Entry) -> dict[str, object]:
    group, shown = one.path.parent.name, resources.shipped_name(one.path)
    return {"name": one.name, "kind": one.kind, "group": group, "parameters": list(one.params), "ranks": one.ranks,
            "about": one.about, "file": shown}  # fmt: skip
