"""Turns `ensure rotation(...)` into which buffers rotate together, and which rank is handed which piece of whom.

Assumes `names` found nothing wrong. Does not look at the yields; `checks.rotations` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.contracts import Contract, Rotation
from commdsl.ir.resolve.evaluate import Cycle, Scope
from commdsl.ir.resolve.rows import Binding
from commdsl.ir.schedules import Buffer
from commdsl.language import syntax as syn
from commdsl.language.kinds import GIVEN, RETURNED, BufferKind

HANDED = (BufferKind.SCRATCH, *RETURNED)
"""What counts is what the caller is handed, so pieces may visit in a scratch buffer."""


def rotating_names(contract: syn.RotationContract) -> tuple[syn.Name, ...]:
    """Every buffer that a rotation names, as written."""
    handed = (name for one in contract.buffers for name in (one.source, one.dest) if name is not None)
    return (*handed, *contract.back)


def rotation(contract: syn.RotationContract, binding: Binding, scope: Scope) -> Contract:
    """C105 where the buffers do not fit each other, or the condition does not fit them."""
    _check_kinds(contract, binding)
    names = list(binding.buffers)
    sources = [binding.buffers[one.source.text] for one in contract.buffers]
    dests = [binding.buffers[(one.dest or one.source).text] for one in contract.buffers]
    back = [binding.buffers[name.text] for name in contract.back]
    binding.budget.spend(sources[0].num_chunks, binding.num_ranks**2, "pieces for all ranks to see", contract.span)
    _check_shapes(contract, binding, sources, dests, back)
    visits = None if contract.condition is None else _visits(contract.condition, binding, scope, sources[0])
    number = {name: at for at, name in enumerate(names)}
    meant = Rotation(
        tuple(number[one.name] for one in sources),
        tuple(number[one.name] for one in dests),
        visits,
        tuple(number[one.name] for one in back),
    )
    none = np.zeros(0, np.int32)
    return Contract(
        name="rotation", source_buffer=meant.sources[0], dest_buffer=meant.dests[0], operation=None,
        dest_rank=none, dest_chunk=none, value=none, source_rank=none[:, None], source_chunk=none[:, None],
        root=None, span=contract.span, rotation=meant,
    )  # fmt: skip


def _check_kinds(contract: syn.RotationContract, binding: Binding) -> None:
    for name, kinds, headline in (
        *((one.source, GIVEN, "what rotates is given by the caller") for one in contract.buffers),
        *((one.dest, HANDED, "what visits is not what the caller gives") for one in contract.buffers if one.dest),
        *((name, RETURNED, "the result of a contract goes to the caller") for name in contract.back),
    ):
        binding.check_kind(name, kinds, headline)
    seen = set[str]()
    for name in rotating_names(contract):
        if name.text in seen:
            binding.faults.fail("C105", "a rotation names each buffer once", name.span, "a second time here")
        seen.add(name.text)


def _check_shapes(
    contract: syn.RotationContract,
    binding: Binding,
    sources: Sequence[Buffer],
    dests: Sequence[Buffer],
    back: Sequence[Buffer],
) -> None:
    for one in (*sources[1:], *back):
        if one.dims != sources[0].dims or one.blocks != sources[0].blocks:
            label = f"{_shape(one)}, {_shape(sources[0])}"
            binding.faults.fail("C105", "what rotates together is cut alike", contract.span, label)
    for one in dests[1:]:
        if one.num_chunks != dests[0].num_chunks:
            label = f"{_shape(one)}, {_shape(dests[0])}"
            binding.faults.fail("C105", "what rotates together is handed over alike", contract.span, label)
    if back and len(back) != len(sources):
        label = f"{len(sources)} rotate, {len(back)} come back"
        binding.faults.fail("C105", "one buffer comes back for each that rotates", contract.span, label)


def _visits(condition: syn.Condition, binding: Binding, scope: Scope, source: Buffer) -> NDArray[np.bool_] | None:
    """(num_ranks, num_ranks, num_chunks); None where it leaves nothing out."""
    names = condition.binders[2:]
    extents = source.dims[: len(names)]
    if len(names) > len(source.dims):
        label = f"{len(names)} indices, {_shape(source)}"
        binding.faults.fail("C105", "a rotation's condition has too many names", names[-1].span, label)
    rows = binding.rows(condition.binders, condition.where, scope)
    flat = np.zeros(rows.count, np.int64)
    for binder, extent in zip(names, extents, strict=True):
        value = rows.columns[binder.name.text]
        index = np.asarray(value.index if isinstance(value, Cycle) else value)
        outside = index[(index < 0) | (index >= extent)]
        if len(outside):
            what = f"`{binder.name.text}` is {int(outside[0])}, and {_shape(source)}"
            binding.faults.fail("C105", "a rotation's condition names a piece that is not there", binder.span, what)
        flat = flat * extent + index
    ranks = [np.asarray(rows.columns[binder.name.text]) for binder in condition.binders[:2]]
    named = np.zeros((binding.num_ranks, binding.num_ranks, prod(extents)), np.bool_)
    named[ranks[0], ranks[1], flat] = True
    if not named.any():
        what = "a rotation's condition holds for no piece"
        binding.faults.fail("C105", what, condition.span, "nothing is handed over")
    return None if named.all() else np.repeat(named, source.num_chunks // prod(extents), axis=2)


def _shape(buffer: Buffer) -> str:
    extents = " x ".join(map(str, buffer.dims)) or "one chunk"
    return f"`{buffer.name}` is {extents}"
