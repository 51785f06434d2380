"""Turns the name of a shipped folder, or of a shipped file, into its path: beside the package in a checkout, inside it
when installed; and what a user writes for a file, `FILE.comm:NAME` as well, into its parts.

Assumes the wheel maps `grammar`, `templates` and `schedules` to `commdsl/_data`. Does not read them; of a checkout it
reads pyproject.toml, which says its version, and what an installation knows comes from there.
"""

from __future__ import annotations

import re
from pathlib import Path

SUFFIX = ".comm"


def data_dir(name: str) -> Path:
    """The folder `grammar`, `templates` or `schedules`, wherever this installation keeps it."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_data" / name
    return installed if installed.is_dir() else package.parent / name


def shipped_files() -> tuple[Path, ...]:
    """Every shipped `.comm` file; what one declares has the name of the file."""
    return tuple(sorted(data_dir("schedules").rglob(f"*{SUFFIX}")))


def shipped_file(name: str) -> Path | None:
    """The shipped file of that name, with or without `.comm`; None where there is none."""
    wanted = name.removesuffix(SUFFIX)
    return next((path for path in shipped_files() if path.stem == wanted), None)


def shipped_name(path: Path) -> str | None:
    """How a shipped file is called in a checkout, `schedules/collectives/allreduce_ring.comm`; None for other files."""
    folder = data_dir("schedules")
    return f"schedules/{path.relative_to(folder).as_posix()}" if path.is_relative_to(folder) else None


def split_place(text: str) -> tuple[str, str | None]:
    """`box.comm:name` -> (`box.comm`, `name`): one thing of those that a file declares. Without a name (text, None)."""
    file, sign, name = text.rpartition(f"{SUFFIX}:")
    return (file + SUFFIX, name) if sign and name.isidentifier() else (text, None)


def version() -> str:
    """Of the package that this is: of the checkout around it, else as installed."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file() and (found := _OWN_VERSION.search(project.read_text(encoding="utf-8"))):
        return found[1]
    import importlib.metadata  # 20 ms that only this question takes

    return importlib.metadata.version("commdsl")


_OWN_VERSION = re.compile(r'^name = "commdsl"\nversion = "([^"]+)"$', re.MULTILINE)
