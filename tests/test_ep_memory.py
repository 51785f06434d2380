"""Memory of expert parallelism that a caller still holds: after growth, release or the end of a group it can be read
and written, or asking for it is refused.

Assumes that a crash ends only the process of the case: each runs in its own. Does not look at what calls compute.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent

CODE = """
import gc, sys, threading, torch, commdsl
from commdsl import dispatch, ep

how = sys.argv[1]

def work(rank, ranks, group):
    layer = ep.EPAll2AllLayer(
        group, 64, 1024, 2, rank, 4, ranks, ranks, torch.float32, capacity=0.05, device="cpu", check=True
    )
    context, exchange = layer.a2a_ctx, layer.a2a_ctx.exchange
    held = [context.dispatch_output_buf, context.weight_recv_buf, context.dispatch_output_buf[1:]]
    held += [*exchange.coming(torch.empty(0, 1024))[0], exchange.coming(torch.empty(0, 1024))[1]]
    held += context.reallocate_dispatch_output_buf(1)
    chosen = torch.tensor([[0, 3]], dtype=torch.int32)
    rows, weights, desc = layer.dispatch(torch.ones(1, 1024), chosen, torch.ones(1, 2))
    held += [rows, weights, desc.topk_indices_tensor, desc.skipped_token_topk_mapping_indices]
    route = dispatch.plan([[40]] * ranks, group=group, device="cpu")
    sender = dispatch.Dispatcher.for_tokens(64, 2, 2, 8, torch.float32, group, "cpu")
    held += sender.dispatch_qkv(*(torch.ones(route.rows, 2, 8) for _ in range(3)), route)
    if how == "growth":
        held += context.reallocate_dispatch_output_buf(100)
        context.release_outgrown()
        context.finalize()
    elif how == "finalize":
        layer.finalize()
        sender.release()
    elif how == "release":
        commdsl.release(group)
    elif how == "reset":
        commdsl.reset(group)
    elif how == "destroy":
        torch.distributed.destroy_process_group()
    if how in ("growth", "finalize", "release"):
        for ask in (
            lambda: context.dispatch_output_buf,
            lambda: context.weight_recv_buf,
            lambda: context.reallocate_dispatch_output_buf(1),
            lambda: context.reallocate_dispatch_output_buf(1000),
            lambda: context.exchange.coming(torch.empty(0, 1024)),
            lambda: layer.dispatch(torch.ones(1, 1024), torch.zeros(1, 2, dtype=torch.int32)),
        ):
            try:
                ask()
            except commdsl.Error as error:
                assert "was released" in str(error), error
            else:
                raise AssertionError("memory that is gone was handed out")
    del layer, context, exchange, sender, desc
    gc.collect()
    for one in held:
        one.sum()
        one.fill_(3)
        assert bool((one == 3).all())
    return True

if how == "destroy":
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    done = [work(0, 1, None)]
else:
    names, done = commdsl.threads(2), []
    threads = [threading.Thread(target=lambda r=r: done.append(work(r, 2, names[r]))) for r in range(2)]
    for one in threads: one.start()
    for one in threads: one.join()
print(len(done))
"""


@pytest.mark.parametrize("how", ["growth", "finalize", "release", "reset", "destroy"])
def test_held_memory(how: str) -> None:
    """Buffers and results are there as long as they are held, whatever becomes of what gave them; new ones are refused
    once the memory was released.
    """
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=False, cwd=ROOT)

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["1" if how == "destroy" else "2"], done.stderr[-2000:]
