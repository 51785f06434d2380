"""Turns the name of a shipped folder into its path: beside the package in a checkout, inside it when installed.

Assumes the wheel maps `grammar`, `templates` and `schedules` to `commdsl/_data`. Does not read files.
"""

from __future__ import annotations

from pathlib import Path


def data_dir(name: str) -> Path:
    """The folder `grammar`, `templates` or `schedules`, wherever this installation keeps it."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_data" / name
    return installed if installed.is_dir() else package.parent / name
