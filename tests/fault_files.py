"""Reads fault files and the examples of explain pages: how to check them, and which errors they expect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from commdsl import compiler
from commdsl.language.diagnostics import CommError, Diagnostic
from commdsl.language.syntax import File

TESTS = Path(__file__).parent
FAULTS = TESTS / "faults"
EXPLAIN = TESTS.parent / "commdsl" / "language" / "explain"

_CHECK = re.compile(r"# check:([^#\n]*)")
_EXPECT = re.compile(r'# error: (C\d{3})(?: "((?:[^"\\]|\\.)*)")?')
_BLOCK = re.compile(r"^```comm (wrong|right)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Options:
    """What `# check: --ranks 8 --on h200_2x8 K=2` says."""

    ranks: int | None = None
    on: str | None = None
    params: dict[str, int] = field(default_factory=dict)


def options(text: str) -> Options:
    """The options in the first line of a text; without such a line, none."""
    match = _CHECK.match(text)
    words = match[1].split() if match else []
    ranks, on, params = None, None, {}
    while words:
        word = words.pop(0)
        if word == "--ranks":
            ranks = int(words.pop(0))
        elif word == "--on":
            on = words.pop(0)
        else:
            name, _, value = word.partition("=")
            params[name] = int(value)
    return Options(ranks, on, params)


def diagnostics(text: str, name: str) -> tuple[Diagnostic, ...]:
    """Everything `commdsl check` says about a text that stands among the fault files."""
    try:
        files = compiler.read_text(text, name, FAULTS)
    except CommError as error:
        return error.diagnostics
    found: dict[Diagnostic, None] = {}
    for check in checks(files, options(text)):
        try:
            found |= dict.fromkeys(check())
        except CommError as error:
            found |= dict.fromkeys(error.diagnostics)
    return tuple(found)


def checks(files: tuple[File, ...], given: Options) -> Iterator[Callable[[], tuple[Diagnostic, ...]]]:
    """One call for each declaration of a file, or one for what is wrong with a file that has none."""
    wanted = compiler.Given(given.ranks, given.on, given.params)
    once = {(type(decl), decl.name.text): decl for decl in reversed(compiler.declarations(files))}
    for decl in reversed(once.values()):
        yield lambda decl=decl: compiler.check_declared(files, decl, wanted).warnings
    if not compiler.declarations(files):
        yield lambda: compiler.check(files, None, given.ranks, given.on, given.params).warnings


def expected(text: str) -> list[tuple[int, str, str]]:
    """Line, code and part of the message of every error a text announces."""
    return [
        (number, match[1], (match[2] or "").replace('\\"', '"'))
        for number, line in enumerate(text.split("\n"), 1)
        for match in _EXPECT.finditer(line)
    ]


def example_blocks(page: Path) -> list[tuple[str, str]]:
    """(`wrong` or `right`, text) of every example of an explain page."""
    return [(match[1], match[2]) for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))]
