"""Turns the numbers of an expert-parallel layer into an EPConfig, judged, and that into Limits.

Assumes nothing of them. Does not know groups or memory: whether the numbers are a group's `context` asks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commdsl.ep.limits import MOST_KEYS_A_ROW, Limits
from commdsl.ep.way_back import SUMMED
from commdsl.runtime.errors import DispatchError, TensorError
from commdsl.runtime.given import shown

WEIGHTS = (torch.float32, torch.float16, torch.bfloat16)
"""What routing weights may be in: they travel in float32, which holds each of these exactly."""


@dataclass(frozen=True, slots=True)
class EPConfig:
    """Of an expert-parallel all-to-all. Raises DispatchError (C961) for numbers, TensorError (C951) for dtypes that no
    layer can have.
    """

    max_tokens: int  # of a rank, in one call
    hidden: int
    topk: int  # experts of a token
    num_experts: int  # of all ranks together
    rank: int
    world_size: int
    local_world_size: int  # ranks of a node
    token_dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.float32
    offset_dtype: torch.dtype = torch.int32

    def __post_init__(self) -> None:
        for name in ("max_tokens", "hidden", "topk", "num_experts", "world_size", "local_world_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise DispatchError(f"`{name}` is a whole number from 1 on, not {value!r}")
        if self.topk > MOST_KEYS_A_ROW:
            raise DispatchError(f"a token has at most {MOST_KEYS_A_ROW} experts, got `topk` {self.topk}")
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise DispatchError(f"`rank` is a whole number, not {shown(self.rank)}")
        if not 0 <= self.rank < self.world_size:
            raise DispatchError(f"rank {self.rank} is none of {self.world_size} ranks")
        for name, of in (("num_experts", self.num_experts), ("world_size", self.world_size)):
            by = self.world_size if name == "num_experts" else self.local_world_size
            if of % by:
                raise DispatchError(f"`{name}` is {of}, and no multiple of {by}: all ranks, and nodes, are alike")
        if self.weight_dtype not in WEIGHTS:
            raise TensorError(f"routing weights are float32, float16 or bfloat16, not {self.weight_dtype}")
        if self.offset_dtype != torch.int32:
            raise TensorError(f"offsets, and the numbers of experts, are int32, not {self.offset_dtype}")

    @property
    def num_experts_per_rank(self) -> int:
        return self.num_experts // self.world_size

    @property
    def is_intra_node(self) -> bool:
        """Whether all ranks are of one node."""
        return self.world_size == self.local_world_size

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.rank // self.local_world_size

    @property
    def most_received(self) -> int:
        """Rows that may ever come to a rank: all choices of all tokens of all ranks."""
        return self.world_size * self.max_tokens * self.topk

    @property
    def dtype_back(self) -> torch.dtype:
        """What rows are summed in, unless they come in something else that is no wider."""
        return self.token_dtype if self.token_dtype in SUMMED else torch.bfloat16

    def limits(self, received: int) -> Limits:
        """For calls in which a rank receives up to so many rows."""
        width, back = (self.hidden * dtype.itemsize for dtype in (self.token_dtype, self.dtype_back))
        return Limits(self.max_tokens, self.topk, received, (width,), back)


class Configured:
    """The numbers of an EPConfig as read-only attributes, by the names of EPAll2AllLayer."""

    ep_config: EPConfig

    @property
    def max_tokens(self) -> int:
        return self.ep_config.max_tokens

    @property
    def hidden(self) -> int:
        return self.ep_config.hidden

    @property
    def topk(self) -> int:
        return self.ep_config.topk

    @property
    def rank(self) -> int:
        return self.ep_config.rank

    @property
    def world_size(self) -> int:
        return self.ep_config.world_size

    @property
    def local_world_size(self) -> int:
        return self.ep_config.local_world_size

    @property
    def nnodes(self) -> int:
        return self.ep_config.num_nodes

    @property
    def node_id(self) -> int:
        return self.ep_config.node

    @property
    def is_intra_node(self) -> bool:
        return self.ep_config.is_intra_node

    @property
    def num_tot_experts(self) -> int:
        return self.ep_config.num_experts

    @property
    def experts_per_rank(self) -> int:
        return self.ep_config.num_experts_per_rank

    @property
    def dtype(self) -> torch.dtype:
        return self.ep_config.token_dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.ep_config.weight_dtype

    @property
    def offset_dtype(self) -> torch.dtype:
        return self.ep_config.offset_dtype
