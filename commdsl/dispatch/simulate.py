"""Turns `Metadata` and the tensors of all ranks into what a dispatch leaves on them: the oracle of the kernels.

Assumes Metadata of all ranks, not a slice. Does not look at counts, masks or num_seqs, and so does not prove them;
`validator` does. Written to be read: it loops over shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from commdsl.dispatch import layout
from commdsl.dispatch.errors import MetadataError
from commdsl.dispatch.metadata import Metadata
from commdsl.runtime import given


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy of a shard: where its rows are, and where they go; `dest` is -1 for none."""

    rank: int
    shard: int
    replica: int
    begin: int  # its first row on `rank`
    length: int
    dest: int
    offset: int


@torch.no_grad()
def orchestrate_simulate(tensor: torch.Tensor, output_tensor: torch.Tensor, metadata: Metadata) -> torch.Tensor:
    """Writes the rows of `tensor` (W, T, ...) where `metadata` sends them in `output_tensor` (W, T', ...), rank by
    rank, shard by shard, copy by copy: the last one wins. Rows that nothing is sent to stay. Returns `output_tensor`,
    which may be one that requires gradients: there are none through a simulation.

    Raises MetadataError for a shard that is sent and ends after T, or whose destination ends after T'.
    """
    _tensors(tensor, output_tensor)
    for copy in _copies(metadata):
        if copy.dest >= 0:
            _inside(copy.begin, copy, tensor, "seq_len")
            _inside(copy.offset, copy, output_tensor, "dst_offset")
            rows = tensor[copy.rank, copy.begin : copy.begin + copy.length]
            output_tensor[copy.dest, copy.offset : copy.offset + copy.length] = rows
    return output_tensor


@torch.no_grad()
def simulate_reduce(tensor: torch.Tensor, output_tensor: torch.Tensor, metadata: Metadata) -> torch.Tensor:
    """What the way back makes of copies: each row of `output_tensor` (W, T, ...) that belongs to a shard becomes the
    sum of its copies in `tensor` (W, T', ...), which lie where `metadata`, the way there, sent them.

    Sums are in the order of the copies, in float32 (float64 for float64), rounded once; a shard that went nowhere is
    zero. Rows of no shard stay. Returns `output_tensor`. Raises MetadataError as `orchestrate_simulate` does.
    """
    _tensors(tensor, output_tensor)
    if not tensor.dtype.is_floating_point:
        raise MetadataError("sums are of gradients", field="tensor.dtype", expected="a float", got=tensor.dtype)
    wide = torch.promote_types(tensor.dtype, torch.float32)
    sums: dict[tuple[int, int], torch.Tensor] = {}
    places: dict[tuple[int, int], slice] = {}
    for copy in _copies(metadata):
        _inside(copy.begin, copy, output_tensor, "seq_len")
        name = copy.rank, copy.shard
        places[name] = slice(copy.begin, copy.begin + copy.length)
        if copy.dest >= 0:
            _inside(copy.offset, copy, tensor, "dst_offset")
            rows = tensor[copy.dest, copy.offset : copy.offset + copy.length].to(wide)
            # The first is taken as it is: a sum of one keeps the sign of its zeros.
            sums[name] = sums[name] + rows if name in sums else rows
    for (rank, shard), place in places.items():
        found = sums.get((rank, shard))
        output_tensor[rank, place] = 0 if found is None else found.to(output_tensor.dtype)
    return output_tensor


def _copies(metadata: Metadata) -> Iterator[_Copy]:
    """Every copy by rank, shard and replica; every shard has one at least, to nowhere if it stays."""
    given.instance("metadata", metadata, Metadata)
    if metadata.seq_len.dim() != 2:
        law = "a simulation needs the Metadata of all ranks"
        raise MetadataError(law, field="seq_len", expected="(W, S)", got=tuple(metadata.seq_len.shape))
    lengths = layout.longs(metadata.seq_len, "seq_len").tolist()
    shape = (*metadata.seq_len.shape, metadata.dst_rank.shape[2] if metadata.dst_rank.dim() == 3 else 1)
    dests = layout.longs(metadata.dst_rank, "dst_rank").reshape(shape).tolist()
    offsets = layout.longs(metadata.dst_offset, "dst_offset").reshape(shape).tolist()
    for rank in range(shape[0]):
        begin = 0
        for shard, length in enumerate(lengths[rank]):
            for replica, (dest, offset) in enumerate(zip(dests[rank][shard], offsets[rank][shard], strict=True)):
                yield _Copy(rank, shard, replica, begin, length, dest, offset)
            begin += length


def _tensors(tensor: torch.Tensor, output_tensor: torch.Tensor) -> None:
    for name, one in (("tensor", tensor), ("output_tensor", output_tensor)):
        given.argument(name, one)
        if one.dim() < 2:
            law = "a tensor of all ranks has a dimension of ranks and one of rows"
            raise MetadataError(law, field=f"{name}.shape", expected="(W, T, ...)", got=tuple(one.shape))
    if tensor.shape[:1] != output_tensor.shape[:1] or tensor.shape[2:] != output_tensor.shape[2:]:
        raise MetadataError(
            "both tensors are of the same ranks and width",
            field="output_tensor.shape",
            expected=f"({tensor.shape[0]}, T', ...)",
            got=tuple(output_tensor.shape),
        )


def _inside(begin: int, copy: _Copy, tensor: torch.Tensor, field: str) -> None:
    """Raises MetadataError unless the rows of a copy that begin at `begin` are in `tensor`."""
    if begin < 0 or copy.length < 0 or begin + copy.length > tensor.shape[1] or copy.dest >= len(tensor):
        raise MetadataError(
            "the rows are in the tensor",
            field=field,
            rank=copy.rank,
            shard=copy.shard,
            replica=copy.replica,
            expected=f"rows in 0 ..< {tensor.shape[1]} of a rank below {len(tensor)}",
            got=f"{begin} ..< {begin + copy.length} of {copy.dest}",
        )
