"""Turns a Definition into the one op of its name in this process, and tells torch of it.

Assumes torch. Does not run anything: what torch calls are methods of the op.
"""

from __future__ import annotations

import threading

import torch

from commdsl.runtime import autograd
from commdsl.runtime.op import Inverse, Load, Op
from commdsl.runtime.operators import define
from commdsl.runtime.program import Definition


class _Registry:
    """The ops of this process. torch keeps its own such table; this one remembers what each name stands for."""

    def __init__(self) -> None:
        self.library = torch.library.Library("commdsl", "FRAGMENT")  # of operators that have a name of their own
        self.libraries: list[torch.library.Library] = []  # one an op
        self.ops: dict[str, tuple[str, Op]] = {}
        self.lock = threading.RLock()


_REGISTRY: list[_Registry] = []
_LOCK = threading.Lock()


def registry() -> _Registry:
    with _LOCK:  # ranks that are threads come here at once, and two tables would define one op twice
        if not _REGISTRY:
            _REGISTRY.append(_Registry())
        return _REGISTRY[0]


def register(name: str, digest: str, definition: Definition, ranks: int, inverse: Inverse, load: Load) -> Op:
    """The op of that name; another text under a name that is taken gets its digest appended."""
    table = registry()
    with table.lock:
        if name in table.ops and table.ops[name][0] != digest:
            name = f"{name}_{digest[:8]}"
        if name not in table.ops:
            made = Op(name, definition, ranks, inverse, load)
            library = torch.library.Library("commdsl", "FRAGMENT")
            try:
                _define(library, made)
            except BaseException:
                library._destroy()  # torch would refuse a second definition of what it knows in part
                raise
            table.libraries.append(library)
            table.ops[name] = (digest, made)
        return table.ops[name][1]


def _define(library: torch.library.Library, op: Op) -> None:
    signature = op.program(op.ranks).signature
    reserved = ("group_name", "op", "self", "out")
    names = [f"{port.name}_" if port.name in reserved else port.name for port in signature.inputs]
    results = ", ".join("Tensor" for _ in signature.outputs)
    returns = results if len(signature.outputs) == 1 else f"({results})"
    tail = (
        ("SymInt[] lengths, " if op.has_lengths else "")
        + "str group_name"
        + (', str op="sum"' if signature.has_reduction else "")
        + ", float? timeout=None"
    )
    tail += "".join(f", Tensor? {name}=None" for name in signature.scales)
    given = ", ".join(f"Tensor {name}" for name in names)
    define(library, f"{op.name}({given}, {tail}) -> {returns}", op.functional, op.fake, f"`{op.shown}`")
    if signature.outputs:  # else what it does is what visits see
        autograd.register(library, op)
    if signature.in_place is None:
        return
    written = [
        f"Tensor({chr(ord('a') + index)}!) {name}" if index in signature.in_place else f"Tensor {name}"
        for index, name in enumerate(names)
    ]
    define(library, f"{op.name}_({', '.join(written)}, {tail}) -> ()", op.mutating, lambda *_: None, f"`{op.shown}`")
    autograd.refuse_in_place(library, op)
