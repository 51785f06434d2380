"""Turns what a dispatch left behind into the descriptor that its way back needs, by the names of EPAll2AllLayer.

Assumes the handle of the call. Does not communicate: what other ranks have to tell is told when it is made. What nobody
asks for is not computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from commdsl.ep.config import EPConfig
from commdsl.ep.exchange import PADDING, Exchange
from commdsl.ep.handles import Handle

Tensor = torch.Tensor

NONE = -1
"""Where there is no token, no choice or no place."""


@dataclass(frozen=True, eq=False)
class Known:
    """What a call leaves on a rank."""

    config: EPConfig
    exchange: Exchange  # which made the call, and takes what comes of it back
    handle: Handle
    offsets: Tensor
    places: Tensor  # (T, topk) int32: of each choice, in the rows of its rank; -1 if it is dropped
    positions: Tensor | None  # (capacity,) of each place the row that the caller wants it to be; None: itself
    received: int | None  # rows; None: the caller has the whole buffer
    nodes: tuple[Tensor, Tensor] | None  # the choices, and their places, of the same rank of all nodes, padded


class EPAllToAllLayoutDesc:
    """Where the tokens of a dispatch went: to be given to `combine`. Tensors are on the device of the tokens.

    num_dispatch_token_cur_rank: the tokens of this rank. num_input_tokens_per_rank: (world_size,) int32, of each rank.
    """

    def __init__(self, known: Known, num_input_tokens_per_rank: Tensor) -> None:
        self.known = known
        self.num_dispatch_token_cur_rank = len(known.handle.keys)
        self.num_input_tokens_per_rank = num_input_tokens_per_rank

    @cached_property
    def topk_indices_tensor(self) -> Tensor:
        """The experts of tokens, -1 behind the last: (max_tokens, topk) int32 of this rank; where there are several
        nodes (nodes, max_tokens, topk), of the rank of each node that has this rank's number there.
        """
        if self.known.nodes is not None:
            return self.known.nodes[0]
        return padded(self.known.handle.keys, self.known.config)

    @cached_property
    def token_dst_scatter_idx(self) -> Tensor:
        """(nodes, max_tokens, topk) int32: the row of each choice on the rank of its expert, -1 where there is none.
        Of the same ranks as `topk_indices_tensor`.
        """
        if self.known.nodes is not None:
            return self.known.nodes[1]
        return padded(self.known.places, self.known.config)[None]

    @cached_property
    def send_reqs_recv_tensor(self) -> Tensor | None:
        """Where there are several nodes, (nodes, 2, max_tokens) int32: for the same ranks, the begins and the ends of
        runs of tokens that have a choice on this node, -1 behind the last. None on one node.
        """
        if self.known.nodes is None:
            return None
        config = self.known.config
        share = config.num_experts_per_rank * config.local_world_size
        comes = (self.known.nodes[0] // share == config.node).any(2)  # no expert, -1, is of node -1
        edges = torch.diff(comes.int(), dim=1, prepend=comes.new_zeros(len(comes), 1).int())
        found = comes.new_full((len(comes), 2, config.max_tokens), NONE, dtype=torch.int32)
        number = (edges == 1).int().cumsum(1)  # of the run that a token is of, or behind
        token = torch.arange(config.max_tokens, dtype=torch.int32, device=comes.device).expand_as(number)
        last = comes & ~torch.nn.functional.pad(comes[:, 1:], (0, 1))
        slot = torch.where(comes, number - 1, 0).long()
        for at, (of, value) in enumerate(((edges == 1, token), (last, token + 1))):
            found[:, at] = found[:, at].scatter_reduce(1, slot, torch.where(of, value, NONE), "amax")
        return found

    @cached_property
    def skipped_token_mapping_indices(self) -> Tensor | None:
        """(recv_tokens,) int32: for each row the first row here of the same token, itself where it is that. None where
        there are several nodes.
        """
        return self._mates()[0] if self.known.config.is_intra_node else None

    @cached_property
    def skipped_token_topk_mapping_indices(self) -> Tensor | None:
        """(recv_tokens, topk) int32: at the first row of a token the rows here of all its choices, -1 where a choice is
        elsewhere or dropped; at its other rows -1. None where there are several nodes.
        """
        return self._mates()[1] if self.known.config.is_intra_node else None

    def _mates(self) -> tuple[Tensor, Tensor]:
        """Of each row that counts the first of the same token, and at that row those of all its choices, -1 for none;
        as the caller has them.
        """
        known, handle = self.known, self.known.handle
        assert handle.mates is not None
        origins, place = handle.origins, torch.arange(len(handle.origins), device=handle.origins.device)
        # The sign of an origin says that it is the first of its token here.
        is_first = (place < known.offsets[-1]) & (origins < 0) & (origins != PADDING)
        sources, row = origins >> 32 & 0xFFFF, (origins & 0xFFFFFFFF) // handle.keys.shape[1]
        of_row = handle.mates[sources.clamp(max=len(handle.mates) - 1), row.clamp(max=handle.mates.shape[1] - 1)]
        mates = torch.where(is_first[:, None], of_row, NONE).long()
        ends = torch.where(mates >= 0, mates, len(place))  # what is none lands behind the end
        first = torch.cat([place, place[:1]]).scatter(0, ends.flatten(), place.repeat_interleave(mates.shape[1]))[:-1]
        if known.positions is not None:
            to = known.positions
            mates = torch.where(mates >= 0, to[mates], NONE)
            first, mates = (
                torch.empty_like(first).scatter(0, to, to[first]),
                torch.empty_like(mates).index_copy(0, to, mates),
            )
        length = len(place) if known.received is None else known.received
        return first[:length].int(), mates[:length].int()


def padded(rows: Tensor, config: EPConfig) -> Tensor:
    """(max_tokens, topk), -1 behind the last row."""
    found = rows.new_full((config.max_tokens, config.topk), NONE)
    found[: len(rows)] = rows
    return found
