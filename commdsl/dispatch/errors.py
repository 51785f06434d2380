"""Turns what is wrong with numbers of a dispatch into a typed exception that names the place.

Assumes the caller knows rank, shard and replica. Does not judge; `validator` and the functions that compute do.
"""

from __future__ import annotations

from commdsl.runtime.errors import DispatchError as DispatchError
from commdsl.runtime.errors import OpError
from commdsl.runtime.errors import RowError as RowError


class MetadataError(OpError, ValueError, AssertionError):
    """Numbers that no dispatch can follow: the field, where in it, what should stand there and what does.

    An AssertionError, too: upstream asserts what is refused here, and its callers catch that.
    """

    code = "C960"

    def __init__(
        self,
        law: str,
        *,
        field: str,
        rank: int | None = None,
        shard: int | None = None,
        replica: int | None = None,
        source: int | None = None,
        expected: object = None,
        got: object = None,
    ) -> None:
        self.law, self.field = law, field
        self.rank, self.shard, self.replica, self.source = rank, shard, replica, source
        self.expected, self.got = expected, got
        names = {"rank": rank, "shard": shard, "replica": replica, "from rank": source}
        place = ", ".join(f"{name} {number}" for name, number in names.items() if number is not None)
        numbers = "" if expected is None and got is None else f"expected {expected}, got {got}: "
        super().__init__(f"{field}{f' at {place}' if place else ''}: {numbers}{law}")
