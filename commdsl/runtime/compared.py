"""Turns the calls of a group's ranks into their agreement before anything is launched: what COMMDSL_DEBUG=1 asks for.

Assumes that every rank compares every call. Costs an exchange through the group's store a call, some milliseconds: it
is for finding a fault, not for running. Does not look into graphs: a call in one is compared when it is captured.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType

from commdsl.runtime.errors import AgreementError


class Compared:
    """One rank's end of the comparisons of a group."""

    def __init__(
        self,
        name: str,
        rank: int,
        tell: Callable[[str, bytes, str], tuple[bytes, ...]],
        drop: Callable[[str], None],
    ) -> None:
        """`tell` as `Communicator.exchange`; `drop`: what this rank told under a key may be forgotten."""
        self._name = name
        self._rank = rank
        self._tell = tell
        self._drop = drop
        self._number = 0

    def compare(self, call: str, line: str) -> None:
        """Collective. Raises AgreementError (C964), on all ranks alike, unless all make this call; nothing was sent
        then, and the group goes on.
        """
        number, self._number = self._number, self._number + 1
        everyone = self._tell(f"call/{number}", json.dumps([call, line]).encode(), f"compare call {number}, {call}")
        if number:  # everyone has come here, so nobody reads what was said before
            self._drop(f"call/{number - 1}")
        said = [json.loads(one) for one in everyone]
        rank = self._rank
        for other, (theirs, there) in enumerate(said):
            if theirs != call:
                raise AgreementError(
                    f"call {number} of group `{self._name}`: rank {other} calls {theirs} at {there}, rank {rank} calls "
                    f"{call} at {line}: all ranks of a group make the same calls, in the same order"
                )


def user_line() -> str:
    """The place in the caller's own files from which commdsl was called, the innermost one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_foreign()):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "a place that is not the caller's, as in a backward pass"


@cache
def _foreign() -> tuple[str, ...]:
    """Where files lie whose lines tell a user nothing: commdsl, what is installed, what has no file."""
    paths = sysconfig.get_paths()
    return (str(Path(__file__).parents[1]), *(paths[name] for name in ("stdlib", "purelib", "platlib")), "<")
