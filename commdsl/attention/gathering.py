"""Turns the rows of a sequence that each rank has into the rows of all ranks, by an operator of torch whose calls carry
what the ranks must agree on.

Assumes as many rows on every rank. Does not put rows in the order of the sequence; `sequence` does.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import torch

from commdsl.runtime import groups, menu
from commdsl.runtime.operators import define
from commdsl.runtime.registry import registry
from commdsl.runtime.reporting import reported

Tensor: TypeAlias = torch.Tensor

TAIL = "str group, int dim, int[] lengths, str placement"
GATHER, SCATTER = f"sequence_gather(Tensor x, {TAIL}) -> Tensor", f"sequence_scatter(Tensor x, {TAIL}) -> Tensor"
SHOWN, SHOWN_BACK = "`unshard_sequence`", "the gradient of `unshard_sequence`"

_LOCK = threading.Lock()


def gathered(x: Tensor, group: Any, dim: int, lengths: Sequence[int], placement: str) -> Tensor:
    """The rows of all ranks, (n, ...) -> (P n, ...). `dim`, `lengths` and `placement` say what they are rows of: ranks
    that differ there raise AgreementError (C964). The gradient is the sum over the ranks.
    """
    if torch.compiler.is_dynamo_compiling():
        from commdsl.runtime.traced import defined  # a second, where torch has traced nothing yet

        defined(__name__)
    else:
        library()
    found: Tensor = torch.ops.commdsl.sequence_gather(x, groups.name_of(group), dim, list(lengths), placement)
    return found


def words(lengths: Sequence[int], placement: str) -> str:
    """Tokens, documents and placement of a sequence, on which all ranks must agree; long ones by a digest."""
    tokens = f"{sum(lengths)} tokens"
    if len(lengths) != 1:
        tokens += f" in {len(lengths)} documents {_digest(repr(tuple(lengths)))}"
    where = placement if not placement.startswith("[") else f"of digest {_digest(placement)}"
    return f"{tokens}, placement {where}"


def library() -> None:
    """The operators, defined when they are first needed."""
    with _LOCK:  # ranks that are threads come here at once, and `cache` would let both in
        _define()


@cache
def _define() -> None:
    made = registry().library
    define(made, GATHER, _gather, _fake_gather, SHOWN)
    define(made, SCATTER, _scatter, _fake_scatter, SHOWN_BACK)
    for name, back in (("sequence_gather", "sequence_scatter"), ("sequence_scatter", "sequence_gather")):
        torch.library.register_autograd(f"commdsl::{name}", _backward(back), setup_context=_keep, lib=made)


def _gather(x: Tensor, group: str, *said: Any) -> Tensor:
    return _run("all_gather", x, x.nbytes * menu.size(group), group, *said)


def _scatter(x: Tensor, group: str, *said: Any) -> Tensor:
    return _run("reduce_scatter", x, x.nbytes, group, *said)


def _run(
    collective: str, x: Tensor, nbytes: int, group: str, dim: int, lengths: Sequence[int], placement: str
) -> Tensor:
    about = f"the rows of {words(lengths, placement)}, along dimension {dim}"
    found: Tensor = menu.run(collective, x, nbytes, group, about=about)
    return found


def _fake_gather(x: Tensor, group: str, *said: Any) -> Tensor:
    return x.new_empty((menu.size(group) * x.shape[0], *x.shape[1:]))


def _fake_scatter(x: Tensor, group: str, *said: Any) -> Tensor:
    return x.new_empty((x.shape[0] // menu.size(group), *x.shape[1:]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.said = inputs


def _backward(name: str) -> Any:
    @reported(lambda ctx, *_: ctx.said[0], lambda *_: SHOWN_BACK)
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found: Tensor = getattr(torch.ops.commdsl, name)(gradient.contiguous(), *ctx.said)
        return (found, *(None for _ in ctx.said))

    return backward


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
