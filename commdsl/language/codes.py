"""Turns the code of a diagnostic into its title and its page.

Assumes one page per code, `explain/C203.md`, whose first line is `# C203: title`. Reads them when asked, not on import,
and does not check what they say; tests do.
"""

from __future__ import annotations

from pathlib import Path

_PAGES = Path(__file__).parent / "explain"


def all_codes() -> tuple[str, ...]:
    """Every code there is, in order."""
    return tuple(sorted(page.stem for page in _PAGES.glob("C[0-9][0-9][0-9].md")))


def page(code: str) -> str:
    """The law behind a code with a wrong and a right example, as Markdown; KeyError if there is no such code."""
    path = _PAGES / f"{code}.md"
    if code not in all_codes():
        raise KeyError(code)
    return path.read_text(encoding="utf-8")


def title(code: str) -> str:
    """The law in a line."""
    headline = page(code).partition("\n")[0]
    return headline.removeprefix(f"# {code}: ")
