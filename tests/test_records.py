"""A record is to its users what `dataclasses.dataclass(frozen=True)` makes of the same class."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import field, replace
from typing import Any

import pytest

from commdsl.language import records


@pytest.fixture(autouse=True, params=[1, 1000], ids=["many", "few"])
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind so many instances a class has an `__init__` of its own."""
    monkeypatch.setattr(records, "MANY", request.param)


def of(decorator: Any, slots: bool) -> tuple[Any, Any]:
    """A class and one that inherits from it."""

    @decorator(frozen=True, slots=slots)
    class Node:
        place: int = field(kw_only=True, compare=False, repr=False)

    @decorator(frozen=True, slots=slots)
    class Pair(Node):
        left: int
        right: str = "r"

    Pair(0, place=0)
    return Node, Pair


KINDS = [pytest.param(slots, id="slots" if slots else "dictionary") for slots in (True, False)]


@pytest.mark.parametrize("slots", KINDS)
def test_like_a_dataclass(slots: bool) -> None:
    """Text, equality, hash, order of fields, defaults and what `match` and `replace` make of it are the same."""
    for given, named in (((1,), {}), ((1, "b"), {}), ((), {"left": 3}), ((2,), {"right": "c"})):
        (_, ours), (_, theirs) = of(records.dataclass, slots), of(dataclasses.dataclass, slots)
        one, other = (cls(*given, **named, place=5) for cls in (ours, theirs))

        assert repr(one) == repr(other)
        assert hash(one) == hash(other)
        assert one == replace(one, place=6) != replace(one, left=9)
        assert one != other
        assert ours.__match_args__ == theirs.__match_args__
        assert [f.name for f in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(theirs)]
        assert dataclasses.asdict(one) == dataclasses.asdict(other)


@pytest.mark.parametrize("slots", KINDS)
def test_frozen(slots: bool) -> None:
    """No field can be set or deleted."""
    _, pair = of(records.dataclass, slots)
    one = pair(1, place=0)

    with pytest.raises(dataclasses.FrozenInstanceError):
        one.left = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.left


@pytest.mark.parametrize("slots", KINDS)
@pytest.mark.parametrize(
    ("given", "named"),
    [((), {"place": 0}), ((1,), {}), ((1, "b", 3), {"place": 0}), ((1,), {"left": 1, "place": 0}), ((1,), {"x": 0})],
    ids=["a field is missing", "one by name is missing", "too many", "twice", "unknown"],
)
def test_wrong_calls(given: tuple[Any, ...], named: dict[str, Any], slots: bool) -> None:
    """What a dataclass refuses is refused."""
    for decorator in (records.dataclass, dataclasses.dataclass):
        _, pair = of(decorator, slots)
        with pytest.raises(TypeError):
            pair(*given, **named)


@records.dataclass(frozen=True, slots=True)
class Kept:
    name: str
    inner: Kept | None = None


def test_copies() -> None:
    """Records are pickled and copied whole."""
    one = Kept("a", Kept("b"))

    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one


def test_only_what_is_frozen() -> None:
    """Anything else is for `dataclasses`."""
    with pytest.raises(AssertionError):
        records.dataclass(frozen=False)(type("Loose", (), {}))
