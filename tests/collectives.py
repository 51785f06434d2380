"""Turns the inputs of a collective into what every rank must hold afterwards, with plain numpy.

Assumes integers small enough to add up exactly. Does not use any stage of commdsl for the answer: it is what the stages
are compared with. Also lists what is shipped, and the rank counts and parameters that each schedule is tested with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SCHEDULES = Path(__file__).parent.parent / "schedules"
MAX_RANKS = 16


ROOTED = ("broadcast_direct", "broadcast_scatter", "broadcast_tree", "reduce_tree", "gather_direct", "scatter_direct")
"""Schedules with a root and nothing else to choose."""


@dataclass(frozen=True)
class Case:
    """A shipped schedule on a number of ranks with parameters."""

    path: Path
    ranks: int
    params: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def collective(self) -> str:
        return self.name.split("_")[0]

    def __str__(self) -> str:
        return "-".join([self.name, str(self.ranks), *(f"{name}{value}" for name, value in self.params)])


def shipped() -> tuple[Path, ...]:
    """The schedules that are one launch; those whose yields call a function are in `test_attention_schedules.py`, and
    one that moves what its caller computes on the way in `test_visits.py`.
    """
    found = sorted(SCHEDULES.glob("collectives/*.comm")) + sorted(SCHEDULES.glob("attention/rotation_*.comm"))
    return tuple(path for path in found if path.stem != "rotation_carry")


def dispatches() -> tuple[tuple[Path, str], ...]:
    """The shipped dispatches: their file and their name."""
    return tuple(
        (path, name)
        for path in sorted(SCHEDULES.glob("dispatch/*.comm"))
        for name in re.findall(r"^dispatch (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    )


def by_keys() -> tuple[tuple[Path, str], ...]:
    """The shipped dispatches by keys."""
    return tuple(
        (path, name)
        for path in sorted(SCHEDULES.glob("ep/*.comm"))
        for name in re.findall(r"^dispatch (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    )


KEY_FORMS = ((8, 32, 1), (8, 3, 128), (32, 32, 16), (1, 1, 16))
"""Keys of a row, keys of a rank, alignment: in what sizes forms of a dispatch by keys run on GPUs."""


def admits(name: str, ranks: int) -> bool:
    """Whether a shipped schedule exists for this many ranks, stated apart from its own `where`."""
    if name.endswith("hamilton"):
        return ranks >= 2 and ranks not in (4, 6)
    if name in ("allreduce_halving_doubling", "allgather_recursive_doubling"):
        return ranks in (2, 4, 8, 16)
    return ranks >= 2


def cases(path: Path, ranks: int) -> Iterator[Case]:
    """The parameters under which a schedule is tested on so many ranks: every node size, several roots."""
    if not admits(path.stem, ranks):
        return
    if path.stem.endswith("two_level"):
        yield from (Case(path, ranks, (("G", size),)) for size in range(1, ranks + 1) if ranks % size == 0)
    elif path.stem == "broadcast_chain":
        yield from (Case(path, ranks, (("root", ranks - 1), ("K", pieces))) for pieces in (3, 1))
        yield Case(path, ranks)
    elif path.stem in ("broadcast_tree", "reduce_tree"):
        yield from (Case(path, ranks, (("root", root), ("K", 1))) for root in sorted({0, ranks - 1}))
        yield Case(path, ranks, (("root", ranks // 2), ("K", 3)))
    elif path.stem in ROOTED:
        yield from (Case(path, ranks, (("root", root),)) for root in sorted({0, ranks // 2, ranks - 1}))
    elif path.stem == "permutation_shift":
        yield from (Case(path, ranks, (("K", shift),)) for shift in sorted({1, ranks - 1, ranks + 1}))
    else:
        yield Case(path, ranks)


def main_case(path: Path, ranks: int) -> Case | None:
    """One case for the costly tests: with two levels where the ranks have them, and a root that is not rank 0."""
    found = list(cases(path, ranks))
    if path.stem.endswith("two_level"):
        found.sort(key=lambda case: abs(dict(case.params)["G"] - ranks**0.5 - 0.1))
    if path.stem in ROOTED:
        found.reverse()
    return found[0] if found else None


Array = NDArray[np.generic]


def expected(
    collective: str, inputs: list[Array], block: int, params: Mapping[str, int]
) -> list[NDArray[np.int64] | None]:
    """What each rank's result must be, from every rank's input of one or more blocks; None: anything."""
    x = [np.asarray(value, np.int64) for value in inputs]
    ranks = len(x)
    root = params.get("root", 0)
    total = np.sum(x, axis=0)

    def piece(value: NDArray[np.int64], index: int) -> NDArray[np.int64]:
        return value[index * block : (index + 1) * block]

    match collective:
        case "allreduce":
            return [total] * ranks
        case "reducescatter":
            return [piece(total, r) for r in range(ranks)]
        case "allgather":
            return [np.concatenate(x)] * ranks
        case "alltoall":
            return [np.concatenate([piece(x[q], r) for q in range(ranks)]) for r in range(ranks)]
        case "broadcast":
            return [x[root]] * ranks
        case "reduce":
            return [total if r == root else None for r in range(ranks)]
        case "gather":
            return [np.concatenate(x) if r == root else None for r in range(ranks)]
        case "scatter":
            return [piece(x[root], r) for r in range(ranks)]
        case "permutation":
            return [x[(r - params.get("K", 1)) % ranks] for r in range(ranks)]
        case _:
            raise ValueError(f"no such collective: {collective}")


def mismatch(
    collective: str,
    inputs: list[Array],
    outputs: list[Array],
    yields: list[list[Array]],
    block: int,
    params: Mapping[str, int],
) -> str:
    """What is wrong with a result, or nothing. `yields` is by yield, then rank."""
    if collective == "rotation":
        want = np.sort(np.stack(inputs), axis=0)
        for rank in range(len(inputs)):
            seen = np.stack([blocks[rank] for blocks in yields])
            if seen.shape != want.shape or not np.array_equal(np.sort(seen, axis=0), want):
                return f"rank {rank} does not see every rank's data exactly once"
        return ""
    for rank, (value, wish) in enumerate(zip(outputs, expected(collective, inputs, block, params), strict=True)):
        if wish is not None and not np.array_equal(np.asarray(value, np.int64), wish):
            return f"rank {rank} holds {value[:8]}, not {wish[:8]}"
    return ""


def make_inputs(ranks: int, size: int, seed: int = 0) -> list[NDArray[np.int64]]:
    """Distinct numbers, small enough to be exact in float32 when all ranks are added up."""
    rng = np.random.default_rng(seed)
    values = rng.permutation(max(ranks * size, 1))[: ranks * size]
    return list(values.reshape(ranks, size).astype(np.int64))
