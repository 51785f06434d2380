"""Turns limits into Experts: one rank's end of a dispatch by keys, there and back, on tensors of torch.

Assumes every rank makes the same Experts and the same calls, in the same order. Does not read a key: nothing here waits
for the device. A call runs on the current stream, and a CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import torch

from commdsl.ep.float8 import paired
from commdsl.ep.handles import Handle, Received
from commdsl.ep.limits import Limits, whole
from commdsl.ep.pending import Call, Pending, finish_lost
from commdsl.ep.way_back import SUMMED, WayBack
from commdsl.ep.way_there import Known, WayAgain, WayThere
from commdsl.ir.dispatches import ByKey
from commdsl.program.timeouts import BAD_KEY, BAD_MATE, BAD_ORIGIN, NO_ROOM, ErrorRecord, complaint
from commdsl.runtime import given, groups
from commdsl.runtime.errors import DispatchError, GradientError, KeysError, RowError, TensorError
from commdsl.runtime.given import Patience
from commdsl.runtime.kept import keep
from commdsl.runtime.launches import Launches, default_device
from commdsl.runtime.load import Kernels, Where, definition
from commdsl.runtime.program import routed_program
from commdsl.runtime.reporting import reported
from commdsl.runtime.tensors import element_name, in_backward
from commdsl.runtime.workspace import listed

MOST_DIGESTS = 256  # kinds of call that are kept


class Experts:
    """Moves rows to the ranks of their keys and back, summed by weight, sorted by (key, source rank, row)."""

    @reported()
    def __init__(
        self,
        limits: Limits,
        group: Any = None,
        device: torch.device | str | None = None,
        *,
        results: int = 2,
        check: bool = False,
        source: Where = "experts",
        name: str | None = None,
        on: str | None = None,
        params: Mapping[str, int] | None = None,
        tune: Mapping[str, int | str] | None = None,
        kernels: Kernels | None = None,
        timeout: Patience = None,
        terms: Mapping[str, object] | None = None,
    ) -> None:
        """Collective: symmetric memory for `limits` on every rank of `group`, with what `results` calls receive.

        With `check` the kernels hold every row to the segment that the counts give it, and count what comes (C962).
        `source` is a `.comm` file or a shipped one; its dispatch, or the one that is `name`d, runs, held to the
        topology `on`, with `params` for its parameters (`E`, the number of keys) and `tune` in place of its own tuning.

        `timeout`: how long a wait for another rank may take, in seconds or as a timedelta; the group's unless said.
        `terms`: further settings, by name, that all ranks must agree on.

        Raises CommError for the file, AgreementError (C964) where ranks differ, DispatchError (C961) for limits that
        make no sense.
        """
        self.device = torch.device(device) if device is not None else default_device()
        self.comm = groups.of(groups.name_of(group), self.device)
        made = routed_program(
            definition(source, name, params, on, tune, kernels),
            self.comm.size,
            self.comm.transport,
            self.comm.config,
        )
        (route, *others) = made.dispatch.routes
        if others or not isinstance(route, ByKey):
            raise DispatchError(f"`{made.plan.name}` goes by tables: make a `dispatch.Dispatcher` of it")
        self.limits, self.plan = limits, made.plan
        self.keys_a_rank = route.num_keys // self.comm.size
        limits.judge(made.plan, None if made.back is None else made.back[0])
        macros = ("COMMDSL_CHECK=1",) if check else ()
        agreed = {**asdict(limits), "results": results, "check": check, **(terms or {})}
        known = Known(self.comm, limits, results, macros, self.explain, agreed, given.seconds(timeout))
        self._there = WayThere(known, (made.plan, made.emitted))
        self._again = WayAgain(known, made.again) if made.again is not None and limits.width_again else None
        self._digests: dict[tuple[object, ...], int] = {}
        self._back = None if made.back is None else WayBack(known, made.back)
        self._values = None if made.values is None else WayBack(known, made.values)

    # --- calls -------------------------------------------------------------------------------------------------------

    def __reduce__(self) -> NoReturn:
        raise DispatchError("Experts have memory on a group and are not copied or saved: make them where they are used")

    @reported("self")
    def dispatch(
        self,
        rows: torch.Tensor | tuple[torch.Tensor, ...],
        keys: torch.Tensor,
        values: torch.Tensor | None = None,
        *,
        about: str = "",
    ) -> Received:
        """Each row to the ranks of its keys, as often as the dispatch says.

        rows: (T, ...) or, where the dispatch has several tensors, a tuple of such, contiguous, any dtype, each with an
        even number of bytes a row; what the dispatch sends `as float8` is float32, float16 or bfloat16, an even number
        of elements a row, and arrives as Quantised rows and scales. keys: (T, K) int32 on the device, 0 ..< E; E itself
        drops. values: (T, K) float32, where the dispatch routes a value. about: further settings that all ranks must
        agree on, in words; ranks whose words differ raise AgreementError (C964). The memory of what is received is free
        again when nothing of it is held, the handle neither.

        Raises TensorError (C951), DispatchError (C961). More places than Limits.received, or a key that there is not,
        are reported behind the call, on all ranks that see it: KeysError (C963).
        """
        return self._dispatch(rows, keys, values, about).whole()

    @reported("self")
    def dispatch_send(
        self,
        rows: torch.Tensor | tuple[torch.Tensor, ...],
        keys: torch.Tensor,
        values: torch.Tensor | None = None,
    ) -> Pending[Received]:
        """The first of two launches of `dispatch`: rows are on their way when it ends. What it returns makes the other,
        `receive`, which waits for what peers send and returns what `dispatch` does. Between them the stream is free for
        other work; nothing that was passed may change, and no other `dispatch` of these Experts begins. Other ranks may
        make the same call by `dispatch`.
        """
        return Pending(self._dispatch(rows, keys, values), self._go_on)

    def _dispatch(
        self,
        rows: torch.Tensor | tuple[torch.Tensor, ...],
        keys: torch.Tensor,
        values: torch.Tensor | None,
        about: str = "",
    ) -> Call[Received]:
        several = isinstance(rows, tuple)
        tensors = rows if isinstance(rows, tuple) else (rows,)
        there, beside = self._there, () if values is None else (values,)
        self._ready(there.launches, *tensors, *beside)
        whole("keys", keys, self.device, torch.int32, None)
        self.limits.admit(tensors, keys, there.push.stretches)
        if (there.push.value is None) != (values is None):
            what = "takes no values" if there.push.value is None else "routes a value of each key: pass them"
            raise TensorError(f"`{self.plan.name}` {what}")
        if values is not None:
            self.limits.admit_weights(values, keys)
        digest = self._digest(there.launches, tensors, keys, about)
        run, came = there(tensors, keys, values, digest, self.is_capturing)
        mates, index = came.beside.get("mates"), came.beside.get("index")
        brought = None if there.push.value is None else came.beside[there.push.value.name]
        handle = Handle(keys, came.counts, came.beside["origins"], came.offsets, came.places, mates, brought)
        found = paired(came.rows, there.push.stretches)
        received = Received(found if several else found[0], came.counts, came.offsets, brought, index, handle)
        return Call(there.launches, run, received, (*tensors, keys, *beside))

    @reported("self")
    def dispatch_again(self, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Other rows, (T, ...), to the places of those of the call that left the handle; by no count, and with nothing
        beside them. Returns what the rank receives, as `dispatch` does. Collective; raises as `dispatch`.
        """
        return self._dispatch_again(rows, handle).whole()

    @reported("self")
    def dispatch_again_send(self, rows: torch.Tensor, handle: Handle) -> Pending[torch.Tensor]:
        """The first of two launches of `dispatch_again`, as `dispatch_send` is of `dispatch`."""
        return Pending(self._dispatch_again(rows, handle), self._go_on)

    def _dispatch_again(self, rows: torch.Tensor, handle: Handle) -> Call[torch.Tensor]:
        again = self._again
        given.instance("handle", handle, Handle)
        self.limits.admit_again(rows, handle.keys)
        if again is None:
            raise DispatchError(f"`{self.plan.name}` has no way there again")
        self._ready(again.launches, rows)
        mates = () if handle.mates is None else (handle.mates,)
        left = (handle.counts, handle.offsets, handle.places, handle.origins, *mates)
        digest = self._digest(again.launches, (rows,), handle.keys)
        run, found = again(rows, handle.keys, left, digest, self.is_capturing)
        return Call(again.launches, run, found, (rows, handle.keys, *left))

    @reported("self")
    def combine(
        self, rows: torch.Tensor, handle: Handle, weights: torch.Tensor | None = None, *, about: str = ""
    ) -> torch.Tensor:
        """What became of received rows back to where they come from: for each row of the call there, the sum over its
        keys, in their order, of weight times row, in float32, rounded once. Dropped keys add nothing, and a row of no
        key is zero. `once per rank`: over the ranks, in their order, of the sums of their keys, each rounded.

        rows: those received, and any behind them up to Limits.received, which do not count; float32, float16 or
        bfloat16, contiguous. weights, float32, where the dispatch has some: (T, K), or where ranks add up what is there
        one for each received row, those that came beside the rows unless given. about: as of `dispatch`. Returns a new
        tensor (T, ...). Raises TensorError (C951), DispatchError (C961). Fewer rows than were received are reported
        behind the call: KeysError (C963).
        """
        return self._combine(rows, handle, weights, about).whole()

    @reported("self")
    def combine_send(
        self, rows: torch.Tensor, handle: Handle, weights: torch.Tensor | None = None
    ) -> Pending[torch.Tensor]:
        """The first of two launches of `combine`, as `dispatch_send` is of `dispatch`."""
        return Pending(self._combine(rows, handle, weights), self._go_on)

    def _combine(
        self, rows: torch.Tensor, handle: Handle, weights: torch.Tensor | None, about: str = ""
    ) -> Call[torch.Tensor]:
        back = self._back
        given.instance("handle", handle, Handle)
        if back is None:
            raise DispatchError(f"`{self.plan.name}` has no way back: write `back y by sum(weight[T, K])`")
        weighs = back.weighs_here or back.push.weights is not None
        if back.push.weights is not None and weights is None:
            weights = handle.values
        if weighs != (weights is not None):
            raise TensorError(f"`{back.plan.name}` {'multiplies rows with' if weighs else 'takes no'} weights")
        beside = () if weights is None else (weights,)
        self._ready(back.launches, rows, *beside)
        if rows.dtype not in SUMMED:
            raise TensorError(f"rows are summed in one of {', '.join(SUMMED.values())}, not in {rows.dtype}")
        keys = handle.keys
        self.limits.admit_back(rows, keys)
        if weights is not None and back.weighs_here:
            self.limits.admit_weights(weights, keys)
        elif weights is not None:
            self.limits.admit_values(weights, keys, len(rows))
        found = rows.new_empty((len(keys), *rows.shape[1:]))
        known = (handle.origins, handle.offsets, *self._mates(back, handle), *beside)
        run = back(rows, keys, known, found, self._digest(back.launches, (rows,), keys, about))
        return Call(back.launches, run, found, (rows, keys, *known))

    @reported("self")
    def combine_values(self, values: torch.Tensor, handle: Handle) -> torch.Tensor:
        """A number for each received row back to its key: (T, K) float32, zero for a key that is dropped.

        values: (n,) float32, contiguous, of the rows received and any behind them up to Limits.received. Raises as
        `combine`.
        """
        return self._combine_values(values, handle).whole()

    @reported("self")
    def combine_values_send(self, values: torch.Tensor, handle: Handle) -> Pending[torch.Tensor]:
        """The first of two launches of `combine_values`, as `dispatch_send` is of `dispatch`."""
        return Pending(self._combine_values(values, handle), self._go_on)

    def _combine_values(self, values: torch.Tensor, handle: Handle) -> Call[torch.Tensor]:
        given.instance("handle", handle, Handle)
        way, keys = self._values, handle.keys
        if way is None:
            raise DispatchError(f"`{self.plan.name}` has no way back: write `back y by sum(weight[T, K])`")
        self._ready(way.launches, values)
        self.limits.admit_values(values, keys)
        found = values.new_empty(keys.shape)
        known = (handle.origins, handle.offsets)
        run = way(values, keys, known, found, self._digest(way.launches, (values,), keys))
        return Call(way.launches, run, found, (values, keys, *known))

    def prepare(self, dtype: torch.dtype | None = None) -> None:
        """Builds what the first calls would: the kernel there and, for a `dtype`, the one back. Not collective. To be
        called before a CUDA graph captures a call, unless the same call was made before.
        """
        self._there.start()
        if self._again is not None:
            self._again.start()
        if dtype is not None and self._back is not None:
            self._back.start(dtype)
        if self._values is not None:
            self._values.start(torch.float32)

    def is_prepared(self, dtype: torch.dtype | None = None) -> bool:
        """Whether what `prepare` builds is there."""
        has_back = dtype is None or self._back is None or self._back.is_built(dtype)
        has_there = self._there.is_built and (self._again is None or self._again.is_built)
        return has_there and has_back and (self._values is None or self._values.is_built(torch.float32))

    def release(self) -> None:
        """Collective: gives back the symmetric memory, of rows that are still held when these are let go."""
        for way in (self._there, self._again, self._back, self._values):
            if way is not None:
                way.launches.release()

    def synchronize(self) -> None:
        """Waits for this rank's calls and raises what went wrong in them."""
        self.comm.finish()
        self.comm.check()

    def explain(self, record: ErrorRecord) -> Exception:
        """What a kernel of this rank reported that is no time-out, in words."""
        kind = KeysError if record.code in (BAD_KEY, NO_ROOM, BAD_ORIGIN, BAD_MATE) else RowError
        return kind(complaint(record))

    @property
    def rank(self) -> int:
        """This rank of the group."""
        return self.comm.rank

    @property
    def is_released(self) -> bool:
        """True once the symmetric memory was released: no call can be made any more."""
        return self._there.launches.is_closed

    @property
    def has_room(self) -> bool:
        """Whether there is memory for what one more call there receives."""
        return self._there.pool.has_room(goes=True)

    @property
    def has_room_again(self) -> bool:
        """The same of rows that go to the places of a call before."""
        return self._again is not None and self._again.pool.has_room(goes=True)

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was received is held any more, here or in a graph."""
        return self._there.pool.is_idle and (self._again is None or self._again.pool.is_idle)

    def coming(self, *like: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Tensors over the memory that the next call's rows, like these, and their values will be written to, also
        while these are held. They keep the memory allocated. Raises DispatchError (C961) after a release.
        """
        there = self._there
        if self.is_released:
            raise DispatchError(f"`{self.plan.name}` was released: there is no memory for another call")
        found = there.coming(like)
        values = None if there.push.value is None else found[there.push.value.name]
        return tuple(found[str(number)] for number in range(len(like))), values

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _go_on(self) -> bool:
        """Raises where no call can go on; whether a graph is being captured."""
        self.comm.ready()
        return self.is_capturing

    def _ready(self, launches: Launches, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            given.argument("rows", tensor)
        is_captured = self._go_on()
        if not launches.is_closed:
            finish_lost(launches, is_captured)
        self.comm.compare(f"`{launches.plan.name}`{in_backward()}")
        if launches.is_closed:
            raise DispatchError(f"`{self.plan.name}` was released")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise GradientError(f"`{self.plan.name}` has no gradient: detach its tensors, or call it under no_grad")

    def _digest(self, launches: Launches, tensors: Sequence[torch.Tensor], keys: torch.Tensor, about: str = "") -> int:
        """The digest of a call that the kernels compare; the number of rows is each rank's own."""
        key = (launches.number, keys.shape[1], about, *((tensor.dtype, tensor.shape[1:]) for tensor in tensors))
        found = self._digests.get(key)
        if found is None:
            rows = " and ".join(f"{tuple(tensor.shape[1:])} {element_name(tensor.dtype)}" for tensor in tensors)
            found = launches.digest(f"of rows of {rows}, {keys.shape[1]} keys a row{listed(about)}")
            keep(self._digests, key, found, MOST_DIGESTS)
        return found

    def _mates(self, back: WayBack, handle: Handle) -> tuple[torch.Tensor, ...]:
        if back.push.mates is None:
            return ()
        if handle.mates is None:
            raise DispatchError(f"`{self.plan.name}` adds up rows of a call there that did not say which are one's")
        return (handle.mates,)
