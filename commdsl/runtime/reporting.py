"""Turns a call of a group into one whose errors all ranks of the group hear of: the one place that reports them.

Assumes calls that every rank of the group makes alike. Does not decide what a peer raises (`breaking` does), nor report
what a kernel finds (`failures` does). Calls may be nested: an error is reported once to each group, by the innermost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from inspect import unwrap
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from commdsl.runtime import groups
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.launches import default_device

Given = ParamSpec("Given")
Found = TypeVar("Found")

Find: TypeAlias = "str | Callable[..., Any]"
"""The parameter of a call that says of which group it is, or what finds that from its arguments: a group, its name, a
Communicator, what has one as `comm`, None for the default group, or a list of them.
"""


def reported(
    group: Find = "group",
    what: Callable[..., str] | None = None,
    errors: type[BaseException] = BaseException,
) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """Decorate a call that ends in collective work: report to the peers whatever it raises, then raise it.

    `what`: the call in words, from its arguments. Default: its name. `errors`: which are reported. Default: all.
    """

    def decorate(call: Callable[Given, Found]) -> Callable[Given, Found]:
        @wraps(call)
        def reporting(*args: Given.args, **options: Given.kwargs) -> Found:
            try:
                return call(*args, **options)
            except errors as error:
                _report(error, call, group, what, args, options)
                raise

        return reporting

    return decorate


def _report(
    error: BaseException,
    call: Callable[..., Any],
    group: Find,
    what: Callable[..., str] | None,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Report that a call with these arguments raised an error. Raise nothing: the caller raises `error`."""
    with suppress(Exception):
        found = _parameter(group, call, args, options) if isinstance(group, str) else group(*args, **options)
        name = f"`{call.__qualname__.removesuffix('.__init__')}`" if what is None else what(*args, **options)
        kind = _kind((*args, *options.values()), _parameter("device", call, args, options))
        for one in found if isinstance(found, list) else [found]:
            comm = getattr(one, "comm", one)
            if isinstance(comm, Communicator):
                groups.report(error, comm.name, comm.kind, name)
            else:
                groups.report(error, groups.name_of(one), kind, name)


def _kind(values: Sequence[Any], device: Any) -> str:
    """Return the kind of Communicator that a call with these arguments goes to."""
    with suppress(RuntimeError, TypeError):  # of what is no device
        found = next((one.device for one in _tensors(values)), None) or torch.device(device)
        if found.type in ("cpu", "cuda"):
            return found.type
    return default_device().type


def _parameter(name: str, call: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Return what a parameter of a call is given, also where other arguments are none that the call takes."""
    code = getattr(unwrap(call), "__code__", None)
    given = {} if code is None else dict(zip(code.co_varnames[: code.co_argcount], args, strict=False))
    return options.get(name, given.get(name))


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for one in values:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)
