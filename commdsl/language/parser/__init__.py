"""Turns `.comm` text into its Syntax, by tables that lark makes of the grammar; or into one diagnostic.

Assumes the grammar's rules are named after the classes of `syntax`. Does not judge what was written beyond whether
it is of the language; reports the first syntax fault only, because what follows one is guesswork. The only module that
imports lark.

    shift_reduce  a text without a syntax fault -> its items
    build_syntax  the parts of each rule -> the classes of `syntax`
    build_calls, build_contracts, build_dispatches, build_machines   those of some kinds of rules
    tables        the grammar -> lark's parser, kept
    vocabulary    the grammar -> its words and signs, told apart
    complete      the beginning of a text -> what may come next, and a text that ends soon
    syntax_fault  where parsing stopped -> what stands around it
    mistakes, unexpected   that -> one diagnostic: a common mistake, or what was expected
"""

from __future__ import annotations

import re

from commdsl.language import collection
from commdsl.language.parser import shift_reduce
from commdsl.language.source import Source, Span
from commdsl.language.syntax import Comment, File


def parse(source: Source) -> File:
    """The Syntax of a text; raises CommError with the first syntax fault."""
    with collection.paused():
        items = shift_reduce.items(source)
        return File(source, items, comments(source), span=Span(source, 0, len(source.text)))


_COMMENT_OR_STRING = re.compile(r'"[^"\n]*"|#[^\n]*')


def comments(source: Source) -> tuple[Comment, ...]:
    """Every comment of a text, in order."""
    found = []
    for match in _COMMENT_OR_STRING.finditer(source.text):
        if match[0].startswith("#"):
            line_start = source.text.rfind("\n", 0, match.start()) + 1
            own_line = not source.text[line_start : match.start()].strip()
            text = match[0].rstrip()
            found.append(Comment(text, own_line, span=Span(source, match.start(), match.start() + len(text))))
    return tuple(found)
