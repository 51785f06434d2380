"""Turns the definition of the collectives' ops into something that `torch.compile` does not look into.

Assumes that torch._dynamo is loaded, as it is while it traces: it takes a second to import, so only what is traced
imports this. Does not define the ops itself; `collective_ops` does.
"""

from __future__ import annotations

import torch

from commdsl.runtime.collective_ops import library


# torch does not type its decorator
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def defined() -> bool:
    """Whether `torch.ops.commdsl_collectives` has its ops, which it has from here on."""
    library()
    return True
