"""A kept Syntax is the parser's, in whole, and nothing in the cache can make it wrong or stop a run.

Assumes a cache folder of the test's own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from commdsl.language import parsed, parser
from commdsl.language.diagnostics import CommError
from commdsl.language.source import Source
from commdsl.machine import cache

Kept: TypeAlias = Callable[[], set[Path]]

ROOT = Path(__file__).parent.parent
RING = ROOT / "schedules/collectives/allreduce_ring.comm"


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """What is kept of Syntaxes: all but the parser's own tables."""
    monkeypatch.setenv("COMMDSL_CACHE_DIR", str(tmp_path))
    parser.parse(Source("first.comm", ""))
    tables = set(cache.entries(tmp_path))
    return lambda: set(cache.entries(tmp_path)) - tables


def test_kept_is_the_same(kept: Kept) -> None:
    """The second parse comes from the cache and equals the first, spans and comments too."""
    source = Source("ring.comm", RING.read_text())
    first = parsed.parse(source)
    assert len(kept()) == 1
    second = parsed.parse(source)

    assert second == first == parser.parse(source)
    assert second.comments == first.comments
    assert [item.span.position for item in second.items] == [item.span.position for item in first.items]


@pytest.mark.usefixtures("unswept")
def test_a_long_text_is_parsed_once() -> None:
    """Of what is generated, a quarter of a megabyte here, a second reading takes a fraction of the first."""
    docs = "".join(f"  doc {1000 + number} as 4 shards -> 0 1 2 3\n" for number in range(6000))
    source = Source("long.comm", f"plan long for 4 ranks {{\n  causal\n  rank 0 {{\n{docs}  }}\n}}\n")
    seconds = []
    for _ in range(2):
        start = time.thread_time()
        parsed.parse(source)
        seconds.append(time.thread_time() - start)

    assert len(source.text) > 200_000
    assert seconds[1] < seconds[0] / 2
    assert seconds[1] < 0.6


def test_kept_by_name_and_text(kept: Kept) -> None:
    """Another name or another text is another entry: diagnostics name the file they are about."""
    text = RING.read_text()
    for source in (Source("a.comm", text), Source("b.comm", text), Source("a.comm", text + "\n")):
        assert parsed.parse(source).source == source

    assert len(kept()) == 3


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\x80\x04N.", b"\x80\x05\x95\xff"])
def test_damaged_entry(damage: bytes, kept: Kept) -> None:
    """An entry that is damaged, or holds something else, is parsed anew."""
    source = Source("ring.comm", RING.read_text())
    expected = parsed.parse(source)
    (entry,) = kept()
    (entry / cache.OBJECT).write_bytes(damage)

    assert parsed.parse(source) == expected


def test_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder that cannot be written costs nothing but time."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMMDSL_CACHE_DIR", str(tmp_path / "file"))
    source = Source("ring.comm", RING.read_text())

    assert parsed.parse(source) == parser.parse(source)


def test_fault_is_not_kept(kept: Kept) -> None:
    """A text that does not parse says so every time."""
    for _ in range(2):
        with pytest.raises(CommError):
            parsed.parse(Source("broken.comm", "schedule"))
    assert kept() == set()


def test_second_check_needs_no_parser(tmp_path: Path) -> None:
    """`commdsl check` of a file it has seen imports neither lark nor the parser."""
    code = (
        "import sys; from commdsl.commands.cli import run_command; "
        f"status = run_command(['check', {str(RING)!r}]); print(status, 'lark' in sys.modules)"
    )
    last = ""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        last = done.stdout.splitlines()[-1]

    assert last == "0 False"
