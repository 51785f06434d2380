"""Turns the name of a schedule into the ops of its two ways, there and back, on a group.

Assumes that the way back of `x` is the schedule `x_backward`: in the same file, or beside it, or shipped. Does not
choose a schedule. Nothing is loaded before it is needed: who wants no gradient compiles no way back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from commdsl import compiler
from commdsl.attention.masks import Mask
from commdsl.attention.merge import wide
from commdsl.attention.placement import Placement
from commdsl.attention.planned import Rotation
from commdsl.ir.held import Held
from commdsl.language.syntax import BufferDecl, ScheduleDecl
from commdsl.machine import resources
from commdsl.machine.errors import ArgumentError, NotFoundError
from commdsl.machine.resources import SUFFIX
from commdsl.runtime.errors import GradientError
from commdsl.runtime.load import find, load
from commdsl.runtime.streams import OneStream
from commdsl.runtime.timing import Timing

PREFIX = "attention_"
BACK = "_backward"
ZIGZAG = "zigzag"
REACH = ("B", "A")
"""Parameters of windows: how many halves before its own, and after, a half of rows attends to."""
NO_TUNING: Mapping[str, int | str] = MappingProxyType({})
_PARAM = re.compile(r"\s+(\w+)=(-?\d+)$")


@dataclass(frozen=True, slots=True)
class Way:
    """A schedule as a call names it: a shipped one, or a file and maybe a name in it; parameters that it said, and what
    stands in place of the tuning of the way there and of the way back.
    """

    place: str
    params: tuple[tuple[str, int], ...]
    tune: Mapping[str, int | str]
    tune_back: Mapping[str, int | str]

    @property
    def is_shipped(self) -> bool:
        return not resources.split_place(self.place)[0].endswith(SUFFIX)


def read(text: str, tune: Mapping[str, int | str] = NO_TUNING, tune_back: Mapping[str, int | str] = NO_TUNING) -> Way:
    """`ring`, `attention_ring`, `hamilton K=3` or `mine.comm:name`, as written by hand or by a choice."""
    place, params = text.strip(), list[tuple[str, int]]()
    while (found := _PARAM.search(place)) is not None:
        place = place[: found.start()]
        params.append((found[1], int(found[2])))
    return Way(shipped(place) or place, tuple(sorted(params)), tune, tune_back)


def fitted(way: Way, mask: Mask, placement: Placement) -> Way:
    """With the parameters that it did not say and that follow from the mask: of shipped schedules, what is sent."""
    if not way.is_shipped:
        return way
    causal = int(mask.right == 0 and placement.name == ZIGZAG)
    reach = map(placement.reach, (mask.left, mask.right))
    follow = {"causal": causal, **dict(zip(REACH, reach, strict=True))}
    known = {param.name.text for param in declared(way.place).params}
    said = {**{name: value for name, value in follow.items() if name in known}, **dict(way.params)}
    return replace(way, params=tuple(sorted(said.items())))


def shipped(name: str) -> str | None:
    """The whole name of a shipped schedule, also without the `attention_` that all of them begin with."""
    return next((one for one in (PREFIX + name, name) if resources.shipped_file(one) is not None), None)


@lru_cache(maxsize=64)
def declared(place: str) -> ScheduleDecl:
    """A schedule as it is written. Raises NotFoundError, CommError."""
    file, name = resources.split_place(place)
    return compiler.choose_kind(compiler.read(find(file)), name, ScheduleDecl)


def blocks_of_heads(text: str, ranks: int) -> int:
    """How many ranks share the heads, where a schedule takes queries to exchange heads for rows; 0 of all others."""
    way = read(text)
    if ranks == 1 or not any(isinstance(one, BufferDecl) and one.name.text == "q" for one in declared(way.place).body):
        return 0
    op = load(way.place, params=dict(way.params), ranks=ranks)
    return next(port.blocks for port in op.program(ranks).signature.inputs if port.name == "q")


def ops(way: Way, ranks: int) -> tuple[Rotation, Callable[[], Rotation]]:
    """The op of the way there, and what loads the way back. Raises NotFoundError, CommError."""
    there = load(way.place, params=dict(way.params), ranks=ranks, tune=way.tune)

    def back() -> Rotation:
        place = _back(way, there.program(ranks).plan.name)
        known = {param.name.text for param in declared(place).params}
        params = {name: value for name, value in way.params if name in known}
        return load(place, params=params, ranks=ranks, tune=way.tune_back)

    return there, lru_cache(maxsize=1)(back)


def _back(way: Way, name: str) -> str:
    """Where the way back stands."""
    if way.is_shipped:
        if resources.shipped_file(way.place + BACK) is None:
            raise GradientError(f"there is no shipped schedule `{way.place + BACK}`: call it under torch.no_grad()")
        return way.place + BACK
    file = Path(resources.split_place(way.place)[0])
    beside = file.with_name(file.name.removesuffix(SUFFIX) + BACK + SUFFIX)
    for one in (file, beside):
        if one.is_file() and name + BACK in names(one):
            return f"{one}:{name + BACK}"
    raise GradientError(
        f"`{name}` has no way back: write the schedule `{name + BACK}` in {file} or in {beside}, or call it under "
        "torch.no_grad()"
    )


def names(file: Path) -> list[str]:
    """The schedules of a file."""
    return [decl.name.text for decl in compiler.declared(compiler.read(file), ScheduleDecl)]


@dataclass(eq=False)
class Alone:
    """What stands for an op on a group of one rank: its own keys and values visit it, and nothing travels."""

    is_back: bool = False
    name: str = "attention_alone"
    shown: str = "attention_alone"
    input_names: tuple[str, ...] = ("k", "v")

    def lands(self, group: Any = None) -> bool:
        return False

    def held(self, group: Any = None) -> tuple[Held, ...]:
        origin = np.array([[[0, 0], [0, 1]]], np.int32)
        return (Held("attend", ("k", "v"), (origin, origin), ()),)

    def visit(self, *arguments: Any, group: Any = None, timing: Timing | None = None, **named: Any) -> Any:
        if not self.is_back:
            attend = named["attend"]
            if timing is not None:
                attend = timing.over(OneStream(), {None: attend}, [0])[1][None]
            return attend(0, *arguments)
        made = tuple(torch.empty_like(one, dtype=wide(one.dtype)) for one in arguments)
        named["attend"](0, *arguments, out=made)
        return made


ALONE, ALONE_BACK = Alone(), Alone(is_back=True)


def pair(way: Way, mask: Mask, placement: Placement) -> tuple[Rotation, Callable[[], Rotation]]:
    """The ops of both ways; on one rank nothing is loaded."""
    if placement.ranks == 1:
        return ALONE, lambda: ALONE_BACK
    try:
        return ops(fitted(way, mask, placement), placement.ranks)
    except NotFoundError as error:
        known = ", ".join(sorted(path.stem.removeprefix(PREFIX) for path in _shipped()))
        raise ArgumentError(f'`schedule` is "auto", {known}, or the path of a file: {error}') from error


def _shipped() -> list[Path]:
    return [path for path in resources.shipped_files() if path.stem.startswith(PREFIX) and not path.stem.endswith(BACK)]
