"""Turns the phases of a role into the calls that its lanes make, in order: text for the template.

Assumes a proved Plan. Does not choose anything: who acts, who is told and who is waited for stands in the phases. Every
wait and every word of a kernel comes from here, or from the tables of `Moves`; the bodies in the headers have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from commdsl.ir.functions import ROWWISE, Extent
from commdsl.program.by_row import ByRow
from commdsl.program.halves import cut_of
from commdsl.program.phases import Meet, Push, Routed
from commdsl.program.plan import Plan
from commdsl.program.waves import num_waves


@dataclass(frozen=True, slots=True)
class Line:
    """A phase as the kernel runs it, under the comment that says which it is."""

    origin: str
    call: str
    depth: int = 0


def calls(plan: Plan) -> Iterator[Line]:
    """What every lane of the Plan's role runs, in one launch or as one of two."""
    if plan.is_static:
        moves = Line("moves: the operations of the rank, round after round", "commdsl::run_lane<Plan>(args, lane);")
        yield from (moves,) if plan.by_row is None else _by_row(plan.by_row, moves)
        return
    yield Line("what threads of a lane share", f"COMMDSL_SHARED commdsl::{known(plan)}<Plan> peers;")
    routed = plan.comm.routed
    yield from _in_waves(routed) if num_waves(routed) > 1 else _in_turn(routed)
    yield Line("what is reported when all is done", "commdsl::end(here, peers);")


SENDS = "if (args.half != commdsl::kReceives"
FINISHES = "if (args.half != commdsl::kSends && wave > 0"
KEEPS = "if (args.half == commdsl::kSends) return commdsl::tell_kept(here, peers);"
RECALLS = Line("the second goes on with what the first knew", "} else {\n    commdsl::read_kept(here, peers);\n  }")


def _by_row(phase: ByRow, moves: Line) -> Iterator[Line]:
    """A lane that gave up goes on with what it has: the call has failed, and those that share its rows wait for it."""
    given, function = phase.given, ROWWISE[phase.function]
    beside = given[function.given.index(Extent.ROWS)], given[function.row]
    tensors = ", ".join(map(str, (phase.rows, *given, *phase.results)))
    begin = f"commdsl::begin_rows<Plan, {', '.join(map(str, beside))}>(args, lane);"
    yield Line("what the rows need beside what moves comes meanwhile", begin)
    yield moves
    yield Line(
        f"{phase.function}, of the rows that the lane has moved",
        f"commdsl::{phase.function}<Plan, {tensors}>(args, lane);",
    )


def _in_turn(routed: tuple[Routed, ...]) -> Iterator[Line]:
    cut = cut_of(routed)
    pushes = any(isinstance(phase, Push) for phase in routed)
    first_wait = next((number for number, phase in enumerate(routed) if isinstance(phase, Meet | Push)), 0)
    for number, phase in enumerate(routed):
        if pushes and number == first_wait:
            yield Line("what is pushed first, read before there is a wait", "const commdsl::Ahead<Plan> ahead(here);")
        if cut is not None and number == 1:
            yield Line("in one launch, and in the first of two", f"{SENDS}) {{")
        if number == cut:
            yield Line("the first of two ends here", KEEPS, 1)
            yield RECALLS
        yield _line(phase, number, int(cut is not None and 0 < number < cut))


def _in_waves(routed: tuple[Routed, ...]) -> Iterator[Line]:
    """As `waves.in_order` has them, of as many waves as there are."""
    last = "commdsl::num_waves(peers)"
    opened = (
        ("what sends a wave, if there is one more", f"{SENDS} && wave < {last}) {{"),
        ("what finishes the one before", f"{FINISHES} && commdsl::finishes(here, peers, wave - 1)) {{"),
    )
    numbered = list(enumerate(routed))
    sends = [one for one in numbered if one[1].sends_wave]
    ends = [one for one in numbered if one[1].ends_wave]
    begin, end = min(sends + ends, key=itemgetter(0)), max(sends + ends, key=itemgetter(0))
    yield _line(routed[0], 0)
    yield Line("in one launch, and in the first of two", f"{SENDS}) {{")
    yield from (_line(phase, number, 1) for number, phase in numbered[1 : begin[0]])
    yield RECALLS
    yield Line("wave after wave", f"for (commdsl::i32 wave = 0; wave <= {last}; ++wave) {{")
    for opens, wave, of_wave in zip(opened, ("wave", "wave - 1"), (sends, ends), strict=True):
        yield Line(*opens, 1)
        yield from (_line(phase, number, 2, wave) for number, phase in of_wave)
        yield Line("", "}", 1)
    yield Line("", "}")
    yield Line("the first of two ends here", KEEPS)
    yield from (_line(phase, number) for number, phase in numbered[end[0] + 1 :])


def _line(phase: Routed, number: int, depth: int = 0, wave: str = "") -> Line:
    return Line(f"{number}: {phase.description}", phase.call(number, wave), depth)


@dataclass(frozen=True, slots=True)
class AgreeText:
    """What the template prints of the role that agrees: what it tells and meets, and whom it hears, a bit a rank."""

    tell: Line
    meet: Line
    width: int  # words of a rank
    heard: tuple[str, ...]


def agree_text(plan: Plan) -> AgreeText | None:
    """Of the role that agrees, if there is one: whom a rank hears is a row of bits."""
    if plan.lanes_tell:
        return None
    ranks, one = plan.num_ranks, plan.agree
    width = -(-ranks // 32)
    bits = np.zeros((ranks, 32 * width), np.uint8)
    bits[:, :ranks] = one.heard
    words = np.packbits(bits, axis=1, bitorder="little").view("<u4")
    tell = Line(one.told, f"commdsl::tell_call<Plan, {one.tells.code}>(args);")
    meet = Line(one.met, f"commdsl::meet_calls<Plan, {one.behind}>(args, number);")
    lines = tuple(", ".join(f"0x{word:x}u" for word in row) + "," for row in words.tolist())
    return AgreeText(tell, meet, width, lines)


def known(plan: Plan) -> str:
    """What a lane knows of its peers: by what its rows go."""
    return next((phase.peers for phase in plan.comm.routed if phase.peers), "Peers")


def tile_calls(plan: Plan) -> Iterator[Line]:
    """What every block of the role that computes runs, if there is one."""
    if plan.tiles is not None:
        yield Line(
            "tiles: the operations of the rank, round after round, for every lane that this block serves",
            "commdsl::run_tiles<Plan>(args, block, blocks);",
        )
