"""The pass of Inductor that puts operators of ours in place of products next to functional collectives: what it
replaces, what it leaves, and that results and gradients stay what they were.

Assumes no GPU. Two processes over gloo run it under torch.compile; graphs alone are looked at in this one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import launched

torch = pytest.importorskip("torch")

RANKS = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.nn.functional import linear
from commdsl.overlap import MicroPipelineTP

dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.group.WORLD

def gather(x, dim=0):
    return collectives.all_gather_tensor_autograd(x, dim, group)

def scatter(x):
    return collectives.reduce_scatter_tensor_autograd(x, "sum", 0, group)

def layers(x, up, down):
    return scatter(linear(linear(gather(x), up), down))

def reduced(x, up, down):
    return collectives.all_reduce(linear(linear(x, up), down), "sum", group)

def wide(x, up, down):
    return scatter(gather(x.unflatten(0, (2, -1))) @ up.t() @ down.t()).flatten(0, 1)

def shared(x, up, down):
    rows = gather(x)
    averaged = collectives.reduce_scatter_tensor(linear(x, up), "avg", 0, group)
    return linear(rows, up), linear(rows, up * 2), averaged, linear(gather(x[:, :4].contiguous(), 1), up)

def biased(x, up, down):
    return scatter(linear(linear(gather(x), up, up[:, 0]), down, down[:, 0]))

class Watched(MicroPipelineTP):
    kept = added = 0  # nodes of functional collectives, and of sums

    def __call__(self, graph):
        super().__call__(graph)
        self.added += sum(node.target is torch.ops.aten.add.Tensor for node in graph.nodes)
        self.kept += sum(str(node.target).startswith("_c10d_functional.") for node in graph.nodes)

def exchange(x):
    return collectives.all_to_all_single_autograd(x, [len(x) // 2] * 2, [len(x) // 2] * 2, group)

def heads(x, up, down):
    made = exchange(linear(x, up).unflatten(-1, (2, -1)).movedim(-2, 0).flatten(0, 1))
    rows = exchange(made * 2).unflatten(0, (2, -1)).movedim(0, -2).flatten(-2)
    return linear(rows, down)

def as_they_lie(x, up, down):
    return exchange(linear(x, up)), linear(exchange(x).clone(), up)

def by_hand(tp):
    def passed(module, inputs):
        tp(module.graph)
        module.recompile()
        return make_boxed_func(module)

    as_inductor = {"partition_fn": min_cut_rematerialization_partition, "decompositions": select_decomp_table()}
    return {"backend": aot_autograd(fw_compiler=passed, **as_inductor)}

def by_inductor(tp):
    return {"options": {"post_grad_custom_pre_pass": tp}}

def check(what, function, backward, wanted, by=by_hand):
    torch.manual_seed(rank)
    given = [torch.randint(-2, 3, shape).double().requires_grad_(backward) for shape in ((4, 8), (6, 8), (8, 6))]
    tp = Watched()
    compiled = torch.compile(function, fullgraph=True, **by(tp))
    found, eager = compiled(*given), function(*given)
    torch.testing.assert_close(found, eager, rtol=0, atol=0)
    if backward:
        pairs = zip(*(torch.autograd.grad((y * (rank + 1)).sum(), given) for y in (found, eager)))
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert dict(tp.count) == wanted, (what, tp)
    if rank == 0:
        print(f"{what}: {tp}; of collectives {tp.kept} nodes, of sums {tp.added}")

both = {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}
check("forward", layers, False, both, by_inductor)
check("all rows on all ranks", reduced, False, {"matmul_all_reduce": 1})
check("more dimensions", wide, False, both)
check("rows of two products, an average, another dimension", shared, False, {"all_gather_matmul_rows": 1, "left": 1})
check("a bias", biased, False, {"all_gather_matmul": 1, "left": 1})
check("a bias, backward", biased, True, {"all_gather_matmul_rows": 2, "matmul_reduce_scatter": 1, "left": 1})
there = {"matmul_all_to_all": 1, "all_to_all_matmul": 1}
check("heads", heads, False, there)
check("columns as they lie", as_they_lie, False, {"left": 2})
check("heads, backward", heads, True, {"matmul_all_to_all": 2, "all_to_all_matmul_rows": 2})
check("backward", layers, True, {"all_gather_matmul_rows": 2, "matmul_reduce_scatter": 2})
dist.destroy_process_group()
"""

SAID = """\
forward: 1 all_gather_matmul, 1 matmul_reduce_scatter; of collectives 0 nodes, of sums 0
all rows on all ranks: 1 matmul_all_reduce; of collectives 0 nodes, of sums 0
more dimensions: 1 all_gather_matmul, 1 matmul_reduce_scatter; of collectives 0 nodes, of sums 0
rows of two products, an average, another dimension: 1 all_gather_matmul_rows, 1 left; of collectives 4 nodes, of sums 0
a bias: 1 all_gather_matmul, 1 left; of collectives 2 nodes, of sums 0
a bias, backward: 2 all_gather_matmul_rows, 1 left, 1 matmul_reduce_scatter; of collectives 2 nodes, of sums 2
heads: 1 all_to_all_matmul, 1 matmul_all_to_all; of collectives 0 nodes, of sums 0
columns as they lie: 2 left; of collectives 4 nodes, of sums 0
heads, backward: 2 all_to_all_matmul_rows, 2 matmul_all_to_all; of collectives 0 nodes, of sums 0
backward: 2 all_gather_matmul_rows, 2 matmul_reduce_scatter; of collectives 0 nodes, of sums 0
"""


def test_compiled(tmp_path: Path) -> None:
    """Of products of what travels, of sums that alone are scattered, and of columns that are dealt out, operators are
    made, in forward and backward.
    Rows that are needed again are a result, too: those of a forward pass are, and of a backward pass. Operators add a
    bias.
    """
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = launched(2, str(script))

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == SAID
