"""Contracts name functions: drawn programs keep the contracts they were drawn with, and no others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from commdsl.checks import check_schedule
from commdsl.checks.conservation import broken_contracts
from commdsl.checks.contributions import forward, initial, promised
from commdsl.checks.locations import Located
from commdsl.checks.terms import Terms
from commdsl.ir import resolve
from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import Diagnostic
from commdsl.language.format import format_file
from commdsl.language.parser import parse
from commdsl.language.source import Source
from commdsl.language.syntax import ScheduleDecl
from commdsl.machine.resources import data_dir
from commdsl.machine.topology import switch


@dataclass(frozen=True)
class Node:
    """A term: a chunk, `all` of a term, a function, or an epilogue; of the rank `shift` behind that around it."""

    head: str
    parts: tuple[Node, ...] = ()
    shift: int = 0
    result: int = 0

    def moved(self, shift: int) -> Node:
        """The same, as another rank sees it: a sum over all ranks is alike everywhere."""
        if self.head == "all":
            return self
        return replace(self, shift=self.shift + shift) if not self.parts else self.over(lambda one: one.moved(shift))

    def over(self, change: Callable[[Node], Node]) -> Node:
        return replace(self, parts=tuple(map(change, self.parts)))

    def text(self, rank: str = "r") -> str:
        """As a contract has it."""
        if not self.parts:
            if not self.shift:
                return self.head + ("" if rank == "r" else f" @ {rank}")
            return f"{self.head} @ ({rank} + {self.shift}) % P"
        parts = [one.text(rank) for one in self.parts]
        match self.head:
            case "all":
                inner = "q" + rank
                return f"sum({self.parts[0].text(inner)} for {inner} in 0 ..< P)"
            case "sum":
                return f"sum({', '.join(parts)})"
            case "bias" | "residual":
                return f"({parts[0]} with {self.head} {parts[1]})"
            case "gelu" | "swiglu":
                return f"({parts[0]} with {self.head})"
            case "add_rms_norm":
                return f"{self.head}({', '.join(parts)})[{self.result}]"
            case _:
                return f"{self.head}({', '.join(parts)})"


@dataclass
class Drawn:
    """A program of functions, and what each of its buffers holds."""

    dice: random.Random
    steps: list[str] = field(default_factory=list)
    scratch: list[str] = field(default_factory=list)
    held: dict[str, Node] = field(default_factory=lambda: {name: Node(name) for name in ("x", "z")})

    def fresh(self) -> str:
        self.scratch.append(f"s{len(self.scratch)}")
        return self.scratch[-1]

    def step(self) -> None:
        dice, source, other = self.dice, self.dice.choice(sorted(self.held)), self.dice.choice(sorted(self.held))
        of, dest = self.held[source], self.fresh()
        match dice.choice(("put", "matmul", "matmul", "accumulate", "reduce", "gather", "norm", "add", "multiply")):
            case "put":
                self.steps.append(f"each r {{ put {source} -> {dest} @ (r + 1) % P }}")
                made = of.moved(-1)
            case "matmul":
                factor = dice.choice("wv")
                made, ends = Node("matmul", (of, Node(factor))), list[str]()
                if dice.random() < 0.4:
                    made, ends = Node("bias", (made, Node("b"))), [*ends, "bias b"]
                if dice.random() < 0.4:
                    ends.append(dice.choice(("gelu", "swiglu")))
                    made = Node(ends[-1], (made,))
                if dice.random() < 0.4:
                    made, ends = Node("residual", (made, Node("t"))), [*ends, "residual t"]
                tail = f" with {', '.join(ends)}" if ends else ""
                self.steps.append(f"each r {{ compute matmul({source}, {factor} -> {dest}){tail} }}")
            case "accumulate":
                self.steps += [
                    f"each r {{ copy {other} -> {dest} }}",
                    f"each r {{ reduce matmul({source}, w) -> {dest} }}",
                ]
                made = Node("sum", (self.held[other], Node("matmul", (of, Node("w")))))
            case "reduce":
                self.steps += [f"each r {{ copy {other} -> {dest} }}", f"each r {{ reduce {source} -> {dest} }}"]
                made = Node("sum", (self.held[other], of))
            case "gather":
                self.steps.append(f"each r {{ reduce {source} @ all -> {dest} }}")
                made = Node("all", (of,))
            case "norm":
                second = self.fresh()
                self.steps.append(f"compute add_rms_norm({source}, t, n, eps -> {dest}, {second})")
                parts = (of, Node("t"), Node("n"), Node("eps"))
                made, self.held[second] = Node("add_rms_norm", parts), Node("add_rms_norm", parts, result=1)
            case name:
                self.steps.append(f"compute {name}({source}, {other} -> {dest})")
                made = Node(name, (of, self.held[other]))
        self.held[dest] = made

    def program(self, contract: Node) -> str:
        last = self.scratch[-1]
        lines = [f"  scratch {name}" for name in self.scratch] + [
            "  output y",
            f"  ensure each r {{ y == {contract.text()} }}",
        ]
        given = [f"  input {name}" for name in ("x", "z", "w", "v", "b", "d", "t", "n")]
        steps = [f"  {step}" for step in (*self.steps, f"each r {{ copy {last} -> y }}")]
        return "\n".join(
            ["schedule drawn for P ranks where P >= 2 {", *given, "  input eps float32", *lines, *steps, "}"]
        )


def mutants(node: Node, ranks: int) -> Iterator[Node]:
    """With one thing changed: a function, an operand, an ending, a rank, the order of operands, a result left out."""
    if not node.parts:
        yield replace(node, shift=node.shift + 1)
        other = {"x": "z", "z": "x", "w": "v", "v": "w", "b": "d", "t": "d"}.get(node.head)
        if other is not None:
            yield replace(node, head=other)
        return
    swapped = {
        "add": "multiply",
        "multiply": "add",
        "gelu": "swiglu",
        "swiglu": "gelu",
        "residual": "bias",
        "bias": "residual",
    }
    if node.head in swapped:
        yield replace(node, head=swapped[node.head])
    if node.head == "add_rms_norm":
        yield replace(node, result=1 - node.result)
    yield node.parts[0]
    if node.head in ("matmul", "add"):
        yield replace(node, parts=node.parts[::-1])
    if node.head == "sum":
        yield Node("add", node.parts)
        yield replace(node, parts=(*node.parts, node.parts[0]))
    for at, part in enumerate(node.parts):
        for changed in mutants(part, ranks):
            yield replace(node, parts=(*node.parts[:at], changed, *node.parts[at + 1 :]))


def canonical(node: Node, ranks: int, at: int) -> object:
    """A second opinion on what a term is on a rank: nested tuples, of sums a sorted bag of terms."""
    return tuple(sorted(bag(node, ranks, at), key=repr))


def bag(node: Node, ranks: int, at: int) -> list[object]:
    parts = [lambda where, one=one: bag(one, ranks, where) for one in node.parts]
    match node.head:
        case "all":
            return [one for rank in range(ranks) for one in parts[0](rank)]
        case "sum" | "residual":
            return [one for part in parts for one in part(at)]
        case "bias":
            return [*parts[0](at), ("bias", canonical(node.parts[1], ranks, at))]
        case _ if not node.parts:
            return [(node.head, (at + node.shift) % ranks)]
        case head:
            operands = [canonical(one, ranks, at) for one in node.parts]
            return [(head, node.result, *(sorted(operands, key=repr) if head in ("add", "multiply") else operands))]


def meant(text: str, ranks: int) -> Schedule:
    """What a text means on so many ranks. Raises CommError."""
    files = (parse(Source("drawn.comm", text)),)
    (decl,) = (one for one in files[0].items if isinstance(one, ScheduleDecl))
    return resolve.resolve(files, decl, ranks, switch(ranks), {})


def broken(text: str, ranks: int) -> list[Diagnostic]:
    """What is wrong with a contract."""
    return list(broken_contracts(Located(meant(text, ranks))))


@pytest.mark.parametrize("seed", range(4))
def test_drawn_programs(seed: int, turns: Callable[..., int]) -> None:
    """What was drawn is proved; of changed contracts those alone that mean the same, by a second opinion."""
    refused = kept = 0
    for turn in range(turns(120)):
        dice = random.Random(1000 * seed + turn)
        ranks, drawn = dice.randint(2, 4), Drawn(dice)
        for _ in range(dice.randint(1, 5)):
            drawn.step()
        right = drawn.held[drawn.scratch[-1]]
        text = drawn.program(right)
        assert broken(text, ranks) == [], text
        every = list(mutants(right, ranks))
        for mutant in dice.sample(every, min(8, len(every))):
            changed = drawn.program(mutant)
            is_same = all(canonical(mutant, ranks, at) == canonical(right, ranks, at) for at in range(ranks))
            found = broken(changed, ranks)
            assert len(found) == (not is_same), changed
            refused, kept = refused + len(found), kept + is_same
            for one in found:
                notes = one.notes[:2]
                assert notes[0].removeprefix("expected ") != notes[1].removeprefix("got ") or "..." in notes[0]
    assert refused > 10 * kept


@pytest.mark.parametrize("seed", range(2))
def test_exact_terms_are_those_of_the_fingerprints(seed: int, turns: Callable[..., int]) -> None:
    """The exact terms of each location, and of the contract there, are equal where the fingerprints are."""
    for turn in range(turns(48)):
        dice = random.Random(77 * seed + turn)
        drawn, ranks = Drawn(dice), dice.randint(2, 3)
        for _ in range(dice.randint(1, 6)):
            drawn.step()
        right = drawn.held[drawn.scratch[-1]]
        for contract in (right, *list(mutants(right, ranks))[:4]):
            located = Located(meant(drawn.program(contract), ranks))
            (said,) = located.schedule.contracts
            start = initial(located)
            end = initial(located)
            for _ in forward(located, end):
                pass
            terms, places = Terms(located), located.contract_dests(said)
            equal = promised(located, said, start).equal(end.at(places))
            for row, place in enumerate(places.tolist()):
                assert (terms.found(place) == terms.wanted(said, row)) == equal[row]


@pytest.mark.parametrize("seed", range(3))
def test_layout_keeps_terms(seed: int, turns: Callable[..., int]) -> None:
    """A drawn contract is formatted to a text that means the same, and stays as it is when formatted again."""
    for turn in range(turns(80)):
        drawn = Drawn(random.Random(31 * seed + turn))
        for _ in range(4):
            drawn.step()
        text = drawn.program(drawn.held[drawn.scratch[-1]])
        once = format_file(parse(Source("drawn.comm", text)))
        assert format_file(parse(Source("drawn.comm", once))) == once
        assert parse(Source("drawn.comm", once)).items == parse(Source("drawn.comm", text)).items


OPERATIONS = """schedule norm for P ranks where P >= 2 {{
  input x
  input t
  input n
  input eps float32
  scratch s
  output y
  output z
  ensure each r {{ y, z == add_rms_norm({said}(x @ all), t, n, eps) }}
  each r {{ reduce x @ all -> s by {done} }}
  compute add_rms_norm(s, t, n, eps -> y, z)
}}
"""

TWO = """schedule two for P ranks where P >= 2 {{
  input x
  scratch u
  scratch v
  scratch c
  output y
  ensure each r {{ y == add({said}(x @ all), {said}(x @ q for q in 0 ..< P if q != r)) }}
  each r {{ reduce x @ all -> u by max   reduce x @ q for q in 0 ..< P if q != r -> v by {done} }}
  compute add(u, v -> c)
  each r {{ copy c -> y }}
}}
"""


@pytest.mark.parametrize("text", [OPERATIONS, TWO])
@pytest.mark.parametrize("said", ["max", "min", "sum"])
@pytest.mark.parametrize("done", ["max", "min"])
def test_operations_inside_functions(text: str, said: str, done: str) -> None:
    """An operation that combined what a function reads is the one that the contract names inside it."""
    found = [one.code for one in check_schedule(meant(text.format(said=said, done=done), 3))]
    is_right = said == done and (text == OPERATIONS or done == "max")
    assert ("C327" in found) == (not is_right)
    assert "C330" not in found


VAGUE = [
    ("allgather_matmul", "each r, q, i in 0 ..< C {{ {} }}", "c[q, i] == x[i] @ q", "matmul(x[i] @ q, w)"),
    (
        "matmul_allreduce",
        "each r, q, i in 0 ..< C {{ {} }}",
        "y[q, i] == sum(x[q, i] @ all)",
        "matmul(x[q, i], w) @ all",
    ),
    ("matmul_reducescatter", "each r, i in 0 ..< C {{ {} }}", "y[i] == sum(x[r, i] @ all)", "matmul(x[r, i], w) @ all"),
    ("allreduce_rms_norm", "allreduce(x -> y)", "", "add_rms_norm(sum(x @ all), residual, w, eps)[0]"),
]


@pytest.mark.parametrize(("name", "form", "clause", "named"), VAGUE)
def test_a_contract_without_functions_is_told_what_to_say(name: str, form: str, clause: str, named: str) -> None:
    """The help has the contract that names the functions, in the words of the vague one; with it all is well."""
    text = (data_dir("schedules") / "overlap" / f"{name}.comm").read_text(encoding="utf-8")
    start, end = text.index("  ensure "), text.index("\n\n", text.index("  ensure "))
    vague = f"{text[:start]}  ensure {form.format(clause)}{text[end:]}"
    (found,) = broken(vague, 3)
    assert (found.code, named in found.help) == ("C330", True)
    said = found.help.partition("as in `")[2].removesuffix("`")
    form = form if clause else "each r {{ {} }}"
    assert broken(f"{text[:start]}  ensure {form.format(said)}{text[end:]}", 3) == []
