"""Turns a call of two launches into what its caller holds between them.

Assumes launches in the order of a rank's calls. Does not know what a call does: `way_there` and `way_back` do. Where
one rank makes two launches another may make one: they are the same call.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

import torch

from commdsl.runtime.errors import DispatchError, TensorError
from commdsl.runtime.launches import Launches

Run: TypeAlias = Callable[[int], None]
"""Starts a call: WHOLE, or its first launch, or its second."""

WHOLE, SEND, RECEIVE = range(3)
"""The argument `half` of kernels."""

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class Call(Generic[Found]):
    """A call that was judged, and nothing of it launched yet."""

    launches: Launches
    run: Run
    found: Found
    given: tuple[torch.Tensor, ...]  # what is not to change until it is over

    def whole(self) -> Found:
        """In one launch."""
        self.run(WHOLE)
        return self.found


@dataclass(frozen=True, eq=False)
class Half:
    """A call that waits for its second launch, whoever makes it."""

    call: Call[Any]
    pending: weakref.ref[Pending[Any]]  # who is to make it
    is_captured: bool


class Pending(Generic[Found]):
    """A call whose first launch was made: what it sends is on its way. Nothing that was passed to it may change until
    the second is made, and no other call of the same kind begins before; but where nobody holds this any more, the next
    one of its kind finishes it, with a RuntimeWarning: to other ranks it was a call like any.
    """

    def __init__(self, call: Call[Found], ready: Callable[[], bool]) -> None:
        """Makes the first launch. `ready`: raises where the group is broken, and says whether a graph is captured."""
        self._call, self._ready = call, ready
        self._name, self._launches = call.launches.plan.name, call.launches
        self._half = Half(call, weakref.ref(self), ready())
        call.run(SEND)
        call.launches.open_halves(self._half)
        self._versions = [*map(_version, call.given)]
        self._is_received = False

    def __reduce__(self) -> NoReturn:
        raise DispatchError(f"half a call of `{self._name}` is not copied or saved: receive it")

    def receive(self) -> Found:
        """The second launch, on the current stream: it waits for what peers send, and finishes it. Once.

        Raises DispatchError (C961) where there is nothing to receive, or it is captured in a graph without the first;
        TensorError (C951) where a tensor that was passed has changed since.
        """
        is_captured = self._ready()
        if self._is_received:
            raise DispatchError(f"this call of `{self._name}` was received before")
        if self._launches.is_closed or self._launches.halfway is not self._half:
            raise DispatchError(f"this call of `{self._name}` is gone: its memory was released, or the group reset")
        if is_captured != self._half.is_captured:
            raise DispatchError(f"both halves of a call of `{self._name}` are captured in one graph, or neither")
        self._launches.resume()
        self._call.run(RECEIVE)
        self._launches.close_halves()
        self._is_received = True
        if self._versions != [*map(_version, self._call.given)]:
            raise TensorError(f"a tensor of a call of `{self._name}` was changed between its halves")
        return self._call.found


def finish_lost(launches: Launches, is_captured: bool) -> None:
    """Before a call: the second launch of the one before it, if that was begun and nobody can receive it any more, as
    after an exception between its halves. Raises DispatchError (C961) where somebody can, or a graph has a half.
    """
    half, name = launches.halfway, launches.plan.name
    if half is None:
        return
    assert isinstance(half, Half)
    if half.pending() is not None:
        raise DispatchError(f"a call of `{name}` is between its halves: `receive` it before the next")
    if half.is_captured:
        raise DispatchError(
            f"half a call of `{name}` was captured, and nobody holds the other: `commdsl.reset()` on all ranks, then "
            "capture both"
        )
    if is_captured:
        raise DispatchError(
            f"a call of `{name}` was lost between its halves: the next outside of a capture finishes it"
        )
    warnings.warn(
        f"a call of `{name}` was lost between its halves, and is finished now: `receive` what a send half returns",
        RuntimeWarning,
        stacklevel=5,
    )
    launches.resume()
    half.call.run(RECEIVE)
    launches.close_halves()


def _version(tensor: torch.Tensor) -> int:
    """How often it was changed, which tensors of inference do not count."""
    return 0 if tensor.is_inference() else tensor._version
