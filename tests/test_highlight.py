"""Colours: every shipped file is coloured whole, nearly as the parser would, by Pygments and TextMate alike.

Assumes the committed TextMate grammar; `pytest tests/test_highlight.py --update-golden` writes it anew. Does not start
an editor.
"""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pygments.token import Error, Keyword, Operator

from commdsl.language.highlight import Kind, textmate
from commdsl.language.parser import tables
from commdsl.language.pygments_lexer import TOKENS, CommLexer

ROOT = Path(__file__).parent.parent
EDITORS = ROOT / "grammar" / "editors"
FILES = [*sorted((ROOT / "schedules").rglob("*.comm")), ROOT / "tests" / "everything.comm"]


def coloured(text: str) -> list[tuple[int, Any, str]]:
    """What Pygments makes of a text: where a token begins, what it is, what it says."""
    return list(CommLexer().get_tokens_unprocessed(text))


def test_shipped_files_are_coloured_whole() -> None:
    """No sign of a shipped file is an error, and none is lost."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        found = coloured(text)
        assert [said for _, kind, said in found if kind is Error] == []
        assert "".join(said for _, _, said in found) == text


def test_keywords_are_those_of_the_parser() -> None:
    """Of the words of the shipped files 99 in 100 are a keyword or a name as the parser has them."""
    words = wrong = 0
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        found = {start: (kind, said) for start, kind, said in coloured(text)}
        for token in tables.parser().parse_interactive(text).exhaust_lexer():
            if re.match(r"[A-Za-z_]", token):
                kind, said = found.get(token.start_pos, (Error, ""))
                is_keyword = kind in Keyword or kind is Operator.Word
                words += 1
                wrong += said != token or is_keyword == (token.type == "NAME")

    assert words > 6000
    assert wrong / words < 0.01


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("input x   output y", "KEYWORD NAME KEYWORD NAME"),
        ("group node = ranks in runs of G", "KEYWORD NAME OPERATOR KEYWORD OPERATOR_WORD KEYWORD KEYWORD NAME"),
        ("tiles 128 x 256", "KEYWORD NUMBER KEYWORD NUMBER"),
        ("put x[key] -> y @ 0", "KEYWORD NAME PUNCTUATION NAME PUNCTUATION OPERATOR NAME OPERATOR NUMBER"),
        ("schedule plan for P ranks", "KEYWORD DECLARED KEYWORD NAME KEYWORD"),
        ("link rail across nodes 50 GB/s", "KEYWORD NAME KEYWORD KEYWORD NUMBER UNIT"),
        ("put x -> y as float8 by 128", "KEYWORD NAME OPERATOR NAME KEYWORD TYPE KEYWORD NUMBER"),
        ('use "a.comm" # all', "KEYWORD STRING COMMENT"),
        ("a and not b", "NAME OPERATOR_WORD OPERATOR_WORD NAME"),
        ("forP(s)", "FUNCTION PUNCTUATION NAME PUNCTUATION"),
    ],
)
def test_kinds(text: str, kinds: str) -> None:
    """A word that is a keyword only in places is one there, and a name elsewhere."""
    names = {token: kind.name for kind, token in TOKENS.items()}
    assert " ".join(names[kind] for _, kind, said in coloured(text) if said.strip()) == kinds


def test_textmate_grammar(request: pytest.FixtureRequest) -> None:
    """The committed TextMate grammar is what is made of the language's grammar."""
    path, made = EDITORS / "comm.tmLanguage.json", json.dumps(textmate(), indent=2) + "\n"
    if request.config.getoption("--update-golden"):
        path.write_text(made, encoding="utf-8")

    assert path.read_text(encoding="utf-8") == made, "written anew by --update-golden"


def test_textmate_colours_as_pygments_does() -> None:
    """Applied as an editor does, line by line, the committed grammar gives every letter the scope of its token."""
    rules = json.loads((EDITORS / "comm.tmLanguage.json").read_text(encoding="utf-8"))["patterns"]
    compiled = [(re.compile(rule["match"]), rule) for rule in rules]
    for path in FILES[::8]:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert list(_scopes(line, compiled)) == [
                (start, f"{scope}.comm") for start, scope in _expected(line) if scope
            ]


def _expected(line: str) -> Iterator[tuple[int, str]]:
    scopes = {token: kind.value for kind, token in TOKENS.items()}
    yield from ((start, scopes[kind]) for start, kind, _ in coloured(line))


def _scopes(line: str, rules: list[tuple[re.Pattern[str], dict[str, Any]]]) -> Iterator[tuple[int, str]]:
    """Of each piece of a line where it begins, and its scope: of the rules that fit first the first."""
    at = 0
    while found := [match for expression, _ in rules if (match := expression.search(line, at))]:
        match = min(found, key=lambda match: match.start())
        rule = next(rule for expression, rule in rules if expression is match.re)
        if "name" in rule:
            yield match.start(), rule["name"]
        for group, named in rule.get("captures", {}).items():
            yield match.start(int(group)), named["name"]
        at = match.end()


def test_what_finds_it() -> None:
    """Pygments finds the lexer by its entry point, and VS Code the grammar by the package beside it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["pygments.lexers"]["comm"].partition(":")
    assert getattr(importlib.import_module(module), name) is CommLexer
    package = json.loads((EDITORS / "package.json").read_text(encoding="utf-8"))
    (language,), (grammar,) = package["contributes"]["languages"], package["contributes"]["grammars"]
    assert package["version"] == project["version"]
    assert (grammar["language"], grammar["scopeName"]) == (language["id"], textmate()["scopeName"])
    for place in (language["configuration"], grammar["path"]):
        assert json.loads((EDITORS / place).read_text(encoding="utf-8"))
    assert {kind for kind in Kind if kind not in TOKENS} == set()
