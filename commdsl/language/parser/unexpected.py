"""Turns a syntax fault that is none of the common mistakes into what was expected and what came instead.

Assumes nothing but the fault. Does not guess what was meant; `mistakes` does, first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.parser.syntax_fault import (
    A_NAME,
    A_NUMBER,
    CLOSERS,
    END,
    ITEMS,
    OPERATORS,
    PLAIN,
    RESERVED,
    STATEMENTS,
    Fault,
)


def unexpected(fault: Fault) -> Diagnostic:
    wanted = _listed(list(_wanted(fault)))
    starts_something = fault.word in RESERVED or fault.word in CLOSERS.values()
    missing = fault.sign() is None or ((starts_something or fault.on_a_new_line) and not _starts_statement(fault))
    label = Label(fault.behind, f"expected {wanted} here") if missing else Label(fault.here, f"expected {wanted}")
    headline = f"expected {wanted}, got {fault.got}"
    if len(headline) > 70:
        headline = f"{fault.got} cannot stand here"
    return Diagnostic("C002", headline, label, help=_help(fault))


def _help(fault: Fault) -> str:
    """A word on what to write, for mistakes that many make."""
    in_document = {"doc", "repeat"} <= fault.expected
    if re.fullmatch(r"[0-9]+\.[0-9]+", fault.word):
        return "numbers are integers"
    if fault.word == "," and fault.wants_expression:
        if ")" in fault.expected:
            return "the ranks of a cycle stand side by side, `(0 1 2)`"
        return "ranks stand side by side, `0 1 2`" if in_document or "]" in fault.expected else ""
    if fault.word == "for" and "->" in fault.expected:
        return "only `reduce` takes a list of sources"
    if fault.word in OPERATORS and fault.wants_expression and in_document:
        return "a rank that is computed stands in parentheses, `(r + 1)`"
    if fault.word == "doc" and "rank" in fault.expected:
        return "documents stand in the block of their rank, `rank 0 { doc ... }`"
    return ""


def _starts_statement(fault: Fault) -> bool:
    """A statement could start here, so nothing is missing before it: the word itself is wrong."""
    return all(word in fault.expected for word in STATEMENTS) or all(word in fault.expected for word in ITEMS)


def _wanted(fault: Fault) -> Iterator[str]:
    """What could have stood there, in the user's words, the more telling first; operators if nothing else could."""
    expected = set(fault.expected)
    if fault.wants_expression:
        expected -= {A_NAME, A_NUMBER, *OPERATORS}
        yield "an expression"
    if all(word in expected for word in STATEMENTS):
        expected -= RESERVED
        yield "a statement"
    elif all(word in expected for word in ITEMS):
        expected -= {*ITEMS, END}
        yield "a declaration such as `schedule` or `plan`"
    rest = sorted(expected - OPERATORS)
    yield from (word for word in PLAIN if word in rest)
    yield from (f"`{word}`" for word in rest if word not in PLAIN)
    if not rest and not fault.wants_expression:
        yield from (f"`{word}`" for word in sorted(expected & {"(", "["}))
        if expected & {"+", "=="}:
            yield "an operator"


def _listed(words: list[str]) -> str:
    shown = words[:4]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}" if shown else "something else"
