"""Expert parallelism: rows to the ranks of their keys, which never leave the device, and back as weighted sums.

Importing this imports nothing else; each name below loads what it needs when it is first used.

    simulate   what it means, on arrays of all ranks: the oracle of the kernels
    limits     the most that any call moves -> symmetric memory
    experts    one rank's end: the calls users make
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commdsl.ep.experts import Experts as Experts
    from commdsl.ep.experts import Handle as Handle
    from commdsl.ep.limits import Limits as Limits
    from commdsl.runtime.errors import KeysError as KeysError

__all__ = ["Experts", "Handle", "KeysError", "Limits"]

_HOME = {
    "Experts": "commdsl.ep.experts",
    "Handle": "commdsl.ep.experts",
    "KeysError": "commdsl.runtime.errors",
    "Limits": "commdsl.ep.limits",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module `commdsl.ep` has no attribute `{name}`")
    # Kept: the next use of the name costs a look into a dictionary.
    found = globals()[name] = getattr(import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
