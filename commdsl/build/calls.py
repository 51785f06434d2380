"""Turns the phases of a role into the calls that its lanes make, in order: text for the template.

Assumes a proved Plan. Does not choose anything: who acts, who is told and who is waited for stands in the phases. Every
wait and every word of a kernel comes from here, or from the tables of `Moves`; the bodies in the headers have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from commdsl.ir.functions import ROWWISE, Extent
from commdsl.language.diagnostics import InternalError
from commdsl.program.by_row import ByRow
from commdsl.program.halves import cut_of
from commdsl.program.memory import Counters, Words
from commdsl.program.phases import (
    Actor,
    AddUp,
    Count,
    Each,
    FillByKey,
    Finish,
    FinishBack,
    Forward,
    Host,
    Meet,
    Push,
    PushAgain,
    PushBack,
    PushByKey,
    PushStraight,
    Ranks,
    Read,
    Routed,
    Tell,
)
from commdsl.program.plan import Plan
from commdsl.program.waves import ends_wave, num_waves, sends_wave
from commdsl.program.wording import described

RANKS = {Ranks.OWN: "commdsl::Ranks::kOwn", Ranks.OTHERS: "commdsl::Ranks::kOthers", Ranks.ALL: "commdsl::Ranks::kAll"}
BACK = {Each.ENTRY: "rows", Each.RANK: "sums", Each.NODE: "sums", Each.WORD: "words"}


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
    routed = tuple(phase for phase in plan.comm.phases if isinstance(phase, Routed))
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
    opened = {
        sends_wave: ("what sends a wave, if there is one more", f"{SENDS} && wave < {last}) {{"),
        ends_wave: ("what finishes the one before", f"{FINISHES} && commdsl::finishes(here, peers, wave - 1)) {{"),
    }
    numbered = list(enumerate(routed))
    begin, end = (index(one for one in numbered if sends_wave(one[1]) or ends_wave(one[1])) for index in (min, max))
    yield _line(routed[0], 0)
    yield Line("in one launch, and in the first of two", f"{SENDS}) {{")
    yield from (_line(phase, number, 1) for number, phase in numbered[1 : begin[0]])
    yield RECALLS
    yield Line("wave after wave", f"for (commdsl::i32 wave = 0; wave <= {last}; ++wave) {{")
    for is_of, opens in opened.items():
        yield Line(*opens, 1)
        wave = "wave" if is_of is sends_wave else "wave - 1"
        yield from (_line(phase, number, 2, wave) for number, phase in numbered if is_of(phase))
        yield Line("", "}", 1)
    yield Line("", "}")
    yield Line("the first of two ends here", KEEPS)
    yield from (_line(phase, number) for number, phase in numbered[end[0] + 1 :])


def _line(phase: Routed, number: int, depth: int = 0, wave: str = "") -> Line:
    return Line(f"{number}: {described(phase)}", _call(phase, number, wave), depth)


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
    tell = Line(one.told, f"commdsl::tell_call<Plan, {RANKS[one.tells]}>(args);")
    meet = Line(one.met, f"commdsl::meet_calls<Plan, {one.behind}>(args, number);")
    lines = tuple(", ".join(f"0x{word:x}u" for word in row) + "," for row in words.tolist())
    return AgreeText(tell, meet, width, lines)


def known(plan: Plan) -> str:
    """What a lane knows of its peers: by what its rows go."""
    for phase in plan.phases:
        if isinstance(phase, PushByKey):
            return "Keyed"
        if isinstance(phase, PushAgain):
            return "Again"
        if isinstance(phase, PushBack):
            return "Returning"
    return "Peers"


def tile_calls(plan: Plan) -> Iterator[Line]:
    """What every block of the role that computes runs, if there is one."""
    if plan.tiles is not None:
        yield Line(
            "tiles: the operations of the rank, round after round, for every lane that this block serves",
            "commdsl::run_tiles<Plan>(args, block, blocks);",
        )


def _call(phase: Routed, number: int, wave: str = "") -> str:
    given = f"here, peers, {wave}" if wave else "here, peers"
    match phase:
        case Read(what=Counters()):
            return (
                "const commdsl::Call<Plan> here = commdsl::read_calls<Plan>(args, lane);\n"
                "  if (!commdsl::begin(here)) return;"
            )
        case Read():
            return f"{_guard(phase.by)}commdsl::read_{phase.what.name}(here, peers);"
        case Tell(what=Counters(is_shared=False, name="calls")):
            return f"{_guard(phase.by)}commdsl::tell_calls(here);"
        case Tell(what=Words(name="addresses")):
            # A lane prepares what it knows of itself while its peers read where its results are.
            told = f"{_guard(phase.by)}commdsl::tell_addresses<{RANKS[phase.to]}>(here, peers);"
            return f"{told}\n  commdsl::prepare(here, peers);"
        case Tell():
            if isinstance(phase.what, Words):
                given = "here, peers"
            elif not wave:
                given = "here"
            return f"{_guard(phase.by)}commdsl::tell_{phase.what.name}<{RANKS[phase.to]}>({given});"
        case Meet():
            told = f"commdsl::meet_{phase.what.name}<{number}, {RANKS[phase.of]}, {phase.calls_back}>({given})"
            who = (
                "lane == 0 && "
                if phase.by is Actor.FIRST
                else "lane != 0 && here.is_busy() && "
                if phase.is_spare
                else ""
            )
            return f"if ({who}!{told}) return;"
        case Push():
            return "commdsl::push_waiting(here, peers, ahead);"
        case PushStraight():
            return "commdsl::push_straight(here, peers, ahead);"
        case Count():
            return "commdsl::count(here, peers);"
        case PushByKey():
            return "commdsl::push_by_key(here, peers);"
        case PushAgain():
            return "commdsl::push_again(here, peers);"
        case Forward():
            return "commdsl::forward(here, peers);"
        case AddUp():
            return "commdsl::add_up(here, peers);"
        case FillByKey():
            return "commdsl::fill(here, peers);"
        case PushBack():
            return f"commdsl::push_{BACK[phase.each]}({given});"
        case FinishBack():
            return f"commdsl::finish_{BACK[phase.each]}({given});"
        case Finish():
            done = "finish(here)" if phase.left is None else "finish_beside(here, peers, ahead)"
            return f"{'if (here.is_busy()) ' if phase.is_spare else ''}commdsl::{done};"
        case Host():
            raise InternalError(f"{phase.name} is the caller's, not the lanes'")
        case _:
            assert_never(phase)


def _guard(by: Actor) -> str:
    return "if (lane == 0) " if by is Actor.FIRST else ""
