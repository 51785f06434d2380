"""Turns the definition of operators into something that `torch.compile` does not look into.

Assumes that torch._dynamo is loaded, as it is while it traces: it takes a second to import, so only what is traced
imports this. Does not define operators itself; the `library` of the module that is named does.
"""

from __future__ import annotations

from importlib import import_module

import torch


# torch does not type its decorator
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def defined(module: str) -> bool:
    """Whether a module's operators are known to torch, which they are from here on."""
    import_module(module).library()
    return True
