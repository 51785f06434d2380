"""Turns the dispatches of a file into text: what a declaration means, what is launched, what is compiled.

Assumes names of dispatches that the file declares. Raises CommError for one with a fault. Does not print, and shows no
table: where rows go is data that comes with a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from commdsl import compiler
from commdsl.commands import dumps
from commdsl.commands.arguments import Target
from commdsl.commands.jobs import rank_counts
from commdsl.compiler import CheckedDispatch, CompiledDispatch
from commdsl.ir.dispatches import ByKey, ByTable, Sort
from commdsl.language.diagnostics import Diagnostic
from commdsl.language.syntax import File
from commdsl.program.memory import words_for
from commdsl.program.phases import Touch
from commdsl.program.plan import Plan
from commdsl.program.proof.events import Step, steps


@dataclass(frozen=True, slots=True)
class ShownDispatch:
    """A dispatch as text and as JSON."""

    text: str
    json: dict[str, object]
    warnings: tuple[Diagnostic, ...]


def show_dispatches(
    files: tuple[File, ...], path: Path, target: Target, names: list[str], stage: str
) -> tuple[ShownDispatch, ...]:
    """Each dispatch for every number of ranks asked for, in stage `ir`, `plan`, `cuda` or `host`."""
    shown: list[ShownDispatch] = []
    for name in names:
        for ranks in rank_counts(files, target):
            make: Callable[..., CheckedDispatch] = (
                compiler.check_dispatch if stage == "ir" else compiler.compile_dispatch
            )
            held = make(files, name, ranks, target.on, dict(target.params), dict(target.tune))
            text = render(held, stage)
            facts = {"file": str(path), "dispatch": name, "ranks": ranks, "stage": stage, "text": text}
            shown.append(ShownDispatch(text.rstrip("\n"), facts, held.warnings))
    return tuple(shown)


def render(held: CheckedDispatch, stage: str) -> str:
    if not isinstance(held, CompiledDispatch):
        return "\n".join(ir_lines(held))
    match stage:
        case "plan":
            return "\n".join(plan_lines(held))
        case "cuda":
            return held.emitted.text
        case _:
            return dumps.host_text(held.emitted.text)


def ir_lines(held: CheckedDispatch) -> Iterator[str]:
    """Tensors, routes, how rows travel, and the way back."""
    dispatch = held.dispatch
    topology = dispatch.topology
    params = "".join(f" {name}={value}" for name, value in dispatch.params)
    yield f"dispatch {dispatch.name}{params} for {dispatch.num_ranks} ranks"
    yield f"topology {topology.name}: {topology.num_nodes} × {topology.gpus_per_node} GPUs of {topology.num_sms} SMs"
    for route in dispatch.routes:
        tensors = ", ".join(tensor.name for tensor in dispatch.tensors if dispatch.routes[tensor.route] is route)
        match route:
            case ByTable(name, many, order):
                goes = "to several ranks, a copy each" if many else "to one rank"
                placed = ", ".join(sort.value for sort in order)
                yield f"route {name} of {tensors}: a shard goes {goes}; placed by ({placed})"
            case ByKey(key, rank_of, order):
                placed = ", ".join(key if sort is Sort.KEY else sort.value for sort in order)
                yield f"route of {tensors}: a row goes to the rank of each of its keys; placed by ({placed})"
                for rank in range(dispatch.num_ranks):
                    keys = [number for number, of in enumerate(rank_of) if of == rank]
                    yield f"rank {rank} has {key} {', '.join(_runs(keys))}"
            case _:
                assert_never(route)
    yield f"put {dispatch.put.value}"
    if dispatch.back is None:
        yield "no way back"
    else:
        by = "" if dispatch.back.weight is None else f" times {dispatch.back.weight}"
        yield f"back {', '.join(dispatch.back.names)}: copies added up{by}"
    yield f"role {dispatch.role}" if dispatch.role else "no role"


def _runs(keys: list[int]) -> Iterator[str]:
    """`0 ..< 32`, and a number that has no neighbour by itself."""
    starts = [at for at, key in enumerate(keys) if not at or keys[at - 1] != key - 1]
    for first, last in zip(starts, [*starts[1:], len(keys)], strict=True):
        yield f"{keys[first]}" if last - first == 1 else f"{keys[first]} ..< {keys[last - 1] + 1}"


def plan_lines(held: CompiledDispatch) -> Iterator[str]:
    """The launch constants, then what every lane does in a call."""
    plan, push = held.plan, held.plan.push
    yield f"plan {plan.name} for {plan.num_ranks} ranks on {plan.topology}"
    yield (
        f"lanes up to {plan.comm.lanes}, one an SM  threads {plan.comm.threads}  tile {plan.tile_bytes} bytes"
        f"  put {held.dispatch.put.value}"
    )
    yield f"symmetric {plan.symmetric_bytes} bytes per rank, and what Limits say"
    for index, (rows, copied) in enumerate(zip(push.given, push.copied, strict=True)):
        there = "unpacked from a message per peer" if push.packed else "straight to its place"
        back = "copies wait until they are summed" if copied else "so is its way back"
        yield f"tensor {index} {rows.name}: {there}; {back}"
    yield "a call, on every rank"
    yield from (f"  {line}" for line in phase_lines(plan))


def phase_lines(plan: Plan) -> Iterator[str]:
    """`push: every lane; reads q of its rank; writes q of all ranks`."""
    for step in steps(plan):
        yield "; ".join([f"{step.name}: {step.by.value}", *_clauses(step)])


def _clauses(step: Step) -> Iterator[str]:
    if step.wait is not None:
        yield f"waits until {step.wait.of.value} of {step.wait.ranks.value} did `{step.wait.step}`"
    for verb, writes in (("reads", False), ("writes", True)):
        found = list(dict.fromkeys(_place(touch) for touch in step.touches if touch.writes == writes))
        if found:
            yield f"{verb} {', '.join(found)}"
    if step.tells is not None:
        yield f"tells {step.tells.value}"


def _place(touch: Touch) -> str:
    return f"{words_for(touch.memory)} of {touch.on.value}"
