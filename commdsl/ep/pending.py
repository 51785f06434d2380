"""Turns a call of two launches into what its caller holds between them.

Assumes launches in the order of a rank's calls. Does not know what a call does: `way_there` and `way_back` do. Where
one rank makes two launches another may make one: they are the same call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NoReturn, TypeAlias, TypeVar

import torch

from commdsl.runtime.errors import DispatchError, TensorError
from commdsl.runtime.launches import Launches

Run: TypeAlias = Callable[[int], None]
"""Starts a call: WHOLE, or its first launch, or its second."""

WHOLE, SEND, RECEIVE = range(3)
"""The argument `half` of kernels."""

Found = TypeVar("Found")


class Pending(Generic[Found]):
    """A call whose first launch was made: what it sends is on its way. Nothing that was passed to it may change until
    the second is made, and no other call of the same kind begins before.
    """

    def __init__(
        self, launches: Launches, run: Run, found: Found, given: tuple[torch.Tensor, ...], ready: Callable[[], bool]
    ) -> None:
        """Makes the first launch. `ready`: raises where the group is broken, and says whether a graph is captured."""
        self._is_captured = ready()
        run(SEND)
        launches.open_halves()
        self._name, self._launches, self._ready = launches.plan.name, launches, ready
        self._run, self._found, self._given = run, found, given
        self._versions = [*map(_version, given)]
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
        if self._launches.is_closed or not self._launches.is_halfway:
            raise DispatchError(f"this call of `{self._name}` is gone: its memory was released, or the group reset")
        if is_captured != self._is_captured:
            raise DispatchError(f"both halves of a call of `{self._name}` are captured in one graph, or neither")
        self._run(RECEIVE)
        self._launches.close_halves()
        self._is_received = True
        if self._versions != [*map(_version, self._given)]:
            raise TensorError(f"a tensor of a call of `{self._name}` was changed between its halves")
        return self._found


def _version(tensor: torch.Tensor) -> int:
    """How often it was changed, which tensors of inference do not count."""
    return 0 if tensor.is_inference() else tensor._version
