"""Turns a call of an operator of ours into the shortest way to it: straight where nobody looks, else through torch.

Assumes a module with a function `library` that defines the operator. Does not run anything itself.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from commdsl.runtime.eager import skips_dispatcher

NAMESPACE = "commdsl_overlap"


def call(module: str, name: str, run: Callable[..., Any], tensors: tuple[torch.Tensor, ...], *others: Any) -> Any:
    """`run` is what the operator of this name does, with the same arguments."""
    return run(*tensors, *others) if skips_dispatcher(tensors) else through_torch(module, name)(*tensors, *others)


def through_torch(module: str, name: str) -> Callable[..., Any]:
    """The operator as torch has it."""
    if torch.compiler.is_dynamo_compiling():
        from commdsl.runtime.traced import defined  # a second, where torch has traced nothing yet

        defined(module)
    else:
        import_module(module).library()
    found: Callable[..., Any] = getattr(torch.ops.commdsl_overlap, name)
    return found
