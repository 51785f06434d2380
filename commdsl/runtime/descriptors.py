"""Turns a file descriptor of every rank of a group into all of them in every process, passed over unix sockets.

Assumes that the ranks are processes of one user on one machine and share a network namespace. Does not leave anything
behind: the sockets have names in no folder, and are closed on return.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import uuid
from collections.abc import Mapping

from commdsl.runtime.bootstrap import Exchange
from commdsl.runtime.errors import GroupError, RendezvousError

_RANK = struct.Struct("<I")
_FD = struct.Struct("i")
_USER = struct.Struct("iII")  # of SO_PEERCRED: process, user, group


def pass_round(descriptor: int, rank: int, exchange: Exchange, timeout: float) -> tuple[int, ...]:
    """By rank a descriptor, in this process, of what that rank gave; closing them is the caller's.

    Collective. Raises GroupError where a rank is not to be reached by a socket, and RendezvousError naming the ranks
    whose descriptor had not come after `timeout` seconds.
    """
    name = f"\0commdsl-{uuid.uuid4().hex}".encode()
    found = {rank: os.dup(descriptor)}
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(name)
            door.listen(socket.SOMAXCONN)
            names = exchange("doors", name)
            # Nobody waits for an answer here, so no order of ranks can be wrong.
            for peer, theirs in enumerate(names):
                if peer != rank:
                    _hand(descriptor, rank, peer, theirs)
            deadline = time.monotonic() + timeout
            while len(found) < len(names):
                door.settimeout(max(deadline - time.monotonic(), 0.001))
                _take(door, found)
    except TimeoutError:
        _close(found)
        absent = ", ".join(str(peer) for peer in range(len(names)) if peer not in found)
        raise RendezvousError(f"rank {rank} waited {timeout:g} s for the memory of ranks {absent}") from None
    except BaseException:
        _close(found)
        raise
    return tuple(found[peer] for peer in range(len(names)))


def _hand(descriptor: int, rank: int, peer: int, name: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to:
        try:
            to.connect(name)
            socket.send_fds(to, [_RANK.pack(rank)], [descriptor])
        except ConnectionError as error:
            raise GroupError(
                f"rank {rank} cannot pass memory to rank {peer}: {error.strerror}. It has ended, or is in another "
                "network namespace (a container of its own): ranks of one machine have to share it"
            ) from error


def _take(door: socket.socket, found: dict[int, int]) -> None:
    """One connection. Names of sockets can be listed by anybody, so others' connections are not looked at."""
    with door.accept()[0] as connection:
        _, user, _ = _USER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size))
        if user != os.getuid():
            return
        connection.settimeout(door.gettimeout())
        # Not recv_fds, which ignores its flags: a child of this process must not keep the memory.
        said, passed, _, _ = connection.recvmsg(_RANK.size, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC)
        if len(said) == _RANK.size and len(passed) == 1:
            found[_RANK.unpack(said)[0]] = _FD.unpack(passed[0][2])[0]


def _close(found: Mapping[int, int]) -> None:
    for descriptor in found.values():
        os.close(descriptor)
