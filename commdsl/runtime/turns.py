"""Turns the products of a Plan, and where their matrices lie, into turns of one launch of our kernel.

Assumes a Plan whose products lie in parts (`ir.products`). Does not know types or shapes; `fused` launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from commdsl.build.turns import Source, Turn
from commdsl.program.launches import Launch, Return, Visit
from commdsl.program.memory import Kept
from commdsl.program.plan import Plan
from commdsl.program.visited import launches, meets, visits

Places: TypeAlias = Mapping[str, tuple[str, int]]
"""By part, of which matrices it is which."""


def products_of(plan: Plan) -> tuple[Visit, ...]:
    return tuple(phase for phase in visits(plan) if isinstance(phase, Visit))


def given_to(one: Visit) -> tuple[Kept | None, Kept | None]:
    """The bias and the residual of a product."""
    ends, read = one.step.epilogue, dict(zip(one.step.reads, one.reads, strict=True))
    return (None if ends.bias is None else read[ends.bias], None if ends.residual is None else read[ends.residual])


def end_in_one_way(plan: Plan, places: Places) -> bool:
    """Whether the kernel does what its products end with: one activation, one bias, and one residual, which lies as
    what the caller gets.
    """
    found = products_of(plan)
    kinds = [{place_of(places, kept)[0] for kept in one if kept} for one in zip(*map(given_to, found), strict=True)]
    if len(activations(plan)) > 1 or max(map(len, kinds)) > 1:
        return False
    got = {kept for phase in visits(plan) if isinstance(phase, Return) for kept in phase.reads}
    with_residual = ((one.writes[0], given_to(one)[1]) for one in found)
    return all(
        residual is None or (made in got and place_of(places, residual)[1] == place_of(places, made)[1])
        for made, residual in with_residual
    )


def activations(plan: Plan) -> set[str | None]:
    """What turns end with."""
    return {turn[-1].step.epilogue.activation for turn in summed(products_of(plan))}


def _is_added(one: Visit) -> bool:
    """To what is there."""
    return one.writes[0] in one.reads[one.step.sums]


def _sums(one: Visit) -> tuple[Kept, ...]:
    """What is added to it, besides what it is added to."""
    return tuple(kept for kept in one.reads[one.step.sums] if kept != one.writes[0])


def summed(products: Sequence[Visit]) -> list[tuple[Visit, ...]]:
    """By turn: a product, and those behind it that are added to what it makes."""
    found: list[tuple[Visit, ...]] = []
    for one in products:
        if found and _is_added(one) and one.writes == found[-1][0].writes:
            found[-1] += (one,)
        else:
            found.append((one,))
    return found


def have_turns(plan: Plan) -> bool:
    """Whether products are turns of the kernel: sums of as many, of which nobody waits for a part."""
    turns = summed(products_of(plan))
    sizes = [len(turn) for turn in turns]
    ends = set(accumulate(sizes, initial=0))
    return (
        len({*sizes}) == 1
        and not any(_is_added(first) for first, *_ in turns)
        and all({launch.opens, launch.after} <= ends for launch in launches(plan))
    )


def unordered(plan: Plan, places: Places) -> Visit | None:
    """Return the first product that may run before what it depends on, or None if the words of the kernel order all.

    The kernel waits for launches alone. A product of an earlier turn is over for certain only if a launch that waited
    for it is awaited: by the word of the source before rows and factor are read, by any word of the turn before its
    result is written. Nothing waits for the bias and the residual, so nothing in the call may write them.
    """
    beside, everything = launches(plan), products_of(plan)
    over = [0, *accumulate((launch.after for launch in beside), max)]  # products, by how many launches are over
    written = {kept for launch in beside for kept in launch.writes}
    first = 0
    for products, turn in zip(summed(everything), turns_of(plan, places), strict=True):
        before = everything[:first]
        end = over[max(turn.sums_there, *(source.there for source in turn.sources)) + 1]
        never_awaited = written | {kept for one in before for kept in one.writes}
        for one, source in zip(products, turn.sources, strict=True):
            if {one.reads[1], *filter(None, given_to(one))} & never_awaited:
                return one
            if any({*one.reads[:2]} & {*other.writes} for other in before[over[source.there + 1] :]):
                return one
            needs, makes = {*_sums(one)}, {*one.writes}
            if any(needs & {*other.writes} or makes & {*other.reads, *other.writes} for other in before[end:]):
                return one
        first += len(products)
    return None


def are_copies_left(plan: Plan) -> bool:
    """Whether nothing else touches what products copy: no word says that it is there before the kernel ends."""
    products = products_of(plan)
    touching = [{*one.reads, *one.writes} for one in products] + [{*one.reads, *one.writes} for one in launches(plan)]
    touched = Counter(kept for one in touching for kept in one)
    return all(touched[kept] == 1 for one in products for kept in one.writes[1:])


def place_of(places: Places, kept: Kept) -> tuple[str, int]:
    """Of what has no parts: it is one matrix by itself."""
    return places.get(kept.name, (kept.name, 0))


def groups_of(products: Sequence[Visit], places: Places) -> tuple[list[str], ...]:
    """Where rows lie, what is added, results, and copies of rows."""
    rows = [one.reads[0] for one in products]
    sums = [kept for one in products for kept in _sums(one)]
    results = [one.writes[0] for one in products]
    copies = [kept for one in products for kept in one.writes[1:]]
    return tuple([*dict.fromkeys(places[kept.name][0] for kept in one)] for one in (rows, sums, results, copies))


def turns_of(plan: Plan, places: Places) -> Iterator[Turn]:
    """Every turn, with the words that stand for what the Plan has its products wait for, and for what waits for it."""
    products, beside = products_of(plan), launches(plan)
    sources, _, results, _ = groups_of(products, places)
    awaited = sorted({one.after - 1 for one in visits(plan) if one.after})
    told = max((launch.after for launch in beside), default=0)
    made = 0
    for number, turn in enumerate(summed(products)):
        read = list[Source]()
        for one in turn:
            rows = places[one.reads[0].name]
            there = _word(_touching(beside, one, one.reads[:1], one.writes), awaited)
            read.append(Source((sources.index(rows[0]), rows[1]), place_of(places, one.reads[1])[1], there))
        sums = [kept for one in turn for kept in _sums(one)]
        added = [at for one in turn for at in _touching(beside, one, _sums(one), ())]
        result = places[turn[0].writes[0].name]
        made += len(turn)
        yield Turn(
            tuple(read),
            (results.index(result[0]), result[1]),
            min((places[kept.name][1] for kept in sums), default=0),
            len(sums),
            _word(added, awaited),
            len(beside) + number if made <= told else -1,
            max((places[kept.name][1] for kept in turn[0].writes[1:]), default=-1),
            bias=max(-1 if bias is None else place_of(places, bias)[1] for bias, _ in map(given_to, turn)),
            residual=any(residual is not None for _, residual in map(given_to, turn)),
        )


def _touching(beside: Sequence[Launch], one: Visit, reads: Sequence[Kept], writes: Sequence[Kept]) -> list[int]:
    """The launches before a product that have to do with these."""
    return [at for at, launch in enumerate(beside) if launch.turn < one.turn and meets(launch, reads, writes)]


def _word(needed: Sequence[int], awaited: Sequence[int]) -> int:
    """Of the first launch behind all of those that the Plan has a visit wait for; -1: nothing is needed."""
    return next(at for at in awaited if at >= max(needed)) if needed else -1
