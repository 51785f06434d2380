"""Turns document lengths and a machine into a balanced plan as `.comm` text, with a report of before and after.

Assumes nothing of its words. Does not run a plan. The plan is proved before it is written, by the laws that hold for a
text; a plan of ours that breaks one is our fault, not the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from commdsl import checks, compiler
from commdsl.commands import output, plan_view
from commdsl.commands.arguments import UsageError, parse_on
from commdsl.commands.budget import MOST_RANKS
from commdsl.commands.jobs import topology_of
from commdsl.commands.lengths import Documents, read
from commdsl.commands.new import is_name
from commdsl.commands.output import Exit
from commdsl.ir.plans import DispatchPlan, routing
from commdsl.ir.routes import Mask
from commdsl.language.diagnostics import InternalError
from commdsl.language.syntax import File, PlanDecl
from commdsl.machine.topology import NO_LINK, Topology, link_of, switch
from commdsl.planner import packing
from commdsl.planner.balance import Balance, Widths, balance, imbalance
from commdsl.planner.comm_text import comm_text
from commdsl.planner.documents import ROUNDS, CapacityError, Goal, balanced
from commdsl.planner.packing import Packing, PackingError, Terms, pack, packing_of, to_plan, whole

MOST_TOKENS = (1 << 31) - 1
"""Of a rank, and bytes of a row."""

TOO_LONG = "C604"
"""The code of a rank that has more of them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asks for; `name` and `mask` are None where it leaves them to the input."""

    ranks: int | None
    on: str | None
    name: str | None
    mask: Mask | None
    query_capacity: int | None
    key_capacity: int | None
    goal: Goal


@dataclass(frozen=True, eq=False)
class Planned:
    """A balanced plan, its text, and the loads with every shard at home and as planned."""

    plan: DispatchPlan
    text: str
    before: Balance
    after: Balance


def plan(words: tuple[str, ...], wanted: Wanted, out: Path | None, svg: Path | None, *, as_json: bool) -> Exit:
    """Writes the plan to `out`, or to standard output; the report goes to the other of the two streams."""
    with output.progress("reading", ROUNDS + 4) as advance:
        try:
            made = make(words, wanted, advance)
        except (PackingError, CapacityError) as error:
            raise UsageError(str(error)) from error
    if out is not None:
        out.write_text(made.text, encoding="utf-8")
    if svg is not None:
        from commdsl.cost.draw_plan import draw_plan  # 20 ms that only a picture needs

        svg.write_text(draw_plan(made.plan, made.before, made.after), encoding="utf-8")
    if as_json:
        output.say_json(to_json(made, out))
        return Exit.FINE
    if out is None:
        output.say(made.text.removesuffix("\n"))
    for line in (*plan_view.headline(made.plan, made.after), "", *plan_view.report(made.before, made.after)):
        output.tell(line, styled=True) if out is None else output.say(line, styled=True)
    above = imbalance(made.after.attention)
    if above > wanted.goal.tolerance:
        output.tell(f"attention stays {above * 100:.3g} % above the mean: {reason(made, wanted)}")
    for path in (path for path in (out, svg) if path is not None):
        output.tell(f"wrote {path}")
    return Exit.FINE


def reason(made: Planned, wanted: Wanted) -> str:
    """Why the tolerance is not met, as far as one can say."""
    topology = made.after.topology
    ranks = np.arange(topology.num_ranks)
    apart = (link_of(topology, ranks[:, None], ranks[None, :]) == NO_LINK) & (ranks[:, None] != ranks[None, :])
    if apart.any() and not wanted.goal.relay:
        return f"`{topology.name}` does not link all ranks; --relay lets the others send to each other, too"
    if wanted.query_capacity is not None or wanted.key_capacity is not None:
        return "the rows that ranks may receive allow no more"
    return f"no document is cut shorter than {wanted.goal.shortest} tokens"


def make(words: tuple[str, ...], wanted: Wanted, advance: Callable[[str], None]) -> Planned:
    """Reads, lays out, balances, proves and writes out; `advance` hears of each stage."""
    home, topology, terms = pack_anew(words, wanted)
    advance("counting what there is")
    before = balance(to_plan(home, whole(home), terms), topology, wanted.goal.widths)
    found = balanced(home, topology, wanted.goal, terms, advance)
    advance("proving")
    prove(found)
    after = balance(found, topology, wanted.goal.widths)
    advance("writing")
    return Planned(found, comm_text(found, tuple(comment(before, after))), before, after)


def pack_anew(words: tuple[str, ...], wanted: Wanted) -> tuple[Packing, Topology, Terms]:
    """Where the documents lie, on which machine, and what the plan is to say of itself."""
    terms = Terms(wanted.name or "balanced", wanted.mask or Mask.CAUSAL, wanted.query_capacity, wanted.key_capacity)
    if any(word.endswith(".comm") for word in words):
        return pack_again(words, wanted, terms)
    documents = read(words)
    if wanted.ranks is None and wanted.on is None:
        raise UsageError("for how many ranks? --ranks N, or --on TOPOLOGY")
    topology = machine(compiler.read_text("", "--on", Path()), wanted, wanted.ranks)
    if documents.length.sum(dtype=np.float64) > MOST_TOKENS * topology.num_ranks:
        raise UsageError(f"a rank has at most {MOST_TOKENS:,} tokens: plan for more ranks, or for fewer tokens")
    if documents.rank is None:
        packed = pack(documents.length, topology, wanted.goal.shortest, relay=wanted.goal.relay)
        return packed, topology, terms
    return given_packing(documents, topology.num_ranks), topology, terms


def pack_again(words: tuple[str, ...], wanted: Wanted, terms: Terms) -> tuple[Packing, Topology, Terms]:
    """The documents of a plan, to be balanced anew; it says the rest of itself, unless the command line does."""
    if len(words) > 1:
        raise UsageError("a .comm file has all documents of a plan: it stands alone")
    files = compiler.read(words[0])
    old = compiler.check_plan(files, compiler.choose_kind(files, None, PlanDecl)).plan
    if old.mask is None:
        raise UsageError(f"`{old.name}` is of rows only, without attention to balance: it is neither causal nor full")
    if wanted.ranks not in (None, old.num_ranks):
        raise UsageError(f"`{old.name}` is for {old.num_ranks} ranks, not {wanted.ranks}")
    terms = replace(
        terms,
        name=wanted.name or old.name,
        mask=wanted.mask or old.mask,
        query_capacity=wanted.query_capacity or old.query_capacity,
        key_capacity=wanted.key_capacity or old.key_capacity,
    )
    topology = machine(files, wanted, old.num_ranks)
    if topology.num_ranks != old.num_ranks:
        raise UsageError(f"`{old.name}` is for {old.num_ranks} ranks, `{topology.name}` has {topology.num_ranks}")
    return packing_of(old), topology, terms


def machine(files: tuple[File, ...], wanted: Wanted, ranks: int | None) -> Topology:
    """The topology named, shipped or of a file; a flat switch without a name."""
    if wanted.on is None:
        assert ranks is not None
        return switch(ranks)
    found = topology_of(files, wanted.on, ranks or compiler.DEFAULT_RANKS)
    if wanted.ranks not in (None, found.num_ranks):
        raise UsageError(f"--ranks {wanted.ranks}: `{found.name}` has {found.num_ranks}")
    return found


def given_packing(documents: Documents, num_ranks: int) -> Packing:
    """Every document on the rank that the input names."""
    assert documents.rank is not None
    wrong = np.flatnonzero((documents.rank < 0) | (documents.rank >= num_ranks) | (documents.length < 0))
    for index in wrong[:1].tolist():
        what = f"document {index} has {documents.length[index]} tokens on rank {documents.rank[index]}"
        raise UsageError(f"{what}, expected ranks 0 to {num_ranks - 1} and no negative length")
    order = np.argsort(documents.rank, kind="stable")
    return packing.packing(num_ranks, documents.rank[order], order, documents.length[order])


def prove(found: DispatchPlan) -> None:
    """Raises InternalError unless every law of a plan holds, UsageError where ranks have more tokens than they may."""
    diagnostics = (*checks.check_dispatch_plan(found), *checks.check_routing(found, routing(found)))
    if diagnostics and diagnostics[0].code == TOO_LONG:
        raise UsageError(f"{diagnostics[0].headline}: plan for more ranks, or for fewer tokens")
    if diagnostics:
        raise InternalError(f"the planner broke {diagnostics[0].code}: {diagnostics[0].headline}")


def comment(before: Balance, after: Balance) -> Iterator[str]:
    """The head of the file."""
    yield f"Balanced by `commdsl plan` for {after.topology.name}. The most of any rank, and by how much above the mean:"
    yield from plan_view.report_rows(before, after)


def to_json(made: Planned, out: Path | None) -> dict[str, object]:
    return {
        "plan": made.plan.name,
        "ranks": made.plan.num_ranks,
        "topology": made.after.topology.name,
        "documents": int(made.plan.document.max(initial=-1)) + 1,
        "shards": made.plan.shards.num,
        "before": plan_view.to_json(made.before),
        "after": plan_view.to_json(made.after),
        **({"text": made.text} if out is None else {"file": str(out)}),
    }


# --- the command line -------------------------------------------------------------------------------------------------


def parse(
    ranks: int | None,
    on: str | None,
    name: str | None,
    mask: str | None,
    tolerance: str,
    shortest: int,
    queries: int | None,
    keys: int | None,
    widths: str,
    relay: bool,
) -> Wanted:
    """The options as they are written; UsageError says what is expected."""
    if ranks is not None and ranks > MOST_RANKS:
        raise UsageError(f"--ranks {ranks}: more than are planned at once; --ranks {MOST_RANKS} would fit")
    if name is not None and not is_name(name, f"plan {name} for 1 ranks {{ causal }}"):
        raise UsageError(f"--name `{name}`: expected a name as in a .comm file")
    goal = Goal(parse_tolerance(tolerance), shortest, parse_widths(widths), relay)
    return Wanted(ranks, parse_on(on), name, Mask(mask) if mask else None, queries, keys, goal)


def parse_tolerance(text: str) -> float:
    """`2%` or `0.02`."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0.001 <= value < 10:
        raise UsageError(f"--tolerance expects a share such as `2%` or `0.02`, 0.1% or more, got `{text}`")
    return value


def parse_widths(text: str) -> Widths:
    """`8192,2048,2048`: bytes of a row of queries, keys and values."""
    words = text.split(",")
    if len(words) != 3 or not all(word.strip().isdigit() and 2 <= int(word) <= MOST_TOKENS for word in words):
        raise UsageError(f"--widths expects bytes of a row of queries, keys and values, `8192,2048,2048`, got `{text}`")
    return Widths(*map(int, words))
