"""Turns limits into a Launcher: one rank's end of a dispatch, with its symmetric memory and its kernels.

Assumes every rank makes the same Launchers and the same calls, in the same order. Does not know torch's dispatcher or
gradients (`dispatcher` does). Its kernels order themselves: no barrier before a call, nothing to clear after it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from commdsl import compiler
from commdsl.build.emit_dispatch import DispatchKernel, Fixed, changing
from commdsl.dispatch.errors import DispatchError, RowError
from commdsl.dispatch.limits import Layout, Limits
from commdsl.dispatch.pool import Pool, row_bytes
from commdsl.dispatch.route import Form, Pair, Route, Way
from commdsl.ir.dispatches import BY_QUERY, BY_SOURCE, Dispatch
from commdsl.program.plan import Transport
from commdsl.program.timeouts import CommTimeout, ErrorRecord, unpack
from commdsl.runtime import groups
from commdsl.runtime.error_page import ErrorWord
from commdsl.runtime.errors import DeviceError, GroupError, TensorError
from commdsl.runtime.heap import Heap
from commdsl.runtime.kernel import Residence
from commdsl.runtime.load import find
from commdsl.runtime.workspace import Start

SUMMED = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
LANE_BYTES = 160 << 10
"""What a lane moves at least: with less, another lane only adds its own."""

HOST_LANES = 2
"""A lane is a thread there: more of them than cores only switch, but two race each other under test."""

TIMED_OUT, BAD_TILE, BAD_COUNT, BAD_FINISH, BAD_TABLE = range(1, 6)


class Room:
    """The symmetric memory of a Launcher: what peers tell each other, where rows wait, where results lie."""

    def __init__(self, owner: Launcher, heap: Heap, error: ErrorWord) -> None:
        self.heap = heap
        self.lock = threading.Lock()
        self.is_closed = False
        self.error = error
        self._owner = weakref.ref(owner)

    def failure(self) -> Exception | None:
        if not self.error.is_set:
            return None
        record = unpack(self.error.data.tobytes())
        owner = self._owner()
        return None if record is None or owner is None else owner.explain(record, int(self.error.data[0]))

    def reset(self) -> None:
        self.heap.zero()
        self.error.clear()

    def close(self) -> None:
        self.is_closed = True
        self.error.give_back()


class Call:
    """Launches of one kernel: packed arguments, in which `point` writes what a call changes."""

    def __init__(self, kernel: DispatchKernel, fixed: bytes) -> None:
        words = changing(kernel.num_tensors)
        size = len(fixed) + words.size
        self.arguments = ctypes.create_string_buffer(fixed.ljust(size, b"\0"), size)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))  # one argument: the struct
        self.pointers = ctypes.addressof(self._parameters)
        self.blocks = 1
        self.threads = kernel.threads
        self.shared = 0
        self._pack: Callable[..., None] = partial(words.pack_into, self.arguments, len(fixed))

    def point(self, *changing: int) -> None:
        self._pack(*changing)
        self.blocks = changing[-1]


class Launcher:
    """One rank's end of a dispatch: it launches calls that a table describes."""

    def __init__(
        self,
        limits: Limits,
        group: Any = None,
        device: torch.device | str | None = None,
        put: str | None = None,
        *,
        results: int = 2,
        check: bool = False,
        source: Path | str = "qkv",
        name: str | None = None,
        on: str | None = None,
        params: Mapping[str, int] | None = None,
        tune: Mapping[str, int | str] | None = None,
    ) -> None:
        """Collective: symmetric memory for `limits` on every rank of `group`.

        `put` "rows" sends each row straight to its final place; results lie in symmetric memory, which holds those of
        `results` calls there and as many back, and raises C961 when more are alive. "packed" sends one message to each
        peer, which unpacks it; results are ordinary tensors. Without it, what the file tunes. With `check` the kernels
        hold every row to its bounds, and count what comes (C962). `source` is a `.comm` file or a shipped one; its
        dispatch, or the one that is `name`d, runs, held to the topology `on`, with `params` for its parameters and
        `tune` in place of its own tuning.

        Raises CommError for the file, GroupError where ranks differ, DispatchError (C961) for senseless limits.
        """
        self.device = torch.device(device) if device is not None else _default_device()
        self._comm = groups.of(groups.name_of(group), self.device)
        if self._comm.transport is not Transport.PEER:
            raise DeviceError("dispatches reach peers by their pointers: unset COMMDSL_TRANSPORT")
        self.limits = limits
        tuned = {**(tune or {}), **({} if put is None else {"put": put})}
        compiled = _compiled(source, name, self._comm.size, on, params, tuned)
        self.kernel, self._emitted = compiled.kernel, compiled.emitted
        self._returning = compiled.dispatch.back.names if compiled.dispatch.back is not None else ()
        limits.judge(self.kernel)
        self._macros = ("COMMDSL_CHECK=1",) if check else ()
        self._agree(results)
        number = next(self._comm.numbers)
        self._key = f"{number}/{self._emitted.digest}"
        self.name = f"{self.kernel.name}/{self._comm.name}/{number}/{id(self):x}"
        self._open(limits.layout(self.kernel, results), results)
        self._starts: dict[str, Start] = {}
        self._routes: weakref.WeakSet[Route] = weakref.WeakSet()
        self._last = 0  # the address of the last call's table
        _KNOWN[self.name] = self

    def _open(self, layout: Layout, results: int) -> None:
        room = self._comm.tenant(self._key, self.kernel.name, layout.size, partial(Room, self))
        assert isinstance(room, Room)
        self._room = room
        heaps, timeout_ns = room.heap.addresses, int(self._comm.config.timeout * 1e9)
        self._fixed = Fixed(heaps, layout.waiting, layout.waiting_rows, timeout_ns, room.error.address).pack()
        self._pool = Pool(self.kernel.name, heaps[self._comm.rank] + layout.results, layout.result_bytes, results)

    # --- a call ------------------------------------------------------------------------------------------------------

    def tables(self, route: Route, way: Way, tensors: Sequence[torch.Tensor]) -> Pair:
        """The Route's tables for a call with these tensors and for its way back, which it is held to the limits for."""
        widths = tuple([row_bytes(tensor) for tensor in tensors])
        found = route.ready.get((self.name, way.value, widths))
        if found is not None:
            return found
        if torch.compiler.is_dynamo_compiling():
            from commdsl.dispatch.untraced import make  # a second, where torch has traced nothing yet

            return make(self, route, way, widths)
        return self.make(route, way, widths)

    def prepare(
        self, route: Route, q: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None
    ) -> None:
        """Makes what the first calls with such tensors and this Route would make: tables and kernels. Not collective.

        To be called before `torch.compile` traces a call or a CUDA graph captures one, unless the same call was made
        before. q, k, v: as for `dispatch_qkv`, or without rows, or on torch's meta device: what counts is the bytes of
        a row, and the dtype. Raises DispatchError (C961), and in a capture CaptureError (C955).
        """
        tensors = tuple(tensor for tensor in (q, k, v) if tensor is not None)
        for way in (Way.QUERIES, Way.ALL)[: 1 if k is None else 2]:
            given = tensors if way.has_keys else (q,)
            self.tables(route, way, given)
            for one in (way, way.reversed):
                with suppress(TensorError):  # what cannot be summed can go there all the same
                    self._start(self._dtype(given, one))

    def admit(self, route: Route, wanted: Form, waiting: Sequence[int]) -> None:
        if not self._room.is_closed:
            self.limits.admit(self.kernel, route, wanted, waiting)

    def launch(
        self, inputs: Sequence[torch.Tensor], table: torch.Tensor, rows: Sequence[int], way: Way, *, clear: bool
    ) -> list[torch.Tensor]:
        """One call: new tensors of `rows` rows each. With `clear` what the table leaves out is zero."""
        comm = self._comm
        comm.refuse_if_broken()
        comm.check()
        if self._room.is_closed:
            raise DispatchError(f"`{self.kernel.name}` was released")
        if not way.goes:
            self._judge_back(len(inputs))
        start = self._start(self._dtype(inputs, way))
        outputs = self._new(inputs, rows, way.goes)
        if clear:
            for output in outputs:
                output.zero_()
        self._last = table.data_ptr()
        pad = (0,) * (self.kernel.num_tensors - len(inputs))
        widths = tuple(map(row_bytes, inputs))
        moved = sum(max(tensor.nbytes, output.nbytes) for tensor, output in zip(inputs, outputs, strict=True))
        start(
            (
                self._last,
                *(tensor.data_ptr() for tensor in inputs),
                *pad,
                *(output.data_ptr() for output in outputs),
                *pad,
                *widths,
                *pad,
                *(len(tensor) for tensor in inputs),
                *pad,
                *rows,
                *pad,
                comm.rank,
                self._lanes(moved),
            )
        )
        return outputs

    def release(self) -> None:
        """Collective: gives back the symmetric memory. Results that lie there must not be used any more."""
        _KNOWN.pop(self.name, None)
        self._comm.release(self._key)

    def synchronize(self) -> None:
        """Waits for this rank's calls and raises what went wrong in them."""
        self._comm.finish()
        self._comm.check()

    def explain(self, record: ErrorRecord, code: int) -> Exception:
        """What a kernel of this rank reported, in words."""
        kernel = self.kernel
        if code == TIMED_OUT:
            origin = f"{kernel.origin}, {'entering the call' if record.op == 0 else 'waiting for its rows'}"
            missing = tuple(rank for rank in record.missing if rank != record.rank and rank < kernel.num_ranks)
            return CommTimeout(record, origin, missing, self._comm.config.timeout)
        if code == BAD_TILE:
            places = [route.place_of(self._last, record.op) for route in self._routes]
            place = "".join(f" ({words})" for words in places if words is not None)
            return RowError(
                f"rank {record.rank} was to send rows up to {record.seen} to rank {record.peer}, which has room for "
                f"{record.expected}: run {record.op} of its table{place}"
            )
        if code == BAD_COUNT:
            return RowError(
                f"rank {record.rank} expected {record.expected} rows from rank {record.peer}, and {record.seen} came"
            )
        if code == BAD_FINISH:
            return RowError(
                f"rank {record.rank} was to finish rows up to {record.seen} of its own, and has room for "
                f"{record.expected}: finish {record.op} of its table"
            )
        part = "its words" if record.op else "its head"
        return RowError(
            f"the table of rank {record.rank} is not what was made: {part} should give {record.expected}, and "
            f"give {record.seen}"
        )

    # --- inside ------------------------------------------------------------------------------------------------------

    def make(self, route: Route, way: Way, widths: tuple[int, ...]) -> Pair:
        """The tables of a call and of its way back, once the Route is admitted."""
        self._comm.refuse_setup(self.kernel.name)
        if route.num_ranks != self._comm.size or route.rank != self._comm.rank:
            raise DispatchError(
                f"the Route is rank {route.rank}'s of {route.num_ranks}; this is rank {self._comm.rank} of "
                f"{self._comm.size}"
            )
        if route.device.type != self.device.type:
            raise DispatchError(f"the Route's tables are on {route.device}, this Dispatcher is on {self.device}")
        there, back = (
            route.table(Form(one, widths, self.kernel.packed, self.kernel.tile_bytes), self)
            for one in (way, way.reversed)
        )
        self._routes.add(route)
        # Each is the other's way back.
        route.ready[self.name, way.value, widths] = there, back
        route.ready[self.name, way.reversed.value, widths] = back, there
        return there, back

    def _judge_back(self, num_tensors: int) -> None:
        for name in self.kernel.tensors[:num_tensors]:
            if name not in self._returning:
                raise DispatchError(f"`{self.kernel.name}` has no way back for `{name}`: write `back {name} by sum`")

    def _new(self, like: Sequence[torch.Tensor], rows: Sequence[int], goes: bool) -> list[torch.Tensor]:
        if self.kernel.packed:
            return [tensor.new_empty((count, *tensor.shape[1:])) for tensor, count in zip(like, rows, strict=True)]
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return self._pool.empty(rows, like, goes=goes, keep=capturing)

    def _start(self, dtype: str) -> Start:
        found = self._starts.get(dtype)
        if found is None:
            self._comm.refuse_setup(self.kernel.name)
            macros = (*((f"COMMDSL_DTYPE={dtype}",) if dtype else ()), *self._macros)
            kernel = self.kernel
            residence = Residence(kernel.name, kernel.entry, kernel.lanes, kernel.threads, 0, kernel.lanes)
            loaded = self._comm.load_kernel(self._emitted, macros, residence)
            found = self._starts[dtype] = self._comm.starter(self._room, loaded, Call(kernel, self._fixed))
        return found

    def _dtype(self, inputs: Sequence[torch.Tensor], way: Way) -> str:
        """What the call's kernel sums, "" if nothing: not on the way there, nor where a shard has one copy."""
        if way.goes or self.limits.copies == 1:
            return ""
        summed = [tensor for tensor, copied in zip(inputs, self.kernel.copied, strict=False) if copied]
        for tensor in summed:
            if tensor.dtype not in SUMMED or tensor.dtype != summed[0].dtype:
                raise TensorError(
                    f"copies are summed in one of {', '.join(SUMMED.values())}, and in the same for all tensors, not "
                    f"in {tensor.dtype}"
                )
        return SUMMED[summed[0].dtype] if summed else ""

    def _lanes(self, moved: int) -> int:
        if self.device.type == "cpu":
            return min(HOST_LANES, self.kernel.lanes)
        return max(1, min(self.kernel.lanes, -(-moved // LANE_BYTES)))

    def _agree(self, results: int) -> None:
        kernel = (self.kernel.name, self.kernel.packed, self._emitted.digest[:16], self._macros)
        mine = repr((kernel, self.limits, results)).encode()
        everyone = self._comm.exchange(f"dispatcher/{next(self._comm.numbers)}", mine)
        for rank, theirs in enumerate(everyone):
            if theirs != mine:
                raise GroupError(
                    f"rank {rank} makes another Dispatcher than this one: {theirs.decode()}, {mine.decode()}"
                )


_KNOWN: weakref.WeakValueDictionary[str, Launcher] = weakref.WeakValueDictionary()
"""An op of torch knows its Dispatcher by name only."""


def known(name: str) -> Launcher:
    found = _KNOWN.get(name)
    if found is None:
        raise DispatchError(f"there is no Dispatcher `{name}` any more")
    return found


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _compiled(
    source: Path | str,
    name: str | None,
    ranks: int,
    on: str | None,
    params: Mapping[str, int] | None,
    tune: Mapping[str, int | str],
) -> compiler.CompiledDispatch:
    compiled = compiler.compile_dispatch(compiler.read(find(source)), name, ranks, on, params, tune)
    _judge(compiled.dispatch)
    return compiled


def _judge(dispatch: Dispatch) -> None:
    """Raises DispatchError for a dispatch whose tensors take other routes than the calls have."""
    first, *others = (dispatch.routes[tensor.route] for tensor in dispatch.tensors)
    if first.order != BY_SOURCE or any(route.order != BY_QUERY for route in others):
        raise DispatchError(
            f"`{dispatch.name}` is none that these calls run: the first tensor is placed by (source rank, shard), the "
            "others by (query, shard)"
        )
