"""What one rank is refused, the others hear of: every public call that ends in collective work, with any mistake.

Assumes ranks that are threads. Never judges how long a rank waits: a time-out is another type of exception.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from reported_cases import (  # noqa: E402 - after the check for torch
    ATTENTION,
    COLLECTIVES,
    DISPATCH,
    EP,
    LOCAL,
    LOCAL_CLASSES,
    LOCAL_METHODS,
    OVERLAP,
    Call,
    Entry,
)
from thread_ranks import outcomes  # noqa: E402 - as above

import commdsl  # noqa: E402 - as above
from commdsl import attention, overlap  # noqa: E402 - as above
from commdsl.runtime.errors import PeerError  # noqa: E402 - as above
from commdsl.runtime.reporting import reported  # noqa: E402 - as above
from commdsl.runtime.said import text_of  # noqa: E402 - as above

TABLES = {"commdsl": COLLECTIVES, "attention": ATTENTION, "dispatch": DISPATCH, "ep": EP, "overlap": OVERLAP}
ODD = 1


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMDSL_TIMEOUT", "30")


def everything() -> list[Any]:
    """Every mistake of every call. One of each call always runs, of the others a sample."""
    entries = [(f"{room}.{name}", entry) for room, table in TABLES.items() for name, entry in table.items()]
    found = []
    for number, (name, entry) in enumerate(entries):
        mistakes = [*entry.wrong, *(["keyword"] if entry.keyword else [])]
        for at, mistake in enumerate(mistakes):
            found.append(pytest.param(entry, mistake, id=f"{name}-{mistake}", marks=sampled(number, at, mistakes)))
    return found


def sampled(number: int, at: int, several: Sequence[Any]) -> Sequence[Any]:
    """Return the marks of one of several cases. The one that always runs is another for each `number`."""
    return () if at == number % len(several) else (pytest.mark.sweep,)


def wrong(call: Call, entry: Entry, mistake: str) -> Call:
    """The same call with a mistake."""
    if mistake == "keyword":
        return Call(call.function, call.given, {**call.named, "strange": 1})
    at, change = entry.wrong[mistake]
    given = [*call.given]
    given[at] = change(given[at])
    return Call(call.function, given, call.named)


@pytest.mark.parametrize(("entry", "mistake"), everything())
def test_a_mistake_of_one_rank(entry: Entry, mistake: str) -> None:
    """All ranks raise, for the odd one's reason, also in a first call. A reset mends it, and what all ranks are refused
    alike breaks nothing.
    """
    names = commdsl.threads(entry.ranks)
    for _ in range(2):
        calls = outcomes(entry.ranks, lambda rank: entry.made(rank, names[rank]))
        assert all(isinstance(one, Call) for one in calls), calls
        goes_wrong_once(entry, mistake, names, calls)


def goes_wrong_once(entry: Entry, mistake: str, names: Sequence[str], calls: Sequence[Call]) -> None:
    def work(rank: int) -> None:
        own = wrong(calls[rank], entry, mistake) if rank == ODD else calls[rank]
        for _ in range(2):  # a rank that waits for nobody learns it in its next call
            own()

    found = outcomes(entry.ranks, work)
    raised_elsewhere(found, text_of(found[ODD]))
    assert outcomes(entry.ranks, lambda rank: commdsl.reset(names[rank])) == [None] * entry.ranks
    alike = outcomes(entry.ranks, lambda rank: wrong(calls[rank], entry, mistake)())
    assert all(type(one) is type(found[ODD]) for one in alike), alike
    right = outcomes(entry.ranks, lambda rank: entry.made(rank, names[rank])())
    assert not any(isinstance(one, BaseException) for one in right), right


def raised_elsewhere(found: list[Any], reason: str) -> None:
    """The odd rank raised its own error, all others that of a peer that gave up, for this reason."""
    assert isinstance(found[ODD], Exception), found
    assert not isinstance(found[ODD], PeerError | commdsl.CommTimeout | commdsl.RendezvousError), found
    for rank in {*range(len(found))} - {ODD}:
        assert isinstance(found[rank], PeerError), found
        assert found[rank].rank == ODD, found
        assert reason in found[rank].reason, found


def test_a_call_of_two_groups() -> None:
    """An error that ranks of one group have heard of is reported to those of another one, too."""
    inner, outer = commdsl.threads(2), commdsl.threads(2)

    @reported(lambda one, other: [one, other])
    def both(one: str, other: str) -> None:
        commdsl.all_reduce(torch.ones(8, dtype=torch.complex64), group=one)
        commdsl.all_reduce(torch.ones(8), group=other)

    def work(rank: int) -> None:
        if rank == ODD:
            both(inner[rank], outer[rank])
        commdsl.all_reduce(torch.ones(8), group=outer[rank])

    raised_elsewhere(outcomes(2, work), "complex64")


# --- gradients --------------------------------------------------------------------------------------------------------


def leaf(*shape: int) -> Any:
    return torch.ones(*shape, requires_grad=True)


def products(name: str, rows: int) -> Any:
    return lambda rank, group: getattr(overlap, name)(leaf(rows, 8), leaf(8, 8), group=group)


HELD: list[Any] = []  # what has the memory of calls whose gradients are to come


def of_op(rank: int, group: str) -> Any:
    return commdsl.load("allreduce_ring", ranks=2)(leaf(8), group=group)


def of_attention(rank: int, group: str) -> Any:
    return attention.attention(*(leaf(1, 4, 2, 8) for _ in range(3)), group=group)


def of_sequence(rank: int, group: str) -> Any:
    return attention.unshard_sequence(leaf(4, 8), 0, group)


def of_dispatch(rank: int, group: str) -> Any:
    entry = DISPATCH["Dispatcher.dispatch"].made(rank, group)
    HELD.append(entry)
    return entry.function(entry.given[0].requires_grad_(), *entry.given[1:])


def of_experts(rank: int, group: str) -> Any:
    there = EP["combine"].made(rank, group)
    HELD.append(there)
    return there.function(there.given[0], there.given[1].requires_grad_(), *there.given[2:])


GRADIENTS = {
    "all_reduce": (lambda rank, group: commdsl.all_reduce(leaf(8), group=group), "runtime.collective_ops.ops"),
    "all_gather": (lambda rank, group: commdsl.all_gather(leaf(8), group=group), "runtime.collective_ops.ops"),
    "op": (of_op, "runtime.autograd._call"),
    "all_gather_matmul": (products("all_gather_matmul", 4), "overlap.gradients._called"),
    "matmul_reduce_scatter": (products("matmul_reduce_scatter", 8), "overlap.gradients._called"),
    "matmul_all_to_all": (products("matmul_all_to_all", 4), "overlap.gradients._called"),
    "replicated_matmul": (products("replicated_matmul", 4), "overlap.gradients._called"),
    "attention": (of_attention, "attention.loop.backward"),
    "unshard_sequence": (of_sequence, "runtime.menu.of_group"),
    "dispatch": (of_dispatch, "dispatch.dispatcher.skips_dispatcher"),
    "experts": (of_experts, "ep.functional._beside"),
}
"""By what has a gradient: a call, and a function on the way back."""


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_that_fails_on_one_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error within a backward pass is heard of as one within a call is."""
    names, (call, place) = commdsl.threads(2), GRADIENTS[name]
    module, function = f"commdsl.{place}".rsplit(".", 1)
    usual, odd = getattr(importlib.import_module(module), function), threading.local()

    def fails(*given: Any, **named: Any) -> Any:
        if getattr(odd, "is_due", False):
            raise MemoryError("no room for a gradient")
        return usual(*given, **named)

    monkeypatch.setattr(f"{module}.{function}", fails)

    def work(rank: int) -> None:
        for is_due in (False, rank == ODD):
            made = call(rank, names[rank]).sum()
            odd.is_due = is_due
            made.backward()
        commdsl.all_reduce(torch.ones(8), group=names[rank])

    raised_elsewhere(outcomes(2, work), "MemoryError: no room for a gradient")
    assert outcomes(2, lambda rank: commdsl.reset(names[rank])) == [None] * 2
    assert outcomes(2, lambda rank: call(rank, names[rank]).sum().backward()) == [None] * 2


# --- torch.compile ----------------------------------------------------------------------------------------------------

COMPILED = [
    ("commdsl", "all_reduce", "dtype"),
    ("commdsl", "all_reduce_", "dtype"),
    ("commdsl", "reduce_scatter", "shape"),
    ("commdsl", "Op", "dtype"),
    ("overlap", "all_gather_matmul", "shape"),
    ("overlap", "matmul_reduce_scatter", "dtype"),
    ("overlap", "all_reduce_rms_norm", "shape"),
    ("attention", "attention", "dtype"),
]
"""Mistakes that torch finds while it traces, and such as it does not see before the call."""

LOOSE = [
    ("dispatch", "Dispatcher.dispatch", "shape"),
    ("ep", "combine", "dtype"),
    ("overlap", "matmul_all_reduce", "type"),
]
"""Such as the code that is traced refuses: torch then breaks the graph, and with fullgraph=True raises an error of its
own instead.
"""


def compiled_cases() -> list[Any]:
    """Every way to compile each of them. One of each always runs, of the others a sample."""
    found = []
    for number, one in enumerate([*COMPILED, *LOOSE]):
        ways = list(itertools.product((False, True) if one in COMPILED else (False,), (False, True)))
        for at, (fullgraph, is_first) in enumerate(ways):
            words = (*one, *(["fullgraph"] if fullgraph else []), "first" if is_first else "later")
            found.append(pytest.param(*one, fullgraph, is_first, id="-".join(words), marks=sampled(number, at, ways)))
    return found


@pytest.mark.parametrize(("room", "name", "mistake", "fullgraph", "is_first"), compiled_cases())
def test_a_mistake_in_what_is_compiled(room: str, name: str, mistake: str, fullgraph: bool, is_first: bool) -> None:
    """Within torch.compile the others hear of it, too, whether it is found in the call or while that is traced."""
    torch.compiler.reset()
    entry, names = TABLES[room][name], commdsl.threads(2)
    calls = outcomes(2, lambda rank: entry.made(rank, names[rank]))

    def work(rank: int) -> None:
        def call(*given: Any) -> Any:
            return calls[rank].function(*given, **calls[rank].named)

        compiled = torch.compile(call, backend="aot_eager", fullgraph=fullgraph)
        if not is_first:
            compiled(*calls[rank].given)
        compiled(*(wrong(calls[rank], entry, mistake) if rank == ODD else calls[rank]).given)
        compiled(*calls[rank].given)

    found = outcomes(2, work)
    assert isinstance(found[0], PeerError), found
    raised_elsewhere(found, found[0].reason.partition("raised ")[2])
    assert outcomes(2, lambda rank: commdsl.reset(names[rank])) == [None] * 2
    calls = outcomes(2, lambda rank: entry.made(rank, names[rank]))
    right = outcomes(
        2,
        lambda rank: torch.compile(calls[rank].function, backend="aot_eager")(*calls[rank].given, **calls[rank].named),
    )
    assert not any(isinstance(one, BaseException) for one in right), right


@pytest.mark.parametrize("room", TABLES)
def test_every_public_call_is_in_the_tables(room: str) -> None:
    """A new name that does collective work has a case here, and so has a new method of a class that does some."""
    package = commdsl if room == "commdsl" else getattr(commdsl, room)
    cases = {name.split()[0] for name in TABLES[room]}
    others = {"PrepareAndFinalize", "Dispatcher"} if room == "ep" else set()  # of `ep.engines`
    for name in sorted(set(package.__all__)):
        found = getattr(package, name)
        if not callable(found) or name in LOCAL[room].split():
            continue
        methods = {one.split(".")[1] for one in cases if one.startswith(f"{name}.")}
        if inspect.isclass(found) and not methods and name not in cases:
            assert name in LOCAL_CLASSES[room].split(), f"{room}.{name}"
            continue
        assert name in cases or methods, f"{room}.{name}"
        if inspect.isclass(found) and LOCAL_METHODS[name] != "*":
            public = {one for one, made in inspect.getmembers(found, inspect.isroutine) if not one.startswith("_")}
            assert public == methods | {*LOCAL_METHODS[name].split()}, f"{room}.{name}"
    assert {name.split(".")[0] for name in cases} - others <= {*package.__all__}
