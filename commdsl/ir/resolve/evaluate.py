"""Turns expressions into numbers: plain integers, or arrays when a name stands for one value a row.

Assumes `names` found every name and kind in order; a name without a value is `Poisoned`. Arrays are int64 here and
broadcast; callers narrow them. Does not report anything but an expression that has no value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.resolve.faults import Faults, Poisoned
from commdsl.ir.schedules import CycleSet, Ints
from commdsl.language import syntax as syn
from commdsl.language.source import Span

Number: TypeAlias = int | NDArray[Any]  # int64 or bool arrays

LARGEST = 2**62
"""Beyond this a number means nothing here, and 64-bit arrays would wrap."""


@dataclass(frozen=True, eq=False)
class Cycles:
    """A declared set of cycles with, for each cycle, the position of every vertex (-1: not on it)."""

    declared: CycleSet

    @cached_property
    def positions(self) -> Ints:
        orders = self.declared.orders
        length = orders.shape[1]
        table = np.full(orders.shape, -1, np.int32)
        row, column = np.nonzero((orders >= 0) & (orders < length))
        table[row, orders[row, column]] = column
        return table


@dataclass(frozen=True)
class Cycle:
    """One cycle of a set, or one for each row."""

    cycles: Cycles
    index: Number


Value: TypeAlias = Number | Cycle | Cycles
Scope: TypeAlias = Mapping[str, Value]

_PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "&": operator.and_, "^": operator.xor, "|": operator.or_,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


class Evaluator:
    """Evaluates expressions, reporting those without a value; `where` names the loop iteration for the message."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self.bindings: tuple[tuple[str, int], ...] = ()

    def number(self, expr: syn.Expr, scope: Scope) -> Number:
        value = self.value(expr, scope)
        if isinstance(value, Cycle):
            return value.index  # a cycle used as a number is its index in the set
        if isinstance(value, Cycles):
            raise Poisoned
        return value

    def constant(self, expr: syn.Expr, scope: Scope) -> int:
        return int(self.number(expr, scope))

    def value(self, expr: syn.Expr, scope: Scope) -> Value:
        match expr:
            case syn.Int(value):
                return value
            case syn.Name(text):
                if text not in scope:
                    raise Poisoned
                return scope[text]
            case syn.Unary(symbol, operand):
                number = self.number(operand, scope)
                return -number if symbol == "-" else _negated(number)
            case syn.Binary():
                return self._binary(expr, scope)
            case syn.Call():
                return self._call(expr, scope)
            case syn.Method():
                return self._method(expr, scope)
            case syn.Index(name, index):
                cycles = self.value(name, scope)
                if not isinstance(cycles, Cycles):
                    raise Poisoned
                return self._pick(cycles, self.number(index, scope), expr.span)
            case _:
                assert_never(expr)

    def _pick(self, cycles: Cycles, index: Number, span: Span) -> Cycle:
        count = len(cycles.declared.orders)
        if np.any((np.asarray(index) < 0) | (np.asarray(index) >= count)):
            self._no_value(
                span, f"`{cycles.declared.name}` has {count} cycles, index {_worst(index, count)} is not one"
            )
        return Cycle(cycles, index)

    def _binary(self, expr: syn.Binary, scope: Scope) -> Number:
        left = self.number(expr.left, scope)
        if expr.operator in ("and", "or"):
            if not isinstance(left, np.ndarray):
                if bool(left) == (expr.operator == "or"):
                    return bool(left)
                right = self.number(expr.right, scope)
                return np.asarray(right, bool) if isinstance(right, np.ndarray) else bool(right)
            join = np.logical_and if expr.operator == "and" else np.logical_or
            return np.asarray(join(left, self.number(expr.right, scope)))
        right = self.number(expr.right, scope)
        plain = _PLAIN.get(expr.operator)
        result = plain(left, right) if plain else self._partial(expr, left, right)
        if isinstance(result, int) and abs(result) > LARGEST:
            self._no_value(expr.span, "the number is beyond 2 ** 62")
        return result

    def _partial(self, expr: syn.Binary, left: Number, right: Number) -> Number:
        """The operators that are not defined everywhere."""
        if expr.operator in ("/", "%"):
            if np.any(np.asarray(right) == 0):
                self._no_value(expr.span, "division by zero")
            return left // right if expr.operator == "/" else left % right
        if np.any(np.asarray(right) < 0):
            self._no_value(expr.span, f"`{expr.operator}` by a negative number")
        base = np.abs(np.asarray(left, np.float64)) if expr.operator in ("**", "<<") else np.zeros(())
        exponent = np.asarray(right, np.float64)
        with np.errstate(over="ignore"):  # infinity is too large as well
            grown = base**exponent if expr.operator == "**" else base * 2.0**exponent
        if np.any(grown > LARGEST):
            self._no_value(expr.span, "the number is beyond 2 ** 62")
        if expr.operator == "**":
            return left**right
        if expr.operator == ">>":
            return left >> (np.minimum(right, 63) if isinstance(right, np.ndarray) else right)
        return left << right

    def _call(self, expr: syn.Call, scope: Scope) -> Number:
        if not expr.arguments:
            raise Poisoned
        if expr.function == "len":
            owner = self.value(expr.arguments[0], scope)
            match owner:
                case Cycles(declared):
                    return len(declared.orders)
                case Cycle(cycles, _):
                    return int(cycles.declared.orders.shape[1])
                case _:
                    raise Poisoned
        numbers = [self.number(argument, scope) for argument in expr.arguments]
        vector = any(isinstance(number, np.ndarray) for number in numbers)
        match expr.function:
            case "abs":
                return np.abs(numbers[0]) if vector else abs(int(numbers[0]))
            case "min" | "max" if vector:
                combine = np.minimum if expr.function == "min" else np.maximum
                result = numbers[0]
                for number in numbers[1:]:
                    result = combine(result, number)
                return result
            case "min":
                return min(int(number) for number in numbers)
            case "max":
                return max(int(number) for number in numbers)
            case "log2":
                return self._log2(expr, numbers[0])
            case _:
                raise Poisoned

    def _log2(self, expr: syn.Call, number: Number) -> Number:
        values = np.asarray(number)
        wrong = (values < 1) | ((values & (values - 1)) != 0)
        if np.any(wrong):
            self._no_value(expr.span, f"log2 of {int(values[wrong].flat[0])}, which is not a power of two")
        if isinstance(number, np.ndarray):
            return np.round(np.log2(number)).astype(np.int64)
        return number.bit_length() - 1

    def _method(self, expr: syn.Method, scope: Scope) -> Number:
        owner = self.value(expr.owner, scope)
        if not isinstance(owner, Cycle) or len(expr.arguments) != 1:
            raise Poisoned
        argument = self.number(expr.arguments[0], scope)
        orders, positions = owner.cycles.declared.orders, owner.cycles.positions
        closed, length = owner.cycles.declared.closed, orders.shape[1]
        index, argument = np.broadcast_arrays(np.asarray(owner.index), np.asarray(argument))
        if expr.method == "at":
            place = argument
            known = np.ones(place.shape, bool)
        else:
            known = (argument >= 0) & (argument < length)
            place = np.where(known, positions[index, np.where(known, argument, 0)], -1).astype(np.int64)
            known &= place >= 0
            if expr.method == "position":
                return _unwrapped(place)
            place = place + (1 if expr.method == "next" else -1)
        if not closed:
            known &= (place >= 0) & (place < length)  # a path ends: beyond it there is no rank, which is written -1
        return _unwrapped(np.where(known, orders[index, place % length], -1).astype(np.int64))

    def _no_value(self, span: Span, why: str) -> None:
        where = ", ".join(f"{name} = {value}" for name, value in self.bindings)
        notes = (f"with {where}",) if where else ()
        self._faults.fail("C508", "the expression has no value", span, why, notes=notes)


def _negated(number: Number) -> Number:
    return np.logical_not(number) if isinstance(number, np.ndarray) else not number


def _unwrapped(values: NDArray[Any]) -> Number:
    return values if values.ndim else int(values)


def _worst(index: Number, count: int) -> int:
    values = np.atleast_1d(np.asarray(index))
    return int(values[(values < 0) | (values >= count)][0])


def free_names(expr: syn.Expr | syn.Range | syn.All | None) -> frozenset[str]:
    """The names an expression depends on."""
    match expr:
        case None | syn.Int() | syn.All():
            return frozenset()
        case syn.Name(text):
            return frozenset((text,))
        case syn.Unary(_, operand):
            return free_names(operand)
        case syn.Binary(_, left, right):
            return free_names(left) | free_names(right)
        case syn.Range(first, last):
            return free_names(first) | free_names(last)
        case syn.Call(_, arguments):
            return frozenset().union(*(free_names(argument) for argument in arguments))
        case syn.Method(owner, _, arguments):
            return free_names(owner).union(*(free_names(argument) for argument in arguments))
        case syn.Index(name, index):
            return free_names(name) | free_names(index)
        case _:
            assert_never(expr)
