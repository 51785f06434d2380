"""Turns the beginning of a text into what may come next, and into a whole text that ends soon: for editors.

Assumes that the beginning has no syntax fault; of one that has, nothing is known. Does not know which names there are.
"""

from __future__ import annotations

from lark import Token, UnexpectedInput
from lark.parsers.lalr_interactive_parser import InteractiveParser

from commdsl.language.parser import tables

MOST_SIGNS = 64
"""That end a text: some for each block and bracket that is open."""

_SIGNS = {
    "RBRACE": "}", "RPAR": ")", "RSQUARE": "]", "LBRACE": "{", "ARROW": "->", "EQUALS": "==", "UNTIL": "..<",
    "_EQUAL": "=", "_IN": "in", "_BY": "by", "_OF": "of", "_PER": "per", "_FOR": "for", "_RANKS": "ranks",
    "_RUNS": "runs", "_STRIDE": "stride", "_NODE": "node", "NODES": "nodes", "GPU": "gpu", "RANK": "rank", "SMS": "sms",
    "_ALONG": "along", "_INDEX": "index", "QUERIES": "queries", "_ONCE": "once", "_ELSE": "else", "RATE": "B/s",
    "TIME": "s", "STRING": '""', "ELEMENT": "float32", "NAME": "n", "INT": "1", "LPAR": "(", "LSQUARE": "[",
    "COMMA": ",",
}  # fmt: skip
"""What ends a text, the sooner first: a bracket is closed where it may be."""


def expected(beginning: str) -> frozenset[str]:
    """The words and signs that may come next, as messages name them; none behind a fault."""
    state = _read(beginning)
    words = tables.words(tables.parser())
    return frozenset() if state is None else frozenset(words[name] for name in state.accepts())


def completed(beginning: str) -> str | None:
    """The beginning and what ends it, as a text that parses; None behind a fault."""
    state = _read(beginning)
    ending: list[str] = []
    while state is not None and len(ending) < MOST_SIGNS:
        accepted = state.accepts()
        if "$END" in accepted:
            return " ".join((beginning, *ending))
        name = next((name for name in _SIGNS if name in accepted), None)
        if name is None:
            return None
        ending.append(_SIGNS[name])
        state.feed_token(Token(name, _SIGNS[name]))
    return None


def _read(beginning: str) -> InteractiveParser | None:
    state = tables.parser().parse_interactive(beginning)
    try:
        state.exhaust_lexer()
    except UnexpectedInput:
        return None
    return state
