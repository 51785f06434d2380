"""Turns the offset where parsing stopped into what stands around it: signs, brackets, what was expected.

Assumes the parser names what it expected by the text of a keyword or sign, or by one of the words below. Does not parse
and does not judge: it has a scanner of its own, so that it sees `&&` as a writer does; `mistakes` draws the conclusion.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from commdsl.language.source import Source, Span

A_NAME = "a name"
A_NUMBER = "a number"
A_RATE = "a rate such as `GB/s`"
A_SIZE = "a size such as `KB`"
A_TIME = "a time such as `us`"
A_STRING = "a path in double quotes"
A_TYPE = "an element type such as `float32`"
END = "the end of the file"

PLAIN = (A_NAME, A_NUMBER, A_RATE, A_SIZE, A_TIME, A_STRING, A_TYPE, END)
COMPARISONS = frozenset(("==", "!=", "<", "<=", ">", ">="))
SIGNS = frozenset(("|", "^", "&", "<<", ">>", "+", "-", "*", "/", "%", "**", ".", "(", "["))
OPERATORS = frozenset(("or", "and", "not")) | COMPARISONS | SIGNS
STATEMENTS = ("put", "each", "for", "let")
CLOSERS = {"(": ")", "[": "]", "{": "}"}
ITEMS = ("use", "fn", "schedule", "topology", "roles", "plan", "dispatch")
# fmt: off
RESERVED = frozenset((
    "use", "schedule", "topology", "roles", "for", "in", "if", "else", "let", "each", "where", "ensure", "cycles",
    "yield", "tune", "on", "all", "input", "output", "inout", "scratch", "put", "get", "copy", "reduce", "and", "or",
    "not", "blocks", "sms", "link", "missing", "degraded", "per",
))
# fmt: on

_SIGN = re.compile(
    r'#[^\n]*|"[^"\n]*"?|[A-Za-z_]\w*|[0-9][0-9A-Za-z_]*(?:\.[0-9]+)?[0-9A-Za-z_]*'
    r"|\.\.[<.=]?|->|=>|==|!=|<=|>=|<<|>>|\*\*|&&|\|\||//|:=|\+\+|--|[-+*/%]=|\S"
)


@dataclass(frozen=True, slots=True)
class Sign:
    """A word, number or sign as a reader sees it."""

    text: str
    start: int
    end: int

    @property
    def is_word(self) -> bool:
        return self.text[:1].isalpha() or self.text[:1] == "_"


@dataclass(frozen=True)
class Fault:
    """Where parsing stopped (the length of the text: at its end), and what it could have gone on with."""

    source: Source
    start: int
    expected: frozenset[str]

    @cached_property
    def signs(self) -> tuple[Sign, ...]:
        found = _SIGN.finditer(self.source.text)
        return tuple(Sign(match[0], *match.span()) for match in found if not match[0].startswith("#"))

    @cached_property
    def index(self) -> int:
        """The sign at fault; `len(signs)` at the end of the text."""
        return next((i for i, sign in enumerate(self.signs) if sign.end > self.start), len(self.signs))

    def sign(self, offset: int = 0) -> Sign | None:
        """The sign at fault, or one before or after it."""
        at = self.index + offset
        return self.signs[at] if 0 <= at < len(self.signs) else None

    @cached_property
    def word(self) -> str:
        sign = self.sign()
        return sign.text if sign is not None else ""

    @cached_property
    def got(self) -> str:
        return f"`{shorten(self.word)}`" if self.word else END

    @cached_property
    def here(self) -> Span:
        sign = self.sign()
        return self.behind if sign is None else Span(self.source, sign.start, sign.end)

    @cached_property
    def behind(self) -> Span:
        """The empty place right after the sign before the fault: where what is missing would stand."""
        before = self.sign(-1)
        at = 0 if before is None else before.end
        return Span(self.source, at, at)

    @cached_property
    def on_a_new_line(self) -> bool:
        before = self.sign(-1)
        end = len(self.source.text) if self.sign() is None else self.here.start
        return before is not None and "\n" in self.source.text[before.end : end]

    @cached_property
    def wants_expression(self) -> bool:
        return {A_NAME, A_NUMBER, "("} <= self.expected

    @cached_property
    def open_brackets(self) -> tuple[Sign, ...]:
        """The brackets open at the fault, outermost first."""
        stack: list[Sign] = []
        for sign in self.signs[: self.index]:
            if sign.text in CLOSERS:
                stack.append(sign)
            elif stack and sign.text == CLOSERS[stack[-1].text]:
                stack.pop()
        return tuple(stack)


def shorten(word: str) -> str:
    """A word as a message quotes it."""
    return word if len(word) <= 24 else f"{word[:21]}..."
