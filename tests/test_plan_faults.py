"""Each law on the Plan that no text can break: a Plan with one change gives one message, rendered as committed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from faulty_plans import FAULTS, right

from commdsl.checks import check_plan
from commdsl.language import codes
from commdsl.language.diagnostics import render_full
from commdsl.program.verify import verify


@pytest.mark.parametrize("code", FAULTS)
def test_one_change_one_message(code: str, golden: Callable[[str, str], None]) -> None:
    """The right Plan passes; the changed one is legal, and breaks this law only."""
    text, change = FAULTS[code]
    schedule, plan = right(text)
    assert check_plan(schedule, plan) == ()

    verify(change(plan))
    (found,) = check_plan(schedule, change(plan))

    assert found.code == code
    assert len(found.headline) <= 70
    golden(f"{code}.txt", render_full(found) + "\n")


@pytest.mark.parametrize("code", FAULTS)
def test_pages_say_that_no_text_breaks_the_law(code: str) -> None:
    """A reader who meets the code learns that the fault is the compiler's."""
    assert "No schedule can break this law" in codes.page(code)
