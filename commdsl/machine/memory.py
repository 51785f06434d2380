"""Turns this machine into the bytes of memory that a process may still take.

Assumes Linux; elsewhere there is no limit that it knows. Does not reserve any.
"""

from __future__ import annotations

from pathlib import Path

UNKNOWN = 1 << 62


def room() -> int:
    """As the machine and its control group say."""
    folder = Path("/sys/fs/cgroup")
    try:
        most, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no control group of the second kind
        return _available()
    return _available() if most == "max" else min(_available(), max(int(most) - int(used), 0))


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return UNKNOWN
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) << 10 if found else UNKNOWN
