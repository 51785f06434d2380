"""Turns a Definition into a torch op: `torch.ops.commdsl.<name>`, functional, and `<name>_` where it may work in place.

Assumes the Program's proofs. Does not compile kernels until a call needs one, and never synchronizes the host of a GPU
call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from commdsl.config import from_environment
from commdsl.plan import Transport
from commdsl.runtime import autograd, communicator, tensors
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.device import DeviceCommunicator
from commdsl.runtime.errors import ReductionError, TensorError
from commdsl.runtime.host import HostCommunicator
from commdsl.runtime.program import Definition, Program, program
from commdsl.runtime.work import DeviceWork, HostWork, Result, Work
from commdsl.runtime.workspace import Workspace
from commdsl.sizes import DEVICE_MIN_SLICE_BYTES, Launch, host_launch, launch


class Op:
    """A schedule that can be called. One object serves every group: it is compiled per number of ranks."""

    def __init__(self, name: str, definition: Definition, ranks: int) -> None:
        self.name = name
        self.definition = definition
        self.ranks = ranks  # assumed where a group is not known: tracing without one
        self._programs: dict[tuple[int, Transport], Program] = {}
        self._lock = threading.Lock()
        # Kept apart from the programs: `torch.compile` traces through a call as far as these.
        self.has_reduction = self.program(ranks).signature.has_reduction
        self.works_in_place = self.program(ranks).signature.in_place is not None

    def __repr__(self) -> str:
        return f"<commdsl op {self.name}>"

    def program(self, ranks: int, transport: Transport = Transport.PEER) -> Program:
        with self._lock:
            found = self._programs.get((ranks, transport))
            if found is None:
                found = program(self.definition, ranks, transport, from_environment())
                self._programs[ranks, transport] = found
            return found

    def traced(self, group_name: str) -> Program:
        """What shapes depend on: the group's size, or the assumed one where the group is not known."""
        return self.program(communicator.size_of(group_name) or self.ranks)

    def __call__(
        self, *inputs: torch.Tensor, group: Any = None, op: str = "sum", async_op: bool = False
    ) -> Result | Work:
        """The outputs, new tensors; with `async_op` a Work whose `wait()` returns them."""
        name = communicator.name_of(group)
        arguments = (*inputs, name, *self._reduction(op))
        overload = getattr(torch.ops.commdsl, self.name)
        if not async_op:
            result: Result = overload(*arguments)
            return result
        return self._start(overload, inputs, arguments, name)

    def in_place(self, *inputs: torch.Tensor, group: Any = None, op: str = "sum") -> None:
        """Overwrites the `inout` tensors; only for schedules that are proved to allow it."""
        if not self.works_in_place:
            raise TensorError(f"`{self.name}` cannot work in place: a chunk would be overwritten before it is read")
        getattr(torch.ops.commdsl, f"{self.name}_")(*inputs, communicator.name_of(group), *self._reduction(op))

    def _reduction(self, op: str) -> tuple[str, ...]:
        if self.has_reduction:
            return (op,)
        if op != "sum":
            raise ReductionError(f"`{self.name}` reduces nothing: op=`{op}` has no meaning")
        return ()

    def _start(self, overload: Any, inputs: Sequence[torch.Tensor], arguments: tuple[Any, ...], name: str) -> Work:
        comm = communicator.of(name, inputs[0].device)
        if isinstance(comm, DeviceCommunicator):
            side, current = comm.side_stream, torch.cuda.current_stream(comm.index)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                result = overload(*arguments)
                event = torch.cuda.Event()
                event.record(side)
            for tensor in inputs:
                tensor.record_stream(side)
            return DeviceWork(result, event, comm)
        assert isinstance(comm, HostCommunicator)
        grad = torch.is_grad_enabled()

        def call() -> Result:
            with torch.set_grad_enabled(grad):
                outputs: Result = overload(*arguments)
                return outputs

        return HostWork(comm.submit(call))

    def synchronize(self, group: Any = None) -> None:
        """Waits for this rank's calls on the group and raises what went wrong in them."""
        for comm in communicator.every(communicator.name_of(group)):
            comm.finish()
            comm.check()

    def release(self, group: Any = None) -> None:
        """Collective: gives back the symmetric memory of this op on the group."""
        for comm in communicator.every(communicator.name_of(group)):
            comm.release(self.program(comm.size, comm.transport).emitted.digest)

    # --- what torch calls ------------------------------------------------------------------------------------------

    def functional(self, *arguments: Any) -> Result:
        inputs, group_name, op = self.split(arguments)
        outputs = self._run(inputs, group_name, op, None)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def mutating(self, *arguments: Any) -> None:
        inputs, group_name, op = self.split(arguments)
        chosen = self.traced(group_name).signature.in_place
        if chosen is None:
            raise TensorError(f"`{self.name}_` is not proved to work in place for this number of ranks")
        self._run(inputs, group_name, op, [inputs[index] for index in chosen])

    def fake(self, *arguments: Any) -> Result:
        inputs, group_name, _ = self.split(arguments)
        shapes = tensors.output_shapes(self.traced(group_name).signature, inputs)
        outputs = tuple(inputs[0].new_empty(shape) for shape in shapes)
        return outputs[0] if len(outputs) == 1 else outputs

    def split(self, arguments: tuple[Any, ...]) -> tuple[tuple[torch.Tensor, ...], str, str]:
        """Tensors, group name and reduction of a call by its schema."""
        has_reduction = isinstance(arguments[-2], str)
        op = arguments[-1] if has_reduction else "sum"
        end = len(arguments) - (2 if has_reduction else 1)
        return arguments[:end], arguments[end], op

    def _run(
        self, inputs: Sequence[torch.Tensor], group_name: str, op: str, outputs: list[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        comm = communicator.of(group_name, inputs[0].device)
        comm.refuse_if_broken()
        comm.check()
        known = self.program(comm.size, comm.transport)
        signature = known.signature
        tensors.check(self.name, signature, inputs)
        tensors.check_reduction(self.name, signature, inputs[0].dtype, op)
        if outputs is None:
            make = inputs[0].new_empty if known.fills_outputs else inputs[0].new_zeros
            outputs = [make(shape) for shape in tensors.output_shapes(signature, inputs)]
        block_bytes = inputs[0].nbytes // signature.inputs[0].blocks
        if block_bytes > 0:
            addresses = [(inputs if is_input else outputs)[index].data_ptr() for is_input, index in signature.tensors]
            _call(comm, known, addresses, block_bytes, tensors.element_name(inputs[0].dtype), op)
        return outputs


def _call(comm: Communicator, known: Program, addresses: list[int], block_bytes: int, dtype: str, op: str) -> None:
    workspace = comm.workspace(known)
    run = _launch(workspace, block_bytes, on_host=isinstance(comm, HostCommunicator))
    average = op == "avg"
    if isinstance(comm, HostCommunicator):
        kernel = comm.kernel(known, workspace, dtype, op)
        comm.drain()
        with workspace.lock:
            workspace.call(kernel, addresses, run, average)
        comm.check()
        return
    assert isinstance(comm, DeviceCommunicator)
    assert workspace.order is not None
    kernel = comm.kernel(known, workspace, dtype, op)
    with torch.cuda.device(comm.index), workspace.lock:
        stream = torch.cuda.current_stream(comm.index)
        workspace.order.enter(stream)
        workspace.call(kernel, addresses, run, average, stream.cuda_stream)
        workspace.order.leave(stream)


def _launch(workspace: Workspace, block_bytes: int, *, on_host: bool) -> Launch:
    found = workspace.launches.get(block_bytes)
    if found is None:
        plan = workspace.plan
        if on_host:
            found = host_launch(plan, block_bytes)
        else:
            found = launch(plan, block_bytes, min_slice_bytes=DEVICE_MIN_SLICE_BYTES)
        workspace.launches[block_bytes] = found
    return found


class _Registry:
    """The ops of this process. torch keeps its own such table; this one remembers what each name stands for."""

    def __init__(self) -> None:
        self.library = torch.library.Library("commdsl", "FRAGMENT")
        self.ops: dict[str, tuple[str, Op]] = {}
        self.lock = threading.RLock()


_REGISTRY: list[_Registry] = []


def registry() -> _Registry:
    if not _REGISTRY:
        _REGISTRY.append(_Registry())
    return _REGISTRY[0]


def register(name: str, digest: str, definition: Definition, ranks: int) -> Op:
    """The op of that name; another text under a name that is taken gets its digest appended."""
    table = registry()
    with table.lock:
        if name in table.ops and table.ops[name][0] != digest:
            name = f"{name}_{digest[:8]}"
        if name not in table.ops:
            made = Op(name, definition, ranks)
            _define(table.library, made)
            table.ops[name] = (digest, made)
        return table.ops[name][1]


def _define(library: torch.library.Library, op: Op) -> None:
    signature = op.program(op.ranks).signature
    reserved = ("group_name", "op", "self", "out")
    names = [f"{port.name}_" if port.name in reserved else port.name for port in signature.inputs]
    results = ", ".join("Tensor" for _ in signature.outputs)
    returns = results if len(signature.outputs) == 1 else f"({results})"
    tail = "str group_name" + (', str op="sum"' if signature.has_reduction else "")
    tags = (torch.Tag.pt2_compliant_tag,)
    parameters = ", ".join(f"Tensor {name}" for name in names)
    library.define(f"{op.name}({parameters}, {tail}) -> {returns}", tags=tags)
    for key in ("CPU", "CUDA"):
        library.impl(op.name, op.functional, key)
    torch.library.register_fake(f"commdsl::{op.name}", op.fake, lib=library)
    autograd.register(library, op)
    if signature.in_place is None:
        return
    written = [
        f"Tensor({chr(ord('a') + index)}!) {name}" if index in signature.in_place else f"Tensor {name}"
        for index, name in enumerate(names)
    ]
    library.define(f"{op.name}_({', '.join(written)}, {tail}) -> ()", tags=tags)
    for key in ("CPU", "CUDA"):
        library.impl(f"{op.name}_", op.mutating, key)
    torch.library.register_fake(f"commdsl::{op.name}_", lambda *_: None, lib=library)
    autograd.refuse_in_place(library, op)
