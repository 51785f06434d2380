"""The kinds that a text, its IR and its Plan name alike.

Assumes nothing. Does not hold a form of the text: what runs a compiled schedule needs these kinds and no `syntax`.
"""

from __future__ import annotations

from enum import Enum


class MoveKind(Enum):
    PUT = "put"
    GET = "get"
    COPY = "copy"
    REDUCE = "reduce"
    MATMUL = "matmul"
    ROWWISE = "row-wise"


class BufferKind(Enum):
    INPUT = "input"
    OUTPUT = "output"
    INOUT = "inout"
    SCRATCH = "scratch"


class Axis(Enum):
    """By what a table of lengths is looked up."""

    RANK = "rank"
    BLOCK = "block"


GIVEN = (BufferKind.INPUT, BufferKind.INOUT)
"""By the caller, when a call begins."""

RETURNED = (BufferKind.OUTPUT, BufferKind.INOUT)
"""To the caller, when it is over."""


class LinkScope(Enum):
    IN_NODE = "in node"
    ACROSS_SAME_GPU = "across nodes same gpu"
    ACROSS_NODES = "across nodes"
    PAIRS = "pairs"  # both ways
    ARCS = "arcs"  # from the first to the second
