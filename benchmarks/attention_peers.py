"""Turns one rank's queries, keys and values into calls of what others have: a zigzag ring over NCCL's sends and
receives, and torch's `context_parallel`.

Assumes causal attention of one sequence, placed zigzag: a rank's rows are part r and part 2 P - 1 - r of 2 P. The ring
is a plain loop with the kernel and the merge that commdsl's has; gradients of keys and values travel in float32. Does
not measure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn import functional

from commdsl.attention.kernel import Kernel, ready
from commdsl.attention.masks import Call
from commdsl.attention.merge import Merging, Partial

Tensors: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Inputs:
    """A rank's rows: q and dout (tokens, heads, dim), k and v (tokens, heads of keys, dim)."""

    rank: int
    ranks: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @staticmethod
    def empty(rank: int, ranks: int, tokens: int, heads: tuple[int, int], dim: int, like: torch.Tensor) -> Inputs:
        q, k = (like.new_empty(tokens, count, dim) for count in heads)
        return Inputs(rank, ranks, q, k, torch.empty_like(k), torch.empty_like(q))

    @property
    def tensors(self) -> Tensors:
        return self.q, self.k, self.v, self.dout

    @property
    def tokens(self) -> int:
        return self.q.shape[0]

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    @property
    def kv_bytes(self) -> int:
        """Of a rank's keys and values."""
        return self.k.nbytes + self.v.nbytes

    def refill(self, seed: int) -> None:
        """Numbers that differ by rank, tensor, place and seed."""
        generator = torch.Generator(self.q.device).manual_seed(1000 * seed + self.rank)
        for tensor in self.tensors:
            tensor.normal_(generator=generator)


# --- one GPU ----------------------------------------------------------------------------------------------------------


def of_one_gpu(inputs: Inputs, kernel: Kernel, head: int, group: Any, *, backward: bool) -> Tensors:
    """What attention of the gathered sequence gives for one head of keys and the queries that it serves: the rank's
    rows of out, and with `backward` of the gradients of q, k and v.
    """
    served = inputs.q.shape[1] // inputs.k.shape[1]
    heads = slice(head * served, (head + 1) * served)
    q, k, v, dout = (
        _gathered(one, inputs.ranks, group)
        for one in (
            inputs.q[:, heads],
            inputs.k[:, head : head + 1],
            inputs.v[:, head : head + 1],
            inputs.dout[:, heads],
        )
    )
    whole = (0, q.shape[0])
    call = ready(Call(whole, whole, None, 0), q.device)
    out, lse = kernel.forward(q, k, v, call, inputs.scale)
    found: Tensors = (out,)
    if backward:
        found += kernel.backward(dout, q, k, v, out, lse.contiguous(), call, inputs.scale)
    parts = inputs.rank, 2 * inputs.ranks - 1 - inputs.rank
    return tuple(torch.cat([one.chunk(2 * inputs.ranks)[part] for part in parts]) for one in found)


def _gathered(rows: torch.Tensor, ranks: int, group: Any) -> torch.Tensor:
    """All ranks' rows in the order of the sequence."""
    parts = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, rows.contiguous(), group=group)
    halves = [part.chunk(2) for part in parts]
    return torch.cat([front for front, _ in halves] + [back for _, back in reversed(halves)])


# --- a ring over NCCL -------------------------------------------------------------------------------------------------


class ZigzagRing:
    """As ring-flash-attention's users know it: P - 1 hops of keys and values, P of their gradients."""

    def __init__(self, inputs: Inputs, there: Kernel, back: Kernel, group: Any = None) -> None:
        self._inputs = inputs
        self._there, self._back = there, back
        self._group = group
        tokens, device = inputs.tokens, inputs.q.device
        every, front, back = slice(0, tokens), slice(0, tokens // 2), slice(tokens // 2, tokens)
        whole, half = (0, tokens), (0, tokens // 2)
        own = every, every, ready(Call(whole, whole, None, 0), device)
        earlier = every, front, ready(Call(whole, half, None, None), device)
        later = back, every, ready(Call(half, whole, None, None), device)
        owners = [(inputs.rank - step) % inputs.ranks for step in range(inputs.ranks)]
        self._steps = [own if owner == inputs.rank else earlier if owner < inputs.rank else later for owner in owners]

    def forward(self) -> Tensors:
        """The output and its log-sum-exp."""
        given = self._inputs
        merging = Merging(given.tokens, given.q.dtype)
        current: Tensors = (given.k, given.v)
        for step, (queries, keys, call) in enumerate(self._steps):
            coming = _Exchange(self, current, step + 1 < len(self._steps))
            k, v = current
            out, lse = self._there.forward(given.q[queries], k[keys], v[keys], call, given.scale)
            merging.add(Partial(queries, out, lse))
            current = coming.wait()
        return merging.result(given.q, torch.float32)

    def both(self) -> Tensors:
        """The output and the gradients of q, k and v."""
        given = self._inputs
        out, lse = self.forward()
        lse = lse.contiguous()
        dq = torch.zeros_like(given.q, dtype=torch.float32)
        current: Tensors = (given.k, given.v)
        gradients: Tensors = tuple(torch.zeros_like(one, dtype=torch.float32) for one in current)
        carried: _Exchange | None = None
        for step, (queries, keys, call) in enumerate(self._steps):
            coming = _Exchange(self, current, step + 1 < len(self._steps))
            k, v = (one[keys] for one in current)
            rows = (given.dout[queries], given.q[queries], k, v, out[queries], lse[:, queries].contiguous())
            made = self._back.backward(*rows, call, given.scale)
            dq[queries] += made[0]
            if carried is not None:
                gradients = carried.wait()
            for gradient, part in zip(gradients, made[1:], strict=True):
                gradient[keys] += part
            carried = _Exchange(self, gradients, True)
            current = coming.wait()
        assert carried is not None
        dk, dv = carried.wait()
        return out, dq.to(given.q.dtype), dk.to(given.k.dtype), dv.to(given.v.dtype)

    def kernels_alone(self, backward: bool) -> Callable[[], Tensors]:
        """What calls the kernel as a pass does, with what is here, and does nothing else."""
        given = self._inputs
        calls = [(given.q[queries], given.k[keys], given.v[keys], call) for queries, keys, call in self._steps]
        if not backward:

            def forward() -> Tensors:
                return [self._there.forward(*call, given.scale) for call in calls][-1]

            return forward
        whole = (0, given.tokens)
        out, lse = self._back.forward(
            given.q, given.k, given.v, ready(Call(whole, whole, None, 0), given.q.device), given.scale
        )
        rows = [(given.dout[queries], out[queries], lse[:, queries].contiguous()) for queries, _, _ in self._steps]

        def both() -> Tensors:
            for call in calls:
                self._there.forward(*call, given.scale)
            made: Tensors = ()
            for (q, k, v, call), (dout, part, sums) in zip(calls, rows, strict=True):
                made = self._back.backward(dout, q, k, v, part, sums, call, given.scale)
            return made

        return both

    def started(self, tensors: Tensors) -> tuple[list[Any], Tensors]:
        """On their way to the next rank, and those of the rank before on theirs."""
        rank, ranks = self._inputs.rank, self._inputs.ranks
        into = tuple(torch.empty_like(one) for one in tensors)
        there, back = ((rank + step) % ranks for step in (1, -1))
        moves = [dist.P2POp(dist.isend, one, there, self._group) for one in tensors]
        moves += [dist.P2POp(dist.irecv, one, back, self._group) for one in into]
        return dist.batch_isend_irecv(moves), into


class _Exchange:
    """Tensors on their way round the ring; those that stay where they are need no wait."""

    def __init__(self, ring: ZigzagRing, tensors: Tensors, moves: bool) -> None:
        self._sent = tensors  # kept until they have arrived
        self._works, self._into = ring.started(tensors) if moves else ([], tensors)

    def wait(self) -> Tensors:
        for work in self._works:
            work.wait()
        return self._into


# --- torch's context_parallel -----------------------------------------------------------------------------------------

METHODS = {"all-gather": "allgather", "all-to-all": "alltoall"}


class ContextParallel:
    """`torch.distributed.tensor.experimental.context_parallel`, on rows that lie as its own balancer places them.

    Inside its context once for all calls: on entering it copies indices from the host.
    """

    def __init__(self, inputs: Inputs, mesh: Any, method: str, backend: Any) -> None:
        self._inputs = inputs
        self._mesh = mesh
        self._method = METHODS[method]
        self._backend = backend
        # (1, heads, tokens, dim), as its authors call it.
        self._own = [one.transpose(0, 1).contiguous()[None] for one in inputs.tensors]
        for one in self._own[:3]:
            one.requires_grad_()

    def prepare(self) -> None:
        with torch.no_grad():
            for own, given in zip(self._own, self._inputs.tensors, strict=True):
                own[0].copy_(given.transpose(0, 1))

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Where calls are made."""
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method
        from torch.nn.attention import sdpa_kernel

        ranks, device = self._inputs.ranks, self._inputs.q.device
        like = torch.zeros(2 * ranks, device=device)  # its length is what the balancer goes by
        set_rotate_method(self._method)
        with sdpa_kernel(self._backend), context_parallel(self._mesh, buffers=[like], buffer_seq_dims=[0]):
            yield

    def forward(self) -> Tensors:
        with torch.no_grad():
            return (self._attend(),)

    def both(self) -> Tensors:
        out = self._attend()
        q, k, v, dout = self._own
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    def _attend(self) -> torch.Tensor:
        q, k, v, _ = self._own
        has_groups = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=has_groups)

    @staticmethod
    def rows(made: Tensors) -> Tensors:
        """As (tokens, heads, dim)."""
        return tuple(one[0].transpose(0, 1) for one in made)
