"""Calls of a mask: together they are the mask exactly, no pair is in two of them, and a single document needs two."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commdsl.attention.masks import Call, Mask, Rows, calls, joined
from commdsl.attention.placement import Placement, contiguous, zigzag

FULL, CAUSAL = Mask(), Mask(right=0)


def rows_of(placement: Placement, rank: int, gap: int = 0) -> list[Rows]:
    """The rows of a rank, the back half's so many rows behind the front half's."""
    found, offset = [], 0
    for half in placement.runs[rank]:
        for run in half:
            found.append(Rows(offset, run.document, run.begin, run.length))
            offset += run.length
        offset += gap
    return found


def told(rows: list[Rows]) -> tuple[np.ndarray, np.ndarray]:
    """Document and position of each row, -1 where there is none."""
    end = max((one.offset + one.length for one in rows), default=0)
    document, position = np.full(end, -1), np.full(end, -1)
    for one in rows:
        document[one.offset : one.offset + one.length] = one.document
        position[one.offset : one.offset + one.length] = one.begin + np.arange(one.length)
    return document, position


def wanted(mask: Mask, queries: list[Rows], keys: list[Rows]) -> np.ndarray:
    """The mask as its words say, pair by pair."""
    (document, position), (key_document, key_position) = told(queries), told(keys)
    distance = key_position[None, :] - position[:, None]
    found = (document[:, None] == key_document[None, :]) & (document[:, None] >= 0)
    if mask.left is not None:
        found &= distance >= -mask.left
    if mask.right is not None:
        found &= distance <= mask.right
    return found


def covered(found: tuple[Call, ...], shape: tuple[int, ...]) -> np.ndarray:
    """How many calls have each pair."""
    count = np.zeros(shape, int)
    for call in found:
        for first, end, key, key_end, low, high in call.admits():
            distance = np.arange(key_end - key)[None, :] - np.arange(end - first)[:, None]
            inside = np.ones_like(distance, dtype=bool)
            if low is not None:
                inside &= distance >= low
            if high is not None:
                inside &= distance <= high
            assert inside.any(axis=1).all()  # a kernel is given no query without a key
            count[first:end, key:key_end] += inside
    return count


def check(mask: Mask, queries: list[Rows], keys: list[Rows]) -> tuple[Call, ...]:
    expected = wanted(mask, queries, keys)
    found = calls(mask, queries, keys)
    assert np.array_equal(covered(found, expected.shape), expected.astype(int))
    return found


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    bound = st.one_of(st.none(), st.integers(0, 20))
    return Mask(draw(bound), draw(st.one_of(st.just(0), bound)))


@st.composite
def pieces(draw: st.DrawFn) -> list[Rows]:
    """Some pieces of a placement in any order, with gaps between them."""
    ranks, lengths = draw(st.integers(1, 4)), draw(st.lists(st.integers(0, 25), min_size=1, max_size=4))
    placement = draw(st.sampled_from([zigzag, contiguous]))(ranks, lengths)
    runs = [run for halves in placement.runs for half in halves for run in half]
    chosen = draw(st.permutations(runs))[: draw(st.integers(0, len(runs)))]
    found, offset = [], 0
    for run in chosen:
        offset += draw(st.sampled_from([0, 0, 1, 3]))
        found.append(Rows(offset, run.document, run.begin, run.length))
        offset += run.length
    return found


@given(masks(), pieces(), pieces())
def test_calls_are_the_mask(mask: Mask, queries: list[Rows], keys: list[Rows]) -> None:
    """Any pieces of any documents, in any order: every admitted pair is in one call, no other is in any."""
    check(mask, queries, keys)


@pytest.mark.parametrize(("ranks", "length"), [(2, 16), (4, 64), (4, 61), (5, 30), (3, 13)])
def test_one_call_a_visit_of_zigzag(ranks: int, length: int) -> None:
    """A rank's halves next to each other: its own keys are one triangle, an earlier rank's front half is seen by all
    queries, a later rank's keys by the back half; one call each.
    """
    placement = zigzag(ranks, [length])
    for rank, other in product(range(ranks), repeat=2):
        queries, keys = rows_of(placement, rank), rows_of(placement, other)
        found = check(CAUSAL, queries, keys)
        assert len(found) <= 1
        assert not any(call.is_packed for call in found)
        assert all(call.is_causal if rank == other else call.is_full for call in found)
        assert len(check(FULL, queries, keys)) == 1


@pytest.mark.parametrize("placement", [zigzag(4, [61]), contiguous(4, [61])], ids=lambda one: one.name)
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
def test_two_calls_where_halves_lie_apart(mask: Mask, placement: Placement) -> None:
    """A gap between the halves of a visitor costs one call, of a rank's own keys two."""
    for rank, other in product(range(4), repeat=2):
        found = check(mask, rows_of(placement, rank), rows_of(placement, other, gap=2))
        assert len(found) <= (3 if rank == other else 2)
        assert all(call.is_full or call.is_causal for call in found)


def test_a_window() -> None:
    """Of a contiguous placement's neighbours one band each, of its own keys one, of others none."""
    placement = contiguous(6, [600])
    for rank, other in product(range(6), repeat=2):
        found = check(Mask(49, 0), rows_of(placement, rank), rows_of(placement, other))
        assert len(found) == (1 if other in (rank, rank - 1) else 0)
        assert all(not call.is_full and call.left is not None for call in found)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
def test_packed_documents_are_packed_calls(mask: Mask) -> None:
    """However many documents: as many calls as halves see halves, each a sequence for every document."""
    placement = zigzag(4, [40, 17, 64, 33])
    for rank, other in product(range(4), repeat=2):
        found = check(mask, rows_of(placement, rank), rows_of(placement, other))
        assert len(found) <= (4 if mask == FULL else 3)
        assert all(len(call.queries) > 4 for call in found)


def test_short_documents_leave_gaps() -> None:
    """Of documents with fewer tokens than parts a rank has some: those between which few rows lie are one call all the
    same, and queries of documents that no visitor has are sequences without keys.
    """
    lengths = np.random.default_rng(0).integers(1, 50, 300).tolist()
    placement = zigzag(8, lengths)
    for other in range(8):
        found = check(CAUSAL, rows_of(placement, 3), rows_of(placement, other))
        assert len(found) <= 8
    assert any(call.has_gaps for call in found)


def test_pieces_of_other_ranks() -> None:
    """Of pieces whose origins are mixed, what lies together is one call: here rank 0, then 2 and 3, twice."""
    placement = zigzag(4, [96])
    queries, keys, origin = rows_of(placement, 1), [], (0, 2, 3)
    for half in range(2):
        for piece, rank in enumerate(origin):
            run = placement.runs[rank][half][0]
            keys.append(Rows((half * 3 + piece) * 4, 0, run.begin + 4 * piece, 4))
    assert len(check(CAUSAL, queries, keys)) == 3


def test_joined() -> None:
    """Rows that follow each other in the tensor and in the document are one run; empty ones are gone."""
    assert joined([Rows(4, 0, 14, 2), Rows(0, 0, 10, 4), Rows(6, 0, 16, 0), Rows(6, 1, 16, 1)]) == [
        Rows(0, 0, 10, 6),
        Rows(6, 1, 16, 1),
    ]
