"""Turns a product, or rows, and a group into the op that makes results beside what travels, or none, where the plain
sequence is to run.

Assumes that every rank asks for a product of the same shape and dtype: nothing else goes into it, so all say the same.
Does not choose (`auto` does), and does not run anything.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch

from commdsl.overlap.auto import OPERATORS, Product, choose
from commdsl.overlap.epilogue import GATE
from commdsl.planner.tuning.selection import SEQUENCE, Candidate, Params, Tune
from commdsl.runtime import groups, menu
from commdsl.runtime.calls import MAX_KEPT
from commdsl.runtime.op import Op
from commdsl.runtime.tensors import ALIGNMENT, FLOAT8, lies_in_lines, made_of

_LOGGER = logging.getLogger("commdsl")

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
EXCHANGE, RETURN = "matmul_all_to_all", "all_to_all_matmul"
NORM = "allreduce_rms_norm"
WITH_ROWS = "_rows"
"""Behind the name of what makes `GATHER` or `RETURN`: the rows that came are a second result."""

FEW_BYTES = 4 << 20
"""Sent by a rank: of more, an all-reduce in two steps sends fewer."""

FEWEST_BYTES = 128 << 10
"""Sent by a rank: of so few, which wait for one another most of the time, words arrive sooner than lines."""

FEWEST: Tune = (("protocol", "packet"), ("threads", 256))
"""As 8 rows of 8192 columns in bfloat16 are fastest on two H200s."""


def operands(operator: str, x: torch.Tensor, w: torch.Tensor, group_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x (rows, ..., K), w (N, K) as schedules have them: matrices, what travels contiguous; of weights for the columns
    of all ranks, a matrix for those of each.
    """
    called, rows = OPERATORS[operator], x.flatten(0, -2)
    if called.all_depths:
        w = w.unflatten(1, (menu.size(group_name), -1)).movedim(1, 0)
    return rows.contiguous() if called.gathers else _in_lines(rows), _in_lines(w)


def _in_lines(matrix: torch.Tensor) -> torch.Tensor:
    """As products read it: by rows or by columns."""
    return matrix if matrix.is_contiguous() or lies_in_lines(matrix) else matrix.contiguous()


def program(operator: str, x: torch.Tensor, w: torch.Tensor, group_name: str, end: Params = ()) -> Op | None:
    """x, w: `operands`; `end`: `Epilogue.params`, of which a choice does not depend."""
    product = _product(operator, x, w, group_name, end)
    return None if product is None else _chosen("", end, x.device, *product)


def program_with_rows(operator: str, x: torch.Tensor, w: torch.Tensor, group_name: str, end: Params = ()) -> Op | None:
    """As that of `GATHER` or `RETURN`, and chosen as that is."""
    product = _product(operator, x, w, group_name, end)
    return None if product is None else _chosen(WITH_ROWS, end, x.device, *product)


def _product(operator: str, x: torch.Tensor, w: torch.Tensor, group_name: str, end: Params) -> tuple[Any, ...] | None:
    """The fields of what is chosen for, None where no schedule multiplies."""
    ranks = menu.size(group_name)
    called = OPERATORS[operator]
    rows = x.shape[0] if called.all_rows else x.shape[0] * ranks
    columns = w.shape[-2] // ranks if called.all_columns else w.shape[-2]
    made = columns // 2 if GATE in end else columns
    if ranks == 1 or not _is_multiplied(x, w, made) or groups.reaches_far(group_name, x.device):
        return None
    if rows % ranks:
        return None
    travels = x.dtype if called.gathers else made_of(x.dtype)
    return operator, rows, x.shape[1], columns, ranks, travels.itemsize, x.dtype == FLOAT8


@lru_cache(maxsize=MAX_KEPT)
def _chosen(suffix: str, end: Params, device: torch.device, *product: Any) -> Op | None:
    """What is chosen for a product, which is the same in every call; `suffix`: of its schedule's name."""
    chosen = choose(Product(*product), menu.name_of_device(device))
    _LOGGER.debug("%s of %d bytes runs %s", chosen.collective, chosen.nbytes, chosen)
    if chosen.schedule == SEQUENCE:
        return None
    return menu.loaded(Candidate(chosen.schedule + suffix, (*chosen.params, *end), chosen.tune), chosen.ranks)


def row_program(x: torch.Tensor, group_name: str) -> Op | None:
    """What adds up rows over the ranks and norms them. x: rows, one behind another."""
    ranks = menu.size(group_name)
    sent = x.nbytes * (ranks - 1)
    if not 0 < sent <= FEW_BYTES or groups.reaches_far(group_name, x.device):
        return None
    return menu.loaded(Candidate(NORM, tune=FEWEST if sent <= FEWEST_BYTES else ()), ranks)


def _is_multiplied(x: torch.Tensor, w: torch.Tensor, columns: int) -> bool:
    """Whether a schedule takes these: on GPUs what its kernel multiplies. `columns`: of a result."""
    if not (x.numel() and w.numel()):
        return False
    if x.is_cuda:
        made = made_of(x.dtype)
        ends = (x.shape[1] * x.itemsize, columns * made.itemsize)
        return made in (torch.bfloat16, torch.float16) and all(end % ALIGNMENT == 0 for end in ends)
    return x.dtype in (FLOAT8, torch.bfloat16, torch.float16, torch.float32, torch.float64)
