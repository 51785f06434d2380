"""Turns one rank's queries, keys and values into calls of `commdsl.attention`: as users make them; of its loop by a
schedule and a way to move; and of the loop with nothing moved and nothing waited for.

Assumes causal attention of one sequence, placed zigzag. Does not measure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import commdsl
from benchmarks.attention_peers import Inputs, Tensors
from commdsl.attention import attention, loop, placement
from commdsl.attention.masks import Mask

CAUSAL = Mask(right=0)


@dataclass(frozen=True)
class Way:
    """A schedule of schedules/attention, `direct@causal=1` or `hamilton@K=3`, what moves: `engine`, or so many SMs;
    nothing: what the schedule says; and where what visits lands, `cells` or `place`.
    """

    schedule: str
    moves: str = ""
    landing: str = "cells"

    def __str__(self) -> str:
        moved = f"{self.moves} SMs" if self.moves.isdecimal() else self.moves
        landing = "in place" if self.landing == "place" else ""
        return ", ".join(part for part in (self.schedule, moved, landing) if part)

    def asked(self, backward: bool) -> tuple[str, dict[str, int], dict[str, Any]]:
        """The shipped schedule of the way forward or back, its parameters, and its tuning."""
        name, *told = self.schedule.split("@")
        params = {key: int(value) for key, _, value in (one.partition("=") for one in told)}
        if backward and name in ("ring", "double_ring"):
            params.pop("causal", None)  # their ways back send all
        tune: dict[str, Any] = {"protocol": self.moves} if self.moves else {}
        if self.moves.isdecimal():
            tune = {"sms": int(self.moves)}
        if self.landing != "cells":
            tune["landing"] = self.landing
        return f"attention_{name}" + ("_backward" if backward else ""), params, tune

    def op(self, ranks: int, backward: bool) -> Any:
        name, params, tune = self.asked(backward)
        return commdsl.load(name, params=params, ranks=ranks, tune=tune)


class Ours:
    """Forward, and forward and backward, as autograd calls them."""

    def __init__(self, inputs: Inputs, op: Callable[[bool], Any], kernel: str) -> None:
        """`op` loads that of the way forward or back when it is first called."""
        self._inputs = inputs
        self._op = cache(op)
        self._where = {
            "placement": placement.zigzag(inputs.ranks, [inputs.ranks * inputs.tokens]),
            "mask": CAUSAL,
            "scale": inputs.scale,
            "kernel": kernel,
        }
        self._given = [one[:, None] for one in inputs.tensors]  # a batch of one

    def forward(self) -> Tensors:
        q, k, v, _ = self._given
        return loop.forward(self._op(False), q, k, v, **self._where)[:1]

    def both(self) -> Tensors:
        q, k, v, dout = self._given
        out, lse, kept = loop.attended(self._op(False), q, k, v, **self._where)
        return out, *loop.backward(self._op(True), dout, q, k, v, out, lse, kept, **self._where)

    @staticmethod
    def rows(made: Tensors) -> Tensors:
        """As (tokens, heads, dim)."""
        return tuple(one[:, 0] for one in made)


class Public:
    """`commdsl.attention.attention`, which chooses by itself, and torch's autograd."""

    def __init__(self, inputs: Inputs, kernel: str) -> None:
        self._given = [one[None].detach().requires_grad_() for one in inputs.tensors[:3]]  # BSND, of one batch
        self._dout = inputs.dout[None]
        self._kernel = kernel

    def forward(self) -> Tensors:
        with torch.no_grad():
            return (self._attend(),)

    def both(self) -> Tensors:
        out = self._attend()
        return out.detach(), *torch.autograd.grad(out, self._given, self._dout)

    def _attend(self) -> torch.Tensor:
        out: torch.Tensor = attention(*self._given, causal=True, kernel=self._kernel)
        return out

    @staticmethod
    def rows(made: Tensors) -> Tensors:
        """As (tokens, heads, dim)."""
        return tuple(one[0] for one in made)


class Still:
    """Stands for an op whose keys and values visit: the same visits, each of what is here already."""

    input_names = ("k", "v")

    def __init__(self, op: Any, backward: bool) -> None:
        self.name = f"{op.name}, still"
        self.held = op.held
        self._backward = backward

    def lands(self, group: Any = None) -> bool:
        return False

    def visit(self, k: torch.Tensor, v: torch.Tensor, *, attend: Callable[..., Any], group: Any, last: int) -> Tensors:
        sums: Tensors = ()
        for number in range(len(self.held(group))):
            if not self._backward:
                attend(number, k, v)
            elif not sums:
                sums = torch.empty_like(k, dtype=torch.float32), torch.empty_like(v, dtype=torch.float32)
                attend(number, k, v, out=sums)
            else:
                attend(number, k, v, *sums, out=sums)
        return sums
