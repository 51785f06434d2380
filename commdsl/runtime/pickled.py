"""Turns an Op into what loads it again elsewhere: the name of what ships, or else the texts themselves.

Assumes that whoever loads it has the same commdsl, or one that proves the same text. Does not keep what was built: that
is made again, or found in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from commdsl.machine import resources
from commdsl.runtime.program import Definition

Given: TypeAlias = dict[str, Any]
"""Arguments of `load`."""


def arguments(definition: Definition, ranks: int) -> Given:
    """What `load` makes the same op of, on a machine that has none of the files."""
    found = {"params": dict(definition.params), "tune": dict(definition.tune), "ranks": ranks}
    found |= {"schedule": definition.schedule, "on": definition.on}
    path, file = definition.path, _file_of(definition.on)
    if file is None and isinstance(path, Path) and path in resources.shipped_files():
        return {"path": path.stem, **found}
    from commdsl import compiler  # as little as a call needs it

    texts = [one.source for one in compiler.read(path)]
    if file is not None:
        texts += [one.source for one in compiler.read(file)]
        found["on"] = compiler.find_topology((), definition.on, ranks).name
    return {"path": _named({one.name: one.text for one in texts}), **found}


def _file_of(machine: str | None) -> str | None:
    """Where a machine of the user's own is declared."""
    file, _ = resources.split_place(machine or "")
    return file if file.endswith(resources.SUFFIX) else None


def _named(texts: Mapping[str, str]) -> dict[str, str]:
    """By the names of the files, without the folders that they lie in here."""
    found: dict[str, str] = {}
    for path, text in texts.items():
        name = PurePath(path).name
        while found.get(name, text) != text:
            name = f"other_{name}"
        found[name] = text
    return found
