"""A language for GPU communication: schedules that are proved, compiled to a kernel and handed over as a torch op.

Importing this imports nothing else; each name below loads what it needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commdsl.language.diagnostics import CommError as CommError
    from commdsl.program.timeouts import CommTimeout as CommTimeout
    from commdsl.runtime.collectives import all_gather as all_gather
    from commdsl.runtime.collectives import all_reduce as all_reduce
    from commdsl.runtime.collectives import all_reduce_ as all_reduce_
    from commdsl.runtime.collectives import all_to_all as all_to_all
    from commdsl.runtime.collectives import broadcast as broadcast
    from commdsl.runtime.collectives import choice as choice
    from commdsl.runtime.collectives import prepare as prepare
    from commdsl.runtime.collectives import reduce_scatter as reduce_scatter
    from commdsl.runtime.groups import threads as threads
    from commdsl.runtime.load import check as check
    from commdsl.runtime.load import load as load
    from commdsl.runtime.load import reset as reset
    from commdsl.runtime.load import shutdown as shutdown

__all__ = [
    "CommError",
    "CommTimeout",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "broadcast",
    "check",
    "choice",
    "load",
    "prepare",
    "reduce_scatter",
    "reset",
    "shutdown",
    "threads",
]

_HOME = {
    "CommError": "commdsl.language.diagnostics",
    "CommTimeout": "commdsl.program.timeouts",
    "all_gather": "commdsl.runtime.collectives",
    "all_reduce": "commdsl.runtime.collectives",
    "all_reduce_": "commdsl.runtime.collectives",
    "all_to_all": "commdsl.runtime.collectives",
    "broadcast": "commdsl.runtime.collectives",
    "check": "commdsl.runtime.load",
    "choice": "commdsl.runtime.collectives",
    "load": "commdsl.runtime.load",
    "prepare": "commdsl.runtime.collectives",
    "reduce_scatter": "commdsl.runtime.collectives",
    "reset": "commdsl.runtime.load",
    "shutdown": "commdsl.runtime.load",
    "threads": "commdsl.runtime.groups",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module `commdsl` has no attribute `{name}`")
    # Kept: the next use of the name costs a look into a dictionary.
    found = globals()[name] = getattr(import_module(_HOME[name]), name)
    return found
