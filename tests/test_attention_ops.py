"""Shipped schedules of attention, run by the loop on host ranks: forward and gradients against full attention in
float64, and two runs with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from attention_cases import Case, cases

torch = pytest.importorskip("torch")

from attention_ranks import random_rows, whole  # noqa: E402
from thread_ranks import in_group  # noqa: E402

import commdsl  # noqa: E402
from commdsl.attention import loop  # noqa: E402
from commdsl.attention.masks import Mask  # noqa: E402
from commdsl.attention.placement import Placement, contiguous, zigzag  # noqa: E402
from commdsl.runtime.errors import MaskError  # noqa: E402

FULL, CAUSAL = Mask(), Mask(right=0)
BOUND = 1e-5


@dataclass(frozen=True)
class Setting:
    """A sequence, what sees what, and of which shape it is."""

    placement: Placement
    mask: Mask
    heads: tuple[int, int]
    batch: int = 1
    dtype: Any = torch.float32


def settings(case: Case) -> Iterator[Setting]:
    """What the schedule is for, as its first lines say: any length, packed or not, grouped heads, batches."""
    ranks = case.ranks
    even, uneven, packed = [16 * ranks], [16 * ranks - 5], [9 * ranks, 0, 3, 20 * ranks + 1]
    heads = (4 * ranks, 2 * ranks) if "ulysses" in case.name else (4, 2)
    if case.name == "attention_window":
        half = 8
        mask = Mask(case.of["B"] * half, case.of["A"] * half)
        yield Setting(contiguous(ranks, even), mask, heads)
        yield Setting(contiguous(ranks, [16 * ranks - 1]), Mask(max(0, mask.left - half), mask.right), heads, 2)
        return
    yield Setting(zigzag(ranks, even), CAUSAL, heads)
    yield Setting(zigzag(ranks, uneven), CAUSAL, heads, 2)
    yield Setting(zigzag(ranks, packed), CAUSAL, (heads[0], heads[0]))
    yield Setting(zigzag(ranks, uneven), CAUSAL, heads, 1, torch.bfloat16)
    if not case.of.get("causal"):
        yield Setting(zigzag(ranks, uneven), FULL, heads)
        yield Setting(contiguous(ranks, packed), FULL, heads)
        yield Setting(zigzag(ranks, even), Mask(11, 0), heads)


def way_back(case: Case) -> Any:
    """Keys that are forwarded go all the way around, causal or not."""
    if not case.back.is_file():
        return None
    forwards = case.name in ("attention_ring", "attention_double_ring")
    params = {name: value for name, value in case.params if not (forwards and name == "causal")}
    return commdsl.load(case.back, params=params, ranks=case.ranks)


def made(case: Case, setting: Setting, given: list[list[Any]]) -> list[Any]:
    """Of each rank out, lse, dq, dk and dv; twice, with the same bits."""
    forth, back = commdsl.load(case.path, params=case.of, ranks=case.ranks), way_back(case)

    def rank_does(rank: int, group: str) -> list[Any]:
        q, k, v, dout = (one[rank] for one in given)
        told: dict[str, Any] = {"placement": setting.placement, "mask": setting.mask, "scale": 0.3, "group": group}
        runs = []
        for _ in range(2):
            out, lse, kept = loop.attended(forth, q, k, v, **told)
            slopes = () if back is None else loop.backward(back, dout, q, k, v, out, lse, kept, **told)
            runs.append([out, lse, *slopes])
        assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
        return runs[0]

    return in_group(case.ranks, rank_does)


def check(case: Case, setting: Setting) -> None:
    ranks, (heads, of_keys) = case.ranks, setting.heads
    counts = (heads, of_keys, of_keys, heads)
    given = [
        random_rows(setting.placement, setting.batch, count, 8, setting.dtype, at) for at, count in enumerate(counts)
    ]
    exact = [[one.double().requires_grad_() for one in of_ranks] for of_ranks in given[:3]]
    outs, sums = whole(setting.placement, setting.mask, *exact, 0.3)
    leaves = [one for of_ranks in exact for one in of_ranks]
    slopes = torch.autograd.grad(outs, leaves, [one.double() for one in given[3]])
    rounds = 2**-8 if setting.dtype == torch.bfloat16 else 0.0
    for rank, (out, lse, *found) in enumerate(made(case, setting, given)):
        pairs = [(out, outs[rank]), *zip(found, slopes[rank::ranks], strict=False)]
        if "ulysses" not in case.name:  # there it is of other heads and rows
            pairs.append((lse, sums[rank]))
        for one, other in pairs:
            finite = other.detach()[other.isfinite()]
            bound = BOUND * max(1.0, float(finite.abs().amax()) if finite.numel() else 0.0)
            # The gradients of bfloat16 are of an output that was rounded, too.
            torch.testing.assert_close(one.double(), other.detach(), rtol=2 * rounds, atol=max(bound, 4 * rounds))


FEW = (
    Case("attention_ring", 3, (("causal", 0),)),
    Case("attention_direct", 3, (("K", 2), ("causal", 1))),
    Case("attention_hamilton", 3, (("K", 2),)),
    Case("attention_paths", 4, (("m", 2),)),
    Case("attention_window", 3, (("B", 3), ("A", 2))),
    Case("attention_ulysses", 2),
    Case("attention_ulysses_ring", 4, (("U", 2),)),
)
"""Of each kind one; each compiles some kernels for the host, and the rest of them is for `--sweep=all`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        every = metafunc.config.getoption("--sweep") == "all"
        metafunc.parametrize("case", [one for ranks in range(2, 9) for one in cases(ranks)] if every else FEW, ids=str)


def test_schedules(case: Case) -> None:
    """Whatever the mask that the schedule is for, the lengths and the heads."""
    assert case in list(cases(case.ranks))
    for setting in settings(case):
        check(case, setting)


def test_a_schedule_that_does_not_fit() -> None:
    """One that leaves out what causal attention does not see is refused for full attention, on every rank, and the
    group works on.
    """
    op = commdsl.load("attention_direct", params={"K": 1, "causal": 1}, ranks=2)
    placement = zigzag(2, [8])

    def rank_does(rank: int, group: str) -> str:
        q = torch.randn(4, 1, 1, 8)
        with pytest.raises(MaskError, match="on rank 1 queries see keys in the back half of rank 0") as caught:
            loop.forward(op, q, q, q, placement=placement, mask=FULL, group=group)
        loop.forward(op, q, q, q, placement=placement, mask=CAUSAL, group=group)
        return str(caught.value)

    first, second = in_group(2, rank_does)
    assert first == second
