"""Turns the definition of operators, and calls with async_op=True, into calls that `torch.compile` does not trace.

Assumes that torch._dynamo is loaded, as it is while it traces: it takes a second to import, so only what is traced
imports this. Does not define operators itself; the `library` of the module that is named does.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

ASYNC = (
    "commdsl: a call with async_op=True returns a Work, which no graph holds: leave async_op out within torch.compile"
)


# torch does not type its decorator
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def defined(module: str) -> bool:
    """Whether a module's operators are known to torch, which they are from here on."""
    import_module(module).library()
    return True


def _untraced(call: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    return call(*arguments, **settings)


untraced: Callable[..., Any] = torch.compiler.disable(_untraced, reason=ASYNC)
"""Makes a call with async_op=True: torch.compile breaks the graph there; with fullgraph=True it raises with `ASYNC`."""
