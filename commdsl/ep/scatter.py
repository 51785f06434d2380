"""Turns the scatter indices of all ranks into nothing, or into an error that names the first that is wrong.

Assumes indices in the form that the layer takes. Does not put rows in their order; the layer does. It is collective,
and reads on the host: for `check=True` alone.
"""

from __future__ import annotations

import torch

from commdsl.ep.config import EPConfig
from commdsl.ep.layout import padded
from commdsl.runtime.collectives import all_gather
from commdsl.runtime.errors import DispatchError

Tensor = torch.Tensor


def judge(own: Tensor, experts: Tensor, config: EPConfig, group: str) -> None:
    """Raises DispatchError (C961), on all ranks alike, unless the indices of the choices of each rank's experts are the
    numbers of its rows, each once. `own`, `experts`: (T, topk) int32, of this rank's tokens.
    """
    both = all_gather(torch.stack((padded(own, config), padded(experts, config))), group=group).cpu()
    numbers, chosen = both.view(config.world_size, 2, -1).transpose(0, 1).reshape(2, -1)
    where = torch.where((chosen >= 0) & (chosen < config.num_experts), chosen // config.num_experts_per_rank, -1)
    begin = 0
    for rank in range(config.world_size):
        (entries,) = torch.nonzero(where == rank, as_tuple=True)
        found, end = numbers[entries], begin + len(entries)
        order = found.argsort(stable=True)
        again = torch.zeros(len(found), dtype=torch.bool)
        again[order[1:]] = found[order].diff() == 0
        wrong = torch.nonzero(((found < begin) | (found >= end)) | again)
        if len(wrong):
            at = int(wrong[0])
            source, entry = divmod(int(entries[at]), config.max_tokens * config.topk)
            token, choice = divmod(entry, config.topk)
            what = f"{int(found[at])}{', which another has' if again[at] else ''}"
            raise DispatchError(
                f"`full_scatter_indices`: choices of experts on rank {rank} have {begin} to {end - 1}, each once, and "
                f"choice {choice} of token {token} of rank {source} has {what}"
            )
        begin = end
