"""Turns a dispatch into what is launched, that into the text of its kernel, and one call into packed arguments.

Assumes legal numbers. Does not know where rows go: that is in the tables (`tiles`). The arguments' layout is that of
`DispatchArgs` in templates/include/commdsl/types.cuh, the heap's that of `Board` in dispatch.cuh.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from commdsl.build.emit import Emitted, environment, file_name, headers_digest
from commdsl.ir.dispatches import Dispatch, Put

LANES = 128
THREADS = 512
TILE_BYTES = 8192
LINE = 64
"""Bytes of a cache line: what one rank writes shares none with what another writes."""


@dataclass(frozen=True, slots=True)
class DispatchKernel:
    """What is launched for one dispatch on one number of ranks."""

    name: str
    num_ranks: int
    tensors: tuple[str, ...]
    copied: tuple[bool, ...]  # by tensor: whether a row may go to several ranks
    packed: bool
    lanes: int  # the most thread blocks of a call, one an SM
    threads: int  # of a block
    tile_bytes: int  # what a warp moves at once
    source: str  # the file it comes from
    origin: str  # where in it

    @property
    def num_tensors(self) -> int:
        return len(self.tensors)

    @property
    def entry(self) -> str:
        """The name of the kernel in its text."""
        return f"commdsl_{self.name}"

    @property
    def board_bytes(self) -> int:
        """The front of every heap: what peers tell each other."""
        greeting = _lines(16 * (1 + 2 * self.num_tensors))
        return self.num_ranks * (greeting + LINE * self.lanes + 8 * self.lanes) + 3 * LINE


def lower_dispatch(dispatch: Dispatch) -> DispatchKernel:
    """Its launch: one block on each SM it may use, with the threads and tiles that it is tuned to."""
    tuned = dispatch.tuning
    role = [last - first for roles in dispatch.roles for name, first, last in roles.roles if name == dispatch.role]
    source = file_name(dispatch.span.source.name)
    return DispatchKernel(
        dispatch.name,
        dispatch.num_ranks,
        tuple(tensor.name for tensor in dispatch.tensors),
        tuple(dispatch.routes[tensor.route].many for tensor in dispatch.tensors),
        dispatch.put is Put.PACKED,
        tuned.sms or min(LANES, role[0] if role else dispatch.topology.num_sms),
        tuned.threads or THREADS,
        tuned.tile_bytes or TILE_BYTES,
        source,
        f"{source}:{dispatch.span.position[0]} dispatch {dispatch.name}, put {dispatch.put.value}",
    )


def _lines(size: int) -> int:
    return -(-size // LINE) * LINE


def emit_dispatch(kernel: DispatchKernel) -> Emitted:
    """The text, the same for every rank, on any machine and hash seed."""
    context = {
        "entry": kernel.entry,
        "source": kernel.source,
        "origin": kernel.origin,
        "headers_digest": headers_digest(),
        "threads": kernel.threads,
        "most_lanes": kernel.lanes,
        "num_ranks": kernel.num_ranks,
        "num_tensors": kernel.num_tensors,
        "tensors": ", ".join(kernel.tensors),
    }
    text = environment().get_template("dispatch.cu.j2").render(kernel=context)
    return Emitted(kernel.entry, text, hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Fixed:
    """The arguments that no call changes; addresses as that process sees them."""

    heaps: Sequence[int]  # by rank
    staging: Sequence[int]  # by tensor: offset in every heap of where its rows wait
    staging_rows: Sequence[int]
    timeout_ns: int
    error: int

    def pack(self) -> bytes:
        words = (*self.heaps, *self.staging, *self.staging_rows, self.timeout_ns, self.error)
        return struct.pack(f"<{len(words)}Q", *words)


def changing(num_tensors: int) -> struct.Struct:
    """What follows: table, inputs, outputs, bytes of a row, rows of inputs, rows of outputs; the rank and its lanes."""
    return struct.Struct(f"<{1 + 5 * num_tensors}Q2i")
