"""Turns what is to be merged (attention over parts of the keys, or gradients of such parts) into the text, the macros
and the argument of the kernel that merges it.

Assumes addresses that the kernel may touch, and steps that count elements. Does not launch (`runtime.merging` does),
and does not say in which order is summed: `merge.cuh` does.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as memoize
from functools import cached_property
from math import gcd
from typing import NamedTuple

from commdsl.build.emit import Emitted
from commdsl.machine.dtypes import BY_NAME
from commdsl.machine.resources import data_dir

MOST = 8
"""Parts that one launch merges, beside a running one."""

THREADS = 128
"""Of a block, as the text has it."""

DTYPES = ("bfloat16", "float16", "float32")
"""Of parts, and of what becomes of them."""

_PART, _WHOLE = struct.Struct("<2Q2I6Q"), struct.Struct("<4IQ")
_MOST_TURNS = 4  # the weights of a row are found once for so many vectors


class Rows(NamedTuple):
    """Rows `first` to `last` of the whole: where their outputs and their float32 logarithms lie, and the steps, in
    elements, from one row, batch and head to the next.
    """

    out: int
    lse: int
    first: int
    last: int
    row: int
    batch: int
    head: int
    lse_row: int
    lse_batch: int
    lse_head: int


NOTHING = Rows(*[0] * 10)


@dataclass(frozen=True)
class Merge:
    """One launch. `running` is float32, the other parts are of one dtype. What is empty has no launch."""

    parts: tuple[Rows, ...]
    running: Rows
    whole: Rows
    batch: int
    heads: int
    head_dim: int
    dtype: str
    result: str
    weighs: bool = True  # by the logarithms; else what is summed are gradients, and there are none

    @cached_property
    def elements(self) -> int:
        """What a thread makes: 16 bytes of a part where all lie so, else one element."""
        most = 16 // BY_NAME[self.dtype].size
        sized = [(part, self.dtype) for part in self.parts] + [(self.running, "float32"), (self.whole, self.result)]
        return most if all(_lies(rows, dtype, self.head_dim, most) for rows, dtype in sized) else 1

    @property
    def turns(self) -> int:
        """Runs of elements that a thread makes."""
        return gcd(self.head_dim // self.elements, _MOST_TURNS)

    @property
    def threads(self) -> int:
        """Of one row of a head."""
        return self.head_dim // self.elements // self.turns

    @property
    def items(self) -> int:
        """Threads of the launch."""
        return (self.whole.last - self.whole.first) * self.batch * self.heads * self.threads

    def defines(self) -> tuple[str, ...]:
        said = {"DTYPE": self.dtype, "RESULT": self.result, "ELEMENTS": self.elements, "WEIGHS": int(self.weighs)}
        return tuple(f"COMMDSL_{name}={value}" for name, value in said.items())

    def packed(self) -> bytes:
        """The kernel's one argument."""
        empty = [NOTHING] * (MOST - len(self.parts))
        rows = (self.running, *self.parts, *empty, self.whole)
        sizes = _WHOLE.pack(self.batch, self.heads, self.threads, self.turns, self.items)
        return b"".join(_PART.pack(*one) for one in rows) + sizes


def _lies(rows: Rows, dtype: str, head_dim: int, elements: int) -> bool:
    """Whether every run of so many elements is made of whole words of 16 bytes, or is one shorter word."""
    size = BY_NAME[dtype].size
    steps: Sequence[int] = (rows.row, rows.batch, rows.head)
    return not head_dim % elements and not gcd(rows.out, *(size * step for step in steps)) % min(16, elements * size)


@memoize
def emitted() -> Emitted:
    """The kernel's text, as a Plan's is."""
    text = (data_dir("templates") / "merge.cu").read_text(encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Emitted("commdsl_merge", text, digest, digest)
