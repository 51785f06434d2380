"""Places that ask which phase they were given: a phase says all of itself, so there are few, and never more."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

from commdsl.program.phases import Routed
from commdsl.program.plan import Phase

PACKAGE = Path(__file__).parent.parent / "commdsl"

ROUTED = frozenset(kind.__name__ for kind in get_args(Routed))
EVERY = frozenset(kind.__name__ for kind in get_args(Phase))
HOMES = tuple(f"commdsl.program.{name}" for name in ("phases", "moves", "launches", "tasks", "tile_tasks", "by_row"))
"""The modules that a phase's class is imported from."""

MOST_ROUTED, MOST_IN_ALL = 68, 152
"""Sites today; a change that needs more of them puts what it needs into the phase."""


def imported(tree: ast.Module) -> frozenset[str]:
    """The classes of phases that a module imports, by the names that they have there."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return frozenset(one.name for node in froms if (node.module or "").startswith(HOMES) for one in node.names) & EVERY


def named(node: ast.expr, unions: dict[str, ast.expr]) -> Iterator[str]:
    """The classes in the second argument of `isinstance`, those of a union of the module each by itself."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield from named(unions[inner.id], {}) if inner.id in unions else [inner.id]


def sites(path: Path) -> Iterator[str]:
    """The class of each `case` and each `isinstance` that tells phases apart."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = imported(tree)
    unions = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.MatchClass(cls=ast.Name(id=name)) if name in known:
                yield name
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                yield from (name for name in named(kinds, unions) if name in known)


def test_no_field_inherits_a_default() -> None:
    """A field without a value is missing: a class takes a base's property of that name for its default."""
    for kind in get_args(Phase):
        for field in fields(kind):
            assert not any(hasattr(base, field.name) for base in kind.__mro__[1:]), (kind.__name__, field.name)


def test_few_places_tell_phases_apart() -> None:
    """Accesses, descriptions, arguments, constants and calls of bodies are the phase's own; no module lists them."""
    found = [name for path in PACKAGE.rglob("*.py") for name in sites(path)]

    assert sum(name in ROUTED for name in found) <= MOST_ROUTED
    assert len(found) <= MOST_IN_ALL
    assert len(ROUTED) == 15
    assert len(EVERY) == 22
