"""Turns what went wrong, and no file is to blame for, into words on standard error and an exit code.

Assumes that the exception is being handled. Does not decide which exception is whose fault; `cli` does.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from commdsl.commands.output import Exit, close_stdout, tell
from commdsl.machine import resources


def short_of_memory(why: str) -> int:
    """Say what did not fit, and what takes less."""
    tell(f"resources: {why or 'out of memory'}; fewer --ranks or --bytes take less, and so do fewer --tune lanes")
    return int(Exit.RESOURCES)


def of_system(error: OSError) -> int:
    """Say which file or resource the operating system refused."""
    if error.errno == errno.ENOMEM:
        return short_of_memory(error.strerror or str(error))
    close_stdout()  # what is left of it may be what cannot be written
    tell(f"usage: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}")
    return int(Exit.USAGE)


def unexpected(words: Sequence[str]) -> int:
    """Says what to send."""
    import platform  # a command that does not fail needs none of these
    import shlex
    import traceback

    tell(traceback.format_exc())
    tell("commdsl failed, and the file is not to blame: this is a bug in commdsl")
    tell(f"please report it with the lines above, the files and this: commdsl {shlex.join(words)}")
    tell(f"commdsl {resources.version()}, Python {platform.python_version()}, {platform.platform()}")
    return int(Exit.INTERNAL)
