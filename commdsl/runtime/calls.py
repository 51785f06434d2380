"""Turns what a call on tensors of known shapes needs into one object, made once: outputs, arguments, where it runs.

Assumes tensors of the shapes, dtype and device it was made for, as its key in the op's table says. Does not set up
memory or kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from commdsl.cost.profile import Profile
from commdsl.runtime import tensors
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.kept import keep
from commdsl.runtime.program import Program
from commdsl.runtime.stamps import StampedStart
from commdsl.runtime.workspace import Start

MAX_LENGTHS = 64
"""As many where blocks have lengths of their own: others in every call, maybe."""

MAX_KEPT = 4096
"""Shapes of which an op keeps what makes its calls: each is a kilobyte."""


_address = torch.Tensor.data_ptr


class Bound:
    """Calls of one op of one shape on one group. `shapes`: of outputs; `in_place`: the input each is, or None for new
    tensors.
    """

    __slots__ = ("_communicator", "_end", "_make", "_name", "_owner", "_shapes", "_signature", "_slots", "_start")

    def __init__(
        self,
        name: str,
        communicator: Communicator,
        program: Program,
        inputs: Sequence[torch.Tensor],
        shapes: Sequence[Sequence[int]],
        in_place: tuple[int, ...] | None,
        start: Start,
        owner: Callable[[], object],
    ) -> None:
        signature = program.signature
        shapes = [] if in_place is not None else [*shapes]
        self._end = len(inputs) + len(shapes)  # of the results; what follows is the kernel's alone
        own = tensors.own_shapes(signature, inputs)
        outputs = range(len(inputs), self._end) if in_place is None else in_place
        outputs = (*outputs, *range(self._end, self._end + len(own)))
        shapes = [*shapes, *own]
        self._name = name
        self._communicator = communicator
        self._signature = signature
        self._shapes = tuple(tuple(shape) or ((),) for shape in shapes)  # as arguments: faster than as one tuple
        self._make: Any = torch.Tensor.new_empty if program.fills_outputs else torch.Tensor.new_zeros
        slots = tuple(index if is_input else outputs[index] for is_input, index in signature.tensors)
        # Where each of the Plan's tensors is among inputs and outputs; None: that is their order.
        self._slots = None if slots == tuple(range(len(inputs) + len(shapes))) else slots
        self._start = start
        self._owner = owner  # what was behind the group's name when this was made

    @property
    def is_over(self) -> bool:
        """Whether its group was given back: it only holds memory."""
        return self._communicator.is_closed

    def serves(self, behind: object) -> bool:
        """Whether it can make the next call, for the object now behind the group's name: its memory is still there."""
        return not self._start.workspace.is_closed and behind is self._owner()

    @property
    def compares(self) -> bool:
        return self._communicator.compares

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Starts it and returns the new tensors."""
        communicator = self._communicator
        if communicator.broken is not None or not communicator.errors.is_blank():
            communicator.refuse_if_broken()
            communicator.check()
        for tensor in inputs:
            if not tensor.is_contiguous():
                tensors.check(self._name, self._signature, inputs)
        known = list(inputs)
        for shape in self._shapes:
            known.append(self._make(inputs[0], *shape))
        addresses = tuple(map(_address, known))
        self._start(addresses if self._slots is None else [addresses[slot] for slot in self._slots])
        return known[len(inputs) : self._end]

    def profile(self) -> Profile:
        """Of the last call, of a stamped Plan; it is over with this."""
        assert isinstance(self._start, StampedStart)
        return self._start.stamps.profile()


class Call(Protocol):
    @property
    def is_over(self) -> bool: ...


CallT = TypeVar("CallT", bound=Call)


def keep_call(known: dict[tuple[object, ...], CallT], key: tuple[object, ...], made: CallT, most: int) -> None:
    """As `keep`; those on groups that were given back go, too."""
    for one in [one for one, call in known.copy().items() if call.is_over]:  # another thread may come in between
        known.pop(one, None)
    keep(known, key, made, most)
