"""Dispatches on real GPUs beside the simulation, bit for bit. One process per GPU:

    torchrun --nproc-per-node 4 tests/gpu/run_dispatch.py [--calls 1000 --plans 50 --seed 1 --only storm]
        [--transport nvshmem]

exact     random plans x rows of 2 bytes to 32 KB x float16, bfloat16, float32, aligned and not: there, back, gradients
storm     calls whose plan changes, GPU and host delays, no barrier in between
graphs    padded calls in a CUDA graph, there and back, whose tables are overwritten between replays
attend    attention in one call: 32 layers in float32 against float64, bfloat16 against float64, and what a call costs
          whose results find no place in symmetric memory; gradients by parts
host      the cases of test_dispatch_ops.py
example   the program of commdsl/dispatch/README.md

Each rank computes by itself what it must hold, so nothing but the calls under test communicates. Results land in memory
full of 0xFF. Exit code 1: a wrong result, an exception, or a part that did not end in time.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "20")
os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", "8G")

import attend_cases
import dispatch_cases
import runner
import torch
import torch.distributed as dist
from dispatch_cases import PUTS, Seat, Storm, hold_up, played, seat, sender_for
from dispatch_checks import Rows
from dispatch_plans import Case, cases, limits
from runner import Part
from runner import Parts as Run

from commdsl import dispatch
from commdsl.attention import kernels, torch_kernels
from commdsl.attention.kernel import ready, shape_of
from commdsl.attention.masks import Call
from commdsl.ir.routes import Mask, Sharing
from commdsl.planner.chance import Draw, varied

EXAMPLE = Path(__file__).resolve().parents[2] / "commdsl" / "dispatch" / "README.md"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NARROW = ((2, 2, 2), (4, 8, 12), (6, 10, 2), (16, 48, 32), (250, 38, 1002), (1024, 256, 256))
WIDE = ((4096, 1024, 1024), (8192, 2048, 2050), (8192, 1024, 1024), (32768, 32768, 32766))
NARROW_ROWS, WIDE_ROWS = 3000, 300
HELD, HELD_TOKENS = 16, 4096
GRACE = 30.0


# --- exact ------------------------------------------------------------------------------------------------------------


def exact(run: Run) -> None:
    pools = {
        NARROW_ROWS: cases(varied(run.ranks, NARROW_ROWS, 9), seed=10 * run.options.seed),
        WIDE_ROWS: cases(varied(run.ranks, WIDE_ROWS, 9), seed=20 * run.options.seed),
    }
    for put in PUTS:
        for nbytes in (*NARROW, *WIDE):
            pool = pools[NARROW_ROWS if nbytes in NARROW else WIDE_ROWS]
            kinds = [Rows(dtype, nbytes, shift) for dtype in DTYPES for shift in (0, 1)]
            fitting = [kind for kind in kinds if kind.fits()]
            part = Part("exact", f"{put}, {'/'.join(map(str, nbytes))} B")
            part.calls = len(fitting) * len(pool) * len(dispatch_cases.CHECKS)
            run.attempt(part, lambda put=put, pool=pool, fitting=fitting: _exact(run, put, pool, fitting))


def _exact(run: Run, put: str, pool: Sequence[Case], kinds: Sequence[Rows]) -> int:
    sender = sender_for(pool, kinds[0].nbytes, put, None, run.device)
    wrong = 0
    for number, rows in enumerate(kinds):
        wrong += played(sender, [seat(case, rows, run.rank, run.device) for case in pool], 1000 * number)
    sender.release()
    return wrong


# --- storm ------------------------------------------------------------------------------------------------------------


def storm(run: Run) -> None:
    what = Storm(run.options.calls, run.options.plans, most_rows=2000, nbytes=(1024, 256, 252), seed=run.options.seed)
    begun: list[int] = []

    def hear(call: int) -> None:
        begun.append(call)
        run.place = f"storm, call {call} begun on rank {run.rank}"

    part = Part("storm", f"{run.options.plans} plans, random delays, no barrier", run.options.calls)
    run.attempt(part, lambda: what.run(None, run.rank, run.ranks, run.device, hear))


# --- graphs -----------------------------------------------------------------------------------------------------------


def graphs(run: Run) -> None:
    finest = Draw(run.ranks, 1000, most_shards=16, is_full=True, is_fine=True)
    draws = [
        Draw(run.ranks, 1000, is_full=True),
        Draw(run.ranks, 1000, sharing=Sharing.RANK, is_full=True),
        Draw(run.ranks, 1000, most_shards=4, mask=Mask.FULL, is_full=True),
        Draw(run.ranks, 1000, most_shards=12, stays=0.5, is_full=True),
    ]
    pool = cases([finest, *(draws[at % len(draws)] for at in range(12))], seed=30 * run.options.seed)
    for put in PUTS:
        part = Part("graphs", f"{put}, tables overwritten between replays", run.options.replays)
        run.attempt(part, lambda put=put: _graphs(run, put, pool))


def _graphs(run: Run, put: str, pool: Sequence[Case]) -> int:
    rows = Rows(torch.bfloat16, (512, 128, 128))
    sender, most = sender_for(pool, rows.nbytes, put, None, run.device), limits(pool, rows.nbytes)
    seats = [seat(case, rows, run.rank, run.device) for case in pool]
    route = seat(pool[0], rows, run.rank, run.device).route
    static = [torch.zeros(rows.shape(part, most.rows), dtype=rows.dtype, device=run.device) for part in range(3)]

    def there_and_back() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        away = sender.dispatch_qkv(*static, route, padded=True)
        return list(away), list(sender.collect_qkv(*away, route, padded=True))

    there_and_back()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        away, home = there_and_back()
    dice, delays = random.Random(run.options.seed), random.Random(f"{run.options.seed} {run.rank}")
    for replay in range(run.options.replays):
        one = dice.choice(seats)
        route.update_(one.route)
        _replayed(run, one, graph, static, away, home, replay, delays)
        if dice.random() < 0.2:  # a call outside the graph, of the same dispatcher
            other = dice.choice(seats)
            other.player.forward(sender, other.route, 10_000 + replay)
    wrong = sum(int(one.player.wrong.item()) for one in seats)
    graph.reset()
    sender.release()
    return wrong


def _replayed(
    run: Run,
    one: Seat,
    graph: torch.cuda.CUDAGraph,
    static: list[torch.Tensor],
    away: list[torch.Tensor],
    home: list[torch.Tensor],
    replay: int,
    delays: random.Random,
) -> None:
    """New numbers, poisoned outputs, a replay; what arrived and what came back are as the simulation has them."""
    player = one.player
    sent = [player.everyone(part, player.traced.rows, replay, bits=False) for part in range(3)]
    for tensor, values in zip(static, sent, strict=True):
        tensor.copy_(values[run.rank])
    for tensor in (*away, *home):
        tensor.view(torch.uint8).fill_(255)
    hold_up(delays, run.device)
    graph.replay()
    want, want_home = [], []
    for part in range(3):
        ids = player.traced.queries if part == 0 else player.traced.keys
        held = [torch.cat(sent[part])[one_rank] for one_rank in ids]
        want.append(held[run.rank])
        want_home.append(player.back(part, held))
    got = [tensor[: len(other)] for tensor, other in zip(away, want, strict=True)]
    player.count((*got, *home), (*want, *want_home))


# --- attend -----------------------------------------------------------------------------------------------------------


def attend(run: Run) -> None:
    lengths = [[900, 20], *([[80 + rank, 1, 200] for rank in range(1, run.ranks)])]
    for again in (False, True):
        how = ", activations again" if again else ""

        def layers(again: bool = again) -> int:
            apart = attend_cases.apart_after(32, None, run.rank, lengths, again=again, device=run.device)
            return int(not apart < 1e-5)

        run.attempt(Part("attend", f"32 layers in float32, 1e-5{how}", 32), layers)
    for sharing in Sharing:
        part = Part("attend", f"bfloat16, keys once per {sharing.value}", 1)
        run.attempt(part, lambda sharing=sharing: _halves(run, lengths, sharing))
    part = Part("attend", "gradients of documents by parts, beside one call, and again", 2)
    run.attempt(part, lambda: _parts(run))
    copied, held = (_held(run, results) for results in (2, HELD + 1))
    if run.rank == 0:
        what = f"{HELD} calls of {HELD_TOKENS} rows there and back, all results held"
        print(f"{what}: {held:.0f} us a call, {copied:.0f} us where all but the first are copied", flush=True)


def _halves(run: Run, lengths: Sequence[Sequence[int]], sharing: Sharing) -> int:
    """Whether results and gradients in bfloat16 are further from float64 than roundings go."""
    route = attend_cases.routed(None, lengths, device=run.device, sharing=sharing.value)
    widths = [2 * heads * attend_cases.DIM for heads in (attend_cases.HEADS, *(attend_cases.KEY_HEADS,) * 2)]
    sender = dispatch.Dispatcher(dispatch.Limits.of([route], widths), device=run.device)
    tensors = [one.detach().to(run.device).requires_grad_() for one in attend_cases.drawn(route.rows, run.rank)]
    tensors = [one.detach().bfloat16().requires_grad_() for one in tensors]
    wide = [one.detach().double().requires_grad_() for one in tensors]
    out, want = sender.attend(*tensors, route), attend_cases.whole(lengths[run.rank], *wide)
    weight = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, tensors, weight)]
    wanted = [want, *torch.autograd.grad(want, wide, weight.double())]
    apart = attend_cases.differ(found, wanted)
    sender.release()  # after the last look at what lies in its memory
    return int(not apart < 2e-2)


def _parts(run: Run) -> int:
    """Whether gradients by torch's flash in parts are others than in one call, or others when computed again."""
    cuts = tuple(accumulate((3000, 200, 150, 9000, 37), initial=0))
    call, kernel = Call(cuts, cuts, None, 0), torch_kernels.FLASH
    q, k, v, dout = (
        torch.randn(cuts[-1], heads, 128, dtype=torch.bfloat16, device=run.device) for heads in (32, 8, 8, 32)
    )
    whole = ready(call, q.device)
    (parted,) = kernels.prepared(kernel, shape_of(q, k), [call], q.device, backward=True)
    assert parted.parts
    given = dout, q, k, v, *kernel.forward(q, k, v, whole, 0.1)
    wanted, found, again = (kernel.backward(*given, one, 0.1) for one in (whole, parted, parted))
    return int(not attend_cases.differ(found, wanted) < 1e-2) + int(not all(map(torch.equal, found, again)))


def _held(run: Run, results: int) -> float:
    """Microseconds of a call there and back of which every result is held, as by the layers of a model."""
    route = attend_cases.routed(None, [[HELD_TOKENS]] * run.ranks, device=run.device)
    sender = dispatch.Dispatcher.for_tokens(HELD_TOKENS, 32, 8, 128, device=run.device, results=results)
    x = [torch.ones(HELD_TOKENS, heads, 128, dtype=torch.bfloat16, device=run.device) for heads in (32, 8, 8)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        kept = []
        run.wait()
        dist.barrier(run.control)
        begin.record()
        for _ in range(HELD):
            kept.append(sender.dispatch_qkv(*x, route))
            kept.append(sender.collect(kept[-1][0], route))
        end.record()
        run.wait()
    sender.release()
    return 1e3 * begin.elapsed_time(end) / HELD


# --- what runs on host ranks, too -------------------------------------------------------------------------------------


def host(run: Run) -> None:
    for case in dispatch_cases.CASES:

        def work(case: Callable[[], None] = case) -> int:
            case()
            return 0

        run.attempt(Part("host", case.__name__, 1), work)


def example(run: Run) -> None:
    """The process group is there already: the program's own is not made, nor ended."""
    text = EXAMPLE.read_text(encoding="utf-8")
    program = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0]

    def work() -> int:
        with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
            exec(compile(program, "commdsl/dispatch/README.md", "exec"), {"__name__": "example"})
        return 0

    run.attempt(Part("example", "attention elsewhere equals attention at home", 1), work)


# --- the end ----------------------------------------------------------------------------------------------------------

PARTS = {"exact": exact, "storm": storm, "graphs": graphs, "attend": attend, "host": host, "example": example}


def main() -> None:
    parser = runner.part_parser_of(__doc__, 1000, 420.0, list(PARTS))
    parser.add_argument("--plans", type=int, default=50, help="of the storm")
    runner.end_of_parts(Run, parser.parse_args(), PARTS, GRACE, on_gpu=True)


if __name__ == "__main__":
    main()
