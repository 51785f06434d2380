"""Keys of a group before, as the living have them; what is refused of who lives. `test_trouble.py` ends ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from captured import launches_only  # noqa: E402 - after the check for torch
from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - after the check for torch
from commdsl import ep  # noqa: E402 - after the check for torch
from commdsl.runtime.errors import DispatchError, GroupError, KeysError  # noqa: E402 - after the check for torch


def living(ranks: tuple[int, ...], before: int) -> ep.Living:
    """As far as keys are concerned."""
    return ep.Living(None, ranks, before)  # type: ignore[arg-type] # no group is asked


@pytest.mark.parametrize(("ranks", "before"), [((0, 2), 3), ((1,), 4), ((0, 1, 2), 3), ((0, 3, 4, 6), 7)])
@pytest.mark.parametrize("share", [1, 5])
def test_keys(ranks: tuple[int, ...], before: int, share: int) -> None:
    """Key j of a rank that lives is its key j; those of ranks that are gone are dropped and counted, call by call; a
    key that was dropped is, and is not counted. All of it a graph can capture.
    """
    keys = share * before
    known = living(ranks, before).key_map(keys, "cpu")
    given = torch.randint(0, keys + 1, (40, 3), dtype=torch.int32)
    lost = 0
    for _ in range(2):
        with launches_only():
            found = known(given)
        assert found.dtype is torch.int32
        assert found.is_contiguous()
        for before_it, after in zip(given.flatten().tolist(), found.flatten().tolist(), strict=True):
            rank, which = divmod(before_it, share)
            assert after == (ranks.index(rank) * share + which if rank in ranks else share * len(ranks))
            lost += rank < before and rank not in ranks
        assert known.lost.item() == lost
    assert known.num_keys == share * len(ranks)


def test_a_key_that_there_is_not() -> None:
    """Stays none, and the call that takes it says so."""
    known = living((0,), 2).key_map(4, "cpu")
    given = torch.tensor([[0], [4], [5], [0]], dtype=torch.int32)
    assert known(given).flatten().tolist() == [0, known.num_keys, 5, 0]
    assert known(-given - 1).flatten().tolist() == [-1, -5, -6, -1]

    def work(rank: int, group: str) -> None:
        experts = ep.Experts(ep.Limits(4, 1, 4, (4, 2), 4), group, "cpu", params={"E": known.num_keys})
        with pytest.raises(KeysError, match="key 0 of row 2 of rank 0 is 5"):
            experts.dispatch((torch.ones(4, 1), torch.ones(4, 1).half()), known(given))

    in_group(1, work)


def test_refused() -> None:
    """Keys that ranks do not share alike, and groups of threads."""
    for keys in (0, 7):
        with pytest.raises(DispatchError, match="as many on each of 3 ranks"):
            living((0, 2), 3).key_map(keys, "cpu")
    (name,) = commdsl.threads(1)
    with pytest.raises(GroupError, match="threads"):
        ep.Living.of(name)
