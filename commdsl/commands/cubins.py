"""Turns what was proved into cubins for named architectures, each under the key that it is found by where it runs.

Assumes NVRTC here, and the same commdsl there: another one finds none of them, and builds its own. Does not write
files, and builds nothing for NVSHMEM's transport, whose part is linked on the machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from commdsl.build import nvrtc
from commdsl.build.emit import Emitted, defines
from commdsl.commands.arguments import UsageError
from commdsl.compiler import Checked, CompiledDispatch, CompiledSchedule
from commdsl.machine import dtypes
from commdsl.machine.config import from_environment
from commdsl.program.moves import Moves
from commdsl.program.plan import Plan
from commdsl.program.visited import launches, plan_of, segments

SUMMED = ("float32", "float16", "bfloat16")
"""What a dispatch adds up."""

"""The first architecture with bulk copies through shared memory."""


@dataclass(frozen=True, slots=True)
class Variants:
    """For what kernels are built: architectures (none: no kernels), element types and reductions."""

    archs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = SUMMED
    ops: tuple[str, ...] = ("sum", "avg")


@dataclass(frozen=True, slots=True)
class Cubin:
    """One kernel, built."""

    key: str  # of what it was built from
    arch: str
    file: str
    content: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def parse(archs: str | None, types: str | None, ops: str | None) -> Variants:
    """Lists of words, `sm_90,sm_100`. Raises UsageError for what NVRTC, or commdsl, does not have."""
    if archs is None:
        if types is not None or ops is not None:
            raise UsageError("--dtype and --op say which kernels --arch builds: name an architecture")
        return Variants()
    found = Variants(_words(archs), _words(types or ",".join(SUMMED)), _words(ops or "sum,avg"))
    known = {"--arch": nvrtc.architectures(), "--dtype": tuple(dtypes.BY_NAME), "--op": dtypes.OPS}
    for option, words in zip(known, (found.archs, found.dtypes, found.ops), strict=True):
        for word in words:
            if word not in known[option]:
                raise UsageError(f"{option} expects some of {', '.join(known[option])}, got `{word}`")
    return found


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def build(name: str, checked: Checked, variants: Variants) -> Iterator[Cubin]:
    """Every kernel that a declaration may need for them, for the number of ranks it was proved for."""
    config = replace(from_environment(), debug=False)
    for arch, (number, emitted, macros) in product(variants.archs, _kernels(checked, variants)):
        key = nvrtc.key_ahead(emitted, macros, config, arch)
        words = [macro.partition("=")[::2] for macro in macros]
        parts = [f"rank{value}" if what == "COMMDSL_RANK" else value for what, value in words]
        stem = f"{name}_{number}" if number else name
        content = nvrtc.build(emitted, macros, config, arch).read_bytes()
        yield Cubin(key, arch, ".".join((stem, arch, *parts, "cubin")), content)


def _kernels(checked: Checked, variants: Variants) -> list[tuple[int, Emitted, tuple[str, ...]]]:
    """Texts, numbered, and what each is built with."""
    match checked:
        case CompiledSchedule():
            found = [
                (text, macros)
                for plan, text, types in _launched(checked, variants)
                for macros in _macros(plan, replace(variants, dtypes=types))
            ]
        case CompiledDispatch(emitted=emitted, emitted_back=back, emitted_values=values, emitted_again=again):
            summed = [(f"COMMDSL_DTYPE={dtype}",) for dtype in variants.dtypes if dtype in SUMMED]
            there = [()] if again is not None else [(), *summed]
            found = [(emitted, macros) for macros in there]
            found += [] if back is None else [(back, macros) for macros in summed]
            found += [(text, ()) for text in (values, again) if text is not None]
        case _:
            found = []  # a plan is data
    texts = list(dict.fromkeys(text for text, _ in found))
    return [(texts.index(text), text, macros) for text, macros in found]


def _launched(checked: CompiledSchedule, variants: Variants) -> list[tuple[Plan, Emitted, tuple[str, ...]]]:
    """What a call may launch: all at once, and, where it stops at yields, each stretch between them; and in which
    element types, those declared for what is moved or else those that are asked for.
    """
    visits = checked.visits
    whole = [] if checked.plan.is_visited else [(checked.plan, checked.emitted, variants.dtypes)]
    if visits is None:
        return list(whole)
    types: dict[Moves, dict[str, None]] = {}
    for launch in launches(visits):
        element = launch.moved.unit.element
        types.setdefault(launch.moves, {}).update(dict.fromkeys(variants.dtypes if element is None else (element,)))
    parts = zip(segments(visits), checked.launched, strict=True)
    return [*whole, *((plan_of(visits, moves), text, tuple(types[moves])) for moves, text in parts)]


def _macros(plan: Plan, variants: Variants) -> list[tuple[str, ...]]:
    """As a rank of the GPU asks for them; where nothing is reduced there is no element type."""
    carrier = plan.moves.carrier
    for arch in variants.archs:
        if not carrier.runs_on(int(arch.removeprefix("sm_")) // 10):
            raise UsageError(f"`{plan.name}` is tuned to `protocol {carrier.name}`, which {arch} does not have")
    asked = product(variants.dtypes, variants.ops, range(plan.num_ranks))
    pairs = [one for one in asked if one[1] in dtypes.BY_NAME[one[0]].ops or not plan.moves.has_reduction]
    if plan.moves.casts is not None:
        pairs = [one for one in pairs if dtypes.BY_NAME[one[0]].casts]
    return list(dict.fromkeys(defines(plan, dtype, op, rank) for dtype, op, rank in pairs))
