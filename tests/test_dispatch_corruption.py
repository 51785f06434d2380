"""One number of a valid dispatch is changed: the validator names the place, or the change does no harm.

Harmless is what leaves every row where it was, there and back, and every query that has rows with the keys it had.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent.parent))
from dispatch_plans import Case, cases  # noqa: E402 - after the check for torch

from commdsl import dispatch  # noqa: E402 - after the check for torch
from commdsl.dispatch import AttentionLayout, Metadata, MetadataError, QKVMetadata  # noqa: E402 - as above
from commdsl.planner.chance import varied  # noqa: E402 - after the check for torch

PARTS = ("fwd_q", "rev_q", "fwd_k", "rev_k", "attention")


@dataclass(frozen=True)
class Change:
    """One number of one table, and what became of it."""

    field: str
    place: tuple[int, ...]
    before: int
    after: int


def corrupted(made: QKVMetadata, dice: random.Random) -> tuple[QKVMetadata, Change]:
    """A copy with one number changed: a little, to another one of the table, or to anything."""
    while True:
        part = dice.choice([name for name in PARTS if getattr(made, name) is not None])
        numbers = getattr(made, part)
        tables = [field.name for field in fields(numbers) if _changeable(getattr(numbers, field.name))]
        name = dice.choice(tables)
        table = getattr(numbers, name)
        if isinstance(table, tuple):
            at = dice.randrange(len(table))
            after = _other(table[at], list(table), dice)
            new: Any = (*table[:at], after, *table[at + 1 :])
            place, before = (at,), table[at]
        else:
            place = tuple(dice.randrange(size) for size in table.shape)
            before = int(table[place])
            is_flag = table.dtype is torch.bool
            after = 1 - before if is_flag else _other(before, table.flatten().tolist(), dice)
            if not is_flag and not _fits(after, table.dtype):
                continue
            wide = table.to(torch.int64, copy=True)
            wide[place] = after
            new = wide.to(table.dtype)
        changed = replace(numbers, **{name: new})
        return made._replace(**{part: changed}), Change(f"{part}.{name}", place, before, after)


def _changeable(table: Any) -> bool:
    return (isinstance(table, torch.Tensor) and table.numel() > 0) or isinstance(table, tuple)


def _other(number: int, others: list[int], dice: random.Random) -> int:
    near = [number + step for step in (-2, -1, 1, 2)]
    far = [*others, dice.randint(-3, 60), -number, 2 * number, number + 2**31]
    return dice.choice([one for one in (*near, *near, *far, 0) if one != number])


def _fits(number: int, dtype: torch.dtype) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= number <= limits.max


def effect(made: QKVMetadata, case: Case) -> list[Any]:
    """Where every row goes, there and back, and which keys each query sees that has rows."""
    ranks, rows, found = case.plan.num_ranks, max(case.rows), []
    for there, home, copies in ((made.fwd_q, made.rev_q, 1), (made.fwd_k, made.rev_k, case.copies)):
        if there is None:
            continue
        tensor = torch.arange(1, ranks * rows + 1).view(ranks, rows, 1)
        width = max(there.num_total_recv_tokens)
        moved = dispatch.orchestrate_simulate(tensor, torch.zeros(ranks, width, 1, dtype=torch.int64), there)
        back = torch.zeros(ranks, copies * rows, 1, dtype=torch.int64)
        found += [moved, dispatch.orchestrate_simulate(moved, back, home)]
    if made.attention is not None:
        queries, keys = made.attention.cu_seqlens_q, made.attention.cu_seqlens_kv
        sizes = [torch.diff(sums, dim=1, prepend=torch.zeros(ranks, 1, dtype=torch.int64)) for sums in (queries, keys)]
        seen = sizes[0] * sizes[1] > 0
        found += [part * seen for part in (*sizes, made.attention.kv_begin)]
    return found


def is_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_ten_thousand_corruptions(turns: Callable[[int], int]) -> None:
    """Of 10,000 corruptions, or the first of them where not all sweeps run, each is refused with its field and rank, or
    moves no row; no other exception is raised.
    """
    count = turns(10_000)
    dice = random.Random(4)
    homeless = []
    drawn = [case for case in cases(varied(4, 24, 64), seed=3000) if max(case.rows) > 2]
    known = [effect(case.metadata, case) for case in drawn]
    counted: Counter[str] = Counter()
    named: Counter[str] = Counter()
    for at in range(count):
        case = drawn[at % len(drawn)]
        made = case.metadata
        if at % 3 == 0:
            made = QKVMetadata(*(None if one is None else one.normalize_dtype() for one in made[:4]), made[4])
        wrong, change = corrupted(made, dice)
        try:
            dispatch.validate(*wrong, mask=case.plan.mask)
            found = effect(wrong, case)  # a shard that stays may be longer than its tensor, which only who has it knows
        except MetadataError as error:
            homeless += [(change, str(error))] if error.rank is None else []
            counted["refused"] += 1
            named["exactly" if _is_named(error, change) else "elsewhere"] += 1
        else:
            assert is_same(found, known[at % len(drawn)]), change
            counted["harmless"] += 1

    assert counted.total() == count
    assert homeless == []
    # Harmless are some 46 of all: lengths of last shards that go nowhere, padding counted as shards, empty spans.
    assert counted["refused"] > 0.99 * count
    # Most are named where they are, the rest where what they contradict is: a length moves the offsets that follow.
    assert named["exactly"] > 0.8 * counted["refused"]


def _is_named(error: MetadataError, change: Change) -> bool:
    place = (error.rank, error.shard if error.source is None else error.source, error.replica)
    return error.field == change.field and all(
        a == b for a, b in zip(change.place, place, strict=False) if b is not None
    )


def an_example() -> QKVMetadata:
    torch.manual_seed(0)
    return dispatch.create_qkv_dispatch(4, 64, 2, 4)


def refused(made: QKVMetadata, part: str, **change: Any) -> str:
    """What the validator says when fields of a part are replaced."""
    with pytest.raises(MetadataError) as caught:
        dispatch.validate(*made._replace(**{part: replace(getattr(made, part), **change)}))
    return str(caught.value)


def test_forms() -> None:
    """Shapes, devices, dtypes and fields that no Metadata has are refused by name."""
    made = an_example()
    there = made.fwd_q

    assert "fwd_q.world_size" in refused(made, "fwd_q", world_size=None)
    assert "fwd_q.seq_len: expected (3," in refused(made, "fwd_q", world_size=3)
    assert "fwd_q.dst_offset: expected" in refused(made, "fwd_q", dst_offset=there.dst_offset[:, 1:])
    assert "fwd_q.num_recv_tokens: expected (4, 5)" in refused(made, "fwd_q", num_recv_tokens=torch.zeros(4, 4).long())
    assert "fwd_q.num_seqs: expected (4,)" in refused(made, "fwd_q", num_seqs=there.num_seqs[:2])
    assert "whole numbers" in refused(made, "fwd_q", seq_len=there.seq_len.float())
    assert "fwd_q.seq_len: expected a dense tensor, got meta" in refused(
        made, "fwd_q", seq_len=there.seq_len.to("meta")
    )
    assert "torch.sparse_coo" in refused(made, "fwd_q", seq_len=there.seq_len.to_sparse())
    assert "fwd_q.seq_len: expected torch.Tensor, got list" in refused(made, "fwd_q", seq_len=there.seq_len.tolist())
    assert "got ndarray" in refused(made, "fwd_q", seq_len=there.seq_len.numpy())
    assert "normalised numbers have their dtype" in refused(made, "fwd_q", normalized=True)
    assert "only a way back has it" in refused(made, "fwd_q", recv_seq_lens=there.seq_len)
    assert "fwd_q.num_total_recv_tokens: expected 4 numbers" in refused(made, "fwd_q", num_total_recv_tokens=64)
    assert "rev_q.seq_recv_mask" in refused(made, "rev_q", seq_recv_mask=there.seq_len)
    assert "rev_k.seq_recv_mask" in refused(made, "rev_k", seq_recv_mask=None)
    assert "rev_k.recv_seq_lens" in refused(made, "rev_k", recv_seq_lens=None)


def test_parts_belong_together() -> None:
    """Keys need a way back and queries with one destination; the parts of two dispatches are not one."""
    made = an_example()
    torch.manual_seed(1)
    other = dispatch.create_qkv_dispatch(4, 64, 2, 4)

    for wrong, message in (
        ((made.fwd_q, made.rev_q, made.fwd_k), "fwd_k: expected None"),
        ((made.fwd_q, made.rev_q, None, made.rev_k), "rev_k: expected None"),
        ((made.fwd_q, made.rev_q, None, None, made.attention), "attention: expected None"),
        ((made.fwd_k, made.rev_k, made.fwd_k, made.rev_k), "fwd_q.dst_rank"),
        ((made.fwd_q, made.rev_q, made.fwd_q, made.rev_q), "fwd_k.dst_rank"),
        ((made.fwd_q, made.fwd_k), "rev_q.dst_rank"),
        ((made.fwd_q, other.rev_q), "rev_q."),
        ((*made[:2], *other[2:]), "fwd_k.seq_len"),
        ((*made[:4], other.attention), "attention."),
    ):
        with pytest.raises(MetadataError, match=message):
            dispatch.validate(*wrong)


def test_padding_may_be_wider() -> None:
    """More columns of padding are the same dispatch."""
    made = an_example()
    back = made.rev_q

    def wider(table: torch.Tensor, fill: int) -> torch.Tensor:
        return torch.cat([table, torch.full((4, 2), fill)], dim=1)

    wide = replace(
        back,
        dst_rank=wider(back.dst_rank, -1),
        dst_offset=wider(back.dst_offset, 0),
        seq_len=wider(back.seq_len, 0),
    )
    dispatch.validate(made.fwd_q, wide)


def shared(made: QKVMetadata, **change: Any) -> AttentionLayout:
    assert made.attention is not None
    return replace(made.attention, **change)


def test_stretches_in_the_wrong_order() -> None:
    """Two key shards of equal length that change places tile as before, but keys must be in order."""
    lengths = torch.tensor([[4, 4, 4]])
    queries = dispatch.compute_metadata(lengths, torch.tensor([[0, 0, 0]]))
    mapping = torch.full((1, 3, 3, 2), -1)
    rank = torch.full((1, 3, 3), -1)
    for key in range(3):
        for copy, query in enumerate(range(key, 3)):
            mapping[0, key, copy] = torch.tensor([0, query])
            rank[0, key, copy] = key
    asked, rows = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 8, 12]])
    hot = torch.ones(1, 3, 1, dtype=torch.int64)
    context = torch.tensor([[0, 4, 8]])
    num = torch.tensor([3])
    home = torch.tensor([[0, 0, 0]])
    there, back = dispatch.compute_metadata_kv(mapping, rank, context, asked, rows, lengths, num, home, hot, 3)
    layout = dispatch.compute_attn_layout_seqlens(lengths, rows, home)
    dispatch.validate(*queries, there, back, layout)
    first, second = there.dst_offset[0, 0, 2].item(), there.dst_offset[0, 1, 1].item()
    there.dst_offset[0, 0, 2], there.dst_offset[0, 1, 1] = second, first
    rows_back = back.dst_offset[0].clone()
    back.dst_offset[0, 3], back.dst_offset[0, 4] = rows_back[4], rows_back[3]
    dispatch.validate(*queries, there, back)

    with pytest.raises(MetadataError, match="follow each other in one order"):
        dispatch.validate(*queries, there, back, layout)


def test_only_metadata_is_judged() -> None:
    """A valid dispatch stays as it was: the validator writes nothing."""
    made = an_example()
    before = [table.clone() for part in made for table in _tensors(part)]
    dispatch.validate(*made)

    assert all(map(torch.equal, before, [table for part in made for table in _tensors(part)]))


def _tensors(part: Metadata | AttentionLayout | None) -> list[torch.Tensor]:
    assert part is not None
    found = [getattr(part, field.name) for field in fields(part)]
    return [value for value in found if isinstance(value, torch.Tensor)]
