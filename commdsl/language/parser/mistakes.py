"""Turns a syntax fault into one diagnostic in the user's words.

Assumes nothing but the fault: where parsing stopped and what could have stood there. Does not parse. It tries a table
of common mistakes, most telling first, before the general answer of `unexpected`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.parser.syntax_fault import (
    A_NAME,
    A_NUMBER,
    A_RATE,
    A_SIZE,
    A_TIME,
    CLOSERS,
    COMPARISONS,
    ITEMS,
    OPERATORS,
    RESERVED,
    Fault,
    Sign,
    shorten,
)
from commdsl.language.parser.unexpected import unexpected
from commdsl.language.source import Source, Span


def explain(fault: Fault) -> Diagnostic:
    """The one diagnostic of a text that does not parse."""
    for mistake in _MISTAKES:
        diagnostic = mistake(fault)
        if diagnostic is not None:
            return diagnostic
    return unexpected(fault)


def too_deep(span: Span, limit: int) -> Diagnostic:
    """What nests more than `limit` levels deep."""
    label = Label(Span(span.source, span.start, min(span.end, span.start + 1)), f"more than {limit} levels deep here")
    return Diagnostic("C011", "blocks or expressions nest too deeply", label, help="name parts of it with `let`")


# --- common mistakes, most telling first ------------------------------------------------------------------------------


def _unclosed_string(fault: Fault) -> Diagnostic | None:
    if not fault.word.startswith('"') or (len(fault.word) > 1 and fault.word.endswith('"')):
        return None
    label = Label(fault.here, 'expected `"` before the line ends')
    return Diagnostic("C013", "a path is not closed on its line", label)


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


_NUMBER_AND_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?B/s|[KMGT]?B|[munp]?s)\b")
_UNITS = {
    A_RATE: ("GB/s", "MB/s", "KB/s", "TB/s", "B/s"),
    A_TIME: ("us", "ms", "ns", "ps", "s"),
    A_SIZE: ("KB", "MB", "GB", "B"),
}


def _wrong_unit(fault: Fault) -> Diagnostic | None:
    joined = _NUMBER_AND_UNIT.match(fault.source.text, fault.here.start)
    if joined and joined.start() < fault.here.end < len(fault.source.text) and fault.word.startswith(joined[1]):
        span = Span(fault.source, *joined.span())
        help = f"write `{joined[1]} {joined[2]}`"
        return Diagnostic("C010", "a number runs into its unit", Label(span, "expected a blank between"), help=help)
    if A_RATE in fault.expected and A_SIZE not in fault.expected:
        return _expected_unit(fault, A_RATE)
    if A_TIME in fault.expected and A_SIZE not in fault.expected:
        return _expected_unit(fault, A_TIME)
    return _misspelt_size(fault)


def _expected_unit(fault: Fault, kind: str) -> Diagnostic:
    headline = f"expected {kind}, got {fault.got}"
    sign = fault.sign()
    if sign is None or fault.on_a_new_line or not sign.is_word or sign.text in RESERVED:
        return Diagnostic("C010", headline, Label(fault.behind, "the unit is missing here"))
    return Diagnostic("C010", headline, Label(fault.here, f"did you mean `{_nearest_unit(sign.text, _UNITS[kind])}`?"))


def _misspelt_size(fault: Fault) -> Diagnostic | None:
    """`tile 64 kB`: in a `tune` block the word after a number is taken for the next entry, unless it is a unit."""
    number, word = fault.sign(-2), fault.sign(-1)
    if number is None or word is None or not number.text.isdigit() or not word.is_word:
        return None
    known = [unit for units in _UNITS.values() for unit in units]
    if word.text.lower().replace("i", "") not in [unit.lower() for unit in known]:
        return None
    label = Label(Span(fault.source, word.start, word.end), f"did you mean `{_nearest_unit(word.text, known)}`?")
    return Diagnostic("C010", f"expected {A_SIZE}, got `{word.text}`", label)


def _nearest_unit(word: str, units: Sequence[str]) -> str:
    lower = {unit.lower(): unit for unit in reversed(units)}
    near = get_close_matches(word.lower(), list(lower), n=1, cutoff=0.5)
    return lower[near[0]] if near else units[0]


def _malformed(fault: Fault) -> Diagnostic | None:
    """A character or a run of them that is nothing in the language."""
    word = fault.word
    if word[:1].isdigit() and not re.fullmatch(r"[0-9]+(\.[0-9]+)?", word):
        label = Label(fault.here, "names start with a letter")
        return Diagnostic("C001", f"{fault.got} is neither a number nor a name", label)
    known = word[:1] in '"_' or word[:1].isalnum() or word in {*OPERATORS, "->", "..<", "@", ",", "=", ".", *")]}{"}
    if not word or (known and word.isascii()):
        return None
    foreign = next((character for character in word if not character.isascii()), word[0])
    at = fault.here.start + word.index(foreign)
    remark = "names are made of ASCII letters, digits and `_`" if foreign.isalpha() else ""
    label = Label(Span(fault.source, at, at + 1), remark)
    return Diagnostic("C001", f"the language has no {_character(foreign)}", label)


def _closing_without_opening(fault: Fault) -> Diagnostic | None:
    if fault.word not in CLOSERS.values():
        return None
    if fault.open_brackets and CLOSERS[fault.open_brackets[-1].text] == fault.word:
        return None
    if not fault.open_brackets:
        headline = f"`{fault.word}` closes nothing"
        return Diagnostic("C004", headline, Label(fault.here, "no bracket is open here"))
    opening = fault.open_brackets[-1]
    closer = CLOSERS[opening.text]
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
    if CLOSERS[opening.text] not in fault.expected:
        return None
    starts_item = fault.word in ITEMS and fault.word not in fault.expected
    if opening.text == "{":
        return _unclosed(fault, _suspect(fault) or opening) if fault.sign() is None or starts_item else None
    if fault.sign() is None or fault.word in ("->", "@", "{", "..<", "==") or fault.word in RESERVED:
        return _unclosed(fault, opening)
    return None


def _unclosed(fault: Fault, opening: Sign) -> Diagnostic:
    closer = CLOSERS[opening.text]
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
    if fault.word not in COMPARISONS or "and" not in fault.expected or fault.word in fault.expected:
        return None
    help = "write `a < b and b < c`"
    return Diagnostic("C007", "comparisons do not chain", Label(fault.here, "a second comparison"), help=help)


def _fixed_ranks(fault: Fault) -> Diagnostic | None:
    before, after = fault.sign(-1), fault.sign(1)
    if before is None or before.text != "for" or after is None or after.text != "ranks":
        return None
    if fault.word.isdigit():
        what = "the number of ranks is a name, not a number"
        number = (
            f"write `for P ranks where P == {fault.word}`, or leave the condition out and say `--ranks {fault.word}`"
        )
        help = "write `for P ranks`: a dispatch is for any number" if _text(fault, -3) == "dispatch" else number
        return Diagnostic("C008", what, Label(fault.here, "expected a name"), help=help)
    if fault.expected == {A_NUMBER}:
        help = "the ranks of a plan are written out, for example `for 4 ranks`"
        return Diagnostic("C008", "a plan is for a number of ranks", Label(fault.here, "expected a number"), help=help)
    return None


def _call_of_range(fault: Fault) -> Diagnostic | None:
    """`for s in range(4)`: the fault is at the brace, or at the parenthesis."""
    at = next(
        (i for i in (0, -1, -2, -3, -4, -5, -6) if _text(fault, i) == "range" and _text(fault, i - 1) == "in"), None
    )
    name = None if at is None else fault.sign(at)
    if name is None:
        return None
    label = Label(Span(fault.source, name.start, name.end), "expected `first ..< last`")
    return Diagnostic("C006", "the language has no `range(...)`", label, help="write `0 ..< n`, which leaves out n")


def _in_its_dispatch(fault: Fault) -> Diagnostic | None:
    """`combine back inverts qkv by sum` beside a dispatch, `put packed` inside one."""
    if fault.word == "combine" and "dispatch" in fault.expected:
        label, help = "the way back stands in its dispatch", "write there `back NAMES by sum`, of tensors that return"
    elif fault.word == "put" and {"rows", "route", "place"} <= fault.expected:
        label, help = "how rows travel is tuned", f"write `tune {{ put {_text(fault, 1) or 'rows'} }}`"
    else:
        return None
    return Diagnostic("C005", f"expected a keyword, got `{fault.word}`", Label(fault.here, label), help=help)


def _text(fault: Fault, offset: int) -> str:
    sign = fault.sign(offset)
    return sign.text if sign is not None else ""


_FROM_ELSEWHERE = {
    "send": "put",
    "store": "put",
    "write": "put",
    "recv": "get",
    "receive": "get",
    "load": "get",
    "read": "get",
    "import": "use",
    "foreach": "each",
    "var": "let",
    "def": "fn",
    "assert": "ensure",
    "elif": "else if",
    "elsif": "else if",
    "from": "in",
    "gpus": "ranks",
    "document": "doc",
    "seq": "doc",
    "sequence": "doc",
}


def _misspelt(fault: Fault) -> Diagnostic | None:
    sign, before = fault.sign(), fault.sign(-1)
    keywords = sorted(word for word in fault.expected if word.isalpha() and word not in OPERATORS)
    if sign is not None and sign.is_word and sign.text not in RESERVED:
        suggestion = _nearest(sign.text, keywords)
        if suggestion:
            return _did_you_mean(fault, sign, suggestion)
    # Or it was taken for a name that may stand there: `ensure allreduce(x)  yeild kv`.
    if before is not None and before.is_word and before.text not in RESERVED and _starts_line(fault.source, before):
        near = get_close_matches(before.text, sorted(RESERVED), n=1, cutoff=0.7)
        if near:
            return _did_you_mean(fault, before, near[0])
    return None


def _did_you_mean(fault: Fault, sign: Sign, suggestion: str) -> Diagnostic:
    label = Label(Span(fault.source, sign.start, sign.end), f"did you mean `{suggestion}`?")
    return Diagnostic("C005", f"expected a keyword, got `{shorten(sign.text)}`", label)


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
    help = "a choice stands in parentheses, `(a if c else b)`" if fault.word == "else" else ""
    return Diagnostic("C002", f"expected `{{`, got {fault.got}", label, help=help)


_MISTAKES: tuple[Callable[[Fault], Diagnostic | None], ...] = (
    _unclosed_string,
    _foreign_operator,
    _wrong_unit,
    _malformed,
    _closing_without_opening,
    _unclosed_bracket,
    _chained_comparison,
    _fixed_ranks,
    _call_of_range,
    _in_its_dispatch,
    _misspelt,
    _reserved_name,
    _missing_block,
)


def _starts_line(source: Source, sign: Sign) -> bool:
    return not source.text[source.text.rfind("\n", 0, sign.start) + 1 : sign.start].strip()


def _indent(source: Source, offset: int) -> int:
    line = source.line(source.position(offset)[0])
    return len(line) - len(line.lstrip())


def _character(character: str) -> str:
    return f"`{character}`" if character.isprintable() else f"character U+{ord(character):04X}"
