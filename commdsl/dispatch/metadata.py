"""Turns the numbers of a dispatch into one object: `Metadata`, for all ranks or, sliced, for one.

Assumes tensors of whole numbers, int64 until normalised. Does not compute them (`compute`, `planned`) nor check that
they agree (`validator`). Offsets and lengths are in rows (tokens), never in bytes; -1 is the rank of what is not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from commdsl.dispatch.errors import MetadataError as MetadataError
from commdsl.machine.errors import ArgumentError
from commdsl.planner.balance import imbalance
from commdsl.runtime import given


@dataclass(frozen=True, eq=False, repr=False)
class Metadata:
    """Where the shards of each rank go. W ranks, at most S shards on one, at most C copies of each; a forward and a
    reverse Metadata have the same form. The field's dtype is given before and after `normalize_dtype`.

    Source: the document `Metadata Class` of DistCA (hao-ai-lab/DistCA, July 2025). Where it says bytes it means rows.
    """

    dst_rank: torch.Tensor  # (W, S) or (W, S, C), int64 | int32: destination of a shard, -1 for none
    dst_offset: torch.Tensor  # like dst_rank, int64 | uint32: its first row there, 0 where there is no destination
    seq_len: torch.Tensor  # (W, S), int64 | uint32: rows of a shard, 0 in padding
    num_recv_tokens: torch.Tensor  # (W, W + 1), int64 | uint64: [r, s] rows r receives from s; [r, W] their sum
    seq_recv_mask: torch.Tensor | None = None  # reverse of copies only: (W, S forward, C), bool | uint32: copy was sent
    recv_seq_lens: torch.Tensor | None = None  # reverse of copies only: (W, S forward), int64 | uint32: forward seq_len
    num_seqs: torch.Tensor | None = None  # (W,), int64 | int32: shards of a rank; the rest is padding
    world_size: int | None = None  # W; None in a slice
    normalized: bool = False
    num_total_recv_tokens: int | Sequence[int] | None = None  # the last column on the host; one number in a slice

    def __repr__(self) -> str:
        shards, rows = self.seq_len.shape[-1], _total(self.seq_len)
        if self.seq_len.dim() == 1:
            return f"Metadata(one rank: {shards} shards, {rows} rows)"
        received = self.num_recv_tokens[:, -1].cpu().to(torch.int64).numpy()
        sizes = f"{len(self.seq_len)} ranks, up to {shards} shards on one: {rows} rows, {received.sum()} received"
        return f"Metadata({sizes}; the most of a rank is {imbalance(received):.1%} above the mean)"

    def __getstate__(self) -> dict[str, Any]:
        """With int64 in place of unsigned numbers, which `pickle` writes and torch cannot read."""
        return {name: _signed(value) for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.normalized:
            vars(self).update(vars(self.normalize_dtype()))

    def get_slice(self, rank: int) -> Metadata:
        """What `rank` needs, without padding: dst_rank, dst_offset and seq_len have its num_seqs rows, num_recv_tokens
        is (W + 1,), seq_recv_mask and recv_seq_lens keep the padding of the forward shards that they describe.

        Raises MetadataError if this is a slice already, or has no such rank; ArgumentError for no whole number.
        """
        if self.world_size is None or self.num_seqs is None:
            raise MetadataError("this is the slice of one rank already", field="world_size")
        rank = _index(rank)
        if not 0 <= rank < self.world_size:
            raise MetadataError("there is no such rank", field="rank", expected=f"0 ..< {self.world_size}", got=rank)
        if not isinstance(self.num_total_recv_tokens, (tuple, list)):
            raise MetadataError("Metadata of all ranks has a total for each", field="num_total_recv_tokens", rank=rank)
        num = int(self.num_seqs[rank])
        return Metadata(
            dst_rank=self.dst_rank[rank, :num],
            dst_offset=self.dst_offset[rank, :num],
            seq_len=self.seq_len[rank, :num],
            num_recv_tokens=self.num_recv_tokens[rank],
            seq_recv_mask=None if self.seq_recv_mask is None else self.seq_recv_mask[rank],
            recv_seq_lens=None if self.recv_seq_lens is None else self.recv_seq_lens[rank],
            normalized=self.normalized,
            num_total_recv_tokens=self.num_total_recv_tokens[rank],
        )

    def normalize_dtype(self) -> Metadata:
        """The same numbers in the dtypes that kernels read: int32 ranks, uint32 rows, uint64 counts, uint32 masks.

        Raises MetadataError where a number does not fit. Reads the tensors, so it waits for a GPU that holds them.
        """
        return replace(
            self,
            dst_rank=_narrow(self.dst_rank, torch.int32, "dst_rank"),
            dst_offset=_narrow(self.dst_offset, torch.uint32, "dst_offset"),
            seq_len=_narrow(self.seq_len, torch.uint32, "seq_len"),
            num_recv_tokens=_narrow(self.num_recv_tokens, torch.uint64, "num_recv_tokens"),
            seq_recv_mask=None if self.seq_recv_mask is None else self.seq_recv_mask.to(torch.uint32),
            recv_seq_lens=_narrow_if(self.recv_seq_lens, torch.uint32, "recv_seq_lens"),
            num_seqs=_narrow_if(self.num_seqs, torch.int32, "num_seqs"),
            normalized=True,
        )

    def to(self, device: torch.device | str) -> Metadata:
        """The same numbers on a device, each tensor contiguous."""
        return replace(self, **_moved(self, device))

    def cuda(self) -> Metadata:
        """The same numbers on the current GPU, each tensor contiguous."""
        return self.to("cuda")

    def cpu(self) -> Metadata:
        """The same numbers on the host, each tensor contiguous."""
        return self.to("cpu")


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """Which rows of what a rank received attend to each other. A sequence of the five tensors of upstream's tuple:
    cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, num_local_seqs_recv. int64; R is the most query shards
    that a rank receives, in the order in which they lie there; padding repeats the last sum.

    Where every query has keys of its own they lie one after another, and kv_begin is cu_seqlens_kv without the own
    length. Where keys travel once per rank, queries of a document share rows and only kv_begin says where they begin.
    """

    cu_seqlens_q: torch.Tensor  # (W, R): rows of queries up to and with each shard; no leading zero
    cu_seqlens_kv: torch.Tensor  # (W, R): the same of the keys each shard sees
    max_seqlen_q: torch.Tensor  # (W,)
    max_seqlen_kv: torch.Tensor  # (W,)
    num_local_seqs_recv: torch.Tensor  # (W,): query shards received
    kv_begin: torch.Tensor  # (W, R): the first row of the keys each shard sees, 0 in padding

    @property
    def _five(self) -> tuple[torch.Tensor, ...]:
        return self.cu_seqlens_q, self.cu_seqlens_kv, self.max_seqlen_q, self.max_seqlen_kv, self.num_local_seqs_recv

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._five)

    def __len__(self) -> int:
        return len(self._five)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._five[index]

    def get_slice(self, rank: int) -> AttentionLayout:
        """What `rank` needs: no W, and R is the number of shards that it receives."""
        if self.cu_seqlens_q.dim() != 2:
            raise MetadataError("this is the slice of one rank already", field="cu_seqlens_q")
        rank = _index(rank)
        if not 0 <= rank < len(self.cu_seqlens_q):
            raise MetadataError(
                "there is no such rank", field="rank", expected=f"0 ..< {len(self.cu_seqlens_q)}", got=rank
            )
        num = int(self.num_local_seqs_recv[rank])
        return AttentionLayout(
            self.cu_seqlens_q[rank, :num],
            self.cu_seqlens_kv[rank, :num],
            self.max_seqlen_q[rank],
            self.max_seqlen_kv[rank],
            self.num_local_seqs_recv[rank],
            self.kv_begin[rank, :num],
        )

    def to(self, device: torch.device | str) -> AttentionLayout:
        """The same numbers on a device, each tensor contiguous."""
        return replace(self, **_moved(self, device))


class QKVMetadata(NamedTuple):
    """A dispatch of queries, keys and values for all ranks. Keys, values and attention are None where rows are all."""

    fwd_q: Metadata
    rev_q: Metadata
    fwd_k: Metadata | None
    rev_k: Metadata | None
    attention: AttentionLayout | None


torch.serialization.add_safe_globals(
    [Metadata, AttentionLayout, QKVMetadata]
)  # numbers and tensors, so `torch.load` may


def _index(rank: Any) -> int:
    """The number of a rank. Raises ArgumentError (C973) for what is no whole number."""
    found = None if isinstance(rank, bool) else given.index(rank)
    if found is None:
        raise ArgumentError(f"`rank` is a whole number, not {given.shown(rank)}")
    return found


def _signed(value: Any) -> Any:
    unsigned = isinstance(value, torch.Tensor) and value.dtype in (torch.uint32, torch.uint64)
    return value.to(torch.int64) if unsigned else value


def _total(lengths: torch.Tensor) -> int:
    return int(lengths.cpu().to(torch.int64).sum())


def _moved(numbers: Metadata | AttentionLayout, device: torch.device | str) -> dict[str, Any]:
    """The tensors of `numbers` by field, on `device`."""
    found = {field.name: getattr(numbers, field.name) for field in fields(numbers)}
    return {name: value.to(device).contiguous() for name, value in found.items() if isinstance(value, torch.Tensor)}


def _narrow(numbers: torch.Tensor, dtype: torch.dtype, field: str) -> torch.Tensor:
    """`numbers` as `dtype`, where they fit."""
    if numbers.dtype is dtype or numbers.numel() == 0:
        return numbers.to(dtype)
    low, high = (int(bound) for bound in torch.aminmax(numbers.to(torch.int64)))
    limits = torch.iinfo(dtype)
    if low < limits.min or high > limits.max:
        raise MetadataError(
            "the number does not fit its dtype",
            field=field,
            expected=f"{limits.min} to {limits.max} ({dtype})",
            got=low if low < limits.min else high,
        )
    return numbers.to(dtype)


def _narrow_if(numbers: torch.Tensor | None, dtype: torch.dtype, field: str) -> torch.Tensor | None:
    return None if numbers is None else _narrow(numbers, dtype, field)
