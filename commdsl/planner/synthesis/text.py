"""Turns trees in steps into a schedule as `.comm` text: who has a piece from whom, and when it is handed on.

Assumes one Spread for each way that the collective goes: sums in, blocks out. Does not prove it, nor know its cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commdsl.cost.graph import Longs
from commdsl.language.records import dataclass
from commdsl.planner.synthesis.schedule import Spread
from commdsl.planner.synthesis.trees import Tree


@dataclass(frozen=True, eq=False)
class Way:
    """Blocks go out along trees, or sums come in along them, the last steps first. `prefix`: of the tables' names."""

    made: Spread
    adds: bool
    prefix: str = ""


def comm_text(name: str, ways: Sequence[Way], comment: Sequence[str] = ()) -> str:
    """The file, after the lines of a comment."""
    made = ways[0].made
    waves = max(way.made.turns.waves for way in ways)
    lines = [f"# {line}" for line in comment]
    lines.append(f"schedule {name}(K = {waves}) for P ranks where P == {made.num_ranks} and K >= 1 {{")
    lines += [f"  {line}" for line in _promise(ways)]
    for way in {way.prefix: way for way in ways}.values():
        lines += [f"  {line}" for line in _tables(way)]
    buffer, before, after = _buffers(ways)
    lines += ["", *(f"  {line}" for line in before)]
    for way in ways:
        lines += [f"  {line}" for line in _steps(way, buffer, by_rank=buffer != "x")]
    return "\n".join([*lines, *(f"  {line}" for line in after), "}", ""])


def _promise(ways: Sequence[Way]) -> Iterator[str]:
    """The buffers of the caller, and the contract."""
    made, adds = ways[0].made, ways[0].adds
    cut = f"{made.pieces}, K"
    if len(ways) > 1:
        yield f"inout x[{len(made.trees)}, K]"
        yield "ensure allreduce(x)"
    elif made.root is not None:
        yield f"inout x[{cut}]"
        yield f"ensure {'reduce' if adds else 'broadcast'}(x, {made.root})"
    else:
        yield f"input x[{f'P blocks, {cut}' if adds else cut}]"
        yield f"output y[{cut if adds else f'P blocks, {cut}'}]"
        if adds:
            yield f"scratch part[P blocks, {cut}]                      # sums on their way"
        yield f"ensure {'reduce_scatter' if adds else 'allgather'}(x -> y)"


def _buffers(ways: Sequence[Way]) -> tuple[str, list[str], list[str]]:
    """Where pieces lie, and what is copied before and after."""
    if ways[0].made.root is not None or len(ways) > 1:
        return "x", [], []
    if ways[0].adds:
        return "part", ["each r { copy x -> part }"], ["each r { copy part[r] -> y }"]
    return "y", ["each r { copy x -> y[r] }"], []


def _tables(way: Way) -> Iterator[str]:
    """A row for each tree; the first remark keeps the rows apart."""
    made = way.made
    for name, rows in (("parent", [tree.parent for tree in made.trees]), ("turn", list(made.turns.step))):
        width = len(str(max(int(row.max()) for row in rows)))
        remarks = map(_shape, made.trees) if name == "parent" else (f"tree {number}" for number in range(len(rows)))
        yield f"let {way.prefix}{name} = ["
        for number, (row, remark) in enumerate(zip(rows, remarks, strict=True), 1):
            yield f"  {_row(row, width)}{',' if number < len(rows) else ''}  # {remark}"
        yield "]"


def _row(values: Longs, width: int) -> str:
    return ", ".join(f"{value:>{width}}" for value in values.tolist())


def _shape(tree: Tree) -> str:
    """`0 (1 (3) 2)`: who hands on to whom."""

    def below(rank: int) -> str:
        children = " ".join(map(below, tree.children[rank]))
        return f"{rank} ({children})" if children else str(rank)

    return below(tree.root)


def _steps(way: Way, buffer: str, *, by_rank: bool) -> Iterator[str]:
    """`by_rank`: whether the buffer has a block for each rank."""
    made, last = way.made, way.made.turns.num_steps
    block = "t, 0" if made.pieces == 1 else f"t / {made.pieces}, t % {made.pieces}"
    chunk = f"{buffer}[{block}, i]" if by_rank else f"{buffer}[t, i]"
    parent, turn = f"{way.prefix}parent", f"{way.prefix}turn"
    yield "pipeline i in 0 ..< K {"
    if way.adds:
        yield f"  for s in 0 ..< {last} {{"
        yield f"    each r, t in 0 ..< {len(made.trees)} where {turn}[P * t + r] == {last} - s {{"
        yield f"      reduce {chunk} @ p for p in 0 ..< P if p == r or {parent}[P * t + p] == r -> {chunk}"
    else:
        yield f"  for s in 1 ..< {last + 1} {{"
        yield (
            f"    each r, t in 0 ..< {len(made.trees)} "
            f"where {parent}[P * t + r] != r and {turn}[P * t + {parent}[P * t + r]] == s {{"
        )
        yield f"      get {chunk} @ {parent}[P * t + r] -> {chunk}"
    yield from ("    }", "  }", "}")
