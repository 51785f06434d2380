"""Turns every shipped schedule that reduces into how far bfloat16 results lie from the exact ones: `python -m
benchmarks.rounding` writes the table in schedules/README.md, between its marks.

Assumes the interpreter has the kernels' bits, which tests hold. Does not need a GPU, and is the same on every machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from commdsl import compiler
from commdsl.ir import interpret
from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import CommError
from commdsl.machine.dtypes import BFLOAT16
from commdsl.machine.resources import data_dir, shipped_files

Floats = NDArray[np.float64]

SEED = 10
ELEMENTS = 1 << 16
"""Of a rank, as far as its chunks are equally long."""

RANKS = (2, 4, 8, 16)
ODD = 7
"""Where an average is no sum scaled by a power of two."""

DIGITS = 8  # of bfloat16
BLOCK = re.compile(r"(<!-- rounding -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Error:
    """In units of the last place of the exact result."""

    largest: float
    mean: float

    def __str__(self) -> str:
        return f"{self.largest:.2f}, {self.mean:.2f}"


def reducing() -> tuple[str, ...]:
    """The names of the shipped collectives that reduce."""
    return tuple(path.stem for path in shipped_files() if path.parent.name == "collectives" and "reduce" in path.stem)


def schedule(name: str, ranks: int) -> Schedule | None:
    """None where it is not for so many ranks. What has nodes has two of them."""
    path = data_dir("schedules") / "collectives" / f"{name}.comm"
    params = {"G": ranks // 2} if name.endswith("two_level") else None
    try:
        return compiler.check(path, ranks=ranks, params=params).schedule
    except CommError:
        return None


def error(meant: Schedule, op: str) -> Error:
    """Of numbers between 0 and 1, which do not cancel: so the last place of the result is that of its parts, too."""
    (contract,) = meant.contracts
    source, dest = meant.buffers[contract.source_buffer], meant.buffers[contract.dest_buffer]
    random = np.random.default_rng(SEED)
    chunk_elements = ELEMENTS // source.num_chunks // 8 * 8  # whole units of 16 bytes
    size = source.num_chunks * chunk_elements
    values = [BFLOAT16.from_float32(random.random(size, np.float32)) for _ in range(meant.num_ranks)]
    left = interpret.run(meant, {source.name: values}, BFLOAT16, op).outputs[dest.name]
    wide = [_wide(rank).reshape(-1, chunk_elements) for rank in values]
    errors = []
    for rank, chunk, value in zip(contract.dest_rank, contract.dest_chunk, contract.value, strict=True):
        places = zip(contract.source_rank[value], contract.source_chunk[value], strict=True)
        exact = np.sum([wide[r][c] for r, c in places], axis=0) / (meant.num_ranks if op == "avg" else 1)
        _, exponent = np.frexp(exact)
        got = _wide(left[rank]).reshape(-1, chunk_elements)[chunk]
        errors.append(np.abs(got - exact) / np.exp2(exponent - DIGITS))
    return Error(float(np.max(errors)), float(np.mean(errors)))


def _wide(values: interpret.Array) -> Floats:
    return BFLOAT16.to_float32(values).astype(np.float64)


def row(name: str) -> str:
    """A line of the table."""
    cells = [f"`{name}`"]
    for ranks, op in (*((ranks, "sum") for ranks in RANKS), (ODD, "sum"), (ODD, "avg")):
        meant = schedule(name, ranks)
        cells.append("" if meant is None else str(error(meant, op)))
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """All lines, with their head."""
    columns = ("", *(f"P = {ranks}" for ranks in RANKS), f"P = {ODD}, sum", f"P = {ODD}, avg")
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    return head + "\n".join(row(name) for name in reducing())


def main() -> None:
    """Writes the README."""
    readme = Path(__file__).resolve().parents[1] / "schedules" / "README.md"
    found = readme.read_text()
    readme.write_text(BLOCK.sub(lambda match: f"{match[1]}{table()}\n{match[2]}", found))


if __name__ == "__main__":
    main()
