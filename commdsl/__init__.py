"""A language for GPU communication: schedules that are proved, compiled to a kernel and handed over as a torch op.

Importing this imports nothing else; each name below loads what it needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commdsl.diagnostics import CommError as CommError
    from commdsl.runtime.communicator import threads as threads
    from commdsl.runtime.load import check as check
    from commdsl.runtime.load import load as load
    from commdsl.runtime.load import reset as reset
    from commdsl.runtime.load import shutdown as shutdown
    from commdsl.timeouts import CommTimeout as CommTimeout

__all__ = ["CommError", "CommTimeout", "check", "load", "reset", "shutdown", "threads"]

_HOME = {
    "CommError": "commdsl.diagnostics",
    "CommTimeout": "commdsl.timeouts",
    "check": "commdsl.runtime.load",
    "load": "commdsl.runtime.load",
    "reset": "commdsl.runtime.load",
    "shutdown": "commdsl.runtime.load",
    "threads": "commdsl.runtime.communicator",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module `commdsl` has no attribute `{name}`")
    return getattr(import_module(_HOME[name]), name)
