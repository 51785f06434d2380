"""Turns documents of ranks into attention by `Dispatcher.attend`, and into the same of each document by itself.

Assumes a group, of threads or of GPUs. `test_attend.py` runs it on host ranks, `gpu/run_dispatch.py` on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from commdsl import dispatch

HEADS, KEY_HEADS, DIM = 4, 2, 8

Documents = Sequence[Sequence[int]]


def sender_of(group: Any, tokens: int, dtype: Any = torch.float32, device: Any = "cpu", **options: Any) -> Any:
    return dispatch.Dispatcher.for_tokens(tokens, HEADS, KEY_HEADS, DIM, dtype, group=group, device=device, **options)


def routed(group: Any, lengths: Documents, device: Any = "cpu", **terms: Any) -> Any:
    return dispatch.plan(lengths, group=group, device=device, **terms)


def drawn(rows: int, seed: int, dtype: Any = torch.float32) -> list[Any]:
    """q, k and v of a rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, HEADS, DIM), (rows, KEY_HEADS, DIM), (rows, KEY_HEADS, DIM))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def whole(lengths: Sequence[int], q: Any, k: Any, v: Any, causal: bool = True) -> Any:
    """Each document by itself, all on one rank."""
    found = []
    for document in zip(*(one.split(list(lengths)) for one in (q, k, v)), strict=True):
        heads = [one.transpose(0, 1)[None] for one in document]
        found.append(scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(found)


def differ(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The largest difference, as a part of the largest value."""
    pairs = [(one.detach().double(), other.detach()) for one, other in zip(found, wanted, strict=True) if one.numel()]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


class Layer(torch.nn.Module):
    """Attention between two projections, beside a way around it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        width, out = HEADS * DIM, (HEADS + 2 * KEY_HEADS) * DIM
        self.into = torch.nn.Parameter(torch.randn(width, out, generator=generator) / width**0.5)
        self.back = torch.nn.Parameter(torch.randn(width, width, generator=generator) / width**0.5 / 8)

    def forward(self, x: Any, attend: Any) -> Any:
        heads = (x @ self.into).view(len(x), -1, DIM)
        q, k, v = (one.contiguous() for one in heads.split((HEADS, KEY_HEADS, KEY_HEADS), 1))
        return x + attend(q, k, v).flatten(1) @ self.back


def trained(layers: Sequence[Layer], x: Any, attend: Any, *, again: bool) -> list[Any]:
    """What all layers make of x, and the gradients of x and of each parameter."""
    x = x.detach().requires_grad_()
    out = x
    for layer in layers:
        out = checkpoint(layer, out, attend, use_reentrant=False) if again else layer(out, attend)
    parameters = [one for layer in layers for one in layer.parameters()]
    return [out.detach(), *torch.autograd.grad(out.square().mean(), [x, *parameters])]


def apart_after(layers: int, group: Any, rank: int, lengths: Documents, *, again: bool, device: Any = "cpu") -> float:
    """How far a model of so many layers is from the same in float64 on one rank: results and gradients. `again`:
    activations are computed again on the way back.
    """
    route = routed(group, lengths, device=device)
    sender = sender_of(group, max(map(sum, lengths)), device=device)
    found, wide = (
        [Layer(seed).to(device, dtype) for seed in range(layers)] for dtype in (torch.float32, torch.float64)
    )
    x = torch.randn(route.rows, HEADS * DIM, generator=torch.Generator().manual_seed(rank)).to(device)
    made = trained(found, x, lambda q, k, v: sender.attend(q, k, v, route), again=again)
    wanted = trained(wide, x.double(), lambda q, k, v: whole(lengths[rank], q, k, v), again=False)
    apart = differ(made, wanted)
    sender.release()
    return apart
