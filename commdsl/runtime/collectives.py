"""Turns a tensor and a group into a collective: the op that the table of this device chooses for the size.

Assumes that every rank passes a tensor of the same size and dtype, on GPUs of one kind, and has the same tables: then
all choose alike. Does not measure (`measure` does) and does not run kernels; the chosen Op does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

import torch
from torch._C import _len_torch_dispatch_stack

from commdsl.machine.config import from_environment
from commdsl.planner.tuning import selection
from commdsl.planner.tuning.selection import COLLECTIVES, Choice
from commdsl.runtime import collective_ops, given, groups, menu
from commdsl.runtime.eager import refuse_transforms
from commdsl.runtime.given import Patience, Reduction
from commdsl.runtime.reporting import reported


@reported()
def all_reduce(
    x: torch.Tensor,
    op: Reduction = "sum",
    group: Any = None,
    async_op: bool = False,
    timeout: Patience = None,
    wire: str | None = None,
    **others: Never,
) -> Any:
    """Every rank's x combined by sum, avg, max, min or prod: a new tensor of x's shape, the same bits on every rank.

    op: one of these names, or a torch.distributed.ReduceOp.
    x: contiguous, of any shape; float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8 or bool. Integers
    wrap; of bool the sum and max are `or`, the prod and min `and`. Floating types alone have avg, which overflows no
    partial sum; schedules/README.md says how both are rounded. `group` is a process group or its name, the default
    group unless said. With `async_op` a Work whose `wait()` returns the tensor. The gradient, for sum and avg, is the
    all-reduce of the gradients: x requires one on all ranks or on none, as the backward pass of a rank without makes no
    call, for which the others wait. Raises TensorError, ReductionError, GroupError.

    `wire="float8"`: x, of float32, float16 or bfloat16, travels in 33 bytes for 64 of bfloat16. Each rank's
    numbers are rounded to float8 once before they are combined, in float32, and the result once more: 128 neighbours
    share a scale, so each rounding is by at most a 16th of the number, or by 2**-17 of the largest of the 128.
    So do gradients. Rounding takes time: between two H200s it is the faster way of bfloat16 from 4 MB, clearly so from
    16 MB, and the slower one below.
    """
    if others:
        given.unexpected("all_reduce", all_reduce, others)
    if _is_traced("all_reduce", x) and not async_op:
        name = groups.name_of(group)
        return collective_ops.ops(x).all_reduce(x, name, given.reduction(op), timeout=given.seconds(timeout), wire=wire)
    return menu.run("all_reduce", x, x.nbytes, group, op=op, async_op=async_op, timeout=timeout, wire=wire)


@reported()
def all_reduce_(
    x: torch.Tensor,
    op: Reduction = "sum",
    group: Any = None,
    async_op: bool = False,
    timeout: Patience = None,
    **others: Never,
) -> Any:
    """As `all_reduce`, the result in x, which is returned; with `async_op` a Work, and x is the result when that is
    completed.

    Where the chosen schedule is not proved to work in place, the result is copied into x. Has no gradient.
    """
    if others:
        given.unexpected("all_reduce_", all_reduce_, others)
    traced = _is_traced("all_reduce_", x)
    if async_op:
        collective_ops.refuse_gradient(x)
        return menu.all_reduce_in_place(x, group, op, timeout, async_op=True)
    if traced:
        collective_ops.ops(x).all_reduce_(x, groups.name_of(group), given.reduction(op), given.seconds(timeout))
    else:
        menu.all_reduce_in_place(x, group, op, timeout)
    return x


@reported()
def all_gather(
    x: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    timeout: Patience = None,
    wire: str | None = None,
    output_split_sizes: Sequence[int] | None = None,
    **others: Never,
) -> Any:
    """Every rank's x, in rank order along dimension 0: (n, ...) -> (P * n, ...).

    x: contiguous, of any dtype. With `async_op` a Work. The gradient is the reduce-scatter of the gradients.

    `output_split_sizes`: how many rows each rank has, where they are not as many; 0 is a number. It is the same on all
    ranks, which is compared as the call is made (AgreementError); a CUDA graph keeps it. Then x is (n of this rank,
    ...) and the result (the sum of all, ...).

    `wire="float8"`: x, of float32, float16 or bfloat16, is rounded once on its way, as for `all_reduce`, to the same
    bits on every rank; gradients are not. It is faster and slower from the same sizes, of the result.
    """
    if others:
        given.unexpected("all_gather", all_gather, others)
    if output_split_sizes is not None:
        given.alone("output_split_sizes", "wire", wire)
        return _uneven("all_gather", x, output_split_sizes, group, async_op=async_op, timeout=timeout)
    if _is_traced("all_gather", x) and not async_op:
        return collective_ops.ops(x).all_gather(x, groups.name_of(group), timeout=given.seconds(timeout), wire=wire)
    nbytes = x.nbytes * menu.size(group)
    return menu.run("all_gather", x, nbytes, group, async_op=async_op, timeout=timeout, wire=wire)


@reported()
def reduce_scatter(
    x: torch.Tensor,
    op: Reduction = "sum",
    group: Any = None,
    async_op: bool = False,
    timeout: Patience = None,
    input_split_sizes: Sequence[int] | None = None,
    **others: Never,
) -> Any:
    """This rank's block of every rank's x combined: (P * n, ...) -> (n, ...).

    x: contiguous, its first dimension a multiple of the ranks; dtypes and operations as for `all_reduce`. With
    `async_op` a Work. The gradient, for sum and avg, is the all-gather of the gradients.

    `input_split_sizes`: how many rows of x are each rank's, where they are not as many; as for `all_gather`.
    """
    if others:
        given.unexpected("reduce_scatter", reduce_scatter, others)
    if input_split_sizes is not None:
        return _uneven("reduce_scatter", x, input_split_sizes, group, op=op, async_op=async_op, timeout=timeout)
    if _is_traced("reduce_scatter", x) and not async_op:
        return collective_ops.ops(x).reduce_scatter(
            x, groups.name_of(group), given.reduction(op), timeout=given.seconds(timeout)
        )
    return menu.run("reduce_scatter", x, x.nbytes, group, op=op, async_op=async_op, timeout=timeout)


@reported()
def all_to_all(
    x: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    timeout: Patience = None,
    **others: Never,
) -> Any:
    """Block q of rank p's x is block p of rank q's result: equal blocks along dimension 0, x's shape.

    x: contiguous, of any dtype, its first dimension a multiple of the ranks. With `async_op` a Work. The gradient is
    the all-to-all of the gradients.

    `input_split_sizes`: how many rows of x go to each rank, `output_split_sizes`: how many come from each, where they
    are not as many; 0 is a number. A rank says its own: what it sends to another has to be what that one expects of it,
    which the kernel compares before anything is received (AgreementError). A CUDA graph keeps them.
    """
    if others:
        given.unexpected("all_to_all", all_to_all, others)
    splits = given.both(output_split_sizes=output_split_sizes, input_split_sizes=input_split_sizes)
    if splits is not None:
        came, sent = splits
        return _uneven("all_to_all", x, (*sent, *came), group, async_op=async_op, timeout=timeout)
    if _is_traced("all_to_all", x) and not async_op:
        return collective_ops.ops(x).all_to_all(x, groups.name_of(group), timeout=given.seconds(timeout))
    return menu.run("all_to_all", x, x.nbytes, group, async_op=async_op, timeout=timeout)


@reported()
def broadcast(
    x: torch.Tensor, root: int = 0, group: Any = None, async_op: bool = False, timeout: Patience = None, **others: Never
) -> Any:
    """The x of rank `root` of the group, on every rank: a new tensor of x's shape.

    x: contiguous, of any dtype; the other ranks' x says shape, dtype and device. Each root is a kernel and a workspace
    of its own. With `async_op` a Work. The gradient is the sum of the gradients at the root, and zero elsewhere.
    """
    if others:
        given.unexpected("broadcast", broadcast, others)
    if _is_traced("broadcast", x) and not async_op:
        return collective_ops.ops(x).broadcast(x, groups.name_of(group), root, timeout=given.seconds(timeout))
    return menu.run("broadcast", x, x.nbytes, group, root=root, async_op=async_op, timeout=timeout)


def choice(collective: str, nbytes: int, ranks: int, device_name: str | None = None) -> Choice:
    """Return the schedule that runs for `nbytes` bytes on the larger side of one rank, and why.

    It depends on nothing else: not on the rank, the group, the dtype or earlier calls. `device_name`: the GPU, by the
    rule of `commdsl.machine.devices` (`H200` is `NVIDIA H200`); default: this process's GPU. The reason names a GPU
    that is not known. Raises ArgumentError.
    """
    given.whole("nbytes", nbytes, 0)
    given.whole("ranks", ranks, 1)
    config = from_environment()
    device = menu.name_of_device(menu.home()) if device_name is None else device_name
    tables = selection.known_tables(config.tables)
    return selection.choose(tables, collective, nbytes, ranks, device, plain=config.has_far)


@reported()
def prepare(
    collectives: Sequence[str] = COLLECTIVES,
    max_bytes: int | None = None,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    ops: Sequence[Reduction] = ("sum",),
    group: Any = None,
    device: torch.device | None = None,
    root: int = 0,
) -> tuple[str, ...]:
    """Collective: sets up what calls of up to `max_bytes` (of any size unless said) may choose, so that the first of
    them may stand in a CUDA graph capture. Returns the names of the ops.

    Every op among them keeps symmetric memory until `shutdown`, so name what will be called and no more.
    """
    if isinstance(collectives, str):
        collectives = (collectives,)
    if max_bytes is not None:
        given.whole("max_bytes", max_bytes, 0)
    ranks, where, found = menu.size(group), device or menu.home(), dict[str, None]()
    for collective in collectives:
        for chosen in menu.of_group(collective, group, where, root).up_to(max_bytes):
            found[chosen.name] = None
            for dtype in dtypes:
                given.element(dtype)
                x = torch.zeros(ranks * 16, dtype=dtype, device=where)
                for reduction in ops if chosen.has_reduction else ("sum",):
                    chosen(x, group=group, op=reduction)
    return tuple(found)


def _uneven(
    name: str,
    x: torch.Tensor,
    lengths: Sequence[int],
    group: Any,
    *,
    op: Reduction | None = None,
    async_op: bool,
    timeout: Patience,
) -> Any:
    """A collective of blocks that have lengths of their own; `op` of one that reduces."""
    if _is_traced(name, x) and not async_op:
        settings = () if op is None else (given.reduction(op),)
        call = getattr(collective_ops.ops(x), f"{name}_uneven")
        return call(x, [*lengths], groups.name_of(group), *settings, timeout=given.seconds(timeout))
    lengths = tuple(lengths)
    return menu.run(name, x, x.nbytes, group, op=op or "sum", async_op=async_op, timeout=timeout, lengths=lengths)


def _is_traced(name: str, x: torch.Tensor) -> bool:
    """Whether torch looks on: a graph is being recorded, of calls or of gradients, or a mode sees every call, which is
    then shown the collective and not the schedule that is chosen for it. Refuses what is no dense tensor.
    """
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        given.tensor(name, x)
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack():
        return True
    has_gradient = x.requires_grad and torch.is_grad_enabled()
    if has_gradient:
        refuse_transforms((x,))
    return has_gradient
