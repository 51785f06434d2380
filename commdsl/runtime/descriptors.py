"""Turns a file descriptor of every rank of a group into all of them in every process, passed over unix sockets.

Assumes that the ranks are processes of one user on one machine and share a network namespace. Both ends look at each
other's user: anybody can list the names of sockets and connect to them, and anybody who may write the group's store can
put another name there. Does not leave anything behind: the sockets have names in no folder, and are closed on return.
"""

from __future__ import annotations

import os
import socket
import struct
import uuid
from collections.abc import Sequence

from commdsl.runtime.bootstrap import Exchange
from commdsl.runtime.errors import GroupError

SECONDS = 5.0
"""To take what is there already; more than that nobody needs."""

_RANK = struct.Struct("<I")
_FD = struct.Struct("i")
_USER = struct.Struct("iII")  # of SO_PEERCRED: process, user, group


def pass_round(descriptor: int, rank: int, exchange: Exchange) -> tuple[int, ...]:
    """By rank a descriptor, in this process, of what that rank gave; closing them is the caller's.

    Collective. Raises GroupError where a rank is not to be reached by a socket, on all ranks alike.
    """
    name = f"\0commdsl-{uuid.uuid4().hex}".encode()
    found = {rank: os.dup(descriptor)}
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(name)
            door.listen(socket.SOMAXCONN)
            names = exchange("doors", name)
            # What is waited for is what ranks say by `exchange`, which knows who is gone; what they gave is here then.
            said = exchange("handed", _hand_round(descriptor, rank, names).encode())
            for text in said:
                if text:
                    raise GroupError(text.decode())
            door.settimeout(SECONDS)
            while len(found) < len(names):
                _take(door, found)
    except BaseException:
        for one in found.values():
            os.close(one)
        raise
    return tuple(found[peer] for peer in range(len(names)))


def _hand_round(descriptor: int, rank: int, names: Sequence[bytes]) -> str:
    """To all others, none of whom has to be waiting. What went wrong, in words."""
    for peer, name in enumerate(names):
        if peer == rank:
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to:
            try:
                to.connect(name)
                user = _user_of(to)
                if user != os.geteuid():
                    return (
                        f"rank {rank} does not pass memory to rank {peer}: the socket that it named belongs to user "
                        f"{user}, and rank {rank} runs as user {os.geteuid()}. All ranks of one machine have to run as "
                        "one user; if they do, somebody else writes the group's store"
                    )
                socket.send_fds(to, [_RANK.pack(rank)], [descriptor])
            except ConnectionError as error:
                return (
                    f"rank {rank} cannot pass memory to rank {peer}: {error.strerror}. It has ended, or is in another "
                    "network namespace (a container of its own): ranks of one machine have to share it"
                )
    return ""


def _user_of(connection: socket.socket) -> int:
    """Return the effective user of the other end: when it began to listen or, of who connects, when it did."""
    _, user, _ = _USER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size))
    return int(user)


def _take(door: socket.socket, found: dict[int, int]) -> None:
    """One connection. Names of sockets can be listed by anybody, so others' connections are not looked at."""
    with door.accept()[0] as connection:
        if _user_of(connection) != os.geteuid():
            return
        connection.settimeout(door.gettimeout())
        # Not recv_fds, which ignores its flags: a child of this process must not keep the memory.
        said, passed, _, _ = connection.recvmsg(_RANK.size, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC)
        if len(said) == _RANK.size and len(passed) == 1:
            found[_RANK.unpack(said)[0]] = _FD.unpack(passed[0][2])[0]
