"""C597: what a product ends with is the last that is done to its results, and the same for all of a buffer.

Assumes indices in bounds and no undefined reads. A bias, or a residual, that is added on the way to a sum is in it
once a term, and the sum of what an activation made is not what it makes of the sum. Follows both through the schedule.
Does not look at which rows and blocks are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.conservation import last_write
from commdsl.checks.locations import Located, LocatedMoves, LocatedStep
from commdsl.ir.functions import ACTIVATIONS
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.kinds import RETURNED
from commdsl.language.records import dataclass

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ends:
    """Of every location, how many biases and residuals are in it, and terms that no product made, and which activation
    made it; 0: none.
    """

    added: Numbers  # (n, 3)
    activation: Numbers  # (n,)

    def at(self, locations: NDArray[np.integer]) -> Ends:
        return Ends(self.added[locations], self.activation[locations])

    def put(self, locations: NDArray[np.integer], new: Ends) -> None:
        self.added[locations], self.activation[locations] = new.added, new.activation


def unfinished_results(located: Located) -> Iterator[Diagnostic]:
    """The first statement that goes on with what is finished; or each buffer of results that end in several ways."""
    if not located.schedule.epilogues:
        return
    ends = Ends(np.zeros((located.size, 3), np.int64), np.zeros(located.size, np.int64))
    for step in located.steps:
        if not isinstance(step, LocatedStep):
            continue  # what the caller computes is C592
        made = []
        for moves in step.moves:
            label = _goes_on(moves, ends)
            if label:
                yield _fault(Label(moves.moves.span, label), "let what follows a product be the last that is done")
                return
            made.append((moves.dest, _made(moves, ends)))
        for dest, new in made:
            ends.put(dest, new)
    yield from _unlike(located, ends)


def _goes_on(moves: LocatedMoves, ends: Ends) -> str:
    """Why a statement may not do what it does with what it reads; nothing: it may."""
    read = ends.at(moves.sources)
    if moves.factors is not None and (read.added[:, :2].any() or read.activation.any()):
        return "it multiplies what another product has finished"
    is_sum = not moves.moves.copies and moves.factors is None
    if is_sum and read.activation.any():
        return f"it adds up what `{_name(read.activation)}` made"
    if not moves.moves.accumulate:
        return ""
    there = ends.at(moves.dest)
    if there.activation.any():
        return f"it adds to what `{_name(there.activation)}` made"
    if moves.moves.epilogue.activation is not None and there.added[:, 1:].any():
        return f"`{moves.moves.epilogue.activation}` is of products and a bias, and more was added"
    return ""


def _made(moves: LocatedMoves, ends: Ends) -> Ends:
    """What a statement writes."""
    read, epilogue = ends.at(moves.sources), moves.moves.epilogue
    added, activation = read.added.sum(axis=1), read.activation.max(axis=1)
    if moves.moves.accumulate:
        added = added + ends.added[moves.dest]
    if epilogue.activation is not None:
        activation = np.full_like(activation, 1 + ACTIVATIONS.index(epilogue.activation))
    is_sum = not moves.moves.copies and moves.factors is None
    more = np.array((epilogue.bias is not None, epilogue.residual is not None, is_sum))
    return Ends(added + more, activation)


def _unlike(located: Located, ends: Ends) -> Iterator[Diagnostic]:
    left = located.left()
    for number, buffer in enumerate(located.schedule.buffers):
        places = located.whole(number).ravel()
        places = places[left[places]]
        if buffer.kind not in RETURNED or not len(places):
            continue
        found = np.column_stack((ends.added[places, :2], ends.activation[places]))
        wrong = np.flatnonzero((found[:, :2] > 1).any(axis=1) | (found != found[0]).any(axis=1))
        if len(wrong):
            at, first = int(wrong[0]), located.name(int(places[0]))
            counts = zip(("bias", "residual"), found[at].tolist(), strict=False)
            often = [f"has a {name} {count} times" for name, count in counts if count > 1]
            what = often[0] if often else f"ends otherwise than {first}"
            written = last_write(located, int(places[at]))
            beside = () if written is None else (written,)
            label = Label(buffer.span, f"{located.name(int(places[at]))} {what}")
            yield _fault(
                label, "let all that is made of a buffer end alike, with one bias and one residual at most", beside
            )


def _name(activation: Numbers) -> str:
    return ACTIVATIONS[int(activation.max()) - 1]


def _fault(label: Label, help: str, beside: tuple[Label, ...] = ()) -> Diagnostic:
    return Diagnostic("C597", "a result is not what its products end with", label, beside, help=help)
