"""Turns what a dispatch by keys sends into the names of what arrives besides: scales, numbers of places.

Assumes names of a legal dispatch. Does not know how rows travel: `phases` does.
"""

from __future__ import annotations

from collections.abc import Sequence

from commdsl.ir.dispatches import Often


def scales(names: Sequence[str], stretches: Sequence[int]) -> tuple[str, ...]:
    """What arrives besides of tensors of these names that travel in float8."""
    return tuple(f"scales of {name}" for name, stretch in zip(names, stretches, strict=True) if stretch)


def beside(value: str | None, often: Often) -> tuple[str, ...]:
    """What arrives beside rows that go by keys: where they come from, their value, the places that one row has, and
    which of these has it.
    """
    names = ("origins", *(() if value is None else (value,)))
    names += ("mates",) if often.is_once else ()
    return (*names, "index") if often is Often.INDEX else names
