"""Turns calls by the names of DistCA's documents into those of this package: the kernel, and what upstream tests with.

Assumes the documents `Metadata Class` and `Communication Metadata` (hao-ai-lab/DistCA, July 2025). The other names of
theirs are this package's own. Does not draw, simulate or send anything itself.
"""

from __future__ import annotations

from typing import Protocol

import torch

from commdsl.dispatch.compute import compute_metadata
from commdsl.dispatch.dispatcher import Dispatcher
from commdsl.dispatch.errors import DispatchError
from commdsl.dispatch.generate import create_qkv_dispatch, gen_seq_lens
from commdsl.dispatch.metadata import Metadata
from commdsl.dispatch.route import Route
from commdsl.dispatch.simulate import orchestrate_simulate
from commdsl.dispatch.validator import validate
from commdsl.runtime import given
from commdsl.runtime.errors import TensorError
from commdsl.runtime.reporting import reported


class Arguments(Protocol):
    """What upstream's tests are given: sizes of a random dispatch."""

    world_size: int
    num_seqs: int  # documents of a rank
    max_seq_shard: int  # the most shards of a document
    num_tokens: int  # of a rank
    hidden_size: int
    seed: int


@reported("buffers")
def dispatch_kernel(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    metadata: Route,
    buffers: Dispatcher,
    kv_send_tensor: torch.Tensor | None = None,
    kv_recv_tensor: torch.Tensor | None = None,
    *,
    is_backward: bool = False,
) -> None:
    """One collective call of the documents' kernel: queries, or queries and keys in one tensor, to where `metadata`
    says; `is_backward`: back, copies of keys summed. It fills the first rows of `recv_tensor` and `kv_recv_tensor`.

    `metadata` is the Route of this rank, `buffers` the Dispatcher that has symmetric memory for it. Raises
    DispatchError (C961) for one tensor of keys without the other, and what `Dispatcher.dispatch_qkv` raises.
    """
    given.instance("buffers", buffers, Dispatcher)
    given.argument("recv_tensor", recv_tensor)
    if kv_recv_tensor is not None:
        given.argument("kv_recv_tensor", kv_recv_tensor)
    if (kv_send_tensor is None) != (kv_recv_tensor is None):
        raise DispatchError("expected kv_send_tensor and kv_recv_tensor, or neither")
    if kv_send_tensor is None or kv_recv_tensor is None:
        move = buffers.collect if is_backward else buffers.dispatch
        _fill(recv_tensor, move(send_tensor, metadata))
        return
    move_all = buffers.collect_qkv if is_backward else buffers.dispatch_qkv
    queries, keys = move_all(send_tensor, kv_send_tensor, None, metadata)
    _fill(recv_tensor, queries)
    _fill(kv_recv_tensor, keys)


def _fill(to: torch.Tensor, rows: torch.Tensor) -> None:
    if to.dim() == 0 or len(to) < len(rows) or to.shape[1:] != rows.shape[1:]:
        shapes = f"({len(rows)} or more, {', '.join(map(str, rows.shape[1:]))})"
        raise TensorError(f"what is received goes to a tensor of shape {shapes}, got {tuple(to.shape)}")
    with torch.no_grad():
        to[: len(rows)].copy_(rows)


def test_query_dispatch(args: Arguments) -> None:
    """Raises AssertionError unless queries that go anywhere at random come back as they were, in a simulation."""
    torch.manual_seed(args.seed)
    lengths = gen_seq_lens(args.world_size, args.num_seqs, args.num_tokens).long()
    dest = torch.randint(0, args.world_size, lengths.shape)
    there, back = compute_metadata(lengths, dest)
    validate(there, back)
    _return(args, there, back)


def test_qkv_dispatch(args: Arguments) -> None:
    """Raises AssertionError unless queries of a random causal dispatch come back as they were, and every copy of a key
    as its key, in a simulation.
    """
    torch.manual_seed(args.seed)
    made = create_qkv_dispatch(args.world_size, args.num_tokens, args.num_seqs, args.max_seq_shard)
    validate(*made)
    _return(args, made.fwd_q, made.rev_q)
    assert made.fwd_k is not None
    assert made.rev_k is not None
    keys, copies = _there_and_back(args, made.fwd_k, made.rev_k, args.max_seq_shard)
    is_sent = copies != 0  # no number that is drawn is 0
    torch.testing.assert_close(keys[:, None] * is_sent, copies)
    assert bool(is_sent.any(1).all()), "a key is sent to one query at least"


for _checker in (test_query_dispatch, test_qkv_dispatch):
    _checker.__test__ = False  # type: ignore[attr-defined]  # pytest takes what begins with `test_` for its own


def _return(args: Arguments, there: Metadata, back: Metadata) -> None:
    sent, returned = _there_and_back(args, there, back, 1)
    torch.testing.assert_close(returned[:, 0], sent)


def _there_and_back(args: Arguments, there: Metadata, back: Metadata, copies: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows of all ranks (W, T, H), none of them 0, and what comes back of them (W, copies, T, H)."""
    ranks, rows, width = args.world_size, args.num_tokens, args.hidden_size
    sent = torch.rand(ranks, rows, width, device="cuda" if torch.cuda.is_available() else "cpu") + 1
    received = sent.new_zeros(ranks, int(there.num_recv_tokens[:, -1].max()), width)
    returned = sent.new_zeros(ranks, copies * rows, width)
    orchestrate_simulate(sent, received, there)
    orchestrate_simulate(received, returned, back)
    return sent, returned.view(ranks, copies, rows, width)
