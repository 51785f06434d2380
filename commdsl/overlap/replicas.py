"""Turns parameters that all ranks of a group have whole into the ones whose values, or gradients, ranks have otherwise.

Assumes that all ranks ask about the same parameters in the same order: comparing is collective. Does not mend anything.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from commdsl.overlap.splits import is_dtensor, split_of
from commdsl.runtime import groups
from commdsl.runtime.collectives import all_gather
from commdsl.runtime.errors import GroupError, ReplicaError

Tensor: TypeAlias = torch.Tensor

SEGMENTS = 8
"""A tensor is compared by the sum and the norm of each of so many segments of it."""

LEAST_TOLERANCE = 1e-4
"""Of a gradient's norm. Kernels that add in no fixed order differ by a hundredth of that in float32."""

SAME = 1e-9
"""Of the norm of a parameter's values: less is the order of a sum."""

NAMED = 3
"""The most parameters that a message names."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference between ranks 0 and `rank`, as a fraction of the norm; inf where one has no tensor."""

    rank: int
    share: float


def differences(tensors: Sequence[Tensor | None], group_name: str, device: torch.device) -> list[Difference]:
    """Collective: compare tensors with those of the other ranks, each by its sums and norms. None: there is none.

    Numbers that are not finite are no difference: then no comparison has a meaning.
    """
    prints = torch.stack([_print(one, device) for one in tensors])
    everyone = all_gather(prints, group=group_name).view(-1, *prints.shape).cpu()
    apart = (everyone - everyone[:1]).abs()
    norms = everyone[:, :, 1 + SEGMENTS :].norm(dim=-1).amax(0)
    shares = apart[:, :, 1:].amax(-1) / norms.clamp(min=torch.finfo(torch.float64).tiny)
    shares = torch.where(apart[:, :, 0] > 0, torch.inf, shares.nan_to_num(0.0, 0.0, 0.0))
    worst, ranks = shares.max(0)
    return [Difference(rank, share) for rank, share in zip(ranks.tolist(), worst.tolist(), strict=True)]


def _print(tensor: Tensor | None, device: torch.device) -> Tensor:
    """Return 1 + 2 * SEGMENTS float64 numbers: 1.0 if there is a tensor, sums and norms of its segments."""
    if tensor is None:
        return torch.zeros(1 + 2 * SEGMENTS, dtype=torch.float64, device=device)
    segments = tensor.detach().to_dense().flatten().tensor_split(SEGMENTS)
    sums = [one.sum(dtype=torch.float64) for one in segments]
    norms = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in segments]
    return torch.stack([torch.ones_like(sums[0]), *sums, *norms]).to(device)


def check_values(named: Sequence[tuple[str, Tensor]], group_name: str) -> None:
    """Collective: raise ReplicaError (C976) on all ranks where the values of a parameter differ between ranks."""
    if not named:
        return
    found = differences([one for _, one in named], group_name, named[0][1].device)
    wrong = [(name, one) for (name, _), one in zip(named, found, strict=True) if one.share > SAME]
    if wrong:
        raise ReplicaError(
            f"{_listed(wrong, 'values')}: expected the same values of a parameter that is not declared sharded on all "
            "ranks. Seed all ranks alike or load one checkpoint before this call, and declare a parameter of which "
            "each rank has a block of its own by ShardedModule.shard_parameters"
        )


@dataclass(frozen=True, slots=True)
class Watched:
    """The parameters of an optimizer, their names, and the groups whose ranks share blocks of the same models."""

    parameters: tuple[Tensor, ...] = ()
    names: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()

    def check_gradients(self) -> None:
        """Collective, over each of the groups: raise ReplicaError (C976) on all ranks where gradients differ of a
        parameter that has the same values on all ranks and is not declared sharded.
        """
        for group_name in self.group_names:
            if groups.size_of(group_name) in (None, 1):
                continue
            named = [
                (name, one)
                for name, one in zip(self.names, self.parameters, strict=True)
                if one.requires_grad and not is_dtensor(one) and not _may_differ(one, group_name)
            ]
            if named:
                _check_gradients(named, group_name)


def _check_gradients(named: Sequence[tuple[str, Tensor]], group_name: str) -> None:
    parameters = [one for _, one in named]
    both = [*parameters, *(one.grad for one in parameters)]
    found = differences(both, group_name, parameters[0].device)
    wrong = [
        (name, of_gradient)
        for (name, one), of_value, of_gradient in zip(named, found, found[len(named) :], strict=False)
        if of_value.share <= SAME and of_gradient.share > tolerance(one.dtype)
    ]
    if wrong:
        raise ReplicaError(
            f"{_listed(wrong, 'gradients')} at the step of an optimizer: expected the same gradient on all ranks of a "
            "parameter that all have whole. With sequence_parallel=True each rank has the share of its own rows: call "
            "overlap.sync_replicated(model) once before training. If that is done, clip by overlap.clip_grad_norm_: "
            "torch.nn.utils.clip_grad_norm_ scales by the norm of each rank's own blocks. Declare a parameter of which "
            "each rank has a block of its own by ShardedModule.shard_parameters"
        )


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest difference of gradients of this dtype that is rounding, as a fraction of their norm."""
    return max(LEAST_TOLERANCE, 2 * torch.finfo(dtype).eps)


def is_split_over(parameter: Tensor, group_name: str) -> bool:
    """Return whether a parameter is declared to be a different block on each rank of a group."""
    split = split_of(parameter)
    return split is not None and split.is_over(group_name)


def _may_differ(parameter: Tensor, group_name: str) -> bool:
    try:
        return is_split_over(parameter, group_name)
    except GroupError:  # on some ranks, and no step is to fail of that
        return True


def watched(parameters: Sequence[Tensor]) -> Watched:
    """Look up what an optimizer's parameters are called, and which groups share blocks of models that have them.

    Looks at all modules of the process, as an optimizer does not know its model: for debugging.
    """
    names = {id(one): "" for one in parameters}
    found: dict[str, None] = {}
    for module in gc.get_objects():
        if issubclass(type(module), torch.nn.Module) and "_parameters" in vars(module):
            held = dict(module.named_parameters())
            own = {name: id(one) for name, one in held.items() if id(one) in names}
            for name, key in own.items():
                names[key] = max(names[key], name, key=len)  # the root has the longest
            if own:
                found |= {split.group_name: None for one in held.values() if (split := split_of(one)) is not None}
    each = (names[id(one)] or f"parameter {number}" for number, one in enumerate(parameters))
    return Watched(tuple(parameters), tuple(each), tuple(sorted(found)))


def _listed(wrong: Sequence[tuple[str, Difference]], what: str) -> str:
    each = []
    for name, one in wrong[:NAMED]:
        by = f"by {one.share:.1e} of the norm" if one.share < torch.inf else "one has none"
        each.append(f"`{name}` on ranks 0 and {one.rank}, {by}")
    more = f"; and of {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    return f"different {what} of {'; of '.join(each)}{more}"
