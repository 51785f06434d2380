"""One loop runs any table of visits: forward and gradients against full attention in float64, and the law that ties the
visits to the mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_ranks import Shown, Simulated, random_rows, rotation, shown, whole
from thread_ranks import in_group

from commdsl.attention import loop
from commdsl.attention.masks import Mask
from commdsl.attention.pieces import judge, layout_of
from commdsl.attention.placement import Placement, contiguous, zigzag
from commdsl.runtime.errors import MaskError, TensorError

FULL, CAUSAL = Mask(), Mask(right=0)
BOUND = 1e-5


def run(
    table: list[Shown],
    placement: Placement,
    mask: Mask,
    heads: tuple[int, int] = (2, 2),
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    carries: bool = False,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Of each rank the tensors given (q, k, v, dout), those made (out, lse, dq, dk, dv), and the same in float64."""
    sizes = (heads[0], heads[1], heads[1], heads[0])
    given = [random_rows(placement, batch, count, 8, dtype, seed) for seed, count in enumerate(sizes)]
    forth, back = Simulated(table), Simulated(table, carries)

    def rank_does(rank: int, group: str) -> list[torch.Tensor]:
        q, k, v, dout = (one[rank] for one in given)
        settings: dict[str, Any] = {"placement": placement, "mask": mask, "scale": 0.4, "group": group}
        out, lse = loop.forward(forth, q, k, v, **settings)
        return [out, lse, *loop.backward(back, dout, q, k, v, out, lse, **settings)]

    made = in_group(placement.ranks, rank_does)
    exact = [[one.double().requires_grad_() for one in ranks] for ranks in given[:3]]
    outs, sums = whole(placement, mask, *exact, 0.4)
    slopes = torch.autograd.grad(outs, [one for ranks in exact for one in ranks], [one.double() for one in given[3]])
    ranks = placement.ranks
    wanted = [
        [outs[r].detach(), sums[r].detach(), slopes[r], slopes[ranks + r], slopes[2 * ranks + r]] for r in range(ranks)
    ]
    return given, made, wanted


def check(made: list[Any], wanted: list[Any], bound: float = BOUND) -> None:
    for one, other in zip(made, wanted, strict=True):
        for found, exact in zip(one, other, strict=True):
            scale = exact[exact.isfinite()].abs().amax() if exact.numel() else 0.0
            torch.testing.assert_close(found.double(), exact, rtol=0, atol=bound * max(1.0, float(scale)))


PLACEMENTS = {
    "even": zigzag(4, [64]),
    "uneven": zigzag(4, [61]),
    "short": zigzag(4, [5]),
    "one token": contiguous(4, [1]),
    "packed": zigzag(4, [40, 0, 17, 3, 33]),
    "contiguous": contiguous(4, [45, 30]),
}
MASKS = {"full": FULL, "causal": CAUSAL, "window": Mask(9, 0), "both sides": Mask(4, 6)}


@pytest.mark.parametrize("carries", [False, True], ids=["owner sums", "carried"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_against_full_attention(placement: Placement, mask: Mask, carries: bool) -> None:
    """A rotation of halves: any length, packed or not, any mask; forward and all gradients."""
    _, made, wanted = run(rotation(4, 2), placement, mask, carries=carries)
    check(made, wanted)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(("heads", "batch"), [((4, 2), 1), ((3, 1), 2), ((2, 2), 3)], ids=["GQA", "MQA", "batch"])
def test_heads_and_batch(heads: tuple[int, int], batch: int, pieces: int) -> None:
    """Grouped heads and batches, of pieces that each come in an order of their own."""
    _, made, wanted = run(rotation(5, 2 * pieces, seed=7), zigzag(5, [77]), CAUSAL, heads, batch)
    check(made, wanted)


@pytest.mark.parametrize(("ranks", "pieces", "length"), [(2, 1, 9), (3, 4, 50), (7, 6, 100), (12, 1, 131)])
def test_ranks_and_pieces(ranks: int, pieces: int, length: int) -> None:
    """More than eight visits are merged on the way; pieces may be longer than what is left of a half."""
    _, made, wanted = run(rotation(ranks, 2 * pieces, seed=ranks), zigzag(ranks, [length]), CAUSAL, carries=pieces > 1)
    check(made, wanted)


def test_two_runs_have_the_same_bits() -> None:
    """Nothing depends on when threads run."""
    first, second = (run(rotation(4, 4, seed=1), zigzag(4, [61]), CAUSAL)[1] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_bfloat16_is_rounded_once() -> None:
    """On the CPU the output differs from exact attention of the same inputs by one rounding."""
    _, made, wanted = run(rotation(4, 2), zigzag(4, [64]), CAUSAL, dtype=torch.bfloat16)
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one[0].double(), other[0], rtol=2**-8, atol=1e-5)
        assert one[1].dtype == torch.float32


def test_float64() -> None:
    """float64 stays so, but for the sums that travel, which are float32."""
    _, made, wanted = run(rotation(3, 2), zigzag(3, [40]), CAUSAL, dtype=torch.float64)
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one[:3], other[:3], rtol=1e-12, atol=1e-12)
    check(made, wanted)


def causal_rotation(ranks: int) -> list[Shown]:
    """Each rank is shown the front half of the ranks before it, and both halves of those behind: what zigzag sees."""
    table = rotation(ranks, 2)
    for one in table:
        owner = one.origin[0][:, 1, 0]
        one.origin[0][np.arange(ranks) > owner, 1] = -1
    return table


def test_what_is_not_shown_is_not_read() -> None:
    """Where the schedule leaves out what causal attention does not see, three quarters of the halves visit."""
    _, made, wanted = run(causal_rotation(4), zigzag(4, [61]), CAUSAL)
    check(made, wanted)


# --- the law ----------------------------------------------------------------------------------------------------------


def law(table: list[Shown], placement: Placement, mask: Mask) -> str:
    try:
        judge("simulated", table, layout_of("simulated", table, placement, False), mask)
    except MaskError as error:
        return str(error)
    return ""


def test_the_law_holds() -> None:
    """Of rotations for any mask and placement, and of one that leaves out what causal zigzag does not see."""
    for placement in PLACEMENTS.values():
        for mask in MASKS.values():
            assert law(rotation(4, 2), placement, mask) == ""
            assert law(rotation(4, 6, seed=3), placement, mask) == ""
    assert law(causal_rotation(4), zigzag(4, [64]), CAUSAL) == ""


def test_a_piece_that_never_comes() -> None:
    """What causal zigzag does not need, full attention does, and so does another placement."""
    words = "on rank 1 queries see keys in the back half of rank 0, which visits it never, not once"
    assert words in law(causal_rotation(4), zigzag(4, [64]), FULL)
    assert words in law(causal_rotation(4), contiguous(4, [64]), CAUSAL)
    table = rotation(4, 6)
    table[2].origin[0][3, 4] = -1
    assert "on rank 3 queries see keys in piece 1 of the back half of rank 1" in law(table, zigzag(4, [64]), FULL)


def test_a_piece_that_comes_twice() -> None:
    """Seen twice it would count twice; where nobody sees it, it may come as often as it likes."""
    table = [*rotation(4, 2), rotation(4, 2)[1]]
    assert "visits it 2 times" in law(table, zigzag(4, [64]), FULL)
    assert "visits it 2 times" in law(table, contiguous(4, [64]), Mask(20, 0))
    assert law(table, contiguous(4, [64]), Mask(0, 0)) == ""


def test_every_hole_is_found() -> None:
    """Each entry of a table gone: refused just where the mask admits a pair of it, by brute force."""
    for name, placement in PLACEMENTS.items():
        for mask in (CAUSAL, Mask(9, 0)):
            for step, rank, chunk in np.ndindex(4, 4, 4):
                table = rotation(4, 4, seed=5)
                owner, place = table[step].origin[0][rank, chunk].tolist()
                table[step].origin[0][rank, chunk] = -1
                needed = _pairs(placement, mask, rank, owner, place)
                assert bool(law(table, placement, mask)) == needed, (name, mask, step, rank, chunk)


def _pairs(placement: Placement, mask: Mask, rank: int, owner: int, place: int) -> bool:
    """Whether a query of the rank sees a row of that piece, token by token."""
    half, piece = divmod(place, 2)
    rows = [
        (run.document, at) for run in placement.runs[owner][half] for at in range(run.begin, run.begin + run.length)
    ]
    size = -(-placement.half_rows // 2)
    empty = 2 * size - len(rows)
    padded = [None] * empty + rows if half == 0 else rows + [None] * empty
    keys = [one for one in padded[piece * size : (piece + 1) * size] if one is not None]
    queries = [
        (run.document, at)
        for half in placement.runs[rank]
        for run in half
        for at in range(run.begin, run.begin + run.length)
    ]
    left = mask.left if mask.left is not None else 10**9
    return any(d == e and -left <= j - i <= 0 for d, i in queries for e, j in keys)


def test_keys_and_values_come_together() -> None:
    """Keys of one piece beside values of another are refused."""
    one = rotation(2, 2)[0].origin[0]
    assert "keys of one piece and values of another" in law([Shown((one, one[::-1]))], zigzag(2, [8]), FULL)


def test_the_loop_refuses_before_it_sends() -> None:
    """Every rank raises, with the same words; so does a schedule of another number of ranks."""

    def refused(table: list[Shown], words: str) -> None:
        placement = zigzag(3, [24])

        def rank_does(rank: int, group: str) -> str:
            q = torch.randn(8, 1, 1, 8)
            with pytest.raises(MaskError, match=words) as caught:
                loop.forward(Simulated(table), q, q, q, placement=placement, mask=FULL, group=group)
            return str(caught.value)

        assert len(set(in_group(3, rank_does))) == 1

    refused(causal_rotation(3), "never, not once")
    refused(rotation(4, 2), "of 4 ranks, the placement of 3")
    refused(rotation(3, 3), r"\[2 blocks, K blocks\]")
    refused([shown(np.zeros((3, 2, 2)))], "2 times")


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((8, 1, 2, 8), (8, 1, 2, 8), (8, 1, 1, 8)), "v \\(8, 1, 1, 8\\)"),
        (((8, 1, 3, 8), (8, 1, 2, 8), (8, 1, 2, 8)), "not a multiple of 2"),
        (((7, 1, 2, 8), (8, 1, 2, 8), (8, 1, 2, 8)), "has 8 rows, q has 7"),
        (((8, 2, 8), (8, 2, 8), (8, 2, 8)), "\\(rows, batch, heads, dim\\)"),
    ],
)
def test_refused_tensors(shapes: Any, words: str) -> None:
    """Shapes that do not fit each other or the placement."""

    def rank_does(rank: int, group: str) -> None:
        given = [torch.randn(shape) for shape in shapes]
        with pytest.raises(TensorError, match=words):
            loop.forward(Simulated(rotation(1, 2)), *given, placement=zigzag(1, [8]), mask=FULL, group=group)

    in_group(1, rank_does)
