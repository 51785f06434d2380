"""Attention over a group as users call it: against its definition in float64, on ranks that are threads; what it
refuses; and the function of torch that it stands in for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attention_texts import RING, RING_FORTH  # noqa: E402 - after the check for torch
from thread_ranks import in_group, outcomes  # noqa: E402 - as above
from torch.nn import functional  # noqa: E402 - as above
from whole_attention import admitted, whole_attention  # noqa: E402 - as above

import commdsl  # noqa: E402 - as above
from commdsl.attention import attention, choice, sequence_parallel, shard_sequence, ways  # noqa: E402 - as above
from commdsl.attention.placement import Placement, Run  # noqa: E402 - as above
from commdsl.machine.config import from_environment  # noqa: E402 - as above
from commdsl.machine.errors import ArgumentError  # noqa: E402 - as above
from commdsl.program.memory import Transport  # noqa: E402 - as above
from commdsl.program.visited import landing  # noqa: E402 - as above
from commdsl.runtime.errors import AgreementError, GradientError, GroupError, TensorError  # noqa: E402 - as above
from commdsl.runtime.load import definition  # noqa: E402 - as above
from commdsl.runtime.program import program  # noqa: E402 - as above

BOUND = 1e-5


@pytest.fixture
def ring(tmp_path: Path) -> str:
    """A schedule of a user's own, with its way back beside it in the file."""
    path = tmp_path / "ring.comm"
    path.write_text(RING, encoding="utf-8")
    return f"{path}:ring"


@dataclass(frozen=True)
class Case:
    """A call: its mask as it is said and as (left, right), its sizes."""

    said: dict[str, Any]
    sides: tuple[int | None, int | None] = (None, None)
    length: int = 48
    heads: tuple[int, int] = (2, 2)
    dim: int = 64
    batch: int = 1
    layout: str = "BSND"
    ends: Sequence[int] | None = None
    placement: str | Placement = "zigzag"
    dtype: torch.dtype = torch.float32


CASES = {
    "full": Case({}, batch=2, dim=128),
    "causal": Case({"causal": True}, (None, 0), layout="BNSD"),
    "uneven": Case({"causal": True, "scale": 0.3}, (None, 0), length=61, heads=(4, 2), batch=2),
    "few": Case({"causal": True}, (None, 0), length=2, batch=2),
    "window": Case({"causal": True, "window": 9}, (8, 0), length=59, heads=(4, 1), placement="contiguous"),
    "in zigzag": Case({"causal": True, "window": 20}, (19, 0), length=57),
    "both sides": Case({"window": (3, 11)}, (3, 11), length=50, layout="SBND", batch=3),
    "packed": Case(
        {"causal": True}, (None, 0), length=75, heads=(6, 3), dim=128, ends=[0, 31, 31, 34, 75], layout="BNSD"
    ),
    "packed full": Case({}, length=40, ends=[0, 7, 40], placement="contiguous"),
}
ORDER = {"BSND": (0, 1, 2, 3), "BNSD": (0, 2, 1, 3), "SBND": (1, 0, 2, 3)}
"""Where the dimensions of (batch, rows, heads, dim) go."""


def given(case: Case) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, whole: (batch, rows, heads, dim)."""
    generator = torch.Generator().manual_seed(case.length)
    counts = (case.heads[0], case.heads[1], case.heads[1], case.heads[0])
    shapes = [(case.batch, case.length, count, case.dim) for count in counts]
    return [torch.randn(shape, generator=generator).to(case.dtype) for shape in shapes]


def exact(case: Case) -> list[torch.Tensor]:
    """Output, log-sum-exp and gradients by the definition, with the sequence along dimension 1."""
    *tensors, slope = given(case)
    q, k, v = (one.double().requires_grad_() for one in tensors)
    seen = admitted(case.length, *case.sides, case.ends)
    out, lse = whole_attention(q, k, v, seen, case.said.get("scale", case.dim**-0.5))
    slopes = torch.autograd.grad(out, (q, k, v), slope.double())
    return [out.detach(), lse.detach().transpose(1, 2), *slopes]


def by_rank(case: Case, group: str, **settings: Any) -> list[torch.Tensor]:
    """The same of one rank's rows, made by `attention`; without the log-sum-exp where heads are exchanged."""
    order = ORDER[case.layout]
    place = {"placement": case.placement, "cu_seqlens": case.ends}
    own = [shard_sequence(one, 1, group, **place).permute(order).contiguous() for one in given(case)]
    q, k, v = (one.requires_grad_() for one in own[:3])
    by_heads = str(settings.get("schedule")).startswith("ulysses")
    said = {**place, **case.said, **settings, "layout": case.layout, "length": case.length}
    made = attention(q, k, v, group, **said, return_lse=not by_heads)
    out, lse = (made, None) if by_heads else made
    slopes = torch.autograd.grad(out, (q, k, v), own[3])
    home = [order.index(dim) for dim in range(4)]
    sums = [] if lse is None else [lse.transpose(1, 2)]
    return [out.detach().permute(home), *sums, *(one.permute(home) for one in slopes)]


def rows(case: Case, group: str, whole: list[torch.Tensor]) -> list[torch.Tensor]:
    return [shard_sequence(one, 1, group, case.placement, case.ends) for one in whole]


def errors(made: list[torch.Tensor], wanted: list[torch.Tensor], scales: list[float]) -> list[float]:
    """The largest of each, relative to the largest of the whole."""
    found = []
    for one, exact_one, scale in zip(made, wanted, scales, strict=True):
        torch.testing.assert_close(one.isfinite(), exact_one.isfinite())
        kept = exact_one.isfinite()
        difference = (one.double() - exact_one)[kept]
        found.append(float(difference.abs().max()) / scale if difference.numel() else 0.0)
    return found


def scales(whole: list[torch.Tensor]) -> list[float]:
    return [float(one[one.isfinite()].abs().max()) for one in whole]


def hold(ranks: int, cases: dict[str, Case], runs: int = 2, **settings: Any) -> None:
    """Each case, on so many ranks: forward and gradients within BOUND of the definition, in every run the same bits."""
    wholes = {name: exact(case) for name, case in cases.items()}

    def rank_does(rank: int, group: str) -> dict[str, list[float]]:
        found = {}
        for name, case in cases.items():
            made, *others = (by_rank(case, group, **settings) for _ in range(runs))
            for again in others:
                assert all(torch.equal(one, other) for one, other in zip(made, again, strict=True)), name
            whole = wholes[name] if len(made) == len(wholes[name]) else [wholes[name][0], *wholes[name][2:]]
            found[name] = errors(made, rows(case, group, whole), scales(whole))
        return found

    for rank, found in enumerate(in_group(ranks, rank_does)):
        for name, worst in found.items():
            assert max(worst) <= BOUND, f"rank {rank} of {ranks}, {name}: errors of out (lse), dq, dk, dv {worst}"


ANY = ("direct", "ring", "hamilton", "window", "ulysses")
ON_NODES = ("paths m=2", "double_ring m=2", "ulysses_ring U=2")
MANY = 8
"""From so many ranks on one case is run, once: a rank is a thread, and there are more of them than cores."""


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 3, 5, 16])
@pytest.mark.parametrize("schedule", [*ANY, *ON_NODES])
def test_schedules(schedule: str, ranks: int) -> None:
    """Every shipped schedule: full, causal, windows, packed, uneven; heads, layouts, batches. Those of nodes have as
    many ranks, or twice as many.
    """
    if schedule in ON_NODES and (ranks % 2 or ranks == 2):
        ranks *= 2
    cases = {name: case for name, case in CASES.items() if ranks < MANY or name == "uneven"}
    if schedule == "window":
        cases = {name: replace(CASES[name], placement="contiguous") for name in ("window", "both sides")}
    if schedule.startswith("ulysses"):
        cases = {name: replace(case, heads=(2 * ranks, ranks), dim=16) for name, case in cases.items()}
    pieces = f" K={ranks - 1}" if schedule == "direct" and ranks > 3 else ""
    hold(ranks, cases, 2 if ranks < MANY else 1, schedule=schedule + pieces)


def test_ulysses_has_no_lse() -> None:
    """Where heads are exchanged for rows, no rank has the log-sum-exp of its own rows."""

    def rank_does(rank: int, group: str) -> None:
        with pytest.raises(ArgumentError, match="exchanges heads"):
            attention(x(), x(), x(), group, "ulysses", return_lse=True)

    in_group(2, rank_does)


def test_own_schedule(ring: str) -> None:
    """A file of one's own with its way back: full, causal, windows, packed, uneven; heads, layouts, batches."""
    hold(3, CASES, schedule=ring)


def test_what_nobody_attends_to_is_zero() -> None:
    """Gradients that no call finds are zeros, on the way and at home: torch fills what it allocates with NaN here."""
    torch.use_deterministic_algorithms(True)
    try:
        for ranks, schedule in ((3, "direct"), (2, "pair")):
            hold(ranks, {"causal": CASES["causal"]}, schedule=schedule)
    finally:
        torch.use_deterministic_algorithms(False)


def test_auto() -> None:
    """Without a schedule's name it is chosen, for this group and these sizes: what `choice` says is what runs."""
    hold(2, CASES)
    case = CASES["causal"]
    said = choice(case.length, 2, case.dim, ranks=2, itemsize=4, causal=True, backward=True)

    def rank_does(rank: int, group: str) -> set[str]:
        by_rank(case, group)
        return {one.op.partition("_segment")[0] for one in commdsl.memory_summary().held if one.group == group}

    for ops in in_group(2, rank_does):
        assert ops == {"desk", said.schedule, f"{said.schedule}_backward"}


def test_auto_of_a_window() -> None:
    """Rows in order: what is outside of a window is not sent, and what is inside is seen to its edge."""
    window = Case({"causal": True, "window": 20}, (19, 0), length=97, placement="contiguous")
    hold(3, {"window": window})


def test_a_window_over_short_halves() -> None:
    """A window reaches past halves that are shorter than others, and past empty ones."""
    cut = [0, 20, 40, 42, 44, 50, 57]
    runs = [(Run(0, begin, end - begin),) for begin, end in pairwise(cut)]
    odd = Placement("odd", tuple((runs[half], runs[half + 1]) for half in (0, 2, 4)))
    case = Case({"causal": True, "window": 8}, (7, 0), length=57, placement=odd)
    few = Case({"causal": True, "window": 2}, (1, 0), length=3, placement="contiguous")
    hold(3, {"uneven": case}, schedule="window")
    hold(4, {"few": few}, schedule="window")


def test_one_rank() -> None:
    """A group of one rank, which needs no schedule."""
    hold(1, CASES)


def test_bfloat16_is_as_exact_as_on_one_rank(ring: str) -> None:
    """What is handed on and merged costs bfloat16 no more than a tenth of the error that one rank has by itself."""
    case = Case({"causal": True}, (None, 0), length=96, heads=(4, 2), dtype=torch.bfloat16)
    wanted = exact(case)

    def squares(rank: int, group: str, **settings: Any) -> list[torch.Tensor]:
        made = by_rank(case, group, **settings)
        return [
            (one.double() - other).square().sum() for one, other in zip(made, rows(case, group, wanted), strict=True)
        ]

    alone = in_group(1, squares)[0]
    together = in_group(4, lambda rank, group: squares(rank, group, schedule=ring))
    for which, single in enumerate(alone):
        assert sum(one[which] for one in together) ** 0.5 <= 1.1 * single**0.5


def test_placements_of_ones_own(ring: str) -> None:
    """Any Placement will do, as long as the rows are cut by it."""
    odd = Placement("odd", (((Run(0, 5, 9),), ()), ((Run(0, 0, 5),), (Run(0, 14, 2),))))
    case = Case({"causal": True}, (None, 0), length=16)
    q, k, v, _ = given(case)
    whole = exact(case)[0]

    def rank_does(rank: int, group: str) -> float:
        own = [shard_sequence(one, 1, group, odd) for one in (q, k, v)]
        made = attention(*own, group, ring, causal=True, placement=odd, length=16)
        return float((made - shard_sequence(whole, 1, group, odd)).abs().max())

    assert max(in_group(2, rank_does)) <= BOUND


# --- what is refused --------------------------------------------------------------------------------------------------


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape or (1, 8, 4, 16), dtype=dtype)


REFUSALS: dict[str, tuple[type[Exception], str, Callable[[str], Any]]] = {
    "no tensor": (TensorError, "torch tensor", lambda g: attention([1.0], x(), x(), g)),
    "dimensions": (TensorError, "4 dimensions, BSND, not 3", lambda g: attention(x(8, 4, 16), x(), x(), g)),
    "dtype": (TensorError, "it takes bfloat16", lambda g: attention(*[x(dtype=torch.int32)] * 3, g)),
    "dtypes": (TensorError, r"k\.to\(q\.dtype\)", lambda g: attention(x(), x(dtype=torch.float64), x(), g)),
    "k and v": (TensorError, "one shape", lambda g: attention(x(), x(), x(1, 8, 2, 16), g)),
    "head ratio": (TensorError, "no multiple of 3", lambda g: attention(x(), *[x(1, 8, 3, 16)] * 2, g)),
    "head length": (TensorError, "dimensions", lambda g: attention(x(), *[x(1, 8, 4, 8)] * 2, g)),
    "rows": (TensorError, "rows of one sequence", lambda g: attention(x(), *[x(1, 9, 4, 16)] * 2, g)),
    "batches": (TensorError, "batches", lambda g: attention(x(), *[x(2, 8, 4, 16)] * 2, g)),
    "layout": (ArgumentError, "one of BSND, BNSD, SBND", lambda g: attention(x(), x(), x(), g, layout="BHSD")),
    "placement": (ArgumentError, '"zigzag"', lambda g: attention(x(), x(), x(), g, placement="striped")),
    "placement's kind": (ArgumentError, "a Placement", lambda g: attention(x(), x(), x(), g, placement=3)),
    "length": (TensorError, "`length` is the number of tokens", lambda g: attention(x(), x(), x(), g, length=9)),
    "no length": (ArgumentError, "whole number", lambda g: attention(x(), x(), x(), g, length=2.5)),
    "documents": (ArgumentError, "never goes down", lambda g: attention(x(), x(), x(), g, cu_seqlens=[0, 9, 8])),
    "no documents": (ArgumentError, "`cu_seqlens` is a list", lambda g: attention(x(), x(), x(), g, cu_seqlens=8)),
    "documents' length": (TensorError, "has 8 rows", lambda g: attention(x(), x(), x(), g, cu_seqlens=[0, 9])),
    "both lengths": (ArgumentError, "ends with 8", lambda g: attention(x(), x(), x(), g, cu_seqlens=[0, 8], length=9)),
    "window": (ArgumentError, "causal=True", lambda g: attention(x(), x(), x(), g, window=4)),
    "empty window": (ArgumentError, "from 1 on", lambda g: attention(x(), x(), x(), g, causal=True, window=0)),
    "sides": (ArgumentError, "before and after", lambda g: attention(x(), x(), x(), g, window=(1, 2, 3))),
    "causal": (ArgumentError, "True or False", lambda g: attention(x(), x(), x(), g, causal=1)),
    "scale": (ArgumentError, "multiplied", lambda g: attention(x(), x(), x(), g, scale=float("nan"))),
    "kernel": (ArgumentError, '"auto" or one of', lambda g: attention(x(), x(), x(), g, kernel="fast")),
    "kernel elsewhere": (ArgumentError, "does not run on cpu", lambda g: attention(x(), x(), x(), g, kernel="cudnn")),
    "tune": (ArgumentError, "mapping", lambda g: attention(x(), x(), x(), g, tune="lanes=4")),
    "dropout": (ArgumentError, "no `dropout_p`", lambda g: attention(x(), x(), x(), g, dropout_p=0.1)),
    "bias": (ArgumentError, "no `attn_bias`", lambda g: attention(x(), x(), x(), g, attn_bias=x())),
    "sinks": (ArgumentError, "no `sinks`", lambda g: attention(x(), x(), x(), g, sinks=x(4))),
    "unknown": (ArgumentError, "no argument `casual`", lambda g: attention(x(), x(), x(), g, casual=True)),
    "group": (GroupError, "no rank of a process group named", lambda g: attention(x(), x(), x(), "nobody's")),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    """What a call cannot be is refused before anything runs, in words that say what to write."""
    kind, words, call = REFUSALS[name]
    (group,) = commdsl.threads(1)
    with pytest.raises(kind, match=words):
        call(group)


def test_what_says_nothing_is_no_argument() -> None:
    """Dropout of 0 and no mask, as calls of other libraries say them, are no reason to refuse."""
    (group,) = commdsl.threads(1)
    assert attention(x(), x(), x(), group, dropout_p=0.0, attn_mask=None).shape == (1, 8, 4, 16)


def test_unknown_schedules() -> None:
    """A schedule that there is not, and one that has no way back, are named with what there is."""

    def rank_does(rank: int, group: str) -> None:
        with pytest.raises(ArgumentError, match='"auto"'):
            attention(x(), x(), x(), group, "rign")

    in_group(2, rank_does)


def test_no_way_back(tmp_path: Path) -> None:
    """Without a way back there is the forward pass; a gradient says what to write."""
    path = tmp_path / "ring.comm"
    path.write_text(RING_FORTH, encoding="utf-8")

    def rank_does(rank: int, group: str) -> None:
        q = x().requires_grad_()
        out = attention(q, x(), x(), group, str(path))
        with pytest.raises(GradientError, match="write the schedule `ring_backward`"):
            out.sum().backward()

    in_group(2, rank_does)


DISAGREEMENTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "mask": lambda rank: {"causal": rank == 1},
    "placement": lambda rank: {"placement": "zigzag" if rank else "contiguous"},
    "scale": lambda rank: {"scale": 0.5 if rank else None},
    "no scale at all": lambda rank: {"scale": 0.0 if rank else None},
    "window": lambda rank: {"causal": True, "window": 3 + rank},
    "documents": lambda rank: {"cu_seqlens": [0, 8 + rank, 16]},
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree(name: str, ring: str) -> None:
    """Ranks that ask for different things are told both sides, whatever the schedule moves is the same size."""

    def rank_does(rank: int, group: str) -> Any:
        made = [attention(x(), x(), x(), group, ring, **DISAGREEMENTS[name](rank)) for _ in range(2)]
        commdsl.runtime.groups.of(group, torch.device("cpu")).settle()
        return made

    names = commdsl.threads(2)
    found = outcomes(2, lambda rank: rank_does(rank, names[rank]))
    assert all(isinstance(one, AgreementError) for one in found), found
    assert "attention over 16 tokens" in str(found[0])


def test_the_default_scale_is_a_scale() -> None:
    """A rank that writes the default scale out agrees with one that leaves it to the default."""

    def rank_does(rank: int, group: str) -> Any:
        return attention(x(), x(), x(), group, scale=16**-0.5 if rank else None)

    assert len(in_group(2, rank_does)) == 2


def test_uneven_rows_without_a_length(ring: str) -> None:
    """Ranks with more rows than others that do not say the length of the whole are told; they would mask wrongly."""

    def rank_does(rank: int, names: Sequence[str]) -> Any:
        return attention(*[x(1, 9 - rank, 4, 16)] * 3, names[rank], ring, causal=True)

    names = commdsl.threads(2)
    found = outcomes(2, lambda rank: rank_does(rank, names))
    assert all(isinstance(one, AgreementError) for one in found), found


def test_no_gradient_of_the_gradient() -> None:
    """Twice differentiated it is refused, not zero."""
    (group,) = commdsl.threads(1)
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    (slope,) = torch.autograd.grad(attention(q, q, q, group).sum(), q, create_graph=True)
    with pytest.raises(GradientError, match="create_graph"):
        slope.sum().backward()


# --- in place of torch's function -------------------------------------------------------------------------------------


def test_drop_in(ring: str) -> None:
    """Within `sequence_parallel` torch's function attends to all ranks' keys; nested, the innermost counts."""
    case = CASES["uneven"]
    q, k, v, _ = (one.transpose(1, 2) for one in given(case))
    whole = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)

    def rank_does(rank: int, group: str) -> float:
        own = [shard_sequence(one, 2, group).requires_grad_() for one in (q, k, v)]
        (alone,) = commdsl.threads(1)

        def local() -> torch.Tensor:
            return functional.scaled_dot_product_attention(*own, is_causal=True, scale=0.3, enable_gqa=True)

        before = local()
        with sequence_parallel(group, ring, length=case.length):
            made = local()
            with sequence_parallel(alone, placement="contiguous"):
                inner = local()
            torch.testing.assert_close(local(), made, rtol=0, atol=0)
        torch.testing.assert_close(inner, before)
        torch.testing.assert_close(local(), before, rtol=0, atol=0)
        made.sum().backward()  # no `with` is needed for that
        assert all(one.grad is not None for one in own)
        return float((made.detach() - shard_sequence(whole, 2, group)).abs().max())

    assert max(in_group(2, rank_does)) <= BOUND


def test_drop_in_is_of_its_thread() -> None:
    """Another thread's calls are torch's own, and an exception ends it as its end does."""
    (group,) = commdsl.threads(1)
    q = torch.randn(1, 2, 8, 16)

    def graph_of(grad: torch.Tensor) -> str:
        return str(functional.scaled_dot_product_attention(grad, grad, grad).grad_fn)

    def fail() -> None:
        with sequence_parallel(group):
            assert "sequence_attention" in graph_of(q.clone().requires_grad_())
            assert "sequence_attention" not in outcomes(1, lambda _: graph_of(q.clone().requires_grad_()))[0]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "sequence_attention" not in graph_of(q.clone().requires_grad_())


DROP_IN_REFUSALS: dict[str, tuple[type[Exception], str, Callable[[torch.Tensor], Any]]] = {
    "mask": (
        ArgumentError,
        "no attn_mask",
        lambda q: functional.scaled_dot_product_attention(q, q, q, torch.ones(8, 8, dtype=torch.bool)),
    ),
    "dropout": (
        ArgumentError,
        "no dropout",
        lambda q: functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1),
    ),
    "heads": (TensorError, "enable_gqa", lambda q: functional.scaled_dot_product_attention(q, q[:, :1], q[:, :1])),
    "dimensions": (TensorError, "rows, dim", lambda q: functional.scaled_dot_product_attention(q[0], q[0], q[0])),
    "cross": (TensorError, "rows", lambda q: functional.scaled_dot_product_attention(q, q[:, :, :4], q[:, :, :4])),
    "layers": (
        ArgumentError,
        "this rank's rows alone",
        lambda q: torch.nn.MultiheadAttention(16, 2, batch_first=True)(q[0], q[0], q[0]),
    ),
    "fused layers": (
        ArgumentError,
        "this rank's rows alone",
        lambda q: torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()(q[0]),
    ),
}


@pytest.mark.parametrize("name", DROP_IN_REFUSALS)
def test_drop_in_refuses(name: str) -> None:
    """What it cannot do is refused, not left to this rank's rows."""
    kind, words, call = DROP_IN_REFUSALS[name]
    (group,) = commdsl.threads(1)
    with sequence_parallel(group), torch.no_grad(), pytest.raises(kind, match=words):
        call(torch.randn(1, 2, 8, 16))


def test_drop_in_under_autocast() -> None:
    """As torch's function does, it takes what autocast makes of its arguments."""
    (group,) = commdsl.threads(1)
    q = torch.randn(1, 2, 8, 16)
    with torch.autocast("cpu", torch.bfloat16), sequence_parallel(group):
        assert functional.scaled_dot_product_attention(q, q, q).dtype == torch.bfloat16


# --- symmetric memory -------------------------------------------------------------------------------------------------

GRAIN = 2 << 20
"""GPUs are given memory in multiples of so many bytes."""

KV_BYTES = 2 * (64 << 10) * 32 * 128 * 2
"""Keys and values of 64K tokens, 32 heads of 128, in bfloat16."""

PARAMETERS: dict[str, dict[str, int]] = {
    "direct": {"causal": 1},
    "ring": {"causal": 1},
    "hamilton": {},
    "paths": {"m": 4},
    "double_ring": {"m": 4, "causal": 1},
    "window": {},
    "ulysses": {},
}


def launched_bytes(name: str, ranks: int, params: dict[str, int], tune: dict[str, int | str]) -> dict[str, int]:
    """Symmetric memory of both ways, by kernel, whatever the length of the sequence: the Plans say it."""
    found = {}
    for place in (f"attention_{name}", f"attention_{name}_backward"):
        known = {param.name.text for param in ways.declared(place).params}
        said = {key: value for key, value in params.items() if key in known}
        asked = definition(place, None, said, None, tune)
        visits = program(asked, ranks, Transport.PEER, from_environment()).visits
        assert visits is not None
        found.update({one.plan.name: one.plan.symmetric_bytes for one in visits.launched})
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("tune", [{}, {"protocol": "engine"}], ids=["SMs", "copy engine"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_symmetric_memory(name: str, tune: dict[str, int | str]) -> None:
    """Forward and backward on 8 GPUs take less symmetric memory than two buffers of the keys and values of 64K tokens
    for each GPU (2 GiB): less than 600 MB, and no more of it for a longer sequence.
    """
    total = sum(-(-nbytes // GRAIN) * GRAIN for nbytes in launched_bytes(name, 8, PARAMETERS[name], tune).values())
    assert 16 << 20 < total < 600 << 20 < 2 * KV_BYTES


@pytest.mark.parametrize("tune", [{}, {"protocol": "engine"}], ids=["SMs", "copy engine"])
@pytest.mark.parametrize(("name", "buffers"), [
    ("direct", 2), ("ring", 2), ("hamilton", 2), ("paths", 2), ("double_ring", 3), ("window", 1),
])  # fmt: skip
def test_symmetric_memory_where_keys_and_values_land(name: str, buffers: int, tune: dict[str, int | str]) -> None:
    """Two buffers of the keys and values of a rank on 8 GPUs, forward and backward each, which take turns on them: also
    gradients that return as they are land there. And less than 150 MB besides, whatever the length of the sequence.
    """
    for place in (f"attention_{name}", f"attention_{name}_backward"):
        known = {param.name.text for param in ways.declared(place).params}
        said = {key: value for key, value in PARAMETERS[name].items() if key in known}
        asked = definition(place, None, said, None, {**tune, "landing": "place"})
        visits = program(asked, 8, Transport.PEER, from_environment()).visits
        assert visits is not None
        blocks = {port.name: port.blocks for port in visits.signature.inputs}
        landed = landing(visits.plan)
        assert sum(kept.blocks / blocks["k"] for kept in landed) == 2 * buffers  # of keys, and of values
        assert sum(one.plan.symmetric_bytes for one in visits.launched) < 150 << 20


def test_memory_is_what_the_plans_say() -> None:
    """What a group has after both passes, as `memory_summary` counts it, are these Plans and its desk; on processors,
    where fewer lanes run, less of each.
    """
    predicted = launched_bytes("direct", 2, {"causal": 1}, {})

    def rank_does(rank: int, group: str) -> dict[str, int]:
        q = x().requires_grad_()
        attention(q, q, q, group, "direct", causal=True).sum().backward()
        return {one.op: one.nbytes for one in commdsl.memory_summary().held if one.group == group}

    for held in in_group(2, rank_does):
        assert set(held) == {"desk", *predicted}
        assert all(0 < held[name] <= most for name, most in predicted.items())
