"""Turns a Plan into the arguments of its kernel: one struct, which the template prints and the runtime packs.

Assumes what is launched was proved. Does not know addresses: `pack` takes them, as the process that launches sees them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from commdsl.ir.lengths import num_places
from commdsl.language.diagnostics import InternalError
from commdsl.program.by_row import ByRow
from commdsl.program.memory import Transport
from commdsl.program.moves import Moves
from commdsl.program.phases import Field
from commdsl.program.plan import Plan
from commdsl.program.sizes import first_blocks


@dataclass(frozen=True)
class Arguments:
    """The struct of a Plan: what all kernels have, then what each kind of phase takes; 64-bit words first."""

    fields: tuple[Field, ...]

    @cached_property
    def format(self) -> struct.Struct:
        packed = _packed(self.fields)
        return struct.Struct(f"{packed.format}{-packed.size % 8}x")  # as a struct with 64-bit words ends

    @property
    def size(self) -> int:
        return self.format.size

    @property
    def address_words(self) -> tuple[int, ...]:
        """Which 64-bit words are addresses."""
        found: list[int] = []
        for field in self.fields:
            first = self.offset(field.name) // 8
            found += range(first, first + field.width) if field.is_address else ()
        return tuple(found)

    def offset(self, name: str) -> int:
        """Where a field begins, in bytes."""
        return _packed(self.fields[: self._place(name)]).size

    def _place(self, name: str) -> int:
        for place, field in enumerate(self.fields):
            if field.name == name:
                return place
        raise InternalError(f"the kernel has no argument `{name}`")

    def pack(self, values: Mapping[str, int | Sequence[int]]) -> bytes:
        """The bytes of the struct; an array that is given short is filled up with zeros."""
        words: list[int] = []
        for field in self.fields:
            value = values[field.name]
            given = [value] if isinstance(value, int) else [*value]
            words += given + [0] * (field.width - len(given))
        return self.format.pack(*words)

    def stretch(self, first: str, last: str) -> struct.Struct:
        """The fields from one to another, both included."""
        return _packed(self.fields[self._place(first) : self._place(last) + 1])


def _packed(fields: tuple[Field, ...]) -> struct.Struct:
    """Members one after another, without gaps: words come first."""
    return struct.Struct("<" + "".join(f"{field.width}{'i' if field.type == 'i32' else 'Q'}" for field in fields))


FAR = 1 << 63
"""In the address of a rank's heap: plain loads and stores do not reach it (types.cuh)."""


def heaps(addresses: Sequence[int], nodes: Sequence[int], rank: int) -> tuple[int, ...]:
    """The argument `heap` of one rank: every rank's, with a mark on those of other nodes. `nodes`: by rank."""
    return tuple(
        address if node == nodes[rank] else address | FAR for address, node in zip(addresses, nodes, strict=True)
    )


def arguments(plan: Plan) -> Arguments:
    """What every launch of the Plan's lanes takes."""
    far = [Field("pe", plan.num_ranks)] if plan.transport is Transport.NVSHMEM else []  # by rank its number in NVSHMEM
    words = [
        Field("heap", plan.num_ranks, is_address=True),
        *far,
        Field("timeout_ns"),
        Field("error", is_address=True),
        Field("desk", plan.num_ranks, is_address=True),  # of every rank, as `heap`
        Field("notice", is_address=True),
        *([Field("stamps", is_address=True)] if plan.stamped else []),  # intervals, as `stamps` has them
    ]
    numbers = [Field("rank", type="i32"), Field("active_lanes", type="i32")]
    for phase in plan.comm.phases:
        match phase:
            case Moves():
                if phase.lands:  # of every rank, as `heap`: from there its tensors that land are as far on all
                    words.append(Field("landing", plan.num_ranks, is_address=True))
                words += [
                    Field("tensors", max(len(phase.tensors), 1), is_address=True),
                    Field("block_bytes"),
                    Field("share_bytes"),  # the most a lane owns of a chunk
                    Field("stagger_bytes"),  # by how much less each of four lanes moves first than the one before
                    *_lengths(phase),
                ]
                numbers.append(Field("rounds", type="i32"))
            case ByRow():
                words.append(Field("row_bytes"))
            case _:
                pass
    words += (field for phase in plan.comm.routed for field in phase.arguments(plan.transport))
    if plan.halves is not None:
        numbers.insert(1, Field("half", type="i32"))  # 0: the call is one launch; 1, 2: the first, the second of two
    words.append(Field("digest"))  # of all that is the same on every rank, in 32 bits
    return Arguments((*words, *numbers))


def _lengths(phase: Moves) -> tuple[Field, ...]:
    """In bytes, where blocks have lengths of their own: those that the rank knows, and where its blocks begin."""
    if phase.lengths is None:
        return ()
    known = num_places(phase.num_ranks, len(phase.lengths.axes))
    return Field("lengths", known), Field("begins", int(first_blocks(phase)[-1]))
