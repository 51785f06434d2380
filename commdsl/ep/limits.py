"""Turns the most that any call of Experts moves into bytes of symmetric memory, and judges whether a call stays within.

Assumes the same limits on every rank. Does not hold memory, and knows no key: what the host can see of a call is its
tensors' shapes; that more rows come than there is room for the kernel sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commdsl.ep.float8 import SCALE_BYTES, judge, staged_bytes, stretches_of, travels_in
from commdsl.program.crossing import Crossing, crossing_of, waiting_a_row
from commdsl.program.phases import Each, PushAgain, PushBack, PushByKey, Pushing
from commdsl.program.plan import Plan
from commdsl.runtime import given
from commdsl.runtime.errors import DispatchError, TensorError
from commdsl.runtime.pool import aligned, row_bytes

ORIGIN_BYTES, NUMBER_BYTES = 8, 4
"""Of the word that says where a row comes from, and of any other number beside it."""

WORD_BYTES = 8
"""Of a number on its way back: it lies beside nothing, as it is stored as one."""

WARP = 32
"""Threads of a warp."""

MOST_KEYS_A_ROW = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that any rank has in a call; what symmetric memory is made for. Equal on all ranks."""

    rows: int  # of a rank's own tensors
    keys: int  # of a row
    received: int  # rows that a rank receives, each once for each of its keys there
    widths: tuple[int, ...]  # bytes of a row as it travels, by tensor: in float8 one for each element, scales apart
    width_back: int = 0  # bytes of a row that comes back
    width_again: int = 0  # bytes of a row that goes to places of a call before

    def result_bytes(self, push: PushByKey, ranks: int) -> int:
        """Of one call there: what is received of each tensor, its scales, where it comes from, what else is beside."""
        beside = [rows.name for rows in push.to[len(push.rows) :]]
        sizes = (ORIGIN_BYTES if name == "origins" else NUMBER_BYTES for name in beside if name != "mates")
        mates = aligned(self.mates(ranks) * NUMBER_BYTES * self.keys) if "mates" in beside else 0
        return mates + sum(aligned(self.received * width) for width in (*self.widths, *self._scales(push), *sizes))

    def mates(self, ranks: int) -> int:
        """Rows whose places a rank is told: those that all ranks may have."""
        return ranks * self.rows

    def cast_bytes(self, there: Plan) -> int:
        """Behind it: rows in float8 of each warp, before they go to ranks that are far."""
        if not there.push_by_key.is_cast_far(there.transport):
            return 0
        staged = staged_bytes(self.widths, there.push_by_key.stretches)
        return there.comm.lanes * (there.comm.threads // WARP) * staged

    def crossing(self, push: Pushing, ranks: int) -> Crossing:
        """The memory where rows wait that cross once per node; of nothing where none do."""
        match push:
            case PushByKey():
                widths = *self.widths, *self._scales(push)
            case PushAgain():
                widths = (self.width_again,)
            case PushBack():
                widths = (self.width_back,)
        return crossing_of(push, ranks, widths, self.keys, self.rows)

    def _scales(self, push: PushByKey) -> tuple[int, ...]:
        """Bytes of a row of each tensor of scales."""
        cast = ((width, by) for width, by in zip(self.widths, push.stretches, strict=True) if by)
        return tuple(SCALE_BYTES * stretches_of(width, by) for width, by in cast)

    def places(self, back: Plan) -> int:
        """Rows that may wait on a rank until they are added up: one for each key, or rank or node that has any."""
        return self.rows * waiting_a_row(back, self.keys)

    def waiting_bytes(self, back: Plan) -> int:
        """Of what waits on a rank, on a way back of rows or of words."""
        return self.places(back) * (WORD_BYTES if back.push_back.each is Each.WORD else self.width_back)

    def staging_bytes(self, back: Plan) -> int:
        """Behind it: a row for each warp, where what goes to ranks that are far is added up."""
        is_staged = back.push_back.is_staged(back.transport)
        return back.comm.lanes * (back.comm.threads // WARP) * self.width_back if is_staged else 0

    def judge(self, plan: Plan, back: Plan | None) -> None:
        """Raises DispatchError (C961) for limits that the kernels cannot have."""
        for name, value, least in (("rows", self.rows, 0), ("received", self.received, 0), ("keys", self.keys, 1)):
            if not least <= value < 2**31:
                raise DispatchError(f"expected {least} <= {name} < 2 ** 31, got {value}")
        if self.keys > MOST_KEYS_A_ROW:
            raise DispatchError(f"a row has at most {MOST_KEYS_A_ROW} keys, got {self.keys}")
        if self.rows * self.keys * plan.num_ranks >= 2**31:
            raise DispatchError(f"{plan.num_ranks} ranks of {self.rows} rows with {self.keys} keys are 2 ** 31 or more")
        if len(self.widths) != tensors_of(plan):
            raise DispatchError(f"expected the widths of {tensors_of(plan)} tensors, got {self.widths}")
        more = (self.width_again,) if self.width_again else ()
        for width in (*self.widths, *more, *((self.width_back,) if back is not None else ())):
            if width < 2 or width % 2:
                raise DispatchError(f"a row takes an even number of bytes, 2 or more, not {width}")

    def admit(self, tensors: Sequence[torch.Tensor], keys: torch.Tensor, stretches: Sequence[int]) -> None:
        """`stretches`: by tensor, of those that travel in float8. Raises TensorError (C951), or DispatchError (C961)
        for a call that there is no memory for.
        """
        if len(tensors) != len(self.widths):
            raise TensorError(f"expected {len(self.widths)} tensors of rows, got {len(tensors)}")
        given.argument("keys", keys)
        whole("keys", keys, keys.device, torch.int32, None)
        if keys.dim() != 2 or keys.shape[1] < 1:
            raise TensorError(f"keys are (rows, keys of a row), got {tuple(keys.shape)}")
        rows, a_row = keys.shape
        if rows > self.rows or a_row > self.keys:
            raise DispatchError(
                f"{rows} rows with {a_row} keys each, and the Limits are for {self.rows} with {self.keys}"
            )
        for tensor, width, stretch in zip(tensors, self.widths, stretches, strict=True):
            whole("rows", tensor, keys.device, None, rows)
            if stretch:
                judge(tensor)
            _fits(travels_in(tensor, stretch), width)

    def admit_again(self, rows: torch.Tensor, keys: torch.Tensor) -> None:
        """As `admit`, for rows of one tensor whose places are known."""
        whole("rows", rows, keys.device, None, len(keys))
        if self.width_again == 0:
            raise DispatchError("no row goes again: say in Limits how wide one may be, `width_again`")
        _fits(row_bytes(rows), self.width_again)

    def admit_back(self, rows: torch.Tensor, keys: torch.Tensor) -> None:
        """As `admit`, for rows on their way back: all that were received, and behind them any that were not."""
        whole("rows", rows, keys.device, None, None)
        if len(rows) > self.received:
            raise TensorError(f"expected up to {self.received} rows, got {len(rows)}")
        self._fits_back(rows)

    def _fits_back(self, rows: torch.Tensor) -> None:
        """Raise as `_fits` does; the error names the cast that makes rows narrow enough."""
        nbytes, narrow = row_bytes(rows), torch.bfloat16
        if nbytes > self.width_back >= nbytes // rows.element_size() * narrow.itemsize:
            raise TensorError(
                f"rows of {tuple(rows.shape[1:])} {rows.dtype} take {nbytes} bytes each, and there is room for "
                f"{self.width_back}, as {narrow} takes: pass rows.to({narrow}). A product with float32 weights is "
                f"float32: (rows * weights[:, None]).to(rows.dtype)"
            )
        _fits(nbytes, self.width_back)

    def admit_values(self, values: torch.Tensor, keys: torch.Tensor, rows: int = 0) -> None:
        """As `admit_back`, for a number of each received row, no fewer than `rows`."""
        whole("values", values, keys.device, torch.float32, None)
        if values.dim() != 1 or not rows <= len(values) <= self.received:
            raise TensorError(f"expected {rows} to {self.received} values, got {tuple(values.shape)}")

    @staticmethod
    def admit_weights(weights: torch.Tensor, keys: torch.Tensor) -> None:
        """Raises TensorError (C951) unless there is a float32 for each key."""
        whole("weights", weights, keys.device, torch.float32, len(keys))
        if weights.shape != keys.shape:
            raise TensorError(f"expected a weight for each key, {tuple(keys.shape)}, got {tuple(weights.shape)}")


def tensors_of(plan: Plan) -> int:
    """How many tensors of rows go there."""
    return len(plan.push_by_key.given)


def whole(
    what: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None, rows: int | None, name: str = ""
) -> None:
    """Raises TensorError (C951) unless this is a tensor on the device, of the dtype, contiguous, with so many rows.
    `name`: of the caller's argument.
    """
    given.argument(name or what, tensor)
    prefix = f"`{name}`: " if name else ""
    if tensor.device.type != device.type:
        raise TensorError(f"{prefix}{what} are on {tensor.device}, expected {device}")
    if dtype is not None and tensor.dtype != dtype:
        raise TensorError(f"{prefix}{what} are {tensor.dtype}, expected {dtype}: pass {name or 'tensor'}.to({dtype})")
    if tensor.dim() == 0 or (rows is not None and len(tensor) != rows):
        wanted = "one row or more" if rows is None else f"{rows}"
        raise TensorError(f"{prefix}expected {wanted} {what}, got a tensor of shape {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise TensorError(f"{prefix}{what} are not contiguous: pass {name or 'tensor'}.contiguous()")


def _fits(nbytes: int, width: int) -> None:
    if nbytes < 2 or nbytes % 2:
        raise DispatchError(f"a row takes an even number of bytes, 2 or more, not {nbytes}")
    if nbytes > width:
        raise DispatchError(f"a row takes {nbytes} bytes, and the Limits are for {width}")
