"""A sample of a sweep drops cases, never a law, and is the same wherever it is taken."""

from __future__ import annotations

from itertools import product

from sweeps import LEAST, ONE_IN, Case, sample


def family(name: str, *sizes: int) -> list[Case]:
    return [
        Case(f"{name}[{'-'.join(map(str, values))}]", {f"p{index}": value for index, value in enumerate(values)})
        for values in product(*map(range, sizes))
    ]


def test_every_family_stays() -> None:
    """A small family runs whole, a large one in the part that is said."""
    few, many = family("few", LEAST), family("many", 400)
    chosen = sample(few + many)

    assert {case.name for case in few} <= chosen
    assert len(chosen) == LEAST + -(-400 // ONE_IN)


def test_every_value_stays() -> None:
    """Each value of each of several parameters is in some case that runs."""
    cases = family("law", 37, 5, 3)
    chosen = sample(cases)
    kept = [case.parameters for case in cases if case.name in chosen]

    assert {(key, value) for each in kept for key, value in each.items()} == {
        (key, value) for case in cases for key, value in case.parameters.items()
    }
    assert len(kept) == -(-len(cases) // ONE_IN)


def test_the_same_everywhere() -> None:
    """The order of the cases and what else is there change nothing."""
    cases = family("law", 30, 4)
    with_others = sample(cases + family("other", 9))

    assert sample(cases) == sample(cases[::-1]) == {name for name in with_others if name.startswith("law")}


def test_new_cases_move_few() -> None:
    """A case that comes does not draw the others anew."""
    before, after = sample(family("law", 400)), sample(family("law", 404))

    assert len(before - after) <= 4
