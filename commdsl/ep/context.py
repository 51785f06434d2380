"""Turns an EPConfig into a DispatchCombineContext: the symmetric memory of an expert-parallel layer, which may grow.

Assumes every rank makes the same ones and grows them alike. Does not move anything: its Exchange does. Memory that is
outgrown stays as long as a rank still holds rows there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from commdsl.ep.config import EPConfig
from commdsl.ep.exchange import Exchange
from commdsl.runtime import groups
from commdsl.runtime.errors import DispatchError
from commdsl.runtime.given import Patience, whole
from commdsl.runtime.load import Kernels
from commdsl.runtime.reporting import reported


class DispatchCombineContext:
    """What a rank has for the calls of a layer. `exchange` is what makes them."""

    def __init__(self, ep_config: EPConfig, received: int, group: str, made: Mapping[str, Any]) -> None:
        """`create` makes one. `made`: with what else Exchanges are made."""
        self.ep_config, self.group = ep_config, group
        self._made = dict(made)
        self._outgrown: list[Exchange] = []
        self.exchange = self._new(received)

    @classmethod
    @reported()
    def create(
        cls,
        ep_config: EPConfig,
        capacity: float = 2,
        *,
        group: Any = None,
        device: torch.device | str | None = None,
        local_combine: bool = False,
        gradients: bool = True,
        results: int = 2,
        check: bool = False,
        tune: Mapping[str, int | str] | None = None,
        kernels: Kernels | None = None,
        timeout: Patience = None,
        terms: Mapping[str, object] | None = None,
    ) -> DispatchCombineContext:
        """Collective: symmetric memory on every rank of `group`, with room for max_tokens * topk * `capacity` rows to
        come to a rank in a call, but for no more than ever come. The rest as for `Exchange`. Raises DispatchError
        (C961) where the config is not this rank's, AgreementError (C964) where ranks differ.
        """
        name = groups.name_of(group)
        for what, said, found in (
            ("world_size", ep_config.world_size, groups.size_of(name)),
            ("rank", ep_config.rank, groups.rank_of(name)),
        ):
            if said != found:
                raise DispatchError(f"`{what}` is {said}, and of the group it is {found}")
        if not capacity > 0:
            raise DispatchError(f"`capacity` is a number above 0, not {capacity!r}")
        rows = min(max(int(ep_config.max_tokens * ep_config.topk * capacity), 1), ep_config.most_received)
        made: dict[str, Any] = {
            "device": device,
            "local_combine": local_combine,
            "gradients": gradients,
            "results": results,
        }
        dtypes = {"token_dtype": ep_config.token_dtype, "weight_dtype": ep_config.weight_dtype}
        made |= {"check": check, "tune": tune, "kernels": kernels, "timeout": timeout}
        made["terms"] = {**dtypes, **(terms or {})}
        return cls(ep_config, rows, name, made)

    @property
    def capacity(self) -> int:
        """Rows that may come to a rank in a call."""
        return self.exchange.limits.received

    @property
    def dispatch_output_buf(self) -> torch.Tensor:
        """(capacity, hidden): where the rows of the next call come to lie, in symmetric memory, which stays allocated
        while this tensor is held. Raises DispatchError (C961) after `finalize`.
        """
        return self._coming[0]

    @property
    def weight_recv_buf(self) -> torch.Tensor:
        """(capacity,) float32: where their weights come to lie; as `dispatch_output_buf`."""
        return self._coming[1]

    @reported(lambda context, /, *_, **__: context.exchange)
    def reallocate_dispatch_output_buf(self, dispatch_recv_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective: room for at least so many rows to come to a rank. What came before stays where it is. Returns
        `dispatch_output_buf` and `weight_recv_buf`: new ones, where there was less room. Raises DispatchError (C961)
        after `finalize`.
        """
        self.refuse_released()
        if whole("dispatch_recv_tokens", dispatch_recv_tokens, 0) > self.capacity:
            self._outgrown.append(self.exchange)
            self.exchange = self._new(dispatch_recv_tokens)
        return self._coming

    def refuse_released(self) -> None:
        """Raises DispatchError (C961) where `finalize` was called, or the group released its memory."""
        if self.exchange.is_released:
            raise DispatchError(
                "the symmetric memory of this layer was released, by `finalize` or with its group: make a new layer"
            )

    @property
    def has_idle(self) -> bool:
        """Whether memory was outgrown, and this rank holds nothing there any more."""
        return bool(self._outgrown) and all(one.is_idle for one in self._outgrown)

    def release_outgrown(self) -> None:
        """Collective: gives back what was outgrown. To be called when all ranks have it idle."""
        for one in self._outgrown:
            one.release()
        self._outgrown.clear()

    def prepare(self) -> None:
        """Builds all kernels that calls of the config's dtypes launch. Not collective."""
        self.exchange.prepare(self.ep_config.dtype_back)

    def finalize(self) -> None:
        """Collective: gives back all symmetric memory, of rows that are still held when these are let go."""
        self.release_outgrown()
        self.exchange.release()

    @property
    def _coming(self) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.ep_config
        row = torch.empty(0, config.hidden, dtype=config.token_dtype, device=self.exchange.device)
        (rows,), weights = self.exchange.coming(row)
        return rows, weights

    def _new(self, received: int) -> Exchange:
        config = self.ep_config
        node = 0 if config.is_intra_node else config.local_world_size
        return Exchange(config.limits(received), config.num_experts, self.group, node=node, **self._made)
