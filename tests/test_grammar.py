"""The language reference is true: its files check and are canonical, its pieces parse, its lists are the grammar's."""

from __future__ import annotations

import re
from pathlib import Path

import fault_files
import pytest

from commdsl.language.diagnostics import Severity, render_full
from commdsl.language.format import format_file
from commdsl.language.parser import parse
from commdsl.language.parser.syntax_fault import RESERVED
from commdsl.language.source import Source

GRAMMAR = Path(__file__).parent.parent / "grammar"
README = (GRAMMAR / "README.md").read_text(encoding="utf-8")
LARK = (GRAMMAR / "comm.lark").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```([^\n]+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCKS if found == kind]


@pytest.mark.parametrize("text", blocks("comm"), ids=range(len(blocks("comm"))))
def test_file(text: str) -> None:
    """A whole file is proved without an error and is canonical."""
    found = fault_files.diagnostics(text, "reference.comm")

    assert not [render_full(diagnostic) for diagnostic in found if diagnostic.severity is Severity.ERROR]
    assert format_file(parse(Source("reference.comm", text))) == text


@pytest.mark.parametrize("text", blocks("comm statements"), ids=range(len(blocks("comm statements"))))
def test_statements(text: str) -> None:
    """Statements parse inside a schedule and are canonical."""
    inside = "".join(f"  {line}\n" if line else "\n" for line in text.rstrip().split("\n"))
    whole = f"schedule s for P ranks {{\n{inside}}}\n"

    assert format_file(parse(Source("reference.comm", whole))) == whole


def test_no_other_examples() -> None:
    """Every example is of a kind that is tested."""
    assert {kind for kind, _ in BLOCKS} == {"comm", "comm statements", "text"}


def test_reserved_words() -> None:
    """The reference, the grammar and the messages agree on the keywords."""
    (listed,) = blocks("text")
    lookahead = re.search(r"^NAME: /\(\?!\(\?:([a-z|]+)\)", LARK, re.MULTILINE)
    assert lookahead is not None

    assert set(listed.split()) == set(lookahead[1].split("|")) == RESERVED


def test_terminals_are_named() -> None:
    """Every sign in quotes in a rule has a name of its own, so that no message shows a made-up one."""
    rules, terminals = LARK.split("// --- terminals")
    inline = set(re.findall(r'"([^"]+)"', re.sub(r"^//.*$", "", rules, flags=re.MULTILINE)))
    named = set(re.findall(r'^[A-Z_]+(?:\.\d)?: "([^"]+)"$', terminals, re.MULTILINE))

    assert inline <= named
