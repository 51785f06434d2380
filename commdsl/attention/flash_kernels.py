"""Turns calls into the kernels of the `flash_attn` packages, where they are installed: generations 2, 3 and 4.

Assumes shapes and calls that the kernel does not refuse. Does not choose one, nor import a package before its kernel is
asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from commdsl.attention.flash_parts import by_parts, parted
from commdsl.attention.kernel import Kernel, Ready, Tensors
from commdsl.attention.torch_kernels import FLASH, batched, bounds, is_told_causal, known, single

MODULES = {"flash2": "flash_attn.flash_attn_interface", "flash3": "flash_attn_interface", "flash4": "flash_attn.cute"}


def _packed(ready: Ready) -> dict[str, Any]:
    if ready.cuts is None:
        return {}
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, (*ready.cuts, *ready.longest), strict=True))


# --- generation 2 -----------------------------------------------------------------------------------------------------


def _forward_2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ready: Ready, scale: float) -> Tensors:
    run = _named("flash2", "_flash_attn_forward" if ready.cuts is None else "_flash_attn_varlen_forward")
    out, lse, *_ = run(*batched(ready, q, k, v), **_packed(ready), **_options_2(ready, scale), return_softmax=False)
    return single(ready, out, known(ready, lse))


def _backward_2(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ready: Ready,
    scale: float,
) -> Tensors:
    run = _named("flash2", "_flash_attn_backward" if ready.cuts is None else "_flash_attn_varlen_backward")
    made = batched(ready, *(torch.empty_like(one) for one in (q, k, v)))
    given = batched(ready, dout, q, k, v, out, lse)
    run(*given, *made, **_packed(ready), **_options_2(ready, scale), deterministic=True)
    return single(ready, *made)


def _options_2(ready: Ready, scale: float) -> dict[str, Any]:
    left, right = bounds(ready.call)
    return {
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": is_told_causal(ready.call),
        "window_size_left": left,
        "window_size_right": right,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


# --- generation 3 -----------------------------------------------------------------------------------------------------


def _forward_3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ready: Ready, scale: float) -> Tensors:
    left, right = bounds(ready.call)
    out, lse, *_ = _named("flash3", "_flash_attn_forward")(
        *batched(ready, q, k, v),
        **_packed(ready),
        softmax_scale=scale,
        causal=is_told_causal(ready.call),
        window_size_left=left,
        window_size_right=right,
    )
    return single(ready, out, known(ready, lse))


def _backward_3(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ready: Ready,
    scale: float,
) -> Tensors:
    left, right = bounds(ready.call)
    dq, dk, dv = batched(ready, *(torch.empty_like(one) for one in (q, k, v)))
    _named("flash3", "_flash_attn_backward")(
        *batched(ready, dout, q, k, v, out, lse),
        **_packed(ready),
        dq=dq,
        dk=dk,
        dv=dv,
        softmax_scale=scale,
        is_causal=is_told_causal(ready.call),
        window_size_left=left,
        window_size_right=right,
        deterministic=True,
    )
    return single(ready, dq, dk, dv)


# --- generation 4 -----------------------------------------------------------------------------------------------------


def _forward_4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ready: Ready, scale: float) -> Tensors:
    run = _named("flash4", "_flash_attn_fwd")
    out, lse, *_ = run(*batched(ready, q, k, v), **_packed(ready), **_options_4(ready, scale), return_lse=True)
    return single(ready, out, known(ready, lse))


def _backward_4(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ready: Ready,
    scale: float,
) -> Tensors:
    run = _named("flash4", "_flash_attn_bwd")
    given = batched(ready, q, k, v, out, dout, lse)
    return single(ready, *run(*given, **_packed(ready), **_options_4(ready, scale), deterministic=True))


def _options_4(ready: Ready, scale: float) -> dict[str, Any]:
    call = ready.call
    bounded = {} if is_told_causal(ready.call) else {"window_size_left": call.left, "window_size_right": call.right}
    return {"softmax_scale": scale, "causal": is_told_causal(ready.call), **bounded}


def _named(kernel: str, name: str) -> Callable[..., Any]:
    module = MODULES[kernel] + (".interface" if kernel == "flash4" else "")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


FLASH2 = Kernel("flash2", FLASH.refuses, _forward_2, by_parts(_backward_2), parts=parted)
FLASH3 = Kernel("flash3", FLASH.refuses, _forward_3, _backward_3)
FLASH4 = Kernel("flash4", FLASH.refuses, _forward_4, _backward_4)
