"""Turns a user's own schedules into what `commdsl tune` measures beside the shipped ones, by collective.

Assumes that `ensure` says which collective a schedule is. Does not prove it; the measurement loads it, and does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from commdsl import compiler
from commdsl.commands.arguments import Place, UsageError
from commdsl.commands.jobs import read
from commdsl.language.syntax import Ensure, NamedContract, ScheduleDecl
from commdsl.machine import resources
from commdsl.planner.tuning.search_space import Family
from commdsl.planner.tuning.selection import Params

Families: TypeAlias = tuple[tuple[str, Family], ...]
"""Each with its collective."""

CONTRACTS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}


def families_of(places: Iterable[Place], params: Params) -> Families:
    """The schedules of files, or those named, in every protocol. Raises UsageError for what is no collective."""
    return tuple(family for place in places for family in _families(place, params))


def _families(place: Place, params: Params) -> Families:
    files = read(place.path)
    if place.name is not None:
        compiler.choose_kind(files, place.name, ScheduleDecl)
    decls = [decl for decl in compiler.declared(files, ScheduleDecl) if place.name in (None, decl.name.text)]
    if not decls:
        raise UsageError(f"{place.path} declares no schedule")
    return tuple((collective_of(decl), Family(_place_text(place, decl), params=(params,))) for decl in decls)


def collective_of(decl: ScheduleDecl) -> str:
    """`all_reduce` of what ensures an allreduce."""
    ensured = [item.contract for item in decl.body if isinstance(item, Ensure)]
    names = [contract.name.text for contract in ensured if isinstance(contract, NamedContract)]
    if len(ensured) != 1 or not names or names[0] not in CONTRACTS:
        raise UsageError(f"`{decl.name.text}` cannot be tuned: it does not ensure one of {', '.join(CONTRACTS)}")
    return CONTRACTS[names[0]]


def _place_text(place: Place, decl: ScheduleDecl) -> str:
    """What `commdsl.load` takes: a shipped name, or the file and the schedule in it."""
    return place.path.stem if resources.shipped_name(place.path) else f"{place.path}:{decl.name.text}"
