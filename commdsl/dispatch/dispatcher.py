"""Turns launches into a torch op, `torch.ops.commdsl.move_rows`, and names the calls users make.

Assumes tensors whose first dimension is rows. Does not know symmetric memory or tables (`launcher`, `route`). The op's
gradient is the op the other way: what went to several ranks is summed on its return, and what is summed goes to all of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Self

import torch

from commdsl.attention.arguments import scaled
from commdsl.dispatch.attended import check
from commdsl.dispatch.attended import register as register_attention
from commdsl.dispatch.launcher import Launcher, known
from commdsl.dispatch.limits import Limits
from commdsl.dispatch.repeats import Asked, Repeat
from commdsl.dispatch.route import Route, Way, checked
from commdsl.runtime import given, groups
from commdsl.runtime.eager import skips_dispatcher
from commdsl.runtime.errors import DispatchError, TensorError
from commdsl.runtime.operators import define
from commdsl.runtime.registry import registry
from commdsl.runtime.reporting import reported

SCHEMA = (
    "move_rows(Tensor[] inputs, Tensor there, Tensor back, SymInt[] rows, str way, bool clear, bool clear_back, "
    "str dispatcher, str about) -> Tensor[]"
)


class Dispatcher(Launcher):
    """Moves the rows of queries, keys and values to where a Route says, and back: functional ops with gradients, on the
    current stream, that graphs can capture.

    Source: `DispatcherWrapper` and `dispatch_qkv` of DistCA (hao-ai-lab/DistCA, July 2025).
    """

    def __init__(self, limits: Limits, *arguments: Any, **options: Any) -> None:
        super().__init__(limits, *arguments, **options)
        register()
        register_attention()

    @classmethod
    @reported()
    def for_tokens(
        cls,
        tokens: int,
        heads: int,
        key_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        group: Any = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Self:
        """Collective: for any Route of `dispatch.plan` whose ranks have at most `tokens` tokens each, with q of
        (tokens, heads, head_dim), k and v of (tokens, key_heads, head_dim). `options`: as of a Dispatcher.
        """
        widths = tuple(number * head_dim * dtype.itemsize for number in (heads, key_heads, key_heads))
        ranks = groups.size_of(groups.name_of(group)) or 1
        return cls(Limits.for_tokens(tokens, ranks, widths), group, device, **options)

    @reported("self")
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        route: Route,
        *,
        scale: float | None = None,
        kernel: str = "auto",
    ) -> torch.Tensor:
        """Attention of this rank's documents, computed where `route` sends their queries: (route.rows, heads, dim).

        q (route.rows, heads, dim), k and v (route.rows, key heads, dim), contiguous, of one dtype; each head of keys
        serves as many heads of q. scale: 1 / sqrt(dim) unless said. kernel: "auto", by the rule of
        `commdsl.attention.kernels`, or a name of its menu. Has gradients, through any number of calls; under activation
        checkpointing the rows travel again. Raises TensorError (C951), DispatchError (C961), ArgumentError (C973).
        """
        spans = checked(route).attention
        check(q, k, v)
        factor = scaled(scale)
        factor = q.shape[2] ** -0.5 if factor is None else factor
        about = f"attention with scale {factor!r}"
        rows = (route.queries, route.keys)
        q_here, k_here, v_here = self._move((q, k, v), route, Way.ALL, rows, (route.rows,) * 2, False, about)
        out, _ = torch.ops.commdsl.attend_spans(q_here, k_here, v_here, spans.handle, factor, kernel)
        return self._move((out,), route, Way.QUERIES_BACK, (route.rows, 0), (route.queries, 0), False, about)[0]

    def __reduce__(self) -> NoReturn:
        raise DispatchError("a Dispatcher has memory on a group, and is not copied or saved: make one where it is used")

    @reported("self")
    def dispatch_qkv(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, route: Route, *, padded: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Rows of q to the ranks of `route`'s queries, rows of k and v to those of its keys, in one launch.

        q, k, v: (route.rows, ...), contiguous, any dtype, each with an even number of bytes a row; with `padded` up to
        Limits.rows rows. v None: keys and values are one tensor. Returns new tensors (route.queries, ...),
        (route.keys, ...), (route.keys, ...); with `padded` of Limits.queries and Limits.keys rows, of which those
        beyond are not written: for graphs whose Route is updated. Backward is `collect_qkv`. Raises TensorError (C951),
        DispatchError (C961).
        """
        tensors, route = (q, k) if v is None else (q, k, v), checked(route)
        rows = (self.limits.queries, self.limits.keys) if padded else (route.queries, route.keys)
        return self._move(tensors, route, Way.ALL, rows, (route.rows, route.rows), padded)

    @reported("self")
    def collect_qkv(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, route: Route, *, padded: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """The way back of `dispatch_qkv`: rows of q return; of k and v the copies of a row are summed in copy order, in
        float32, and rounded once. Rows that went nowhere are zero.

        q: (route.queries, ...), k, v: (route.keys, ...), or with `padded` up to Limits.queries and Limits.keys rows;
        k and v both float32, float16 or bfloat16, unless Limits.copies is 1. Returns new tensors (route.rows, ...), or
        with `padded` (Limits.rows, ...). Raises TensorError (C951), DispatchError (C961).
        """
        tensors, route = (q, k) if v is None else (q, k, v), checked(route)
        rows = self.limits.rows if padded else route.rows
        return self._move(tensors, route, Way.ALL_BACK, (rows, rows), (route.queries, route.keys), padded)

    @reported("self")
    def dispatch(self, x: torch.Tensor, route: Route, *, padded: bool = False) -> torch.Tensor:
        """Rows of x to the ranks of `route`'s queries: (route.rows, ...) to (route.queries, ...)."""
        rows = self.limits.queries if padded else checked(route).queries
        return self._move((x,), route, Way.QUERIES, (rows, 0), (route.rows, 0), padded)[0]

    @reported("self")
    def collect(self, x: torch.Tensor, route: Route, *, padded: bool = False) -> torch.Tensor:
        """The way back of `dispatch`: (route.queries, ...) to (route.rows, ...). The copies of a row are summed as in
        `collect_qkv`, where the dispatch's route has copies; rows that went nowhere are zero.
        """
        rows = self.limits.rows if padded else checked(route).rows
        return self._move((x,), route, Way.QUERIES_BACK, (rows, 0), (route.queries, 0), padded)[0]

    def _move(
        self,
        tensors: tuple[torch.Tensor, ...],
        route: Route,
        way: Way,
        rows: tuple[int, int],
        expected: tuple[int, int],
        padded: bool,
        about: str = "",
    ) -> tuple[torch.Tensor, ...]:
        asked = rows, expected, padded, about
        if not skips_dispatcher(tensors, but_gradients=True):
            there, back, counts = self._judged(tensors, route, way, asked)
            return tuple(
                torch.ops.commdsl.move_rows(
                    list(tensors), there, back, counts, way.value, False, padded, self.name, about
                )
            )
        name = self.name, way.value
        found = route.repeats.get(name)
        if found is None or not found.serves(asked, tensors):
            there, back, counts = self._judged(tensors, route, way, asked)
            found = Repeat(asked, tensors[0].device, there, back, self.call(tensors, counts, way, about))
            route.repeats[name] = found
        if torch.is_grad_enabled() and True in [tensor.requires_grad for tensor in tensors]:
            self.judge_gradients(tensors, way)
            apply: Any = _Moved.apply  # torch does not type it
            return tuple(apply(self, found, way, *tensors))
        return tuple(self.again(found.call, tensors, found.there, way))

    def _judged(
        self, tensors: tuple[torch.Tensor, ...], route: Route, way: Way, asked: Asked
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The tables of a call and of its way back, and rows of its results by tensor, once the tensors may go."""
        rows, expected, padded, _ = asked
        most = (self.limits.queries, self.limits.keys) if not way.goes else (self.limits.rows, self.limits.rows)
        for tensor in tensors:
            given.tensor("a dispatch", tensor)
        there, back = self.tables(route, way, tensors)
        others = len(tensors) - 1
        for tensor, least, room in zip(tensors, _each(expected, others), _each(most, others), strict=True):
            _check(tensor, least, room if padded else None, self.device)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            self.judge_gradients(tensors, way)
        return there, back, _each(rows, others)


class _Moved(torch.autograd.Function):
    """The op and its gradient, where autograd is all that looks at a call: torch's dispatcher costs more than that."""

    @staticmethod
    def forward(
        ctx: Any, dispatcher: Launcher, found: Repeat, way: Way, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        made = dispatcher.again(found.call, tensors, found.there, way)
        _, _, padded, about = found.asked
        _setup(ctx, (tensors, found.there, found.back, (), way.value, False, padded, dispatcher.name, about), made)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return (*(None,) * 3, *_backward(ctx, gradients)[0])


def _each(rows: tuple[int, int], others: int) -> list[int]:
    """Of queries, and of all the other tensors."""
    return [rows[0], *(rows[1:] * others)]


def _check(tensor: torch.Tensor, rows: int, most: int | None, device: torch.device) -> None:
    """Raises TensorError (C951) unless the tensor is on the device, whole, and has `rows` rows, or up to `most`."""
    if tensor.device != device and tensor.device.type != device.type:
        raise TensorError(f"the tensor is on {tensor.device}, the Dispatcher on {device}")
    shape = tensor.shape
    if not shape or not rows <= shape[0] <= (rows if most is None else most):
        wanted = f"{rows}" if most is None else f"{rows} to {most}"
        raise TensorError(f"expected {wanted} rows, got a tensor of shape {tuple(shape)}")
    if not tensor.is_contiguous():
        raise TensorError("the tensor is not contiguous: pass tensor.contiguous()")


def register() -> None:
    """Tells torch of the op, once in a process."""
    table = registry()
    with table.lock:
        if hasattr(torch.ops.commdsl, "move_rows"):
            return
        define(table.library, SCHEMA, _run, _shapes)
        torch.library.register_autograd("commdsl::move_rows", _backward, setup_context=_setup, lib=table.library)


def _run(
    inputs: Sequence[torch.Tensor],
    there: torch.Tensor,
    back: torch.Tensor,
    rows: Sequence[int],
    way: str,
    clear: bool,
    clear_back: bool,
    dispatcher: str,
    about: str,
) -> list[torch.Tensor]:
    return known(dispatcher).launch(inputs, there, rows, Way(way), about, clear=clear)


def _shapes(
    inputs: Sequence[torch.Tensor],
    there: torch.Tensor,
    back: torch.Tensor,
    rows: Sequence[Any],
    way: str,
    clear: bool,
    clear_back: bool,
    dispatcher: str,
    about: str,
) -> list[torch.Tensor]:
    return [tensor.new_empty((count, *tensor.shape[1:])) for tensor, count in zip(inputs, rows, strict=True)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, there, back, _, way, clear, clear_back, name, about = inputs
    ctx.save_for_backward(there, back)
    ctx.rows = [tensor.shape[0] for tensor in tensors]
    ctx.like = [(tensor.shape, tensor.dtype) for tensor in output]
    ctx.rest = (Way(way).reversed.value, clear_back, clear, name, about)


@reported(lambda ctx, *_: known(ctx.rest[3]), lambda *_: "the gradient of a dispatch")
def _backward(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    there, back = ctx.saved_tensors
    device = there.device
    slopes = [
        torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient.contiguous()
        for gradient, (shape, dtype) in zip(gradients, ctx.like, strict=True)
    ]
    if skips_dispatcher(tuple(slopes)):
        way, clear, _, name, about = ctx.rest
        made = _run(slopes, back, there, ctx.rows, way, clear, False, name, about)
    else:
        made = torch.ops.commdsl.move_rows(slopes, back, there, ctx.rows, *ctx.rest)
    return (made, *(None,) * 8)
