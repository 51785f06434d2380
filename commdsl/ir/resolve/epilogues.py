"""Turns what stands behind a product, `with bias b[q], gelu where A == 1`, into its epilogue.

Assumes a product of an `each`. Does not judge what becomes of results (`checks.epilogues`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from commdsl.ir.functions import ACTIVATIONS, PLAIN, Epilogue
from commdsl.ir.resolve.evaluate import Scope, free_names
from commdsl.ir.resolve.expressions import ExpressionRules, Kind
from commdsl.ir.resolve.faults import Faults, nearest
from commdsl.ir.resolve.rows import Binding
from commdsl.ir.schedules import Ints
from commdsl.language import syntax as syn
from commdsl.language.kinds import BufferKind

BIAS = "bias"

Chunk: TypeAlias = Callable[[syn.Ref], Ints]
"""The block that a reference means, for every row."""


def check_epilogue(rules: ExpressionRules, epilogue: tuple[syn.Ending, ...]) -> None:
    """What needs no numbers: C596 where there is no such ending, or it is said in another way."""
    for one in epilogue:
        if one.where is not None:
            rules.expect(one.where, Kind.CONDITION)
        if one.ref is not None:
            rules.ref(one.ref)
        name = one.name.text
        if name not in (BIAS, *ACTIVATIONS):
            _report(rules.faults, one, f"`{name}` is not known", nearest(name, (BIAS, *ACTIVATIONS)))
        elif (name == BIAS) != (one.ref is not None):
            help = "write `bias b`" if name == BIAS else f"write `{name}` alone"
            _report(rules.faults, one, "of which buffer?" if name == BIAS else "it takes no buffer", help)
        elif one.ref is not None and one.ref.place is not None:
            _report(rules.faults, one, "another rank's", "leave out `@`: a bias is the acting rank's own")


def epilogue_of(move: syn.Move, binding: Binding, outer: Scope, chunk: Chunk) -> Epilogue:
    """What is said where its conditions hold. Raises Poisoned after C596: more than a bias and then an activation, or a
    bias of other blocks than the factor's.
    """
    said = [one for one in move.epilogue if one.where is None or _holds(one.where, binding, outer)]
    names = [one.name.text for one in said]
    activations = [name for name in names if name in ACTIVATIONS]
    if names != [BIAS] * (BIAS in names) + activations[:1]:
        label = " and ".join(f"`{name}`" for name in names)
        binding.faults.fail("C596", "a bias is added, then one activation applied", move.span, label,
                            help="say each at most once, the bias first")  # fmt: skip
    if not said:
        return PLAIN
    activation = activations[0] if activations else None
    bias = said[0].ref
    return Epilogue(None if bias is None else _bias(move, bias, binding, chunk), activation)


def _bias(move: syn.Move, bias: syn.Ref, binding: Binding, chunk: Chunk) -> int:
    """The number of its buffer."""
    assert move.factor is not None
    binding.check_there(bias.buffer)
    buffer, factor = (binding.buffers[ref.buffer.text] for ref in (bias, move.factor))
    what = help = ""
    if buffer.kind is not BufferKind.INPUT:
        what, help = f"`{buffer.name}` is not an input", f"declare `input {buffer.name}`"
    elif buffer.dims and buffer.dims != factor.dims:
        what = f"`{buffer.declared}` beside `{factor.declared}`"
        help = f"a bias is one row, or has one for each block of the factor: declare it as `{factor.name}` is"
    elif buffer.dims and not _same_blocks(bias, move.factor, chunk):
        what, help = f"another block than that of `{factor.name}`", "give both the same indices"
    if what:
        binding.faults.fail("C596", "no kernel adds this bias", bias.span, what, help=help)
    return list(binding.buffers).index(buffer.name)


def _same_blocks(bias: syn.Ref, factor: syn.Ref, chunk: Chunk) -> bool:
    return len(bias.indices) == len(factor.indices) and np.array_equal(chunk(bias), chunk(factor))


def _holds(condition: syn.Expr, binding: Binding, outer: Scope) -> bool:
    """The same for all that act."""
    if unknown := sorted(free_names(condition) - outer.keys()):
        what = f"`{unknown[0]}` is not the same for all that act"
        binding.faults.fail("C596", "a product ends alike on all ranks", condition.span, what)
    return bool(binding.evaluator.constant(condition, outer))


def _report(faults: Faults, one: syn.Ending, label: str, help: str) -> None:
    faults.report("C596", "nothing that a product ends with", one.span, label, help=help)
