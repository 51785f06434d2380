"""Hamilton Attention by its names, and the ways in and out of it, on each rank. One process per rank:

    torchrun --nproc-per-node 4 tests/gpu/run_document.py [--time-budget 60 --seed 1]
    COMMDSL_SHARE_GPUS=1 torchrun --nproc-per-node 8 tests/gpu/run_document.py     # 8 ranks on 4 GPUs
    torchrun --nproc-per-node 3 tests/gpu/run_document.py --device cpu

A part of the run is
  forwards   the five forwards in float32, against float64: within 1e-5; their `_profile` variants return the same, and
             times that add up
  peers      loops over RingComm and A2AComm, ranks out of step: every tensor as it was sent
  placement  sequences of all lengths sharded and put together again, with gradients
Nothing but the calls under test communicates: every rank makes all ranks' tensors from seeds. The table and the verdict
come last. Exit code 1: something wrong, an exception, or no time for all of it.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "20")

import runner
import torch

from commdsl import attention

GRACE = 15.0
BOUND = 1e-5
ROWS, HEADS, DIM = 96, (4, 2), 64
MOST_CYCLES = 1_000_000  # of a GPU, that a rank is held up
STEPS = 20


class Run(runner.Parts):
    """This rank's part."""

    def tensors(self, seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
        """The same on all ranks."""
        generator = torch.Generator(self.device).manual_seed(1000 * self.options.seed + seed)
        return [torch.randn(*shape, generator=generator, device=self.device) for shape in shapes]

    def delay(self) -> None:
        if self.on_gpu:
            torch.cuda._sleep(int(MOST_CYCLES * torch.rand(()).item()))


# --- forwards ---------------------------------------------------------------------------------------------------------


def of_float64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> list[torch.Tensor]:
    """Outputs (B, S, H, D) and log-sum-exps (B, H, S) of the whole sequence, by the definition."""
    q, k, v = (one.double().transpose(1, 2) for one in (q, k, v))
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return [(scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)]


def calls(run: Run) -> list[tuple[str, bool, int, dict[str, Any]]]:
    """Of each forward: its name, whether causal, how many pieces it is given (0: no list), and what else."""
    ranks = run.ranks
    found: list[tuple[str, bool, int, dict[str, Any]]] = [
        ("ring_attention_forward_flash_attn", False, 0, {}),
        ("ring_attention_forward_flash_attn", True, 0, {"causal": True}),
        ("zigzag_ring_attention_forward_flash_attn", True, 0, {}),
    ]
    if ranks in (4, 6):  # no n - 1 cycles: those through nodes of two are cycles as well
        cycles = attention.gen_hamilton_circle_two_nodes(ranks, 2)
    else:
        cycles = attention.gen_hamilton_circle(ranks)
    given: dict[str, Any] = {"world_size": ranks, "looping": cycles}
    found.append(("hamilton_attention_forward_full_flash_attn", False, len(cycles), given))
    source = attention.calculate_source_rank_per_iter(cycles)
    given = {**given, "source_rank_per_iter": source}
    found.append(("hamilton_attention_forward_causal_flash_attn", True, len(cycles), given))
    if ranks % 2 == 0 and ranks > 2:
        looping, path = attention.gen_hamilton_circle_two_nodes(ranks, 2), attention.gen_hamilton_path_local(2)
        incoming, outgoing = attention.calculate_inter_node_mapping(looping)
        mappings = {
            "inter_in_mapping": incoming,
            "inter_out_mapping": outgoing,
            "out_mapping": attention.calculate_intra_node_out_mapping_two_nodes(path),
            "in_mapping": attention.calculate_intra_node_in_mapping_two_nodes(path),
        }
        found.append(("hamilton_attention_forward_full_flash_attn_two_nodes", False, 2, mappings))
    return found


def pieces(x: torch.Tensor, count: int, causal: bool) -> Any:
    if not count:
        return x
    if not causal:
        return list(x.tensor_split(count, 1))
    front, back = (half.tensor_split(count, 1) for half in x.chunk(2, 1))
    return [torch.cat(pair, 1) for pair in zip(front, back, strict=True)]


def forwards(run: Run) -> None:
    shapes = [(2, ROWS * run.ranks, heads, DIM) for heads in (HEADS[0], HEADS[1], HEADS[1])]
    for seed, (name, causal, count, settings) in enumerate(calls(run)):

        def work(
            seed: int = seed, name: str = name, causal: bool = causal, count: int = count, settings: Any = settings
        ) -> int:
            where = "zigzag" if causal and not name.startswith("ring") else "contiguous"
            whole = run.tensors(seed, *shapes)
            q, k, v = (attention.shard_sequence(one, 1, None, where) for one in whole)
            given = (q, pieces(k, count, causal), pieces(v, count, causal), None)
            wanted = [
                attention.shard_sequence(one, dim, None, where)
                for one, dim in zip(of_float64(*whole, causal), (1, 2), strict=True)
            ]
            wrong, first = 0, None
            for _ in range(2):
                run.delay()
                found = getattr(attention, name)(None, *given, **settings)
                first = first or found
                wrong += not all(map(torch.equal, found, first))
            for one, want in zip(first, wanted, strict=True):
                wrong += not (one - want).abs().max() <= BOUND * want.abs().max()
            *found, times = getattr(attention, f"{name}_profile")(None, *given, **settings)
            wrong += not all(map(torch.equal, found, first))
            wrong += len(times.steps) != run.ranks or times.steps[0].communication != 0
            wrong += not all(step.computation > 0 and step.communication > 0 for step in times.steps[1:])
            wrong += not 0 < times.computation <= times.total or min(step.exposed for step in times.steps) < 0
            return wrong

        run.attempt_in_time(runner.Part("forwards", name, 3), work)


# --- peers ------------------------------------------------------------------------------------------------------------


def peers(run: Run) -> None:
    def ring() -> int:
        comm, wrong = attention.RingComm(None), 0
        k, v = (run.tensors(50 + run.rank, (40, 33))[0].to(kind) for kind in (torch.float32, torch.bfloat16))
        spare: Any = (None, None)
        for step in range(STEPS):
            owner = (run.rank - step) % run.ranks
            known = run.tensors(50 + owner, (40, 33))[0]
            wrong += not torch.equal(k, known) or not torch.equal(v, known.bfloat16())
            run.delay()
            before = (k, v)
            k, v = comm.send_recv_kv(k, v, *spare)
            run.delay()  # of what is computed meanwhile
            comm.wait()
            spare = before if step % 2 else (None, None)
        return wrong

    def all_to_all() -> int:
        comm, wrong = attention.A2AComm(None), 0
        for step in range(STEPS):

            def block(source: int, target: int, step: int = step) -> torch.Tensor:
                return run.tensors(1000 * step + 17 * source + target, ((source + 1) * (target + 1), 3))[0]

            largest = run.tensors(step, (run.ranks**2 + 1, 3))[0]  # to oneself, so that all ranks have as large a one
            sent = [largest if other == run.rank else block(run.rank, other) for other in range(run.ranks)]
            wanted = [largest if other == run.rank else block(other, run.rank) for other in range(run.ranks)]
            received = [torch.zeros_like(one) for one in wanted]
            run.delay()
            comm.all_to_all(sent, received)
            comm.wait()
            wrong += not all(map(torch.equal, received, wanted))
        return wrong

    run.attempt_in_time(runner.Part("peers", "RingComm", STEPS), ring)
    run.attempt_in_time(runner.Part("peers", "A2AComm", STEPS), all_to_all)


# --- placement --------------------------------------------------------------------------------------------------------


def placement(run: Run) -> None:
    lengths = [(1,), (2 * run.ranks - 1,), (100 * run.ranks + 7,), (70, 3, 0, 19 * run.ranks + 1, 1)]

    def work() -> int:
        wrong = 0
        for name, documents in itertools.product(("zigzag", "contiguous"), lengths):
            total, ends = sum(documents), [0, *itertools.accumulate(documents)]
            x, weight = run.tensors(total, (2, total, 5), (2, total, 5))
            x.requires_grad_()
            mine = attention.shard_sequence(x, 1, None, name, ends)
            whole = attention.unshard_sequence(mine, 1, None, name, cu_seqlens=ends)
            wrong += not torch.equal(whole, x)
            (whole * weight).sum().backward()
            own = attention.shard_sequence(weight, 1, None, name, ends)
            back = attention.shard_sequence(x.grad, 1, None, name, ends)
            wrong += not torch.allclose(back, run.ranks * own)
            inside = torch.cat([torch.arange(length) for length in documents])
            at = attention.positions(total, None, name, ends, device=run.device)
            known = attention.shard_sequence(inside.to(run.device), 0, None, name, ends)
            wrong += not torch.equal(at, known)
        return wrong

    run.attempt_in_time(runner.Part("placement", "there and back", 2 * len(lengths)), work)


PARTS: dict[str, Callable[[Run], None]] = {"forwards": forwards, "peers": peers, "placement": placement}


def main() -> None:
    parser = runner.part_parser_of(__doc__, 1, 60.0, list(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    runner.end_of_parts(Run, options, PARTS, GRACE, on_gpu=on_gpu)


if __name__ == "__main__":
    main()
