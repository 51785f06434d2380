"""Turns texts that are open in an editor into diagnostics, each time they have not changed for a moment.

Assumes pygls, and `commdsl check` for the verdict. Does not answer questions; `answers` does.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path

from commdsl.commands.arguments import Target
from commdsl.commands.lsp import checking
from commdsl.commands.lsp.documents import Document
from commdsl.commands.lsp.positions import Positions
from commdsl.language.diagnostics import DiagnosticJson, LabelJson, Severity
from commdsl.language.source import Source, Span
from commdsl.language.text import STANDARD_INPUT
from commdsl.machine import resources

PAUSE = 0.2
"""Seconds without a change after which a text is checked."""

SEVERITIES = {
    Severity.ERROR.value: types.DiagnosticSeverity.Error,
    Severity.WARNING.value: types.DiagnosticSeverity.Warning,
}

TOP = types.Range(types.Position(0, 0), types.Position(0, 0))


class Server(LanguageServer):
    """The texts that are open, the checks that are on their way, and what the last ones found."""

    def __init__(self, target: Target) -> None:
        super().__init__("commdsl", resources.version(), text_document_sync_kind=types.TextDocumentSyncKind.Full)
        self.target = target
        self.documents: dict[str, Document] = {}
        self.checks: dict[str, asyncio.Task[None]] = {}
        self.shown: dict[str, list[types.Diagnostic]] = {}

    def document(self, uri: str) -> Document:
        """What is known of the text as it stands."""
        known, text = self.documents.get(uri), self.workspace.get_text_document(uri).source
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        if known is None or known.source.text != text:
            path = _path(uri)
            known = Document(Source(path.name, text), path.parent, self.target)
            self.documents[uri] = known
        return known

    def positions(self, source: Source) -> Positions:
        return Positions(source, self.workspace.position_codec)

    def location(self, span: Span, document: Document) -> types.Location:
        return types.Location(uri_of(document.folder / span.source.name), self.positions(span.source).of_span(span))

    # --- diagnostics --------------------------------------------------------------------------------------------------

    def check_soon(self, uri: str) -> None:
        """Checks the text once it has not changed for a moment; a check of an older one ends."""
        self.forget(uri)
        self.checks[uri] = asyncio.create_task(self._check(uri))

    def close(self, uri: str) -> None:
        self.forget(uri)
        self.documents.pop(uri, None)
        self.show(uri, None, [])

    def forget(self, uri: str) -> None:
        running = self.checks.pop(uri, None)
        if running is not None:
            running.cancel()

    async def _check(self, uri: str) -> None:
        await asyncio.sleep(PAUSE)
        document, version = self.document(uri), self.workspace.get_text_document(uri).version
        folder = document.folder if document.folder.is_dir() else None
        verdict = await checking.check(document.source.text, folder, document.target)
        if verdict.remark:
            self.window_log_message(types.LogMessageParams(types.MessageType.Info, verdict.remark))
        self.show(uri, version, [self._diagnostic(one, uri, document) for one in verdict.diagnostics])

    def show(self, uri: str, version: int | None, found: list[types.Diagnostic]) -> None:
        self.shown[uri] = found
        self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, found, version))

    def _diagnostic(self, found: DiagnosticJson, uri: str, document: Document) -> types.Diagnostic:
        """At its place; of another file's text where this one calls it, or else uses the file."""
        labels, positions = [found["primary"], *found["secondary"]], self.positions(document.source)
        here = next((label for label in labels if label["file"] == STANDARD_INPUT), None)
        files = {(document.folder / label["file"]).resolve() for label in labels}
        uses = (positions.of_span(use) for use, path in document.uses if path.resolve() in files)
        return types.Diagnostic(
            next(uses, TOP) if here is None else positions.of_label(here),
            _message(found),
            severity=SEVERITIES[found["severity"]],
            code=found["code"],
            source="commdsl",
            related_information=[self._related(label, uri, document) for label in labels if label is not here],
        )

    def _related(self, label: LabelJson, uri: str, document: Document) -> types.DiagnosticRelatedInformation:
        if label["file"] != STANDARD_INPUT:
            uri = uri_of(document.folder / label["file"])
        where = self.positions(self.document(uri).source).of_label(label)
        return types.DiagnosticRelatedInformation(types.Location(uri, where), label["label"])


def uri_of(path: Path) -> str:
    return str(from_fs_path(str(path)))


def _path(uri: str) -> Path:
    """Of a text that has no file yet, one of no folder."""
    return Path(to_fs_path(uri) or "untitled")


def _message(found: DiagnosticJson) -> str:
    """What the command line says around the lines of the text."""
    label = found["primary"]["label"]
    notes = [f"note: {note}" for note in found["notes"]]
    help = [f"help: {found['help']}"] if found["help"] else []
    return "\n".join([found["headline"], *([label] if label else []), *notes, *help])
