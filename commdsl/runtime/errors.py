"""Turns what goes wrong in a call into a typed exception with a code that `commdsl explain` knows.

Assumes the caller states expected and got. Does not cover the `.comm` text: that is CommError's. A wait that took too
long inside a kernel is `timeouts.CommTimeout`.
"""

from __future__ import annotations

from typing import Self

from commdsl.machine.errors import CodedError


class OpError(CodedError, RuntimeError):
    """A call cannot be made; nothing was sent."""

    code = "C950"


class TensorError(OpError, ValueError):
    """A tensor the op cannot take: its device, dtype, shape or layout."""

    code = "C951"


class ReductionError(OpError, ValueError):
    """A reduction that does not exist or that the dtype lacks."""

    code = "C952"


class GroupError(OpError, ValueError):
    """A group that is not known here, or whose ranks the op cannot serve."""

    code = "C953"


class DeviceError(OpError):
    """The GPU cannot run the kernel, or the packages that would run it are missing."""

    code = "C954"


class CaptureError(OpError):
    """A CUDA graph capture met an op that still has to allocate or load, or a call that it keeps from being ordered."""

    code = "C955"


class RendezvousError(OpError):
    """Ranks of the group did not meet to set something up; `missing`: those that had not come when time was up."""

    code = "C956"

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class BrokenGroupError(OpError):
    """A call on a group after a time-out, before the reset."""

    code = "C957"


class GradientError(OpError):
    """A gradient through a schedule that has none."""

    code = "C958"


class AgreementError(OpError):
    """Ranks of a group do not do the same: their calls, or what they set up, differ. Both sides are in the message."""

    code = "C964"


class PeerError(OpError):
    """A rank of the group gave up, or its process has ended: `rank` is which, `reason` why, in words."""

    code = "C965"

    def __init__(self, rank: int, reason: str, calls: str = "") -> None:
        """`calls`: the calls of that rank and of the one that raises this, where `reason` does not name them."""
        super().__init__(f"rank {rank} {reason}; {calls}" if calls else f"rank {rank} {reason}")
        self.rank = rank
        self.reason = reason

    @property
    def gone(self) -> int | None:
        """The rank, where its process has ended; None where it gave up."""
        return self.rank if self.reason.startswith("is gone") else None


class DispatchError(OpError, ValueError):
    """A call that a Dispatcher, or Experts, cannot make: what they were made for does not hold it."""

    code = "C961"


class RowError(OpError):
    """A kernel met rows that its table must not name, or that did not come."""

    code = "C962"


class KeysError(OpError):
    """A kernel met a key that there is not, or more rows for a rank than it has room for."""

    code = "C963"


class MaskError(OpError, ValueError):
    """A schedule whose yields do not show a rank each key that its queries see, once."""

    code = "C966"


class WorkTimeoutError(OpError, TimeoutError):
    """A Work that is not completed after the time that its `wait` was given; the call goes on."""

    code = "C967"

    def __new__(cls, *arguments: object) -> Self:
        return TimeoutError.__new__(cls, *arguments)  # RuntimeError's does not make an OSError


class HeapError(OpError, MemoryError):
    """Symmetric memory of a group cannot be had."""

    code = "C969"


class ReplicaError(OpError):
    """A parameter that all ranks have whole has other values, or another gradient, on some rank."""

    code = "C976"
