"""Turns `.comm` text into the tokens of Pygments, which finds this by its entry point.

Assumes Pygments imports it. Does not parse; the patterns are those of `highlight`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pygments.lexer import RegexLexer, bygroups
from pygments.token import (
    Comment,
    Keyword,
    Name,
    Number,
    Operator,
    Punctuation,
    String,
    Whitespace,
)

from commdsl.language.highlight import Kind, Pattern, patterns

TOKENS = {
    Kind.COMMENT: Comment.Single,
    Kind.STRING: String.Double,
    Kind.NUMBER: Number,
    Kind.UNIT: Keyword.Pseudo,
    Kind.KEYWORD: Keyword,
    Kind.OPERATOR_WORD: Operator.Word,
    Kind.TYPE: Keyword.Type,
    Kind.DECLARED: Name.Function,
    Kind.FUNCTION: Name.Builtin,
    Kind.NAME: Name,
    Kind.OPERATOR: Operator,
    Kind.PUNCTUATION: Punctuation,
    Kind.BLANK: Whitespace,
}


class CommLexer(RegexLexer):  # type: ignore[misc] # Pygments has no types
    """`pygmentize -l comm`, or a file that ends with `.comm`."""

    name = "comm"
    aliases: ClassVar[list[str]] = ["comm"]
    filenames: ClassVar[list[str]] = ["*.comm"]

    @classmethod
    def get_tokendefs(cls) -> dict[str, Any]:
        """The rules, when a text is first coloured: importing this reads no grammar."""
        return {"root": [(r"\s+", Whitespace), *map(_rule, patterns())]}


def _rule(pattern: Pattern) -> tuple[str, Any]:
    tokens = [TOKENS[kind] for kind in pattern.kinds]
    return pattern.expression, tokens[0] if len(tokens) == 1 else bygroups(*tokens)
