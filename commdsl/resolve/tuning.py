"""Turns `tune` entries into a Tuning, refusing what the hardware does not have and what would change nothing.

Assumes `names` found nothing wrong. Does not choose values that `tune` leaves open; `lower` does.
"""

from __future__ import annotations

from commdsl import syntax as syn
from commdsl.ir import Tuning
from commdsl.resolve.evaluate import Evaluator, Scope
from commdsl.resolve.faults import Faults, Poisoned, nearest
from commdsl.topology import Topology

KEYS = ("lanes", "threads", "tile", "protocol")
SIZES = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
MOST_TILE = 64 * 2**20


def tuning(
    entries: tuple[syn.TuneEntry, ...],
    role: str | None,
    topology: Topology,
    evaluator: Evaluator,
    scope: Scope,
    faults: Faults,
) -> Tuning:
    """All entries of a schedule together."""
    numbers, protocol, seen = dict[str, int](), None, set[str]()
    for entry in entries:
        key = entry.key.text
        try:
            _check_key(entry, seen, role, faults)
            seen.add(key)
            if key == "protocol":
                protocol = _protocol(entry, faults)
            else:
                numbers[key] = _number(entry, topology, evaluator, scope, faults)
        except Poisoned:
            continue
    return Tuning(numbers.get("lanes"), numbers.get("threads"), numbers.get("tile"), protocol)


def _check_key(entry: syn.TuneEntry, seen: set[str], role: str | None, faults: Faults) -> None:
    key = entry.key.text
    if key not in KEYS:
        faults.fail("C506", f"nothing is tuned by `{key}`", entry.key.span, "has no effect", help=nearest(key, KEYS))
    if key in seen:
        faults.fail("C506", f"`{key}` is tuned twice", entry.span, "one of the two has no effect")
    if key == "lanes" and role is not None:
        faults.fail("C506", f"the lanes are the SMs of role `{role}`", entry.span, "has no effect",
                    help="leave it out, or change the role")  # fmt: skip


def _protocol(entry: syn.TuneEntry, faults: Faults) -> str:
    written = entry.value.text if isinstance(entry.value, syn.Name) else entry.value.span.text
    if written == "packet":
        faults.fail(
            "C910", "the packet protocol is not yet emitted", entry.value.span, "only `bulk` is", help="write `bulk`"
        )
    if written != "bulk":
        faults.fail("C505", "expected a protocol", entry.value.span, f"`{written}` is none", help="there is `bulk`")
    return written


def _number(entry: syn.TuneEntry, topology: Topology, evaluator: Evaluator, scope: Scope, faults: Faults) -> int:
    key, value = entry.key.text, entry.value
    if isinstance(value, syn.Quantity):
        if key != "tile" or value.unit not in SIZES:
            wanted = "a size, for example `64 KB`" if key == "tile" else "a plain number"
            faults.fail("C109", f"`{key}` takes {wanted}", value.span, f"`{value.unit}` does not fit")
        number = round(value.value)
    elif key == "tile":
        faults.fail("C109", "`tile` takes a size, for example `64 KB`", value.span, "no unit")
    else:
        number = evaluator.constant(value, scope)
    least, most, multiple = {"lanes": (1, topology.num_sms, 1), "threads": (32, 1024, 32), "tile": (16, MOST_TILE, 16)}[
        key
    ]
    if not least <= number <= most or number % multiple:
        of = f", a multiple of {multiple}" if multiple > 1 else f": `{topology.name}` has {most} SMs"
        faults.fail("C505", f"`{key}` is {least} to {most}{of}", value.span, f"this is {number}")
    return number
