"""Turns a call of Experts into one whose errors all ranks of its group hear of.

Assumes a call that raises before it launches anything. Does not report what a kernel finds (`runtime` does).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from commdsl.runtime import groups

Given = ParamSpec("Given")
Found = TypeVar("Found")


def reported(call: Callable[Concatenate[Any, Given], Found]) -> Callable[Concatenate[Any, Given], Found]:
    """Report to the group that a call of Experts raised before it launched anything."""

    @wraps(call)
    def reported(experts: Any, /, *args: Given.args, **options: Given.kwargs) -> Found:
        try:
            return call(experts, *args, **options)
        except BaseException as error:
            groups.report(error, experts._comm.name, args, experts.plan.name)
            raise

    return reported
