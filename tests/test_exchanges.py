"""What two yields to one function may exchange, and what not (C319)."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import mutants

from commdsl import compiler
from commdsl.language.diagnostics import CommError
from commdsl.language.syntax import File, ScheduleDecl


def read(text: str) -> tuple[File, ...]:
    return compiler.read_text(text, "exchanges.comm", Path())


def codes(text: str) -> list[str]:
    """What is wrong with it on 4 ranks."""
    try:
        compiler.check(read(text), ranks=4)
    except CommError as error:
        return [one.code for one in error.diagnostics]
    return []


def turns(head: str, first: str, others: str, copies: str = "") -> str:
    """A schedule of these buffers that yields first so, and at the other turns so; each turn begins with copies."""
    return f"""schedule turns for P ranks where P >= 2 {{
  inout kv
  {head}
  ensure rotation(kv)
  {copies.format(s=0)}
  {first}
  for s in 1 ..< P {{
    each r {{ put kv -> kv @ (r + 1) % P }}
    {copies.format(s="s")}
    {others}
  }}
}}"""


def in_turn(one: str, other: str) -> str:
    return f"if s % 2 == 0 {{ {one} }} else {{ {other} }}"


PIECES = turns(
    "input k[P blocks]  input v[P blocks]  scratch a  scratch b",
    "yield attend(kv, a, b)",
    "yield attend(kv, a, b)",
    "each r {{ copy k[{s}] -> a  copy v[{s}] -> b }}",
)
STATE = turns("inout acc  inout most", *2 * ["yield attend(kv, acc, most -> acc, most)"])
TYPES = turns("inout acc  inout lse float32", *2 * ["yield attend(kv -> acc, lse)"])
LENGTHS = turns("inout acc  input l  output lse like l", *2 * ["yield attend(kv -> acc, lse)"])


@pytest.mark.parametrize(
    ("text", "accepted"),
    [(PIECES, []), (STATE, ["acc, most"] * 2), (TYPES, []), (LENGTHS, [])],
    ids=["pieces", "state", "types", "lengths"],
)
def test_neighbours(text: str, accepted: list[str]) -> None:
    """Two that stand side by side are not exchanged at one yield alone, but for state as the function reads it: it may
    change one half, and the other at the next yield.
    """
    (declared,) = compiler.declared(read(text), ScheduleDecl)
    swapped = [mutant for mutant in mutants(declared) if mutant.kind == "swapped"]

    found = [(one.what, codes(one.text)) for one in swapped]

    assert codes(text) == []
    assert [what for what, codes in found if not codes] == accepted
    assert [codes for _, codes in found if codes] == (len(swapped) - len(accepted)) * [["C319"]]
    assert len(swapped) > len(accepted)


MEANT = {
    "one attends to the other, which attends to it": turns(
        "input text  input image", "yield attend(kv, text, image)", "yield attend(kv, image, text)"
    ),
    "results in turn": turns(
        "inout a  inout b", "yield work(kv -> a, b)", in_turn("yield work(kv -> a, b)", "yield work(kv -> b, a)")
    ),
    "the older of two is replaced": turns(
        "inout a  inout b",
        "yield step(kv, a, b -> a)",
        in_turn("yield step(kv, a, b -> a)", "yield step(kv, b, a -> b)"),
    ),
    "halves that are coupled in turn": turns(
        "inout a  inout b",
        "yield couple(kv, a, b -> a, b)",
        in_turn("yield couple(kv, a, b -> a, b)", "yield couple(kv, b, a -> b, a)"),
    ),
    "two types of two tensors": turns(
        "input x  input y float32  output a like x  output b like y",
        "yield norm(kv, x, y -> a, b)",
        "yield norm(kv, y, x -> b, a)",
    ),
    "another function": PIECES.replace("yield attend(kv, a, b)", "yield other(kv, b, a)", 1),
}


@pytest.mark.parametrize("text", MEANT.values(), ids=MEANT)
def test_what_may_be_meant(text: str) -> None:
    """Who says it as it is here is not asked to say it otherwise."""
    assert codes(text) == []
