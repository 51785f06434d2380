"""Turns what a call with visits is given into its tensors, and what the caller computes at each visit.

Assumes nothing of the functions but that they can be called. Does not call them (`visits` does).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeAlias

import torch

from commdsl.program.launches import Visit
from commdsl.program.plan import Plan
from commdsl.runtime.errors import TensorError

Function: TypeAlias = Callable[..., Any]
"""What the caller computes: the number of the visit and tensors, to what it writes; nothing where it writes nothing.
With a keyword `out`, as in `def attend(visit, k, v, *, out)`, it is given where that belongs.
"""


def split(
    name: str, arguments: tuple[Any, ...], named: Mapping[str, Function]
) -> tuple[tuple[torch.Tensor, ...], dict[str | None, Function]]:
    """The tensors of a call, and its functions: by name, or the one given last, under None."""
    known: dict[str | None, Function] = dict(named.items())
    given = arguments
    if arguments and not isinstance(arguments[-1], torch.Tensor):
        given, known[None] = arguments[:-1], arguments[-1]
    if not given or not all(isinstance(tensor, torch.Tensor) for tensor in given):
        raise TensorError(f"`{name}` is given tensors, then one function, or functions by name")
    if not known or not all(callable(function) for function in known.values()):
        raise TensorError(f"`{name}` calls a function at every yield, and was given none")
    return given, known


def by_name(name: str, plan: Plan, known: Mapping[str | None, Function]) -> dict[str | None, Function]:
    """The function of every name that a yield has."""
    wanted = {phase.name for phase in plan.phases if isinstance(phase, Visit)}
    unknown = [f"`{one}`" for one in known if one is not None and one not in wanted]
    if unknown:
        raise TensorError(f"`{name}` has no yield that calls {' or '.join(unknown)}")
    missing = [one for one in wanted if one not in known and None not in known]
    if missing:
        words = [f"`{one}`" if one else "a yield without a name" for one in missing]
        raise TensorError(f"`{name}` was given no function for {' and '.join(sorted(words))}")
    return {one: known[one] if one in known else known[None] for one in wanted}


def has_out(function: Function) -> bool:
    """Whether it wants to know where what it writes belongs."""
    if isinstance(function, FunctionType) and not hasattr(function, "__wrapped__"):  # the usual one: a microsecond
        code = function.__code__
        return "out" in code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    try:
        found = inspect.signature(function).parameters.get("out")
    except (TypeError, ValueError):  # of a builtin that does not say
        return False
    return found is not None and found.kind is found.KEYWORD_ONLY
