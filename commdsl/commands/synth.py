"""Turns a collective and a machine into a schedule as `.comm` text, which is proved before it is written.

Assumes nothing of its words. What comes of it, and how near it is to the least time, stands above the schedule.
Does not measure it. A text of ours that breaks a law is our fault, not the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from textwrap import wrap

import numpy as np

from commdsl import compiler
from commdsl.commands import output
from commdsl.commands.arguments import UsageError, parse_on
from commdsl.commands.jobs import topology_of
from commdsl.commands.new import is_name
from commdsl.commands.output import Exit
from commdsl.commands.report import cost_lines, time_text
from commdsl.commands.summary import cost_json
from commdsl.compiler import CheckedSchedule
from commdsl.cost.flows import can_flow
from commdsl.cost.report import Report
from commdsl.language.diagnostics import CommError, InternalError
from commdsl.language.format import format_file
from commdsl.language.records import dataclass
from commdsl.machine.topology import Topology
from commdsl.planner.synthesis.collectives import Collective, ways
from commdsl.planner.synthesis.text import Way, comm_text
from commdsl.planner.synthesis.wires import UnreachedError

MOST_RANKS = 32
"""Of more ranks a file of trees is too long to be read."""

COMMENT_WIDTH = 118

TITLES = {
    Collective.ALLGATHER: "All-gather",
    Collective.REDUCESCATTER: "Reduce-scatter",
    Collective.ALLREDUCE: "All-reduce",
    Collective.BROADCAST: "Broadcast",
    Collective.REDUCE: "Reduce",
}

NO_TREES = {
    "alltoall": "what one rank has for another is nobody else's, so no tree serves it: see `alltoall_direct`",
    "gather": "nothing is copied or added up on its way, so no tree serves it: see `gather_direct`",
    "scatter": "nothing is copied or added up on its way, so no tree serves it: see `scatter_direct`",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asks for."""

    collective: Collective
    on: str
    name: str | None
    root: int


@dataclass(frozen=True, slots=True)
class Made:
    """A schedule's name, its file, and what it costs."""

    name: str
    text: str
    costs: Report


def synth(wanted: Wanted, out: Path | None, *, as_json: bool) -> Exit:
    """Writes the schedule to `out`, or to standard output; the report goes to the other of the two streams."""
    made = make(wanted)
    if out is not None:
        out.write_text(made.text, encoding="utf-8")
    if as_json:
        where = {"text": made.text} if out is None else {"file": str(out)}
        ranks = made.costs.num_ranks
        output.say_json({"schedule": made.name, "ranks": ranks, "cost": cost_json(made.costs), **where})
        return Exit.FINE
    if out is None:
        output.say(made.text.removesuffix("\n"))
    for line in cost_lines(made.costs):
        output.tell(line, styled=True) if out is None else output.say(line, styled=True)
    if out is not None:
        output.tell(f"wrote {out}; next: commdsl run {out}:{made.name} --on {wanted.on}")
    return Exit.FINE


def make(wanted: Wanted) -> Made:
    """Packs, proves and writes out."""
    if not can_flow():
        raise UsageError("trees are packed by maximum flows, which need scipy: pip install 'commdsl[bounds]'")
    topology = topology_of((), wanted.on, compiler.DEFAULT_RANKS)
    if not 2 <= topology.num_ranks <= MOST_RANKS:
        raise UsageError(f"`{topology.name}` has {topology.num_ranks} ranks; 2 to {MOST_RANKS} can be synthesised")
    if not 0 <= wanted.root < topology.num_ranks:
        raise UsageError(f"--root {wanted.root}: the ranks of `{topology.name}` are 0 to {topology.num_ranks - 1}")
    name = wanted.name or f"{wanted.collective.value}_{topology.name}"
    try:
        found = ways(wanted.collective, topology, wanted.root)
    except UnreachedError as error:
        raise UsageError(f"`{topology.name}` does not join all ranks: {error}") from error
    costs = prove(comm_text(name, found), name, wanted.on, topology)
    return Made(name, canonical(comm_text(name, found, tuple(comment(wanted, costs, found)))), costs)


def prove(text: str, name: str, on: str, topology: Topology) -> Report:
    """What it costs. Raises InternalError unless every law holds."""
    try:
        checked = compiler.check(compiler.read_text(text, f"{name}.comm", Path()), name, topology.num_ranks, on)
    except CommError as error:
        found = error.diagnostics[0]
        raise InternalError(f"the synthesis broke {found.code}: {found.headline}") from error
    assert isinstance(checked, CheckedSchedule)
    return checked.report


def canonical(text: str) -> str:
    return format_file(compiler.read_text(text, "", Path())[0])


def comment(wanted: Wanted, costs: Report, found: tuple[Way, ...]) -> Iterator[str]:
    """The head of the file: what it is, how good it is, and how to read it."""
    made = found[0].made
    least = time_text(0, costs.limit.seconds_per_byte).removeprefix("0 us + ")
    is_whole = made.root is not None or len(found) > 1
    count = len(made.trees) if is_whole else made.pieces
    of = f"{'The tensor is' if is_whole else 'Blocks are'} cut into {count} x K parts"
    for line in (
        f"{TITLES[wanted.collective]} on {costs.topology}, by `commdsl synth`: trees, packed to what links leave.",
        f"{costs.num_steps} steps, {time_text(costs.latency, costs.seconds_per_byte)}. Of any schedule the links take "
        f"{least} or more ({costs.limit.reason}); of this one {costs.bandwidth_ratio:.2f} times that.",
        *(_of_both(costs, found) if len(found) > 1 else ()),
        f"{of}: a piece for each tree, whose K parts follow each other a step apart. "
        "Rank r of tree t has them from `parent`, a root from itself; in the step `turn` it hands them to its "
        "children, or adds up what they have.",
    ):
        yield from wrap(line, COMMENT_WIDTH)


def _of_both(costs: Report, found: tuple[Way, ...]) -> Iterator[str]:
    """Of sums that come in and then go out: how they are shared out, and how near this is to the least of such."""
    given = found[0].made.given
    of = "Every rank adds up and hands out as much"
    if np.ptp(given):
        shares = " ".join(map(str, given.tolist()))
        of = f"Of {given.sum()} equal blocks the ranks add up and hand out {shares}, those with slow links most"
    least = sum(way.made.least for way in found) / float(given.sum())
    takes = time_text(0, least).removeprefix("0 us + ")
    yield (
        f"{of}: what comes in so and then goes out takes {takes} or more along any trees; this one "
        f"{costs.seconds_per_byte / least:.2f} times that."
    )


# --- the command line -------------------------------------------------------------------------------------------------


def parse(collective: str, on: str | None, name: str | None, root: int | None) -> Wanted:
    """The words as they are written; UsageError says what is expected."""
    known = {one.value: one for one in Collective}
    word = collective.lower().replace("-", "").replace("_", "")
    if word in NO_TREES:
        raise UsageError(f"{collective} is not synthesised: {NO_TREES[word]}")
    if word not in known:
        close = get_close_matches(word, known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"there is {', '.join(known)}"
        raise UsageError(f"no trees are packed for `{collective}`: {hint}")
    if on is None:
        raise UsageError("for which machine? --on TOPOLOGY; `commdsl list` names those that are shipped")
    if root is not None and not known[word].is_rooted:
        raise UsageError(f"--root is for broadcast and reduce, not for {word}")
    if name is not None and not is_name(name, f"schedule {name} for P ranks {{}}"):
        raise UsageError(f"--name `{name}`: expected a name as in a .comm file")
    return Wanted(known[word], parse_on(on) or on, name, root or 0)
