"""Turns the vocabulary of the language into patterns that colour a text, and these into a TextMate grammar.

Assumes that a place is coloured by the first pattern that fits there. Does not parse: a word that is a keyword only in
places is taken for one unless it stands where only a name may, or before a sign that follows names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Any

from commdsl.language.parser.syntax_fault import CLOSERS, ITEMS
from commdsl.language.parser.vocabulary import Vocabulary, vocabulary
from commdsl.language.records import dataclass


class Kind(Enum):
    """What a piece of text is, with its TextMate scope."""

    COMMENT = "comment.line.number-sign"
    STRING = "string.quoted.double"
    NUMBER = "constant.numeric"
    UNIT = "keyword.other.unit"
    KEYWORD = "keyword.control"
    OPERATOR_WORD = "keyword.operator.word"
    TYPE = "storage.type"
    DECLARED = "entity.name.function"
    FUNCTION = "support.function"
    NAME = "variable.other"
    OPERATOR = "keyword.operator"
    PUNCTUATION = "punctuation"
    BLANK = ""


@dataclass(frozen=True)
class Pattern:
    """A regular expression, and what each of its groups is; with one kind and no group, all of it."""

    expression: str
    kinds: tuple[Kind, ...]


WORD = r"[A-Za-z_][A-Za-z0-9_]*"
BRACKETS = {*CLOSERS, *CLOSERS.values(), ","}
BEFORE_WORDS = {"{", "}", "("}
"""Signs that keywords are before, too; before all others a word is most often a name."""


def patterns() -> tuple[Pattern, ...]:
    """In the order in which they are tried."""
    known = vocabulary()
    terminal, number = known.patterns, r"[0-9]+(?:\.[0-9]+)?"
    unit = "|".join(terminal[name] for name in ("RATE", "SIZE", "TIME"))
    items = [word for word in ITEMS if word in known.before_names]
    return (
        Pattern(terminal["COMMENT"], (Kind.COMMENT,)),
        Pattern(terminal["STRING"], (Kind.STRING,)),
        Pattern(rf"({number})([ \t]*)({unit})", (Kind.NUMBER, Kind.BLANK, Kind.UNIT)),
        Pattern(rf"{number}(?![0-9A-Za-z_])", (Kind.NUMBER,)),
        Pattern(rf"(?<=[0-9][ \t]){_words(known.between_numbers)}(?=[ \t]+[0-9])", (Kind.KEYWORD,)),
        Pattern(rf"({_words(items)})([ \t]+)({WORD})", (Kind.KEYWORD, Kind.BLANK, Kind.DECLARED)),
        *_after_keywords(known),
        Pattern(_words(known.operators), (Kind.OPERATOR_WORD,)),
        Pattern(_words(known.keywords), (Kind.KEYWORD,)),
        Pattern(rf"\b{terminal['ELEMENT']}{_unless_a_name(known, {','})}", (Kind.TYPE,)),
        *_in_places(known),
        Pattern(rf"{WORD}(?=\s*\()", (Kind.FUNCTION,)),
        Pattern(WORD, (Kind.NAME,)),
        Pattern(_signs(known, known.signs.keys() - BRACKETS), (Kind.OPERATOR,)),
        Pattern(_signs(known, BRACKETS), (Kind.PUNCTUATION,)),
    )


def _after_keywords(known: Vocabulary) -> Iterable[Pattern]:
    """A name that is a keyword elsewhere, behind a word that only a name follows."""
    names = _words((*known.sometimes, *known.between_numbers))
    for kind in (Kind.OPERATOR_WORD, Kind.KEYWORD):
        is_operator = kind is Kind.OPERATOR_WORD
        before = _words(word for word in known.before_names if (word in known.operators) == is_operator)
        yield Pattern(rf"({before})([ \t]+)({names})", (kind, Kind.BLANK, Kind.NAME))


def _in_places(known: Vocabulary) -> Iterable[Pattern]:
    """Words that are keywords in places; those that may be before the same signs together."""
    alike = dict[frozenset[str], list[str]]()
    for word, signs in known.sometimes.items():
        alike.setdefault(signs - BEFORE_WORDS, []).append(word)
    for signs, words in alike.items():
        yield Pattern(_words(words) + _unless_a_name(known, signs), (Kind.KEYWORD,))


def _unless_a_name(known: Vocabulary, allowed: Collection[str]) -> str:
    """Not before a sign that is behind names, unless that is allowed behind the word, too."""
    return rf"(?!\s*{_signs(known, known.signs.keys() - BEFORE_WORDS - set(allowed))})"


def _words(words: Iterable[str]) -> str:
    return rf"\b(?:{'|'.join(words)})\b"


def _signs(known: Vocabulary, signs: Collection[str]) -> str:
    return f"(?:{'|'.join(expression for sign, expression in known.signs.items() if sign in signs)})"


def textmate() -> dict[str, Any]:
    """The grammar that editors colour by, as JSON has it."""
    return {
        "name": "comm",
        "scopeName": "source.comm",
        "fileTypes": ["comm"],
        "patterns": [_rule(pattern) for pattern in patterns()],
    }


def _rule(pattern: Pattern) -> dict[str, Any]:
    scopes = [f"{kind.value}.comm" for kind in pattern.kinds]
    if len(scopes) == 1:
        return {"match": pattern.expression, "name": scopes[0]}
    named = {
        str(group): {"name": scope}
        for group, (scope, kind) in enumerate(zip(scopes, pattern.kinds, strict=True), 1)
        if kind is not Kind.BLANK
    }
    return {"match": pattern.expression, "captures": named}
