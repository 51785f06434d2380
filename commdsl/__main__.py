"""Turns a process into a command line: `python -m commdsl`, and the `commdsl` script.

Assumes nothing imported yet. Does not parse arguments; `cli` does.
"""

from __future__ import annotations

import gc
import io
import os
import sys

OBJECTS_A_COLLECTION = 50_000
INTERRUPTED = 130


def main() -> None:
    # commdsl does no linear algebra, yet OpenBLAS starts a pool of threads when numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A command keeps what it makes: Python would look for garbage 70 times while it imports, and through everything at
    # the exit, and find none. Together a fifth of a short check.
    gc.set_threshold(OBJECTS_A_COLLECTION)
    open_streams()
    try:
        from commdsl.commands.cli import run_command  # after the lines above

        code = run_command(sys.argv[1:])
    except KeyboardInterrupt:  # while it imports, or has done its work
        code = INTERRUPTED
    gc.freeze()
    sys.exit(code)


def open_streams() -> None:
    """What was closed goes nowhere; what a terminal cannot write is written as its number."""
    sys.stdin, sys.stdout, sys.stderr = (
        stream or io.TextIOWrapper(io.BytesIO()) for stream in (sys.stdin, sys.stdout, sys.stderr)
    )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
