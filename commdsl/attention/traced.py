"""Turns the definition of attention's operators into something that `torch.compile` does not look into.

Assumes that torch._dynamo is loaded, as it is while it traces: it takes a second to import, so only what is traced
imports this. Does not define the operators itself; `torch_ops` does.
"""

from __future__ import annotations

import torch

from commdsl.attention.torch_ops import library


# torch does not type its decorator
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def defined() -> bool:
    """Whether `torch.ops.commdsl` has the operators, which it has from here on."""
    library()
    return True
