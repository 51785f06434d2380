"""A diagnostic shows the same facts to a person, on one line, and to a program."""

from __future__ import annotations

import json
import pickle
import re

import pytest

from commdsl.language import codes
from commdsl.language.diagnostics import CommError, Diagnostic, Label, Severity, render_concise, render_full, to_json
from commdsl.language.source import Source, Span

TEXT = """schedule ring for P ranks {
  inout x[P]
\tyield x

  put x -> x
    @ 1

  on comm
}
"""
SOURCE = Source("dir/ring.comm", TEXT)


def label(words: str, text: str = "", source: Source = SOURCE) -> Label:
    start = source.text.index(words)
    return Label(Span(source, start, start + len(words)), text)


def diagnostic(primary: Label, *secondary: Label, help: str = "", notes: tuple[str, ...] = ()) -> Diagnostic:
    return Diagnostic("C302", "two writes of one step overlap", primary, secondary, notes, help)


def test_full() -> None:
    """Labels stand under their lines in the order of the text, gaps are dots, notes and help come last."""
    found = diagnostic(
        label("x -> x", "rank 3 writes here"),
        label("inout x[P]", "declared here"),
        label("schedule ring", ""),
        help="write\ntwo steps",
        notes=("both are in step 4",),
    )

    assert render_full(found) == "\n".join(
        [
            "error[C302]: two writes of one step overlap",
            " --> dir/ring.comm:5:7",
            "  |",
            "1 | schedule ring for P ranks {",
            "  | -------------",
            "2 |   inout x[P]",
            "  |   ---------- declared here",
            "...",
            "5 |   put x -> x",
            "  |       ^^^^^^ rank 3 writes here",
            "  |",
            "  = note: both are in step 4",
            "  = help: write",
            "          two steps",
        ]
    )


def test_labels_of_one_line() -> None:
    """Each label has a row of its own, in the order of the text."""
    lines = render_full(diagnostic(label("-> x", "second"), label("put", "first"))).split("\n")

    assert lines[-3:] == ["5 |   put x -> x", "  |   --- first", "  |         ^^^^ second"]


def test_gutter() -> None:
    """The gutter is as wide as the largest number shown."""
    source = Source("long.comm", "\n" * 99 + "yield x\n" + "\n" * 10 + "yield y\n")
    lines = render_full(diagnostic(label("yield y", "", source), label("yield x", "", source))).split("\n")

    assert lines[1] == "   --> long.comm:111:1"
    assert lines[3] == "100 | yield x"
    assert lines[5] == "..."
    assert lines[7] == "    | ^^^^^^^"


def test_second_source() -> None:
    """A label in another file is shown under that file's name."""
    other = Source("h200.comm", "topology h200 {}\n")
    lines = render_full(diagnostic(label("yield x", "here"), label("h200", "the machine", other))).split("\n")

    assert lines[-4:] == [" ::: h200.comm:1:10", "  |", "1 | topology h200 {}", "  |          ---- the machine"]


def test_odd_spans() -> None:
    """A tab is one column wide, a span over several lines marks its first, an empty one still has a caret."""
    tab = render_full(diagnostic(label("yield x", "tab"))).split("\n")
    long = render_full(diagnostic(label("put x -> x\n    @ 1", "long"))).split("\n")
    end = len(TEXT)
    empty = render_full(diagnostic(Label(Span(SOURCE, end, end), "empty"))).split("\n")

    assert tab[-2:] == ["3 |  yield x", "  |  ^^^^^^^ tab"]
    assert long[-2:] == ["5 |   put x -> x", "  |   ^^^^^^^^^^ long"]
    assert empty[-2:] == ["10 |", "   | ^ empty"]


def test_color() -> None:
    """Colour adds escapes and nothing else; without it there are none."""
    found = diagnostic(label("yield x", "here"), label("inout x[P]"), help="try", notes=("so",))
    plain = render_full(found)

    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", render_full(found, color=True)) == plain
    assert "\x1b[1;31merror[C302]" in render_full(found, color=True)


def test_warning() -> None:
    """A warning says so."""
    found = Diagnostic("C310", "data is never read", label("yield x"), severity=Severity.WARNING)

    assert render_full(found).startswith("warning[C310]: ")
    assert render_concise(found) == "dir/ring.comm:3:2: warning[C310]: data is never read"


def test_json() -> None:
    """JSON has every field, and positions that need no source to read."""
    found = diagnostic(label("put x -> x\n    @ 1", "long"), label("inout x[P]", "declared"), help="h", notes=("n",))
    value = json.loads(json.dumps(to_json(found)))

    assert value == {
        "code": "C302",
        "severity": "error",
        "headline": "two writes of one step overlap",
        "primary": {
            "file": "dir/ring.comm",
            "line": 5,
            "column": 3,
            "end_line": 6,
            "end_column": 8,
            "label": "long",
        },
        "secondary": [
            {"file": "dir/ring.comm", "line": 2, "column": 3, "end_line": 2, "end_column": 13, "label": "declared"}
        ],
        "notes": ["n"],
        "help": "h",
    }


def test_error_crosses_processes() -> None:
    """A CommError survives pickling, and reads as one line per diagnostic, with what its place and its help say."""
    error = CommError((diagnostic(label("yield x", "here")), diagnostic(label("on comm"))))
    copy = pickle.loads(pickle.dumps(error))

    assert isinstance(copy, CommError)
    assert copy.diagnostics == error.diagnostics
    assert str(copy) == str(error)
    assert str(error).split("\n") == [
        "dir/ring.comm:3:2: error[C302]: two writes of one step overlap: here",
        "dir/ring.comm:8:3: error[C302]: two writes of one step overlap",
    ]


def test_codes() -> None:
    """Titles come from the pages; a code without one is unknown."""
    assert codes.title("C001") == "a character or number the language does not have"
    assert codes.page("C001").startswith("# C001: ")
    assert "C001" in codes.all_codes()
    assert list(codes.all_codes()) == sorted(codes.all_codes())
    for unknown in ("C000", "C1", "../C001", ""):
        with pytest.raises(KeyError):
            codes.page(unknown)
