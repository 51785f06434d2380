"""Turns the name of a shipped folder into its path: beside the package in a checkout, inside it when installed.

Assumes the wheel maps `grammar`, `templates` and `schedules` to `commdsl/_data`. Does not read files, but for
the version of a checkout: pyproject.toml says it, and what an installation knows comes from there.
"""

from __future__ import annotations

import re
from pathlib import Path


def data_dir(name: str) -> Path:
    """The folder `grammar`, `templates` or `schedules`, wherever this installation keeps it."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_data" / name
    return installed if installed.is_dir() else package.parent / name


def version() -> str:
    """Of the package that this is: of the checkout around it, else as installed."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file() and (found := _OWN_VERSION.search(project.read_text(encoding="utf-8"))):
        return found[1]
    import importlib.metadata  # 20 ms that only this question takes

    return importlib.metadata.version("commdsl")


_OWN_VERSION = re.compile(r'^name = "commdsl"\nversion = "([^"]+)"$', re.MULTILINE)
