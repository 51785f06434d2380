"""Turns `.comm` files into their canonical form, in place or only told apart.

Assumes nothing. Does not change what a file means: the formatted text parses to the same syntax.
"""

from __future__ import annotations

from pathlib import Path

from commdsl.commands import output
from commdsl.commands.arguments import STDIN
from commdsl.commands.output import Exit
from commdsl.language import diagnostics, parser
from commdsl.language.diagnostics import CommError, Diagnostic
from commdsl.language.format import format_file
from commdsl.language.source import Source
from commdsl.language.text import standard_input, text_of


def fmt(paths: tuple[Path, ...], *, check: bool, as_json: bool) -> Exit:
    """Rewrites files that are not canonical; with `check` only names them. `-` reads standard input."""
    changed: list[str] = []
    found: list[Diagnostic] = []
    for path in expand(paths):
        is_stream = path == STDIN
        try:
            source = standard_input() if is_stream else Source(str(path), text_of(path))
            before, after = source.text, format_file(parser.parse(source))
        except CommError as error:
            found += error.diagnostics
            continue
        if is_stream and not check:
            output.say_text(after)
        elif before != after if is_stream else path.read_bytes() != after.encode():  # ends of lines count, too
            changed.append(str(path))
            if not check:
                path.write_text(after, encoding="utf-8")
    if as_json:
        output.say_json({"changed": changed, "diagnostics": [diagnostics.to_json(d) for d in found]})
    else:
        for name in changed:
            output.say(f"{'would format' if check else 'formatted'} {name}")
        output.show_diagnostics(found)
    return Exit.DIAGNOSTICS if found or (check and changed) else Exit.FINE


def expand(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Folders stand for the `.comm` files below them."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.rglob("*.comm")) if path.is_dir() else [path]
    return tuple(found)
