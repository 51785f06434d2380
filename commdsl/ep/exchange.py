"""Turns limits into an Exchange: one rank's end of the way of tokens to their experts and back, by Experts.

Assumes every rank makes the same Exchanges and the same calls, in the same order. Does not know torch's dispatcher or
gradients (`functional` does), nor how a row travels: the text of the dispatch says it, and Experts run it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from commdsl.ep.experts import Experts, Handle
from commdsl.ep.limits import Limits, whole
from commdsl.runtime.errors import DispatchError, TensorError
from commdsl.runtime.given import Patience
from commdsl.runtime.load import Kernels

ENTRY = 0xFFFFFFFF
"""The bits of an origin that say which entry of its source a row is of: row * keys of a row + which key."""

RANK = 0xFFFF
"""Of the bits from the 32nd on, those that say which rank that source is."""

FLOAT = 4
"""Bytes of a weight."""


@dataclass(frozen=True, eq=False)
class Received:
    """What a rank holds after a call there. Tensors of Limits.received rows, of which the first offsets[-1] count."""

    rows: tuple[torch.Tensor, ...]  # by tensor
    counts: torch.Tensor  # (E / P, P) int32: rows by the rank's own keys, in their order, and by source rank
    offsets: torch.Tensor  # (E / P,) int32: where the rows of each key end
    values: torch.Tensor | None  # (received,) float32: the value of each row's entry, where values were given
    handle: Handle


class Exchange:
    """Moves rows to the ranks of their keys with a value for each, and what became of them back."""

    def __init__(
        self,
        limits: Limits,
        keys: int,
        group: Any = None,
        device: torch.device | str | None = None,
        *,
        results: int = 2,
        check: bool = False,
        tune: Mapping[str, int | str] | None = None,
        kernels: Kernels | None = None,
        timeout: Patience = None,
    ) -> None:
        """Collective, as for Experts. `limits` are those of the caller's own tensors; `keys`: of all ranks together.

        Symmetric memory has room for what `results` calls receive, 2 or more. While that of all but one is held, what
        comes is copied out of it: so any number may be held, but in a CUDA graph.
        """
        if results < 2:
            raise DispatchError(f"`results` is 2 or more, not {results}: what is held, and what comes")
        self.limits = limits
        inner = Limits(
            limits.rows,
            limits.keys,
            limits.received,
            (*limits.widths, FLOAT * limits.keys),
            max(limits.width_back, FLOAT * limits.keys),
        )
        self.experts = Experts(
            inner,
            group,
            device,
            results=results,
            check=check,
            source={"tokens.comm": text(len(limits.widths))},
            params={"E": keys},
            tune=tune,
            kernels=kernels,
            timeout=timeout,
        )
        self.device, self.num_keys = self.experts.device, keys
        self.keys_a_rank, self.ranks = self.experts.keys_a_rank, keys // self.experts.keys_a_rank
        self.name = f"{self.experts.plan.name}/{id(self):x}"
        _KNOWN[self.name] = self

    def __reduce__(self) -> NoReturn:
        raise DispatchError("an Exchange has memory on a group, and is not copied or saved: make it where it is used")

    def dispatch(
        self, rows: tuple[torch.Tensor, ...], keys: torch.Tensor, values: torch.Tensor | None = None
    ) -> Received:
        """Each row to the ranks of its keys, once for each key, with the value of that key."""
        sent = keys.new_zeros((len(keys), 1)) if values is None else values
        if values is not None:
            whole("values", values, self.device, torch.float32, len(keys))
            if values.shape != keys.shape:
                raise TensorError(f"expected a value for each key, {tuple(keys.shape)}, got {tuple(values.shape)}")
        there = self.experts.dispatch((*rows, sent), keys)
        (*found, beside), handle = there.rows, there.handle
        if not (self.experts.has_room or self.experts.is_capturing):
            found, beside = [one.clone() for one in found], beside.clone()
            handle = replace(handle, origins=handle.origins.clone())
        came = None if values is None else beside.gather(1, self._which(handle)[:, None])[:, 0]
        return Received(tuple(found), there.counts, there.offsets, came, handle)

    def dispatch_again(
        self, rows: tuple[torch.Tensor, ...], handle: Handle, values: torch.Tensor | None = None
    ) -> Received:
        """Other rows of the same routing, of one tensor or several, to the same places."""
        nothing = handle.keys.new_zeros((len(handle.keys), 1), dtype=torch.float16)
        more = (nothing,) * (len(self.limits.widths) - len(rows))
        found = self.dispatch((*rows, *more), handle.keys, values)
        return replace(found, rows=found.rows[: len(rows)])

    def combine(self, rows: torch.Tensor, handle: Handle, weights: torch.Tensor | None = None) -> torch.Tensor:
        """For each row of the call there the sum over its keys, in their order, of (weight times) what became of it."""
        ones = torch.ones(handle.keys.shape, device=rows.device) if weights is None else weights
        return self.experts.combine(rows, handle, ones)

    def combine_values(self, values: torch.Tensor, handle: Handle) -> torch.Tensor:
        """A float32 for each received row, (n,), to its entry on its source: (rows, keys of a row), zero if dropped."""
        return self.experts.combine_values(values, handle)

    def prepare(self, dtype: torch.dtype | None = None) -> None:
        """As for Experts."""
        self.experts.prepare(dtype)
        self.experts.prepare(torch.float32)

    def is_prepared(self, dtype: torch.dtype) -> bool:
        """Whether the kernels of calls whose rows are summed in `dtype` are there."""
        return self.experts.is_prepared(dtype) and self.experts.is_prepared(torch.float32)

    def release(self) -> None:
        """Collective: gives back the symmetric memory. Rows that were received must not be used any more."""
        self.experts.release()

    @property
    def rank(self) -> int:
        """This rank of the group."""
        return self.experts.rank

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""
        return self.experts.is_capturing

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was received is held in symmetric memory any more."""
        return self.experts.is_idle

    def synchronize(self) -> None:
        """Waits for this rank's calls and raises what went wrong in them."""
        self.experts.synchronize()

    def _which(self, handle: Handle) -> torch.Tensor:
        """Of which of its source's keys each place is."""
        return (handle.origins & ENTRY) % handle.keys.shape[1]


_KNOWN: weakref.WeakValueDictionary[str, Exchange] = weakref.WeakValueDictionary()
"""An op of torch knows its Exchange by name only."""


def known(name: str) -> Exchange:
    found = _KNOWN.get(name)
    if found is None:
        raise DispatchError(f"there is no Exchange `{name}` any more")
    return found


def text(tensors: int) -> str:
    """The dispatch of so many tensors of rows, with a row of values beside them."""
    names = [f"x{number}" for number in range(tensors)]
    rows = "   ".join(f"rows {name}[T]" for name in (*names, "value"))
    return f"""dispatch tokens(E = P) for P ranks {{
  {rows}
  key expert[T, K] of E
  route {", ".join((*names, "value"))} by expert / (E / P)
  place by (expert, source rank, row)
  back y by sum(weight[T, K])
}}
"""
