"""Turns a process into a command line: `python -m commdsl`, and the `commdsl` script.

Assumes nothing imported yet. Does not parse arguments; `cli` does.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    # commdsl does no linear algebra, yet OpenBLAS starts a pool of threads when numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from commdsl.commands.cli import run_command  # after the line above

    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
