"""Turns the cases of a sweep, one law over many cases, into the sample of them that runs unless all are asked for.

Assumes that a case is known by its name and by what each of its parameters is. Does not know pytest. Drawn cases are as
many as a test says, MORE times as many if all are asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import settings

ONE_IN = 12
LEAST = 3
"""So many cases of a family run, if it has them."""


MORE = 20
ALL = "all"
"""The profile of drawn cases that `conftest` loads before tests are imported."""


def examples(count: int) -> int:
    """How many cases hypothesis draws."""
    return count * (MORE if settings.get_current_profile_name() == ALL else 1)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    parameters: Mapping[str, int]  # parameter -> which of its values

    @property
    def family(self) -> str:
        return self.name.split("[")[0]


def sample(cases: list[Case]) -> set[str]:
    """The names of the cases that run: of each family one in ONE_IN, no fewer than LEAST, and every value of a
    parameter that has others beside it. The same on every machine and for any order of the cases.
    """
    families: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda case: hashlib.sha256(case.name.encode()).digest()):
        families.setdefault(case.family, []).append(case)
    return {case.name for family in families.values() for case in _chosen(family)}


def _chosen(family: list[Case]) -> list[Case]:
    wanted = {value for case in family for value in case.parameters.items()}
    shared = {parameter for parameter, _ in wanted if _num_values(wanted, parameter) < len(family)}
    seen: set[tuple[str, int]] = set()
    new, rest = [], []
    for case in family:
        values = {value for value in case.parameters.items() if value[0] in shared}
        (rest if values <= seen else new).append(case)
        seen |= values
    num = max(LEAST, -(-len(family) // ONE_IN))
    return new + rest[: max(0, num - len(new))]


def _num_values(values: set[tuple[str, int]], parameter: str) -> int:
    return sum(name == parameter for name, _ in values)
