"""Turns what a user can mend into exceptions with one base: a text, a call, a setting, a machine is at fault.

Assumes the one who raises says what to do. Does not cover `InternalError`: there commdsl is at fault, and nothing that
catches these should hide it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from commdsl.machine.printable import printable


class Error(Exception):
    """What commdsl raises where a text, a call, a setting, a machine or another rank is at fault."""


class CodedError(Error):
    """An Error of one line, `error[C951]: ...`, that `commdsl explain` has a page for; picklable: ranks pass it on.

    Control characters, which file names may have, are escaped: a traceback goes to a terminal.
    """

    code: ClassVar[str]

    def __init__(self, message: str) -> None:
        super().__init__(f"error[{self.code}]: {printable(message)}")

    def __reduce__(self) -> tuple[Any, ...]:
        # By what it says: called with that again, `__init__` would put the code before it a second time.
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[CodedError], said: tuple[Any, ...], more: dict[str, Any]) -> CodedError:
    made = kind.__new__(kind, *said)
    made.args = said
    made.__dict__.update(more)
    return made


class CacheError(CodedError, RuntimeError):
    """The cache is not this user's alone, or there is no place at all to write to; the message says what to do."""

    code = "C970"


class ConfigError(CodedError, ValueError):
    """A variable of the environment says what it cannot say."""

    code = "C971"


class MissingToolError(CodedError, RuntimeError):
    """A compiler or linker is not on this machine, or does not work; the message says what to install."""

    code = "C972"


class MissingPackageError(CodedError, ModuleNotFoundError):
    """A Python package that a name of commdsl needs is not installed; the message has the command that installs it."""

    code = "C968"

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class ArgumentError(CodedError, ValueError, TypeError):
    """An argument that is not what a function takes: no number, no mapping, no name that there is."""

    code = "C973"


class NotFoundError(CodedError, FileNotFoundError):
    """Neither a file nor something shipped of that name; the message has the nearest names."""

    code = "C974"


class ResourceError(CodedError, RuntimeError):
    """A limit on open files, memory or processes is reached, or a call of the system failed; the message says which."""

    code = "C975"
