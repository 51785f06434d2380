"""Turns what an operator does, on processors and GPUs, and the shapes it gives, into an operator of torch.

Assumes a library of torch's that is open, and a schema that names no namespace. Does not say what autograd sees of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from commdsl.machine.errors import Error
from commdsl.runtime.reporting import reported

GROUPS = ("group_name", "group")
"""The arguments of a schema that name the group of a call."""


def define(
    library: torch.library.Library,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    what: str | None = None,
) -> None:
    """Define an operator. `fake` returns results of the same shapes, from tensors without data.

    Where an argument names a group, its ranks hear of what `run` raises, also within a compiled graph, and of what
    `fake` refuses while a graph is traced. `what`: the user's call, as they read it. Default: the operator's name.
    """
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    at = [one for one, known in enumerate(torch._C.parse_schema(schema).arguments) if known.name in GROUPS]

    def named(*given: Any, **_: Any) -> Any:
        return given[at[0]]

    def traced(*given: Any, **_: Any) -> Any:
        return [] if torch._guards.TracingContext.try_get() is None else given[at[0]]

    if at:
        shown = what or f"`{name}`"
        run = reported(named, lambda *_, **__: shown)(run)
        fake = reported(traced, lambda *_, **__: shown, Error)(fake)  # others are torch's, which may go on
    for key in ("CPU", "CUDA"):
        library.impl(name, run, key)
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
