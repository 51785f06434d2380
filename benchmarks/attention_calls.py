"""Turns one rank's queries, keys and values into calls of `commdsl.attention`'s loop: by a schedule and a way to move,
or with nothing moved and nothing waited for.

Assumes causal attention of one sequence, placed zigzag. Does not measure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import commdsl
from benchmarks.attention_peers import Inputs, Tensors
from commdsl.attention import loop, placement
from commdsl.attention.masks import Mask

CAUSAL = Mask(right=0)
REDUCED_BY = "16"
"""SMs, where gradients are summed on arrival: the copy engine does not reduce."""


@dataclass(frozen=True)
class Way:
    """A schedule of schedules/attention, `direct@causal=1` or `hamilton@K=3`, and what moves: `engine`, or so many SMs;
    nothing: what the schedule says.
    """

    schedule: str
    moves: str = ""

    def __str__(self) -> str:
        moved = f"{self.moves} SMs" if self.moves.isdecimal() else self.moves
        return f"{self.schedule}, {moved}" if moved else self.schedule

    def op(self, ranks: int, *, backward: bool) -> Any:
        name, *told = self.schedule.split("@")
        params = {key: int(value) for key, _, value in (one.partition("=") for one in told)}
        stem = f"attention_{name}" + ("_backward" if backward else "")
        moves = self.moves
        if backward and moves == "engine" and name in ("direct", "double_ring", "window"):
            moves = REDUCED_BY
        tune: dict[str, Any] = {"sms": int(moves)} if moves.isdecimal() else {"protocol": moves} if moves else {}
        return commdsl.load(stem, params=params, ranks=ranks, tune=tune)


class Ours:
    """Forward, and forward and backward, as autograd calls them."""

    def __init__(self, inputs: Inputs, there: Any, back: Any, kernel: str) -> None:
        """`there` is the op of the way forward, `back` that of the way back."""
        self._inputs = inputs
        self._there, self._back = there, back
        self._where = {
            "placement": placement.zigzag(inputs.ranks, [inputs.ranks * inputs.tokens]),
            "mask": CAUSAL,
            "scale": inputs.scale,
            "kernel": kernel,
        }
        self._given = [one[:, None] for one in inputs.tensors]  # a batch of one

    def forward(self) -> Tensors:
        q, k, v, _ = self._given
        return loop.forward(self._there, q, k, v, **self._where)[:1]

    def both(self) -> Tensors:
        q, k, v, dout = self._given
        out, lse = loop.forward(self._there, q, k, v, **self._where)
        return out, *loop.backward(self._back, dout, q, k, v, out, lse, **self._where)

    @staticmethod
    def rows(made: Tensors) -> Tensors:
        """As (tokens, heads, dim)."""
        return tuple(one[:, 0] for one in made)


class Still:
    """Stands for an op: the same visits, each of what is here already."""

    def __init__(self, op: Any) -> None:
        self.name = f"{op.name}, still"
        self.input_names = op.input_names
        self.held = op.held
        self._writes = [len(one.writes) for one in op.held()]

    def visit(self, k: torch.Tensor, v: torch.Tensor, *, group: Any = None, attend: Callable[..., Any]) -> Tensors:
        sums: Tensors = ()
        for number, count in enumerate(self._writes):
            if count:
                sums = tuple(torch.empty_like(one, dtype=torch.float32) for one in (k, v))
                attend(number, k, v, out=sums)
            else:
                attend(number, k, v)
        return (k, v, *sums)
