"""Turns a Bootstrap into this rank's end of a group: what it has in symmetric memory, what broke it, how it recovers.

Assumes every rank of a group makes the same calls in the same order. Does not check tensors (`op` does), nor say where
memory and kernels come from (`host` and `device` do).
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar

from commdsl.build.emit import Emitted
from commdsl.machine.config import Config
from commdsl.program.desk import desk_bytes, differing
from commdsl.program.moves import Moves
from commdsl.program.plan import Plan
from commdsl.program.sizes import Blocks, Launch
from commdsl.runtime.bootstrap import Bootstrap, Exchange, World, exchange
from commdsl.runtime.breaking import in_our_words, is_settled
from commdsl.runtime.desk import Desk, Notice
from commdsl.runtime.error_page import ErrorPage
from commdsl.runtime.errors import AgreementError
from commdsl.runtime.failures import different_calls
from commdsl.runtime.heap import Extent, Heap
from commdsl.runtime.joining import Joining
from commdsl.runtime.kernel import Kernel, Prepared, Residence
from commdsl.runtime.landing import Region, Regions
from commdsl.runtime.lent import Lent
from commdsl.runtime.program import Program
from commdsl.runtime.said import ANSWER_SECONDS, WAITS, Words
from commdsl.runtime.setups import Setup, of_plan
from commdsl.runtime.streams import Streams
from commdsl.runtime.watch import watcher
from commdsl.runtime.workspace import Explain, Reach, Start, Workspace

Made = TypeVar("Made")

RESET_PATIENCE = 2.0
"""A reset waits this many time-outs for the others, and as long as who raises asks its peers: they may still be inside
a call that has to run out first.
"""


class Communicator(Joining, ABC):
    """What `host.py` and `device.py` have in common."""

    desk: Desk  # from `open_desk` on

    def __init__(
        self,
        name: str,
        bootstrap: Bootstrap,
        config: Config,
        errors: ErrorPage,
        notice: Notice,
        kind: str,
        world: World,
    ) -> None:
        """`kind`: cpu or cuda; the communicators of a group for different kinds do not hear each other."""
        super().__init__(name, bootstrap, config, notice, kind, world)
        self.errors = errors
        self.lock = threading.RLock()
        self.workspaces: dict[str, Workspace] = {}
        self._lent = Lent(self.finish)
        self.regions = Regions()
        self.is_closed = False  # whoever kept something of it has to ask for it anew
        self.numbers = itertools.count()  # what this rank made, to tell it apart

    def workspace(
        self,
        plan: Plan,
        emitted: Emitted,
        key: str,
        *,
        room: int = 0,
        explain: Explain | None = None,
        terms: Mapping[str, object] | None = None,
        seconds: float | None = None,
    ) -> Workspace:
        """The workspace of a Plan under `key`, with `room` bytes behind what the Plan itself has; the first call for a
        key is collective. `explain` says what a report means that is no time-out; `terms`: what ranks have to agree on
        beside the Plan and its size; `seconds`: how long they may take, if not the group's time-out.

        Raises AgreementError (C964) where ranks set up something else; then nothing was set up, and the group goes on.
        """
        self.refuse_if_broken()
        if key not in self.workspaces:
            self.drain()
        with self.lock:
            found = self.workspaces.get(key)
            if found is None:
                mine = of_plan(plan, emitted, room, terms or {})
                found = self.workspaces[key] = self._rendezvous(mine, plan, room, explain, seconds)
            return found

    def ready(self) -> None:
        """Raises where no call can be made now."""
        if self.broken is not None or not self.errors.is_blank():
            self.refuse_if_broken()
            self.check()

    def prepare(
        self, program: Program, blocks: Blocks, dtype: str, op: str, seconds: float | None, about: str, row_bytes: int
    ) -> Start:
        """What starts calls of a Program on such blocks, and rows where it makes rows; a wait may take so many seconds,
        or the group's. The first is collective. `about`: what else ranks agree on, in words.
        """
        workspace = self.workspace(program.plan, program.emitted, program.emitted.identity, seconds=seconds)
        kernel = self.kernel(program, workspace, dtype, op)
        launch = self.launch(program.plan.moves, blocks, row_bytes)
        prepared = workspace.prepare(program.emitted, launch, dtype, op, seconds, about)
        return self.starter(workspace, kernel, prepared)

    def _rendezvous(
        self, mine: Setup, plan: Plan, room: int, explain: Explain | None, seconds: float | None
    ) -> Workspace:
        def make(heap: Heap, number: str) -> Workspace:
            return Workspace(plan, number, self._reach(), self.desk, heap, self.errors.take(), self.timeout, explain)

        return self._set_up(plan.name, mine, self.extent(plan, room), make, seconds)

    def _reach(self) -> Reach:
        return Reach(self.rank, self.nodes, self.world.ranks)

    def _set_up(
        self, name: str, mine: Setup, extent: Extent, make: Callable[[Heap, str], Made], seconds: float | None
    ) -> Made:
        """What is made of symmetric memory and the number of the set-up, once all ranks have agreed on it."""
        self.refuse_setup(name)
        what = f"set up `{name}`"
        try:
            where = self.agree(mine, seconds)

            def meet(part: str, value: bytes = b"") -> tuple[bytes, ...]:
                return self.exchange(f"{where}/{part}", value, what, seconds)

            self._lent.sweep()
            meet("agreed")  # once more: a rank that comes late finds the others gone here, not where nothing says so
            made = make(self.make_heap(extent, meet), f"{self.generation}/{where}")
            meet("ready")
        except BaseException as error:
            if is_settled(error, self.name):  # on every rank, and before anything was made
                raise
            failure = in_our_words(error, what, self.rank)
            self.fail(failure, Words(what, verb=WAITS))
            if failure is error:
                raise
            raise failure from error
        return made

    def region(self, name: str, nbytes: int, seconds: float | None) -> Region:
        """Symmetric memory for a call of that op, which takes it, in a group that is not broken; collective where there
        is not enough. Raises as `workspace`.
        """
        with self.lock:
            found = self.regions.find(name, nbytes)
            if found is not None:
                found.is_taken = True
                return found
        self.drain()  # without the lock, which calls of other threads may need to end
        with self.lock:
            found = self.regions.find(name, nbytes)
            if found is None:
                self.refuse_setup(name)
                mine, extent = Setup(f"`{name}`", (("where it lands", f"{nbytes} bytes"),)), Extent.whole(name, nbytes)
                make = partial(Region, self._reach(), nbytes)
                found = self.regions.grow(lambda: self._set_up(name, mine, extent, make, seconds), self.finish)
            found.is_taken = True
            return found

    def check(self) -> None:
        """Raises what a kernel of this rank reported."""
        if self.errors.is_blank():
            return
        for workspace in tuple(self.workspaces.values()):
            self._raise(workspace.failure())

    def settle(self) -> None:
        """As `check`, once this rank's calls are over: raises also where a peer tells of another call than the last. A
        kernel looks at that when the next begins.
        """
        self.check()
        found = None if self.broken is not None else differing(self.read_desk(), self.rank, self.size)
        if found is not None:
            peer, mine, theirs = found
            sides = self.said.known(mine), self.said.known(theirs)
            self._raise(different_calls(self.rank, peer, self.rank, sides, self.said))

    def _raise(self, failure: BaseException | None) -> None:
        """Breaks the group, where something failed. Callers keep no name for it, either."""
        if failure is not None:
            if not isinstance(failure, AgreementError):
                self._raise_heard()  # the kernel gave up because of it
            self._heard = None
            self.fail(failure)
            try:
                raise failure
            finally:
                del failure  # it is in its own traceback, and with it what the caller's frames hold: results

    def reset(self) -> None:
        """Collective: back to the state before the first call. Memory that not all ranks have is given up."""
        with self.lock:
            number = self.generation
            with self.hearing:
                self.is_deaf = True  # until it is done
                self.said.reset()
            mine = ",".join((*(workspace.number for workspace in self.workspaces.values()), *self.regions.numbers))

            def meet(step: str, value: bytes) -> tuple[bytes, ...]:
                seconds = self.timeout * (1.0 + RESET_PATIENCE) + ANSWER_SECONDS
                what = f"reset group `{self.name}`"
                return exchange(self.bootstrap, f"reset/{number}/{step}", value, seconds, what, self.absent)

            everyone = meet("enter", mine.encode())
            self.finish()
            common = set.intersection(*(set(value.decode().split(",")) for value in everyone))
            # Nobody clears a heap while a kernel of another rank may still write to it.
            meet("finished", b"")
            for key, workspace in self.workspaces.copy().items():
                if workspace.number in common:
                    workspace.reset()
                else:
                    self._let_go(key)
            self.regions.keep(common)
            self.desk.reset()
            self.forget_calls()
            if self._compared is not None:
                self._compared = self._comparing()
            with self.hearing:
                self._renew()
                self.is_deaf = False
            meet("done", b"")

    def release(self, key: str | None = None) -> None:
        """Lets go of the symmetric memory of one workspace, or of all, once this rank's kernels are over. The others do
        the same in their time: the next call is a set-up of all.
        """
        with self.lock:
            self.finish()
            for one in tuple(self.workspaces) if key is None else [key]:
                self._let_go(one)
            if key is None:
                self.regions.release(None)

    def release_region(self, name: str) -> None:
        """An op has no more calls: what they landed in goes when those of no other do. As `release` otherwise."""
        with self.lock:
            self.finish()
            self.regions.release(name)

    def _let_go(self, key: str) -> None:
        if (found := self.workspaces.pop(key, None)) is not None:
            found.close()
            self._lent.give_back(found.heap, found.pools)

    def close(self) -> None:
        """The end: lets go of all its symmetric memory. A peer that has not may still tell this rank something: that
        memory is there as long as one of them has it.
        """
        self.release()
        self._lent.close()
        self.is_closed = True
        with self.hearing:
            was_open, self.is_open = self.is_open, False
        watcher().remove(self)
        if was_open:
            self.desk.free()
        with suppress(RuntimeError):  # of a store whose server has ended
            self.bootstrap.end()

    def open_desk(self) -> None:
        """Collective, once, when this end of the group can make heaps."""
        extent, what = Extent.whole("desk", desk_bytes(self.size)), f"set up group `{self.name}`"
        heap = self.make_heap(extent, lambda part, value: self.exchange(f"desk/{part}", value, what))
        self.desk = Desk(heap, self.nodes, self.rank, self.notice, self.said)

    @abstractmethod
    def refuse_setup(self, what: str) -> None:
        """Raises where symmetric memory cannot be set up now."""

    def extent(self, plan: Plan, room: int) -> Extent:
        """What calls of a Plan touch of its symmetric memory, and of `room` bytes behind it: all, unless they say."""
        return Extent.whole(plan.name, plan.symmetric_bytes + room)

    @abstractmethod
    def make_heap(self, extent: Extent, tell: Exchange) -> Heap:
        """Symmetric memory; all ranks come here together."""

    @abstractmethod
    def load_kernel(self, emitted: Emitted, macros: tuple[str, ...], residence: Residence) -> Kernel:
        """A text, built for this rank's processor or GPU."""

    @abstractmethod
    def starter(self, workspace: Workspace, kernel: Kernel, prepared: Prepared) -> Start:
        """What starts calls of a kernel, one after another in call order."""

    @abstractmethod
    def kernel(self, program: Program, workspace: Workspace, dtype: str, op: str) -> Kernel:
        """A Program's, built for such elements: loaded once for each workspace."""

    @abstractmethod
    def launch(self, moves: Moves, blocks: Blocks, row_bytes: int) -> Launch:
        """How calls on such blocks run, of whole rows where they are of so many bytes."""

    @abstractmethod
    def streams(self) -> Streams:
        """Where the launches and visits of a call go, from now on."""

    @abstractmethod
    def read_desk(self) -> bytes:
        """A copy of this rank's desk."""

    def forget_calls(self) -> None:
        """A generation begins: no call was started in it."""

    @abstractmethod
    def finish(self) -> None:
        """Waits for this rank's kernels."""

    def drain(self) -> None:
        """Wait until calls that other threads of commdsl make for this rank are over."""
