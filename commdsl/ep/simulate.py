"""What a dispatch by keys means, on arrays of all ranks: where every row goes, and what comes back.

Assumes legal keys, and numpy alone. Does not know a Plan: it is written from the words of the contract, for clarity,
and shares nothing with what it judges. Places of a rank are sorted by (key, source rank, row); a row that has a key
twice is there twice, in the order of its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.int32]
Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Received:
    """What one rank holds after the way there."""

    rows: tuple[Array, ...]  # by tensor
    counts: NDArray[np.int32]  # rows by the rank's own keys, in their order, and by source rank
    origins: NDArray[np.int64]  # of each row: source rank, row, and which of the row's keys


def dispatch(keys: Sequence[Keys], tensors: Sequence[Sequence[Array]], rank_of: Sequence[int]) -> list[Received]:
    """`keys`: by rank (T, K), numbers below len(rank_of), or that for none. `tensors`: by tensor, rank (T, ...)."""
    ranks = len(keys)
    found = []
    for rank in range(ranks):
        own = [key for key in range(len(rank_of)) if rank_of[key] == rank]
        counts = np.zeros((len(own), ranks), np.int32)
        origins = [np.zeros((0, 3), np.int64)]
        for local, key in enumerate(own):
            for source in range(ranks):
                where = np.argwhere(keys[source] == key)  # by row, then by which of its keys
                counts[local, source] = len(where)
                origins.append(np.insert(where, 0, source, axis=1))
        all_origins = np.concatenate(origins)
        rows = tuple(
            np.stack([tensor[source][row] for source, row, _ in all_origins]) if len(all_origins) else tensor[rank][:0]
            for tensor in tensors
        )
        found.append(Received(rows, counts, all_origins))
    return found


def combine(
    rows: Sequence[Array], received: Sequence[Received], keys: Sequence[Keys], weights: Sequence[Array], num_keys: int
) -> list[Array]:
    """By rank (T, ...): for each row the sum over its keys, in order, of weight times what came back for it, in
    float32, rounded once; zero for a row of no key. `rows`: by rank what became of the rows it received.
    """
    like = rows[0]
    came: list[dict[tuple[int, int], Array]] = [{} for _ in keys]
    for rank, held in enumerate(received):
        for at, (source, row, which) in enumerate(held.origins):
            came[source][row, which] = rows[rank][at]
    found = []
    for source, own in enumerate(keys):
        result = np.zeros((len(own), *like.shape[1:]), np.float32)
        for row in range(len(own)):
            kept = [which for which in range(own.shape[1]) if 0 <= own[row, which] < num_keys]
            for number, which in enumerate(kept):
                term = came[source][row, which].astype(np.float32) * np.float32(weights[source][row, which])
                result[row] = term if number == 0 else result[row] + term
        found.append(result.astype(like.dtype))
    return found
