"""Partial results over parts of the keys, merged, are attention over all of them, held against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from commdsl.attention.merge import AT_ONCE, Merging, Partial, Summing, merged

ROWS, HEADS, DIM = 12, 3, 8


def partials(count: int, dtype: torch.dtype, seed: int = 0) -> tuple[list[Partial], np.ndarray, np.ndarray]:
    """Softmax parts over disjoint keys for some rows each, and the whole by numpy in float64."""
    random = np.random.default_rng(seed)
    found, weights, sums = [], np.zeros((ROWS, HEADS)), np.zeros((ROWS, HEADS, DIM))
    for number in range(count):
        rows = slice(0, ROWS - 1) if number == 0 else slice(*sorted(random.choice(ROWS, 2, replace=False).tolist()))
        out = torch.from_numpy(random.standard_normal((rows.stop - rows.start, HEADS, DIM))).to(dtype)
        lse = random.uniform(-60, 60, (HEADS, rows.stop - rows.start)).astype(np.float32)
        found.append(Partial(rows, out, torch.from_numpy(lse)))
        share = np.exp(lse.astype(np.float64)).T
        weights[rows] += share
        sums[rows] += share[..., None] * out.to(torch.float64).numpy()
    with np.errstate(divide="ignore"):
        return found, sums / np.where(weights == 0, 1, weights)[..., None], np.log(weights).T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE])
def test_merged(count: int, dtype: torch.dtype) -> None:
    """Any number of partials, over rows of their own; float32 to rounding, and bfloat16 rounded once at the end."""
    found, out, lse = partials(count, dtype)
    merging = Merging(ROWS, dtype)
    for one in found:
        merging.add(one)
    got, got_lse = merging.result(torch.empty(ROWS, HEADS, DIM, dtype=dtype), torch.float32)
    assert got.dtype == dtype
    assert got_lse.dtype == torch.float32
    exact = torch.from_numpy(out).to(torch.float32)
    torch.testing.assert_close(got, exact.to(dtype), rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=1e-5)
    np.testing.assert_allclose(got_lse.double().numpy(), lse, rtol=1e-6, atol=1e-5)


def test_rows_without_a_partial() -> None:
    """Zeros, and a log-sum-exp of -inf: no NaN, also where the partials have none of the row's keys."""
    found, _, _ = partials(1, torch.float32)
    blank = Partial(slice(0, 2), torch.zeros(2, HEADS, DIM), torch.full((HEADS, 2), -torch.inf))
    out, lse = merged([*found, blank], ROWS, torch.float32)
    assert torch.equal(out[: ROWS - 1], found[0].out)
    assert torch.equal(lse[:, : ROWS - 1], found[0].lse)
    assert not out[ROWS - 1].any()
    assert torch.isneginf(lse[:, ROWS - 1]).all()
    nothing, lse = Merging(ROWS, torch.float32).result(torch.ones(ROWS, HEADS, DIM), torch.float32)
    assert not nothing.any()
    assert torch.isneginf(lse).all()


def test_one_partial_is_the_result() -> None:
    """Of all rows and of the dtype wanted: nothing is copied."""
    out, lse = torch.randn(ROWS, HEADS, DIM), torch.randn(HEADS, ROWS)
    assert merged([Partial(slice(0, ROWS), out, lse)], ROWS, torch.float32)[0] is out


def test_wide_partials_stay_wide() -> None:
    """float64 in, float64 inside and out."""
    out, lse = torch.randn(2, ROWS, HEADS, DIM, dtype=torch.float64), torch.randn(2, HEADS, ROWS, dtype=torch.float64)
    got, got_lse = merged([Partial(slice(0, ROWS), out[i], lse[i]) for i in range(2)], ROWS, torch.float64)
    share = torch.softmax(lse, 0).transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(got, (share * out).sum(0), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(got_lse, torch.logsumexp(lse, 0), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [0, 1, AT_ONCE, 3 * AT_ONCE])
def test_summed(count: int, dtype: torch.dtype) -> None:
    """Any number of gradients, over rows of their own, in the order they come in: one float32 sum, rounded once."""
    random = np.random.default_rng(count)
    summing = Summing(ROWS, dtype)
    total = torch.zeros(ROWS, HEADS, DIM, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for _ in range(count):
        rows = slice(*sorted(random.choice(ROWS, 2, replace=False).tolist()))
        part = torch.from_numpy(random.standard_normal((rows.stop - rows.start, HEADS, DIM))).to(dtype)
        summing.add(rows, part)
        total[rows] += part

    assert torch.equal(summing.result(torch.ones(ROWS, HEADS, DIM)), total.to(dtype))
