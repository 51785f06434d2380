"""Turns a rank's end of a group into one that has joined it: which processes the ranks are, where they are, whether
they compare calls, and, before anything is set up, whether all are about to set up the same.

Assumes every rank of a group makes the same calls in the same order. Does not make memory or kernels.
"""

from __future__ import annotations

import socket
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from commdsl.machine.config import DEFAULT_TIMEOUT, Config
from commdsl.program.memory import Transport
from commdsl.runtime.bootstrap import POLL_SECONDS, Bootstrap, SharedBootstrap, StoreError, World, life, unanswered
from commdsl.runtime.breaking import Breaking, in_our_words, settle
from commdsl.runtime.compared import Compared, user_line
from commdsl.runtime.desk import Notice
from commdsl.runtime.errors import AgreementError, GroupError
from commdsl.runtime.failures import apart
from commdsl.runtime.said import WAITS, Words
from commdsl.runtime.setups import Raised, Setup, disagreement, unpacked
from commdsl.runtime.watch import own_process, watcher

TEXT_SECONDS = 0.25
"""So long ranks that do not agree wait for each other's texts."""


class Joining(Breaking):
    """One rank's end of a group, as far as it does not depend on memory and kernels."""

    def __init__(
        self, name: str, bootstrap: Bootstrap, config: Config, notice: Notice, kind: str, world: World
    ) -> None:
        """`kind`: cpu or cuda; the ends of a group for different kinds do not hear each other."""
        try:
            present = life(bootstrap, kind)
        except StoreError as error:
            raise unanswered(bootstrap.rank, error, f"set up group `{name}`") from error
        super().__init__(name, present, world.reports(present), config.timeout or DEFAULT_TIMEOUT, notice)
        self.kind = kind
        self.config = config
        self.world = world
        self.nodes = world.nodes(config)
        self.transport = self._transport()
        self.processes: tuple[str, ...] = ()  # by rank, as the watcher knows them
        self._compared: Compared | None = None  # from `members` on

    @property
    def compares(self) -> bool:
        """True if ranks compare each call before they make it: COMMDSL_DEBUG is set on at least one of them."""
        return self._compared is not None

    def compare(self, call: str, line: str = "") -> None:
        """Collective where ranks compare: AgreementError unless all are about to make this call. `line`: the user's."""
        if self._compared is None:
            return
        self.refuse_if_broken()
        try:
            self._compared.compare(call, line or user_line())
        except AgreementError:
            raise  # on every rank, and before anything was sent
        except BaseException as error:
            self.fail(error, Words(call))
            raise

    def _comparing(self) -> Compared:
        def drop(key: str) -> None:
            self.bootstrap.drop(f"{self.generation}/{key}/{self.rank}")

        return Compared(self.name, self.rank, self.exchange, drop)

    def open(self) -> None:
        """Collective: sets up this end. Where that fails the group is broken, and this end is good for nothing but its
        reset.
        """
        what = f"set up group `{self.name}`"
        try:
            self._watch(self._announced())
            self._enter()
        except BaseException as error:
            failure = in_our_words(error, what, self.rank)
            self.fail(failure, Words(what, verb=WAITS))
            if failure is error:
                raise
            raise failure from error
        self.is_open = True

    @abstractmethod
    def _enter(self) -> None:
        """Collective: as `open`, from `members` to `open_desk`."""

    def _announced(self) -> tuple[str, ...]:
        """Return the process of each rank, empty for one that has not announced itself."""
        return tuple(self.world.process(rank) for rank in self.world.ranks)

    def _watch(self, processes: tuple[str, ...]) -> None:
        """Have the ends of these processes, by rank, and what their ranks report heard of."""
        if self.size > 1 and processes != self.processes:
            self.processes = processes
            watcher().add(self)

    @property
    def everyone(self) -> SharedBootstrap:
        """The store in which all processes report."""
        return self.world.bootstrap

    def look(self, absent: Sequence[int], elsewhere: set[int]) -> None:
        super().look(absent, elsewhere)
        if not self.is_open and "" in self.processes:  # one that came meanwhile may end, too
            self._watch(self._announced())

    def members(self, key: str, *facts: str) -> list[list[str]]:
        """What every rank says of itself, its host first. Collective: refuses ranks that do not agree on who is near
        and who is far. Where no setting says it, hosts are nodes.
        """
        debug = str(int(self.config.debug))
        mine = [f"{self.transport.value} {self.nodes}", own_process(), debug, socket.gethostname(), *facts]
        told = self.exchange(key, "\n".join(mine).encode(), f"set up group `{self.name}`")
        everyone = [value.decode().split("\n") for value in told]
        for rank, (nodes, *_) in enumerate(everyone):
            if nodes != mine[0]:
                raise GroupError(
                    f"ranks {rank} and {self.rank} of group `{self.name}` reach each other by `{nodes}` and "
                    f"`{mine[0]}`: COMMDSL_TRANSPORT and COMMDSL_NODES are the same on all ranks"
                )
        self._watch(tuple(process for _, process, *_ in everyone))
        if any(debugs == "1" for _, _, debugs, *_ in everyone):
            self._compared = self._comparing()
        if not self.config.nodes and self.transport is Transport.PEER:
            hosts = [host for _, _, _, host, *_ in everyone]
            self.nodes = tuple(map(hosts.index, hosts))
            self.transport = self._transport()
        return [theirs for _, _, _, *theirs in everyone]

    def _transport(self) -> Transport:
        far = self.config.transport == "nvshmem" or len(set(self.nodes)) > 1
        return Transport.NVSHMEM if far else Transport.PEER

    def agree(self, mine: Setup, seconds: float | None) -> str:
        """Collective: the next step of the group, by its number. AgreementError, on all ranks alike, unless all are
        about to set up the same: on each as soon as it hears of one that differs. `seconds` as for `workspace`.
        """
        with self.hearing:
            number, self.steps = self.steps, self.steps + 1
            mine = replace(mine, calls=self.calls())
        where = f"step/{number}"
        text = f"{self.generation}/{where}/text"

        def judge(rank: int, value: bytes) -> None:
            theirs = unpacked(value)
            if isinstance(theirs, Raised):
                raise apart(self.name, rank, theirs, self.rank, self.doing())
            if theirs == mine:
                return
            self.reports.put(f"{text}/{self.rank}", mine.pack_source())
            error = disagreement(self.name, self.rank, mine, rank, theirs, self._answer(f"{text}/{rank}", rank))
            raise settle(error, self.name)

        self.is_stepping = True
        try:
            self.exchange(where, mine.pack(), f"set up {mine.what}", seconds, judge)
        finally:
            self.is_stepping = False
        return where

    def _answer(self, key: str, rank: int) -> bytes:
        """Wait shortly for the value of another rank under a key; return empty bytes if none comes."""
        deadline = time.monotonic() + TEXT_SECONDS
        while (found := self.reports.get(key)) is None and time.monotonic() < deadline and rank not in self.gone:
            time.sleep(POLL_SECONDS)
        return found or b""
