"""Turns a Program and a communicator into the place where its calls run, one after another in call order.

Assumes every rank makes the same calls of one Program in the same order. Does not check tensors (`op` does) and does
not order CUDA streams (`stream_order` does).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from commdsl.program.plan import Plan
from commdsl.program.sizes import Arguments, Launch
from commdsl.program.timeouts import CommTimeout, timeout_of, unpack
from commdsl.runtime.error_page import ErrorWord
from commdsl.runtime.heap import Heap
from commdsl.runtime.kernel import Kernel, Prepared
from commdsl.runtime.stream_order import StreamOrder

Geometry: TypeAlias = Callable[[Plan, int], Launch]
"""How a call on blocks of so many bytes runs."""


class Tenant(Protocol):
    """Who has symmetric memory of a communicator."""

    @property
    def heap(self) -> Heap: ...

    @property
    def lock(self) -> threading.Lock:
        """Held from before a call joins the streams until it is launched."""
        ...

    @property
    def is_closed(self) -> bool: ...

    def failure(self) -> Exception | None:
        """What a kernel of this rank reported, if one did."""
        ...

    def reset(self) -> None:
        """Back to the state before the first call; no rank's kernel may be running."""
        ...

    def close(self) -> None:
        """The end of its calls; none of this rank's may be running. Does not free the heap: that takes all ranks."""
        ...


Open: TypeAlias = Callable[[Heap, ErrorWord], Tenant]
"""Makes a tenant of its memory, zeroed, and of the word in which its kernels report."""


class Start(Protocol):
    """Starts calls of one kernel, given what changes from call to call: the addresses of a Plan's tensors."""

    @property
    def tenant(self) -> Tenant: ...

    def __call__(self, changing: Sequence[int]) -> None: ...


class Workspace:
    """Symmetric memory, error word and kernels of one Program on one rank of one communicator."""

    def __init__(
        self, plan: Plan, rank: int, heap: Heap, error: ErrorWord, timeout: float, order: StreamOrder | None = None
    ) -> None:
        self.plan = plan
        self.heap = heap
        self.order = order  # None where calls end before they return
        self.kernels: dict[tuple[str, ...], Kernel] = {}
        self.lock = threading.Lock()
        self.is_closed = False  # whoever kept something of this workspace has to ask for it anew
        self._launches: dict[int, Launch] = {}
        self._rank = rank
        self._error = error
        self._timeout = timeout

    def prepare(self, block_bytes: int, average: bool, geometry: Geometry) -> Prepared:
        """Everything about calls on blocks of this size but the addresses of their tensors."""
        launch = self._launches.get(block_bytes)
        if launch is None:
            launch = self._launches[block_bytes] = geometry(self.plan, block_bytes)

        def pack(tensors: Sequence[int]) -> bytes:
            return Arguments(
                heaps=self.heap.addresses,
                tensors=tensors,
                launch=launch,
                timeout_ns=int(self._timeout * 1e9),
                error=self._error.address,
                rank=self._rank,
                average=average,
            ).pack()

        return Prepared(self.plan, launch, pack)

    def failure(self) -> CommTimeout | None:
        if not self._error.is_set:
            return None
        return timeout_of(self.plan, [unpack(self._error.data.tobytes())], self._timeout)

    def reset(self) -> None:
        self.heap.zero()
        self._error.clear()

    def close(self) -> None:
        self.is_closed = True
        self._error.give_back()
