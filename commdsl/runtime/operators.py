"""Turns what an operator does, on processors and GPUs, and the shapes it gives, into an operator of torch.

Assumes a library of torch's that is open, and a schema that names no namespace. Does not say what autograd sees of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def define(library: torch.library.Library, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """`fake` gives results of the same shapes, from tensors without data."""
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    for key in ("CPU", "CUDA"):
        library.impl(name, run, key)
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
