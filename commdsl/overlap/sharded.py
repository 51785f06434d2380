"""Turns a module into one that declares parameters of which this rank has a block: its state dict has the wholes.

Assumes that all ranks declare alike. Does not compute with blocks: parameters stay plain tensors of the block's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from commdsl.machine.errors import ArgumentError
from commdsl.overlap.optimizers import watch_optimizers
from commdsl.overlap.splits import Split, mark
from commdsl.runtime import groups
from commdsl.runtime.errors import TensorError


class ShardedModule(torch.nn.Module):
    """A module that declares which of its parameters are this rank's block of a larger tensor, as a rank's experts are.

    `state_dict()` has a DTensor with placement `Shard(dim)` for each block, on a mesh of the group, so that
    torch.distributed.checkpoint saves the whole and loads it on any number of ranks. In a group of one rank it has
    plain tensors; where ranks are threads the blocks, and with `keep_vars=True` the parameters themselves.

    `load_state_dict` takes DTensors, this rank's block, or the whole tensor, whose block it copies. A shape that is
    none of these is an error of the load. `clip_grad_norm_` and `sync_replicated` read the same declaration.
    """

    _splits: Mapping[str, Split] = MappingProxyType({})

    def shard_parameters(self, *names: str, dim: int = 0, parts: int = 1, group: Any = None) -> None:
        """Declare that each named parameter is this rank's block along `dim`.

        names: registered parameters of this module itself; one that is None is passed over.
        dim: the dimension along which the blocks of all ranks, in rank order, are the whole. Default: 0.
        parts: number of equal tensors that lie one behind the other along `dim`, each of them split over the ranks, as
            a gate and the projection next to it. Default: 1. A state dict has a dimension for several parts.
        group: a process group, its name or a mesh of one dimension. Default: the default group.

        Raises ArgumentError (C973) for a name, dimension or number of parts that does not fit, GroupError (C953).
        """
        split = Split(groups.name_of(group), dim, parts)
        groups.own_rank(split.group_name)
        for name in names:
            if name not in self._parameters:
                raise ArgumentError(f"`{name}` is no parameter of this {type(self).__name__}: register it before")
            parameter = self._parameters[name]
            if parameter is not None:
                split.check(name, parameter.shape)
        self._declare(dict.fromkeys(names, split))

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call] # torch's
        self._mark()  # a copy of a parameter has no attributes of it

    def _apply(self, *given: Any, **named: Any) -> Any:
        super()._apply(*given, **named)  # type: ignore[no-untyped-call] # torch's
        self._mark()  # on its way from meta to another device a parameter is replaced
        return self

    def _declare(self, splits: Mapping[str, Split]) -> None:
        self._splits = {**self._splits, **splits}
        self._mark()
        watch_optimizers()

    def _mark(self) -> None:
        held = self.__dict__.get("_parameters", {})  # none before Module.__init__
        for name, split in self._splits.items():
            if held.get(name) is not None:
                mark(held[name], split)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars:
            return
        for name, split in self._splits.items():
            if prefix + name in destination:
                destination[prefix + name] = split.spread(destination[prefix + name])

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = dict(state_dict)
        for name, split in self._splits.items():
            parameter, key = self._parameters.get(name), prefix + name
            if parameter is None or not isinstance(given.get(key), torch.Tensor):
                continue
            try:
                given[key] = split.block(given[key], parameter.shape)
            except TensorError as error:
                error_msgs.append(f"{key}: {error}")
                given[key] = parameter.detach()  # keeps its value, and torch has nothing to say of it
        super()._load_from_state_dict(given, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
