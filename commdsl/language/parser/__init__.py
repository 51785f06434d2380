"""Turns `.comm` text into its Syntax: lark finds the structure, `build_syntax` makes nodes, `mistakes` the messages.

Assumes the grammar's rules are named after the classes of `syntax`. Does not judge what was written beyond whether
it is of the language; reports the first syntax fault only, because what follows one is guesswork. The only module that
imports lark.

    build_syntax  parse trees -> the classes of `syntax`
    build_calls, build_contracts, build_dispatches, build_machines   those of some kinds of rules
    tables        the grammar -> lark's parser, kept
    vocabulary    the grammar -> its words and signs, told apart
    complete      the beginning of a text -> what may come next, and a text that ends soon
    syntax_fault  where parsing stopped -> what stands around it
    mistakes, unexpected   that -> one diagnostic: a common mistake, or what was expected
"""

from __future__ import annotations

import re
from typing import TypeAlias

from lark import Lark, Token, Tree, UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from commdsl.language import collection
from commdsl.language.diagnostics import CommError
from commdsl.language.parser import build_syntax, mistakes, syntax_fault, tables
from commdsl.language.source import Source, Span
from commdsl.language.syntax import Comment, File

MAX_DEPTH = 100  # what nests deeper is refused, so that every later pass may recurse

ParseTree: TypeAlias = Tree[Token]


def parse(source: Source) -> File:
    """The Syntax of a text; raises CommError with the first syntax fault."""
    with collection.paused():
        return _parse(source)


def _parse(source: Source) -> File:
    parser = tables.parser()
    try:
        tree = parser.parse(source.text)
    except UnexpectedInput as error:
        raise CommError((mistakes.explain(_fault(source, parser, error)),)) from None
    order = _post_order(tree)
    for node, depth in order:
        if depth > MAX_DEPTH:
            span = Span(source, node.meta.start_pos, node.meta.end_pos)
            raise CommError((mistakes.too_deep(span, MAX_DEPTH),))
    items = build_syntax.build(source, _plain(order))
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


# --- the tree, without recursion: its depth is the user's -------------------------------------------------------------


def _post_order(tree: ParseTree) -> list[tuple[ParseTree, int]]:
    """Every node after its children, with its depth."""
    order: list[tuple[ParseTree, int]] = []
    stack = [(tree, 0)]
    while stack:
        node, depth = stack.pop()
        order.append((node, depth))
        stack.extend((child, depth + 1) for child in node.children if isinstance(child, Tree))
    order.reverse()
    return order


def _plain(order: list[tuple[ParseTree, int]]) -> build_syntax.Part:
    """The tree in the builder's terms, which know nothing of lark."""
    made: dict[int, build_syntax.Part] = {}
    for node, _ in order:
        children = tuple(_child(child, made) for child in node.children)
        start, end = (0, 0) if node.meta.empty else (node.meta.start_pos, node.meta.end_pos)
        made[id(node)] = build_syntax.Part(str(node.data), "", children, start, end)
    return made[id(order[-1][0])]


def _child(child: Token | ParseTree | None, made: dict[int, build_syntax.Part]) -> build_syntax.Part | None:
    if child is None:  # an optional part left out
        return None
    return _leaf(child) if isinstance(child, Token) else made[id(child)]


def _leaf(token: Token) -> build_syntax.Part:
    assert token.start_pos is not None
    assert token.end_pos is not None
    return build_syntax.Part(token.type, str(token), (), token.start_pos, token.end_pos)


# --- syntax faults ----------------------------------------------------------------------------------------------------


def _fault(source: Source, parser: Lark, error: UnexpectedInput) -> syntax_fault.Fault:
    words = tables.words(parser)
    if isinstance(error, UnexpectedToken):
        names = error.accepts or error.expected
        start = len(source.text) if error.token.type == "$END" else error.token.start_pos
    else:
        assert isinstance(error, UnexpectedCharacters)
        names, start = error.allowed, error.pos_in_stream
    assert start is not None
    return syntax_fault.Fault(source, start, frozenset(words[name] for name in names if name in words))
