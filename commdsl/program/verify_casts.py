"""What is legal of moves that round what travels: where an operand may be in which form.

Assumes tables of the shape that `verify` asks for. Does not follow what is in a cell: `proof.computes` does.
"""

from __future__ import annotations

import numpy as np

from commdsl.ir.dispatches import STRETCHES
from commdsl.program.legal import each, law, within
from commdsl.program.moves import CELL, Form, Moves, OpKind


def verify_casts(moves: Moves) -> None:
    """What travels in another element type is in cells alone; what is copied is not rounded where it is read."""
    casts, ops = moves.casts, moves.ops
    if casts is None:
        return
    law(casts.cast.stretch in (0, *STRETCHES), f"a warp cannot share out {casts.cast.stretch} elements with one scale")
    law(casts.cast.element in ("float8", "bfloat16", "float16"), f"nothing travels as {casts.cast.element}")
    law((casts.cast.element == "float8") == (casts.cast.stretch > 0), "float8 has scales, and nothing else")
    law(moves.carrier.rounds, f"`{moves.carrier.name}` rounds nothing on its way")
    law(not moves.lands and not moves.adds_up, "what is rounded on its way lands in its place, or is added to sums")
    law(moves.tile_bytes % moves.unit == 0, f"tile_bytes is {moves.tile_bytes}, expected a multiple of {moves.unit}")
    for what, forms, spaces in (
        ("destination", casts.dest, ops.dest_space),
        ("source", casts.source, ops.source_space),
    ):
        law(forms.dtype == np.int32 and forms.shape == spaces.shape, f"not every {what} has a form")
        within(forms, len(Form), what, "its form is a Form,")
        each((forms != Form.CAST) | (spaces == CELL), what, "it travels in another element type in cells alone")
    copied = np.repeat(ops.kind, np.diff(ops.source_begin)) == OpKind.COPY
    each(~copied | (casts.source != Form.ROUNDED), "source", "what is copied is rounded where it is stored")
