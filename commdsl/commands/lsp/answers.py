"""Turns the questions of an editor into answers, a function each, by what is known of the text that it asks about.

Assumes pygls, which hands the server to whatever takes one. Does not look at a text itself; answers nothing, not an
error, where there is nothing to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lsprotocol import types

from commdsl.commands.lsp.documents import Entry
from commdsl.commands.lsp.positions import Positions
from commdsl.commands.lsp.proposals import proposals
from commdsl.commands.lsp.session import TOP, Server, uri_of
from commdsl.language import codes
from commdsl.language.source import Span

SYMBOLS = {
    "schedule": types.SymbolKind.Function,
    "dispatch": types.SymbolKind.Function,
    "fn": types.SymbolKind.Function,
    "plan": types.SymbolKind.Object,
    "topology": types.SymbolKind.Struct,
    "roles": types.SymbolKind.Struct,
}
"""What an editor draws before a name of an outline; all others are variables."""

ITEMS = {"keyword": types.CompletionItemKind.Keyword, "a function": types.CompletionItemKind.Function}
"""What it draws before a proposal; all others are variables."""


# --- a text comes, changes and goes -----------------------------------------------------------------------------------


def opened(server: Server, params: types.DidOpenTextDocumentParams) -> None:
    server.check_soon(params.text_document.uri)


def changed(server: Server, params: types.DidChangeTextDocumentParams) -> None:
    server.check_soon(params.text_document.uri)


def saved(server: Server, params: types.DidSaveTextDocumentParams) -> None:
    server.documents.clear()  # any of them may use what was saved
    for uri in tuple(server.checks):
        server.check_soon(uri)


def closed(server: Server, params: types.DidCloseTextDocumentParams) -> None:
    server.close(params.text_document.uri)


# --- questions --------------------------------------------------------------------------------------------------------


def hover(server: Server, params: types.HoverParams) -> types.Hover | None:
    """What a name means, and the page of each diagnostic there."""
    uri, at = params.text_document.uri, params.position
    document = server.document(uri)
    meaning = document.meaning(server.positions(document.source).offset(at))
    found = (one for one in server.shown.get(uri, []) if one.range.start <= at <= one.range.end)
    pages = (codes.page(code) for code in dict.fromkeys(str(one.code) for one in found))
    said = [*([] if meaning is None else [meaning]), *pages]
    return types.Hover(types.MarkupContent(types.MarkupKind.Markdown, "\n\n---\n\n".join(said))) if said else None


def definition(server: Server, params: types.DefinitionParams) -> types.Location | None:
    document = server.document(params.text_document.uri)
    match document.definition(server.positions(document.source).offset(params.position)):
        case Span() as span:
            return server.location(span, document)
        case Path() as path:
            return types.Location(uri_of(path), TOP)
        case None:
            return None


def completion(server: Server, params: types.CompletionParams) -> list[types.CompletionItem]:
    document = server.document(params.text_document.uri)
    text = document.source.text[: server.positions(document.source).offset(params.position)]
    begun = re.search(r"\w*\Z", text)
    assert begun is not None
    return [
        types.CompletionItem(one.word, kind=ITEMS.get(one.what, types.CompletionItemKind.Variable), detail=one.what)
        for one in proposals(text[: begun.start()], document.files)
    ]


def formatting(server: Server, params: types.DocumentFormattingParams) -> list[types.TextEdit]:
    document = server.document(params.text_document.uri)
    text = document.formatted
    if text is None or text == document.source.text:
        return []
    return [types.TextEdit(server.positions(document.source).whole, text)]


def outline(server: Server, params: types.DocumentSymbolParams) -> list[types.DocumentSymbol]:
    document = server.document(params.text_document.uri)
    return list(_symbols(document.outline, server.positions(document.source)))


def _symbols(entries: tuple[Entry, ...], positions: Positions) -> Iterator[types.DocumentSymbol]:
    for entry in entries:
        kind = SYMBOLS.get(entry.what, types.SymbolKind.Variable)
        place, named = positions.of_span(entry.place), positions.of_span(entry.named)
        inside = list(_symbols(entry.inside, positions))
        yield types.DocumentSymbol(entry.name, kind, place, named, detail=entry.what, children=inside)


ANSWERS: Mapping[str, Callable[..., Any]] = {
    types.TEXT_DOCUMENT_DID_OPEN: opened,
    types.TEXT_DOCUMENT_DID_CHANGE: changed,
    types.TEXT_DOCUMENT_DID_SAVE: saved,
    types.TEXT_DOCUMENT_DID_CLOSE: closed,
    types.TEXT_DOCUMENT_HOVER: hover,
    types.TEXT_DOCUMENT_DEFINITION: definition,
    types.TEXT_DOCUMENT_COMPLETION: completion,
    types.TEXT_DOCUMENT_FORMATTING: formatting,
    types.TEXT_DOCUMENT_DOCUMENT_SYMBOL: outline,
}


def answering(server: Server) -> Server:
    """The server, with all of these answers."""
    for question, answer in ANSWERS.items():
        options = types.CompletionOptions(trigger_characters=["."]) if answer is completion else None
        server.feature(question, options)(answer)
    return server
