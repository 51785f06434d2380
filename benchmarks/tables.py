"""Turns the files under measured/ into the tables of every README: what stands between `<!-- measured: KIND NAMES -->`
and `<!-- end -->` is written by this, and by nobody else.

    python benchmarks/tables.py [--check]

With `--check` it writes nothing and fails where a README says something else than its files. Assumes a checkout. Does
not measure: a file that is not there is a sentence that says how it would come to be.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import (
    attention_report,
    compressed_report,
    experts_report,
    products_report,
    record,
    report,
    rms_norm_report,
    transformer_report,
    uneven_report,
)
from benchmarks.cases import TUNE_KEYS, parse_candidates, size_name
from benchmarks.dispatch_report import LEAST_OF_LIMIT as LEAST_RATE
from benchmarks.dispatch_report import LIMIT_FROM_ROWS, MOST_OF_NCCL, SMALL_ROWS, SMALL_US, rows_name
from benchmarks.record import MEASURED, ROOT, Record
from benchmarks.report import Kind, markdown, number

BLOCK = re.compile(r"(<!-- measured: (\w+)((?: \w+)+) -->\n).*?(<!-- end -->)", re.DOTALL)
Line = Mapping[str, str]

PUSH = "push to"
"""How what `link` has threads store to peers is named."""


class TableError(ValueError):
    """A README that asks for a table that there is not."""


# --- kinds of tables --------------------------------------------------------------------------------------------------


def collectives(found: Record) -> str:
    """Ours beside the peers and the limit, and whatever did not run."""
    rows = report.rows_of(found.lines)
    return "\n".join([markdown(*report.overview(rows)), *("\n" + fault for fault in report.faults(rows))])


def lengths(found: Record) -> str:
    """Microseconds a call over the number of calls of a graph."""
    rows = report.rows_of(found.lines)
    names = dict.fromkeys(result.name for row in rows for result in row.results if result.kind is not Kind.LIMIT)
    header = [f"{rows[0].case.collective}, {size_name(rows[0].case.nbytes)}", *(f"{row.case.calls}" for row in rows)]
    return markdown(
        [header[0], *(f"{calls} calls" for calls in header[1:])],
        [[name, *(number(row.time_of(name)) for row in rows)] for name in names],
    )


def sms(found: Record) -> str:
    """Bandwidth on so many SMs, and as a fraction of what all reach."""
    lines = []
    for row in report.rows_of(found.lines):
        ours = [result for result in row.results if result.kind is Kind.OURS]
        whole = next((row.bus(one) for one in ours if not _sms_of(one.name)), None)
        for result in ours:
            bus = row.bus(result)
            share = number(bus / whole if bus and whole else None, 2)
            said = result.name if result.status == "ok" else f"{result.name}: {result.status}"
            lines.append([row.case.collective.value, _sms_of(result.name) or "all", number(bus, 0), share, said])
    return markdown(["collective", "SMs", "GB/s", "of all", "what ran"], lines)


def _sms_of(name: str) -> str:
    return str(dict(parse_candidates([name])[0].tune).get(TUNE_KEYS[-1], ""))


def host(found: Record) -> str:
    """CPU microseconds of a call."""
    header = ["call", "us of CPU time (p10-p90)", "on the slowest rank"]
    lines = []
    for line in found.lines:
        timing = report.Timing(*(float(line[name]) for name in ("median_us", "p10_us", "p90_us")))
        lines.append([line["call"], str(timing), number(float(line["slowest_rank_us"]))])
    return markdown(header, lines)


def dispatches(found: Record) -> str:
    """Ours by way of putting, NCCL's better and the limit; `*` where a figure is missed."""
    rows: dict[tuple[str, int, int], list[Line]] = {}
    for line in found.lines:
        rows.setdefault((line["way"], int(line["rows"]), int(line["shard"])), []).append(line)
    header = ["way", "rows a rank", "shard", "MB", "put rows", "put packed", "NCCL", "limit"]
    header += ["of NCCL's time", "of the limit's rate", "of stores' rate", "GB/s"]
    return markdown(header, [_dispatch(*key, lines) for key, lines in rows.items()])


def _dispatch(way: str, rows: int, shard: int, lines: Sequence[Line]) -> list[str]:
    put, packed = (_least(line for line in lines if line["contender"].startswith(how)) for how in ("rows", "packed"))
    nccl, limit = (_least(line for line in lines if line["kind"] == kind) for kind in (Kind.PEER, Kind.LIMIT))
    stores = _least(line for line in lines if line["contender"].startswith(PUSH))
    ours = min((one for one in (put, packed) if one is not None), default=None)
    to_nccl = ours / nccl if ours and nccl else None
    share = limit / ours if ours and limit else None
    nbytes = int(lines[0]["port_bytes"])
    late = ours is not None and rows <= SMALL_ROWS and ours >= SMALL_US
    return [
        way,
        rows_name(rows),
        str(shard),
        number(nbytes / 1e6),
        ("*" if late else "") + number(put),
        number(packed),
        number(nccl),
        number(limit),
        ("*" if to_nccl and to_nccl > MOST_OF_NCCL else "") + number(to_nccl, 2),
        ("*" if share and share < LEAST_RATE and rows >= LIMIT_FROM_ROWS else "") + number(share, 2),
        number(stores / ours if stores and ours else None, 2),
        number(nbytes / ours / 1000 if ours else None, 0),
    ]


def _least(lines: Iterable[Line]) -> float | None:
    """Of the right results."""
    right = (line for line in lines if line["status"] == "ok" and line["median_us"])
    return min((float(line["median_us"]) for line in right), default=None)


def dispatch_host(found: Record) -> str:
    lines = [[line["call"], number(float(line["slowest_rank_us"]))] for line in found.lines]
    return markdown(["eager call", "us of CPU time on the slowest rank"], lines)


def documents(found: Record) -> str:
    """Every plan of every batch, as the run itself said it."""
    return markdown(list(found.lines[0]), [[*line.values()] for line in found.lines])


def overlap(found: Record) -> str:
    """Both in sequence over the best way to do both in one launch."""
    rows: dict[tuple[int, int], list[Line]] = {}
    for line in found.lines:
        rows.setdefault((int(line["bytes"]), int(line["tasks"])), []).append(line)
    lines = []
    for (nbytes, tasks), some in sorted(rows.items()):
        alone = {line["part"]: float(line["median_us"]) for line in some if not line["way"]}
        us, way = min((float(line["median_us"]), line["way"]) for line in some if line["way"])
        times = [alone["tasks"], alone["moves"], alone["sequence"], us]
        lines.append([size_name(nbytes), str(tasks), *map(number, times), number(alone["sequence"] / us, 2), way])
    return markdown(
        ["tensor", "tasks", "tasks alone", "reduce-scatter alone", "in sequence", "one launch", "gain", "way"], lines
    )


def visits(found: Record) -> str:
    """What each visit computes, alone and beside the transfers."""
    lines = []
    for line in found.lines:
        times = [float(line[name]) for name in ("alone_us", "transfers_us", "together_us")]
        above = f"{100 * (times[2] / max(times[:2]) - 1):.1f} %" if not line["problem"] else line["problem"]
        lines.append([line["compute"], line["way"], *(number(us, 0) for us in times), above])
    header = ["compute", "moved by", "compute alone", "transfers alone", "together", "above the larger"]
    return markdown(header, lines)


def attention(found: Record) -> str:
    """The fastest of commdsl's beside the floor and the peers."""
    return markdown(*attention_report.short(attention_report.results_of(found.lines)))


def experts(found: Record) -> str:
    """Every contender of commdsl's, the best of them beside the peers and the limit."""
    rows = experts_report.rows_of(found.lines)
    ours = dict.fromkeys(one.name for row in rows for one in row.results if one.kind is Kind.OURS)
    return markdown(*experts_report.overview(rows, [*ours]))


def products(found: Record) -> str:
    """Every contender beside the floor."""
    return markdown(*products_report.overview(products_report.rows_of(found.lines)))


def transformer(found: Record) -> str:
    """Ours beside plain collectives."""
    return markdown(*transformer_report.overview(transformer_report.rows_of(found.lines)))


def rms_norm(found: Record) -> str:
    """Every contender beside the better of NCCL's."""
    return markdown(*rms_norm_report.overview(rms_norm_report.rows_of(found.lines)))


def uneven(found: Record) -> str:
    """A line a collective and size."""
    return markdown(*uneven_report.overview(uneven_report.rows_of(found.lines)))


def compressed(found: Record) -> str:
    """float8 on the wire beside bfloat16."""
    return markdown(*compressed_report.overview(compressed_report.rows_of(found.lines)))


def planner(found: Record) -> str:
    lines = []
    for line in found.lines:
        even = " → ".join(f"{100 * float(line[f'above_mean_{when}']):.1f} %" for when in ("before", "after"))
        given = [line[name] for name in ("seconds", "balance_s", "read_back_s")]
        seconds = [number(float(one) if one else None) for one in given]
        sent = f"{line['gb_sent_before']} → {line['gb_sent_after']}"
        lines.append([line["lengths"], line["machine"], *seconds, even, sent])
    header = ["lengths", "machine", "seconds in all", "balancing", "reading the text", "attention above the mean"]
    return markdown([*header, "GB sent, every shard at home → as planned"], lines)


def routes(found: Record) -> str:
    """What new routes take the host, in milliseconds."""
    times = ("plan_ms", "tables_ms", "all_ms", "p90_ms")
    lines = [[line["ranks"], line["tokens"], *(f"{float(line[name]):.1f}" for name in times)] for line in found.lines]
    return markdown(["ranks", "tokens a rank", "plan and proof", "tables", "both", "p90"], lines)


def synthesis(found: Record) -> str:
    """The median machine and the worst."""
    lines = []
    for collective in dict.fromkeys(line["collective"] for line in found.lines):
        some = [line for line in found.lines if line["collective"] == collective]
        columns = [sorted(float(line[name]) for line in some) for name in ("ratio", "seconds")]
        cells = [f"{value:.2f}" for values in columns for value in (median(values), values[-1])]
        lines.append([collective, str(len(some)), *cells])
    header = ["collective", "machines", "time over the least, median", "largest"]
    return markdown([*header, "seconds, median", "most"], lines)


KINDS: dict[str, Callable[[Record], str]] = {
    "collectives": collectives,
    "lengths": lengths,
    "sms": sms,
    "host": host,
    "dispatches": dispatches,
    "dispatch_host": dispatch_host,
    "documents": documents,
    "overlap": overlap,
    "visits": visits,
    "attention": attention,
    "experts": experts,
    "products": products,
    "transformer": transformer,
    "rms_norm": rms_norm,
    "compressed": compressed,
    "uneven": uneven,
    "planner": planner,
    "routes": routes,
    "synthesis": synthesis,
}


@cache
def scaling(*names: str) -> str:
    """What the cost model makes of several files."""
    from benchmarks import scaling as study
    from benchmarks.scaling_model import GPUS_PER_NODE, Rail

    found = study.study([MEASURED / f"{name}.csv" for name in names], Rail(study.RAIL_US, study.RAIL_GB_PER_S))
    header, lines = study.details(found)
    far = [line for line in lines if line[0] == f"{study.NODES[-1]} x {GPUS_PER_NODE}"]
    fastest = [line for line in far if any(cell.startswith("*") for cell in line)]
    return "\n\n".join([markdown(*study.constants(found)), markdown(*study.growth(found)), markdown(header, fastest)])


# --- blocks -----------------------------------------------------------------------------------------------------------


def block(kind: str, names: Sequence[str]) -> str:
    """What stands in a README for these files."""
    missing = [name for name in names if not (MEASURED / f"{name}.csv").is_file()]
    if missing:
        files = ", ".join(f"`measured/{name}.csv`" for name in missing)
        return f"Not measured yet: `python benchmarks/all.py` writes {files}.\n"
    if kind == "scaling":
        return "\n" + scaling(*names) + "\n\n" + "\n".join(came_to_be(name) for name in names) + "\n"
    if kind not in KINDS or len(names) != 1:
        known = ", ".join(KINDS)
        raise TableError(f"`{kind} {' '.join(names)}`: expected one of {known} and a file, or scaling and files")
    return "\n" + KINDS[kind](record.read(MEASURED / f"{names[0]}.csv")) + "\n\n" + came_to_be(names[0]) + "\n"


def came_to_be(name: str) -> str:
    """Where a file is, and its facts."""
    facts = dict(record.read(MEASURED / f"{name}.csv").facts)
    command = facts.pop("command")
    told = ", ".join(f"{key} {value}" for key, value in facts.items() if value != record.NONE)
    return f"`measured/{name}.csv`: `{command}`; {told}."


def rewritten(text: str) -> str:
    """A README with its blocks as the files say."""

    def replaced(found: re.Match[str]) -> str:
        return found[1] + block(found[2], found[3].split()) + found[4]

    return BLOCK.sub(replaced, text)


def readmes() -> Iterator[Path]:
    """Every README of the repository; `.venv` and its like are none of it."""
    for path in sorted(ROOT.rglob("README.md")):
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts):
            yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a README differs")
    options = parser.parse_args()
    stale = []
    for path in readmes():
        text = path.read_text(encoding="utf-8")
        new = rewritten(text)
        if new != text:
            stale.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.write_text(new, encoding="utf-8")
    if options.check and stale:
        sys.exit(f"not what the files under measured/ say: {', '.join(stale)}; `python benchmarks/tables.py` mends it")
    print("\n".join(stale) or "all as measured")


if __name__ == "__main__":
    main()
