"""Turns a table of where names are into a module's `__getattr__` and `__dir__`: what a name needs is loaded at its use.

Assumes that the table names every public name of the module, and that who reads types has imports under TYPE_CHECKING.
Does not import anything before that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from commdsl.machine.errors import MissingPackageError


def lazy(module: str, home: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`home`: by name the module that has it."""

    def get(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module `{module}` has no attribute `{name}`")
        found = imported(home[name], name, f"{module}.{name}")
        setattr(sys.modules[module], name, found)  # the next use of the name costs a look into a dictionary
        return found

    return get, lambda: sorted(home)


def imported(module: str, name: str, public: str) -> object:
    """Return a name of a module. Raises MissingPackageError (C968) where the module needs torch, which is not there.

    `public`: the name as users write it.
    """
    try:
        found: object = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        message = f"{public} needs torch, which is not installed: pip install 'commdsl[torch]'"
        raise MissingPackageError(message, "torch") from None
    return found
