"""Turns limits into a Launcher: one rank's end of a dispatch, with its symmetric memory and its kernels.

Assumes every rank makes the same Launchers and the same calls, in the same order. Does not know torch's dispatcher or
gradients (`dispatcher` does). Its kernels order themselves: no barrier before a call, nothing to clear after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from commdsl.dispatch.errors import DispatchError, RowError
from commdsl.dispatch.limits import Limits, names_of
from commdsl.dispatch.repeats import Call, Shapes
from commdsl.dispatch.route import Form, Pair, Route, Way, checked
from commdsl.ir.dispatches import BY_QUERY, BY_SOURCE, Dispatch
from commdsl.program.timeouts import BAD_TILE, ErrorRecord, complaint
from commdsl.runtime import given, groups
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.errors import TensorError
from commdsl.runtime.given import Patience
from commdsl.runtime.launches import ROW_BYTES, Arguments, Launches, default_device
from commdsl.runtime.load import Kernels, Where, definition
from commdsl.runtime.pool import results_of, row_bytes
from commdsl.runtime.program import Definition, RoutedProgram, routed_program
from commdsl.runtime.reporting import reported
from commdsl.runtime.tensors import element_name, in_backward
from commdsl.runtime.workspace import Start, listed

SUMMED = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

LANE_BYTES = 80 << 10
"""What a lane moves at least. On two H200s 64 rows of 10 KB take 8.1 us so, 256 rows 9.9, 512 rows 14.2; with twice as
many bytes a lane 10.6, 11.5 and 15.3, with half as many 8.2, 10.2 and 14.5.
"""

CHANGING: Arguments = {
    "table": 0,
    **dict.fromkeys(("inputs", "outputs", "row_bytes", "input_rows", "output_rows"), ()),
    "digest": 0,
    "rank": 0,
    "active_lanes": 0,
}
"""The arguments that come with each call."""

_address = torch.Tensor.data_ptr


class Launcher:
    """One rank's end of a dispatch: it launches calls that a table describes."""

    @reported()
    def __init__(
        self,
        limits: Limits,
        group: Any = None,
        device: torch.device | str | None = None,
        put: str | None = None,
        *,
        results: int = 2,
        check: bool = False,
        source: Where = "qkv",
        name: str | None = None,
        on: str | None = None,
        params: Mapping[str, int] | None = None,
        tune: Mapping[str, int | str] | None = None,
        kernels: Kernels | None = None,
        timeout: Patience = None,
    ) -> None:
        """Collective: symmetric memory for `limits` on every rank of `group`.

        `put` "rows" sends each row straight to its final place in symmetric memory, which has places for `results`
        calls there and as many back. In the last of them land results that are copied to ordinary memory, as those are
        that come while all others are held. "packed" sends one message to each
        peer, which unpacks it; results are ordinary tensors. Without it, what the file tunes; where a peer is far
        (COMMDSL_NODES) it is always "packed". With `check` the kernels
        hold every row to its bounds, and count what comes (C962). `source` is a `.comm` file or a shipped one; its
        dispatch, or the one that is `name`d, runs, held to the topology `on`, with `params` for its parameters and
        `tune` in place of its own tuning.

        `timeout`: how long a wait for another rank may take, in seconds or as a timedelta; the group's unless said.

        Raises CommError for the file, AgreementError (C964) where ranks differ, DispatchError (C961) for limits that
        make no sense.
        """
        self.device = torch.device(device) if device is not None else default_device()
        self.comm = groups.of(groups.name_of(group), self.device)
        self.limits = limits
        if results < 1:
            raise DispatchError(f"expected 1 or more `results`, got {results}: they land in the last place")
        tuned = {**(tune or {}), **({} if put is None else {"put": put})}
        self._program = _found(definition(source, name, params, on, tuned, kernels), self.comm)
        self.plan, back = self._program.plan, self._program.dispatch.back
        self._returning = back.names if back is not None else ()
        limits.judge(self.plan)
        # What every call asks of the Plan, which looks through its phases for it.
        self._is_packed, self._copied = self.plan.push.packed, self.plan.push.copied
        self._most_tensors = len(self.plan.push.given)
        self._macros = ("COMMDSL_CHECK=1",) if check else ()
        self._layout = limits.layout(self.plan, results)
        room = self._layout.size - self.plan.symmetric_bytes
        seconds = given.seconds(timeout)
        terms = {**asdict(limits), "results": results, "put packed": self.plan.push.packed, "check": check}
        self._launches = Launches(self.comm, self.plan, self._program.emitted, room, self.explain, terms, seconds)
        begin, sizes = self._layout.results, self._layout.result_bytes
        self._pool = self._launches.pool(begin, sizes, results - 1)
        self._landing = self._launches.pool(begin + (results - 1) * sum(sizes), sizes, 1)
        self.name = f"{self.plan.name}/{self.comm.name}/{self._launches.number}/{id(self):x}"
        self._starts: dict[str, Start] = {}
        self._calls: dict[Way, Call] = {}  # the last of each
        self._routes: weakref.WeakSet[Route] = weakref.WeakSet()
        self._last = 0  # the address of the last call's table
        _KNOWN[self.name] = self

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
        given.argument("q", q)
        tensors, route = tuple(tensor for tensor in (q, k, v) if tensor is not None), checked(route)
        for name, tensor in (("k", k), ("v", v)):
            if tensor is not None:
                given.argument(name, tensor)
        for way in (Way.QUERIES, Way.ALL)[: 1 if k is None else 2]:
            sent = tensors if way.has_keys else (q,)
            self.tables(route, way, sent)
            for one in (way, way.reversed):
                with suppress(TensorError):  # what cannot be summed can go there all the same
                    self._start(self._dtype(sent, one))

    @property
    def group_name(self) -> str:
        return self.comm.name

    def admit(self, route: Route, wanted: Form, waiting: Sequence[int]) -> None:
        if not self._launches.is_closed:
            self.limits.admit(self.plan, route, wanted, waiting)

    @reported("self")
    def launch(
        self,
        inputs: Sequence[torch.Tensor],
        table: torch.Tensor,
        rows: Sequence[int],
        way: Way,
        about: str,
        *,
        clear: bool,
    ) -> list[torch.Tensor]:
        """One call: new tensors of `rows` rows each. With `clear` what the table leaves out is zero. `about`: as of
        `call`.
        """
        self._refuse(way)
        return self._make(self.call(inputs, rows, way, about), inputs, table, clear=clear)

    def again(self, call: Call, inputs: Sequence[torch.Tensor], table: torch.Tensor, way: Way) -> list[torch.Tensor]:
        """One call more, on tensors like those that it was worked out for."""
        self._refuse(way)
        return self._make(call, inputs, table, clear=False)

    def release(self) -> None:
        """Collective: gives back the symmetric memory, of results that are still held when these are let go."""
        _KNOWN.pop(self.name, None)
        self._launches.release()

    def synchronize(self) -> None:
        """Waits for this rank's calls and raises what went wrong in them."""
        self.comm.finish()
        self.comm.check()

    def explain(self, record: ErrorRecord) -> Exception:
        """What a kernel of this rank reported that is no time-out, in words."""
        places = [route.place_of(self._last, record.op) for route in self._routes] if record.code == BAD_TILE else []
        place = "".join(f" ({words})" for words in places if words is not None)
        return RowError(complaint(record, place))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _refuse(self, way: Way) -> None:
        """Raises where no call can be made now, or ranks are about to make different ones."""
        comm = self.comm
        comm.ready()
        if comm.compares:
            comm.compare(f"`{self.plan.name}` for {way.value}{in_backward()}")
        if self._launches.is_closed:
            raise DispatchError(f"`{self.plan.name}` was released")

    def _make(
        self, call: Call, inputs: Sequence[torch.Tensor], table: torch.Tensor, *, clear: bool
    ) -> list[torch.Tensor]:
        outputs, lands = self._new(call, inputs)
        if clear:
            for output in outputs:
                output.zero_()
        self._last = table.data_ptr()
        call.start(
            (self._last, *map(_address, inputs), *call.pad, *map(_address, outputs), *call.pad, *call.words),
        )
        return [output.clone() for output in outputs] if lands else outputs

    def make(self, route: Route, way: Way, widths: tuple[int, ...]) -> Pair:
        """The tables of a call and of its way back, once the Route is admitted."""
        self.comm.refuse_setup(self.plan.name)
        if route.num_ranks != self.comm.size or route.rank != self.comm.rank:
            raise DispatchError(
                f"the Route is rank {route.rank}'s of {route.num_ranks}; this is rank {self.comm.rank} of "
                f"{self.comm.size}"
            )
        if route.device.type != self.device.type:
            raise DispatchError(f"the Route's tables are on {route.device}, this Dispatcher is on {self.device}")
        there, back = (route.table(self._form(one, widths), self) for one in (way, way.reversed))
        self._routes.add(route)
        for one in (way, way.reversed):
            form = self._form(one, widths)
            self._launches.know_plan(route.digest(form), route.words(form))
        # Each is the other's way back.
        route.ready[self.name, way.value, widths] = there, back
        route.ready[self.name, way.reversed.value, widths] = back, there
        return there, back

    def _form(self, way: Way, widths: tuple[int, ...]) -> Form:
        return Form(way, widths, self._is_packed, self.plan.tile_bytes)

    def call(self, inputs: Sequence[torch.Tensor], rows: Sequence[int], way: Way, about: str) -> Call:
        """What calls on such tensors have in common, results of `rows` rows each. `about`: further settings that all
        ranks must agree on, in words that become part of the digest which the kernels compare.
        """
        shapes = list(rows), [(tensor.shape, tensor.dtype) for tensor in inputs]
        found = self._calls.get(way)
        if found is None or found.shapes != shapes or found.about != about:
            found = self._calls[way] = self._new_call(shapes, inputs, way, about)
        return found

    def _new_call(self, shapes: Shapes, inputs: Sequence[torch.Tensor], way: Way, about: str) -> Call:
        if not way.goes:
            self._judge_back(len(inputs))
        dtype = self._dtype(inputs, way)
        start, results = self._start(dtype), results_of(shapes[0], inputs)
        pad = (0,) * (self._most_tensors - len(inputs))
        widths, here, there = [*map(row_bytes, inputs)], [*map(len, inputs)], shapes[0]
        moved = sum(max(pair) * max(width, ROW_BYTES) for width, *pair in zip(widths, here, there, strict=True))
        words = (*widths, *pad, *here, *pad, *there, *pad)
        last = self._digest(inputs, dtype, about), self.comm.rank, self._launches.lanes(moved, LANE_BYTES)
        return Call(way.goes, shapes, results, start, pad, (*words, *last), about)

    def _digest(self, inputs: Sequence[torch.Tensor], summed: str, about: str) -> int:
        """The digest of a call without its table's, which the kernel adds."""
        rows = " and ".join(f"{tuple(tensor.shape[1:])} {element_name(tensor.dtype)}" for tensor in inputs)
        return self._launches.digest(f"of rows of {rows}{f', summed in {summed}' if summed else ''}{listed(about)}")

    def judge_gradients(self, tensors: Sequence[torch.Tensor], way: Way) -> None:
        """Raises TensorError (C951) for tensors whose gradients cannot be summed on their way back."""
        if not way.goes:
            return
        kinds = {one.dtype for one, copied in zip(tensors, self._copied, strict=False) if copied}
        if self.limits.copies > 1 and not (len(kinds) < 2 and kinds <= SUMMED.keys()):
            found = " and ".join(sorted(map(element_name, kinds)))
            raise TensorError(
                f"copies of {found} rows have no gradient: it is summed in one of {', '.join(SUMMED.values())}, in the "
                "same for all tensors. Cast q, k and v, as in k.float(), detach them, or call under torch.no_grad()"
            )

    def _judge_back(self, num_tensors: int) -> None:
        for name in names_of(self.plan)[:num_tensors]:
            if name not in self._returning:
                raise DispatchError(f"`{self.plan.name}` has no way back for `{name}`: write `back {name} by sum`")

    def _new(self, call: Call, like: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
        """Tensors for the results of a call, and whether these only land there: the next call's may, too."""
        if self._is_packed:
            return [tensor.new_empty(one.shape) for tensor, one in zip(like, call.results, strict=True)], False
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        found = self._pool.take(call.results, like, goes=call.goes, keep=capturing)
        if found is not None:
            return found, False
        return self._landing.look(call.results, like, goes=call.goes), True

    def _start(self, dtype: str) -> Start:
        found = self._starts.get(dtype)
        if found is None:
            macros = (*((f"COMMDSL_DTYPE={dtype}",) if dtype else ()), *self._macros)
            always = {"waiting": self._layout.waiting, "waiting_rows": self._layout.waiting_rows}
            found = self._starts[dtype] = self._launches.start(macros, always, CHANGING)
        return found

    def _dtype(self, inputs: Sequence[torch.Tensor], way: Way) -> str:
        """What the call's kernel sums, "" if nothing: not on the way there, nor where a shard has one copy."""
        if way.goes or self.limits.copies == 1:
            return ""
        summed = [tensor for tensor, copied in zip(inputs, self._copied, strict=False) if copied]
        for tensor in summed:
            if tensor.dtype not in SUMMED or tensor.dtype != summed[0].dtype:
                raise TensorError(
                    f"copies are summed in one of {', '.join(SUMMED.values())}, and in the same for all tensors, not "
                    f"in {tensor.dtype}"
                )
        return SUMMED[summed[0].dtype] if summed else ""


_KNOWN: weakref.WeakValueDictionary[str, Launcher] = weakref.WeakValueDictionary()
"""An op of torch knows its Dispatcher by name only."""


def known(name: str) -> Launcher:
    found = _KNOWN.get(name)
    if found is None:
        raise DispatchError(f"there is no Dispatcher `{name}` any more")
    return found


def _found(definition: Definition, comm: Communicator) -> RoutedProgram:
    made = routed_program(definition, comm.size, comm.transport, comm.config)
    _judge(made.dispatch)
    return made


def _judge(dispatch: Dispatch) -> None:
    """Raises DispatchError for a dispatch whose tensors take other routes than the calls have."""
    first, *others = (dispatch.routes[tensor.route] for tensor in dispatch.tensors)
    if first.order != BY_SOURCE or any(route.order != BY_QUERY for route in others):
        raise DispatchError(
            f"`{dispatch.name}` is none that these calls run: the first tensor is placed by (source rank, shard), the "
            "others by (query, shard)"
        )
