"""Turns a number of tokens into the passes through transformer layers that are timed, tensor and sequence parallel, by
whatever gathers, multiplies and scatters.

Assumes equally many tokens on every rank. Does not time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch.nn import functional

from benchmarks.measure import Bench
from benchmarks.transformer_report import CAPTURED, COMPILED, CONTENDERS, OURS, OURS_COMPILED, PASS, PLAIN, Case
from benchmarks.turns import Made, kept
from commdsl import overlap

Tensor = torch.Tensor


@dataclass(frozen=True)
class Sizes:
    """Of a rank: an eighth of Llama-70B's heads and features, or less of all by `scale`."""

    scale: int = 1
    layers: int = 2

    @property
    def hidden(self) -> int:
        return 8192 // self.scale

    @property
    def head_dim(self) -> int:
        return max(128 // self.scale, 8)

    @property
    def heads(self) -> tuple[int, int]:
        """Of queries, and of keys."""
        return 8, 1

    @property
    def features(self) -> int:
        return 3584 // self.scale


@dataclass(frozen=True)
class Parallel:
    """A product of all ranks' rows, and one whose sums go to all, each with what its rank adds: by whom."""

    gather: Callable[[Tensor, Tensor], Tensor]
    scatter: Callable[..., Tensor]  # of rows, weights and a `residual`


def plain() -> Parallel:
    """By torch's functional collectives."""
    group = dist.group.WORLD

    def gather(x: Tensor, w: Tensor) -> Tensor:
        return functional.linear(functional_collectives.all_gather_tensor_autograd(x, 0, group), w)

    def scatter(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        made = functional_collectives.reduce_scatter_tensor_autograd(functional.linear(x, w), "sum", 0, group)
        return residual + made

    return Parallel(gather, scatter)


FUSED = Parallel(partial(overlap.all_gather_matmul, keep_rows=True), overlap.matmul_reduce_scatter)
"""Rows that were gathered are kept, as the plain layers keep them."""


class Layer(torch.nn.Module):
    """Attention and a gated layer, each between rows that lie on all ranks."""

    def __init__(self, sizes: Sizes, parallel: Parallel, **made: object) -> None:
        super().__init__()
        self.sizes, self.parallel = sizes, parallel
        query, key = (count * sizes.head_dim for count in sizes.heads)
        shapes = {
            "qkv": (query + 2 * key, sizes.hidden),
            "out": (sizes.hidden, query),
            "up": (2 * sizes.features, sizes.hidden),
            "down": (sizes.hidden, sizes.features),
        }
        for name, shape in shapes.items():
            weight = torch.nn.Parameter(torch.randn(*shape, **made) * shape[1] ** -0.5)  # type: ignore[arg-type]
            self.register_parameter(name, weight)
        self.norms = torch.nn.Parameter(torch.ones(2, sizes.hidden, **made))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """This rank's tokens (n, hidden)."""
        x = self.parallel.scatter(self.attended(self.normed(x, 0)), self.out, residual=x)
        gate, up = self.parallel.gather(self.normed(x, 1), self.up).chunk(2, -1)
        return self.parallel.scatter(functional.silu(gate) * up, self.down, residual=x)

    def normed(self, x: Tensor, number: int) -> Tensor:
        return functional.rms_norm(x, (self.sizes.hidden,), self.norms[number])

    def attended(self, x: Tensor) -> Tensor:
        query, key = self.sizes.heads
        found = self.parallel.gather(x, self.qkv).unflatten(-1, (query + 2 * key, self.sizes.head_dim))
        q, k, v = found.transpose(0, 1).split((query, key, key))
        k, v = (one.expand(query, -1, -1) for one in (k, v))
        made = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
        return made[0].transpose(0, 1).flatten(1)


class Model(torch.nn.Sequential):
    """Layers, and a loss, so that a compiler has both passes whole."""

    def forward(self, x: Tensor) -> Tensor:
        """The loss of this rank's tokens (n, hidden)."""
        found: Tensor = super().forward(x)
        return found.float().square().mean()


NEAR = {torch.bfloat16: 2.0**-5, torch.float32: 2.0**-16}
"""How far gradients may lie from those of the plain layers, as a share of their root mean square: sums are rounded at
other places, and what comes of it goes through all layers.
"""


@dataclass
class Stage:
    """One number of tokens on this rank."""

    bench: Bench
    case: Case
    sizes: Sizes
    notes: list[str] = field(default_factory=list)
    known: dict[str, torch.nn.Module] = field(default_factory=dict)  # by contender that is not captured
    tp: overlap.MicroPipelineTP = field(default_factory=overlap.MicroPipelineTP)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bench.device.type == "cuda" else torch.float32

    @cached_property
    def tokens(self) -> Tensor:
        """This rank's."""
        torch.manual_seed(self.bench.rank)
        rows = self.case.tokens // self.case.ranks
        return torch.randn(rows, self.sizes.hidden, device=self.bench.device, dtype=self.dtype)

    def model(self, name: str) -> torch.nn.Module:
        """Of the contender of that name; the same weights, of this rank, in all of them."""
        torch.manual_seed(100 + self.bench.rank)
        made = {"device": self.bench.device, "dtype": self.dtype}
        parallel = FUSED if name in (OURS, OURS_COMPILED) else plain()
        found = Model(*(Layer(self.sizes, parallel, **made) for _ in range(self.sizes.layers)))
        if name not in (COMPILED, PASS, OURS_COMPILED):
            return found
        options = {"post_grad_custom_pre_pass": self.tp} if name == PASS else None
        compiled: torch.nn.Module = torch.compile(found, dynamic=False, fullgraph=True, options=options)
        return compiled

    @cached_property
    def wanted(self) -> list[Tensor]:
        """Loss and gradients of the plain layers."""
        return self.passed(self.model(PLAIN))

    def passed(self, model: torch.nn.Module) -> list[Tensor]:
        """Forward and backward: the loss, and the gradients of tokens and weights."""
        x = self.tokens.detach().requires_grad_()
        loss = model(x)
        return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]

    def made(self, name: str) -> Made:
        """The contender of that name."""
        of = CAPTURED.get(name, name)
        model = self.known[of] = self.known.get(of) or self.model(of)

        def is_wrong(*last: Tensor) -> Tensor:
            told = f", {self.tp}" if of == PASS else ""
            self.notes.append(f"{name}: loss {last[0].item():.6f}{told}")
            return torch.stack([self.differs(*pair) for pair in zip(last, self.wanted, strict=True)]).any()

        return kept(name, CONTENDERS[name], lambda: self.passed(model), is_wrong)

    def differs(self, found: Tensor, wanted: Tensor) -> Tensor:
        away, size = ((one.float().square().mean().sqrt()) for one in (found - wanted, wanted))
        return ~(away <= NEAR[self.dtype] * size)
