"""Turns a dispatch plan and its loads into tables and pictures of characters: who sends what to whom.

Assumes a plan without a fault, and the loads of the same documents all staying at home to compare with. Shows the first
or the busiest of many, neighbours as one where ranks are many, and says so. Does not judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from commdsl.commands.arguments import Target, UsageError
from commdsl.commands.jobs import Job, topology_of
from commdsl.commands.output import count, style, tell
from commdsl.cost.draw_machine import Groups
from commdsl.ir.plans import DispatchPlan, Piece
from commdsl.ir.routes import NOWHERE, Longs, Sharing
from commdsl.language.syntax import File
from commdsl.machine.topology import NO_LINK, Topology, link_of
from commdsl.planner.balance import Balance, Widths, balance, imbalance
from commdsl.planner.packing import at_home

MOST_PAIRS = 16
MOST_DOCUMENTS = 16
MOST_SHARDS = 12
MOST_ROWS = 32  # of a picture
SHADES = " ·░▒▓█"
BAR = 30


def headline(plan: DispatchPlan, loads: Balance) -> Iterator[str]:
    """What the plan is."""
    away = int((plan.dest != plan.shards.rank[:, None])[plan.dest != NOWHERE].sum())
    documents = count(int(plan.document.max(initial=-1)) + 1, "document")
    machine = loads.topology.name + (", an idealised flat switch" if loads.topology.idealised else "")
    tokens = count(int(plan.shards.length.sum()), "token")
    yield f"{documents}, {tokens} in {count(plan.shards.num, 'shard')} on {plan.num_ranks} ranks of {machine}"
    if plan.mask is None:
        yield f"rows only; {away:,} go to another rank"
        return
    once = "once per rank" if plan.sharing is Sharing.RANK else "once per query"
    yield f"{plan.mask.value}, keys and values sent {once}; {count(away, 'shard')} of queries go to another rank"


# --- the report -------------------------------------------------------------------------------------------------------


def report(before: Balance, after: Balance) -> Iterator[str]:
    """The most of any rank and how far that is above the mean; bytes by link; with every shard at home, and planned."""
    heading, *rows = report_rows(before, after)
    yield style(heading, "strong")
    yield from rows
    widths = after.widths
    rows_are = f"a row is {widths.query:,} B of query, {widths.key:,} B of key, {widths.value:,} B of value"
    yield style(f"  most of a rank, and above the mean; one dispatch there, {rows_are}", "faint")


def report_rows(before: Balance, after: Balance) -> Iterator[str]:
    """The table of the report, its heading first."""
    yield f"{'':<26}{'every shard at home':>28}{'as planned':>28}"
    rows = (
        ("attention, token pairs", before.attention, after.attention),
        ("queries received, rows", before.query_rows, after.query_rows),
        ("keys received, rows", before.key_rows, after.key_rows),
        ("sent to others, bytes", before.sent_bytes, after.sent_bytes),
        ("received, bytes", before.received_bytes, after.received_bytes),
    )
    for title, old, new in rows:
        yield f"  {title:<24}{most(old):>28}{most(new):>28}"
    names = dict.fromkeys(link.name for link in (*after.links, *before.links))
    for name in names:
        title = f"over {name}, in all" if name else "without a link, in all"
        yield f"  {title:<24}{over(before, name):>28}{over(after, name):>28}"
    yield f"  {'least time':<24}{time_text(before.seconds):>28}{time_text(after.seconds):>28}"


def most(loads: Longs) -> str:
    """`1,234 +5.6 %`."""
    return f"{short(int(loads.max(initial=0)))} {imbalance(loads) * 100:>+7.1f} %"


def short(number: int) -> str:
    """A count as it is below ten million, then with a unit."""
    if number < 10**7:
        return f"{number:,}"
    power = min((len(str(number)) - 1) // 3, 6)
    return f"{number / 10 ** (3 * power):.3g} {' kMGTPE'[power]}"


def over(loads: Balance, name: str | None) -> str:
    found = [link.bytes for link in loads.links if link.name == name]
    return f"{short(sum(found))}B" if sum(found) >= 10**7 else f"{sum(found):,} B"


def time_text(seconds: float) -> str:
    if seconds == float("inf"):
        return "not over links"
    return f"{seconds * 1e6:,.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:,.3g} ms"


def to_json(loads: Balance) -> dict[str, object]:
    """Every number of the report, and each rank's."""
    return {
        "imbalance": {
            "attention": imbalance(loads.attention),
            "query_rows": imbalance(loads.query_rows),
            "key_rows": imbalance(loads.key_rows),
            "sent_bytes": imbalance(loads.sent_bytes),
            "received_bytes": imbalance(loads.received_bytes),
        },
        "links": [
            {
                "link": link.name,
                "query_rows": link.query_rows,
                "key_rows": link.key_rows,
                "bytes": link.bytes,
                "busiest": {"rank": link.port.rank, "sends": link.port.sends, "bytes": link.port.bytes},
                "seconds": link.seconds if np.isfinite(link.seconds) else None,
            }
            for link in loads.links
        ],
        "ranks": [
            dict(
                zip(
                    ("home_rows", "query_rows", "key_rows", "attention", "sent_bytes", "received_bytes"),
                    row,
                    strict=True,
                )
            )
            for row in np.stack(columns(loads), axis=1).tolist()
        ],
    }


def columns(loads: Balance) -> tuple[Longs, ...]:
    return loads.home_rows, loads.query_rows, loads.key_rows, loads.attention, loads.sent_bytes, loads.received_bytes


# --- who sends what to whom -------------------------------------------------------------------------------------------


def documents(plan: DispatchPlan) -> Iterator[str]:
    """The documents that leave their rank or are cut, as they are written; of many the longest."""
    dest, rank = plan.dest, plan.shards.rank[:, None]
    leaves = np.bincount(plan.piece, ((dest != rank) & (dest != NOWHERE)).any(axis=1), len(plan.pieces)) > 0
    cut = np.array([piece.num_shards > 1 for piece in plan.pieces], bool)
    rows = np.bincount(plan.piece, plan.shards.length, len(plan.pieces))
    shown = np.flatnonzero(leaves | cut)
    chosen = np.sort(shown[np.argsort(-rows[shown], kind="stable")][:MOST_DOCUMENTS])
    yield style("documents that leave their rank or are cut", "strong")
    for index in chosen.tolist():
        yield f"  {document(plan, plan.pieces[index])}"
    if len(shown) > len(chosen):
        yield f"  … and {len(shown) - len(chosen):,} shorter ones"
    yield f"  {count(len(plan.pieces) - len(shown), 'document')} or parts of one stay whole at home"


def document(plan: DispatchPlan, piece: Piece) -> str:
    """`rank 0  doc 16384  [0, 2048) → 0  [2048, 4096) → 1 ...`."""
    mine = range(piece.first_shard, piece.first_shard + piece.num_shards)
    words = [
        f"[{plan.context[shard]}, {plan.context[shard] + plan.shards.length[shard]}) → {dests(plan.dest[shard])}"
        for shard in islice(mine, MOST_SHARDS)
    ]
    more = f"  … and {piece.num_shards - MOST_SHARDS} more" if piece.num_shards > MOST_SHARDS else ""
    tokens = int(plan.shards.length[mine.start : mine.stop].sum())
    name = f" {piece.name}" if piece.name else ""
    return f"rank {plan.shards.rank[piece.first_shard]}  doc{name} {tokens}  {'  '.join(words)}{more}"


def dests(ranks: Longs) -> str:
    return " ".join(str(rank) for rank in ranks.tolist() if rank != NOWHERE) or "none"


def pairs(loads: Balance) -> Iterator[str]:
    """A line for each pair of ranks between which anything travels; of many those with the most bytes."""
    size = loads.bytes
    dest, source = np.nonzero((loads.query_counts + loads.key_counts) * (1 - np.eye(len(size), dtype=np.int64)))
    yield style("who sends what to whom", "strong")
    if not len(dest):
        yield "  nothing leaves its rank"
        return
    busiest = np.argsort(-size[dest, source], kind="stable")[:MOST_PAIRS]
    busiest = busiest[np.lexsort((dest[busiest], source[busiest]))]
    link = link_of(loads.topology, source, dest)
    yield f"  {'from':>6}{'to':>6}{'query rows':>14}{'key rows':>14}{'bytes':>18}  link"
    for index in busiest.tolist():
        at = dest[index], source[index]
        name = "none" if link[index] == NO_LINK else loads.topology.links[link[index]].name
        numbers = f"{loads.query_counts[at]:>14,}{loads.key_counts[at]:>14,}{size[at]:>18,}"
        yield f"  {source[index]:>6}{dest[index]:>6}{numbers}  {name}"
    if len(dest) > len(busiest):
        rest = int(size[dest, source].sum() - size[dest[busiest], source[busiest]].sum())
        yield f"  … and {len(dest) - len(busiest):,} more pairs with {short(rest)}B in all"


def picture(loads: Balance) -> Iterator[str]:
    """Bytes from each rank (row) to each (column) as shades, what stays on a rank as a dash."""
    groups = groups_of(loads)
    size = grouped(grouped(loads.bytes, groups).T, groups).T
    top = int(size.max(initial=0))
    yield style("bytes from (rows) to (columns)", "strong") + f", █ is {short(top)}B"
    width = 2 if groups.count <= 16 else 1
    label = max(len(groups.label(index)) for index in range(groups.count)) + 2
    for source in range(groups.count):
        cells = [shade(int(size[dest, source]), top) if dest != source else "–" for dest in range(groups.count)]
        yield f"{groups.label(source):>{label}}  {''.join(cell * width for cell in cells)}".rstrip()


def shade(value: int, top: int) -> str:
    """Nothing for nothing, the faintest dot for the least, a full block for the most."""
    return SHADES[0] if not value else SHADES[1 + min(value * (len(SHADES) - 1) // top, len(SHADES) - 2)]


def ranks(before: Balance, after: Balance) -> Iterator[str]:
    """A line a rank: its rows, its attention as a bar beside the mean, what it sends and receives."""
    groups = groups_of(after)
    each = [np.array(worst(column, groups)) for column in columns(after)]
    was = worst(before.attention, groups)
    mean = max(float(after.attention.mean()), 1e-9)
    scale = BAR / max(*each[3].tolist(), mean)
    noun = "rank" if groups.size == 1 else "ranks, the most of one"
    yield style("load", "strong") + f"  {noun}; attention in percent of the mean"
    heads = f"{'home rows':>12}{'queries':>12}{'keys':>12}{'sends B':>12}{'receives B':>12}"
    yield f"  {'':>9}{heads}{'at home':>9}{'planned':>9}"
    for index in range(groups.count):
        rows = "".join(f"{short(int(each[column][index])):>12}" for column in (0, 1, 2, 4, 5))
        share, old = each[3][index] / mean * 100, was[index] / mean * 100
        bar = "█" * round(float(each[3][index]) * scale)
        yield f"  {groups.label(index):>9}{rows}{old:>9.1f}{share:>9.1f}  {bar}"


def groups_of(loads: Balance) -> Groups:
    return Groups(len(loads.attention), -(-len(loads.attention) // MOST_ROWS))


def grouped(values: Longs, groups: Groups) -> Longs:
    """Sums of neighbouring rows."""
    return np.add.reduceat(values, np.arange(0, len(values), groups.size), axis=0)


def worst(values: Longs, groups: Groups) -> list[int]:
    """The most of neighbours."""
    found: list[int] = np.maximum.reduceat(values, np.arange(0, len(values), groups.size)).tolist()
    return found


def view(plan: DispatchPlan, before: Balance, after: Balance) -> Iterator[str]:
    """All of it, for `commdsl show`."""
    yield style(plan.name, "accent") + f" · {plan.span}"
    yield from headline(plan, after)
    for part in (documents(plan), pairs(after), picture(after), ranks(before, after), report(before, after)):
        yield ""
        yield from part


# --- what `show` shows ------------------------------------------------------------------------------------------------


def page(job: Job, plan: DispatchPlan, target: Target, svg: Path | None) -> tuple[str, dict[str, object]]:
    """A plan beside its documents all at home, as text and as JSON, and drawn where asked."""
    topology = machine(job.files, target, plan)
    before, after = (balance(one, topology, Widths()) for one in (at_home(plan), plan))
    if svg is not None:
        draw(svg, plan, before, after)
    shards = plan.shards
    columns = (
        shards.rank.tolist(),
        plan.document.tolist(),
        plan.context.tolist(),
        shards.length.tolist(),
        plan.dest.tolist(),
    )
    facts: dict[str, object] = {
        "file": str(job.path),
        "plan": plan.name,
        "ranks": plan.num_ranks,
        "topology": topology.name,
        "stage": "ir",
        "shards": [
            {
                "rank": rank,
                "document": document,
                "begin": begin,
                "length": length,
                "dest": [to for to in dest if to >= 0],
            }
            for rank, document, begin, length, dest in zip(*columns, strict=True)
        ],
        "before": to_json(before),
        "after": to_json(after),
    }
    return "\n".join(view(plan, before, after)), facts


def machine(files: tuple[File, ...], target: Target, plan: DispatchPlan) -> Topology:
    """The topology asked for, which has the plan's ranks: a plan is for one number of them."""
    if target.ranks not in (None, (plan.num_ranks,)):
        raise UsageError(f"`{plan.name}` is for {plan.num_ranks} ranks: leave --ranks out")
    found = topology_of(files, target.on, plan.num_ranks)
    if found.num_ranks != plan.num_ranks:
        raise UsageError(f"`{plan.name}` is for {plan.num_ranks} ranks, `{found.name}` has {found.num_ranks}")
    return found


def draw(path: Path, plan: DispatchPlan, before: Balance, after: Balance) -> None:
    from commdsl.cost.draw_plan import draw_plan  # 20 ms that only a picture needs

    path.write_text(draw_plan(plan, before, after), encoding="utf-8")
    tell(f"drew {path}")
