"""Turns gradients of parameters that all ranks have whole, each rank's share, into their sums as they are computed.

Assumes that each rank's loss is its share of one loss, and that all ranks make the same calls. Does not touch sharded
parameters, whose gradients come from all rows already.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from commdsl.machine.errors import ArgumentError
from commdsl.overlap.layers import ColumnParallelLinear, RowParallelLinear
from commdsl.overlap.replicas import check_values, is_split_over
from commdsl.overlap.splits import is_dtensor, split_of
from commdsl.runtime import groups, menu
from commdsl.runtime.collectives import all_reduce
from commdsl.runtime.errors import TensorError
from commdsl.runtime.reporting import reported

Tensor: TypeAlias = torch.Tensor


@reported(lambda model, /, group=None, **_: _group_of(model, group))
def sync_replicated(model: torch.nn.Module, group: Any = None) -> tuple[RemovableHandle, ...]:
    """Collective: have each backward pass sum the gradients of the parameters that all ranks have whole.

    With `sequence_parallel=True` each rank has some rows, so its gradient of a norm or an embedding is the share of
    these rows. A hook on each such parameter adds up the shares of all ranks before the gradient is accumulated: after
    any number of backward passes `.grad` is the sum, the same bits on all ranks. Parameters that are declared sharded
    over the group are left alone. Parameters are summed one by one, in the order of the backward pass.

    model: a module whose parameters are on their device, with the same values on all ranks, which are compared here.
        Call it before DistributedDataParallel or torch.compile wrap it. Frozen parameters are passed over.
    group: a process group, its name or a mesh of one dimension. Default: the group of the model's sharded parameters;
        where it has none, the default group.

    Returns a handle for each parameter, whose `remove()` ends it. Raises ReplicaError (C976) on all ranks where values
    differ; ArgumentError (C973) for a parameter that is summed already, several groups, or a layer with
    `sequence_parallel=False`, between whose rows gradients are whole; TensorError (C951) for DTensors and `meta`.
    """
    name = _group_of(model, group)
    for path, layer in model.named_modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and not layer.sequence_parallel:
            raise ArgumentError(
                f"`{path or type(layer).__name__}` has sequence_parallel=False: between such layers all ranks have all "
                "rows, and gradients are no shares that could be summed. Call sync_replicated on the modules of the "
                "model that see some rows a rank"
            )
    whole = [
        (path, one) for path, one in model.named_parameters() if one.requires_grad and not is_split_over(one, name)
    ]
    for path, one in whole:
        if is_dtensor(one) or one.is_meta:
            raise TensorError(f"`{path}` is {'a DTensor' if is_dtensor(one) else 'on meta'}: expected a plain tensor")
        if any(isinstance(hook, _Sum) for hook in (one._backward_hooks or {}).values()):
            raise ArgumentError(f"the gradient of `{path}` is summed already: call sync_replicated once a parameter")
    if menu.size(name) == 1:
        return ()
    check_values(whole, name)
    return tuple(one.register_hook(_Sum(path, name)) for path, one in whole)


def _group_of(model: torch.nn.Module, group: Any) -> str:
    if group is not None:
        return groups.name_of(group)
    found = {split.group_name for one in model.parameters() if (split := split_of(one)) is not None}
    if not found:
        return groups.name_of(group)
    if len(found) > 1:
        raise ArgumentError(f"parameters are sharded over {len(found)} groups, {sorted(found)}: name one by `group`")
    return found.pop()


class _Sum:
    """A tensor hook: this backward pass's gradient of a parameter, added up over the ranks."""

    def __init__(self, path: str, group_name: str) -> None:
        self._path, self._group_name = path, group_name

    @reported(
        lambda one, /, *_, **__: one._group_name, lambda one, /, *_, **__: f"the sum of the gradients of `{one._path}`"
    )
    def __call__(self, gradient: Tensor) -> Tensor:
        if gradient.layout is not torch.strided:
            raise TensorError(
                f"the gradient of `{self._path}` is {gradient.layout}, expected a dense one: sparse=False of an "
                "embedding makes it"
            )
        if not torch.compiler.is_dynamo_compiling():
            groups.of(self._group_name, gradient.device).compare(f"the sum of the gradients of `{self._path}`")
        total: Tensor = all_reduce(gradient.contiguous(), group=self._group_name)
        return total
