"""C326, C327: what one operation has combined no other one does, and a contract names the operation that did.

Assumes indices in bounds, no overlapping writes, no undefined reads. Does not ask what is combined; `conservation`
does. An operation is one that the text names, or the call's, which may be any. What the caller computes is a value like
one that was given; what a function of ours makes is combined as its operands are.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, LocatedTask, Locations, statement_key
from commdsl.ir.contracts import Contract
from commdsl.ir.schedules import Task
from commdsl.ir.words import bindings_text
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.kinds import MoveKind
from commdsl.machine.dtypes import NAMED_OPS

Operations = NDArray[np.int8]
"""By location what has combined it: an index into HOW."""

HOW = (None, "", *NAMED_OPS, "several operations")
"""Nothing; the call's operation; those that a text names; for one operand of a function this, for another that."""


def mixed_operations(located: Located) -> Iterator[Diagnostic]:
    """C326, one message for each statement."""
    told = set[tuple[str, int, int]]()
    for step, moves, others in _combining(located, _nothing(located)):
        wrong = (others > 0) & (others != HOW.index(moves.moves.operation or ""))
        key = statement_key(moves.moves.span)
        if wrong.any() and key not in told:
            told.add(key)
            row, operand = (int(one) for one in np.argwhere(wrong)[0])
            yield _mixed(located, step, moves, row, HOW[others[row, operand]])


def other_operations(located: Located) -> Iterator[Diagnostic]:
    """C327, for every contract that names another operation than the one which combined a chunk. Where no statement
    names one, a `sum` is the call's.
    """
    for contract, dests, found, meant in _at_the_end(located):
        wrong = np.flatnonzero((found > 0) & (found != HOW.index(meant)))
        if len(wrong):
            yield _other(located, contract, int(dests[wrong[0]]), HOW[found[wrong[0]]])


def by_the_call(located: Located) -> tuple[Contract, ...]:
    """Return the contracts whose chunks the operation of the call combines: they say `sum`, and no statement does."""
    return tuple(contract for contract, _, _, meant in _at_the_end(located) if meant == "")


def _at_the_end(located: Located) -> Iterator[tuple[Contract, Locations, Operations, str]]:
    """Every contract of combinations, its chunks, what has combined them, and what the contract means by its word."""
    end = _nothing(located)
    for _ in _combining(located, end):
        pass
    for contract in located.schedule.contracts:
        dests, meant = _promised(located, contract)
        if meant is not None:
            is_call = meant == "sum" and not (end[dests] == HOW.index("sum")).any()
            yield contract, dests, end[dests], "" if is_call else meant


def _promised(located: Located, contract: Contract) -> tuple[Locations, str | None]:
    """Which chunks a contract says how to combine, and how: a rotation those that bring sums back."""
    if contract.rotation is None:
        return located.contract_dests(contract), contract.operation
    back = [located.whole(buffer).ravel() for buffer in contract.rotation.back]
    return np.concatenate([np.zeros(0, np.int64), *back]), "sum"


def _nothing(located: Located) -> Operations:
    return np.zeros(located.size, np.int8)


def _combining(located: Located, held: Operations) -> Iterator[tuple[LocatedStep, LocatedMoves, Operations]]:
    """Every statement that reduces, with what has combined its operands, (n, k); runs the schedule on `held`."""
    if not located.schedule.names_operations and all(
        one.operation in (None, "sum") for one in located.schedule.contracts
    ):
        return  # all is the call's, and all is well
    for step in located.steps:
        if isinstance(step, LocatedTask):
            found = _together(held[step.operands]) if isinstance(step.step, Task) else np.zeros(step.writes.size)
            held[step.writes] = found.reshape(step.writes.shape)
            continue
        results: list[tuple[Locations, Operations]] = []
        for moves in step.moves:
            if moves.moves.kind is not MoveKind.REDUCE and not moves.moves.accumulate:
                results.append((moves.dest, _together(held[moves.reads])))
                continue
            operands = np.column_stack((moves.dest, moves.reads)) if moves.moves.accumulate else moves.reads
            yield step, moves, held[operands]
            several = (operands != located.nowhere).sum(axis=1) > 1  # what combines one alone is it
            how = np.int8(HOW.index(moves.moves.operation or ""))
            results.append((moves.dest, np.where(several, how, held[operands].max(axis=1))))
        for dest, made in results:
            held[dest] = made


def _together(operands: Operations) -> Operations:
    """Return what has combined a result of a function, by what has combined its operands, (n, k)."""
    most = operands.max(axis=1)
    is_one = ((operands == 0) | (operands == most[:, None])).all(axis=1)
    return np.where(is_one, most, np.int8(len(HOW) - 1))


def _mixed(located: Located, step: LocatedStep, moves: LocatedMoves, row: int, other: str | None) -> Diagnostic:
    who = f"rank {int(moves.moves.actor[row])}{bindings_text(step.step.bindings)}"
    label = f"{who}: {located.name(int(moves.dest[row]))} would be {_words(moves.moves.operation)} of {_words(other)}"
    help = "combine by one operation from what was given to what a contract names, or in another buffer"
    return Diagnostic("C326", "two operations combine one chunk", Label(moves.moves.span, label), help=help)


def _other(located: Located, contract: Contract, location: int, found: str | None) -> Diagnostic:
    label = f"{located.name(location)} is {_words(found)}"
    said = "sum" if contract.operation is None else contract.operation
    help = f"write `by {said}` behind every `reduce` that leads there" + (f", or promise `{found}`" if found else "")
    return Diagnostic("C327", f"`{contract.name}` is kept by another operation", Label(contract.span, label), help=help)


def _words(operation: str | None) -> str:
    if operation == HOW[-1]:
        return operation
    return f"a {operation}" if operation else "what the call asks for"
