"""Turns an optimizer's states of blocks into those of whole tensors where its state dict is asked for, and back.

Assumes torch.optim.Optimizer. Installs itself at an optimizer's first step. Does not change how an optimizer steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from commdsl.machine.config import from_environment
from commdsl.overlap.replicas import Watched, watched
from commdsl.overlap.splits import Split, is_dtensor, split_of

Tensor: TypeAlias = torch.Tensor


@cache
def watch_optimizers() -> None:
    """Have every optimizer of this process shard its states from its first step on, and, with COMMDSL_DEBUG=1, compare
    the gradients of replicated parameters at each step.
    """
    # torch keeps the hook as long as the process; what is kept of an optimizer ends with it.
    seen: weakref.WeakKeyDictionary[Optimizer, Watched | None] = weakref.WeakKeyDictionary()

    def before_step(optimizer: Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        if optimizer not in seen:
            shard_states(optimizer)
            seen[optimizer] = Watched() if from_environment().debug else None
        found = seen[optimizer]
        if found is None:
            return
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if len(parameters) != len(found.parameters):
            found = seen[optimizer] = watched(parameters)
        found.check_gradients()

    register_optimizer_step_pre_hook(before_step)


def shard_states(optimizer: Optimizer) -> None:
    """Have the state dict of an optimizer describe whole tensors, as those of ShardedModules do.

    A state of the shape of a block is a DTensor as the block is. A state of another shape, but for a single number, is
    this rank's own: a DTensor (P, ...), which loads on as many ranks. `load_state_dict` takes these, blocks, and whole
    tensors of the shape of a parameter; it raises TensorError (C951) for other shapes.

    Each optimizer does so from its first step on, without this call. It is for states that are saved before, as where
    others are converted. A second call changes nothing.
    """
    if _spread not in optimizer._optimizer_state_dict_post_hooks.values():
        optimizer.register_state_dict_post_hook(_spread)
        optimizer.register_load_state_dict_pre_hook(_collect)
    for parameter, states in optimizer.state.items():  # loaded before the hooks were there
        split = split_of(parameter) if isinstance(parameter, Tensor) else None
        if split is not None:
            states.update(_each(states, partial(_own_state, split, parameter.shape)))


def _spread(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _with_states(optimizer, state_dict, _whole_state)


def _collect(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _with_states(optimizer, state_dict, _own_state)


def _with_states(
    optimizer: Optimizer, state_dict: dict[str, Any], change: Callable[[Split, torch.Size, Tensor], Tensor]
) -> dict[str, Any]:
    """Return a state dict in which the states of blocks are changed; the given one shares its inner dictionaries."""
    changed = dict(state_dict["state"])
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        for key, parameter in zip(saved["params"], group["params"], strict=False):
            split = split_of(parameter)
            if split is not None and isinstance(changed.get(key), dict):
                changed[key] = _each(changed[key], partial(change, split, parameter.shape))
    return {**state_dict, "state": changed}


def _each(states: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Change the tensors among an optimizer's states of one parameter, but for single numbers."""
    return {name: change(one) if isinstance(one, Tensor) and one.dim() > 0 else one for name, one in states.items()}


def _whole_state(split: Split, shape: torch.Size, state: Tensor) -> Tensor:
    if state.shape == shape:
        return split.spread(state)
    return _by_rank(split).spread(state[None]) if split.is_distributed else state


def _own_state(split: Split, shape: torch.Size, state: Tensor) -> Tensor:
    if state.shape == shape and not is_dtensor(state):
        return state
    if state.shape in split.whole_shapes(shape):
        return split.block(state, shape)
    if is_dtensor(state):
        return _by_rank(split).block(state, torch.Size((1, *state.shape[1:])))[0]
    return state


def _by_rank(split: Split) -> Split:
    """The split of one tensor a rank, all of them in rank order along a dimension of their own."""
    return Split(split.group_name, 0)
