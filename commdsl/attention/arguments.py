"""Turns what a call of attention is given into strings and numbers, as torch's operators carry them, and back.

Assumes nothing of what is given: what it cannot be is refused in one line that says what to write instead. Does not
look at memory, and takes tensors with symbolic sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import index
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from commdsl.attention.placement import Placement, Run, Same
from commdsl.machine.errors import ArgumentError
from commdsl.runtime import given
from commdsl.runtime.errors import TensorError

Window: TypeAlias = "int | tuple[int | None, int | None] | None"
"""Of which tokens a query sees the keys: its own and the W - 1 before it, or (so many before it, so many after it)."""

LAYOUTS = MappingProxyType({"BSND": (1, 0, 2, 3), "BNSD": (2, 0, 1, 3), "SBND": (0, 1, 2, 3)})
"""Batch, sequence, heads, dimension of a head: where each dimension of (rows, batch, heads, dim) is among them."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

REFUSED = MappingProxyType(
    {
        **dict.fromkeys(("dropout", "dropout_p", "attention_dropout"), "no dropout: apply it to what is returned"),
        **dict.fromkeys(
            ("attn_mask", "mask", "attention_mask", "attn_bias", "bias", "alibi_slopes"),
            "no mask or bias of values: say `causal`, `window` or `cu_seqlens`",
        ),
        **dict.fromkeys(("sinks", "sink", "s_aux", "learnable_sink"), "no sinks: they would join every row's sum"),
        **dict.fromkeys(("softcap", "logits_soft_cap"), "no soft cap of the scores"),
    }
)
"""What other libraries' calls take and this one does not, and what to do."""


@dataclass(frozen=True, slots=True)
class Asked:
    """All that a call says beside its tensors; `length` is that of the whole sequence, None where all ranks have as
    many rows as this one, or where documents say it. `left`, `right`: how far a query sees, None for any distance.
    """

    group: str
    schedule: str
    tune: str
    placement: str
    length: int | None
    left: int | None
    right: int | None
    scale: float | None
    layout: str
    kernel: str


SCHEMA = (
    "str group, str schedule, str tune, str placement, SymInt? length, int? left, int? right, float? scale, "
    "str layout, str kernel"
)
"""`Asked`, as torch writes it."""

NUM_ASKED = len(fields(Asked))

AUTO = "auto"

AUTOS = MappingProxyType(
    {
        AUTO: (False, False),
        "auto with gradients": (True, False),
        "auto by heads": (False, True),
        "auto by heads with gradients": (True, True),
    }
)
"""Schedules that are chosen when they run: whether for both ways, and whether heads may be exchanged for rows."""


def auto_text(gradients: bool, by_heads: bool) -> str:
    return next(text for text, said in AUTOS.items() if said == (gradients, by_heads))


def refuse(others: Mapping[str, Any]) -> None:
    """Arguments that other libraries have: refused unless they say nothing. `deterministic` is what every call is."""
    for name, value in others.items():
        if name == "deterministic":
            if not isinstance(value, bool):
                raise ArgumentError(f"`deterministic` is True or False, not {value!r}: every call is deterministic")
            continue
        reason = REFUSED.get(name)
        if reason is None:
            raise ArgumentError(f"`attention` takes no argument `{name}`")
        if not (value is None or value is False or (isinstance(value, int | float) and value == 0)):
            raise ArgumentError(f"`attention` has no `{name}`: it has {reason}")


def distances(causal: Any, window: Any) -> tuple[int | None, int | None]:
    """How many tokens before a query's own and after it the mask admits; None for any number."""
    if not isinstance(causal, bool):
        raise ArgumentError(f"`causal` is True or False, not {causal!r}")
    if window is None:
        return None, 0 if causal else None
    if isinstance(window, tuple | list):
        if len(window) != 2:
            raise ArgumentError(f"`window` is a number of tokens, or how many before and after, not {window!r}")
        left, right = (None if one is None or one == -1 else whole("window", one, 0) for one in window)
        return left, 0 if causal else right
    if not causal:
        raise ArgumentError(
            f"a `window` of {window!r} tokens ends with the query's own: say causal=True, or (left, right)"
        )
    return whole("window", window, 1) - 1, 0


def whole(name: str, value: Any, least: int) -> int:
    """As `given.whole`, which torch.compile does not look into where a number is one that changes."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    return given.whole(name, value, least)


def scaled(scale: Any) -> float | None:
    """A factor of the scores, None for 1 / sqrt(dim)."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ArgumentError(f"`scale` is a number that the scores are multiplied by, not {scale!r}")
    return float(scale)


def ends(cu_seqlens: Any) -> torch.Tensor | None:
    """Where documents begin and the last ends, as a tensor."""
    if cu_seqlens is None or isinstance(cu_seqlens, torch.Tensor):
        return cu_seqlens
    if not isinstance(cu_seqlens, Sequence) or isinstance(cu_seqlens, str):
        raise ArgumentError(f"`cu_seqlens` is a list or a vector of whole numbers, not `{type(cu_seqlens).__name__}`")
    return torch.tensor([whole("cu_seqlens", end, 0) for end in cu_seqlens], dtype=torch.int64, device="cpu")


def one_of(name: str, value: Any, known: Sequence[str]) -> str:
    """A name among those that there are."""
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(f"`{name}` is one of {', '.join(known)}, not {value!r}")
    return value


def tuning_text(tune: Any) -> str:
    """`lanes=8 protocol=packet`, by key."""
    return " ".join(f"{key}={value}" for key, value in given.tuning(tune)) if tune else ""


def read_tuning(text: str) -> dict[str, int | str]:
    """What `tuning_text` wrote, or someone else in its way."""
    found: dict[str, int | str] = {}
    for part in text.split():
        key, _, value = part.partition("=")
        found[key] = int(value) if value.lstrip("-").isdigit() else value
    return found


# --- placements -------------------------------------------------------------------------------------------------------


def placement_text(placement: Any) -> str:
    """Its name, or all of it where it is no shipped one."""
    if isinstance(placement, str):
        return placement
    if not isinstance(placement, Placement):
        raise ArgumentError(f'`placement` is "zigzag", "contiguous" or a Placement, not {placement!r}')
    return _written(Same(placement))


@lru_cache(maxsize=64)
def _written(one: Same[Placement]) -> str:
    """`[0,0,4 1,0,2|0,12,4/...]name`: by rank and half the document, begin and length of each run; without a module
    that torch.compile does not look into.
    """
    ranks = ["|".join(" ".join(map(_run_text, half)) for half in halves) for halves in one.value.runs]
    return f"[{'/'.join(ranks)}]{one.value.name}"


def _run_text(run: Run) -> str:
    # Numbers from here on where torch.compile takes those of an object for ones that change.
    return f"{index(run.document)},{index(run.begin)},{index(run.length)}"


@lru_cache(maxsize=64)
def read_placement(text: str) -> str | Placement:
    """What `placement_text` wrote."""
    if not text.startswith("["):
        return text
    ranks, _, name = text[1:].partition("]")
    halves = [[tuple(map(_read_run, half.split())) for half in rank.split("|")] for rank in ranks.split("/")]
    return Placement(name, tuple((front, back) for front, back in halves))


def _read_run(text: str) -> Run:
    document, begin, length = map(int, text.split(","))
    return Run(document, begin, length)


# --- tensors ----------------------------------------------------------------------------------------------------------


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    """Refuses tensors whose shapes, dtypes or devices no attention has."""
    _check_alone(q, k, v, layout)
    if k.shape != v.shape:
        raise TensorError(f"`attention`: k is {_shape(k)} and v {_shape(v)}: they have one shape")
    rows, batch, heads, dim = rows_first(q, layout).shape
    key_rows, key_batch, key_heads, key_dim = rows_first(k, layout).shape
    for what, found, wanted in (("batches", key_batch, batch), ("rows", key_rows, rows), ("dimensions", key_dim, dim)):
        if found != wanted:
            raise TensorError(
                f"`attention`: q, {_shape(q)}, has {wanted} {what}, and k, {_shape(k)}, {found} (layout {layout}): "
                "all three are the rows of one sequence that this rank has"
            )
    if key_heads == 0 or heads % key_heads:
        raise TensorError(
            f"`attention`: {heads} heads of q are no multiple of {key_heads} of k: each head of k serves as many of q"
        )


def _check_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    for name, one in (("q", q), ("k", k), ("v", v)):
        given.tensor("attention", one)
        if one.dim() != 4:
            raise TensorError(f"`attention`: {name} has 4 dimensions, {layout}, not {one.dim()}: {_shape(one)}")
        if one.dtype not in FLOATS:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            raise TensorError(f"`attention`: {name} is {one.dtype}; it takes {names}")
        if one.dtype != q.dtype:
            raise TensorError(f"`attention`: {name} is {one.dtype}, q {q.dtype}: pass {name}.to(q.dtype)")
        if one.device != q.device:
            raise TensorError(f"`attention`: {name} is on {one.device}, q on {q.device}")
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise TensorError(f"`attention` runs on cpu and cuda tensors, not on {q.device.type}")


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def rows_first(x: torch.Tensor, layout: str) -> torch.Tensor:
    """(rows, batch, heads, dim): a view."""
    return x.permute(LAYOUTS[layout])


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The layout of (rows, batch, heads, dim): a view."""
    order = LAYOUTS[layout]
    return x.permute([order.index(dim) for dim in range(4)])
