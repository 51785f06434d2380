"""Turns a process group into the two communicators of Hamilton Attention: to the next rank, and from all to all.

Assumes that every rank makes the same calls in the same order, with tensors of the same shapes. What is sent travels
beside what the caller computes, until `wait`. Does not serve the attention loop, whose schedules move pieces to where a
kernel reads them: these are for loops of one's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from commdsl.runtime import given, groups, menu
from commdsl.runtime.collectives import all_to_all
from commdsl.runtime.errors import OpError, TensorError
from commdsl.runtime.load import load
from commdsl.runtime.op import Op
from commdsl.runtime.reporting import reported


class Place:
    """`rank` and `world_size`: of this process in a group. `name`: the group's."""

    def __init__(self, process_group: Any) -> None:
        self.name = self.group_name = groups.name_of(process_group)
        self.world_size = menu.size(process_group)
        self.rank = groups.own_rank(self.name)


class Beside:
    """Calls on a stream of their own. On the processor a call is over when it returns."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __call__(self, used: Sequence[torch.Tensor], call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What the call returns, which begins where the current stream is now; `used`: what is read or written there,
        or returned.
        """
        device = used[0].device
        if device.type != "cuda":
            return call()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        side, current = self._streams[device], torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            found = call()
        for tensor in used:
            tensor.record_stream(side)
        found.record_stream(current)
        return found

    def wait(self) -> None:
        """What the current streams do from here on comes after all calls."""
        for device, side in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(side)


class Comm(Place):
    """What travels beside the caller's calls, until `wait`."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self._beside = Beside()

    def wait(self) -> None:
        """What was received may be used from here on; no host waits for a GPU."""
        self._beside.wait()


class RingComm(Comm):
    """Sends to the next rank of a group and receives from the one before, `rank + 1` and `rank - 1` modulo its size.

    `process_group`: a process group, a name, a mesh of one dimension, or None for the default group. A transfer begins
    with its `send_recv`; `commit` is for callers of ring-flash-attention's class, and may be left out.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self._begun = 0
        self._is_committed = False

    @reported("self")
    def send_recv(self, to_send: torch.Tensor, recv_tensor: torch.Tensor | None = None) -> torch.Tensor:
        """Begins to send a contiguous tensor; returns `recv_tensor`, or a new one, which after `wait` has what the rank
        before sent: of the same shape and dtype. Raises TensorError.
        """
        _check(to_send, recv_tensor)
        self._begun += 1
        if recv_tensor is None:
            return self._beside((to_send,), lambda: self._shifted(to_send))
        return self._beside((to_send, recv_tensor), lambda: recv_tensor.copy_(self._shifted(to_send)))

    @reported("self")
    def send_recv_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_buffer: torch.Tensor | None = None,
        v_buffer: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`send_recv` of keys and of values, and `commit`."""
        _check(k, k_buffer)
        _check(v, v_buffer)  # before this rank sends anything
        received = self.send_recv(k, k_buffer), self.send_recv(v, v_buffer)
        self._is_committed = True
        return received

    def commit(self) -> None:
        """Ends a batch of transfers, which have begun. Raises OpError (C950) where none has since the last `wait`, or
        the batch was committed already, as by `send_recv_kv`.
        """
        if self._is_committed or not self._begun:
            what = "was called twice" if self._is_committed else "has nothing to send"
            raise OpError(f"`commit` {what}: a batch is `send_recv` calls, one `commit`, one `wait`")
        self._is_committed = True

    def wait(self) -> None:
        """Wait for the posted transfers as `Comm.wait` does; the next batch may begin."""
        super().wait()
        self._begun, self._is_committed = 0, False

    def _shifted(self, x: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return x.clone()
        found = _shift(self.world_size)(x, group=self.name)
        assert isinstance(found, torch.Tensor)
        return found


class A2AComm(Comm):
    """Sends a tensor to every rank of a group and receives one from each. `process_group` as of `RingComm`."""

    @reported("self")
    def all_to_all(self, send_tensors: Sequence[torch.Tensor], recv_tensors: Sequence[torch.Tensor]) -> None:
        """Begins to send `send_tensors[p]` to rank p; after `wait`, `recv_tensors[p]` has what rank p sent here.

        A tensor for each rank, contiguous, of one dtype, of any shape, also empty. As in torch.distributed what a rank
        sends is as large as what is received of it. Blocks travel as large as the largest tensor of a rank, which is
        the same for all: ranks where it differs are told so (C964). Raises TensorError.
        """
        for name, one in (("send_tensors", send_tensors), ("recv_tensors", recv_tensors)):
            if not isinstance(one, list | tuple):
                raise TensorError(f"`{name}` is a list of a tensor for each rank, not {given.shown(one)}")
        tensors = (*send_tensors, *recv_tensors)
        for tensor in tensors:
            given.tensor("all_to_all", tensor)
        if len(send_tensors) != self.world_size or len(recv_tensors) != self.world_size:
            raise TensorError(
                f"`all_to_all` sends and receives a tensor for each of {self.world_size} ranks, not "
                f"{len(send_tensors)} and {len(recv_tensors)}"
            )
        if len({(tensor.dtype, tensor.device) for tensor in tensors}) != 1:
            raise TensorError("`all_to_all` takes tensors of one dtype, on one device")
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise TensorError("`all_to_all` takes contiguous tensors: pass x.contiguous()")
        self._beside(tensors, lambda: self._exchange(send_tensors, recv_tensors))

    def _exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> torch.Tensor:
        leaving, coming = ([tensor.numel() for tensor in tensors] for tensors in (sent, received))
        found: torch.Tensor = all_to_all(torch.cat([one.flatten() for one in sent]), coming, leaving, self.name)
        for block, tensor in zip(found.split(coming), received, strict=True):
            tensor.copy_(block.view(tensor.shape))
        return found


@cache
def _shift(ranks: int) -> Op:
    return load("permutation_shift", params={"K": 1}, ranks=ranks)


def _check(to_send: torch.Tensor, recv_tensor: torch.Tensor | None) -> None:
    given.tensor("send_recv", to_send)
    if recv_tensor is not None:
        given.tensor("send_recv", recv_tensor)
        if _kind(recv_tensor) != _kind(to_send):
            raise TensorError(f"`send_recv` receives {_words(recv_tensor)}, and sends {_words(to_send)}")


def _kind(x: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return x.shape, x.dtype, x.device


def _words(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} of {x.dtype} on {x.device}"
