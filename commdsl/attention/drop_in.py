"""Turns calls of `torch.nn.functional.scaled_dot_product_attention` into attention over a group, within a `with`.

Assumes that q, k and v of such a call are this rank's rows of one sequence, and that all ranks make the same calls.
What it cannot do it refuses. Does not see other functions that attend: flex attention, packages' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from commdsl.attention.interface import attention
from commdsl.attention.placement import Placement
from commdsl.attention.sequence import Ends
from commdsl.machine.errors import ArgumentError
from commdsl.runtime.errors import TensorError
from commdsl.runtime.reporting import reported

NAME = "scaled_dot_product_attention"

INSIDE = (
    functional.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
)
"""Functions that attend within, where no mode sees it: `torch.nn.MultiheadAttention` and layers made of it."""


class sequence_parallel(TorchFunctionMode):
    """Within it `scaled_dot_product_attention` attends to the keys of all ranks of a group.

        with commdsl.attention.sequence_parallel(group):
            loss = model(shard_sequence(tokens, 1, group))

    q (batch, heads, rows, dim), k and v (batch, heads of keys, rows, dim): this rank's rows, as `shard_sequence` cuts
    the sequence by the same `placement` and `cu_seqlens`. The arguments are those of `attention`; `is_causal`, `scale`
    and `enable_gqa` are each call's own. `attn_mask` and `dropout_p` are refused, and so is
    `torch.nn.MultiheadAttention`, which attends where this does not see it (ArgumentError). Under torch.autocast q, k
    and v are cast as torch casts them.

    It holds for the thread that enters it, ends with its `with`, and may be nested: the innermost counts. A backward
    pass needs no `with`; what is computed anew on the way back (torch.utils.checkpoint) does. Works under
    torch.compile(fullgraph=True), entered outside of what is compiled or within.
    """

    def __init__(
        self,
        group: Any = None,
        schedule: str = "auto",
        placement: str | Placement = "zigzag",
        cu_seqlens: Ends = None,
        length: int | None = None,
        kernel: str = "auto",
        tune: Mapping[str, int | str] | None = None,
    ) -> None:
        super().__init__()
        self._settings: dict[str, Any] = {
            "group": group,
            "schedule": schedule,
            "placement": placement,
            "cu_seqlens": cu_seqlens,
            "length": length,
            "kernel": kernel,
            "tune": tune,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func in INSIDE:
            raise ArgumentError(
                f"within `sequence_parallel` `{func.__name__}`, as torch.nn.MultiheadAttention calls it, would attend "
                f"to this rank's rows alone: project q, k and v and call torch.nn.functional.{NAME}"
            )
        return func(*args, **(kwargs or {}))

    @reported(lambda within, /, *_, **__: within._settings["group"], lambda *_, **__: f"`{NAME}`")
    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise ArgumentError(
                f"within `sequence_parallel` `{NAME}` takes no attn_mask: say is_causal=True, or for packed sequences "
                "sequence_parallel(cu_seqlens=...)"
            )
        if dropout_p:
            raise ArgumentError(f"within `sequence_parallel` `{NAME}` has no dropout: pass dropout_p=0.0")
        given = [query, key, value]
        if any(one.dim() != 4 for one in given):
            shapes = ", ".join(str(tuple(one.shape)) for one in given)
            raise TensorError(f"within `sequence_parallel` `{NAME}` takes (batch, heads, rows, dim), not {shapes}")
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise TensorError(
                f"`{NAME}`: {query.shape[1]} heads of queries and {key.shape[1]} of keys: pass enable_gqa=True"
            )
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            given = [one.to(dtype) if one.dtype != torch.float64 else one for one in given]
        q, k, v = given
        made: torch.Tensor = attention(q, k, v, causal=is_causal, scale=scale, layout="BNSD", **self._settings)
        return made
