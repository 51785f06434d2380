"""Turns a Plan with visits into calls: launches on a stream beside the caller's, the caller's function between them.

Assumes a Plan that is proved, and tensors that were checked. Does not order anything: what is started when, and what
waits for what, stands in the Plan (`visited.started`). The host waits for nothing but what the caller's function does.

Buffers that travel have two tensors of their own for a call, from the allocator of the caller's stream; the streams
join before any of them is given back to it. Those that peers put to lie in symmetric memory, which calls take in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, TypeAlias, assert_never

import torch

from commdsl.program.launches import Between, Launch, Return, Visit
from commdsl.program.memory import Kept
from commdsl.program.plan import Plan
from commdsl.program.stamps import Layout, alone, task_of
from commdsl.program.stamps import Task as Stamped
from commdsl.program.tasks import Task
from commdsl.program.visited import ended, landing, launches, plan_of, started, turns
from commdsl.program.visited import visits as visited
from commdsl.runtime import tensors
from commdsl.runtime.breaking import settle
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.errors import TensorError
from commdsl.runtime.functions import Function, has_out
from commdsl.runtime.landing import Landed, Region
from commdsl.runtime.program import Visits
from commdsl.runtime.stamps import of_launch
from commdsl.runtime.starts import Made, made_of, port_of
from commdsl.runtime.streams import Streams
from commdsl.runtime.timing import Timing
from commdsl.runtime.work import Result
from commdsl.runtime.workspace import Meanwhile, Start, nothing

Over: TypeAlias = Callable[
    [Streams, Mapping[Kept, torch.Tensor], Sequence[int]], tuple[Streams, Mapping[str | None, Function]]
]
"""Of a call's streams and tensors, and where by rank what lands begins: what stands in place of its streams, and of the
caller's functions.
"""


class Visiting:
    """Calls of one op with visits, of one shape on one group."""

    def __init__(
        self,
        name: str,
        communicator: Communicator,
        visits: Visits,
        inputs: Sequence[torch.Tensor],
        starts: Mapping[Made, Sequence[Start]],
        seconds: float | None,
        owner: Callable[[], object],
    ) -> None:
        self._name = name
        self._communicator = communicator
        self._plan = visits.plan
        self._order = tuple(zip(started(visits.plan), ended(visits.plan), strict=True))
        self._starts = starts  # none where there are no bytes to move
        self._workspaces = tuple({start.workspace: None for turns in starts.values() for start in turns})
        self._owner = owner
        self._awaited = frozenset(_awaited(visits.plan))
        phases = (*launches(visits.plan), *visited(visits.plan))
        self._writing = frozenset(one.name for one in phases if isinstance(one, Visit | Task) and one.writes)
        names = [port.name for port in visits.signature.inputs]
        kept = dict.fromkeys(kept for phase in phases for kept in _kept(phase))
        self._given = tuple((one, names.index(one.name)) for one in kept if not one.copy)
        self._operands = tuple(launch.operands for launch in launches(visits.plan))
        self._turns = turns(visits.plan)
        found = zip(launches(visits.plan), self._turns, strict=True) if starts else ()
        self._launched = tuple(starts[made_of(one)][turn] for one, turn in found)
        own = [one for one in kept if one.copy]
        ports = tuple(map(port_of, own))
        shapes = tensors.shapes(visits.signature, inputs, ports)
        types = (tensors.dtype_of(visits.signature, port, inputs) for port in ports)
        kinds = dict(zip(own, zip(shapes, types, strict=True), strict=True))
        self._landed = Landed({kept: kinds.pop(kept) for kept in landing(visits.plan, visits.parts)})
        (self._returned,) = (phase.reads for phase in visits.plan.phases if isinstance(phase, Return))
        brings = {kept: number for number, one in enumerate(launches(visits.plan)) for kept in one.writes}
        self._brings = {kept: brings[kept] for kept in self._returned if kept in self._landed and kept in brings}
        self._awaited |= {(True, number) for number in self._brings.values()}
        landed = (one for one in self._returned if one in self._landed)
        self._taken = tuple(sorted(landed, key=lambda one: self._brings.get(one, -1)))
        self._own = tuple((kept, *kind) for kept, kind in kinds.items())
        self._seconds = seconds

    @property
    def is_over(self) -> bool:
        """As `Bound.is_over`."""
        return self._communicator.is_closed

    @property
    def rounds(self) -> int:
        """The most that a launch takes."""
        return max((start.launch.rounds for turns in self._starts.values() for start in turns), default=1)

    def serves(self, behind: object) -> bool:
        """As `Call.serves`."""
        for one in self._workspaces:
            if one.is_closed:
                return False
        return bool(self._workspaces) and behind is self._owner()

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        functions: Mapping[str | None, Function],
        timing: Timing | None = None,
        last: int | None = None,
    ) -> Result:
        """Starts everything, calls the functions, and returns the results, or the last so many of them."""
        with self.region() as region:
            found = self.call(region, inputs, functions, timing, last)
        return found[0] if len(found) == 1 else found

    def call(
        self,
        region: Region | None,
        inputs: Sequence[torch.Tensor],
        functions: Mapping[str | None, Function],
        timing: Timing | None = None,
        last: int | None = None,
        places: Mapping[Kept, torch.Tensor] = MappingProxyType({}),
        over: Over | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """As a call, in a region that the caller has. `places`: where what is not given lies, if not in tensors of the
        call's own. `over`: of what stands in their place, the streams and the functions of the call.
        """
        streams = self._communicator.streams()
        if timing is not None:
            waits = [phase.after for phase in visited(self._plan) if not isinstance(phase, Return)]
            streams, functions = timing.over(streams, functions, waits)
        if region is not None:
            region.enter(streams)
        held = self._held(inputs, places, region)
        bases = () if region is None else region.bases
        if over is not None:
            streams, functions = over(streams, held, bases)
        results = self._results(held, places, last)
        with self._communicator.whole():
            failure = self._run(streams, functions, held, bases, results)
        if failure is not None:
            settle(failure, self._communicator.name)  # the others have all that is theirs
            try:
                raise failure
            finally:
                del failure  # as in Communicator.check: its traceback holds this frame, and with it tensors
        return tuple(results.values())

    def ask(
        self,
        streams: Streams,
        inputs: Sequence[torch.Tensor],
        places: Mapping[Kept, torch.Tensor],
        over: Over,
        region: Region,
    ) -> None:
        """What a call on these tensors starts, on streams on which nothing runs, in a region that the caller has."""
        assert all(kept in places for kept, *_ in self._own)  # there is nobody to keep what it makes itself
        held = self._held(inputs, places, region)
        streams, functions = over(streams, held, region.bases)
        failure = self._run(streams, functions, held, region.bases, self._results(held, places, None))
        assert failure is None

    def _held(
        self, inputs: Sequence[torch.Tensor], places: Mapping[Kept, torch.Tensor], region: Region | None
    ) -> dict[Kept, torch.Tensor]:
        """Where all that a call has is."""
        held = {
            kept: places[kept] if kept in places else inputs[0].new_empty(shape, dtype=dtype)
            for kept, shape, dtype in self._own
        }
        return {**held, **self._landed.tensors(region, inputs[0]), **{kept: inputs[at] for kept, at in self._given}}

    def layouts(self) -> tuple[list[Layout], list[Layout]]:
        """What the launches of a call write, of a stamped Plan, and what is said of copies of what landed: each is one
        task.
        """
        found = zip(launches(self._plan), self._turns, strict=True) if self._starts else ()
        launched = [
            of_launch(
                self._communicator, plan_of(self._plan, one.moves), self._starts[made_of(one)][turn], task_of(one)
            )
            for one, turn in found
        ]
        return launched, [alone(Stamped(f"{kept.name} [copy out]", False)) for kept in self._taken]

    def region(self) -> AbstractContextManager[Region | None]:
        """Where what lands is in this call, if one can be made; None where nothing does."""
        self._communicator.ready()
        if not self._landed.nbytes:
            return nullcontext()
        return self._communicator.region(self._name, self._landed.nbytes, self._seconds)

    def _run(
        self,
        streams: Streams,
        functions: Mapping[str | None, Function],
        held: Mapping[Kept, torch.Tensor],
        landing: Sequence[int],
        results: Mapping[Kept, torch.Tensor],
    ) -> BaseException | None:
        """What a function raised, if one did."""
        placed = frozenset(name for name, function in functions.items() if name in self._writing and has_out(function))
        failure: BaseException | None = None
        begun: list[Callable[[], None]] = []  # launches, by their numbers: what starts the rest of each
        over = 0
        try:
            for (number, phase), before in self._order:
                over = self._end(streams, begun, over, before)
                if not isinstance(phase, Return):
                    self._wait(streams, phase)
                match phase:
                    case Launch():
                        begun.append(self._launch(streams, number, phase, held, landing))
                    case Visit() | Task():
                        if failure is None:
                            out = phase.name in placed and bool(phase.writes)
                            failure = self._visit(number, phase, functions, held, out=out)
                    case Return():
                        self._take(streams, held, results)
                    case _:
                        assert_never(phase)
                if isinstance(phase, Visit | Task) and (False, number) in self._awaited:
                    streams.mark((False, number), beside=False)
        finally:
            self._end(streams, begun, over, len(begun))
            streams.join()
        return failure

    def _results(
        self, held: Mapping[Kept, torch.Tensor], places: Mapping[Kept, torch.Tensor], last: int | None
    ) -> dict[Kept, torch.Tensor]:
        """Where what is returned is: what lands is of this call alone, the next one has it where this one had."""
        found: dict[Kept, torch.Tensor] = {}
        for kept in self._returned if last is None else self._returned[len(self._returned) - last :]:
            place = places.get(kept)
            found[kept] = (
                held[kept] if kept not in self._landed else torch.empty_like(held[kept]) if place is None else place
            )
        return found

    def _take(self, streams: Streams, held: Mapping[Kept, torch.Tensor], results: Mapping[Kept, torch.Tensor]) -> None:
        """Copies what landed when all visits are over, as it comes: SMs do that, and computations need them."""
        for kept in self._taken:
            if kept in results:
                behind = (True, self._brings[kept]) if kept in self._brings else None
                streams.bring(results[kept], held[kept], behind)

    def _end(self, streams: Streams, begun: Sequence[Callable[[], None]], over: int, before: int) -> int:
        """Ends launches until so many have; they are that many then."""
        for number in range(over, before):
            begun[number]()
            if (True, number) in self._awaited:
                streams.mark((True, number), beside=True)
        return before

    def _wait(self, streams: Streams, phase: Between) -> None:
        """A launch for what it needs to open."""
        is_launch = isinstance(phase, Launch)
        after = phase.opens if isinstance(phase, Launch) else phase.after
        if after:
            streams.wait((not is_launch, after - 1), beside=is_launch)

    def _launch(
        self, streams: Streams, number: int, phase: Launch, held: Mapping[Kept, torch.Tensor], landing: Sequence[int]
    ) -> Callable[[], None]:
        """What starts the rest of it."""
        if not self._launched:
            return nothing
        first = (landing or (0,) * phase.moves.num_ranks) if phase.moves.lands else ()
        changing = [*first, *(held[kept].data_ptr() for kept in self._operands[number])]
        if phase.opens == phase.after:
            return streams.start(self._launched[number], changing)
        made = False, phase.after - 1
        return streams.start(self._launched[number], changing, Meanwhile(lambda: streams.wait(made, beside=True)))

    def _visit(
        self,
        number: int,
        phase: Visit | Task,
        functions: Mapping[str | None, Function],
        held: Mapping[Kept, torch.Tensor],
        *,
        out: bool,
    ) -> BaseException | None:
        """What the function raised. Where nothing that travels on depends on it, the others' call goes on all the same;
        otherwise they would compute on what was never written, so the group is broken until all reset it.
        """
        try:
            reads = (held[kept] for kept in (phase.operands if isinstance(phase, Task) else phase.reads))
            if out:
                places = tuple(held[kept] for kept in phase.writes)
                made = functions[phase.name](number, *reads, out=places[0] if len(places) == 1 else places)
            else:
                made = functions[phase.name](number, *reads)
            if phase.writes and not (out and made is None):
                self._write(phase, made, held)
        except BaseException as error:
            if not self._writing:
                return error
            error.add_note(f"the other ranks wait for what visit {number} of `{self._name}` was to write")
            raise
        return None

    def _write(self, phase: Visit | Task, made: Any, held: Mapping[Kept, torch.Tensor]) -> None:
        """What the function made, to where the buffer is; nothing to do where it worked in place."""
        found = made if isinstance(made, tuple | list) else (made,)
        words = f"`{phase.name}` of `{self._name}`"
        if len(found) != len(phase.writes):
            raise TensorError(f"{words} writes {len(phase.writes)} buffers, and returned {len(found)} tensors")
        places = [held[kept] for kept in phase.writes]
        written = {place.untyped_storage().data_ptr() for place in places}
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        for kept, place, tensor in zip(phase.writes, places, found, strict=True):
            if not isinstance(tensor, torch.Tensor):
                raise TensorError(f"{words} returned {type(tensor).__name__} for `{kept.name}`, not a tensor")
            if (tensor.shape, tensor.dtype, tensor.device) != (place.shape, place.dtype, place.device):
                raise TensorError(
                    f"{words} returned {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device} for `{kept.name}`, "
                    f"which is {tuple(place.shape)} of {place.dtype} on {place.device}"
                )
            storage = tensor.untyped_storage().data_ptr()
            if storage in written and tensor.data_ptr() == place.data_ptr() and tensor.is_contiguous():
                continue
            moved.append((place, tensor.clone() if storage in written else tensor))
        for place, tensor in moved:
            place.copy_(tensor)


def _kept(phase: object) -> tuple[Kept, ...]:
    match phase:
        case Launch() | Visit() | Task():
            return (*phase.reads, *phase.writes)
        case Return():
            return phase.reads
        case _:
            return ()


def _awaited(plan: Plan) -> list[tuple[bool, int]]:
    """Whether it is a launch, and its number: of all that the other stream waits for."""
    found = [*launches(plan), *visited(plan)]
    waits = [(not isinstance(phase, Launch), phase.after) for phase in found]
    waits += [(False, phase.opens) for phase in found if isinstance(phase, Launch)]
    return [(of_launch, after - 1) for of_launch, after in waits if after]
