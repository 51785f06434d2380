"""Turns one call of a collective into the op that the table of this device chooses for it, by the shortest way.

Assumes that every rank asks for the same collective with the same size. An op is loaded when it is first chosen, and
kept. Does not check tensors; the op does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from commdsl.machine import devices
from commdsl.machine.carriers import named
from commdsl.machine.config import from_environment
from commdsl.planner.tuning import selection
from commdsl.planner.tuning.selection import ROOTED, Candidate, Params, Rows
from commdsl.runtime import given, groups
from commdsl.runtime.errors import CaptureError, GroupError, TensorError
from commdsl.runtime.given import Asked, Patience, Reduction
from commdsl.runtime.load import load
from commdsl.runtime.op import Op
from commdsl.runtime.work import Result, Work, completed

_LOGGER = logging.getLogger("commdsl")


class Menu:
    """The rows for one collective on one kind of group, each candidate's op loaded when it is first chosen."""

    def __init__(self, collective: str, rows: Rows, ranks: int, params: Params) -> None:
        self._collective = collective
        self._rows = rows
        self._ranks = ranks
        self._params = params
        self._ops: list[Op | None] = [None] * len(rows.rows)

    def candidate(self, nbytes: int) -> Candidate:
        """What is the fastest for a size."""
        return self._rows.rows[self._rows.index(nbytes)].candidate

    def op(self, nbytes: int) -> Op:
        index = self._rows.index(nbytes)
        return self._ops[index] or self._load(index)

    def _load(self, index: int) -> Op:
        row = self._rows.rows[index]
        most = "any size" if row.max_bytes is None else f"up to {selection.size_text(row.max_bytes)}"
        _LOGGER.debug("%s of %s runs %s: %s", self._collective, most, row.candidate, self._rows.source)
        asked = replace(row.candidate, params=(*row.candidate.params, *self._params))
        found = self._ops[index] = loaded(asked, self._ranks)
        return found

    def up_to(self, max_bytes: int | None) -> list[Op]:
        """What calls of up to so many bytes choose; None: of any size."""
        last = len(self._ops) - 1 if max_bytes is None else self._rows.index(max_bytes)
        return [self._ops[index] or self._load(index) for index in range(last + 1)]


class Alone:
    """A group of one rank: nothing travels, and every collective is a copy. Stands for a menu and for its op."""

    name = shown = "copy"
    works_in_place = True
    has_reduction = True

    def op(self, nbytes: int) -> Alone:
        return self

    def up_to(self, max_bytes: int | None) -> list[Alone]:
        return []

    def __call__(
        self,
        x: torch.Tensor,
        group: Any = None,
        op: Reduction = "sum",
        async_op: bool = False,
        timeout: Patience = None,
        lengths: Sequence[int] | None = None,
        about: str = "",
    ) -> Result | Work:
        if lengths is not None and {*lengths} != {*x.shape[:1]}:
            raise TensorError(f"of one rank the only length is that of its tensor, {[*x.shape[:1]]}, not {[*lengths]}")
        given.reduction(op)
        given.seconds(timeout)
        return completed(x.clone()) if async_op else x.clone()

    def started(self, inputs: Sequence[torch.Tensor], group: Any, asked: Asked, call: Callable[[], Result]) -> Work:
        """Return the Work of `call`."""
        return completed(call())

    def in_place(self, x: torch.Tensor, group: Any = None, op: Reduction = "sum", timeout: Patience = None) -> None:
        self(x.new_empty(0), op=op, timeout=timeout)


AnyOp: TypeAlias = Op | Alone


@cache
def loaded(candidate: Candidate, ranks: int) -> Op:
    """The op of a row. Kept: to find it by `load` is to read its file and all that it uses, in milliseconds."""
    return load(candidate.schedule, params=dict(candidate.params), ranks=ranks, tune=dict(candidate.tune))


@cache
def menu(collective: str, ranks: int, device: torch.device, root: int, plain: bool) -> Menu | Alone:
    """Tables are read when the first is asked for; later changes of the environment are not seen. `plain`: some ranks
    are far.
    """
    if not isinstance(root, int) or not 0 <= root < ranks:
        raise GroupError(f"`{collective}`: the root is a rank of the group, 0 to {ranks - 1}, not {root!r}")
    if ranks == 1:
        return Alone()
    config = from_environment()
    tables = selection.known_tables(config.tables)
    rows = selection.rows_for(tables, collective, ranks, name_of_device(device), plain=plain)
    return Menu(collective, rows, ranks, (("root", root),) if collective in ROOTED else ())


def of_group(collective: str, group: Any, device: torch.device, root: int = 0) -> Menu | Alone:
    """The menu of one group."""
    ranks = size(group)
    return menu(collective, ranks, device, root, ranks > 1 and groups.reaches_far(group, device))


def run(
    collective: str,
    x: torch.Tensor,
    nbytes: int,
    group: Any,
    *,
    op: Reduction = "sum",
    root: int = 0,
    async_op: bool = False,
    timeout: Patience = None,
    wire: str | None = None,
    lengths: Sequence[int] | None = None,
    about: str = "",
) -> Any:
    """One call; `nbytes` is the larger side. `wire`: the element type that values travel in, their own unless said.
    `lengths`: of blocks that have lengths of their own, and `about`, as for an op.
    """
    if async_op and torch.compiler.is_compiling():
        from commdsl.runtime.traced import untraced  # a second, where torch has traced nothing yet

        settings = {"op": op, "root": root, "timeout": timeout, "wire": wire, "lengths": lengths}
        return untraced(run, collective, x, nbytes, group, async_op=True, **settings)
    if wire is not None:
        chosen = compressed(collective, wire, size(group))
    elif lengths is not None:
        chosen = uneven(collective, group, x, lengths)
    else:
        chosen = of_group(collective, group, x.device, root).op(nbytes)
    try:
        return chosen(x, group=group, op=op, async_op=async_op, timeout=timeout, lengths=lengths, about=about)
    except CaptureError as error:
        if lengths is not None:
            what = f"`{collective}` of unequal blocks runs `{chosen.shown}`, which is not set up"
            raise CaptureError(f"{what}: call it once before the capture, on every rank ({error})") from error
        raise _unprepared(collective, nbytes, chosen, error) from error


COMPRESSED = MappingProxyType(
    {
        ("all_reduce", "float8"): Candidate("allreduce_float8", tune=(("lanes", 128), ("threads", 512))),
        ("all_gather", "float8"): Candidate("allgather_float8"),
    }
)
"""What rounds what travels, by collective and element type. The tuning is the fastest at 64 MB between two H200s; it is
not said in the file, so that the schedule may be called by others.
"""


def compressed(collective: str, wire: str, ranks: int) -> AnyOp:
    """What rounds to `wire`. Raises TensorError where there is nothing."""
    candidate = COMPRESSED.get((collective, wire))
    if candidate is None:
        known = ", ".join(f"`{one}`" for of, one in COMPRESSED if of == collective) or "nothing else"
        raise TensorError(f"`{collective}` travels as it is, or as {known}, not as `{wire}`")
    return Alone() if ranks == 1 else loaded(candidate, ranks)


UNEVEN = MappingProxyType(
    {
        "all_gather": "allgather_uneven",
        "reduce_scatter": "reducescatter_uneven",
        "all_to_all": "alltoall_uneven",
    }
)
"""What moves blocks that have lengths of their own, by collective."""


def uneven(collective: str, group: Any, x: torch.Tensor, lengths: Sequence[int]) -> AnyOp:
    """Tuned as what moves blocks as long as the longest, where all ranks know that one; else as the file has it."""
    ranks = size(group)
    row_bytes = x.nbytes // x.shape[0] if x.dim() and x.shape[0] else x.element_size() * prod(x.shape[1:])
    known = of_group(collective, group, x.device)
    if isinstance(known, Alone):
        return known
    if collective == "all_to_all":
        return loaded(Candidate(UNEVEN[collective]), ranks)
    tune = known.candidate(ranks * max(lengths, default=0) * row_bytes).tune
    if any(key == "protocol" and not named(str(value)).length_axes for key, value in tune):  # it moves equal blocks
        tune = ()
    return loaded(Candidate(UNEVEN[collective], tune=tune), ranks)


def all_reduce_in_place(
    x: torch.Tensor, group: Any, op: Reduction = "sum", timeout: Patience = None, *, async_op: bool = False
) -> Work | None:
    """Within x where the schedule is proved to allow it, else by a copy of the result. With `async_op` its Work."""
    if async_op and torch.compiler.is_compiling():
        from commdsl.runtime.traced import untraced  # a second, as above

        return untraced(all_reduce_in_place, x, group, op, timeout, async_op=True)  # type: ignore[no-any-return]
    chosen = of_group("all_reduce", group, x.device).op(x.nbytes)
    try:
        if not async_op:
            _overwrite(chosen, x, group, op, timeout)
            return None
        call = partial(_overwrite, chosen, x, group, op, timeout)
        return chosen.started((x,), group, given.asked(op, timeout, None), call)
    except CaptureError as error:
        raise _unprepared("all_reduce", x.nbytes, chosen, error) from error


def _overwrite(chosen: AnyOp, x: torch.Tensor, group: Any, op: Reduction, timeout: Patience) -> torch.Tensor:
    if chosen.works_in_place:
        chosen.in_place(x, group=group, op=op, timeout=timeout)
    else:
        x.copy_(chosen(x, group=group, op=op, timeout=timeout))  # type: ignore[arg-type]  # without async_op it is a tensor
    return x


def _unprepared(collective: str, nbytes: int, chosen: AnyOp, error: CaptureError) -> CaptureError:
    return CaptureError(
        f"`{collective}` of {selection.size_text(nbytes)} runs `{chosen.shown}`, which is not set up: before the "
        f"capture, on every rank, call commdsl.prepare(['{collective}'], {nbytes}, ...) for its dtype and op ({error})"
    )


def size(group: Any) -> int:
    """The ranks of a process group, of a name, or of the default group."""
    name = group
    if not isinstance(group, str):
        try:
            # Every call comes here: one look where there is a group, and no question first whether there is one.
            found: Any = torch.distributed.distributed_c10d._world.default_pg if group is None else group
            return int(found.size())
        except (AttributeError, TypeError):  # no torch.distributed, no default group, or no group at all
            name = groups.name_of(group)
    known = groups.size_of(name)
    if known is None:
        raise GroupError(f"no process group named `{name}` in this process")
    return known


def home() -> torch.device:
    """This process's GPU, or the processor where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@cache
def name_of_device(device: torch.device) -> str:
    """The name under which tables know it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else devices.CPU
