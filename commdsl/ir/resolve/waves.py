"""Turns steps that a `pipeline` puts side by side into one.

Assumes that each was within the budget. Does not ask whether they get in each other's way; `checks` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Statement, Step
from commdsl.language.source import Span


def at_once(steps: Sequence[Step], bindings: tuple[tuple[str, int], ...], span: Span) -> Step:
    """One step: all its reads come before all its writes. A statement that several steps share is one again."""
    alike = dict[tuple[object, ...], list[Statement]]()
    for one in (one for step in steps for one in step.moves):
        buffers = one.source_buffer, one.dest_buffer, one.factor
        key = one.span, one.is_list, one.source_rank.shape[1], buffers, one.operation, one.cast, one.epilogue
        alike.setdefault(key, []).append(one)
    return Step(tuple(_joined(some) for some in alike.values()), bindings, span)


def _joined(some: Sequence[Statement]) -> Statement:
    """Their rows by acting rank, as if one `each` had all of them."""
    if len(some) == 1:
        return some[0]
    order = np.argsort(np.concatenate([one.actor for one in some]), kind="stable")

    def rows(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(one, name) for one in some])[order]

    valid = [np.ones(one.source_rank.shape, bool) if one.source_valid is None else one.source_valid for one in some]
    is_whole = all(one.source_valid is None for one in some)
    return replace(
        some[0], actor=rows("actor"), source_rank=rows("source_rank"), source_chunk=rows("source_chunk"),
        source_valid=None if is_whole else np.concatenate(valid)[order], dest_rank=rows("dest_rank"),
        dest_chunk=rows("dest_chunk"), factor_chunk=None if some[0].factor is None else rows("factor_chunk"),
    )  # fmt: skip
