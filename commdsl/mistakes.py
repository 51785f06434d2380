"""Turns the place where parsing stopped, and what could have stood there, into one diagnostic in the user's words.

Assumes the parser names what it expected by the text of a keyword or sign, or by one of the words below. Does not parse:
it looks at the signs around the fault with a scanner of its own, and tries a list of common mistakes before the general
answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

from commdsl.diagnostics import Diagnostic, Label
from commdsl.source import Source, Span

A_NAME = "a name"
A_NUMBER = "a number"
A_RATE = "a rate such as `GB/s`"
A_SIZE = "a size such as `KB`"
A_TIME = "a time such as `us`"
A_STRING = "a path in double quotes"
END = "the end of the file"

_PLAIN = (A_NAME, A_NUMBER, A_RATE, A_SIZE, A_TIME, A_STRING, END)
_OPERATORS = frozenset("or and not == != < <= > >= | ^ & << >> + - * / % ** . ( [".split())
_COMPARISONS = frozenset("== != < <= > >=".split())
_STATEMENTS = ("put", "each", "for", "let")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_ITEMS = ("use", "schedule", "topology", "roles")
RESERVED = frozenset(
    "use schedule topology roles for in if else let each where ensure cycles yield tune on all input output inout scratch "
    "put get copy reduce and or not blocks sms link missing degraded per".split()
)

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
        return f"`{_shorten(self.word)}`" if self.word else END

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
            if sign.text in _CLOSERS:
                stack.append(sign)
            elif stack and sign.text == _CLOSERS[stack[-1].text]:
                stack.pop()
        return tuple(stack)


def explain(fault: Fault) -> Diagnostic:
    """The one diagnostic of a text that does not parse."""
    for mistake in _MISTAKES:
        diagnostic = mistake(fault)
        if diagnostic is not None:
            return diagnostic
    return _unexpected(fault)


def too_deep(span: Span, limit: int) -> Diagnostic:
    """What nests more than `limit` levels deep."""
    label = Label(Span(span.source, span.start, min(span.end, span.start + 1)), f"more than {limit} levels deep here")
    return Diagnostic("C011", "blocks or expressions nest too deeply", label, help="name parts of it with `let`")


# --- common mistakes, most telling first ------------------------------------------------------------------------------


def _unclosed_string(fault: Fault) -> Diagnostic | None:
    if not fault.word.startswith('"') or (len(fault.word) > 1 and fault.word.endswith('"')):
        return None
    return Diagnostic("C013", "a path is not closed on its line", Label(fault.here, 'expected `"` before the line ends'))


_FOREIGN = {
    "&&": "write `and`",
    "||": "write `or`",
    "!": "write `not`",
    "=": "write `==` to compare",
    "===": "write `==` to compare",
    "..": "write `..<`: ranges leave out their end",
    "...": "write `..<`: ranges leave out their end",
    "..=": "write `..< n + 1`: ranges leave out their end",
    ":": "blocks stand in braces, `{ ... }`",
    ";": "leave it out: every statement starts with a keyword",
    "//": "comments start with `#`, and `/` is already a division that rounds down",
    ":=": "write `let name = value`",
    "=>": "write `->`",
    "++": "a `let` is fixed; a loop variable counts by itself",
    "--": "a `let` is fixed; a loop variable counts by itself",
    "'": 'write paths in double quotes, `"`',
    **{f"{operator}=": "a `let` is fixed; write `let name = value` with a new name" for operator in "+-*/%"},
}


def _foreign_operator(fault: Fault) -> Diagnostic | None:
    # The parser may have taken the first half of it, the first `&` of `&&`, for an operator of ours.
    if fault.word not in _FOREIGN:
        return None
    label = Label(fault.here, _FOREIGN[fault.word])
    if fault.word == "=":
        return Diagnostic("C006", "`=` defines, it does not compare", label)
    return Diagnostic("C006", f"the language has no `{fault.word}`", label)


_SUFFIX = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z_]\w*)")
_UNITS = {A_RATE: ("GB/s", "MB/s", "KB/s", "TB/s", "B/s"), A_SIZE: ("KB", "MB", "GB", "B"), A_TIME: ("us", "ms", "ns", "s")}


def _wrong_unit(fault: Fault) -> Diagnostic | None:
    joined = _SUFFIX.fullmatch(fault.word)
    if joined and any(joined[2] in (unit, unit.split("/")[0]) for units in _UNITS.values() for unit in units):
        help = f"write `{joined[1]} {joined[2]}`"
        return Diagnostic("C010", "a number runs into its unit", Label(fault.here, "expected a blank between"), help=help)
    wanted = [kind for kind in _UNITS if kind in fault.expected]
    if not wanted or (A_SIZE in wanted and not (fault.word[:1].isalpha() and not fault.on_a_new_line)):
        return None
    if A_SIZE in wanted and not get_close_matches(fault.word.lower(), ("kb", "mb", "gb", "kib", "mib", "byte", "us", "ms")):
        return None
    units = _UNITS[wanted[0]]
    nearest = get_close_matches(fault.word.lower(), [unit.lower() for unit in units], n=1, cutoff=0.5)
    suggestion = next((unit for unit in units if nearest and unit.lower() == nearest[0]), units[0])
    headline = f"expected {wanted[0]}, got {fault.got}"
    if fault.sign() is None or fault.on_a_new_line or fault.word in RESERVED | set("{}"):
        return Diagnostic("C010", headline, Label(fault.behind, f"expected a unit here, such as `{suggestion}`"))
    return Diagnostic("C010", headline, Label(fault.here, f"did you mean `{suggestion}`?"))


def _malformed(fault: Fault) -> Diagnostic | None:
    """A character or a run of them that is nothing in the language."""
    word = fault.word
    if word[:1].isdigit() and not re.fullmatch(r"[0-9]+(\.[0-9]+)?", word):
        return Diagnostic("C001", f"{fault.got} is neither a number nor a name", Label(fault.here, "names start with a letter"))
    known = word[:1] in '"_' or word[:1].isalnum() or word in {*_OPERATORS, "->", "..<", "@", ",", "=", ".", *")]}{"}
    if word and (not known or not word.isascii()):
        return Diagnostic("C001", f"the language has no {_character(word[0])}", Label(fault.here))
    return None


def _closing_without_opening(fault: Fault) -> Diagnostic | None:
    if fault.word not in _CLOSERS.values():
        return None
    if fault.open_brackets and _CLOSERS[fault.open_brackets[-1].text] == fault.word:
        return None
    if not fault.open_brackets:
        headline = f"`{fault.word}` closes nothing"
        return Diagnostic("C004", headline, Label(fault.here, "no bracket is open here"))
    opening = fault.open_brackets[-1]
    closer = _CLOSERS[opening.text]
    if fault.word == "}":  # a block ends although a bracket is open: that bracket was forgotten
        return _unclosed(fault, opening)
    label = Label(fault.here, f"expected `{closer}`")
    opened = Label(Span(fault.source, opening.start, opening.end), "opened here")
    return Diagnostic("C004", f"`{fault.word}` does not close `{opening.text}`", label, (opened,))


def _unclosed_bracket(fault: Fault) -> Diagnostic | None:
    """The file ends, a new item starts, or a line ends inside a bracket."""
    if not fault.open_brackets:
        return None
    opening = fault.open_brackets[-1]
    if _CLOSERS[opening.text] not in fault.expected:
        return None
    starts_item = fault.word in _ITEMS and fault.word not in fault.expected
    if opening.text == "{":
        return _unclosed(fault, _suspect(fault) or opening) if fault.sign() is None or starts_item else None
    if fault.sign() is None or fault.word in ("->", "@", "{", "..<", "==") or fault.word in RESERVED:
        return _unclosed(fault, opening)
    return None


def _unclosed(fault: Fault, opening: Sign) -> Diagnostic:
    closer = _CLOSERS[opening.text]
    opened = Label(Span(fault.source, opening.start, opening.end), "opened here")
    return Diagnostic("C003", f"missing `{closer}`", Label(fault.behind, f"expected `{closer}` here"), (opened,))


def _suspect(fault: Fault) -> Sign | None:
    """The open brace whose block ends, by the look of the indentation, before its line's block does."""
    stack: list[Sign] = []
    for sign in fault.signs[: fault.index]:
        if sign.text == "{":
            stack.append(sign)
        elif sign.text == "}" and stack:
            opening = stack.pop()
            same_line = "\n" not in fault.source.text[opening.start : sign.start]
            if not same_line and _indent(fault.source, sign.start) < _indent(fault.source, opening.start):
                return opening
    return None


def _chained_comparison(fault: Fault) -> Diagnostic | None:
    if fault.word not in _COMPARISONS or "and" not in fault.expected or fault.word in fault.expected:
        return None
    help = "write `a < b and b < c`"
    return Diagnostic("C007", "comparisons do not chain", Label(fault.here, "a second comparison"), help=help)


def _fixed_ranks(fault: Fault) -> Diagnostic | None:
    before, after = fault.sign(-1), fault.sign(1)
    if not fault.word.isdigit() or before is None or before.text != "for" or after is None or after.text != "ranks":
        return None
    help = f"write `for P ranks where P == {fault.word}`, or leave the condition out and say `--ranks {fault.word}`"
    return Diagnostic("C008", "the number of ranks is a name, not a number", Label(fault.here, "expected a name"), help=help)


_ELSEWHERE = {
    "plan": "a dispatch plan",
    "dispatch": "a routed dispatch",
    "combine": "the inverse of a routed dispatch",
}


def _later(fault: Fault) -> Diagnostic | None:
    if fault.word not in _ELSEWHERE or "schedule" not in fault.expected:
        return None
    label = Label(fault.here, f"{_ELSEWHERE[fault.word]} is not of this version's language")
    help = "a file holds `use`, `topology`, `roles` and `schedule`"
    return Diagnostic("C009", f"`{fault.word}` is not supported", label, help=help)


_FROM_ELSEWHERE = {
    "send": "put",
    "store": "put",
    "write": "put",
    "recv": "get",
    "receive": "get",
    "load": "get",
    "read": "get",
    "import": "use",
    "include": "use",
    "parallel": "each",
    "forall": "each",
    "foreach": "each",
    "var": "let",
    "const": "let",
    "temp": "scratch",
    "buffer": "scratch",
    "def": "schedule",
    "fn": "schedule",
    "func": "schedule",
    "machine": "topology",
    "assert": "ensure",
    "elif": "else if",
    "elsif": "else if",
    "from": "in",
    "when": "where",
    "gpus": "ranks",
}


def _misspelt(fault: Fault) -> Diagnostic | None:
    sign, before = fault.sign(), fault.sign(-1)
    keywords = sorted(word for word in fault.expected if word.isalpha() and word not in _OPERATORS)
    if sign is not None and sign.is_word and sign.text not in RESERVED:
        suggestion = _nearest(sign.text, keywords)
        if suggestion:
            return Diagnostic("C005", f"expected a keyword, got {fault.got}", Label(fault.here, f"did you mean `{suggestion}`?"))
    if before is not None and before.is_word and before.text not in RESERVED and _starts_line(fault.source, before.start):
        # It was taken for a name that may stand there: `ensure allreduce(x)  yeild kv`.
        near = get_close_matches(before.text, sorted(RESERVED), n=1, cutoff=0.7)
        if near:
            span = Span(fault.source, before.start, before.end)
            headline = f"expected a keyword, got `{_shorten(before.text)}`"
            return Diagnostic("C005", headline, Label(span, f"did you mean `{near[0]}`?"))
    return None


def _nearest(word: str, keywords: list[str]) -> str:
    borrowed = _FROM_ELSEWHERE.get(word.lower(), "")
    if borrowed.partition(" ")[0] in keywords:
        return borrowed
    if word.lower() in keywords:
        return word.lower()
    return next(iter(get_close_matches(word, keywords, n=1, cutoff=0.6)), "")


def _reserved_name(fault: Fault) -> Diagnostic | None:
    if fault.word not in RESERVED or A_NAME not in fault.expected or fault.on_a_new_line or fault.sign(-1) is None:
        return None
    if "put" in fault.expected:
        return None
    label = Label(fault.here, "choose another name")
    return Diagnostic("C012", f"`{fault.word}` is a keyword and cannot be a name", label)


def _missing_block(fault: Fault) -> Diagnostic | None:
    if "{" not in fault.expected or not (fault.word in RESERVED or fault.word == "}" or fault.on_a_new_line):
        return None
    label = Label(fault.behind, "expected `{` here")
    return Diagnostic("C002", f"expected `{{`, got {fault.got}", label)


_MISTAKES: tuple[Callable[[Fault], Diagnostic | None], ...] = (
    _unclosed_string,
    _foreign_operator,
    _wrong_unit,
    _malformed,
    _closing_without_opening,
    _unclosed_bracket,
    _chained_comparison,
    _fixed_ranks,
    _later,
    _misspelt,
    _reserved_name,
    _missing_block,
)


# --- the general answer -----------------------------------------------------------------------------------------------


def _unexpected(fault: Fault) -> Diagnostic:
    wanted = _listed(list(_wanted(fault)))
    missing = fault.sign() is None or (fault.on_a_new_line and not _starts_statement(fault))
    label = Label(fault.behind, f"expected {wanted} here") if missing else Label(fault.here, f"expected {wanted}")
    help = "numbers are integers" if re.fullmatch(r"[0-9]+\.[0-9]+", fault.word) else ""
    headline = f"expected {wanted}, got {fault.got}"
    if len(headline) > 70:
        headline = f"{fault.got} cannot stand here"
    return Diagnostic("C002", headline, label, help=help)


def _starts_statement(fault: Fault) -> bool:
    """A statement could start here, so nothing is missing before it: the word itself is wrong."""
    return all(word in fault.expected for word in _STATEMENTS) or all(word in fault.expected for word in _ITEMS)


def _wanted(fault: Fault) -> Iterator[str]:
    """What could have stood there, in the user's words, the more telling first; operators only when nothing else could."""
    expected = set(fault.expected)
    if fault.wants_expression:
        expected -= {A_NAME, A_NUMBER, *_OPERATORS}
        yield "an expression"
    if all(word in expected for word in _STATEMENTS):
        expected -= RESERVED
        yield "a statement"
    elif all(word in expected for word in _ITEMS):
        expected -= {*_ITEMS, END}
        yield "`schedule`, `topology`, `roles` or `use`"
    rest = sorted(expected - _OPERATORS)
    yield from (word for word in _PLAIN if word in rest)
    yield from (f"`{word}`" for word in rest if word not in _PLAIN)
    if not rest and not fault.wants_expression:
        yield from (f"`{word}`" for word in sorted(expected & {"(", "["}))
        if expected & {"+", "=="}:
            yield "an operator"


def _listed(words: list[str]) -> str:
    shown = words[:4]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}" if shown else "something else"


def _starts_line(source: Source, offset: int) -> bool:
    return not source.text[source.text.rfind("\n", 0, offset) + 1 : offset].strip()


def _indent(source: Source, offset: int) -> int:
    line = source.line(source.position(offset)[0])
    return len(line) - len(line.lstrip())


def _shorten(word: str) -> str:
    return word if len(word) <= 24 else f"{word[:21]}..."


def _character(character: str) -> str:
    return f"`{character}`" if character.isprintable() else f"character U+{ord(character):04X}"
