"""The phase `Tiles`: what a role computes beside the lanes that move, tile by tile, and which of them it tells.

Assumes nothing of the schedule. Does not derive synchronization (`lower`) and does not prove it (`program.proof`).

**Who runs.** `sms` thread blocks, one an SM. Block b serves lanes b, b + sms, ... of the moves: for every round it runs
the rank's operations for each of them in turn, so that the first tiles of all chunks are done first.

**What a tile is.** What a lane of `Moves` moves of a chunk in a round: the same slice of the same rounds. So a flag
says all that has to be said between the two, and no tile is awaited that is not read.

**Operations** are rows of `Ops` as those of moves, with a function for a kind. They read and write tensors of the rank
itself, and wait for nothing: what they read is given with the call, or made by an earlier operation of the same lane.
Each may signal `num_ranks`, the moves of its own rank, as those call the tiles: flags[lane][num_ranks], with the row
`num_ranks` of their signals_per_round.
"""

from __future__ import annotations

from types import MappingProxyType

from commdsl.ir.functions import ELEMENTWISE
from commdsl.language.records import dataclass
from commdsl.program.memory import Tensor
from commdsl.program.moves import KIND_OF, Ops, Origin

FUNCTION_OF = MappingProxyType({KIND_OF[one.operation]: one for one in ELEMENTWISE.values()})
"""The functions of `ir.functions`, by their kind as operations."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Static operations that compute, beside the `Moves` of the same Plan, whose tensors these are."""

    num_ranks: int
    sms: int  # thread blocks, one an SM
    threads: int  # of a block: as many as a block of the moves has
    tensors: tuple[Tensor, ...]
    ops: Ops
    origins: tuple[Origin, ...]
