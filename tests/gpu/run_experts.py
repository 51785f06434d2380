"""EPAll2AllLayer and the operators beneath it on real GPUs, beside what each rank computes for all. One process a GPU:

    torchrun --nproc-per-node 2 tests/gpu/run_experts.py [--calls 300 --replays 60 --seed 1 --only storm]
        [--transport nvshmem]

shapes     bfloat16, float16 and float32, hidden 8 to 7168, top-k 1 to 32, experts that are no power of two; each
           also with local combine
storm      calls of all kinds (any, no tokens, some ranks have none, all to one rank, all to one expert, most are
           dropped), GPU and host delays, no barrier in between, kernels that check; what earlier calls gave is held
growth     memory that is too small, while rows of before are held; it is given back when they are not
scatter    scatter indices of all ranks and of one, in the usual order and in another
graphs     both calls in a CUDA graph, with weights, whose tokens, experts and weights change between replays; the first
           call of all is captured (use_aot)
gradients  of tokens, weights and experts, in float32, of calls that weigh at home and where experts are
float8     tokens that travel in it: what experts are given, and the gradient of tokens, straight through the rounding
barriers   of all ranks, on a stream that is behind

Results are exact, sums within a rounding or two of the exact ones. Exit code 1: a wrong result, an exception, or a part
that did not end in time. `--device cpu` runs all but graphs on host ranks.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "15")
os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", "8G")

import runner
import torch
from run_keys import KINDS, Case, Shape, arriving, drawn, held
from run_keys_float8 import quantised
from runner import Part

from commdsl import ep

GRACE = 15.0
NEAR = {torch.float32: 2.0**-20, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""How far a sum may lie from the exact one, as a share of the sum of its terms' sizes; and where these are so small
that the dtype's numbers stand evenly, by half their distance for each rounding of a term, of a rank's sum and of all.
"""


class Run(runner.Parts):
    def layer(self, shape: Shape, **options: Any) -> Any:
        given = {"local_world_size": self.ranks, "dtype": shape.dtype, "num_sm": 20, "device": self.device, **options}
        return ep.EPAll2AllLayer(
            None,
            max_tokens=shape.rows,
            hidden=shape.columns,
            topk=shape.keys,
            rank=self.rank,
            num_tot_experts=shape.num_keys,
            world_size=self.ranks,
            **given,
        )

    def hold_up(self, dice: random.Random) -> None:
        if self.on_gpu and dice.random() < 0.2:
            torch.cuda._sleep(int(dice.random() * 2_000_000))


def factor_of(expert: Any) -> Any:
    """What an expert multiplies with: another for each of a few neighbours."""
    return (1 + expert % 5).float()


def summed(case: Case, rank: int, num_keys: int, *, weighs: bool) -> tuple[Any, Any]:
    """What must come back to a rank, in float64, and the sum of the sizes of its terms."""
    keys, x = case.keys[rank].long(), case.x[rank].double()
    factors = torch.where(keys < num_keys, factor_of(keys), 0).double()
    factors = factors * case.weights[rank].double() if weighs else factors
    return x * factors.sum(1, keepdim=True), x.abs() * factors.abs().sum(1, keepdim=True)


class Judge:
    """Counts calls that are not as they must be, on the device."""

    def __init__(self, run: Run, shape: Shape) -> None:
        self.run, self.shape = run, shape
        self.wrong = torch.zeros((), dtype=torch.int64, device=run.device)

    def there(self, case: Case, rows: Any, weights: Any) -> Any:
        """Whether rows and weights are what comes; notes it, and returns the expert of each row."""
        rank = self.run.rank
        source, entry, _ = arriving(case, rank, self.shape.num_keys)
        keys = torch.cat([one.flatten() for one in case.keys])
        begins = torch.tensor([sum(one.numel() for one in case.keys[:at]) for at in range(self.run.ranks)])
        flat = begins.to(source.device)[source] + entry
        right = self.run.same("rows", rows[: len(source)], held(case.x, source, entry, self.shape.keys))
        if weights is not None:
            sent = torch.cat([one.flatten() for one in case.weights])
            right &= self.run.same("weights", weights[: len(source)], sent[flat])
        self.wrong += ~right
        return keys[flat].long()

    def back(self, case: Case, found: Any, *, weighs: bool) -> None:
        total, sizes = summed(case, self.run.rank, self.shape.num_keys, weighs=weighs)
        numbers = torch.finfo(self.shape.dtype)
        evenly = (self.shape.keys + 1) * numbers.smallest_normal * numbers.eps
        near = NEAR[self.shape.dtype] * sizes + evenly
        self.wrong += ~self.run.same("sums", found, total, near, terms=sizes)

    def call(self, layer: Any, case: Case, *, weighs: bool = True, scatter: Any = None) -> tuple[Any, ...]:
        """There and back; returns what the call there gave."""
        rank = self.run.rank
        found = layer.dispatch(case.x[rank], case.keys[rank], case.weights[rank] if weighs else None, scatter)
        rows, weights, desc = found
        made = self.made(case, rows, weights)
        self.back(case, layer.combine(made, desc), weighs=weighs)
        return found

    def made(self, case: Case, rows: Any, weights: Any) -> Any:
        expert = self.there(case, rows, weights)
        made = torch.full(rows.shape, float("nan"), device=rows.device)
        made[: len(expert)] = rows[: len(expert)].float() * factor_of(expert)[:, None]
        if weights is not None:
            made[: len(expert)] *= weights[: len(expert), None]
        return made.to(rows.dtype)

    @property
    def count(self) -> int:
        return int(self.wrong.item())


# --- parts ------------------------------------------------------------------------------------------------------------


def shapes(run: Run) -> None:
    most = 300 if run.on_gpu else 20
    for dtype, hidden, topk, share in (
        (torch.bfloat16, 7168 if run.on_gpu else 72, 8, 32),
        (torch.float16, 8, 1, 3),
        (torch.float32, 1000, 32, 7),
        (torch.bfloat16, 4096 if run.on_gpu else 40, 6, 12),
    ):
        shape = Shape(dtype, hidden, 2, most, topk, share * run.ranks)

        def work(shape: Shape = shape) -> int:
            wrong = 0
            for local in (False, True):
                layer = run.layer(shape, capacity=run.ranks, enable_local_combine=local)
                judge = Judge(run, shape)
                for number, kind in enumerate(KINDS):
                    judge.call(layer, drawn(kind, shape, run.ranks, 10 * run.options.seed + number, run.device))
                wrong += judge.count
                layer.finalize()
            return wrong

        run.attempt(Part("shapes", f"{dtype} x {hidden}, {topk} of {shape.num_keys}", 2 * len(KINDS)), work)


def storm(run: Run) -> None:
    shape = Shape(torch.bfloat16, 512, 2, 200, 4, 12 * run.ranks)

    def work() -> int:
        layer, judge = run.layer(shape, check=True, capacity=1.0), Judge(run, shape)
        dice, delays = random.Random(run.options.seed), random.Random(f"{run.options.seed} {run.rank}")
        pool = [drawn(KINDS[at % len(KINDS)], shape, run.ranks, 77 + at, run.device) for at in range(30)]
        kept: list[Any] = []
        for number in range(run.options.calls):
            run.place = f"storm, call {number} begun on rank {run.rank}"
            run.hold_up(delays)
            case = dice.choice(pool)
            kept.append((case, judge.call(layer, case, weighs=dice.random() < 0.7)))
            if len(kept) > delays.randrange(4):  # another number on each rank: what is held is its own affair
                case, (rows, weights, _) = kept.pop(0)
                judge.there(case, rows, weights)
        wrong = judge.count
        kept.clear()
        layer.finalize()
        return wrong

    run.attempt(Part("storm", "random delays, no barrier, checked, results held", run.options.calls), work)


def growth(run: Run) -> None:
    shape = Shape(torch.bfloat16, 256, 2, 128, 4, 6 * run.ranks)

    def work() -> int:
        judge = Judge(run, shape)
        layer = run.layer(shape, capacity=0.1)
        first = drawn("most are dropped", shape, run.ranks, 1, run.device, [3] * run.ranks)
        many = drawn("all to one rank", shape, run.ranks, 2, run.device, [128] * run.ranks)
        rows, weights, desc = judge.call(layer, first)
        before = layer.a2a_ctx.capacity
        judge.call(layer, many)
        judge.wrong += int(layer.a2a_ctx.capacity <= before)
        made = judge.made(first, rows, weights)  # of the memory that was outgrown
        judge.back(first, layer.combine(made, desc), weighs=True)
        del rows, weights, desc, made
        for _ in range(3):
            judge.call(layer, many)
        judge.wrong += int(layer.a2a_ctx.has_idle)
        wrong = judge.count
        layer.finalize()
        return wrong

    run.attempt(Part("growth", "rows of before are held", 6), work)


def scatter(run: Run) -> None:
    shape = Shape(torch.float32, 64, 2, 60, 3, 4 * run.ranks)

    def work() -> int:
        layer, judge = run.layer(shape, capacity=run.ranks), Judge(run, shape)
        for seed, kind in enumerate(KINDS):
            case = drawn(kind, shape, run.ranks, seed, run.device)
            flat = torch.cat([one.flatten() for one in case.keys])
            numbers = torch.empty_like(flat)
            numbers[torch.argsort(flat, stable=True)] = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
            numbers = numbers.view(-1, shape.keys)
            own = numbers.split([len(one) for one in case.keys])[run.rank].contiguous()
            for given in (numbers, own):
                judge.call(layer, case, scatter=given)
            kept = int((flat < shape.num_keys).sum())
            rows, _, desc = layer.dispatch(case.x[run.rank], case.keys[run.rank], None, kept - 1 - numbers)
            usual, _, _ = layer.dispatch(case.x[run.rank], case.keys[run.rank])
            judge.wrong += ~run.same("rows the other way round", rows, usual.flip(0))
            back = layer.combine(rows, desc)
            ones = torch.where(case.keys[run.rank] < shape.num_keys, 1.0, 0.0).sum(1, keepdim=True)
            near = 1e-4 * back.abs() + 1e-6
            judge.wrong += ~run.same("sums the other way round", back, case.x[run.rank] * ones, near)
        wrong = judge.count
        layer.finalize()
        return wrong

    run.attempt(Part("scatter", "the usual order, and each rank's the other way round", 4 * len(KINDS)), work)


def graphs(run: Run) -> None:
    if not run.on_gpu:
        return
    shape, count = Shape(torch.bfloat16, 512, 2, 200, 4, 12 * run.ranks), 150
    rank = run.rank

    def work() -> int:
        given = {"exact": False, "capacity": run.ranks, "use_aot": True, "results": 4, "enable_local_combine": True}
        layer, judge = run.layer(shape, **given), Judge(run, shape)
        static = drawn("any", shape, run.ranks, 1, run.device, [count] * run.ranks)
        factors = torch.empty(layer.a2a_ctx.capacity, 1, device=run.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows, weights, desc = layer.dispatch(static.x[rank], static.keys[rank], static.weights[rank])
            home = layer.combine((rows.float() * factors * weights[:, None]).bfloat16(), desc)
        kinds = [kind for kind in KINDS if "rows" not in kind and "none" not in kind]
        delays = random.Random(f"{run.options.seed} {rank}")
        for replay in range(run.options.replays):
            case = drawn(kinds[replay % len(kinds)], shape, run.ranks, 500 + replay, run.device, [count] * run.ranks)
            for part in ("keys", "x", "weights"):
                getattr(static, part)[rank].copy_(getattr(case, part)[rank])
            source, entry, _ = arriving(case, rank, shape.num_keys)
            flat = torch.cat([one.flatten() for one in case.keys])[source * count * shape.keys + entry]
            factors.fill_(float("nan"))
            factors[: len(source), 0] = factor_of(flat.long())
            for left in (rows, weights, home):
                left.view(torch.uint8).fill_(255)
            run.hold_up(delays)
            graph.replay()
            judge.there(case, rows, weights)
            judge.back(case, home, weighs=True)
            if replay % 5 == 0:  # a call outside the graph, of the same layer
                judge.call(layer, case)
        wrong = judge.count
        graph.reset()
        layer.finalize()
        return wrong

    run.attempt(Part("graphs", "tokens, experts and weights change", run.options.replays), work)


def gradients(run: Run) -> None:
    shape = Shape(torch.float32, 48, 2, 40, 4, 3 * run.ranks)
    width, rank = shape.columns, run.rank

    def alone(case: Case, matrices: Any, wanted: list[Any]) -> tuple[Any, ...]:
        """Everything on this rank, in float64: the gradients of all ranks' tokens and weights, and of all matrices."""
        x, weights = ([one.double().requires_grad_() for one in part] for part in (case.x, case.weights))
        every = matrices.double().requires_grad_()
        total = every.new_zeros(())
        for tokens, keys, weight, of in zip(x, case.keys, weights, wanted, strict=True):
            made = torch.tanh(torch.einsum("tw,tkwv->tkv", tokens, every[keys.long().clamp(max=len(every) - 1)]))
            kept = (keys < len(every)).double() * weight
            total = total + ((made * kept[..., None]).sum(1) * of).sum()
        total.backward()
        return x[rank].grad, weights[rank].grad, every.grad

    def work() -> int:
        limits = ep.Limits(shape.rows, shape.keys, run.ranks * shape.rows * shape.keys, (4 * width,), 4 * width)
        exchanges = [
            ep.Exchange(limits, shape.num_keys, device=run.device, local_combine=local) for local in (False, True)
        ]
        share, wrong = shape.num_keys // run.ranks, 0
        for seed, kind in enumerate((*KINDS, *KINDS, *KINDS)):
            case = drawn(kind, shape, run.ranks, 40 + seed, run.device)
            dice = torch.Generator().manual_seed(seed)
            matrices = torch.randn(shape.num_keys, width, width, generator=dice).to(run.device) / width**0.5
            wanted = [torch.randn(one.shape, generator=dice).to(run.device) for one in case.x]
            mine = matrices[rank * share : (rank + 1) * share].clone().requires_grad_()
            x, weight = (part[rank].clone().requires_grad_() for part in (case.x, case.weights))
            at_home, exchange = seed % 3 == 0, exchanges[seed % 3 == 2]
            there = ep.dispatch(exchange, x, case.keys[rank], None if at_home else weight)
            ends = there.offsets.tolist()
            made = torch.cat(
                [torch.tanh(there.rows[a:b] @ one) for a, b, one in zip([0, *ends], ends, mine, strict=False)]
            )
            if exchange.local_combine:
                home = ep.combine(exchange, made, there.handle, there.weights[: len(made)])
            else:
                made = made if at_home else made * there.weights[: len(made), None]
                home = ep.combine(exchange, made, there.handle, weight if at_home else None)
            home.backward(wanted[rank])
            of_x, of_weight, of_matrices = alone(case, matrices, wanted)
            pairs = ((x, of_x), (weight, of_weight), (mine, of_matrices[rank * share : (rank + 1) * share]))
            for what, (one, other) in zip(("tokens", "weights", "experts"), pairs, strict=True):
                near = 1e-3 + 1e-3 * other.abs()
                wrong += int(not run.same(f"gradient of {what}", one.grad, other, near))
        for exchange in exchanges:
            exchange.release()
        return wrong

    run.attempt(Part("gradients", "of tokens, weights and experts", 3 * len(KINDS)), work)


def float8(run: Run) -> None:
    """Experts are given values times scales, to the bit; the gradient of tokens is the sum of their weights."""
    shape, rank = Shape(torch.bfloat16, 1024, 2, 100, 4, 6 * run.ranks), run.rank

    def work() -> int:
        limits = ep.Limits(shape.rows, shape.keys, run.ranks * shape.rows * shape.keys, (shape.columns,), 4096)
        wrong = 0
        for local in (False, True):
            exchange = ep.Exchange(limits, shape.num_keys, device=run.device, local_combine=local, float8=128)
            for seed, kind in enumerate(KINDS):
                case = drawn(kind, shape, run.ranks, 60 + seed, run.device)
                x, weight = case.x[rank].clone().requires_grad_(), case.weights[rank]
                there = ep.dispatch(exchange, x.detach(), case.keys[rank], weight)
                rows = ep.dequantise(exchange, x, there)
                source, entry, _ = arriving(case, rank, shape.num_keys)
                parts = [quantised(one, 128) for one in case.x]
                scales = [by.repeat_interleave(128, 1) for _, by in parts]
                values = [code.view(torch.float8_e4m3fn).float() for code, _ in parts]
                law = [(one * by).bfloat16() for one, by in zip(values, scales, strict=True)]
                wanted = held(law, source, entry, shape.keys)
                wrong += int(not run.same("dequantised", rows[: len(source)].detach(), wanted))
                made = rows * there.weights[:, None]
                home = ep.combine(exchange, made.bfloat16(), there.handle)
                home.sum().backward()
                kept = torch.where(case.keys[rank] < shape.num_keys, weight, 0)
                near = 2.0**-5 * kept.abs().sum(1, keepdim=True).expand_as(x)
                wrong += int(not run.same("gradient", x.grad, kept.sum(1, keepdim=True).expand_as(x), near))
            exchange.release()
        return wrong

    run.attempt(Part("float8", "tokens in float8, gradients straight through", 2 * len(KINDS)), work)


def barriers(run: Run) -> None:
    shape = Shape(torch.bfloat16, 64, 2, 8, 2, 2 * run.ranks)

    def work() -> int:
        layer = run.layer(shape)
        stream = torch.cuda.Stream() if run.on_gpu else None
        for number in range(20):
            if run.on_gpu and number % run.ranks == run.rank:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(1_000_000)
            layer.ep_barrier_all(stream, intra_node_only=number % 2 == 1)
        run.wait()
        layer.finalize()
        return 0

    run.attempt(Part("barriers", "ranks that are late in turn", 20), work)


PARTS = {
    "shapes": shapes,
    "storm": storm,
    "growth": growth,
    "scatter": scatter,
    "graphs": graphs,
    "gradients": gradients,
    "float8": float8,
    "barriers": barriers,
}


def options_of() -> argparse.Namespace:
    parser = runner.part_parser_of(__doc__, 300, 120.0, list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def main() -> None:
    options = options_of()
    runner.end_of_parts(Run, options, PARTS, GRACE, on_gpu=options.device == "cuda")


if __name__ == "__main__":
    main()
