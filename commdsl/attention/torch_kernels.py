"""Turns calls into torch's own attention kernels: cuDNN, flash and memory efficient on GPUs, flash on the CPU; and into
plain matrix products, which are the reference.

Assumes shapes and calls that the kernel does not refuse. Does not choose one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from commdsl.attention.flash_parts import by_parts, parted
from commdsl.attention.kernel import Kernel, Ready, Shape, Tensors
from commdsl.attention.masks import Call

HALVES = (torch.bfloat16, torch.float16)


# --- plain ------------------------------------------------------------------------------------------------------------


def _plain_refuses(shape: Shape, call: Call) -> str:
    return "" if shape.dtype.is_floating_point else f"it is not for {shape.dtype}"


def _plain_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ready: Ready, scale: float) -> Tensors:
    q, k, v = (_wide(one) for one in (q, k, v))
    out, lse = torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), -torch.inf)
    for queries, keys, hidden in _sequences(ready, q.device):
        scores = _scores(q[queries], k[keys], hidden, scale)
        part = torch.logsumexp(scores, -1, keepdim=True)
        out[queries] = torch.einsum("hgqk,khd->qhgd", torch.exp(scores - part), v[keys]).flatten(1, 2)
        lse[:, queries] = part.squeeze(-1).flatten(0, 1)
    return out, lse


def _plain_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ready: Ready,
    scale: float,
) -> Tensors:
    dout, q, k, v, out = (_wide(one) for one in (dout, q, k, v, out))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (dout * out).sum(-1).T
    for queries, keys, hidden in _sequences(ready, q.device):
        grouped = _grouped(q[queries], k), _grouped(dout[queries], k)
        share = torch.exp(_scores(q[queries], k[keys], hidden, scale) - _rows(lse[:, queries], k))
        slope = torch.einsum("qhgd,khd->hgqk", grouped[1], v[keys]) - _rows(delta[:, queries], k)
        slope = share * slope * scale
        dq[queries] = torch.einsum("hgqk,khd->qhgd", slope, k[keys]).flatten(1, 2)
        dk[keys] = torch.einsum("hgqk,qhgd->khd", slope, grouped[0])
        dv[keys] = torch.einsum("hgqk,qhgd->khd", share, grouped[1])
    return dq, dk, dv


def _wide(one: torch.Tensor) -> torch.Tensor:
    return one if one.dtype == torch.float64 else one.float()


def _sequences(ready: Ready, device: torch.device) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """The rows of each sequence that is not empty, and which keys a query does not see."""
    call = ready.call
    for first, end, key, key_end, low, high in call.admits():
        hidden: torch.Tensor | None = None
        if low is not None or high is not None:
            rows, columns = torch.arange(end - first, device=device), torch.arange(key_end - key, device=device)
            distance = columns.unsqueeze(0) - rows.unsqueeze(1)
            hidden = torch.zeros_like(distance, dtype=torch.bool)
            if low is not None:
                hidden |= distance < low
            if high is not None:
                hidden |= distance > high
        queries = slice(first - call.queries[0], end - call.queries[0])
        yield queries, slice(key - call.keys[0], key_end - call.keys[0]), hidden


def _grouped(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(rows, heads of keys, heads for each, dim)."""
    return q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])


def _rows(one: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return one.reshape(k.shape[1], -1, one.shape[1], 1)


def _scores(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor | None, scale: float) -> torch.Tensor:
    found: torch.Tensor = torch.einsum("qhgd,khd->hgqk", _grouped(q, k), k) * scale
    return found if hidden is None else found.masked_fill_(hidden, -torch.inf)


PLAIN = Kernel("plain", _plain_refuses, _plain_forward, _plain_backward)


# --- the CPU's flash --------------------------------------------------------------------------------------------------


def _cpu_refuses(shape: Shape, call: Call) -> str:
    if call.is_packed:
        return "it takes one sequence at a time"
    return _plain_refuses(shape, call)


def _cpu_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ready: Ready, scale: float) -> Tensors:
    k, v = (_repeated(one, q) for one in (k, v))
    q, k, v = (_headed(_wide(one)) for one in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, ready.call.is_causal, attn_mask=_bias(ready, q), scale=scale
    )
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0)


def _cpu_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ready: Ready,
    scale: float,
) -> Tensors:
    heads = k.shape[1]
    k, v = (_repeated(one, q) for one in (k, v))
    dout, q, k, v, out = (_headed(_wide(one)) for one in (dout, q, k, v, out))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse.unsqueeze(0), 0.0, ready.call.is_causal, attn_mask=_bias(ready, q), scale=scale
    )
    dq, dk, dv = (one.squeeze(0).transpose(0, 1) for one in (dq, dk, dv))
    return dq, _summed(dk, heads), _summed(dv, heads)


def _headed(one: torch.Tensor) -> torch.Tensor:
    """(rows, heads, dim) as (1, heads, rows, dim)."""
    return one.unsqueeze(0).transpose(1, 2)


def _repeated(one: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return one if one.shape[1] == q.shape[1] else one.repeat_interleave(q.shape[1] // one.shape[1], 1)


def _summed(one: torch.Tensor, heads: int) -> torch.Tensor:
    return one if one.shape[1] == heads else one.unflatten(1, (heads, -1)).sum(2)


def _bias(ready: Ready, q: torch.Tensor) -> torch.Tensor | None:
    """What hides keys where the call is neither full nor causal."""
    if ready.call.is_full or ready.call.is_causal:
        return None
    _, _, hidden = next(_sequences(ready, q.device))
    assert hidden is not None
    return q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


CPU = Kernel("cpu", _cpu_refuses, _cpu_forward, _cpu_backward)


# --- flash on GPUs ----------------------------------------------------------------------------------------------------


def _flash_refuses(shape: Shape, call: Call) -> str:
    if shape.dtype not in HALVES:
        return f"it is for bfloat16 and float16, not {shape.dtype}"
    return "" if shape.dim % 8 == 0 and shape.dim <= 256 else f"heads are of 8 to 256 in eights, not {shape.dim}"


def bounds(call: Call) -> tuple[int, int]:
    """As flash attention is told them: -1 for none."""
    return -1 if call.left is None else call.left, -1 if call.right is None else call.right


def is_told_causal(call: Call) -> bool:
    """Whether that is all that flash attention is told of the bounds."""
    return call.left is None and call.right == 0


def batched(ready: Ready, *given: torch.Tensor) -> Tensors:
    """As flash attention takes them: a batch of one, unless they are packed."""
    return given if ready.cuts is not None else tuple(one.unsqueeze(0) for one in given)


def single(ready: Ready, *made: torch.Tensor) -> Tensors:
    return made if ready.cuts is not None else tuple(one.squeeze(0) for one in made)


def _flash_arguments(ready: Ready, scale: float) -> tuple[list[Any], dict[str, Any]]:
    left, right = bounds(ready.call)
    cuts = (None, None) if ready.cuts is None else ready.cuts
    return [*cuts, *ready.longest, 0.0, is_told_causal(ready.call)], {
        "scale": scale,
        "window_size_left": left,
        "window_size_right": right,
    }


def _flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ready: Ready, scale: float) -> Tensors:
    arguments, named = _flash_arguments(ready, scale)
    given = batched(ready, q, k, v)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*given, *arguments, False, **named)
    return single(ready, out, known(ready, lse))


def known(ready: Ready, lse: torch.Tensor) -> torch.Tensor:
    """Of queries beside no keys flash attention says inf, not -inf."""
    return lse.masked_fill_(lse == torch.inf, -torch.inf) if ready.call.has_gaps else lse


def _flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ready: Ready,
    scale: float,
) -> Tensors:
    arguments, named = _flash_arguments(ready, scale)
    given = batched(ready, dout, q, k, v, out, lse)
    nothing = q.new_empty(0, dtype=torch.int64)  # the state of a generator that nothing is drawn from
    with deterministic():
        made = torch.ops.aten._flash_attention_backward(*given, *arguments, nothing, nothing, **named)
    return single(ready, *made)


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that sum in a fixed order. torch has no other way to ask for one than its switch for all; its public form
    sets more than that one, and would have every new tensor filled.
    """
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling: Any = torch.utils.deterministic
    fills = filling.fill_uninitialized_memory
    filling.fill_uninitialized_memory = False
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(was, warn_only=warns)
        filling.fill_uninitialized_memory = fills


FLASH = Kernel("flash", _flash_refuses, _flash_forward, by_parts(_flash_backward), parts=parted)


# --- cuDNN ------------------------------------------------------------------------------------------------------------


def _cudnn_refuses(shape: Shape, call: Call) -> str:
    if shape.dtype not in HALVES:
        return f"it is for bfloat16 and float16, not {shape.dtype}"
    if shape.dim % 8 or shape.dim > 128:
        return f"heads are of 8 to 128 in eights, not {shape.dim}"
    if call.is_packed:
        return "it takes one sequence at a time"
    if not (call.is_full or call.is_causal):
        return "it has no window"
    short = min(call.queries[1] - call.queries[0], call.keys[1] - call.keys[0]) < 2
    return "it has no sequence of one token" if short else ""


def _cudnn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ready: Ready, scale: float) -> Tensors:
    q, k, v = (_headed(one) for one in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, ready.call.is_causal, False, scale=scale
    )
    return out.squeeze(0).transpose(0, 1), lse.view(q.shape[1], q.shape[2])


def _cudnn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ready: Ready,
    scale: float,
) -> Tensors:
    """torch keeps cuDNN's graphs by the strides of q, k and v alone, so those of the others must always be the same."""
    m, n = ready.longest
    nothing = q.new_empty(0, dtype=torch.int64)
    dout, q, k, v, out = (_headed(one) for one in (dout, q, k, v, out))
    made = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.view(1, *lse.shape, 1),
        nothing,
        nothing,
        None,
        None,
        None,
        m,
        n,
        0.0,
        ready.call.is_causal,
        scale=scale,
    )
    dq, dk, dv = (one.squeeze(0).transpose(0, 1) for one in made)
    return dq, dk, dv


CUDNN = Kernel("cudnn", _cudnn_refuses, _cudnn_forward, _cudnn_backward, is_exact=False)


# --- memory efficient: float32 on GPUs --------------------------------------------------------------------------------

LSE_ROWS = 32
"""The kernel keeps log-sum-exps in multiples of so many rows."""


def _efficient_refuses(shape: Shape, call: Call) -> str:
    if call.is_packed:
        return "it takes one sequence at a time"
    if shape.dtype not in (*HALVES, torch.float32):
        return f"it is not for {shape.dtype}"
    if shape.dim % 8:
        return f"heads are a multiple of 8, not {shape.dim}"
    return "" if call.is_full or call.is_causal else "it has no window"


def _efficient_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ready: Ready, scale: float) -> Tensors:
    k, v = (_repeated(one, q) for one in (k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        _headed(q), _headed(k), _headed(v), None, True, 0.0, ready.call.is_causal, scale=scale
    )
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).narrow(1, 0, q.shape[0])


def _efficient_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ready: Ready,
    scale: float,
) -> Tensors:
    heads = k.shape[1]
    k, v = (_repeated(one, q) for one in (k, v))
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[1] % LSE_ROWS), value=torch.inf)
    nothing = q.new_empty(0, dtype=torch.int64)
    dout, q, k, v, out = (_headed(one) for one in (dout, q, k, v, out))
    with deterministic():
        made = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            dout,
            q,
            k,
            v,
            None,
            out,
            padded.unsqueeze(0),
            nothing,
            nothing,
            0.0,
            [True, True, True, False],
            ready.call.is_causal,
            scale=scale,
        )
    dq, dk, dv = (one.squeeze(0).transpose(0, 1) for one in made[:3])
    return dq, _summed(dk, heads), _summed(dv, heads)


EFFICIENT = Kernel("efficient", _efficient_refuses, _efficient_forward, _efficient_backward)
