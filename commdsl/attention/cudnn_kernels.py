"""Turns calls into cuDNN's attention whose gradients are asked to be summed in a fixed order, by the package `cudnn`
(nvidia-cudnn-frontend): torch has no word for that.

Assumes shapes and calls that torch's cuDNN kernel takes, and Hopper or Blackwell. Does not import the package before
the kernel is asked for. The fixed order costs cuDNN a workspace of keys times queries times heads, so large calls are
made in parts: some heads at a time, and of long sequences some queries.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeAlias

import torch

from commdsl.attention.kernel import Kernel, Ready, Tensors
from commdsl.attention.torch_kernels import CUDNN

MODULE = "cudnn"
MOST = 1 << 29
"""Bytes of such a workspace, at most."""

BLOCK = 128
"""Queries of a part are a multiple of so many."""

Sizes: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Graph:
    """What cuDNN built for tensors of these sizes: run with tensors in the order of `ports`."""

    graph: Any
    handle: Any
    ports: tuple[Any, ...]
    workspace: int  # bytes


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ready: Ready,
    scale: float,
) -> Tensors:
    m, n = ready.longest
    serves = q.shape[1] // k.shape[1]
    parts = list(_parts(m, n, serves, ready.call.is_causal))
    if len(parts) == 1:
        made = tuple(torch.empty_like(one) for one in (q, k, v))
        _by_heads((dout, q, k, v, out), lse, made, ready.call.is_causal, scale)
        return made
    sums = tuple(torch.zeros_like(one, dtype=torch.float32) for one in (q, k, v))
    for queries, keys, is_causal in parts:
        given = (dout[queries], q[queries], k[keys], v[keys], out[queries])
        made = tuple(torch.empty_like(one) for one in given[1:4])
        _by_heads(given, lse[:, queries].contiguous(), made, is_causal, scale)
        for total, part, rows in zip(sums, made, (queries, keys, keys), strict=True):
            total[rows] += part
    return sums


def _parts(m: int, n: int, serves: int, is_causal: bool) -> Iterator[tuple[slice, slice, bool]]:
    """Queries and keys of each part, and whether it is a triangle, so that the heads of one head of keys fit."""
    rows = m if _bytes(m, n, serves) <= MOST else max(BLOCK, MOST // _bytes(1, n, serves) // BLOCK * BLOCK)
    for first in range(0, m, rows):
        end = min(first + rows, m)
        if not is_causal:
            yield slice(first, end), slice(0, n), False
            continue
        if first:
            yield slice(first, end), slice(0, first), False
        yield slice(first, end), slice(first, end), True


def _bytes(m: int, n: int, heads: int) -> int:
    """Of the workspace, in which keys are a multiple of 64, and queries of more than one too."""
    return 2 * heads * (m if m == 1 else -(-m // 64) * 64) * (-(-n // 64) * 64)


def _by_heads(given: Tensors, lse: torch.Tensor, made: Tensors, is_causal: bool, scale: float) -> None:
    """As many heads of keys at a time as fit, with those of queries that they serve."""
    _, q, k, *_ = given
    serves = q.shape[1] // k.shape[1]
    at_once = max(1, MOST // _bytes(len(q), len(k), serves))
    for first in range(0, k.shape[1], at_once):
        of_keys = slice(first, min(first + at_once, k.shape[1]))
        heads = slice(of_keys.start * serves, of_keys.stop * serves)
        chosen = (heads, heads, of_keys, of_keys, heads)
        some = [one[:, part] for one, part in zip(given, chosen, strict=True)]
        some += [one[:, part] for one, part in zip(made, (heads, of_keys, of_keys), strict=True)]
        tensors = [one.unsqueeze(0).transpose(1, 2) for one in some]
        tensors.insert(5, lse[heads].view(1, -1, lse.shape[1], 1))
        _run(tensors, is_causal, scale)


def _run(tensors: list[torch.Tensor], is_causal: bool, scale: float) -> None:
    """dout, q, k, v, out and lse, then the gradients, (1, heads, rows, dim) all."""
    q = tensors[1]
    where = (q.device, threading.get_ident())  # a handle is one thread's
    sizes = tuple((tuple(one.shape), tuple(one.stride())) for one in tensors)
    made = _graph(where, q.dtype, sizes, is_causal, scale)
    import_module(MODULE).set_stream(handle=made.handle, stream=_stream(q.device))
    workspace = torch.empty(made.workspace, dtype=torch.uint8, device=q.device)
    made.graph.execute(dict(zip(made.ports, tensors, strict=True)), workspace, handle=made.handle)


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


@lru_cache(16)
def _handle(where: tuple[torch.device, int]) -> Any:
    with torch.cuda.device(where[0]):
        return import_module(MODULE).create_handle()


@lru_cache(512)
def _graph(
    where: tuple[torch.device, int],
    dtype: torch.dtype,
    sizes: tuple[tuple[Sizes, Sizes], ...],
    is_causal: bool,
    scale: float,
) -> Graph:
    """Not while a CUDA graph is captured."""
    cudnn = import_module(MODULE)
    types = cudnn.data_type
    half, single = types.BFLOAT16 if dtype == torch.bfloat16 else types.HALF, types.FLOAT
    handle = _handle(where)
    graph = cudnn.pygraph(io_data_type=half, intermediate_data_type=single, compute_data_type=single, handle=handle)
    names = ("dO", "q", "k", "v", "o", "stats")
    ports = {
        name: graph.tensor(name=name, dim=list(dim), stride=list(stride), data_type=single if name == "stats" else half)
        for name, (dim, stride) in zip(names, sizes[:6], strict=True)
    }
    made = graph.sdpa_backward(
        name="backward", **ports, attn_scale=scale, use_causal_mask=is_causal, use_deterministic_algorithm=True
    )
    for one, (dim, stride) in zip(made, sizes[6:], strict=True):
        one.set_output(True).set_dim(list(dim)).set_stride(list(stride)).set_data_type(half)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return Graph(graph, handle, (*ports.values(), *made), max(1, graph.get_workspace_size()))


EXACT = Kernel("cudnn_exact", CUDNN.refuses, CUDNN.forward, _backward)
