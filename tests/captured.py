"""What torch refuses on a GPU while a CUDA graph is captured, refused on the processor: the host waits for a result, or
a number of the host is copied to the device, which is no launch.

Assumes that every tensor which is read or written stands for one of the GPU. Does not see copies of tensors that were
made on the host before, `to`, nor what is no call of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}
"""What takes memory of the processor as it is, and of a GPU by a copy."""

WAITS = {
    torch.ops.aten._local_scalar_dense,  # item, int, float, bool, a tensor as an index or a bound
    torch.ops.aten._unique2,
    torch.ops.aten.bincount,
    torch.ops.aten.equal,
    torch.ops.aten.masked_select,
    torch.ops.aten.nonzero,
    torch.ops.aten.repeat_interleave,  # where a tensor says how often
    torch.ops.aten.unique_dim,
}
"""What has a result on the host, or one whose size follows from numbers of the device."""

BY_MASK = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}


class CopiedError(AssertionError):
    """torch would have raised, or waited for ever."""


class _Calls(TorchFunctionMode):
    def __torch_function__(
        self, call: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if call in READS:
            raise CopiedError(f"{call.__name__} in a capture reads the device")
        return call(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._numbers: list[torch.Tensor] = []  # of the host; held, so that none has another's identity

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind, given = op.overloadpacket, [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
        if kind in WAITS or (kind in BY_MASK and any(_is_mask(one) for one in args[1])):
            raise CopiedError(f"{op} in a capture waits for the device")
        # A number fills; to one place, or by an index, it is copied.
        if kind is not torch.ops.aten.fill_ and any(one is number for one in given for number in self._numbers):
            raise CopiedError(f"{op} in a capture copies a number of the host to the device")
        found = op(*args, **(kwargs or {}))
        if kind is torch.ops.aten.lift_fresh:
            self._numbers.append(found)
        return found


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


@contextlib.contextmanager
def launches_only() -> Iterator[None]:
    """Raises CopiedError for what is called here and is no launch."""
    with _Calls(), _Ops():
        yield
