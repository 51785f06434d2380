"""Turns one `Metadata` into arrays of the form that every Metadata has, or into the error that says where it has not.

Assumes nothing of where the tensors are: those on a GPU are read from there. Does not ask whether the numbers agree
with each other beyond one entry; `validator` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from commdsl.dispatch import layout
from commdsl.dispatch.errors import MetadataError
from commdsl.dispatch.metadata import Metadata
from commdsl.ir.routes import NOWHERE, Longs
from commdsl.runtime import given

NORMAL = {
    "dst_rank": torch.int32,
    "dst_offset": torch.uint32,
    "seq_len": torch.uint32,
    "num_recv_tokens": torch.uint64,
    "seq_recv_mask": torch.uint32,
    "recv_seq_lens": torch.uint32,
    "num_seqs": torch.int32,
}
"""The dtypes of Metadata that says it is normalised."""

MOST_ROWS = 2**32 - 1
"""Rows are counted in uint32 by the kernels."""


@dataclass(frozen=True, eq=False)
class Columns:
    """The numbers of one Metadata; `copies` is None for a table without, whose arrays have one copy all the same."""

    name: str
    copies: int | None
    dest: Longs  # (W, S, C)
    row: Longs  # (W, S, C)
    length: Longs  # (W, S)
    counts: Longs  # (W, W)
    num_seqs: Longs  # (W,)
    sent: Longs | None  # (W, S forward, C): seq_recv_mask
    sent_length: Longs | None  # (W, S forward): recv_seq_lens


def tables(name: str, metadata: Metadata) -> Columns:
    """The numbers of `metadata`, called `name` in messages, each within its own bounds."""
    given.instance(name, metadata, Metadata)
    world_size = metadata.world_size
    if world_size is None or metadata.num_seqs is None:
        raise MetadataError("Metadata of all ranks is judged, no slice", field=f"{name}.world_size")
    for field, dtype in NORMAL.items():
        _kind(getattr(metadata, field), f"{name}.{field}", dtype if metadata.normalized else None)
    dest, row = (layout.longs(table, name) for table in (metadata.dst_rank, metadata.dst_offset))
    length, counts = layout.longs(metadata.seq_len, name), layout.longs(metadata.num_recv_tokens, name)
    copies = dest.shape[2] if dest.ndim == 3 else None
    shape = (world_size, length.shape[1] if length.ndim == 2 else 0)
    _shape(length, shape, f"{name}.seq_len")
    _shape(dest, shape if copies is None else (*shape, copies), f"{name}.dst_rank")
    _shape(row, dest.shape, f"{name}.dst_offset")
    _shape(counts, (world_size, world_size + 1), f"{name}.num_recv_tokens")
    num_seqs = layout.longs(metadata.num_seqs, name)
    _shape(num_seqs, (world_size,), f"{name}.num_seqs")
    _sums(name, counts, metadata.num_total_recv_tokens)
    slots = 1 if copies is None else copies
    found = Columns(
        name,
        copies,
        dest.reshape(*shape, slots),
        row.reshape(*shape, slots),
        length,
        counts[:, :-1],
        num_seqs,
        None if metadata.seq_recv_mask is None else layout.longs(metadata.seq_recv_mask, name),
        None if metadata.recv_seq_lens is None else layout.longs(metadata.recv_seq_lens, name),
    )
    _entries(found)
    return found


def _entries(tables: Columns) -> None:
    """Raises MetadataError for an entry that is wrong whatever the others are."""
    ranks, width, _ = tables.dest.shape
    copied = tables.copies is not None
    name, length, dest, row = tables.name, tables.length, tables.dest, tables.row
    refuse(
        (tables.num_seqs < 0) | (tables.num_seqs > width),
        tables.num_seqs,
        f"{name}.num_seqs",
        f"0 to {width}",
        "a rank has no more shards than the tables have room for",
    )
    refuse((length < 0) | (length > MOST_ROWS), length, f"{name}.seq_len", f"0 to {MOST_ROWS}", "a length is in rows")
    no_rank = (dest < NOWHERE) | (dest >= ranks)
    refuse(no_rank, dest, f"{name}.dst_rank", f"-1 ..< {ranks}", "there is no such rank", copied)
    padding = np.arange(width) >= tables.num_seqs[:, None]
    law = "what lies beyond num_seqs is padding"
    refuse(padding & (length != 0), length, f"{name}.seq_len", 0, law)
    refuse(padding[..., None] & (dest != NOWHERE), dest, f"{name}.dst_rank", NOWHERE, law, copied)
    stays = (dest == NOWHERE) & (row != 0)
    refuse(stays, row, f"{name}.dst_offset", 0, "what goes nowhere has no place there", copied)
    refuse(row < 0, row, f"{name}.dst_offset", "0 or more", "an offset is a row", copied)


def refuse(wrong: NDArray[np.bool_], got: Longs, field: str, expected: object, law: str, copied: bool = True) -> None:
    """Raises MetadataError for the first entry of `got` that is `wrong`; its indices are rank, shard and, if the table
    is `copied`, replica. `expected` is a table of the same shape, or the same for all.
    """
    for place in np.argwhere(wrong)[:1].tolist():
        names = dict(zip(("rank", "shard", "replica"), place[: 3 if copied else 2], strict=False))
        raise MetadataError(
            law,
            field=field,
            expected=int(expected[tuple(place)]) if isinstance(expected, np.ndarray) else expected,
            got=int(got[tuple(place)]),
            **names,
        )


def _kind(table: torch.Tensor | None, field: str, dtype: torch.dtype | None) -> None:
    """Raises MetadataError unless a table has numbers and, where it must have a dtype, has it."""
    if table is None:
        return
    layout.judge(table, field)
    if dtype is not None and table.dtype is not dtype:
        raise MetadataError("normalised numbers have their dtype", field=field, expected=dtype, got=table.dtype)


def _shape(table: Longs, expected: tuple[int, ...], field: str) -> None:
    if table.shape != expected:
        raise MetadataError("the tables are of one shape", field=field, expected=expected, got=table.shape)


def _sums(name: str, counts: Longs, total: int | Sequence[int] | None) -> None:
    """Raises MetadataError unless the last column, and the host's copy of it, are the sums of the others."""
    field, column = f"{name}.num_recv_tokens", len(counts)
    for i, j in np.argwhere(counts < 0)[:1].tolist():
        law = "a rank receives some rows, or none"
        raise MetadataError(law, field=field, rank=i, source=j, expected="0 or more", got=int(counts[i, j]))
    sums = counts[:, :column].sum(axis=1)
    for i in np.flatnonzero(sums != counts[:, column])[:1].tolist():
        law = f"the last column, {column}, is the sum of the others"
        raise MetadataError(law, field=field, rank=i, expected=int(sums[i]), got=int(counts[i, column]))
    field = f"{name}.num_total_recv_tokens"
    if not isinstance(total, (tuple, list)) or len(total) != column:
        raise MetadataError("it has a number for each rank", field=field, expected=f"{column} numbers", got=total)
    for i in np.flatnonzero(sums != np.asarray(total, np.int64))[:1].tolist():
        law = "it is the last column of num_recv_tokens"
        raise MetadataError(law, field=field, rank=i, expected=int(sums[i]), got=total[i])
