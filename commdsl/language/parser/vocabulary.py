"""Turns the grammar into the words and signs of the language, told apart as far as one can without parsing.

Assumes lark's tables: what may stand behind what is read from them. Does not read a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lark import Lark
from lark.lexer import PatternStr

from commdsl.language.parser import tables


@dataclass(frozen=True)
class Vocabulary:
    """Each in the order of the alphabet. A word of `sometimes` is a keyword where the grammar has it, else a name."""

    keywords: tuple[str, ...]  # everywhere
    sometimes: dict[str, frozenset[str]]  # with the signs that may stand behind the keyword
    between_numbers: tuple[str, ...]  # those of them that are keywords there alone: `128 x 256`
    before_names: tuple[str, ...]  # keywords behind which none of them is one
    operators: tuple[str, ...]  # keywords that stand for a sign: `and`
    signs: dict[str, str]  # the longer first, with the regular expression of each
    patterns: dict[str, str]  # regular expressions of units, strings, element types and comments


def vocabulary() -> Vocabulary:
    """That of `grammar/comm.lark`."""
    parser = tables.parser()
    plain = {terminal.name: terminal.pattern.value for terminal in parser.terminals}
    signs = {terminal.name for terminal in parser.terminals if isinstance(terminal.pattern, PatternStr)}
    written = {plain[name]: re.escape(plain[name]) for name in signs}
    written |= {sign: plain[name] for name, sign in (("_EQUAL", "="), ("_DOT", "."), ("MINUS", "-"))}
    words = {name: word for name, word in tables.words(parser).items() if re.fullmatch("[a-z]+", word)}
    sometimes = {name for name, word in words.items() if re.fullmatch(plain["NAME"], word)}
    behind = _behind(parser)
    numeric = {name for name in sometimes if {one for one in behind if name in behind[one]} == {"INT"}}
    names = {name for name in words if "NAME" in behind[name] and not behind[name] & sometimes}

    def listed(terminals: set[str]) -> tuple[str, ...]:
        return tuple(sorted(words[name] for name in terminals))

    return Vocabulary(
        listed(words.keys() - sometimes),
        {words[name]: frozenset(plain[one] for one in behind[name] & signs) for name in sorted(sometimes - numeric)},
        listed(numeric),
        listed(names),
        listed({"AND", "OR", "NOT", "_IN"}),
        dict(sorted(written.items(), key=lambda sign: (-len(sign[0]), sign[0]))),
        {name: plain[name] for name in ("RATE", "SIZE", "TIME", "STRING", "ELEMENT", "COMMENT")},
    )


def _behind(parser: Lark) -> dict[str, set[str]]:
    """Of each terminal those that may stand right behind it somewhere."""
    states = parser.parse_interactive("").parser_state.parse_conf.parse_table.states
    found: dict[str, set[str]] = {terminal.name: set() for terminal in parser.terminals}
    for name, state in _shifts(states):
        found.setdefault(name, set()).update(states[state])
    return found


def _shifts(states: dict[int, dict[str, tuple[object, int]]]) -> Iterator[tuple[str, int]]:
    """Every terminal that a state goes on with, and the state that it leads to."""
    for actions in states.values():
        yield from ((name, to) for name, (action, to) in actions.items() if str(action) == "Shift")
