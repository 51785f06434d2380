"""Turns `tune` entries into a Tuning, refusing what the hardware does not have and what would change nothing.

Assumes `names` found nothing wrong. An override from outside the text is written out as entries of a text of its own,
so that it obeys the same laws under the same codes. Does not choose values that are left open; `lower` does.
"""

from __future__ import annotations

from collections.abc import Mapping

from commdsl.ir.resolve.evaluate import Evaluator, Scope
from commdsl.ir.resolve.faults import Faults, Poisoned, nearest
from commdsl.ir.schedules import Tuning
from commdsl.language import syntax as syn
from commdsl.language.records import dataclass
from commdsl.language.source import Source, Span
from commdsl.machine import carriers
from commdsl.machine.topology import Topology

KEYS = ("lanes", "threads", "tile", "protocol", "sms", "landing", "matmul")
"""What `tune` says of a schedule."""

OF_DISPATCH = ("threads", "sms", "tile", "put")
"""What it says of a dispatch, which has no lanes, and whose rows travel as `put` says."""

OF_KEYS = ("threads", "sms")
"""What it says of a dispatch by keys: each row goes straight to its place, by one warp."""

WORDS = {
    "put": ("rows", "packed"),
    "landing": ("cells", "place"),
    "matmul": ("kernel", "library", "push"),
}
"""The values of the entries that have no number, but for `protocol`, whose values are the carriers."""

SIZES = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
MOST_TILE = 64 * 2**20
MOST_THREADS = 1024

MOST_LANES_PER_SM = 8
"""Lanes wait for one another, so all are resident at once; more of them on an SM add no bytes in flight."""

OVERRIDE = "override of tune"
"""The name under which diagnostics show an override."""


def choices(key: str) -> tuple[str, ...]:
    """Return the values of an entry that has no number; none for the others."""
    return carriers.names() if key == "protocol" else WORDS.get(key, ())


@dataclass(frozen=True)
class Machine:
    """What tuned values are held to: the topology, the ranks of the schedule, and the SMs of its role if it has one."""

    topology: Topology
    ranks: int
    role: str | None
    role_sms: int | None  # None: no role, or one that was reported already


def override(given: Mapping[str, int | str]) -> tuple[syn.TuneEntry, ...]:
    """Entries as `tune` would have them; a tile is a number of bytes."""
    words = {
        key: f"{value} B" if key == "tile" and isinstance(value, int) else str(value) for key, value in given.items()
    }
    source = Source(OVERRIDE, "  ".join(f"{key} {word}" for key, word in words.items()))
    entries, start = list[syn.TuneEntry](), 0
    for key, value in given.items():
        first, last = start + len(key) + 1, start + len(key) + 1 + len(words[key])
        span = Span(source, first, last)
        made = _written(key, value, span)
        entries.append(
            syn.TuneEntry(syn.Name(key, span=Span(source, start, first - 1)), made, span=Span(source, start, last))
        )
        start = last + 2
    return tuple(entries)


def _written(key: str, value: int | str, span: Span) -> syn.Expr | syn.Quantity:
    if isinstance(value, str):
        return syn.Name(value, span=span)
    return syn.Quantity(value, "B", str(value), span=span) if key == "tile" else syn.Int(value, span=span)


def tuning(
    entries: tuple[syn.TuneEntry, ...],
    overriding: tuple[syn.TuneEntry, ...],
    machine: Machine,
    evaluator: Evaluator,
    scope: Scope,
    faults: Faults,
    keys: tuple[str, ...] = KEYS,
) -> Tuning:
    """All entries of a schedule or, with its `keys`, of a dispatch, then with those that override some of them."""
    reader = _Reader(machine, evaluator, scope, faults, keys)
    if not overriding:
        return reader.read(entries)
    reader.read(entries)  # a fault that is overridden is one all the same
    for entry in overriding:
        key, value = entry.key.text, entry.value
        if isinstance(value, syn.Name) and key in keys and not choices(key):  # nothing else has a name there
            wanted = "a number of bytes" if key == "tile" else "a plain number"
            faults.report("C109", f"`{key}` takes {wanted}", value.span, f"this is `{value.text}`")
    anew = {entry.key.text for entry in overriding}
    return reader.read((*(entry for entry in entries if entry.key.text not in anew), *overriding))


@dataclass(frozen=True)
class _Reader:
    machine: Machine
    evaluator: Evaluator
    scope: Scope
    faults: Faults
    keys: tuple[str, ...]

    def read(self, entries: tuple[syn.TuneEntry, ...]) -> Tuning:
        numbers, spans, words, seen = dict[str, int](), dict[str, Span](), dict[str, str](), set[str]()
        for entry in entries:
            key = entry.key.text
            try:
                self._check_key(entry, seen)
                seen.add(key)
                if choices(key):
                    words[key] = self._word(entry)
                else:
                    numbers[key], spans[key] = self._number(entry), entry.value.span
            except Poisoned:
                continue
        carrier = carriers.named(words["protocol"]) if "protocol" in words else carriers.DEFAULT
        if not carrier.runs_on_sms:
            for key in sorted(spans.keys() - {"tile"}):
                self.faults.report("C506", f"the copy engine has no `{key}`", spans[key], "has no effect")
        elif "lanes" in numbers:
            self._check_sharing(numbers, spans)
        if "threads" in numbers:
            self._check_block(numbers, spans)
        return Tuning(
            lanes=numbers.get("lanes"),
            threads=numbers.get("threads"),
            tile_bytes=numbers.get("tile"),
            carrier=carrier,
            sms=numbers.get("sms"),
            put=words.get("put"),
            landing=words.get("landing"),
            matmul=words.get("matmul"),
        )

    def _check_key(self, entry: syn.TuneEntry, seen: set[str]) -> None:
        key = entry.key.text
        if key not in self.keys:
            of = " of a dispatch" if self.keys in (OF_DISPATCH, OF_KEYS) else ""
            help = nearest(key, self.keys)
            self.faults.fail("C506", f"nothing{of} is tuned by `{key}`", entry.key.span, "has no effect", help=help)
        if key in seen:
            self.faults.fail("C506", f"`{key}` is tuned twice", entry.span, "one of the two has no effect")
        if key == "sms" and self.machine.role is not None:
            self.faults.fail("C506", f"the SMs are those of role `{self.machine.role}`", entry.span, "has no effect",
                             help="leave it out, or change the role")  # fmt: skip

    def _word(self, entry: syn.TuneEntry) -> str:
        key, span = entry.key.text, entry.value.span
        written = entry.value.text if isinstance(entry.value, syn.Name) else span.text
        allowed = choices(key)
        if written not in allowed:
            wanted = "a protocol" if key == "protocol" else " or ".join(f"`{word}`" for word in allowed)
            help = nearest(written, allowed)
            self.faults.fail("C505", f"expected {wanted}", span, f"`{written}` is none", help=help)
        if key == "protocol":
            self._check_carrier(carriers.named(written), span)
        return written

    def _check_carrier(self, carrier: carriers.Carrier, span: Span) -> None:
        if not carrier.crosses_nodes and self.machine.ranks > self.machine.topology.gpus_per_node:
            node = f"a node of `{self.machine.topology.name}` has {self.machine.topology.gpus_per_node}"
            label = f"{self.machine.ranks} ranks, {node}"
            reaching = ", ".join(f"`{name}`" for name in carriers.names(lambda one: one.crosses_nodes))
            self.faults.fail("C505", f"`{carrier.name}` is for the ranks of one node", span, label,
                             help=f"{reaching} reach other nodes")  # fmt: skip
        if not carrier.runs_on_sms and self.machine.role is not None:
            label = f"role `{self.machine.role}` would be idle"
            self.faults.fail("C506", "the copy engine runs on no SM", span, label,
                             help=f"leave out `on {self.machine.role}`, or tune another protocol")  # fmt: skip

    def _number(self, entry: syn.TuneEntry) -> int:
        key, value, faults = entry.key.text, entry.value, self.faults
        if isinstance(value, syn.Quantity):
            if key != "tile" or value.unit not in SIZES:
                wanted = "a size, for example `64 KB`" if key == "tile" else "a plain number"
                faults.fail("C109", f"`{key}` takes {wanted}", value.span, f"`{value.unit}` does not fit")
            number = round(value.value)
        elif key == "tile":
            faults.fail("C109", "`tile` takes a size, for example `64 KB`", value.span, "no unit")
        else:
            number = self.evaluator.constant(value, self.scope)
        sms = self.machine.topology.num_sms
        least, most, multiple = {
            "lanes": (1, sms * MOST_LANES_PER_SM, 1),
            "threads": (32, 1024, 32),
            "tile": (16, MOST_TILE, 16),
            "sms": (1, sms, 1),
        }[key]
        if not least <= number <= most or number % multiple:
            of = {
                "lanes": f": {MOST_LANES_PER_SM} on each of {sms} SMs",
                "sms": f": `{self.machine.topology.name}` has {sms} SMs",
            }.get(key, f", a multiple of {multiple}")
            faults.fail("C505", f"`{key}` is {least} to {most}{of}", value.span, f"this is {number}")
        return number

    def _check_sharing(self, numbers: Mapping[str, int], spans: Mapping[str, Span]) -> None:
        """The lanes are spread evenly over the SMs that are asked for, whoever asks."""
        sms = numbers.get("sms", self.machine.role_sms)
        if sms is None:
            return
        lanes, whose = numbers["lanes"], f"of role `{self.machine.role}`" if "sms" not in numbers else "asked for"
        label = f"{lanes} lanes on the {sms} SMs {whose}"
        if lanes % sms:
            near = [many for many in (lanes // sms * sms, (lanes // sms + 1) * sms) if many]
            self.faults.report("C505", "every SM runs equally many lanes", spans["lanes"], label,
                               help=f"{' or '.join(map(str, near))} lanes would fit")  # fmt: skip
        elif lanes > sms * MOST_LANES_PER_SM:
            self.faults.report("C505", f"an SM runs at most {MOST_LANES_PER_SM} lanes", spans["lanes"], label)

    def _check_block(self, numbers: Mapping[str, int], spans: Mapping[str, Span]) -> None:
        """The lanes of an SM are threads of one block."""
        lanes = numbers.get("lanes", 1)
        sms = numbers.get("sms", self.machine.role_sms) or min(lanes, self.machine.topology.num_sms)
        share, threads = -(-lanes // sms), numbers["threads"]
        if share * threads > MOST_THREADS:
            self.faults.report("C505", f"the lanes of an SM have at most {MOST_THREADS} threads together",
                               spans["threads"], f"{share} lanes of {threads} threads",
                               help=f"{MOST_THREADS // share // 32 * 32} threads would fit")  # fmt: skip
