"""What the ranks of test_ep_layer.py do that need processes: each function runs in every process of a group at once.

Assumes torch.distributed is initialised, with gloo.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from commdsl import ep

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import mixture_of_experts as example

LATE = 0.2


def barriers() -> None:
    """Ranks of a node wait for each other, whatever the other node does; and all for all."""
    rank = dist.get_rank()
    layer = ep.EPAll2AllLayer(None, 4, 8, 2, rank, 8, 2, 4, num_sm=2)
    for late in range(2):
        begin = time.monotonic()
        dist.barrier()  # nobody is late before all have looked at their clocks
        if rank == late:
            time.sleep(LATE)
        if rank < 2:  # the other node does not come
            layer.ep_barrier_all(None, intra_node_only=True)
            assert time.monotonic() - begin >= LATE
    begin = time.monotonic()
    layer.ep_barrier_all(None)  # nobody is late before all have looked at their clocks
    if rank == 3:
        time.sleep(LATE)
    layer.ep_barrier_all(None)
    assert time.monotonic() - begin >= LATE
    layer.finalize()


def of_a_group() -> None:
    """A group of some ranks, in their own order, is a layer's as the default group is."""
    rank, members = dist.get_rank(), [1, 3]
    group = dist.new_group(members)
    if rank not in members:
        return
    own = members.index(rank)
    layer = ep.EPAll2AllLayer(group, 4, 8, 1, own, 2, 1, 2, torch.float32)
    x = torch.full((2, 8), float(rank))
    rows, weights, desc = layer.dispatch(x, torch.tensor([[0], [1]], dtype=torch.int32), torch.ones(2, 1))
    assert rows.tolist() == [[1.0] * 8, [3.0] * 8]
    assert weights is not None
    assert torch.equal(layer.combine(rows, desc), x)
    layer.ep_barrier_all(None, intra_node_only=True)  # a node of one rank
    layer.finalize()


def mixture() -> None:
    """A mixture of 12 experts on 4 ranks, of as many tokens as each happens to have, trains as one rank with all of
    them does.
    """
    found = example.compared(example.Size(tokens=30, steps=4), torch.device("cpu"))
    if dist.get_rank() == 0:
        assert found is not None
        assert found.fault == ""
        assert (len(found.spread), found.bound) == (4, 1e-5)


CASES = (barriers, of_a_group, mixture)
