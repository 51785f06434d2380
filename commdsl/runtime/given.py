"""Turns what callers wrote into what an op takes, or into one line that says what to write instead.

Assumes nothing of what is given. Does not look into a tensor that an op may take: `tensors` does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch

from commdsl.language.source import Source, Texts
from commdsl.machine import dtypes
from commdsl.machine.carriers import DEFAULT
from commdsl.machine.errors import ArgumentError
from commdsl.runtime.errors import ReductionError, TensorError

Reduction: TypeAlias = "str | torch.distributed.ReduceOp | torch.distributed.ReduceOp.RedOpType"
"""What a caller may write for one."""

Patience: TypeAlias = "timedelta | float | None"
"""How long a wait for another rank may take: seconds or a timedelta; None: as long as the group's."""

TORCH_NAMES = MappingProxyType({"product": "prod", **{name: name for name in dtypes.OPS}})
"""Reductions as torch.distributed calls them, and ours."""

TORCH_ARGUMENTS = MappingProxyType({"src": "root", "reduce_op": "op", "reduceOp": "op", "process_group": "group"})
"""Arguments as torch.distributed calls them, and ours."""

_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

MOST_SECONDS = 1e9


class Asked(NamedTuple):
    """What a call asks for beside its tensors and its group."""

    op: Reduction
    seconds: float | None  # that a wait may take; None: as long as the group's
    lengths: tuple[Any, ...] | None = None  # of blocks that have lengths of their own
    about: str = ""  # what else ranks agree on, in words


NEAR_NAMES = MappingProxyType(
    {
        "mean": "avg",
        "average": "avg",
        "add": "sum",
        "mul": "prod",
        "multiply": "prod",
        "maximum": "max",
        "minimum": "min",
    }
)


# --- tensors ----------------------------------------------------------------------------------------------------------


def tensors(name: str, values: Sequence[Any], count: int, more: int = 0) -> None:
    """Refuses what are not `count` dense tensors, or so many more."""
    for value in values:
        tensor(name, value)
    if len(values) != count and len(values) != count + more:
        takes = f"{_count(count)}, or {more} more" if more else _count(count)
        raise TensorError(f"`{name}` takes {takes}, got {len(values)}")


def tensor(name: str, value: Any) -> None:
    """Refuses what is no dense tensor."""
    if not isinstance(value, torch.Tensor):
        raise TensorError(f"`{name}` takes a torch tensor, got `{_kind(value)}`: {_instead(value)}")
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        kind = "nested" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
        raise TensorError(f"`{name}` takes a dense tensor, got one that is {kind}: pass x.to_dense() or its parts")


def argument(name: str, value: Any) -> None:
    """Refuses an argument that is no dense tensor, by its name."""
    if not isinstance(value, torch.Tensor):
        raise TensorError(f"`{name}` is a torch tensor, not `{_kind(value)}`: {_instead(value)}")
    tensor(name, value)


def _count(number: int) -> str:
    return f"{number} tensor" if number == 1 else f"{number} tensors"


def _kind(value: Any) -> str:
    return "None" if value is None else str(type(value))[8:-2]


def _instead(value: Any) -> str:
    if type(value).__module__.split(".")[0] == "numpy":
        return "pass torch.from_numpy(x)"
    if isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value):
        return "pass one tensor, torch.stack(x) or torch.cat(x); a result is returned, not written to a list"
    if isinstance(value, int | float | complex | list | tuple):
        return "pass torch.tensor(x)"
    return "pass a tensor"


def unexpected(
    name: str,
    function: Callable[..., Any],
    others: Mapping[str, Any],
    inputs: Sequence[str] = (),
    *,
    hint: str = "",
) -> NoReturn:
    """Raise ArgumentError (C973) for keywords that `function` does not have. `inputs`: the names of tensors that are
    given by position; `hint`: where the first keyword belongs, unless it is nearly one of the function's.
    """
    other = next(iter(others))
    known = [one.name for one in signature(function).parameters.values() if one.kind in _BY_NAME and one.name != "self"]
    if other in inputs:
        call = f"{name}({', '.join(inputs)}, ...)"
        raise ArgumentError(f"`{name}` takes its tensors by position: write {call} without `{other}=`")
    meant = TORCH_ARGUMENTS.get(other) or "".join(get_close_matches(other, known, 1, 0.7))
    if meant in known:
        hint = f"write `{meant}`; "
    raise ArgumentError(f"`{name}` takes no argument `{other}`: {hint}its arguments are {', '.join(known)}")


# --- reductions -------------------------------------------------------------------------------------------------------


def reduction(op: Any) -> str:
    """`sum`, `avg`, `max`, `min` or `prod`, of that name in any case or of a torch.distributed.ReduceOp."""
    if isinstance(op, str):
        if op in dtypes.OPS:
            return op
        known = TORCH_NAMES.get(op.lower())
        if known is None:
            raise ReductionError(f"no reduction `{op}`; there are {', '.join(dtypes.OPS)}{_meant(op)}")
        return known
    if type(op).__name__ not in ("RedOpType", "ReduceOp"):
        names = ", ".join(dtypes.OPS)
        raise ReductionError(f"a reduction is one of {names}, or a torch.distributed.ReduceOp, not `{_kind(op)}`")
    name = str(op if type(op).__name__ == "RedOpType" else op.op).rpartition(".")[2]
    known = TORCH_NAMES.get(name.lower())
    if known is not None:
        return known
    if name == "PREMUL_SUM":
        raise ReductionError('no reduction `ReduceOp.PREMUL_SUM`: multiply the tensor, then reduce it by "sum"')
    raise ReductionError(f"no reduction `ReduceOp.{name}` of bits; there are {', '.join(dtypes.OPS)}")


def _meant(op: str) -> str:
    close = NEAR_NAMES.get(op.lower()) or "".join(get_close_matches(op.lower(), TORCH_NAMES, 1))
    return f"; did you mean `{TORCH_NAMES[close]}`?" if close else ""


def seconds(timeout: Any) -> float | None:
    """A time-out in seconds, None where the group's is meant."""
    found = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if found is None or (isinstance(found, int | float) and not isinstance(found, bool) and 0 < found < MOST_SECONDS):
        return None if found is None else float(found)
    raise ArgumentError(f"a timeout is a positive number of seconds, or a timedelta, not {timeout!r}")


def asked(op: Reduction, timeout: Patience, lengths: Sequence[Any] | None, about: str = "") -> Asked:
    """What a caller wrote of it; whether there is such a reduction is looked at where a call is first made."""
    found = None if timeout is None else seconds(timeout)
    return Asked(op, found, None if lengths is None else tuple(lengths), about)


# --- what `load` is given ---------------------------------------------------------------------------------------------


def alone(name: str, other: str, value: Any) -> None:
    """Refuses a setting beside one that it does not go with."""
    if value is not None:
        raise ArgumentError(f"`{name}` and `{other}` do not go together: leave one of them out")


def both(**values: Sequence[Any] | None) -> tuple[Sequence[Any], ...] | None:
    """Settings that are given together, or not at all."""
    found = [value for value in values.values() if value is not None]
    if found and len(found) < len(values):
        raise ArgumentError(f"{' and '.join(f'`{name}`' for name in values)} go together: give both, or none")
    return tuple(found) or None


def whole(name: str, value: Any, least: int) -> int:
    """A whole number, also one of numpy's."""
    found = None if isinstance(value, bool) else index(value)
    if found is None or found < least:
        raise ArgumentError(f"`{name}` is a whole number from {least} on, not {shown(value)}")
    return found


def index(value: Any) -> int | None:
    """The whole number that a value is, None where it is none: an array or a tensor of several is none either."""
    try:
        return operator.index(value)
    except (TypeError, RuntimeError, NotImplementedError):
        return None


def shown(value: Any) -> str:
    """A value in an error: its repr, of a tensor or an array its type alone."""
    return f"`{_kind(value)}`" if hasattr(value, "shape") else f"{value!r:.80}"


def instance(name: str, value: Any, kind: type) -> None:
    """Refuses an argument that is no object of a class."""
    if not isinstance(value, kind):
        raise ArgumentError(f"`{name}` is of class {kind.__name__}, not `{_kind(value)}`")


def texts(files: Mapping[Any, Any]) -> Texts:
    """Of files by their names, the first the file itself."""
    if not files or not all(isinstance(one, str) for pair in files.items() for one in pair):
        raise ArgumentError('texts in hand are a mapping from names to texts, {"mine.comm": "schedule mine ..."}')
    return tuple(Source(name, text) for name, text in files.items())


def parameters(values: Any) -> tuple[tuple[str, int], ...]:
    """Names and whole numbers, by name."""
    found = []
    for name, value in _items("params", values, {"K": 1}):
        if not hasattr(value, "__index__"):
            raise ArgumentError(f"the parameter `{name}` is a whole number, not {value!r}")
        found.append((name, int(value.__index__())))
    return tuple(sorted(found))


def tuning(values: Any) -> tuple[tuple[str, int | str], ...]:
    """Keys, and whole numbers or names, by key."""
    found: list[tuple[str, int | str]] = []
    for name, value in _items("tune", values, {"lanes": 16, "protocol": DEFAULT.name}):
        if not isinstance(value, str) and not hasattr(value, "__index__"):
            raise ArgumentError(f"what is tuned by `{name}` is a whole number or a name, not {value!r}")
        found.append((name, value if isinstance(value, str) else int(value.__index__())))
    return tuple(sorted(found))


def _items(what: str, values: Any, example: Mapping[str, Any]) -> list[tuple[str, Any]]:
    if values is None:
        return []
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ArgumentError(f"`{what}` is a mapping from names, as in {dict(example)}, not {values!r}")
    return list(values.items())


def element(value: Any) -> None:
    """Refuses what is no dtype of torch."""
    if not isinstance(value, torch.dtype):
        raise ArgumentError(f"a dtype is one of torch's, as in torch.bfloat16, not {value!r}")


def text(name: str, value: Any) -> str | None:
    """A name, or None."""
    if value is not None and not isinstance(value, str):
        raise ArgumentError(f"`{name}` is a name, not {value!r}")
    return value
