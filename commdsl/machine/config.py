"""Turns the environment into one frozen Config; the only module that reads it.

Assumes the caller passes the Config on. Does not create folders and does not look for compilers.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from commdsl.machine.errors import ConfigError

DEFAULT_TIMEOUT = 30.0
"""Seconds that a wait may take where no process group says: of ranks that are threads, or that a tool runs."""

OWN = "COMMDSL_"
"""The prefix of the variables that are commdsl's alone."""

VARIABLES = (
    "COMMDSL_CACHE_DIR",
    "COMMDSL_TIMEOUT",
    "COMMDSL_DEBUG",
    "COMMDSL_TRANSPORT",
    "COMMDSL_NODES",
    "COMMDSL_SHARE_GPUS",
    "COMMDSL_TABLES",
)
"""The variables with that prefix which are read; all others are reported, and change nothing."""

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Config:
    """What a machine or a user may set."""

    cache_dir: Path | None  # COMMDSL_CACHE_DIR, else the user's folder for caches; None: there is no home for one
    timeout: float | None  # COMMDSL_TIMEOUT: seconds that a wait for another rank may take; None: its group says
    debug: bool  # COMMDSL_DEBUG: ranks compare each call; debug information in builds, and none optimized on the host
    cxx: str  # CXX: the host compiler, empty when not set
    transport: str = "peer"  # COMMDSL_TRANSPORT: "peer", or "nvshmem": kernels that reach far ranks, too
    nodes: tuple[int, ...] = ()  # COMMDSL_NODES: by rank of the world the node it counts as on; empty: the hosts say
    one_queue: bool = False  # CUDA_DEVICE_MAX_CONNECTIONS: all streams of a process share one queue to its GPU
    share_gpus: bool = False  # COMMDSL_SHARE_GPUS: several ranks may have one GPU, whose kernels then take turns
    arena_bytes: int = 1 << 30  # NVSHMEM_SYMMETRIC_SIZE: what a rank has for groups with far peers
    tables: tuple[Path, ...] = ()  # COMMDSL_TABLES: files of `commdsl tune`, looked at before the shipped tables

    @property
    def has_far(self) -> bool:
        """Whether kernels are told to reach ranks that plain loads and stores do not."""
        return self.transport == "nvshmem" or len(set(self.nodes)) > 1


class SettingWarning(UserWarning):
    """A variable of the environment that looks like a setting and is none."""


def unread(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return by name the variables that begin like a setting and are not read, with a clause that says so.

    A warning, no error: a variable of a newer version must not end a job, and a misspelt one must not pass in silence.
    """
    variables = os.environ if environment is None else environment
    found = sorted(name for name in variables if name.startswith(OWN) and name not in VARIABLES)
    return {name: f"{name} is not a setting and changes nothing; {_meant(name)}" for name in found}


def _meant(name: str) -> str:
    from difflib import get_close_matches  # 3 ms that few processes need

    known = [one.removeprefix(OWN) for one in VARIABLES]
    near = get_close_matches(name.removeprefix(OWN).upper(), known, n=1)
    return f"did you mean {OWN}{near[0]}?" if near else f"there are {', '.join(VARIABLES)}"


@cache
def _warn(said: str) -> None:
    """Warn once a process, also where others change the filters of warnings in between, as torch does."""
    warnings.warn(said, SettingWarning, stacklevel=3)


def from_environment(environment: Mapping[str, str] | None = None) -> Config:
    """Return the Config of a process, or of the mapping given in its place.

    Raises ConfigError where a variable has a value that it cannot have. Warns once a process (SettingWarning) of each
    of its variables that begins like a setting and is none.
    """
    variables = os.environ if environment is None else environment
    for said in unread().values() if environment is None else ():
        _warn(said)
    return Config(
        cache_dir=_cache_dir(variables.get("COMMDSL_CACHE_DIR", "")),
        timeout=_timeout(variables.get("COMMDSL_TIMEOUT", "")),
        debug=_switch("COMMDSL_DEBUG", variables.get("COMMDSL_DEBUG", "")),
        cxx=variables.get("CXX", "").strip(),
        transport=_transport(variables.get("COMMDSL_TRANSPORT", "") or "peer"),
        nodes=_nodes(variables.get("COMMDSL_NODES", "")),
        one_queue=variables.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1",
        share_gpus=_switch("COMMDSL_SHARE_GPUS", variables.get("COMMDSL_SHARE_GPUS", "")),
        arena_bytes=_bytes("NVSHMEM_SYMMETRIC_SIZE", variables.get("NVSHMEM_SYMMETRIC_SIZE", "") or "1G"),
        tables=tuple(Path(path) for path in variables.get("COMMDSL_TABLES", "").split(os.pathsep) if path),
    )


def _cache_dir(text: str) -> Path | None:
    """Without links, so that what is looked at is what is used. Where nobody says otherwise, as the platform has it."""
    if text:
        named = os.path.expanduser(text)
        if named.startswith("~"):
            raise ConfigError(f"COMMDSL_CACHE_DIR is `{text}`, and there is no such home: name the whole path")
        return Path(os.path.realpath(named))
    import platformdirs  # 5 ms, and few names another place

    try:
        found = platformdirs.user_cache_dir("commdsl", appauthor=False)
    except RuntimeError:  # or, of an older version, `~` stays in it
        return None
    return Path(os.path.realpath(found)) if os.path.isabs(found) else None


def _transport(text: str) -> str:
    if text not in ("peer", "nvshmem"):
        raise ConfigError(f"COMMDSL_TRANSPORT is peer or nvshmem, not `{text}`")
    return text


def _nodes(text: str) -> tuple[int, ...]:
    """`0,0,1,1`: two ranks on each of two nodes."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"COMMDSL_NODES is a number for each rank, as in 0,0,1,1, not `{text}`")
    return tuple(map(int, parts))


def allows_colour(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a terminal may be written to in colour: NO_COLOR is not there, and TERM is not `dumb`."""
    variables = os.environ if environment is None else environment
    return "NO_COLOR" not in variables and variables.get("TERM") != "dumb"


def _timeout(text: str) -> float | None:
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < 1e9:
        raise ConfigError(f"COMMDSL_TIMEOUT is a positive number of seconds, not `{text}`")
    return seconds


def _bytes(name: str, text: str) -> int:
    """As NVSHMEM reads it: `8G`, `512M`, `1.5g` or bytes."""
    number, scale = text.strip(), 1
    if number[-1:].upper() in UNITS:
        number, scale = number[:-1], UNITS[number[-1:].upper()]
    try:
        found = float(number) * scale
    except ValueError:
        found = math.nan
    if not 1.0 <= found < 2.0**63:
        raise ConfigError(f"{name} is a size, as in 512M or 8G, not `{text}`")
    return int(found)


def _switch(name: str, text: str) -> bool:
    if text in ("", "0"):
        return False
    if text == "1":
        return True
    raise ConfigError(f"{name} is 0 or 1, not `{text}`")
