"""Turns a text into the items of a file by lark's tables, as lark would, but builds no tree in between.

Assumes rules without templates, and no terminal that is a string which the pattern of another matches, too. Does not
say what was meant where it stops: `mistakes` does. By way of lark's trees half a million signs, which are 1 MB, take
more than twice the time, and four times the memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache as memoize
from typing import TypeAlias

from lark import Lark
from lark.grammar import Rule, Terminal
from lark.lexer import TerminalDef

from commdsl.language.diagnostics import CommError
from commdsl.language.parser import build_syntax, mistakes, tables
from commdsl.language.parser.build_syntax import Made
from commdsl.language.parser.syntax_fault import Fault
from commdsl.language.source import Source, Span
from commdsl.language.syntax import Item

END = "$END"
MAX_DEPTH = 100  # what nests deeper is refused, so that every later pass may recurse
NO_NODE = -1
"""How deep the nodes of what has none nest."""

Match: TypeAlias = Callable[[str, int], "re.Match[str] | None"]


# --- the tables -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is made of a rule's symbols. `parts`: of each that is kept its index, whether it is a list whose entries are
    meant, and how many that may be there and are not come before it; `missing` come behind the last.
    """

    size: int
    origin: str
    parts: tuple[tuple[int, bool, int], ...]
    missing: int
    build: Callable[[Span, Sequence[Made]], Made] | None  # None: a list
    is_transparent: bool  # nothing is made of a single part
    passes_on: bool  # of its one symbol: only the state changes
    is_plain: bool  # no part is a list, and none may be missing

    def _listed(self, symbols: list[Made]) -> list[Made]:
        parts: list[Made] = []
        for index, is_list, missing in self.parts:
            parts += [None] * missing
            if not is_list:
                parts.append(symbols[index])
            elif parts:
                parts += symbols[index]
            else:  # nobody else has it, and it may be long
                parts = symbols[index]
        return parts + [None] * self.missing if self.missing else parts

    def value(self, symbols: list[Made], source: Source, start: int, end: int) -> tuple[Made, bool]:
        """What is made of these, and whether it is a node."""
        parts = [symbols[index] for index, _, _ in self.parts] if self.is_plain else self._listed(symbols)
        if self.is_transparent and len(parts) == 1:
            return parts[0], False
        if self.build is None:
            return parts, False
        return self.build(Span(source, start, end), parts), True


@dataclass(frozen=True, slots=True)
class State:
    """What finds the sign that comes next, and by its terminal or a rule the state to go on with, or a reduction."""

    match: Match
    actions: dict[str, int | Reduction]


class States(dict[int, State]):
    """Each made when it is first reached: few files reach most of them."""

    def __init__(self, parser: Lark) -> None:
        conf = parser.parse_interactive("").parser_state.parse_conf
        self.start: int = conf.start_state
        self.end: int = conf.end_state
        self._actions = conf.states
        self._terminals = {terminal.name: terminal for terminal in parser.terminals}
        ignored = "|".join(self._terminals[name].pattern.to_regexp() for name in parser.lexer_conf.ignore)
        self._ignored = f"(?>(?:{ignored})*)"  # as a whole: no sign is looked for inside a comment
        self._matches: dict[frozenset[str], Match] = {}
        self._reductions: dict[int, Reduction] = {}
        self.chains: dict[tuple[int, int, str], int] = {}
        self.skip = re.compile(self._ignored).match

    def __missing__(self, number: int) -> State:
        actions = {name: self._action(arg) for name, (_, arg) in self._actions[number].items()}
        expected = frozenset(actions.keys() & self._terminals.keys())
        if expected not in self._matches:
            self._matches[expected] = self._match([self._terminals[name] for name in expected])
        self[number] = State(self._matches[expected], actions)
        return self[number]

    def _match(self, terminals: list[TerminalDef]) -> Match:
        """Of the terminals that fit behind what is ignored the first, in lark's order."""
        terminals.sort(key=lambda one: (-one.priority, -one.pattern.max_width, -len(one.pattern.value), one.name))
        either = "|".join(f"(?P<{one.name}>{one.pattern.to_regexp()})" for one in terminals)
        return re.compile(f"{self._ignored}(?:{either or '(?!)'})").match

    def _action(self, arg: int | Rule) -> int | Reduction:
        if isinstance(arg, int):
            return arg
        if id(arg) not in self._reductions:  # a rule's own hash is that of all its symbols
            self._reductions[id(arg)] = _reduction(arg)
        return self._reductions[id(arg)]

    def go_on(self, state: int, origin: str) -> int:
        """The state behind a rule that was made in this one."""
        target = self[state].actions[origin]
        assert isinstance(target, int)
        return target

    def behind(self, before: int, state: int, name: str) -> int:
        """The state when all has been passed on that can be: the way from a number to an expression has ten rules."""
        key = before, state, name
        if key not in self.chains:
            while isinstance(by := self[state].actions.get(name), Reduction) and by.passes_on:
                state = self.go_on(before, by.origin)
            self.chains[key] = state
        return self.chains[key]


def _reduction(rule: Rule) -> Reduction:
    symbols, name = rule.expansion, rule.origin.name
    gaps = "".join(str(int(is_empty)) for is_empty in rule.options.empty_indices or [False] * len(symbols)).split("0")
    parts, missing = list[tuple[int, bool, int]](), 0
    for index, symbol in enumerate(symbols):
        missing += len(gaps[index])
        if not (isinstance(symbol, Terminal) and symbol.filter_out):
            parts.append((index, not symbol.is_term and symbol.name.startswith("_"), missing))
            missing = 0
    missing += len(gaps[-1])
    is_transparent = bool(rule.options.expand1 and not rule.alias)
    is_plain = not (missing or any(is_list or before for _, is_list, before in parts))
    passes_on = is_transparent and is_plain and len(symbols) == len(parts) == 1
    build = build_syntax.RULES.get(rule.alias or name)
    return Reduction(len(symbols), name, tuple(parts), missing, build, is_transparent, passes_on, is_plain)


@memoize
def _states(parser: Lark) -> States:
    return States(parser)


# --- reading ----------------------------------------------------------------------------------------------------------


class _Stack:
    """What has been read and is part of nothing yet: of each entry the state behind it, its value, where it begins and
    ends, and how deep its nodes nest.
    """

    def __init__(self, source: Source, states: States) -> None:
        self.source = source
        self.known = states
        self.states = [states.start]
        self.values: list[Made] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.heights: list[int] = []

    def shift(self, state: int, value: Made, start: int, end: int) -> None:
        self.states.append(state)
        self.values.append(value)
        self.starts.append(start)
        self.ends.append(end)
        self.heights.append(NO_NODE)

    def reduced(self, name: str, at: int) -> int:
        """Makes all that ends before a terminal, which begins at an offset. The state to go on with."""
        known, states = self.known, self.states
        while not isinstance(by := known[states[-1]].actions.get(name), int):
            if by is None:
                raise self.stopped(at)
            if by.passes_on:
                states[-1] = known.behind(states[-2], states[-1], name)
            else:
                self.reduce(by)
                if states[-1] == known.end:
                    return known.end
        return by

    def stopped(self, at: int) -> CommError:
        """What to raise where no sign fits."""
        words = tables.words(tables.parser())
        expected = frozenset(word for name, word in words.items() if self.accepts(name))
        return CommError((mistakes.explain(Fault(self.source, at, expected)),))

    def accepts(self, name: str) -> bool:
        """Whether a terminal may come: when all that ends before it is made, there is a state to go on with."""
        states = list(self.states)
        while not isinstance(by := self.known[states[-1]].actions.get(name), int):
            if by is None or states[-1] == self.known.end:
                return by is not None
            del states[len(states) - by.size :]
            states.append(self.known.go_on(states[-1], by.origin))
        return True

    def reduce(self, by: Reduction) -> None:
        if by.size == 0:  # an empty file
            self.shift(self.known.go_on(self.states[-1], by.origin), [], 0, 0)
            return
        first = len(self.values) - by.size
        end = self.ends[-1]
        value, is_node = by.value(self.values[first:], self.source, self.starts[first], end)
        self.values[first:] = (value,)
        self.ends[first:] = (end,)
        self.heights[first:] = (max(self.heights[first:]) + is_node,)
        if self.heights[-1] > MAX_DEPTH:
            raise CommError((mistakes.too_deep(Span(self.source, self.starts[first], end), MAX_DEPTH),))
        del self.starts[first + 1 :]
        del self.states[first + 1 :]
        self.states.append(self.known.go_on(self.states[-1], by.origin))


def items(source: Source) -> tuple[Item, ...]:
    """The items of a file. Raises CommError with its first syntax fault, be it a sign, a depth or a number."""
    states, text, at = _states(tables.parser()), source.text, 0
    stack = _Stack(source, states)
    while (match := states[stack.states[-1]].match(text, at)) is not None:
        name = match.lastgroup
        assert name is not None
        start, end = match.span(name)
        state = stack.reduced(name, start)
        build = build_syntax.TOKENS.get(name)
        stack.shift(state, match[name] if build is None else build(Span(source, start, end), match[name]), start, end)
        at = end
    blank = states.skip(text, at)
    assert blank is not None
    if blank.end() < len(text):
        raise stack.stopped(blank.end())
    stack.reduced(END, len(text))
    return tuple(stack.values[-1])
