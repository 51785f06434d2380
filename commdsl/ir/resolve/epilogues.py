"""Turns what stands behind a product, `with bias b[q], gelu where A == 1, residual d[q]`, into its epilogue.

Of a contract, the endings of a term. Assumes names in sight. Does not judge what becomes of results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from commdsl.ir.functions import ACTIVATIONS, Epilogue
from commdsl.ir.resolve.evaluate import Scope, free_names
from commdsl.ir.resolve.expressions import ExpressionRules, Kind
from commdsl.ir.resolve.faults import Faults, nearest
from commdsl.ir.resolve.rows import Binding
from commdsl.ir.schedules import Ints
from commdsl.language import syntax as syn
from commdsl.language.kinds import BufferKind
from commdsl.language.source import Span

BIAS, RESIDUAL = "bias", "residual"
KNOWN = (BIAS, *ACTIVATIONS, RESIDUAL)

Chunk: TypeAlias = Callable[[syn.Ref], Ints]
"""The block that a reference means, for every row."""


def check_epilogue(rules: ExpressionRules, epilogue: tuple[syn.Ending, ...], *, afar: bool = False) -> None:
    """Report C596 where there is no such ending, or it is said in another way; `afar`: of any rank, as in contracts."""
    for one in epilogue:
        if one.where is not None:
            rules.expect(one.where, Kind.CONDITION)
        if one.ref is not None:
            rules.ref(one.ref)
        name = one.name.text
        if name not in KNOWN:
            _report(rules.faults, one, f"`{name}` is not known", nearest(name, KNOWN))
        elif (name in ACTIVATIONS) != (one.ref is None):
            is_alone = name in ACTIVATIONS
            help = f"write `{name}` alone" if is_alone else f"write `{name} b`"
            _report(rules.faults, one, "it takes no buffer" if is_alone else "of which buffer?", help)
        elif one.ref is not None and one.ref.place is not None and not afar:
            _report(rules.faults, one, "another rank's", f"leave out `@`: a {name} is the acting rank's own")


def epilogue_of(move: syn.Move, binding: Binding, outer: Scope, chunk: Chunk) -> Epilogue:
    """What is said where its conditions hold. Raises Poisoned after C596: more than a bias, then an activation, then a
    residual; a bias of other blocks than the factor's, a residual of others than the result's.
    """
    activation, refs = endings_that_hold(move.epilogue, move.span, binding, outer)
    assert move.factor is not None or not move.epilogue
    bias, residual = refs.get(BIAS), refs.get(RESIDUAL)
    return Epilogue(
        None if bias is None or move.factor is None else _given(bias, move.factor, binding, chunk, one_for_all=True),
        activation,
        None if residual is None else _given(residual, move.dest, binding, chunk, one_for_all=False),
    )


def endings_that_hold(
    epilogue: tuple[syn.Ending, ...], span: Span, binding: Binding, outer: Scope
) -> tuple[str | None, dict[str, syn.Ref]]:
    """Return the activation, and the references of a bias and a residual. Raises Poisoned after C596: another order."""
    said = [one for one in epilogue if one.where is None or _holds(one.where, binding, outer)]
    names = [one.name.text for one in said]
    activations = [name for name in names if name in ACTIVATIONS]
    if names != [BIAS] * (BIAS in names) + activations[:1] + [RESIDUAL] * (RESIDUAL in names):
        label = ", ".join(f"`{name}`" for name in names)
        binding.faults.fail("C596", "a bias, an activation and a residual follow, in this order", span, label,
                            help="say each at most once")  # fmt: skip
    return next(iter(activations), None), {one.name.text: one.ref for one in said if one.ref is not None}


def _given(ref: syn.Ref, like: syn.Ref, binding: Binding, chunk: Chunk, *, one_for_all: bool) -> int:
    """The number of the buffer that `ref` names, an input with the blocks of another, and the same one of them; or, of
    a bias, with one for all.
    """
    binding.check_there(ref.buffer)
    buffer, other = (binding.buffers[one.buffer.text] for one in (ref, like))
    what = help = ""
    if buffer.kind is not BufferKind.INPUT:
        what, help = f"`{buffer.name}` is not an input", f"declare `input {buffer.name}`"
    elif one_for_all and not buffer.dims:
        pass
    elif buffer.dims != other.dims or buffer.blocks != other.blocks:
        what, help = f"`{buffer.declared}` beside `{other.declared}`", f"declare it as `{other.name}` is"
        help += ", or as one row for all" if one_for_all else ""
    elif not _same_blocks(ref, like, chunk):
        what, help = f"another block than that of `{other.name}`", "give both the same indices"
    if what:
        binding.faults.fail("C596", "no kernel adds this to a product", ref.span, what, help=help)
    return list(binding.buffers).index(buffer.name)


def _same_blocks(ref: syn.Ref, like: syn.Ref, chunk: Chunk) -> bool:
    return len(ref.indices) == len(like.indices) and np.array_equal(chunk(ref), chunk(like))


def _holds(condition: syn.Expr, binding: Binding, outer: Scope) -> bool:
    """The same for all that act."""
    if unknown := sorted(free_names(condition) - outer.keys()):
        what = f"`{unknown[0]}` is not the same for all that act"
        binding.faults.fail("C596", "a product ends alike on all ranks", condition.span, what)
    return bool(binding.evaluator.constant(condition, outer))


def _report(faults: Faults, one: syn.Ending, label: str, help: str) -> None:
    faults.report("C596", "nothing that a product ends with", one.span, label, help=help)
