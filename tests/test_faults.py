"""Every mistake is found where it is made, under its code, and nothing else is said; every page's examples hold."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import fault_files
import pytest

from commdsl.language import codes
from commdsl.language.diagnostics import render_full
from commdsl.machine.resources import data_dir

FILES = sorted(fault_files.FAULTS.glob("*.comm"))
PAGES = sorted(fault_files.EXPLAIN.glob("*.md"))
# A law on the Plan cannot be broken from text: the derivation would have to be wrong. Its page has no wrong example.
FROM_TEXT = [page for page in PAGES if any(kind == "wrong" for kind, _ in fault_files.example_blocks(page))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_fault_file(path: Path) -> None:
    """Each announced error appears on its line, and no other appears."""
    text = path.read_text(encoding="utf-8")
    expected = fault_files.expected(text)
    found = list(fault_files.diagnostics(text, path.name))
    shown = "\n".join(render_full(diagnostic) for diagnostic in found)

    assert expected, "a fault file announces an error"
    for line, code, part in expected:
        match = [
            diagnostic
            for diagnostic in found
            if (diagnostic.primary.span.position[0], diagnostic.code) == (line, code)
            and (part in diagnostic.headline or part in diagnostic.primary.text)
        ]
        assert match, f'no {code} "{part}" on line {line}; there is\n{shown}'
        found.remove(match[0])
    assert not found, f"said without being announced:\n{shown}"
    assert path.name.startswith(f"{expected[0][1]}_")


@pytest.mark.usefixtures("unswept")
@pytest.mark.parametrize("path", [path for path in FILES if path.name.startswith("C511")], ids=lambda path: path.stem)
def test_what_is_too_much_is_refused_before_it_is_spent(path: Path) -> None:
    """However much a file asks for, it is refused within twenty times the time of checking a shipped schedule."""
    shipped = data_dir("schedules") / "collectives" / "allreduce_hamilton.comm"

    def seconds(of: Path) -> float:
        start = time.thread_time()
        found = fault_files.diagnostics(of.read_text(encoding="utf-8"), of.name)
        assert bool(found) == (of == path)
        return time.thread_time() - start

    assert min(seconds(path) for _ in range(3)) < 20 * min(seconds(shipped) for _ in range(3))


@pytest.mark.parametrize("page", FROM_TEXT, ids=lambda page: page.stem)
def test_golden(page: Path, golden: Callable[[str, str], None]) -> None:
    """One full rendering per code, of its first fault file, read by people."""
    path = next(path for path in FILES if path.name.startswith(f"{page.stem}_"))
    text = path.read_text(encoding="utf-8")
    rendered = "\n\n".join(render_full(diagnostic) for diagnostic in fault_files.diagnostics(text, path.name))
    root = str(fault_files.TESTS.parent)
    golden(f"{page.stem}.txt", rendered.replace(root, "ROOT") + "\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_examples(page: Path) -> None:
    """The wrong example of a page gives its code and nothing else, the right one gives nothing."""
    blocks = fault_files.example_blocks(page)

    assert any(kind == "right" for kind, _ in blocks)
    for kind, text in blocks:
        found = fault_files.diagnostics(text, f"{page.stem}_{kind}.comm")
        shown = "\n".join(render_full(diagnostic) for diagnostic in found)
        assert {diagnostic.code for diagnostic in found} == ({page.stem} if kind == "wrong" else set()), shown


@pytest.mark.parametrize("code", codes.all_codes())
def test_title(code: str) -> None:
    """A page starts with its code and a title that fits a line."""
    page = codes.page(code)

    assert page.startswith(f"# {code}: ")
    assert 0 < len(codes.title(code)) <= 70
    assert not codes.title(code).endswith(".")


def test_every_code_has_a_page() -> None:
    """Whatever code the package uses can be explained."""
    package = fault_files.EXPLAIN.parents[1]
    used = {
        code
        for module in package.rglob("*.py")
        for code in re.findall(r'"(C\d{3})"', module.read_text(encoding="utf-8"))
    }

    assert used <= set(codes.all_codes())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_voice(path: Path) -> None:
    """A headline is short, starts small, has no full stop and never says just `invalid`."""
    for diagnostic in fault_files.diagnostics(path.read_text(encoding="utf-8"), path.name):
        assert len(diagnostic.headline) <= 70, diagnostic.headline
        assert not diagnostic.headline[:1].isupper(), diagnostic.headline
        assert not diagnostic.headline.endswith("."), diagnostic.headline
        assert "invalid" not in diagnostic.headline.lower(), diagnostic.headline
        assert len(diagnostic.secondary) <= 2
