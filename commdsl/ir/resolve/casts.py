"""Turns `as float8 by 128` and `rounded(float8, 2)` into what travels in which element type, rounded how often.

Assumes nothing of where it stands: moves of a schedule, or rows of a dispatch. Does not know whether a kernel can.
"""

from __future__ import annotations

from commdsl.ir.contracts import Rounding
from commdsl.ir.dispatches import STRETCHES
from commdsl.ir.resolve.evaluate import Evaluator, Scope
from commdsl.ir.resolve.expressions import ExpressionRules, Kind
from commdsl.ir.resolve.faults import Faults, Poisoned
from commdsl.ir.schedules import Cast
from commdsl.language import syntax as syn

OF_MOVES = ("float8", "bfloat16", "float16")
"""Element types that a move may round to."""


def check_cast(rules: ExpressionRules, cast: syn.Cast, known: tuple[str, ...], what: str) -> None:
    """C123: nothing is called so, or what has scales does not say of how many elements."""
    element = cast.element.text
    if element not in known:
        rules.faults.report("C123", f"{what} do not travel as `{element}`", cast.element.span, "not known",
                            help=f"write `as {known[0]} by 128`: float8_e4m3fn, a float32 scale a stretch")  # fmt: skip
    elif element == "float8" and cast.stretch is None:
        rules.faults.report("C123", "float8 has scales", cast.span, "each for how many elements?",
                            help="write `as float8 by 128`")  # fmt: skip
    elif element != "float8" and cast.stretch is not None:
        rules.faults.report("C123", f"{element} has no scales", cast.stretch.span, "of what?",
                            help="leave out `by`")  # fmt: skip
    if cast.stretch is not None:
        rules.expect(cast.stretch, Kind.NUMBER)


def stretch_of(cast: syn.Cast, evaluator: Evaluator, scope: Scope, faults: Faults) -> int:
    """Elements with one scale, which a warp can share out; 0 for none. Raises Poisoned after a fault, C509."""
    if cast.stretch is None:
        return 0
    law = f"one scale is for {', '.join(map(str, STRETCHES[:-1]))} or {STRETCHES[-1]} elements"
    try:
        found = evaluator.constant(cast.stretch, scope)
    except Poisoned:
        faults.fail("C509", law, cast.stretch.span, "this is not one number")
    if found not in STRETCHES:
        faults.fail("C509", law, cast.stretch.span, f"this is {found}")
    return found


def cast_of(cast: syn.Cast, evaluator: Evaluator, scope: Scope, faults: Faults) -> Cast:
    """Of a move."""
    return Cast(cast.element.text, stretch_of(cast, evaluator, scope, faults))


def rounding_of(rounding: syn.Rounding | None, evaluator: Evaluator, scope: Scope, faults: Faults) -> Rounding | None:
    """Of a contract. C509: it is rounded at all."""
    if rounding is None:
        return None
    times = evaluator.constant(rounding.times, scope)
    if times < 1:
        faults.fail("C509", "what is rounded is so at least once", rounding.times.span, f"this is {times}")
    return Rounding(times, rounding.element.text)
