"""Which tokens a rank has: every token once, balanced, for any length and number of ranks; and there and back.

Assumes ranks that are threads. Does not compute attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from thread_ranks import at_once, in_group, outcomes  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - as above
from commdsl import attention  # noqa: E402 - as above
from commdsl.attention.placement import Placement, Run, contiguous, zigzag  # noqa: E402 - as above

MAKERS = {"zigzag": zigzag, "contiguous": contiguous}
DOCUMENTS = [
    (0,),
    (1,),
    (7,),
    (64,),
    (97,),
    (0, 0),
    (5, 0, 11),
    (1,) * 13,
    (3, 130, 0, 1, 29, 64),
    (17,) * 40,
]
RANKS = (1, 2, 3, 4, 7, 16)


def tokens(placement: Placement, rank: int) -> list[tuple[int, int]]:
    """Document and position of each row of a rank."""
    runs = [run for half in placement.runs[rank] for run in half]
    return [(run.document, position) for run in runs for position in range(run.begin, run.begin + run.length)]


def half_sizes(placement: Placement) -> list[int]:
    return [sum(run.length for run in half) for halves in placement.runs for half in halves]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_token_once(name: str, ranks: int) -> None:
    """Every token is on one rank, in one row; no run is empty; rows and half_rows count them."""
    for lengths in DOCUMENTS:
        placement = MAKERS[name](ranks, lengths)
        found = [token for rank in range(ranks) for token in tokens(placement, rank)]
        assert sorted(found) == [(document, at) for document, length in enumerate(lengths) for at in range(length)]
        assert all(run.length > 0 for halves in placement.runs for half in halves for run in half)
        assert [placement.rows(rank) for rank in range(ranks)] == [len(tokens(placement, r)) for r in range(ranks)]
        assert (placement.name, placement.ranks) == (name, ranks)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("ranks", RANKS)
def test_balance(name: str, ranks: int) -> None:
    """Ranks differ by one token at most and so do halves, so that no half is longer than the tokens by their number."""
    for lengths in DOCUMENTS:
        placement = MAKERS[name](ranks, lengths)
        rows = [placement.rows(rank) for rank in range(ranks)]
        assert max(rows) - min(rows) <= 1
        assert max(half_sizes(placement)) - min(half_sizes(placement)) <= 1
        assert placement.half_rows == -(-sum(lengths) // (2 * ranks))


@pytest.mark.parametrize("ranks", RANKS)
def test_zigzag_of_each_document(ranks: int) -> None:
    """Every document is cut into 2 P parts equal to within one token, of which rank r has the r-th from both ends."""
    for lengths in DOCUMENTS:
        placement = zigzag(ranks, lengths)
        for document, length in enumerate(lengths):
            parts = [0] * (2 * ranks)
            begins: dict[int, int] = {}
            for rank, halves in enumerate(placement.runs):
                for part, half in zip((rank, 2 * ranks - 1 - rank), halves, strict=True):
                    for run in half:
                        if run.document == document:
                            assert part not in begins
                            parts[part], begins[part] = run.length, run.begin
            assert sum(parts) == length
            assert max(parts) - min(parts) <= 1
            assert all(begins[one] < begins[other] for one, other in pairwise(sorted(begins)))


@pytest.mark.parametrize("ranks", RANKS)
def test_contiguous_is_the_stream(ranks: int) -> None:
    """The ranks' rows one after the other are the documents one after the other."""
    for lengths in DOCUMENTS:
        placement = contiguous(ranks, lengths)
        found = [token for rank in range(ranks) for token in tokens(placement, rank)]
        assert found == [(document, at) for document, length in enumerate(lengths) for at in range(length)]


def test_causal_work_is_even() -> None:
    """Under a causal mask ranks with the same number of rows admit the same number of pairs in zigzag placement."""
    placement = zigzag(8, (8 * 2 * 11,))
    work = {sum(position + 1 for _, position in tokens(placement, rank)) for rank in range(8)}
    assert len(work) == 1


# --- there and back ---------------------------------------------------------------------------------------------------


def ends_of(lengths: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_round_trip(name: str, ranks: int) -> None:
    """What is sharded and put together again is the sequence, on every rank; packed or not, of any length; and the rows
    are those that the placement says.
    """

    def run(rank: int, group: str) -> None:
        for number, lengths in enumerate(DOCUMENTS):
            total, ends = sum(lengths), ends_of(lengths)
            x = torch.randn(2, total, 3, generator=torch.Generator().manual_seed(number))
            said: dict[str, Any] = {} if len(lengths) == 1 else {"cu_seqlens": torch.tensor(ends, dtype=torch.int32)}
            mine = attention.shard_sequence(x, 1, group, name, **said)
            wanted = [ends[document] + at for document, at in tokens(MAKERS[name](ranks, lengths), rank)]
            assert torch.equal(mine, x[:, wanted])
            assert mine.data_ptr() != x.data_ptr() or not mine.numel()
            back = attention.unshard_sequence(mine, -2, group, name, length=total, **said)
            assert torch.equal(back, x)
            assert back.is_contiguous()

    in_group(ranks, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.float64], ids=str)
def test_any_dtype_and_dimension(dtype: Any) -> None:
    """Nothing is computed, so every dtype comes back as it was, along any dimension, also from a view."""
    values = torch.randint(0, 2, (5, 4, 9), generator=torch.Generator().manual_seed(0)).to(dtype)

    def run(rank: int, group: str) -> bool:
        found = []
        for dim in range(3):
            for x in (values, values.mT.contiguous().mT):
                mine = attention.shard_sequence(x, dim, group)
                found.append(torch.equal(attention.unshard_sequence(mine, dim, group, length=x.shape[dim]), x))
        return all(found)

    assert in_group(3, run) == [True] * 3


@pytest.mark.parametrize("lengths", [(12,), (11,), (2,), (3, 0, 8)], ids=str)
def test_gradients(lengths: tuple[int, ...]) -> None:
    """Of a rank's rows the gradient is the sum over all ranks of what each has for them; of the whole it is that of the
    own rows, and zero elsewhere.
    """
    total, ends = sum(lengths), ends_of(lengths)
    weights = [torch.randn(total, 2, generator=torch.Generator().manual_seed(rank)).double() for rank in range(3)]

    def run(rank: int, group: str) -> None:
        x = torch.randn(total, 2, dtype=torch.float64).requires_grad_()
        mine = attention.shard_sequence(x, 0, group, cu_seqlens=ends)
        mine.retain_grad()
        whole = attention.unshard_sequence(mine, 0, group, cu_seqlens=ends)
        (whole * weights[rank]).sum().backward()
        rows = [ends[document] + at for document, at in tokens(zigzag(3, lengths), rank)]
        summed = sum(weights)
        torch.testing.assert_close(mine.grad, summed[rows])
        wanted = torch.zeros(total, 2, dtype=torch.float64)
        wanted[rows] = summed[rows]
        torch.testing.assert_close(x.grad, wanted)

    in_group(3, run)


def test_positions() -> None:
    """Positions are those in a row's own document, also of documents without tokens, int64."""

    def run(rank: int, group: str) -> None:
        for name, make in MAKERS.items():
            for lengths in DOCUMENTS:
                found = attention.positions(None, group, name, cu_seqlens=ends_of(lengths))
                assert found.dtype == torch.int64
                assert found.tolist() == [at for _, at in tokens(make(3, lengths), rank)]
        x = torch.arange(29)
        assert torch.equal(attention.positions(29, group), attention.shard_sequence(x, 0, group))
        assert attention.positions(29, group, device="meta").device.type == "meta"

    in_group(3, run)


@pytest.mark.filterwarnings("error:Dynamo detected")
def test_compiled() -> None:
    """A compiled program takes all of it as one graph, with gradients, for any length."""
    torch._dynamo.reset()
    names = commdsl.threads(2)

    def there_and_back(x: Any, group: str) -> Any:
        mine = attention.shard_sequence(x, 1, group, "zigzag")
        at = attention.positions(x.shape[1], group, "zigzag")
        return attention.unshard_sequence(mine * (at + 1)[:, None], 1, group, "zigzag", length=x.shape[1])

    compiled = torch.compile(there_and_back, fullgraph=True, backend="eager")

    def run(rank: int) -> list[Any]:  # torch traces in one thread at a time: the peer does not
        found = []
        for length in (9, 14):
            x = torch.ones(2, length, 3, requires_grad=True)
            y = (compiled, there_and_back)[rank](x, names[rank])
            y.sum().backward()
            mine = attention.shard_sequence(torch.arange(length) + 1.0, 0, names[rank])
            assert x.grad.sum() == 2 * 2 * 3 * mine.sum()
            found.append(y.detach())
        return found

    for one, other in zip(*at_once(2, run), strict=True):
        assert torch.equal(one, other)
        assert one[0, :, 0].tolist() == [*range(1, one.shape[1] + 1)]


def test_one_rank_has_all() -> None:
    """In a group of one nothing moves, and the order of a single document is the sequence's own."""

    def run(rank: int, group: str) -> None:
        x = torch.randn(3, 11)
        assert torch.equal(attention.shard_sequence(x, 1, group), x)
        assert torch.equal(attention.unshard_sequence(x, 1, group), x)

    in_group(1, run)


def test_a_placement_of_ones_own() -> None:
    """A Placement in place of a name is used, once it is seen to hold every token."""
    mine = Placement("odd and even", (((Run(0, 3, 2),), (Run(0, 0, 1),)), ((), (Run(0, 1, 2),))))

    def run(rank: int, group: str) -> list[int]:
        x = torch.arange(5)
        rows = attention.shard_sequence(x, 0, group, mine)
        assert torch.equal(attention.unshard_sequence(rows, 0, group, mine, length=5), x)
        return rows.tolist()

    assert in_group(2, run) == [[3, 4, 0], [1, 2]]


# --- what is refused --------------------------------------------------------------------------------------------------

X = torch.zeros(8, 3)
HOLES = {
    "of 3 ranks": zigzag(3, (8,)),
    "document 0 of 8 tokens, of which it has 7,": zigzag(2, (7,)),
    "the run of 4 tokens from 3 of document 0": Placement("own", (((Run(0, 0, 4),), ()), ((Run(0, 3, 4),), ()))),
    "the run of 2 tokens from 0 of document 1": zigzag(2, (0, 8)),
    "the run of 0 tokens from 8 of document 0": Placement("own", (((Run(0, 0, 8),), ()), ((Run(0, 8, 0),), ()))),
}


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda g: attention.shard_sequence(X, 0, g, "striped"), commdsl.ArgumentError, '"zigzag", "contiguous"'),
        (lambda g: attention.shard_sequence(X, 0, g, None), commdsl.ArgumentError, "not None"),
        (lambda g: attention.shard_sequence(X, 2, g), commdsl.ArgumentError, "-2 to 1, not 2"),
        (lambda g: attention.shard_sequence([1], 0, g), commdsl.TensorError, "takes a torch tensor"),
        (lambda g: attention.shard_sequence(X, 0, g, cu_seqlens=[0, 7]), commdsl.ArgumentError, "ends with 7"),
        (lambda g: attention.shard_sequence(X, 0, g, cu_seqlens=[1, 8]), commdsl.ArgumentError, "begins with 0"),
        (
            lambda g: attention.shard_sequence(X, 0, g, cu_seqlens=[0, 5, 4, 8]),
            commdsl.ArgumentError,
            "never goes down",
        ),
        (lambda g: attention.shard_sequence(X, 0, g, cu_seqlens=[0, 8.0]), commdsl.ArgumentError, "whole numbers"),
        (lambda g: attention.shard_sequence(X, 0, g, cu_seqlens=[]), commdsl.ArgumentError, "begins with 0"),
        (lambda g: attention.shard_sequence(X, 0, g, cu_seqlens=8), commdsl.ArgumentError, "a list or a vector"),
        (lambda g: attention.unshard_sequence(X, 0, g, length=13), commdsl.TensorError, "7 of 13 tokens"),
        (lambda g: attention.unshard_sequence(X, 0, g, length=-1), commdsl.ArgumentError, "`length`"),
        (lambda g: attention.positions(None, g), commdsl.ArgumentError, "either `length` or `cu_seqlens`"),
        (lambda g: attention.positions(7, "nobody"), commdsl.GroupError, "nobody"),
        *(
            (lambda g, own=own: attention.shard_sequence(X, 0, g, own), commdsl.ArgumentError, words)
            for words, own in HOLES.items()
        ),
    ],
)
def test_refused(call: Any, kind: type[Exception], words: str) -> None:
    """What cannot be meant is one line that says what would do, before any rank is waited for."""
    with pytest.raises(kind) as caught:
        call(commdsl.threads(2)[0])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_that_differ_need_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a length every rank has as many rows; ranks that have not are told so."""
    monkeypatch.setenv("COMMDSL_TIMEOUT", "20")
    names = commdsl.threads(2)

    def run(rank: int) -> Any:
        return attention.unshard_sequence(torch.zeros(3 + rank), 0, names[rank])

    assert {type(found) for found in outcomes(2, run)} <= {commdsl.AgreementError, commdsl.PeerError}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"placement": "zigzag"}, {"placement": "contiguous"}, ("placement zigzag", "placement contiguous")),
        ({"cu_seqlens": [0, 2, 12]}, {"cu_seqlens": [0, 10, 12]}, ("12 tokens in 2 documents",)),
        ({"dim": 0}, {"dim": 1}, ("dimension 0", "dimension 1")),
    ],
)
def test_unshard_compares(first: dict[str, Any], second: dict[str, Any], words: Sequence[str]) -> None:
    """Ranks that put rows of one size together in different ways both raise, and name both sides."""
    names = commdsl.threads(2)

    def run(rank: int) -> Any:
        settings = {"dim": 0, **(first, second)[rank]}
        return attention.unshard_sequence(torch.zeros(6, 6), group=names[rank], **settings)

    found = outcomes(2, run)

    assert {type(one) for one in found} == {commdsl.AgreementError}
    assert all(word in str(one) for one in found for word in words)
