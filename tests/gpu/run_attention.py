"""Attention over a sequence that lies on many ranks, against float64 on each of them. One process per rank:

    torchrun --nproc-per-node 4 tests/gpu/run_attention.py [--time-budget 120 --seed 1]
    COMMDSL_SHARE_GPUS=1 torchrun --nproc-per-node 8 tests/gpu/run_attention.py     # 8 ranks on 4 GPUs
    torchrun --nproc-per-node 3 tests/gpu/run_attention.py --device cpu

Every shipped schedule that admits so many ranks; full, causal, window and packed masks, lengths that nothing divides,
several heads a key, two sequences a batch. A part of the run is
  exact     float64 and float32, forward and backward, by each schedule and mask: within 1e-11 and 1e-5 of float64
  bits      two runs of forward and backward have the same bits
  bfloat16  by the kernels of the machine: the error is at most 1.1 times that of the same attention on one GPU
  graph     forward captured in a CUDA graph and replayed with other inputs; forward and backward too
  interface `commdsl.attention.attention` as it chooses, with torch's autograd: eager, compiled, and captured
Nothing but the calls under test communicates: every rank makes all ranks' tensors from seeds. The table and the verdict
come last. Exit code 1: something wrong, an exception, or no time for all of it.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "20")

import runner
import torch

from benchmarks.attention_calls import Way
from benchmarks.measure import captured
from commdsl.attention import attention, kernels, loop, placement
from commdsl.attention.kernel import ready
from commdsl.attention.masks import Call, Mask

GRACE = 15.0
MASKS = {"full": Mask(), "causal": Mask(right=0), "window": Mask(left=99, right=0)}
DIM, WIDE = 32, 128
"""Of heads: a multiple of what every kernel takes, and what models have."""

EXACT = {torch.float64: 1e-11, torch.float32: 1e-5}
GRADIENTS = 1e-5
"""Those of keys and values are summed in float32."""

LANDING = ("cells", "place")
CAUSAL_ALONE = ("direct@causal=1", "ring@causal=1")
PAIR_ALONE = ("pair@causal=1",)
MOST_OF_ONE_GPU = 1.1
REPLAYS = 3
CYCLES = 1_000_000  # of a GPU, at most, that a rank is held up


@dataclass(frozen=True)
class Case:
    """What is attended, and how."""

    way: Way
    mask: str
    lengths: tuple[int, ...]  # of documents
    heads: tuple[int, int] = (4, 2)
    batch: int = 1

    def __str__(self) -> str:
        lengths = "+".join(map(str, self.lengths))
        return f"{self.way}, {self.mask}, {lengths}, {self.heads[0]}:{self.heads[1]} x {self.batch}"


@dataclass
class Run(runner.Parts):
    """This rank's part."""

    ops: dict[tuple[Way, bool], Any] = field(default_factory=dict, kw_only=True)

    def op(self, way: Way, *, backward: bool) -> Any:
        """Loaded once."""
        found = self.ops.get((way, backward))
        if found is None:
            found = self.ops[way, backward] = way.op(self.ranks, backward)
        return found


# --- what is right ----------------------------------------------------------------------------------------------------

Tensors: TypeAlias = tuple[torch.Tensor, ...]


def whole(run: Run, case: Case, dtype: torch.dtype, seed: int, dim: int = DIM) -> Tensors:
    """All ranks' q, k, v and the gradient of the output, (tokens, batch, heads, dim)."""
    generator = torch.Generator(run.device).manual_seed(1000 * run.options.seed + seed)
    query, key = ((sum(case.lengths), case.batch, heads, dim) for heads in case.heads)
    return tuple(
        torch.randn(*shape, generator=generator, device=run.device, dtype=torch.float64).to(dtype)
        for shape in (query, key, key, query)
    )


def admitted(case: Case, device: torch.device) -> torch.Tensor:
    """(queries, keys), from the definition of the mask."""
    places = [(document, at) for document, length in enumerate(case.lengths) for at in range(length)]
    document, at = torch.tensor(places, device=device).T
    distance = at[None, :] - at[:, None]
    mask = MASKS[case.mask]
    found = document[None, :] == document[:, None]
    if mask.left is not None:
        found &= distance >= -mask.left
    if mask.right is not None:
        found &= distance <= mask.right
    return found


def of_float64(case: Case, given: Tensors) -> Tensors:
    """The output and the gradients of q, k and v, by torch's autograd of the definition."""
    q, k, v, dout = (one.double().permute(1, 2, 0, 3) for one in given)
    for one in (q, k, v):
        one.requires_grad_()
    keys, values = (one.repeat_interleave(case.heads[0] // case.heads[1], 1) for one in (k, v))
    scores = q @ keys.mT * q.shape[-1] ** -0.5
    out = scores.masked_fill(~admitted(case, q.device), -torch.inf).softmax(-1) @ values
    found = (out, *torch.autograd.grad(out, (q, k, v), dout))
    return tuple(one.detach().permute(2, 0, 1, 3) for one in found)


# --- what is called ---------------------------------------------------------------------------------------------------


@dataclass
class Subject:
    """A case on this rank: tensors that may be refilled, and calls of them."""

    run: Run
    case: Case
    where: placement.Placement
    rows: torch.Tensor  # the rank's tokens
    mine: Tensors

    @staticmethod
    def of(run: Run, case: Case, given: Tensors) -> Subject:
        make = placement.contiguous if case.way.schedule.startswith("window") else placement.zigzag
        where = make(run.ranks, case.lengths)
        rows = rows_of(case, where, run.rank).to(run.device)
        return Subject(run, case, where, rows, tuple(one[rows].contiguous() for one in given))

    def refill(self, given: Tensors) -> None:
        for own, one in zip(self.mine, given, strict=True):
            own.copy_(one[self.rows])

    def delay(self) -> None:
        """Holds this rank up, on the GPU."""
        if self.run.on_gpu:
            torch.cuda._sleep(int(CYCLES * torch.rand(()).item()))

    def forward(self, kernel: str = "auto") -> Tensors:
        q, k, v, _ = self.mine
        op = self.run.op(self.case.way, backward=False)
        return loop.forward(op, q, k, v, placement=self.where, mask=MASKS[self.case.mask], kernel=kernel)

    def both(self, kernel: str = "auto") -> Tensors:
        """The output and the gradients."""
        q, k, v, dout = self.mine
        there, back = (self.run.op(self.case.way, backward=way) for way in (False, True))
        told: Any = {"placement": self.where, "mask": MASKS[self.case.mask], "kernel": kernel}
        out, lse, kept = loop.attended(there, q, k, v, **told)
        return out, *loop.backward(back, dout, q, k, v, out, lse, kept, **told)

    def squares(self, made: Tensors, wanted: Tensors) -> list[float]:
        """Of the distance from what is wanted, for each tensor."""
        return [float((one.double() - want[self.rows]).square().sum()) for one, want in zip(made, wanted, strict=True)]

    def errors(self, made: Tensors, wanted: Tensors) -> list[float]:
        """Relative, of all ranks: of the output, and of each gradient."""
        everyone = self.run.everyone(self.squares(made, wanted))
        sums = [sum(of_rank) for of_rank in zip(*everyone, strict=True)]
        return [(one / float(want.square().sum())) ** 0.5 for one, want in zip(sums, wanted, strict=True)]


def rows_of(case: Case, where: placement.Placement, rank: int) -> torch.Tensor:
    """The tokens of a rank, in the order of its rows."""
    starts = [0, *itertools.accumulate(case.lengths)]
    runs = [run for half in where.runs[rank] for run in half]
    found = [torch.arange(run.length) + starts[run.document] + run.begin for run in runs]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def schedules(ranks: int) -> list[str]:
    """Those that admit so many ranks, whatever the mask and the heads."""
    found = ["direct", "ring", *(["pair"] if ranks == 2 else [])]
    if ranks == 2 or ranks > 6 or ranks % 2:  # there are no such cycles of 4 and of 6 ranks
        found += ["hamilton@K=1", f"hamilton@K={ranks - 1}"] if ranks > 2 else ["hamilton@K=1"]
    if ranks % 2 == 0 and ranks > 3:
        found += ["paths@m=2", "double_ring@m=2"]
    return found


def causal_alone(ranks: int) -> tuple[str, ...]:
    """Those that send what a causal mask admits."""
    return CAUSAL_ALONE + (PAIR_ALONE if ranks == 2 else ())


def cases(ranks: int) -> list[Case]:
    """Each schedule under each mask, lengths and heads in turn; then what only some masks are for."""
    lengths = [(24 * ranks,), (31 * ranks + 5,), (70, 3, 19 * ranks + 1, 1, 44)]
    heads = itertools.cycle([((4, 4), 1), ((4, 2), 2), ((4, 1), 1)])
    landing = itertools.cycle(LANDING)
    found = []
    for schedule in [*schedules(ranks), *causal_alone(ranks)]:
        masks = ["causal"] if schedule in causal_alone(ranks) else list(MASKS)
        for mask, length in itertools.product(masks, lengths):
            found.append(Case(Way(schedule, "", next(landing)), mask, length, *next(heads)))
    for length in lengths:
        halves = [half for halves in placement.contiguous(ranks, length).runs for half in halves]
        shortest = min(sum(run.length for run in half) for half in halves)
        reach = (MASKS["window"].left or 0) - 1
        found.append(Case(Way(f"window@B={reach // shortest + 1}"), "window", length, *next(heads)))
    by_heads = [("ulysses", ranks), *([("ulysses_ring@U=2", 2)] if ranks > 2 and ranks % 2 == 0 else [])]
    for (schedule, share), mask, served in itertools.product(by_heads, MASKS, (1, 2)):
        found.append(Case(Way(schedule), mask, lengths[served], (served * share, share)))
    return found


# --- parts ------------------------------------------------------------------------------------------------------------


def attempt(run: Run, name: str, case: Case, calls: int, work: Callable[[runner.Part], int]) -> None:
    """A part of the run, unless there is no time for it."""
    part = runner.Part(name, str(case), calls)
    run.attempt_in_time(part, lambda: work(part))


def exact(run: Run) -> None:
    for number, case in enumerate(cases(run.ranks)):

        def work(part: runner.Part, number: int = number, case: Case = case) -> int:
            wrong = 0
            for dtype, bound in EXACT.items():
                given = whole(run, case, dtype, number)
                subject = Subject.of(run, case, given)
                found = subject.errors(subject.both(), of_float64(case, given))
                part.what += f", {max(found):.0e}"
                wrong += not (found[0] < bound and max(found) < GRADIENTS)
            return wrong

        attempt(run, "exact", case, len(EXACT), work)


def bits(run: Run) -> None:
    for schedule in [*schedules(run.ranks), *causal_alone(run.ranks)]:
        case = Case(Way(schedule), "causal", (31 * run.ranks + 5,))

        def work(part: runner.Part, case: Case = case) -> int:
            wrong = 0
            for dtype in (torch.bfloat16, torch.float32):
                subject = Subject.of(run, case, whole(run, case, dtype, 7, WIDE))
                first = subject.both()
                for _ in range(2):
                    subject.delay()
                    wrong += not all(map(torch.equal, subject.both(), first))
            return wrong

        attempt(run, "bits", case, 6, work)


def bfloat16(run: Run) -> None:
    case = Case(Way("direct@causal=1"), "causal", (256 * run.ranks,), (8, 2))
    for kernel in ("auto", "flash", "cudnn") if run.on_gpu else ("auto",):

        def work(part: runner.Part, kernel: str = kernel) -> int:
            given = whole(run, case, torch.bfloat16, 11, WIDE)
            wanted = of_float64(case, given)
            subject = Subject.of(run, case, given)
            found = subject.errors(subject.both(kernel), wanted)
            alone = of_one(kernel, given)
            known = [float((one.double() - want).norm() / want.norm()) for one, want in zip(alone, wanted, strict=True)]
            part.what = f"{kernel}, beside one {'GPU' if run.on_gpu else 'rank'}: " + " ".join(
                f"{mine:.1e}/{one:.1e}" for mine, one in zip(found, known, strict=True)
            )
            return sum(not mine <= MOST_OF_ONE_GPU * one for mine, one in zip(found, known, strict=True))

        attempt(run, "bfloat16", case, 4, work)


def of_one(kernel: str, given: Tensors) -> Tensors:
    """The output and the gradients of the whole sequence, by one kernel."""
    q, k, v, dout = (one[:, 0] for one in given)
    rows = (0, len(q))
    call = ready(Call(rows, rows, None, 0), q.device)
    shape = kernels.Shape(q.dtype, q.shape[2])
    there, back = (kernels.chosen(kernel, kernels.here(q.device), shape, [call.call], way) for way in (False, True))
    scale = q.shape[2] ** -0.5
    out, lse = there.forward(q, k, v, call, scale)
    out = out.to(q.dtype)
    made = back.backward(dout, q, k, v, out, lse.contiguous(), call, scale)
    return tuple(one.to(q.dtype)[:, None] for one in (out, *made))


def graph(run: Run) -> None:
    for way in captured_ways(run.ranks):
        case = Case(way, "causal", (32 * run.ranks,))

        def work(part: runner.Part, case: Case = case) -> int:
            subject, wrong = Subject.of(run, case, whole(run, case, torch.bfloat16, 20, WIDE)), 0
            for call in (subject.forward, subject.both):
                last: list[torch.Tensor] = []
                made = captured(lambda call=call, last=last: last.__setitem__(slice(None), call()), 1, before=1)
                for turn in range(REPLAYS):
                    given = whole(run, case, torch.bfloat16, 21 + turn, WIDE)
                    subject.refill(given)
                    subject.delay()
                    made.replay()
                    replayed = [one.clone() for one in last]
                    wrong += not all(map(torch.equal, replayed, call()))
                    wanted = of_float64(case, given)
                    count = 1 if call == subject.forward else 4
                    wrong += max(subject.errors(tuple(replayed[:count]), wanted[:count])) > 2e-2
                made.reset()
            return wrong

        attempt(run, "graph", case, 2 * REPLAYS, work)


def interface(run: Run) -> None:
    """`attention` as it chooses, with torch's autograd: eagerly, compiled, and on GPUs captured with its way back."""
    case = Case(Way("auto"), "causal", (32 * run.ranks,))
    for how in ("eager", "compiled", *(["captured"] if run.on_gpu else [])):

        def work(part: runner.Part, how: str = how) -> int:
            given = whole(run, case, torch.bfloat16, 30, WIDE)
            subject = Subject.of(run, case, given)
            q, k, v = (one.transpose(0, 1).requires_grad_() for one in subject.mine[:3])  # BSND
            attend = torch.compile(public, fullgraph=True) if how == "compiled" else public

            def call() -> Tensors:
                out = attend(q, k, v)
                return out.detach(), *torch.autograd.grad(out, (q, k, v), subject.mine[3].transpose(0, 1))

            last: list[torch.Tensor] = []
            replay: Callable[[], object] = lambda: last.__setitem__(slice(None), call())  # noqa: E731 - or a graph's
            made = captured(replay, 1, before=1) if how == "captured" else None
            if made is not None:
                given = whole(run, case, torch.bfloat16, 31, WIDE)
                with torch.no_grad():
                    subject.refill(given)
                replay = made.replay
            replay()
            part.what = f"attention(), {how}"
            found = subject.errors(tuple(one.transpose(0, 1) for one in last), of_float64(case, given))
            return int(not max(found) < 2e-2)

        attempt(run, "interface", case, 1, work)


def public(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = attention(q, k, v, causal=True)
    return out


def captured_ways(ranks: int) -> list[Way]:
    return [Way(*way) for way in itertools.product(causal_alone(ranks), ("engine", "8"), LANDING)]


def every_way(ranks: int) -> list[Way]:
    """All that a run on GPUs loads, forward and backward."""
    return list(dict.fromkeys([*(case.way for case in cases(ranks)), *captured_ways(ranks)]))


PARTS: dict[str, Callable[[Run], None]] = {
    "exact": exact,
    "bits": bits,
    "bfloat16": bfloat16,
    "graph": graph,
    "interface": interface,
}


def main() -> None:
    parser = runner.part_parser_of(__doc__, 1, 120.0, list(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
        options.only = [name for name in options.only if name != "graph"]
    runner.end_of_parts(Run, options, PARTS, GRACE, on_gpu=on_gpu)


if __name__ == "__main__":
    main()
