"""Turns the launches of a Plan with visits into what starts them: a Program for each, its flags for each turn.

Assumes tensors that were checked. Does not start anything, nor say what waits for what (`visits` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from commdsl.ir.classes import Unit
from commdsl.program.launches import Launch
from commdsl.program.memory import Kept
from commdsl.program.moves import Moves
from commdsl.program.visited import launches, moved, turns
from commdsl.runtime import tensors
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.errors import ReductionError
from commdsl.runtime.program import Port, Program, Visits
from commdsl.runtime.workspace import Start

Made: TypeAlias = tuple[Moves, Unit]
"""What a launch is besides the copies that it is on: tables, and what the blocks are made of."""


def check_reductions(name: str, visits: Visits, inputs: Sequence[torch.Tensor], op: str) -> None:
    """Refuses what no launch can reduce, or has not to."""
    if op == "avg" and visits.signature.has_reduction:
        raise ReductionError(f"`{name}` with visits does not average: take the sum and divide it")
    if op != "sum" and not visits.signature.has_reduction:
        tensors.check_reduction(name, visits.signature, inputs[0].dtype, op)
    for launch in launches(visits.plan) if visits.signature.combines else ():
        if launch.moves.has_reduction:
            dtype = tensors.dtype_of(visits.signature, port_of(launch.moved), inputs)
            tensors.check_reduction(name, visits.signature, dtype, op)
            if launch.moves.adds_up and not dtype.is_floating_point:
                raise ReductionError(f"`{name}` adds `{launch.moved.name}`, which is {dtype}, to sums in float32")


def travelling(visits: Visits, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs that are moved, and so have to be alike on all ranks; of the others each rank has its own."""
    names = moved(visits.plan)
    return [one for port, one in zip(visits.signature.inputs, inputs, strict=True) if port.name in names]


def rows_that_travel(visits: Visits, inputs: Sequence[torch.Tensor]) -> str:
    """How long they are, in words: as many bytes may be fewer rows, which are longer."""
    ports = [*dict.fromkeys(port_of(launch.moved) for launch in launches(visits.plan))]
    types = (tensors.dtype_of(visits.signature, port, inputs) for port in ports)
    shapes = tensors.shapes(visits.signature, inputs, ports)
    lengths = {shape[-1] * dtype.itemsize for shape, dtype in zip(shapes, types, strict=True)}
    return f"in rows of {' and '.join(map(str, sorted(lengths)))} bytes"


def prepared(
    communicator: Communicator,
    visits: Visits,
    inputs: Sequence[torch.Tensor],
    op: str,
    seconds: float | None,
    about: str = "",
) -> dict[Made, tuple[Start, ...]]:
    """What starts launches, on blocks and of the dtype that their buffers have: those of the same moves take turns, as
    one may begin before another ends. Collective the first time.
    """
    signature, known = visits.signature, programs(visits)
    starts: dict[Made, tuple[Start, ...]] = {}
    of = tuple(zip(launches(visits.plan), turns(visits.plan), strict=True))
    for made, port in {made_of(launch): port_of(launch.moved) for launch, _ in of}.items():
        dtype = tensors.dtype_of(signature, port, inputs)
        block_bytes = tensors.block_elements(signature, port, inputs) * dtype.itemsize
        element = tensors.element_name(dtype)
        last = max(turn for launch, turn in of if made_of(launch) == made)
        starts[made] = tuple(
            communicator.prepare(one, block_bytes, element, op, seconds, about, 0) for one in known[made[0]][: last + 1]
        )
    return starts


def programs(visits: Visits) -> dict[Moves, tuple[Program, ...]]:
    """What is launched, by moves: the same for every turn that those have, with flags of its own."""
    last = dict[Moves, int]()
    for launch, turn in zip(launches(visits.plan), turns(visits.plan), strict=True):
        last[launch.moves] = max(turn, last.get(launch.moves, 0))
    found = {one.plan.moves: one for one in visits.launched}
    return {moves: tuple(_with_flags(found[moves], turn) for turn in range(1 + last[moves])) for moves in last}


def _with_flags(known: Program, turn: int) -> Program:
    """What ranks set up together goes by what a text is known as."""
    emitted = known.emitted if turn == 0 else replace(known.emitted, identity=f"{known.emitted.identity}/{turn}")
    return replace(known, emitted=emitted)


def made_of(launch: Launch) -> Made:
    return launch.moves, launch.moved.unit


def port_of(kept: Kept) -> Port:
    return Port(kept.name, kept.blocks, 0, kept.unit)
