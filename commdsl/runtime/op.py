"""Turns a Definition into a torch op: `torch.ops.commdsl.<name>`, functional, and `<name>_` where it may work in place.

Assumes the Program's proofs. Does not compile kernels until a call needs one, and never synchronizes the host of a GPU
call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Never, TypeAlias

import torch

from commdsl.cost.profile import Profile
from commdsl.ir.backward import Backward
from commdsl.runtime import autograd, eager, given, groups, pickled, tensors, uneven
from commdsl.runtime.calls import MAX_KEPT, MAX_LENGTHS, Bound, keep_call
from commdsl.runtime.compiled import CompiledOp
from commdsl.runtime.device import DeviceCommunicator
from commdsl.runtime.errors import GradientError, OpError, TensorError
from commdsl.runtime.functions import Function, by_name, split
from commdsl.runtime.given import Asked, Patience, Reduction
from commdsl.runtime.host import HostCommunicator
from commdsl.runtime.products import Multiplying, multiplying
from commdsl.runtime.program import Definition
from commdsl.runtime.reporting import reported
from commdsl.runtime.stamps import StampedStart, Stamps, of_launch
from commdsl.runtime.starts import check_reductions, prepared, travelling
from commdsl.runtime.timing import Timing
from commdsl.runtime.visits import Visiting
from commdsl.runtime.work import Result, Work, on_stream, on_thread
from commdsl.runtime.workspace import listed

Inverse: TypeAlias = "Callable[[Backward, int], Op]"
"""Loads the op of a way back for a number of ranks."""

BEFORE = 3
"""Calls before the one that a profile is of."""

Load: TypeAlias = "Callable[..., Op]"
"""`load`, with arguments by their names."""


def _shown(op: Op, /, *_: Any, **__: Any) -> str:
    return f"`{op.shown}`"


class Op(CompiledOp):
    """A schedule that can be called. One object serves every group: it is compiled per number of ranks."""

    def __init__(self, name: str, definition: Definition, ranks: int, inverse: Inverse, load: Load) -> None:
        super().__init__(name, definition, ranks)
        self._load, self._inverse = load, inverse
        self._calls: dict[tuple[object, ...], Bound | Multiplying] = {}
        self._visiting: dict[tuple[object, ...], Visiting] = {}
        self._stamped: Op | None = None  # the same with time stamps

    def __reduce__(self) -> tuple[object, ...]:
        return partial(self._load, **pickled.arguments(self.definition, self.ranks)), ()

    def __copy__(self) -> Op:
        return self

    def __deepcopy__(self, memo: object) -> Op:
        return self  # a module that holds one may be copied: there is one object of a name, and it holds no weights

    def inverse(self, way: Backward, group_name: str) -> Op:
        """The op of a way back from this one."""
        return self._inverse(way, self.traced(group_name).plan.num_ranks)

    def release(self, group: Any = None) -> None:
        """Collective: gives back the symmetric memory of this op on the group."""
        super().release(group)
        if self._stamped is not None:
            self._stamped.release(group)

    @reported(what=_shown)
    def __call__(
        self,
        *inputs: torch.Tensor,
        group: Any = None,
        op: Reduction = "sum",
        async_op: bool = False,
        timeout: Patience = None,
        lengths: Sequence[int] | None = None,
        about: str = "",
        **others: Never,
    ) -> Result | Work:
        """The outputs, new tensors; with `async_op` a Work whose `wait()` returns them. Where float8 is multiplied two
        scales follow the inputs, float32 numbers, of the rows and of the factor.

        `lengths`: where blocks have lengths of their own, those that this rank knows, in rows of the first dimension:
        one for each rank; or, of pairs of ranks, for each what is sent to it, then for each what comes from it.

        `timeout`: how long a wait may take in this call, and in a graph that captures it, in seconds or as a timedelta;
        default: the group's. `about`: what else all ranks must agree on, in words (C964).
        """
        if others:
            given.unexpected(self.shown, Op.__call__, others, self.input_names)
        asked = given.asked(op, timeout, lengths, about)
        if not async_op:
            return self._result(inputs, group, asked)
        if torch.compiler.is_compiling():
            from commdsl.runtime.traced import untraced  # a second, where torch has traced nothing yet

            settings = {"group": group, "op": op, "timeout": timeout, "lengths": lengths, "about": about}
            work: Work = untraced(self, *inputs, async_op=True, **settings)
            return work
        return self.started(inputs, group, asked, partial(self._result, inputs, group, asked))

    @property
    def stamped(self) -> Op:
        """Another build of the same Plans, whose calls say when what they do begins and ends."""
        with self._lock:
            if self._stamped is None:
                asked = replace(self.definition, stamped=True)
                self._stamped = Op(self.name, asked, self.ranks, self._inverse, self._load)
            return self._stamped

    @reported(what=lambda op, /, *_, **__: f"`{op.shown}.profiled`")
    def profiled(
        self,
        *inputs: torch.Tensor,
        group: Any = None,
        op: Reduction = "sum",
        timeout: Patience = None,
        lengths: Sequence[int] | None = None,
        **others: Never,
    ) -> tuple[Result, Profile]:
        """What a call returns, without a gradient, and when what this rank did for it began and ended.

        Collective as a call is, which is over with this. It is the last of several that are made: ranks come to it at
        the same time, and what takes a while the first time is over. Raises OpError where it has no time stamps.
        """
        if others:
            given.unexpected(f"{self.shown}.profiled", Op.profiled, others, self.input_names)
        given.tensors(self.shown, inputs, self.num_inputs, self.num_scales)
        inputs = tuple(tensor.detach() for tensor in inputs)
        if not (plan := self.program(self.ranks).plan).is_visited and plan.moves.has_heads:
            raise OpError(f"`{self.shown}` has as many rounds as peers say: its kernel has no time stamps")
        call = self.stamped.bound(inputs, groups.name_of(group), given.asked(op, timeout, lengths))
        for _ in range(BEFORE):
            call(inputs)
        outputs = call(inputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs), call.profile()

    @reported(what=_shown)
    def in_place(
        self,
        *inputs: torch.Tensor,
        group: Any = None,
        op: Reduction = "sum",
        timeout: Patience = None,
        lengths: Sequence[int] | None = None,
        **others: Never,
    ) -> None:
        """Overwrites the `inout` tensors; only for schedules that are proved to allow it. The rest as for a call."""
        if others:
            given.unexpected(f"{self.shown}.in_place", Op.in_place, others, self.input_names)
        asked = given.asked(op, timeout, lengths)
        if not self.works_in_place:
            raise TensorError(f"`{self.shown}` cannot work in place: a chunk is overwritten before it is read")
        if len(inputs) == self.num_inputs and eager.skips_dispatcher(inputs):
            self.bound(inputs, group, asked, in_place=True)(inputs)
            autograd.count_write(self, inputs)
        else:
            self._dispatch(f"{self.name}_", inputs, group, asked)

    def _result(self, inputs: tuple[torch.Tensor, ...], group: Any, asked: Asked) -> Result:
        if len(inputs) - self.num_inputs in (0, self.num_scales):
            if eager.skips_dispatcher(inputs):
                outputs = self.bound(inputs, group, asked)(inputs)
                return outputs[0] if len(outputs) == 1 else tuple(outputs)
            if eager.skips_dispatcher(inputs, but_gradients=True):
                return autograd.called(self, groups.name_of(group), asked, inputs)
        result: Result = self._dispatch(self.name, inputs, group, asked)
        return result

    def _dispatch(self, name: str, inputs: tuple[torch.Tensor, ...], group: Any, asked: Asked) -> Any:
        given.tensors(self.shown, inputs, self.num_inputs, self.num_scales)
        op = given.reduction(asked.op)
        if not self.has_reduction and op != "sum":
            raise tensors.no_meaning(self.shown, self.program(self.ranks).signature, op)
        reduction = (op,) if self.has_reduction else ()
        lengths = ([*(asked.lengths or ())],) if self.has_lengths else ()
        tail = (groups.name_of(group), *reduction, asked.seconds, *inputs[self.num_inputs :])
        return getattr(torch.ops.commdsl, name)(*inputs[: self.num_inputs], *lengths, *tail)

    def started(self, inputs: Sequence[torch.Tensor], group: Any, asked: Asked, call: Callable[[], Result]) -> Work:
        """Return the Work of `call`, a call of this op on these tensors, behind calls that were started before."""
        name = groups.name_of(group)
        self._check(tuple(inputs), name, asked)
        comm = groups.of(name, inputs[0].device)
        if isinstance(comm, DeviceCommunicator):
            return on_stream(call, inputs, comm.side_stream, comm.check)
        assert isinstance(comm, HostCommunicator)
        return on_thread(reported(lambda: comm, lambda: _shown(self))(call), comm.submit)

    @reported(what=lambda op, /, *_, **__: f"`{op.shown}.visit`")
    def visit(
        self,
        *arguments: Any,
        group: Any = None,
        op: Reduction = "sum",
        timeout: Patience = None,
        timing: Timing | None = None,
        about: str = "",
        last: int | None = None,
        **functions: Function,
    ) -> Result:
        """`op.visit(kv, fn)`: calls `fn(visit, kv)` at every yield, while what comes next travels on another stream.

        `fn` is called at once, one visit after another, on the current stream, and starts its kernels there; no host
        waits. It is given the number of the visit and what the yield names. At the first visit that may be the input
        itself; later ones are memory of this call, that is written anew: keep a clone, not the tensor. Where the yield
        has a body, `attend(kv, acc -> acc)`, `fn` gets `kv` and `acc` and returns the new `acc`, or changes it in place
        and returns it; with a keyword of its own, `def fn(visit, kv, acc, *, out)`, it is given the place of what it
        writes, a tensor or a tuple of them, and may write there and return nothing: so nothing is copied. Several
        functions are given by their names, `op.visit(kv, acc, attend=fn)`. Tensors have `blocks` equal blocks along
        their first dimension, or first dimensions that count them: (2, K, ...) for `k[2 blocks, K blocks]`. Returns the
        schedule's outputs, without yields; the `last` so many, if it is said, as one in symmetric memory is copied.
        Works inside a capture of a CUDA graph, after a first call outside. `timeout` as for a call, in each launch.
        `timing` takes the times of this call. `about`: of what the caller computes, in words that are the same on all
        ranks; where they differ, ranks are told both (AgreementError).

        If `fn` raises, the other ranks still get all that is theirs and the group can be used; where what it was to
        write travels on, the group is broken until every rank has called `commdsl.reset()`, and the exception says so.
        """
        inputs, known = split(self.shown, arguments, functions)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            raise GradientError(
                f"`{self.shown}` with visits has no gradient: call it under torch.no_grad(), or in the forward of a "
                "torch.autograd.Function, with the way back as visits of its own"
            )
        op, seconds = given.reduction(op), given.seconds(timeout)
        name, behind = groups.resolve(group)
        visits = self.traced(name).visited
        if visits is None:
            raise OpError(f"`{self.shown}` has no `yield`: call it without a function")
        given.tensors(self.shown, inputs, len(visits.signature.inputs))
        key: tuple[object, ...] = ("visits", name, op, seconds, about)
        key += tuple((tensor.dtype, tensor.device, tensor.shape) for tensor in inputs)
        found = self._visiting.get(key)
        if found is not None and (behind is None or not found.serves(behind)):
            found = None
        if found is None or not all(tensor.is_contiguous() for tensor in inputs):
            tensors.check(self.shown, visits.signature, inputs)
            check_reductions(self.shown, visits, inputs, op)
        functions_of = by_name(self.shown, visits.plan, known)
        comm = groups.of(name, inputs[0].device)
        if comm.compares:
            comm.compare(tensors.described(f"{self.name}.visit", travelling(visits, inputs), op) + listed(about))
        if found is None:
            found = self._prepare_visits(inputs, name, op, seconds, about)
            keep_call(self._visiting, key, found, MAX_KEPT)
        return found(inputs, functions_of, timing, last)

    # --- what torch calls ------------------------------------------------------------------------------------------

    def functional(self, *arguments: Any) -> Result:
        inputs, group_name, asked = self.split(arguments)
        outputs = self.bound(inputs, group_name, asked)(inputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def mutating(self, *arguments: Any) -> None:
        inputs, group_name, asked = self.split(arguments)
        self.bound(inputs, group_name, asked, in_place=True)(inputs)

    def fake(self, *arguments: Any) -> Result:
        inputs, group_name, asked = self.split(arguments)
        known = self.traced(group_name)
        signature = known.signature
        shapes = uneven.output_shapes(known, inputs, groups.rank_of(group_name), asked.lengths)
        made = zip(signature.outputs, shapes, strict=True)
        outputs = tuple(
            inputs[0].new_empty(shape, dtype=tensors.dtype_of(signature, port, inputs)) for port, shape in made
        )
        return outputs[0] if len(outputs) == 1 else outputs

    def split(self, arguments: tuple[Any, ...]) -> tuple[tuple[torch.Tensor, ...], str, Asked]:
        """Tensors, group name, and what is asked for, of a call by its schema; torch leaves out what is the default."""
        count = self.num_inputs
        lengths, name, *rest = arguments[count:] if self.has_lengths else (None, *arguments[count:])
        op = rest.pop(0) if self.has_reduction and rest else "sum"
        seconds, *scales = rest or [None]
        return (*arguments[:count], *filter(torch.is_tensor, scales)), name, given.asked(op, seconds, lengths)

    def bound(
        self, inputs: tuple[torch.Tensor, ...], group: Any, asked: Asked, *, in_place: bool = False
    ) -> Bound | Multiplying:
        """What makes calls on such tensors; made when they are first met."""
        name, behind = groups.resolve(group)
        first = inputs[0]
        try:
            key: tuple[object, ...] = (name, in_place, asked, first.dtype, first.device, first.shape)
            if len(inputs) > 1:
                key += tuple((tensor.dtype, tensor.device, tensor.shape) for tensor in inputs[1:])
            call = self._calls.get(key)
        except (RuntimeError, TypeError):  # a tensor without a shape, or no name of a reduction
            given.tensors(self.shown, inputs, self.num_inputs, self.num_scales)
            given.reduction(asked.op)
            raise
        if call is None or behind is None or not call.serves(behind):
            call = self._prepare(inputs, name, asked, in_place=in_place)
            keep_call(self._calls, key, call, MAX_LENGTHS if self.has_lengths else MAX_KEPT)
        elif call.compares:
            groups.of(name, first.device).compare(uneven.described(self.name, self.traced(name), inputs, asked))
        return call

    def _prepare(
        self, inputs: tuple[torch.Tensor, ...], name: str, asked: Asked, *, in_place: bool
    ) -> Bound | Multiplying:
        self._check(inputs, name, asked)
        op, seconds = given.reduction(asked.op), asked.seconds
        comm = groups.of(name, inputs[0].device)
        comm.ready()
        known = self.program(comm.size, comm.transport)
        comm.compare(uneven.described(self.name, known, inputs, asked))
        if known.visits is not None and known.visits.parts:
            return multiplying(self.name, comm, known, inputs, seconds, groups.owner_of(name))
        if in_place and known.signature.in_place is None:
            raise TensorError(f"`{self.shown}_` is not proved to work in place for this number of ranks")
        chosen, dtype = known.signature.in_place if in_place else None, tensors.element_name(inputs[0].dtype)
        blocks, row_bytes = uneven.blocks_and_row(known.signature, inputs, asked.lengths)
        start = comm.prepare(known, blocks, dtype, op, seconds, asked.about, row_bytes)
        if known.plan.stamped:
            stamps = partial(Stamps, self.name, comm.rank, inputs[0].device)
            start = StampedStart(start, stamps, of_launch(comm, known.plan, start))
        shapes = uneven.output_shapes(known, inputs, groups.rank_of(name), asked.lengths)
        return Bound(self.name, comm, known, inputs, shapes, chosen, start, groups.owner_of(name))

    def _check(self, inputs: tuple[torch.Tensor, ...], name: str, asked: Asked) -> None:
        """Refuses what no rank can call, before this one waits for any."""
        known, op = self.traced(name), given.reduction(asked.op)
        if known.plan.is_visited and known.visited is not None:
            raise OpError(f"`{self.shown}` moves what its caller computes on the way: call `visit`, with a function")
        given.tensors(self.shown, inputs, self.num_inputs, self.num_scales)
        if groups.size_of(name) is not None:
            tensors.check(self.shown, known.signature, inputs)
            uneven.check(self.shown, known, inputs, groups.rank_of(name), asked.lengths)
            tensors.check_reduction(self.shown, known.signature, inputs[0].dtype, op)

    def _prepare_visits(
        self, inputs: tuple[torch.Tensor, ...], name: str, op: str, seconds: float | None, about: str
    ) -> Visiting:
        comm = groups.of(name, inputs[0].device)
        comm.ready()
        visits = self.program(comm.size, comm.transport).visits
        assert visits is not None
        owner, starts = groups.owner_of(name), prepared(comm, visits, inputs, op, seconds, about)
        return Visiting(self.name, comm, visits, inputs, starts, seconds, owner)
