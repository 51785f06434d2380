"""A language for GPU communication: schedules that are proved, compiled to a kernel and handed over as a torch op.

Importing this imports nothing else; each name below loads what it needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commdsl import attention as attention
    from commdsl import dispatch as dispatch
    from commdsl import ep as ep
    from commdsl import overlap as overlap
    from commdsl.dispatch.errors import MetadataError as MetadataError
    from commdsl.language.diagnostics import CommError as CommError
    from commdsl.machine.errors import ArgumentError as ArgumentError
    from commdsl.machine.errors import CacheError as CacheError
    from commdsl.machine.errors import ConfigError as ConfigError
    from commdsl.machine.errors import Error as Error
    from commdsl.machine.errors import MissingPackageError as MissingPackageError
    from commdsl.machine.errors import MissingToolError as MissingToolError
    from commdsl.machine.errors import NotFoundError as NotFoundError
    from commdsl.machine.errors import ResourceError as ResourceError
    from commdsl.planner.tuning.selection import TableError as TableError
    from commdsl.program.timeouts import CommTimeout as CommTimeout
    from commdsl.runtime.collectives import all_gather as all_gather
    from commdsl.runtime.collectives import all_reduce as all_reduce
    from commdsl.runtime.collectives import all_reduce_ as all_reduce_
    from commdsl.runtime.collectives import all_to_all as all_to_all
    from commdsl.runtime.collectives import broadcast as broadcast
    from commdsl.runtime.collectives import choice as choice
    from commdsl.runtime.collectives import prepare as prepare
    from commdsl.runtime.collectives import reduce_scatter as reduce_scatter
    from commdsl.runtime.errors import AgreementError as AgreementError
    from commdsl.runtime.errors import BrokenGroupError as BrokenGroupError
    from commdsl.runtime.errors import CaptureError as CaptureError
    from commdsl.runtime.errors import DeviceError as DeviceError
    from commdsl.runtime.errors import DispatchError as DispatchError
    from commdsl.runtime.errors import GradientError as GradientError
    from commdsl.runtime.errors import GroupError as GroupError
    from commdsl.runtime.errors import HeapError as HeapError
    from commdsl.runtime.errors import KeysError as KeysError
    from commdsl.runtime.errors import MaskError as MaskError
    from commdsl.runtime.errors import OpError as OpError
    from commdsl.runtime.errors import PeerError as PeerError
    from commdsl.runtime.errors import ReductionError as ReductionError
    from commdsl.runtime.errors import RendezvousError as RendezvousError
    from commdsl.runtime.errors import ReplicaError as ReplicaError
    from commdsl.runtime.errors import RowError as RowError
    from commdsl.runtime.errors import TensorError as TensorError
    from commdsl.runtime.errors import WorkTimeoutError as WorkTimeoutError
    from commdsl.runtime.groups import threads as threads
    from commdsl.runtime.load import check as check
    from commdsl.runtime.load import load as load
    from commdsl.runtime.load import memory_summary as memory_summary
    from commdsl.runtime.load import release as release
    from commdsl.runtime.load import reset as reset
    from commdsl.runtime.load import shutdown as shutdown
    from commdsl.runtime.op import Op as Op
    from commdsl.runtime.work import Work as Work

    __version__: str

__all__ = [
    "AgreementError",
    "ArgumentError",
    "BrokenGroupError",
    "CacheError",
    "CaptureError",
    "CommError",
    "CommTimeout",
    "ConfigError",
    "DeviceError",
    "DispatchError",
    "Error",
    "GradientError",
    "GroupError",
    "HeapError",
    "KeysError",
    "MaskError",
    "MetadataError",
    "MissingPackageError",
    "MissingToolError",
    "NotFoundError",
    "Op",
    "OpError",
    "PeerError",
    "ReductionError",
    "RendezvousError",
    "ReplicaError",
    "ResourceError",
    "RowError",
    "TableError",
    "TensorError",
    "Work",
    "WorkTimeoutError",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "attention",
    "broadcast",
    "check",
    "choice",
    "dispatch",
    "ep",
    "load",
    "memory_summary",
    "overlap",
    "prepare",
    "reduce_scatter",
    "release",
    "reset",
    "shutdown",
    "threads",
]

_HOME = {
    "AgreementError": "commdsl.runtime.errors",
    "ArgumentError": "commdsl.machine.errors",
    "BrokenGroupError": "commdsl.runtime.errors",
    "CacheError": "commdsl.machine.errors",
    "CaptureError": "commdsl.runtime.errors",
    "CommError": "commdsl.language.diagnostics",
    "CommTimeout": "commdsl.program.timeouts",
    "ConfigError": "commdsl.machine.errors",
    "DeviceError": "commdsl.runtime.errors",
    "DispatchError": "commdsl.runtime.errors",
    "Error": "commdsl.machine.errors",
    "GradientError": "commdsl.runtime.errors",
    "GroupError": "commdsl.runtime.errors",
    "HeapError": "commdsl.runtime.errors",
    "KeysError": "commdsl.runtime.errors",
    "MaskError": "commdsl.runtime.errors",
    "MetadataError": "commdsl.dispatch.errors",
    "MissingPackageError": "commdsl.machine.errors",
    "MissingToolError": "commdsl.machine.errors",
    "NotFoundError": "commdsl.machine.errors",
    "Op": "commdsl.runtime.op",
    "OpError": "commdsl.runtime.errors",
    "PeerError": "commdsl.runtime.errors",
    "ReductionError": "commdsl.runtime.errors",
    "RendezvousError": "commdsl.runtime.errors",
    "ReplicaError": "commdsl.runtime.errors",
    "ResourceError": "commdsl.machine.errors",
    "RowError": "commdsl.runtime.errors",
    "TableError": "commdsl.planner.tuning.selection",
    "TensorError": "commdsl.runtime.errors",
    "Work": "commdsl.runtime.work",
    "WorkTimeoutError": "commdsl.runtime.errors",
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
    "memory_summary": "commdsl.runtime.load",
    "release": "commdsl.runtime.load",
    "reset": "commdsl.runtime.load",
    "shutdown": "commdsl.runtime.load",
    "threads": "commdsl.runtime.groups",
}


def __getattr__(name: str) -> object:
    found: object
    if name in _HOME:
        from commdsl.machine.lazy import imported  # here, as an import of commdsl brings in nothing

        found = imported(_HOME[name], name, f"commdsl.{name}")
    elif name in ("attention", "dispatch", "ep", "overlap"):
        found = import_module(f"commdsl.{name}")
    elif name == "__version__":
        from commdsl.machine.resources import version  # as above: who does not ask does not wait

        found = version()
    else:
        raise AttributeError(f"module `commdsl` has no attribute `{name}`")
    # Kept: the next use of the name costs a look into a dictionary.
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
