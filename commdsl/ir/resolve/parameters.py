"""Turns the parameters of a schedule or a dispatch into numbers: those given from outside, defaults for the rest.

Assumes nothing of the values given. Does not look for names that nothing uses.
"""

from __future__ import annotations

from collections.abc import Mapping

from commdsl.ir.resolve.evaluate import Evaluator, Functions, Scope
from commdsl.ir.resolve.faults import Faults, Poisoned, Spent, nearest
from commdsl.language import syntax as syn
from commdsl.machine.topology import Topology


def known_counts(ranks: syn.Name, num_ranks: int, topology: Topology) -> dict[str, int]:
    """What every declaration knows: the ranks, the nodes that they fill, the GPUs of a node."""
    gpus = topology.gpus_per_node
    return {"gpus": gpus, "nodes": -(-num_ranks // gpus), ranks.text: num_ranks}


def parameters(
    decl: syn.ScheduleDecl | syn.DispatchDecl,
    given: Mapping[str, int],
    known: Scope,
    evaluator: Evaluator,
    faults: Faults,
) -> list[tuple[str, int]]:
    """The value of each parameter that has one; a default may use what is `known` and the parameters before it."""
    names = [param.name.text for param in decl.params]
    for name in sorted(set(given) - set(names)):
        what, help = f"`{decl.name.text}` has no parameter `{name}`", nearest(name, names) or "it takes none"
        faults.report("C504", what, decl.name.span, f"given: {name}={given[name]}", help=help)
    found = list[tuple[str, int]]()
    scope = dict(known)
    for param in decl.params:
        name = param.name.text
        try:
            if name in given:
                value = given[name]
            elif param.default is not None:
                value = evaluator.constant(param.default, scope)
            else:
                faults.fail("C503", f"`{name}` has no value", param.name.span, "no default, none given",
                            help=f"give one: `{name}=4`, or a default: `{name} = 4`")  # fmt: skip
        except Poisoned:
            continue
        scope[name] = value
        found.append((name, value))
    return found


def admits(
    decl: syn.ScheduleDecl, functions: Functions, num_ranks: int, topology: Topology, given: Mapping[str, int]
) -> bool:
    """Whether the `where` of a schedule holds for so many ranks, its parameters as they are unless given."""
    silent = Faults()
    evaluator = Evaluator(silent)
    known: Scope = {**functions, **known_counts(decl.ranks, num_ranks, topology)}
    try:
        scope: Scope = {**known, **dict(parameters(decl, given, known, evaluator, silent))}
        return decl.where is None or bool(evaluator.number(decl.where, scope))
    except (Poisoned, Spent):
        return False
