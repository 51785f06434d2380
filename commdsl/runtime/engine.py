"""Turns one call of a Plan for the copy engine into copies and small kernels on CUDA streams, without a busy SM.

Assumes that a peer's heap is a pointer here, and the caller's lock around `launch`. Does not decide what follows what
(`phases` does). A capture takes all of it in: nothing that changes from replay to replay is known to the host, as the
kernels count the rounds and every call starts with the same cells.

Copies to each peer have a stream of their own, which forks from the caller's and joins it again, by events: one engine
serves one stream at a time. What stays on the rank goes on the caller's stream. Of a call that only begins, the first
copies go on a stream that such calls of a group share: those of the next one follow without a gap. A copy within a
GPU's own memory is the driver's to make, by an engine or by a kernel of its own.

The driver's calls for one call are listed once: what follows on the same tensors and streams is those, one by one.

After a time-out nothing more is signalled, but copies that were started are made all the same, into cells that a peer
may not have read: of calls that were not over on all ranks then, no result holds.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from commdsl.program.arguments import arguments
from commdsl.program.plan import Plan
from commdsl.runtime.driver import DEVICE_TO_DEVICE, Asked, Driver, of_cupy, play
from commdsl.runtime.kernel import Prepared
from commdsl.runtime.phases import TOLD, Copy, Flags, Wave, phases
from commdsl.runtime.workspace import ALONE, Meanwhile

MAX_KEPT = 1 << 14
"""Calls of the driver that are kept, half a kilobyte each: training has the same addresses in every step."""


@dataclass(frozen=True, slots=True)
class _Side:
    """Copies on a stream beside the caller's, and the event behind them."""

    stream: int
    event: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class _Fork:
    """A wave: copies beside the caller's stream, and those on it."""

    sides: tuple[_Side, ...]
    here: tuple[Copy, ...]


_Script: TypeAlias = tuple[Flags | _Fork, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    """The driver's calls up to the first copies, those for them, and the rest; `kept` are the arguments that they point
    at.
    """

    opening: tuple[Asked, ...]
    begin: tuple[Asked, ...]
    rest: tuple[Asked, ...]
    kept: tuple[object, ...]

    @property
    def length(self) -> int:
        return len(self.opening) + len(self.begin) + len(self.rest)

    def end(self) -> None:
        play(self.rest)


class EngineKernel:
    """Calls of one Plan on one GPU, one after another."""

    def __init__(self, path: Path, entry: str, plan: Plan, rank: int, device: int, copies: int) -> None:
        """`copies`: the stream of the copies of calls that begin before others end."""
        import cupy  # where there is a GPU

        moves = self._moves = plan.moves
        self._rank = rank
        self._driver = of_cupy()
        self._heaps, self._tensors = struct.Struct(f"<{moves.num_ranks}Q"), struct.Struct(f"<{len(moves.tensors)}Q")
        self._heaps_at, self._tensors_at = (arguments(plan).offset(name) for name in ("heap", "tensors"))
        self._landing_at = arguments(plan).offset("landing") if moves.lands else 0
        self._lands = [space for space, tensor in enumerate(moves.tensors) if tensor.lands]
        self._scripts: dict[tuple[int, tuple[int, ...]], _Script] = {}
        self._calls: dict[tuple[object, ...], _Call] = {}
        self._kept = 0  # of the driver's calls, in all of those
        with cupy.cuda.Device(device):
            self._module = cupy.RawModule(path=str(path))
            self._function = int(self._module.get_function(f"{entry}_flags").kernel.ptr)
            # Of this workspace alone: on a shared stream the calls of one op would wait for those of another.
            peers = [peer for peer in range(moves.num_ranks) if peer != rank]
            self._streams = {peer: cupy.cuda.Stream(non_blocking=True) for peer in peers}
            self._events = {peer: cupy.cuda.Event(disable_timing=True) for peer in peers}
            self._forked = cupy.cuda.Event(disable_timing=True)
            self._ahead, self._copied = copies, cupy.cuda.Event(disable_timing=True)

    def launch(self, prepared: Prepared, stream: int) -> None:
        call = self._call(prepared, (stream, stream), ALONE)
        play(chain(call.opening, call.begin, call.rest))

    def begin(self, prepared: Prepared, stream: int, meanwhile: Meanwhile = ALONE) -> Callable[[], None]:
        """Starts a call as far as its first copies, and returns what starts the rest on the same stream."""
        return _begun(self._call(prepared, (stream, self._ahead), meanwhile), meanwhile)

    def _call(self, prepared: Prepared, streams: tuple[int, int], meanwhile: Meanwhile) -> _Call:
        """`streams`: of the call, and of its first copies."""
        stream, copies = streams
        key = prepared, prepared.arguments.raw, stream, copies, meanwhile.told, meanwhile.opened
        call = self._calls.get(key)
        if call is None:
            call = self._listed(self._driver, prepared, streams, meanwhile)
            self._kept += call.length
            while self._calls and self._kept > MAX_KEPT:  # the oldest goes
                self._kept -= self._calls.pop(next(iter(self._calls))).length
            self._calls[key] = call
        return call

    def ask(self, driver: Driver, prepared: Prepared, stream: int, meanwhile: Meanwhile) -> Callable[[], None]:
        """As `begin`, with another driver's calls, which are not kept. What they point at is there as long as what this
        returns.
        """
        return _begun(self._listed(driver, prepared, (stream, self._ahead), meanwhile), meanwhile)

    def _listed(self, driver: Driver, prepared: Prepared, streams: tuple[int, int], meanwhile: Meanwhile) -> _Call:
        """`streams`: that of the call, and that of its first copies."""
        stream = streams[0]
        kept = ctypes.create_string_buffer(prepared.arguments.raw, len(prepared.arguments))
        tensors = self._tensors.unpack_from(kept, self._tensors_at)
        bases = (*self._heaps.unpack_from(kept, self._heaps_at), *tensors, *self._landing(kept, tensors))
        script = self._script(prepared, tensors)
        first = next((at for at, step in enumerate(script) if isinstance(step, _Fork)), len(script))
        rest, turns = list[Asked](), list[object]()

        def flags(step: Flags, word: int) -> Asked:
            turn = _turn(step, word)
            pointers = (ctypes.c_void_p * 2)(ctypes.addressof(kept), ctypes.addressof(turn))
            turns.append((turn, pointers))
            where = self._function, 1, 1, 1, prepared.threads, 1, 1, 0, stream, ctypes.addressof(pointers), 0
            return driver.launch, *where

        if meanwhile.opened:
            script = script[:first] + _without_copies(script[first:])
        opening = [
            flags(step, word)
            for step, word in _telling(script[:first], meanwhile.opened)
            if not isinstance(step, _Fork)
        ]
        forks = [step for step in script[first : first + 1] if isinstance(step, _Fork)]
        begin = [asked for fork in forks for asked in self._fork(driver, fork, bases, streams)]
        rest += (asked for fork in forks for asked in self._join(driver, fork, streams))
        for step, word in _telling(script[first + len(forks) :], meanwhile.told):
            if isinstance(step, _Fork):
                rest += self._fork(driver, step, bases, (stream, stream))
                rest += self._join(driver, step, (stream, stream))
            else:
                rest.append(flags(step, word))
        return _Call(tuple(opening), tuple(begin), tuple(rest), (kept, *turns))

    def _landing(self, packed: ctypes.Array[ctypes.c_char], tensors: Sequence[int]) -> Iterator[int]:
        """By tensor that lands, by rank, where it is: as far behind where all of that rank begin as on this one."""
        if self._lands:
            begin = self._heaps.unpack_from(packed, self._landing_at)
            yield from (tensors[space] - begin[self._rank] + there for space in self._lands for there in begin)

    def _fork(self, driver: Driver, fork: _Fork, bases: Sequence[int], streams: tuple[int, int]) -> Iterator[Asked]:
        """What has no side goes on the second stream."""
        (stream, copies), record, wait = streams, driver.record, driver.wait
        if fork.sides or copies != stream:
            yield record, self._forked.ptr, stream
        for side in fork.sides:
            yield wait, side.stream, self._forked.ptr, 0
            yield from _start(driver, side.copies, bases, side.stream)
            yield record, side.event, side.stream
        if copies != stream:
            yield wait, copies, self._forked.ptr, 0
        yield from _start(driver, fork.here, bases, copies)
        if copies != stream:
            yield record, self._copied.ptr, copies

    def _join(self, driver: Driver, fork: _Fork, streams: tuple[int, int]) -> Iterator[Asked]:
        """The stream goes on behind all copies of a wave."""
        stream, copies = streams
        events = [side.event for side in fork.sides] + ([self._copied.ptr] if copies != stream else [])
        yield from ((driver.wait, stream, event, 0) for event in events)

    def _script(self, prepared: Prepared, tensors: Sequence[int]) -> _Script:
        """What a call on these tensors starts: it depends on the size, and on which of them are the same memory."""
        same = tuple(tensors.index(address) for address in tensors)
        assert prepared.launch is not None
        key = (prepared.launch.block_bytes, same)
        found = self._scripts.get(key)
        if found is None:
            steps = phases(self._moves, self._rank, prepared.launch, same)
            found = tuple(step if isinstance(step, Flags) else self._fork_of(step) for step in steps)
            self._scripts[key] = found
        return found

    def _fork_of(self, wave: Wave) -> _Fork:
        """The caller's stream gets what stays on the rank; where nothing does, what goes to the first peer."""
        peers = list(dict.fromkeys(copy.peer for copy in wave))
        main = self._rank if self._rank in peers else peers[0]
        of = {peer: tuple(copy for copy in wave if copy.peer == peer) for peer in peers}
        sides = [(self._streams[peer].ptr, self._events[peer].ptr, of[peer]) for peer in peers if peer != main]
        return _Fork(tuple(_Side(*side) for side in sides), of[main])


def _start(driver: Driver, copies: Sequence[Copy], bases: Sequence[int], stream: int) -> Iterator[Asked]:
    for copy in copies:
        (to, at), (base, offset) = copy.dest, copy.source
        dest, source = bases[to] + at, bases[base] + offset
        yield driver.copy, dest, source, copy.num_bytes, DEVICE_TO_DEVICE, stream


def _begun(call: _Call, meanwhile: Meanwhile) -> Callable[[], None]:
    """Starts it as far as its first copies; what starts the rest."""
    play(call.opening)
    if not meanwhile.opened:
        meanwhile.between()
        play(call.begin)
        return call.end

    def end() -> None:
        meanwhile.between()
        call.end()

    return end


def _without_copies(steps: _Script) -> _Script:
    """What is left of a call when others have made them: peers are told once of all."""
    flags = tuple(step for step in steps if isinstance(step, Flags))
    assert steps[len(steps) - len(flags) :] == flags, "peers would be told of some copies before the others"
    return flags


def _telling(steps: _Script, word: int) -> Iterator[tuple[Flags | _Fork, int]]:
    """The last steps of a call, the last of which tells a word, if there is one to tell."""
    if word and not (steps and isinstance(steps[-1], Flags)):
        steps = (*steps, Flags((0, 0), (0, 0), 0))
    yield from ((step, word if at == len(steps) - 1 else 0) for at, step in enumerate(steps))


def _turn(flags: Flags, word: int) -> ctypes.Array[ctypes.c_char]:
    """The second argument of the kernel."""
    packed = flags.pack()
    data = ctypes.create_string_buffer(packed, len(packed))
    struct.pack_into("<Q", data, TOLD, word)
    return data
