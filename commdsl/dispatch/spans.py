"""Turns the query shards that ranks receive, and the keys that each sees, into the spans of one rank, for kernels.

Assumes shards that `route_laws` or `attention_laws` accept. Does not compute attention (`attended` does), and does not
know which kernels there are beyond the form of their calls.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from commdsl.attention import kernels
from commdsl.attention.kernel import Kernel, Ready, Shape
from commdsl.attention.masks import Call
from commdsl.attention.torch_kernels import PLAIN
from commdsl.dispatch import layout
from commdsl.dispatch.errors import DispatchError
from commdsl.dispatch.metadata import AttentionLayout
from commdsl.ir.plans import DispatchPlan, Routing
from commdsl.ir.routes import Longs, Mask, totals


class Span(NamedTuple):
    """Rows of queries, and the rows of keys and values that they see: under a causal mask the last query's own key is
    the last one.
    """

    queries: slice
    keys: slice


class Varlen(NamedTuple):
    """As flash attention takes it: int32 on the device, with a leading zero, and the longest of each on the host."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, eq=False)
class Seen:
    """n query shards, by the rank that received them and as they lie there; rows each."""

    num_ranks: int
    rank: Longs
    queries: Longs
    keys: Longs
    begin: Longs  # where the keys begin
    causal: bool

    @property
    def digest(self) -> int:
        """32 bits of the mask and of the rows that each query shard of every rank sees: equal on ranks that agree."""
        found = zlib.crc32(b"causal" if self.causal else b"full")
        for column in (self.rank, self.queries, self.keys, self.begin):
            found = zlib.crc32(np.ascontiguousarray(column, np.int64).tobytes(), found)
        return found

    @property
    def pairs(self) -> Longs:
        """(num_ranks,): pairs of a query and a key that sees it, what each rank computes."""
        hidden = self.queries * (self.queries - 1) // 2 if self.causal else 0
        return totals(self.rank, self.queries * self.keys - hidden, self.num_ranks)

    def on(self, rank: int, device: torch.device) -> Spans:
        mine = (self.rank == rank).nonzero()[0]
        return Spans(self.queries[mine], self.keys[mine], self.begin[mine], causal=self.causal, device=device)


def seen_in(attention: AttentionLayout, *, causal: bool) -> Seen:
    """Of the layout of all ranks."""
    tables = (attention.cu_seqlens_q, attention.cu_seqlens_kv, attention.kv_begin, attention.num_local_seqs_recv)
    queries, keys, begin, num = (layout.longs(table, "attention") for table in tables)
    rank, slot = np.nonzero(np.arange(queries.shape[1]) < num[:, None])
    rows, key_rows = (np.diff(sums, axis=1, prepend=0)[rank, slot] for sums in (queries, keys))
    return Seen(len(num), rank, rows, key_rows, begin[rank, slot], causal)


def seen_by(plan: DispatchPlan, routes: Routing) -> Seen | None:
    """Of a plan, None where it is of rows alone."""
    if routes.stretches is None:
        return None
    queries, stretches = routes.queries, routes.stretches
    order = np.lexsort((queries.place, queries.dest))
    shard = queries.shard[order]
    key_rows, begin = stretches.length[shard], stretches.row[shard]
    return Seen(plan.num_ranks, queries.dest[order], queries.length[order], key_rows, begin, plan.mask is Mask.CAUSAL)


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """The calls of a kernel that are the attention of a rank."""

    kernel: Kernel
    calls: tuple[Ready, ...]


class Spans:
    """What the queries that a rank received attend to."""

    def __init__(self, queries: Longs, keys: Longs, begin: Longs, *, causal: bool, device: torch.device) -> None:
        self._queries, self._keys, self._begin = queries, keys, begin
        self.causal = causal
        self.device = device
        number = next(_NUMBERS)
        self.handle = torch.tensor(number)
        """What an operator of torch knows these by: a tensor on the host, so that compiled calls take others, too."""
        self._works: dict[tuple[str, Shape, bool], Work] = {}
        _KNOWN[number] = self

    def __repr__(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"Spans({len(self._queries)}, {kind}: {self._queries.sum()} queries, {self._keys.sum()} keys seen)"

    def spans(self) -> tuple[Span, ...]:
        """One for each query shard, in the order in which they lie here; keys may be those of several."""
        return tuple(Span(slice(*row), slice(*key)) for row, key in zip(*self._ranges, strict=True))

    def varlen(self) -> Varlen:
        """What `flash_attn_varlen_func` and its like take, with `causal`.

        Raises DispatchError (C961) where query shards share rows of keys: such a kernel would walk on to rows that are
        another's.
        """
        ends = np.concatenate(([0], np.cumsum(self._keys)))
        if (ends[:-1] != self._begin).any():
            raise DispatchError(
                f"keys are shared here: {self._keys.sum()} are seen, fewer arrived, and cuts cannot say which are seen "
                'twice. Plan with sharing="query", or walk `spans()`'
            )
        cuts = (np.concatenate(([0], np.cumsum(self._queries))), ends)
        rows, keys = (torch.from_numpy(one.astype(np.int32)).to(self.device) for one in cuts)
        return Varlen(rows, keys, int(self._queries.max(initial=0)), int(self._keys.max(initial=0)))

    def work(self, kernel: str, shape: Shape, *, backward: bool) -> Work:
        """The calls of the kernel of that name, or by the rule of `attention.kernels`; made once. ArgumentError."""
        key = kernel, shape, backward
        found = self._works.get(key)
        if found is None:
            chosen, calls = self._chosen(kernel, shape, backward)
            ready = kernels.prepared(chosen, shape, calls, self.device, backward=backward)
            found = self._works[key] = Work(chosen, ready)
        return found

    def _chosen(self, kernel: str, shape: Shape, backward: bool) -> tuple[Kernel, Sequence[Call]]:
        machine, calls = kernels.here(self.device), self._packed()
        chosen = kernels.chosen(kernel, machine, shape, calls, backward)
        if kernel == "auto" and chosen is PLAIN and self.device.type == "cuda":
            # Kernels for float32 have no triangle that ends at the last key: what lies before it is a call of its own.
            apart = [one for call in calls for sequence in kernels.apart(call) for one in _halves(sequence)]
            return kernels.chosen(kernel, machine, shape, apart, backward), apart
        return chosen, calls

    @property
    def _ranges(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        last = np.cumsum(self._queries)
        rows = np.stack((last - self._queries, last), axis=1)
        keys = np.stack((self._begin, self._begin + self._keys), axis=1)
        return [(first, end) for first, end in rows.tolist()], [(first, end) for first, end in keys.tolist()]

    def _packed(self) -> list[Call]:
        """As few calls as there can be: a new one begins where keys lie before those of the query shard before. Keys
        between two sequences are one without queries.
        """
        chains: list[tuple[list[int], list[int]]] = []
        for (first, end), (key, key_end) in zip(*self._ranges, strict=True):
            if first == end:
                continue
            if not chains or key < chains[-1][1][-1]:
                chains.append(([first], [key]))
            rows, keys = chains[-1]
            if key > keys[-1]:
                rows.append(first)
                keys.append(key)
            rows.append(end)
            keys.append(key_end)
        return [Call(tuple(rows), tuple(keys), None, 0 if self.causal else None) for rows, keys in chains]


def _halves(call: Call) -> list[Call]:
    """What every query of one sequence sees, and the triangle of its own keys."""
    (first, end), (key, key_end) = call.queries, call.keys
    own = key_end - (end - first)
    if call.is_full or own <= key:
        return [call]
    return [Call(call.queries, (key, own), None, None), Call(call.queries, (own, key_end), None, 0)]


_NUMBERS = itertools.count()
_KNOWN: weakref.WeakValueDictionary[int, Spans] = weakref.WeakValueDictionary()


def known(handle: torch.Tensor) -> Spans:
    """The Spans of that handle, while its Route lives. Raises DispatchError."""
    found = _KNOWN.get(int(handle))
    if found is None:
        raise DispatchError("the Route of this attention is gone: keep it as long as its results need gradients")
    return found
