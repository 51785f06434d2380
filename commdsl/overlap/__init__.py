"""Overlap: products of matrices and what travels for them, in one program.

Importing this imports nothing else; each name below loads what it needs when it is first used.

    auto       a product, a device and a number of ranks -> what runs it, and why; needs no torch
    programs   a product, or rows, and a group -> the op that makes it, or none
    sequence   a product -> the collective and torch's product one after the other
    measure    a candidate -> its times on this machine, for `commdsl tune`
    shapes     rows and weights -> the shapes of what an operator makes of them
    epilogue   what follows its sums -> parameters and tensors of its schedule
    runs       what an operator does: the program that is chosen, or one after the other
    functional products as operators, with gradients, for autograd and torch.compile
    gradients  gradients of what these make -> those of rows, weights and what is added
    profile    a product -> its result, and what was exposed of what travelled for it
    rms_norm   the operator that norms what ranks add up
    calls      a call of an operator -> the shortest way to it
    inductor   graphs that Inductor compiles -> the same with these operators
    layers     linear layers whose weights lie on all ranks, between rows that do
    splits     the declaration that a parameter is a rank's block, and its DTensors
    sharded    modules that declare blocks: their state dicts have whole tensors
    optimizers states of an optimizer -> the same of whole tensors
    replicas   parameters that all ranks have whole -> where ranks differ
    replicated gradients that are each rank's share -> their sums
    clipping   gradients -> the same with a bounded norm over all blocks
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commdsl.machine.lazy import lazy

if TYPE_CHECKING:
    from commdsl.overlap.auto import choice as choice
    from commdsl.overlap.clipping import clip_grad_norm_ as clip_grad_norm_
    from commdsl.overlap.functional import all_gather_matmul as all_gather_matmul
    from commdsl.overlap.functional import all_to_all_matmul as all_to_all_matmul
    from commdsl.overlap.functional import matmul_all_reduce as matmul_all_reduce
    from commdsl.overlap.functional import matmul_all_to_all as matmul_all_to_all
    from commdsl.overlap.functional import matmul_reduce_scatter as matmul_reduce_scatter
    from commdsl.overlap.functional import replicated_matmul as replicated_matmul
    from commdsl.overlap.inductor import MicroPipelineTP as MicroPipelineTP
    from commdsl.overlap.layers import ColumnParallelLinear as ColumnParallelLinear
    from commdsl.overlap.layers import RowParallelLinear as RowParallelLinear
    from commdsl.overlap.optimizers import shard_states as shard_states
    from commdsl.overlap.profile import profiled as profiled
    from commdsl.overlap.replicated import sync_replicated as sync_replicated
    from commdsl.overlap.rms_norm import all_reduce_rms_norm as all_reduce_rms_norm
    from commdsl.overlap.sharded import ShardedModule as ShardedModule

__all__ = [
    "ColumnParallelLinear",
    "MicroPipelineTP",
    "RowParallelLinear",
    "ShardedModule",
    "all_gather_matmul",
    "all_reduce_rms_norm",
    "all_to_all_matmul",
    "choice",
    "clip_grad_norm_",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "profiled",
    "replicated_matmul",
    "shard_states",
    "sync_replicated",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "ColumnParallelLinear": "commdsl.overlap.layers",
        "MicroPipelineTP": "commdsl.overlap.inductor",
        "RowParallelLinear": "commdsl.overlap.layers",
        "ShardedModule": "commdsl.overlap.sharded",
        "clip_grad_norm_": "commdsl.overlap.clipping",
        "shard_states": "commdsl.overlap.optimizers",
        "sync_replicated": "commdsl.overlap.replicated",
        "all_gather_matmul": "commdsl.overlap.functional",
        "all_reduce_rms_norm": "commdsl.overlap.rms_norm",
        "all_to_all_matmul": "commdsl.overlap.functional",
        "choice": "commdsl.overlap.auto",
        "matmul_all_reduce": "commdsl.overlap.functional",
        "matmul_all_to_all": "commdsl.overlap.functional",
        "matmul_reduce_scatter": "commdsl.overlap.functional",
        "profiled": "commdsl.overlap.profile",
        "replicated_matmul": "commdsl.overlap.functional",
    },
)
