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

from commdsl.ir.resolve.faults import Faults, Poisoned, Spent
from commdsl.ir.schedules import CycleSet, Ints
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import too_much
from commdsl.language.source import Span

Number: TypeAlias = int | NDArray[Any]  # int64 or bool arrays

FUNCTIONS = {
    "len": (1, 1), "min": (1, 99), "max": (1, 99), "abs": (1, 1), "log2": (1, 1), "floor_log2": (1, 1),
}  # fmt: skip
"""Those built in, with the least and the most arguments of each."""

MOST_OPERATIONS = 400_000
"""In functions, of one schedule, one after another: less than a second."""

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


@dataclass(frozen=True, eq=False)
class Group:
    """The groups that ranks fall into: `ranks[g, i]` is the i-th of group g."""

    ranks: Ints

    @cached_property
    def where(self) -> Ints:
        """Of every rank its group, and how many are before it there: (2, ranks)."""
        return np.stack(np.unravel_index(np.argsort(self.ranks.ravel()), self.ranks.shape)).astype(np.int32)


@dataclass(frozen=True)
class Table:
    """The entries of a literal table."""

    entries: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Function:
    """A `fn` of a file; without a fault it never comes back to itself."""

    params: tuple[str, ...]
    body: syn.Expr
    known: Functions  # all of them
    operations: int  # in its own body
    is_condition: bool | None  # None: it has a fault, which has been reported
    span: Span  # of its name


Functions: TypeAlias = Mapping[str, Function]
"""Those of the files by name."""

Value: TypeAlias = Number | Cycle | Cycles | Group | Table | Function
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
        self._operations = 0  # in functions

    def number(self, expr: syn.Expr, scope: Scope) -> Number:
        value = self.value(expr, scope)
        if isinstance(value, Cycle):
            return value.index  # a cycle used as a number is its index in the set
        if isinstance(value, Cycles | Group | Table | Function):
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
            case syn.Index():
                return self._index(expr, scope)
            case syn.Table(entries):
                return Table(tuple(self._entry(entry, scope) for entry in entries))
            case syn.Choice():
                return self._choice(expr, scope)
            case _:
                assert_never(expr)

    def _index(self, expr: syn.Index, scope: Scope) -> Number | Cycle:
        owner, index = self.value(expr.of, scope), self.number(expr.index, scope)
        match owner:
            case Cycles(declared):
                self._check_index(index, len(declared.orders), f"`{declared.name}`", "cycles", expr.span)
                return Cycle(owner, index)
            case Table(entries):
                self._check_index(index, len(entries), "the table", "entries", expr.span)
                return np.array(entries)[index] if isinstance(index, np.ndarray) else entries[index]
            case _:
                raise Poisoned

    def _check_index(self, index: Number, count: int, owner: str, what: str, span: Span) -> None:
        if np.any((np.asarray(index) < 0) | (np.asarray(index) >= count)):
            self._no_value(span, f"{owner} has {count} {what}, index {_worst(index, count)} is not one")

    def _entry(self, expr: syn.Expr, scope: Scope) -> int:
        number = self.number(expr, scope)
        if isinstance(number, np.ndarray):
            self._no_value(expr.span, "an entry of a table is the same on every rank: choose with `a if c else b`")
        return int(number)

    def _choice(self, expr: syn.Choice, scope: Scope) -> Number:
        """Each side is evaluated where it is meant: elsewhere it need not have a value."""
        holds = self.number(expr.condition, scope)
        if not isinstance(holds, np.ndarray) or holds.all() or not holds.any():
            return self.number(expr.then if np.all(holds) else expr.otherwise, scope)
        names = sorted((free_names(expr.then) | free_names(expr.otherwise)) & scope.keys())
        arrays = {name: array for name in names if (array := _array(scope[name])) is not None}
        holds, *spread = np.broadcast_arrays(holds, *arrays.values())
        chosen: NDArray[Any] | None = None
        for side, where in ((expr.then, holds), (expr.otherwise, ~holds)):
            part = {name: _with(scope[name], array[where]) for name, array in zip(arrays, spread, strict=True)}
            value = np.asarray(self.number(side, {**scope, **part}))
            chosen = np.zeros(holds.shape, value.dtype) if chosen is None else chosen
            chosen[where] = value
        assert chosen is not None
        return chosen

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
        name = expr.function.text
        if name == "len":
            return _length(self.value(expr.arguments[0], scope))
        numbers = [self.number(argument, scope) for argument in expr.arguments]
        function = scope.get(name)
        if isinstance(function, Function):
            return self._called_with(function, numbers, expr.span)
        vector = any(isinstance(number, np.ndarray) for number in numbers)
        match name:
            case "abs":
                return np.abs(numbers[0]) if vector else abs(int(numbers[0]))
            case "min" | "max" if vector:
                combine = np.minimum if name == "min" else np.maximum
                result = numbers[0]
                for number in numbers[1:]:
                    result = combine(result, number)
                return result
            case "min":
                return min(int(number) for number in numbers)
            case "max":
                return max(int(number) for number in numbers)
            case "log2" | "floor_log2":
                return self._log2(expr, numbers[0])
            case _:
                raise Poisoned

    def _called_with(self, function: Function, numbers: list[Number], span: Span) -> Number:
        if function.is_condition is None or len(numbers) != len(function.params):
            raise Poisoned
        self._operations += function.operations
        if self._operations > MOST_OPERATIONS:
            label = f"more than {MOST_OPERATIONS:,} operations in functions, one call after another"
            self._faults.add(too_much(span, label, "call them outside of loops"))
            raise Spent
        given = dict(zip(function.params, numbers, strict=True))
        with self._faults.called(span):
            return self.number(function.body, {**function.known, **given})

    def _log2(self, expr: syn.Call, number: Number) -> Number:
        """That of a number that has one, or rounded down by name."""
        name, values = expr.function.text, np.asarray(number)
        wrong = values < 1
        if name == "log2":
            wrong = wrong | ((values & (values - 1)) != 0)
        if np.any(wrong):
            what = "a power of two" if name == "log2" else "1 or more"
            self._no_value(expr.span, f"{name} of {int(values[wrong].flat[0])}, which is not {what}")
        if isinstance(number, np.ndarray):
            return np.asarray(np.searchsorted(_POWERS, number, side="right") - 1)
        return number.bit_length() - 1

    def _method(self, expr: syn.Method, scope: Scope) -> Number:
        owner = self.value(expr.owner, scope)
        if not isinstance(owner, Cycle | Group) or len(expr.arguments) != 1:
            raise Poisoned
        argument = self.number(expr.arguments[0], scope)
        if isinstance(owner, Group):
            return _in_group(owner, expr.method, np.asarray(argument))
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


_POWERS = 2 ** np.arange(63, dtype=np.int64)


def _in_group(group: Group, method: str, rank: NDArray[Any]) -> Number:
    """How many are before a rank in its group, or who is beside it, behind the last the first; -1 of no rank."""
    known = (rank >= 0) & (rank < group.ranks.size)
    number, place = group.where[:, np.where(known, rank, 0)].astype(np.int64)
    if method != "position":
        step = 1 if method == "next" else -1
        place = group.ranks[number, (place + step) % group.ranks.shape[1]].astype(np.int64)
    return _unwrapped(np.where(known, place, -1))


def _length(owner: Value) -> int:
    match owner:
        case Group(ranks):
            return int(ranks.shape[1])
        case Cycles(declared):
            return len(declared.orders)
        case Cycle(cycles, _):
            return int(cycles.declared.orders.shape[1])
        case Table(entries):
            return len(entries)
        case _:
            raise Poisoned


def _array(value: Value) -> NDArray[Any] | None:
    """What varies in a value."""
    number = value.index if isinstance(value, Cycle) else value
    return number if isinstance(number, np.ndarray) else None


def _with(value: Value, array: NDArray[Any]) -> Value:
    """The value with that in place of what varies."""
    return Cycle(value.cycles, array) if isinstance(value, Cycle) else array


def _negated(number: Number) -> Number:
    return np.logical_not(number) if isinstance(number, np.ndarray) else not number


def _unwrapped(values: NDArray[Any]) -> Number:
    return values if values.ndim else int(values)


def _worst(index: Number, count: int) -> int:
    values = np.atleast_1d(np.asarray(index))
    return int(values[(values < 0) | (values >= count)][0])


def free_names(expr: syn.Expr | syn.Range | syn.All | None) -> frozenset[str]:
    """The names an expression depends on; functions of the files are among them."""
    match expr:
        case None | syn.All():
            return frozenset()
        case syn.Name(text):
            return frozenset((text,))
        case syn.Range(first, last):
            return free_names(first) | free_names(last)
        case syn.Call(function, _) if function.text not in FUNCTIONS:
            return frozenset((function.text,)).union(*map(free_names, syn.parts(expr)))
        case _:
            return frozenset[str]().union(*map(free_names, syn.parts(expr)))
