"""Turns the rows of a sequence that each rank has into attention over all of it: the call that users make.

Assumes that every rank of the group makes the same call, on its rows by the same placement. Does not cut the sequence
(`sequence` does), nor run anything itself (`run` does, behind the operators of `torch_ops`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commdsl.attention import arguments, torch_ops
from commdsl.attention.arguments import Window
from commdsl.attention.placement import Placement
from commdsl.attention.sequence import Ends
from commdsl.machine.errors import ArgumentError
from commdsl.runtime import given, groups
from commdsl.runtime.reporting import reported


@reported()
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any = None,
    schedule: str = "auto",
    causal: bool = False,
    window: Window = None,
    cu_seqlens: Ends = None,
    placement: str | Placement = "zigzag",
    scale: float | None = None,
    layout: str = "BSND",
    kernel: str = "auto",
    tune: Mapping[str, int | str] | None = None,
    *,
    length: int | None = None,
    return_lse: bool = False,
    **others: Any,
) -> Any:
    """softmax(scale * q k^T) v of this rank's queries over the keys of all ranks: a tensor of q's shape.

    q (batch, rows, heads, dim), k and v (batch, rows, heads of keys, dim): this rank's rows of the sequence, as
    `shard_sequence` cuts it by the same `placement` and `cu_seqlens`. bfloat16, float16, float32 or float64, on cpu or
    cuda. Each head of keys serves as many heads of q. `layout`: "BSND", "BNSD" (batch, heads, rows, dim) or "SBND".

    causal: a query sees its own token and those before it. window: of these its own and the W - 1 before it; a pair
    (left, right) is how many before and after, with causal or without. cu_seqlens: of a packed sequence where its
    documents begin and the last ends, [0, 5, 12], for all ranks together; attention stays within a document. It is read
    on the host: a list, or a tensor on the processor. length: the tokens of the whole sequence; unless it or cu_seqlens
    says, every rank has as many as this one.

    schedule: "auto" (`commdsl.attention.choice` says what and why), a shipped one by its name and parameters, "ring" or
    "hamilton K=3", or the path of a `.comm` file of your own, whose way back is its schedule `..._backward`. kernel:
    "auto" or a name of `kernels.MENU`; tune: as of `commdsl.load`. scale: 1 / sqrt(dim) unless said.

    return_lse: also the natural log-sum-exp of the scores, (batch, heads, rows) in float32 (float64 where q is), which
    has no gradient. Rows that see no key are zeros, and -inf there. Memory of the result is rows first: a view.

    Has gradients, which are the same bits in every run. Works under torch.compile(fullgraph=True), and in a capture of
    a CUDA graph after a first call outside. Raises TensorError, ArgumentError, GroupError; MaskError where a schedule
    does not fit the mask; AgreementError where ranks ask for different things.
    """
    if others:
        arguments.refuse(others)
    for one in (q, k, v):
        if not isinstance(one, torch.Tensor) or one.layout is not torch.strided:
            given.tensor("attention", one)
    left, right = arguments.distances(causal, window)
    out, lse, _ = _ops().sequence_attention(
        q,
        k,
        v,
        arguments.ends(cu_seqlens),
        groups.name_of(group),
        _schedule(schedule, (q, k, v), by_heads=not return_lse),
        arguments.tuning_text(tune),
        arguments.placement_text(placement),
        length if length is None else arguments.whole("length", length, 0),
        left,
        right,
        arguments.scaled(scale),
        arguments.one_of("layout", layout, tuple(arguments.LAYOUTS)),
        _text("kernel", kernel),
    )
    if not return_lse:
        return out
    if lse.dim() == 1:
        raise ArgumentError(
            f"`return_lse` is not for `{schedule}`: it exchanges heads for rows, and each rank has it of its heads"
        )
    return out, lse


def _schedule(schedule: str, tensors: Sequence[torch.Tensor], *, by_heads: bool) -> str:
    """What is traced has to know now what a call keeps for its way back: without an exchange of heads, nothing."""
    found = _text("schedule", schedule)
    if found != arguments.AUTO:
        return found
    gradients = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    return arguments.auto_text(gradients, by_heads and not _is_traced(tensors))


def _is_traced(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether torch.compile looks at this call, or it is of fake tensors."""
    if torch.compiler.is_compiling():
        return True
    plain = all(type(one) in (torch.Tensor, torch.nn.Parameter) for one in tensors)
    if plain and not torch._C._len_torch_dispatch_stack():
        return False
    return torch._guards.detect_fake_mode(tensors) is not None


def _text(name: str, value: Any) -> str:
    found = given.text(name, value)
    return arguments.AUTO if found is None else found


def _ops() -> Any:
    """`torch.ops.commdsl`, with the operators in it."""
    if torch.compiler.is_dynamo_compiling():
        from commdsl.runtime.traced import defined  # a second, where torch has traced nothing yet

        defined(torch_ops.__name__)
    else:
        torch_ops.library()
    return torch.ops.commdsl
