"""Turns a schedule into everything that is wrong with it.

Assumes a resolved schedule. The laws stand in groups: a later group runs only when the earlier ones found no error,
because it relies on what they prove, and so that one mistake gives one message. A new law is a function and a line
here. Does not look at the Plan; `synchronization` and `memory` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from commdsl.checks.bounds import out_of_bounds
from commdsl.checks.conservation import broken_contracts
from commdsl.checks.cycles import broken_cycles
from commdsl.checks.inputs import writes_to_input
from commdsl.checks.locations import Located
from commdsl.checks.overlap import overlapping_writes
from commdsl.checks.roles import broken_roles
from commdsl.checks.size_classes import unequal_sizes
from commdsl.checks.topology import missing_links
from commdsl.checks.undefined import undefined_reads
from commdsl.checks.useless import useless_statements
from commdsl.diagnostics import Diagnostic, Severity
from commdsl.ir import Schedule

Rule: TypeAlias = Callable[[Located], Iterator[Diagnostic]]

RULES: tuple[tuple[Rule, ...], ...] = (
    (out_of_bounds, broken_cycles, broken_roles),
    (overlapping_writes, writes_to_input, undefined_reads, missing_links),
    (unequal_sizes,),
    (broken_contracts,),
    (useless_statements,),
)


def check_schedule(schedule: Schedule) -> tuple[Diagnostic, ...]:
    """Every broken law of the first group that finds an error, and the warnings up to there."""
    located = Located(schedule)
    found: list[Diagnostic] = []
    for group in RULES:
        for rule in group:
            found.extend(rule(located))
        if any(diagnostic.severity is Severity.ERROR for diagnostic in found):
            break
    return tuple(found)
