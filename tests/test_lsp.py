"""The language server, over standard input and output as an editor talks to it; and what it is made of.

Assumes pygls, whose client stands for the editor. Does not look at how an editor draws what it is told.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from lsprotocol import types
from pygls.lsp.client import LanguageClient

from commdsl import compiler
from commdsl.commands.arguments import target
from commdsl.commands.cli import run_command
from commdsl.commands.jobs import rank_counts
from commdsl.commands.lsp.documents import Document
from commdsl.commands.lsp.proposals import proposals
from commdsl.ir import resolve
from commdsl.language import codes
from commdsl.language.format import format_file
from commdsl.language.parser import complete, parse
from commdsl.language.source import Source

ROOT = Path(__file__).parent.parent
EVERYTHING = ROOT / "tests" / "everything.comm"
SHIPPED = [*sorted((ROOT / "schedules").rglob("*.comm")), EVERYTHING]

Talk: TypeAlias = Callable[["Editor"], Awaitable[None]]

CALLED = """schedule ring for P ranks where P >= 2 {
  inout x[P]
  ensure allreduce(x)
  for s in 0 ..< P - 1 {
    each r { reduce x[(r - s) % P] -> x[(r - s) % P] @ (r + 1) % P }
  }
  for s in 0 ..< P - 1 {
    each r { put x[(r + 1 - s) % P] -> x[(r + 1 - s) % P] @ (r + 1) % P }
  }
}
"""

CALLS = """use "ring.comm"   # 𝄞 two columns in UTF-16, one letter
fn twice(n) = 2 * n
schedule pairs for P ranks where P % 2 == 0 {
  let N = P / 2
  inout x[twice(N)]
  ensure allreduce(x)
  each r do ring(x)
}
"""


class Client(LanguageClient):
    """One that keeps the exit code of its server."""

    ended: int | None = None

    async def server_exit(self, server: asyncio.subprocess.Process) -> None:
        self.ended = server.returncode


class Editor:
    """A client with one folder, that keeps what it is shown."""

    def __init__(self, client: LanguageClient, folder: Path) -> None:
        self.client = client
        self.folder = folder
        self.shown: asyncio.Queue[types.PublishDiagnosticsParams] = asyncio.Queue()
        client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)(lambda shown: self.shown.put_nowait(shown))

    def uri(self, name: str) -> str:
        return (self.folder / name).as_uri()

    def open(self, name: str, text: str) -> types.TextDocumentIdentifier:
        item = types.TextDocumentItem(self.uri(name), "comm", 1, text)
        self.client.text_document_did_open(types.DidOpenTextDocumentParams(item))
        return types.TextDocumentIdentifier(item.uri)

    def change(self, name: str, version: int, text: str) -> None:
        changed = types.VersionedTextDocumentIdentifier(uri=self.uri(name), version=version)
        whole = types.TextDocumentContentChangeWholeDocument(text)
        self.client.text_document_did_change(types.DidChangeTextDocumentParams(changed, [whole]))

    async def diagnostics(self) -> types.PublishDiagnosticsParams:
        return await asyncio.wait_for(self.shown.get(), 60)


# --- without an editor ------------------------------------------------------------------------------------------------


def test_without_pygls(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the extra the command says in one line what to install."""
    monkeypatch.setitem(sys.modules, "lsprotocol", None)
    for name in [name for name in sys.modules if name.startswith("commdsl.commands.lsp.")]:
        monkeypatch.delitem(sys.modules, name)
    assert run_command(["lsp"]) == 2
    assert capsys.readouterr().err == "usage: lsprotocol is not here: pip install 'commdsl[lsp]'\n"


@pytest.mark.parametrize(
    ("more", "fitting", "others"),
    [
        ("put ", {"x", "t"}, {"P", "N", "C", "half"}),
        ("put x[", {"P", "K", "N", "s", "r", "c", "gpus", "half", "min"}, {"x", "t", "q"}),
        ("put x -> x @ c.", {"next", "prev", "at", "position"}, {"P"}),
        ("put x -> ", {"x", "t"}, {"P"}),
        ("reduce t for q in 0 ..< ", {"P", "N"}, {"q", "x"}),
        ("", {"put", "get", "reduce", "let", "if"}, {"schedule", "x"}),
        ("} } each r do ", {"ring"}, {"x", "half"}),
        ("} } each r do ring(x) over ", {"G"}, {"x", "P", "C"}),
        ("} } ensure ", {"allreduce", "rotation", "each"}, {"x"}),
        ("} } ensure each r { x == ", {"x", "matmul", "add_rms_norm", "sum"}, {"P", "allreduce"}),
        ("} } ensure each r { x == matmul(x, t) with ", {"bias", "gelu", "residual"}, {"x", "matmul"}),
        ("} } cycles D = ", {"hamilton", "ring", "open"}, {"C"}),
        ("} } tune { ", {"lanes", "protocol"}, {"x"}),
        ("} } } ", {"schedule", "plan", "use"}, {"put"}),
        ("put x # ", set(), {"x", "P"}),
        ("put put ", set(), {"x", "put"}),
    ],
)
def test_proposals(more: str, fitting: set[str], others: set[str]) -> None:
    """What may come next is proposed, of names those in sight that are of the right kind; behind a fault nothing is."""
    before = """fn half(n) = n / 2
schedule ring(K = 2) for P ranks where P >= 2 {
  let N = P - 1
  inout x[P]   scratch t[K]
  cycles C = hamilton(P)
  group G = ranks in runs of K
  ensure allreduce(x)
  for s in 0 ..< N {
    each r, c in C { """
    found = {one.word for one in proposals(before + more, ())}

    assert fitting <= found
    assert others & found == set()


@pytest.mark.parametrize("path", [*SHIPPED[::5], EVERYTHING], ids=lambda path: path.stem)
def test_every_beginning_can_be_ended(path: Path) -> None:
    """Behind any word or sign of a file, the beginning of it is ended to a text that parses, and a word is proposed."""
    text = path.read_text(encoding="utf-8")
    for match in [*re.finditer(r"[A-Za-z_]\w*(?=\s)|[{})\],](?=\s)", text)][::25]:
        before = text[: match.end()]
        if "#" not in before.rpartition("\n")[2]:
            ended = complete.completed(before)
            assert ended is not None, before[-40:]
            parse(Source("", ended))
            assert complete.expected(before)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_names_lead_to_their_declarations(path: Path) -> None:
    """Every name of a file that is not built in leads to a place with that name, or is such a place."""
    document = Document(Source(path.name, path.read_text(encoding="utf-8")), path.parent, target(None, None, ()))
    declared = resolve.declared(document.files)

    assert all(use.text == place.text for use, place in declared.items())
    for use in declared:
        assert document.definition(use.start) == declared[use]
        assert document.meaning(use.start)


def test_axes_lead_to_where_they_are_named() -> None:
    """An axis of links, and of the condition of a rate, is that of the topology; a group has its size on hover."""
    text = """topology torus {
  nodes 1   gpus x = 2, y = 4 per node   sms 100
  link hop pairs along y   50 GB/s if x == 0 else 25 GB/s per pair   1 us
}
schedule s for P ranks {
  group row = ranks along y
  inout t[len(row)]
  ensure allreduce(t)
}
"""
    document = Document(Source("torus.comm", text), Path(), target("8", "torus", ()))
    lines = {use.text: place.position[0] for use, place in resolve.declared(document.files).items()}

    assert (lines["x"], lines["y"], lines["row"]) == (2, 2, 6)
    assert "2 groups of 4 ranks, for 8 ranks" in document.meaning(text.index("row"))


def test_a_schedule_for_more_ranks_than_are_asked_about() -> None:
    """Of 2 to 8 ranks those that a schedule is for; one that is for none of them is none the worse."""
    text = "schedule a for P ranks where P == 12 { let N = P / 2 } schedule b for P ranks where P > 2 { let N = P }"
    asked = target("2..8", None, ())
    both, one = (Document(Source("a.comm", part), Path(), asked) for part in (text, text[text.index(" schedule b") :]))

    assert [rank_counts(both.files, decl, both.target) for decl in compiler.declarations(both.files)] == [(12,), (8,)]
    assert "6, for 12 ranks" in str(both.meaning(text.index("N")))
    assert one.target == asked


# --- over standard input and output -----------------------------------------------------------------------------------


def talk(folder: Path, say: Talk) -> None:
    """One session of an editor with `commdsl lsp`, from the first word to the last, which ends well."""

    async def session() -> None:
        client = Client("editor", "1")
        await client.start_io(sys.executable, "-m", "commdsl", "lsp")
        await client.initialize_async(types.InitializeParams(types.ClientCapabilities(), root_uri=folder.as_uri()))
        client.initialized(types.InitializedParams())
        await say(Editor(client, folder))
        await client.shutdown_async(None)
        client.exit(None)
        await client.stop()
        assert client.ended == 0

    asyncio.run(session())


def at(text: str, word: str, within: int = 0) -> types.Position:
    """Where a word first stands, and so many letters on, as an editor counts: from 0, in UTF-16."""
    before = text[: text.index(word) + within]
    line = before.rpartition("\n")[2]
    return types.Position(before.count("\n"), len(line.encode("utf-16-le")) // 2)


def test_an_hour_at_an_editor(tmp_path: Path) -> None:
    """A file that calls another: nothing is wrong, its names are explained and found, it is outlined; a mistake is
    shown with what the command line says, and its page; a newer text ends the check of an older one.
    """
    (tmp_path / "ring.comm").write_text(CALLED, encoding="utf-8")
    text = CALLS

    async def say(editor: Editor) -> None:
        client, document = editor.client, editor.open("pairs.comm", text)

        async def hover(word: str, within: int = 0) -> str:
            params = types.HoverParams(document, at(text, word, within))
            answer = await client.text_document_hover_async(params)
            assert answer is not None
            assert isinstance(answer.contents, types.MarkupContent)
            return answer.contents.value

        async def definition(word: str, within: int = 0) -> tuple[str, str]:
            params = types.DefinitionParams(document, at(text, word, within))
            answer = await client.text_document_definition_async(params)
            assert isinstance(answer, types.Location)
            whole = CALLED if answer.uri == editor.uri("ring.comm") else text
            return Path(answer.uri).name, whole.split("\n")[answer.range.start.line].strip()

        assert (await editor.diagnostics()).diagnostics == ()
        assert await definition("N)") == ("pairs.comm", "let N = P / 2")
        assert await definition("twice(N)") == ("pairs.comm", "fn twice(n) = 2 * n")
        assert await definition("ring(x)") == ("ring.comm", "schedule ring for P ranks where P >= 2 {")
        assert await definition('"ring.comm"') == ("ring.comm", "schedule ring for P ranks where P >= 2 {")
        assert await hover("N)") == "```comm\nlet N = P / 2\n```\n\n4, for 8 ranks"
        assert await hover("x)\n}") == "```comm\ninout x[twice(N)]\n```\n\n8 chunks, for 8 ranks"
        assert "in `ring.comm`" in await hover("ring(x)")

        outline = await client.text_document_document_symbol_async(types.DocumentSymbolParams(document))
        symbols = [one for one in outline or () if isinstance(one, types.DocumentSymbol)]
        assert [(one.name, one.detail) for one in symbols] == [("twice", "fn"), ("pairs", "schedule")]
        assert [(one.name, one.detail) for one in symbols[1].children or ()] == [("N", "let"), ("x", "buffer")]

        editor.change("pairs.comm", 2, text.replace("ring(x)", "ring(w)"))
        editor.change("pairs.comm", 3, text.replace("ring(x)", "ring(z)"))
        shown = await editor.diagnostics()
        (found,) = shown.diagnostics
        assert (shown.version, found.code) == (3, "C101")
        assert found.message.split("\n")[0] == "`z` is not known"
        assert found.message.split("\n")[-1] == "help: there is `x`"
        assert found.range == types.Range(at(text, "x)\n}"), at(text, ")\n}"))
        assert (await hover("x)\n}")).endswith(codes.page("C101"))

    talk(tmp_path, say)


def test_a_text_that_is_not_done(tmp_path: Path) -> None:
    """While a text is written its syntax faults are shown, names that fit are proposed, and nothing is formatted; what
    is wrong in a schedule that is called is shown at the call, with its own place beside it, until that file is saved
    mended; a fault of syntax in it, where it is used.
    """
    (tmp_path / "ring.comm").write_text(CALLED.replace("(r + 1) % P }", "(r + 1) }"), encoding="utf-8")
    ragged = 'use   "ring.comm"\r\nschedule   twice for P ranks {\r\n  inout x[P]\r\n  ensure allreduce(x)\r\n'

    async def say(editor: Editor) -> None:
        client, document = editor.client, editor.open("twice.comm", ragged + "  each r do ring(")

        async def formatted() -> list[str]:
            params = types.DocumentFormattingParams(document, types.FormattingOptions(2, True))
            return [edit.new_text for edit in await client.text_document_formatting_async(params) or ()]

        assert [one.code for one in (await editor.diagnostics()).diagnostics] == ["C002"]
        asked = types.CompletionParams(document, types.Position(4, len("  each r do ring(")))
        proposed = await client.text_document_completion_async(asked)
        assert isinstance(proposed, list | tuple)
        assert [one.label for one in proposed] == ["x"]
        assert await formatted() == []

        whole = ragged + "  each r do ring(x)\r\n}\r\n"
        editor.change("twice.comm", 2, whole)
        found = (await editor.diagnostics()).diagnostics[0]
        assert found.range.start == at(whole, "each r do")
        assert [Path(one.location.uri).name for one in found.related_information or ()] == ["ring.comm"]
        assert await formatted() == [format_file(parse(Source("", whole.replace("\r", ""))))]

        (tmp_path / "ring.comm").write_text(CALLED, encoding="utf-8")
        client.text_document_did_save(types.DidSaveTextDocumentParams(types.TextDocumentIdentifier(editor.uri("a"))))
        assert (await editor.diagnostics()).diagnostics == ()
        (tmp_path / "ring.comm").write_text("\n schedule", encoding="utf-8")
        editor.change("twice.comm", 3, whole)
        (fault,) = (await editor.diagnostics()).diagnostics
        assert (fault.code, fault.range.start, fault.range.end) == ("C002", at(whole, "use"), at(whole, "\r\nschedule"))
        assert [one.location.range.start.line for one in fault.related_information or ()] == [1]

    talk(tmp_path, say)
