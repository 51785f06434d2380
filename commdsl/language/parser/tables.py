"""Turns the grammar into lark's parser, by way of tables that are kept.

Assumes nothing but the grammar. Does not parse.
"""

from __future__ import annotations

import io
import sys
from functools import cache as memoize
from pathlib import Path

from lark import Lark
from lark import __version__ as lark_version
from lark.lexer import PatternStr, TerminalDef

from commdsl.language.parser import syntax_fault
from commdsl.machine.cache import kept, key
from commdsl.machine.config import from_environment
from commdsl.machine.resources import data_dir

_WORDS = {
    "NAME": syntax_fault.A_NAME,
    "INT": syntax_fault.A_NUMBER,
    "FLOAT": syntax_fault.A_NUMBER,
    "RATE": syntax_fault.A_RATE,
    "SIZE": syntax_fault.A_SIZE,
    "TIME": syntax_fault.A_TIME,
    "STRING": syntax_fault.A_STRING,
    "ELEMENT": syntax_fault.A_TYPE,
    "_EQUAL": "=",
    "_DOT": ".",
    "MINUS": "-",
    "SUM": "sum",
    "OPERATION": syntax_fault.A_NAME,  # where one stands, too
    "_ROUNDED": "rounded",
}


def parser() -> Lark:
    """The parser of `.comm` texts."""
    return _parser(from_environment().cache_dir)


def words(parser: Lark) -> dict[str, str]:
    """What a user would call each terminal, by its name."""
    return {terminal.name: _word(terminal) for terminal in parser.terminals} | {"$END": syntax_fault.END}


def _word(terminal: TerminalDef) -> str:
    if terminal.name in _WORDS:
        return _WORDS[terminal.name]
    value = terminal.pattern.value
    return value if isinstance(terminal.pattern, PatternStr) else value.removesuffix(r"\b")


@memoize
def _parser(cache_dir: Path | None) -> Lark:
    """The tables take ten times longer to build than to load, so they are kept in the cache."""
    grammar = (data_dir("grammar") / "comm.lark").read_text(encoding="utf-8")
    versions = f"{lark_version} {sys.version_info[:2]}"
    tables = kept(cache_dir, key(["grammar", versions, grammar]), bytes, lambda: _tables(grammar))
    return Lark.load(io.BytesIO(tables))


def _tables(grammar: str) -> bytes:
    made = io.BytesIO()
    Lark(grammar, parser="lalr", lexer="contextual", propagate_positions=True, maybe_placeholders=True).save(made)
    return made.getvalue()
