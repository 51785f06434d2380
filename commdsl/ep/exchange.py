"""Turns limits into an Exchange: one rank's end of the way of tokens to their experts and back, by Experts.

Assumes every rank makes the same Exchanges and the same calls, in the same order. Does not know torch's dispatcher or
gradients (`functional` does), nor how a row travels: the text of the dispatch says it, and Experts run it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch

from commdsl.ep.experts import Experts
from commdsl.ep.float8 import Quantised, flat, paired
from commdsl.ep.handles import Handle, Received
from commdsl.ep.limits import Limits
from commdsl.runtime import given, groups
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.errors import CaptureError, DispatchError
from commdsl.runtime.given import Patience
from commdsl.runtime.load import Kernels
from commdsl.runtime.reporting import reported
from commdsl.runtime.workspace import listed

ENTRY = 0xFFFFFFFF
"""The bits of an origin that say which entry of its source a row is of: row * keys of a row + which key."""

RANK = 0xFFFF
"""Of the bits from the 32nd on, those that say which rank that source is."""

PADDING = -1
"""The origin of a place that has no row."""

FLOAT = 4
"""Bytes of a weight."""

MOST_SMS = 132
"""That a kernel may be tuned to use, as on the switch that commdsl takes where no topology is named."""


class Exchange:
    """Moves rows to the ranks of their keys with a value for each, once to a rank, and what became of them back."""

    @reported()
    def __init__(
        self,
        limits: Limits,
        keys: int,
        group: Any = None,
        device: torch.device | str | None = None,
        *,
        local_combine: bool = False,
        gradients: bool = True,
        align: int = 1,
        float8: int = 0,
        node: int = 0,
        results: int = 2,
        check: bool = False,
        tune: Mapping[str, int | str] | None = None,
        kernels: Kernels | None = None,
        timeout: Patience = None,
        terms: Mapping[str, object] | None = None,
    ) -> None:
        """Collective, as for Experts. `keys`: of all ranks together; `align`: the rows of each begin at a multiple of
        it. `float8`: the first tensor travels in it, with a scale for each so many elements, and comes as Quantised.
        With `local_combine` what comes back is added up on the rank of the keys first, and one row a rank travels.
        `node`: ranks of a node, neighbours in the group; between nodes a row crosses once, and with `local_combine` the
        sum of one. 0: all are of one. Without `gradients` there is no memory for rows that go to the same places again,
        which the gradient of `combine` needs.

        Symmetric memory has room for what `results` calls receive, 2 or more. While that of all but one is held, what
        comes is copied out of it: so any number may be held, but in a CUDA graph.
        """
        if results < 2:
            raise DispatchError(f"`results` is 2 or more, not {results}: what is held, and what comes")
        nodes = _num_nodes(groups.size_of(groups.name_of(group)), node)
        again = max(limits.width_back, limits.width_again, FLOAT * limits.keys) if gradients else 0
        self.limits, self.local_combine, self.align = replace(limits, width_again=again), local_combine, align
        self.float8, several = float8, len(limits.widths)
        name = "tokens_summed" if local_combine else "tokens"
        is_shipped = several == 1 and not float8 and nodes == 1
        self.experts = Experts(
            self.limits,
            group,
            device,
            results=results,
            check=check,
            source="tokens" if is_shipped else {"tokens.comm": text(name, several, float8, nodes, node)},
            name=name,
            on=None if nodes == 1 else "nodes",
            params={"E": keys, "A": align},
            tune=tune,
            kernels=kernels,
            timeout=timeout,
            terms=terms,
        )
        self.device, self.num_keys = self.experts.device, keys
        self.keys_a_rank, self.ranks = self.experts.keys_a_rank, keys // self.experts.keys_a_rank
        self.name = f"{self.experts.plan.name}/{id(self):x}"
        _KNOWN[self.name] = self

    def __reduce__(self) -> NoReturn:
        raise DispatchError("an Exchange has memory on a group, and is not copied or saved: make it where it is used")

    @reported("self")
    def dispatch(
        self,
        rows: tuple[torch.Tensor, ...],
        keys: torch.Tensor,
        values: torch.Tensor | None = None,
        *,
        about: str = "",
    ) -> Received:
        """Each row to the ranks of its keys, with the value of each key, zero where none is given; values of places
        that have no row are zero. All ranks give values, or none does. `about`: as of `Experts.dispatch`.
        """
        given.argument("keys", keys)
        sent = torch.zeros(keys.shape, device=self.device) if values is None else values
        found = self.experts.dispatch(rows, keys, sent, about=_weighted(values, about))
        if not (self.experts.has_room or self.experts.is_capturing):
            found = _copied(found)
        if self.align > 1 and found.values is not None:
            found = replace(found, values=torch.where(found.handle.origins == PADDING, 0.0, found.values))
        return found

    @reported("self")
    def dispatch_again(self, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Other rows of the same routing, to the same places."""
        found = self.experts.dispatch_again(rows, handle)
        return found if self.experts.has_room_again or self.experts.is_capturing else found.clone()

    @reported("self")
    def combine(self, rows: torch.Tensor, handle: Handle, weights: torch.Tensor | None = None) -> torch.Tensor:
        """For each row of the call there the sum over its keys of (weight times) what became of it. weights: (rows of
        the call there, keys), or with `local_combine` one for each of the rows that go back. All ranks give weights, or
        none does.
        """
        given.argument("rows", rows)
        given.instance("handle", handle, Handle)
        about = _weighted(weights, "")
        if weights is None:
            weights = torch.ones(len(rows) if self.local_combine else handle.keys.shape, device=rows.device)
        return self.experts.combine(rows, handle, weights, about=about)

    @reported("self")
    def combine_values(self, values: torch.Tensor, handle: Handle) -> torch.Tensor:
        """A float32 for each received row, (n,), to its entry on its source: (rows, keys of a row), zero if dropped."""
        return self.experts.combine_values(values, handle)

    def coming(self, *like: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return the memory that the next call with such rows will write, and that of their values."""
        rows, values = self.experts.coming(*like)
        assert values is not None
        return rows, values

    def prepare(self, dtype: torch.dtype | None = None) -> None:
        """As for Experts."""
        self.experts.prepare(dtype)

    def is_prepared(self, dtype: torch.dtype) -> bool:
        """Whether the kernels of calls whose rows are summed in `dtype` are there."""
        return self.experts.is_prepared(dtype)

    def release(self) -> None:
        """Collective: gives back the symmetric memory, of rows that are still held when these are let go."""
        self.experts.release()

    @property
    def stretches(self) -> tuple[int, ...]:
        """By tensor, how many elements have a scale; 0 where it does not travel in float8."""
        return (self.float8, *(0 for _ in self.limits.widths[1:]))

    @property
    def comm(self) -> Communicator:
        """This rank's end of the group."""
        return self.experts.comm

    @property
    def rank(self) -> int:
        """This rank of the group."""
        return self.experts.rank

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""
        return self.experts.is_capturing

    def refuse_capture(self, mend: str) -> None:
        """Of what reads on the host how many rows came: raises CaptureError (C955) in a capture."""
        if self.is_capturing:
            raise CaptureError(f"a capture reads nothing on the host: {mend}")

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was received is held in symmetric memory any more."""
        return self.experts.is_idle

    @property
    def is_released(self) -> bool:
        """True once the symmetric memory was released: no call can be made any more."""
        return self.experts.is_released

    def synchronize(self) -> None:
        """Waits for this rank's calls and raises what went wrong in them."""
        self.experts.synchronize()


def _weighted(weights: torch.Tensor | None, about: str) -> str:
    """The words of a call: ranks with and without weights make different calls, and so do their backward passes."""
    return f"{'without' if weights is None else 'with'} weights{listed(about)}"


def _num_nodes(ranks: int | None, node: int) -> int:
    """How many nodes of so many ranks a group is. Of a group that this process does not know Experts say that."""
    if node == 0 or ranks is None:
        return 1
    if node < 0 or ranks % node:
        raise DispatchError(f"{ranks} ranks are no full nodes of {node}")
    return ranks // node


def _copied(found: Received) -> Received:
    """In memory of its own."""
    handle = found.handle
    values = None if handle.values is None else handle.values.clone()
    mates = None if handle.mates is None else handle.mates.clone()
    handle = replace(handle, origins=handle.origins.clone(), mates=mates, values=values)
    stretches = [int(isinstance(one, Quantised)) for one in found.rows]
    rows = paired(tuple(one.clone() for one in flat(found.rows)), stretches)
    return replace(found, rows=rows, values=values, handle=handle)


_KNOWN: weakref.WeakValueDictionary[str, Exchange] = weakref.WeakValueDictionary()
"""An op of torch knows its Exchange by name only."""


def known(name: str) -> Exchange:
    found = _KNOWN.get(name)
    if found is None:
        raise DispatchError(f"there is no Exchange `{name}` any more")
    return found


def text(name: str, tensors: int, float8: int = 0, nodes: int = 1, node: int = 0) -> str:
    """What `tokens.comm` says of one tensor of rows, of several, the first of which may travel in float8; between
    several nodes once a node.
    """
    names = [f"x{number}" for number in range(tensors)]
    per = "once per rank" if nodes == 1 else "once per node"
    once = f"   {per}" if name == "tokens_summed" else ""
    machine = "" if nodes == 1 else f"topology nodes {{ nodes {nodes}   gpus {node} per node   sms {MOST_SMS} }}\n\n"
    cast = f" as float8 by {float8}" if float8 else ""
    return f"""{machine}dispatch {name}(E = 32 * P, A = 1) for P ranks {{
  rows {names[0]}[T]{cast}{"".join(f"   rows {name}[T]" for name in names[1:])}
  key expert[T, K] of E
  value weight[T, K]
  route {", ".join(names)}, weight by expert / (E / P)   {per}
  place by (expert, source rank, row)   aligned A
  back y by sum(weight[T, K]){once}
}}
"""
