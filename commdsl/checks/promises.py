"""C312 and C315: no `ensure` says what another has said, nor all together what holds anyway.

Assumes resolved contracts. Does not ask whether they are kept; `conservation` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.locations import Located
from commdsl.ir.contracts import Contract
from commdsl.ir.schedules import Step
from commdsl.language.diagnostics import Diagnostic, Label


def repeated_promises(located: Located) -> Iterator[Diagnostic]:
    """One message per repetition."""
    told: set[int] = set()
    for (_, first), (number, second) in combinations(enumerate(located.schedule.contracts), 2):
        if number not in told and _same(first, second):
            told.add(number)
            yield Diagnostic(
                "C312",
                "the same promise twice",
                Label(second.span, "changes nothing"),
                (Label(first.span, "said here"),),
                help="drop one of them",
            )


def idle_promises(located: Located) -> Iterator[Diagnostic]:
    """Contracts that are kept, of several ranks none of which does anything."""
    schedule = located.schedule
    acts = any(not isinstance(step, Step) or step.moves for step in schedule.steps)
    if schedule.num_ranks > 1 and not acts:
        yield Diagnostic(
            "C315",
            "a contract that says nothing",
            Label(schedule.contracts[0].span, "holds before anything moves"),
            help="say what the ranks are to have at the end that they have not yet",
        )


def _same(first: Contract, second: Contract) -> bool:
    heads = [(one.name, one.source_buffer, one.dest_buffer, one.operation) for one in (first, second)]
    return (
        heads[0] == heads[1]
        and _rotating(first) == _rotating(second)
        and _terms_equal(first.term, second.term)
        and all(map(_equal, _rows(first), _rows(second)))
    )


def _terms_equal(first: object, second: object) -> bool:
    """Whether two terms, or two parts of them, are the same row by row."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.array_equal(first, second)
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_terms_equal, first, second))
    if type(first) is type(second) and is_dataclass(first):
        names = [one.name for one in fields(first)]
        return all(_terms_equal(getattr(first, name), getattr(second, name)) for name in names)
    return first == second


def _rotating(contract: Contract) -> tuple[object, ...] | None:
    rotation = contract.rotation
    if rotation is None:
        return None
    visits = None if rotation.visits is None else rotation.visits.tobytes()
    return rotation.sources, rotation.dests, visits, rotation.back


def _rows(contract: Contract) -> tuple[NDArray[np.generic] | None, ...]:
    return (
        contract.dest_rank,
        contract.dest_chunk,
        contract.value,
        contract.source_rank,
        contract.source_chunk,
        contract.source_valid,
    )


def _equal(first: NDArray[np.generic] | None, second: NDArray[np.generic] | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)
