"""Draws programs of tasks: products that depend on one another, of several factors, sizes and endings, and puts.

Each is a `.comm` text with the contract that it keeps, and a tree of what it computes, which `value` evaluates in
float64 by the rules of the language's README. Shares nothing with the compiler.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch


@dataclass(frozen=True)
class Leaf:
    """An input of the rank that is so far away."""

    name: str
    shift: int = 0


@dataclass(frozen=True)
class Made:
    """A sum of products and matrices, then a bias, an activation, and a residual."""

    terms: tuple[tuple[Node, Node], ...]
    added: tuple[Node, ...] = ()
    bias: Leaf | None = None
    activation: str = ""
    residual: Leaf | None = None


Node: TypeAlias = Leaf | Made


def moved(node: Node) -> Node:
    """Return the value that a put brings the next rank: all leaves are one rank further away."""
    if isinstance(node, Leaf):
        return replace(node, shift=node.shift - 1)
    return Made(
        tuple((moved(rows), moved(factor)) for rows, factor in node.terms),
        tuple(map(moved, node.added)),
        node.bias and moved_leaf(node.bias),
        node.activation,
        node.residual and moved_leaf(node.residual),
    )


def moved_leaf(leaf: Leaf) -> Leaf:
    return replace(leaf, shift=leaf.shift - 1)


def text_of(node: Node) -> str:
    """Return the term of a contract."""
    if isinstance(node, Leaf):
        return node.name if node.shift == 0 else f"{node.name} @ (r - {-node.shift}) % P"
    terms = [f"matmul({text_of(rows)}, {text_of(factor)})" for rows, factor in node.terms]
    terms += map(text_of, node.added)
    found = terms[0] if len(terms) == 1 else f"sum({', '.join(terms)})"
    ends = [f"bias {text_of(node.bias)}"] if node.bias else []
    ends += [node.activation] if node.activation else []
    ends += [f"residual {text_of(node.residual)}"] if node.residual else []
    return f"({found} with {', '.join(ends)})" if ends else found


def value(node: Node, rank: int, given: Sequence[Mapping[str, Any]]) -> Any:
    """Return the value on a rank, in float64."""
    if isinstance(node, Leaf):
        return given[(rank + node.shift) % len(given)][node.name].double()
    found = sum(value(rows, rank, given) @ value(factor, rank, given).t() for rows, factor in node.terms)
    found = found + sum(value(one, rank, given) for one in node.added)
    if node.bias:
        found = found + value(node.bias, rank, given)
    if node.activation == "gelu":
        found = found * torch.special.ndtr(found)
    if node.activation == "swiglu":
        gate, up = found.chunk(2, 1)
        found = gate * torch.sigmoid(gate) * up
    return found + (value(node.residual, rank, given) if node.residual else 0)


@dataclass
class Program:
    """A drawn text. `shapes`: by input, in the order of the text; `results`: by output its value."""

    text: str
    shapes: dict[str, tuple[int, ...]]
    results: dict[str, Node]
    is_exact: bool  # of whole numbers, whatever is rounded when


@dataclass
class _Drawing:
    """A program while it is drawn."""

    dice: random.Random
    rows: int
    widths: list[int]
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    held: dict[str, tuple[int, Node]] = field(default_factory=dict)  # matrices by name: the number of a width, a value
    factors: dict[tuple[int, int, bool], list[tuple[str, Node]]] = field(default_factory=dict)
    count: int = 0

    def new(self) -> str:
        self.count += 1
        return f"m{self.count}"

    def given(self, name: str, *shape: int) -> str:
        self.inputs[name] = shape
        return name

    def factor(self, depth: int, columns: int, *, is_gated: bool) -> tuple[str, Node]:
        """Return a factor of these sides: an input, or one that came from the rank before."""
        key = depth, columns, is_gated
        if key not in self.factors:
            wide = self.widths[columns] * (2 if is_gated else 1)
            name = self.given(f"w{depth}{columns}{'g' if is_gated else ''}", wide, self.widths[depth])
            self.factors[key] = [(name, Leaf(name))]
        if self.dice.random() < 0.25:
            source, node = self.dice.choice(self.factors[key])
            name = self.new()
            self.steps.append(f"each r {{ put {source} -> {name} @ (r + 1) % P }}")
            self.factors[key].append((name, moved(node)))
            return self.factors[key][-1]
        return self.dice.choice(self.factors[key])

    def put(self) -> None:
        source = self.dice.choice([*self.held])
        width, node = self.held[source]
        name = self.new()
        self.steps.append(f"each r {{ put {source} -> {name} @ (r + 1) % P }}")
        self.held[name] = width, moved(node)

    def product(self) -> None:
        """Add one product, or a sum of several, with an epilogue."""
        source = self.dice.choice([*self.held])
        depth, columns = self.held[source][0], self.dice.randrange(len(self.widths))
        activation = self.dice.choice(("", "", "", "gelu", "swiglu"))
        factor, by = self.factor(depth, columns, is_gated=activation == "swiglu")
        name, ends, bias, residual = self.new(), [], None, None
        if self.dice.random() < 0.3:
            shape = self.widths[columns] * (2 if activation == "swiglu" else 1)
            bias = Leaf(self.given(f"b{columns}{'g' if activation == 'swiglu' else ''}", shape))
            ends.append(f"bias {bias.name}")
        ends += [activation] if activation else []
        if self.dice.random() < 0.3:
            residual = Leaf(self.given(f"t{columns}", self.rows, self.widths[columns]))
            ends.append(f"residual {residual.name}")
        behind = f" with {', '.join(ends)}" if ends else ""
        self.steps.append(f"each r {{ compute matmul({source}, {factor} -> {name}){behind} }}")
        made = Made(((self.held[source][1], by),), (), bias, activation, residual)
        while not activation and residual is None and self.dice.random() < 0.4:
            made = self.added(name, columns, made)
        self.held[name] = columns, made

    def added(self, name: str, columns: int, made: Made) -> Made:
        """Add another product, or a matrix, to a result."""
        alike = [one for one, (width, _) in self.held.items() if width == columns]
        if alike and self.dice.random() < 0.5:
            other = self.dice.choice(alike)
            self.steps.append(f"each r {{ reduce {other} -> {name} }}")
            return replace(made, added=(*made.added, self.held[other][1]))
        source = self.dice.choice([*self.held])
        factor, by = self.factor(self.held[source][0], columns, is_gated=False)
        self.steps.append(f"each r {{ reduce matmul({source}, {factor}) -> {name} }}")
        return replace(made, terms=(*made.terms, (self.held[source][1], by)))


def drawn(seed: int, unit: int = 8) -> Program:
    """Return a random program. `unit`: what sides are multiples of."""
    dice = random.Random(seed)
    widths = [unit * dice.randrange(1, 9) for _ in range(dice.randrange(1, 4))]
    one = _Drawing(dice, unit * dice.randrange(1, 20), widths)
    for number in range(dice.randrange(1, 3)):
        width = dice.randrange(len(widths))
        name = one.given(f"x{number}", one.rows, widths[width])
        one.held[name] = width, Leaf(name)
    for _ in range(dice.randrange(2, 8)):
        one.put() if dice.random() < 0.3 else one.product()
    if not any(isinstance(node, Made) for _, node in one.held.values()):
        one.product()
    return _program(one)


def _program(one: _Drawing) -> Program:
    """Return the text: results that nothing reads are outputs, inputs that nothing reads are left out."""
    read = {word for step in one.steps for word in _words(step)}
    written = [name for name in one.held if name not in one.inputs]
    last = {name for name in written if sum(name in _words(step) for step in one.steps) == _writes(one.steps, name)}
    results = {name: one.held[name][1] for name in written if name in last}
    inputs = {name: shape for name, shape in one.inputs.items() if name in read}
    made = [f"m{number}" for number in range(1, one.count + 1)]
    lines = ["schedule drawn for P ranks where P >= 2 {"]
    lines += [f"  input {name}" for name in inputs]
    lines += [f"  {'output' if name in results else 'scratch'} {name}" for name in made]
    lines += ["  ensure each r {", *(f"    {name} == {text_of(node)}" for name, node in results.items()), "  }"]
    lines += [f"  {step}" for step in one.steps]
    put = {_words(step)[6] for step in one.steps if " put " in step}
    lands = any(put & {*_words(step)} for step in one.steps if " matmul " in step.replace("(", " "))
    lines += [f"  tune {{ protocol engine{'   landing place' if lands else ''} }}", "}", ""]
    is_exact = not any(word in one.steps[at] for at in range(len(one.steps)) for word in ("gelu", "swiglu"))
    return Program("\n".join(lines), inputs, results, is_exact)


def _words(step: str) -> list[str]:
    return step.replace("(", " ").replace(")", " ").replace(",", " ").split()


def _writes(steps: Sequence[str], name: str) -> int:
    return sum(f"-> {name})" in step or f"-> {name} " in step for step in steps)
