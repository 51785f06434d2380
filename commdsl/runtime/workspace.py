"""Turns a Program and a communicator into the place where its calls run, one after another in call order.

Assumes every rank makes the same calls of one Program in the same order. Does not check tensors (`op` does) and does
not order CUDA streams (`stream_order` does).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from commdsl.build.emit import Emitted
from commdsl.program.arguments import heaps
from commdsl.program.moves import Moves
from commdsl.program.plan import Plan
from commdsl.program.sizes import Launch
from commdsl.program.timeouts import ErrorRecord, unpack
from commdsl.runtime.desk import Desk
from commdsl.runtime.error_page import ErrorWord
from commdsl.runtime.failures import failure_of
from commdsl.runtime.heap import Heap
from commdsl.runtime.kernel import Kernel, Prepared
from commdsl.runtime.pool import Pool
from commdsl.runtime.said import Said

Explain: TypeAlias = Callable[[ErrorRecord], Exception]
"""What a report of a kernel means that is no time-out."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Who a rank is, and how it reaches the others of its group."""

    rank: int
    nodes: Sequence[int]  # by rank the node it is on
    pe: Sequence[int]  # by rank its number in NVSHMEM


def nothing() -> None:
    """What a call has not to do."""


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """What a launch has to do with what goes on beside it. `between` has its stream wait for what its copies read, as
    soon as peers are told what they may write. Where the copy engine moves, words on the GPU, 0 for none: `told` is
    raised when the call is over, `opened` when peers are ready; what is waited for then puts all there is to where it
    belongs, and nothing is copied.
    """

    between: Callable[[], None] = nothing
    told: int = 0
    opened: int = 0

    @property
    def has_words(self) -> bool:
        return bool(self.told or self.opened)


ALONE = Meanwhile()


class Start(Protocol):
    """Starts calls of one kernel, given what changes from call to call: the addresses of a Plan's tensors; of a stamped
    Plan before them that of its time stamps.
    """

    @property
    def workspace(self) -> Workspace: ...

    @property
    def launch(self) -> Launch:
        """How each of them runs."""
        ...

    def __call__(self, changing: Sequence[int]) -> None: ...

    def begin(self, changing: Sequence[int], meanwhile: Meanwhile = ALONE) -> Callable[[], None]:
        """Starts a call as far as its first copies, and returns what starts the rest: on the same stream what calls of
        other workspaces have may come between.
        """
        ...


class Workspace:
    """Symmetric memory, error word and kernels of one Plan on one rank of one communicator.

    `lock` is held from before a call joins the streams until it is launched. `explain` is known weakly: who explains
    owns what has this workspace.
    """

    def __init__(
        self,
        plan: Plan,
        number: str,
        reach: Reach,
        desk: Desk,
        heap: Heap,
        error: ErrorWord,
        timeout: float,
        explain: Explain | None,
    ) -> None:
        self.plan = plan
        self.number = number  # of the set-up in which all ranks made it
        self.heap = heap
        self.pools: list[Pool] = []  # of results in the heap
        self.kernels: dict[tuple[str, ...], Kernel] = {}
        self.lock = threading.Lock()
        self.is_closed = False  # whoever kept something of this workspace has to ask for it anew
        self._reach = reach
        self._desk = desk
        self._error = error
        self._timeout = timeout
        self._explain = None if explain is None else weakref.WeakMethod(explain)

    @property
    def said(self) -> Said:
        return self._desk.said

    @property
    def every_call(self) -> dict[str, int | Sequence[int]]:
        """The arguments that no call changes."""
        return {
            "heap": heaps(self.heap.addresses, self._reach.nodes, self._reach.rank),
            "pe": self._reach.pe,
            "timeout_ns": int(self._timeout * 1e9),
            "error": self._error.address,
            "rank": self._reach.rank,
            **self._desk.arguments,
        }

    def prepare(
        self,
        emitted: Emitted,
        launch: Launch,
        dtype: str,
        op: str,
        seconds: float | None = None,
        about: str = "",
    ) -> Prepared:
        """Everything about calls on blocks of this size but the addresses of their tensors. `seconds`: how
        long a wait may take, if not as long as the group's. `about`: words that join those of the call.
        """
        size = _size(self.plan.moves, launch)
        words = f"`{self.plan.name}` on {size} of {dtype}" + (f", {op}" if self.plan.moves.asks else "")
        digest = self._desk.said.digest(words + listed(about), emitted.identity, self.plan.span.source.name)
        values = {**self.every_call, "tensors": (), "landing": (), "stamps": 0, "digest": digest}
        values |= launch.arguments_of(self.plan.moves, self._reach.rank)
        values |= timeout_argument(seconds)
        first = "stamps" if self.plan.stamped else "landing" if self.plan.moves.lands else "tensors"
        changing = (first, "tensors")
        prepared = Prepared(self.plan, values, changing, launch)
        prepared.words = self._desk.said.known(digest) or prepared.words
        return prepared

    def failure(self) -> BaseException | None:
        """What a kernel of this rank reported, if one did."""
        if not self._error.is_set:
            return None
        record = unpack(self._error.data.tobytes())
        if record is None:
            return None
        explain = None if self._explain is None else self._explain()
        return failure_of(self.plan, record, record.timeout_ns / 1e9, explain, self._desk.said)

    def reset(self) -> None:
        """Back to the state before the first call; no rank's kernel may be running."""
        self.heap.zero()
        self._error.clear()

    def close(self) -> None:
        """The end of its calls; none of this rank's may be running. Does not free the heap: that takes all ranks."""
        self.is_closed = True
        self._error.give_back()


def _size(moves: Moves, launch: Launch) -> str:
    """What a call is on, in words that are the same on all ranks: of lengths those that all know."""
    if moves.lengths is not None:
        every = len(moves.lengths.axes) == 1
        return f"blocks of {', '.join(map(str, launch.lengths))} bytes" if every else "blocks of any length"
    blocks = max((tensor.blocks for tensor in moves.tensors), default=1)
    size = f"{launch.block_bytes} bytes" if blocks == 1 else f"{blocks} blocks of {launch.block_bytes} bytes"
    return size + (f", in rows of {launch.row_bytes}" if launch.row_bytes else "")


def listed(about: str) -> str:
    """Words that join those of a call."""
    return about and f", {about}"


def timeout_argument(seconds: float | None) -> dict[str, int]:
    """What takes the place of the group's time-out among the arguments, if there is one."""
    return {} if seconds is None else {"timeout_ns": int(seconds * 1e9)}
