"""Turns the environment into one frozen Config; the only module that reads it.

Assumes the caller passes the Config on. Does not create folders and does not look for compilers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from commdsl.machine.errors import ConfigError

DEFAULT_TIMEOUT = 30.0
"""Seconds that a wait may take where no process group says: of ranks that are threads, or that a tool runs."""

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


def from_environment(environment: Mapping[str, str] | None = None) -> Config:
    """The Config of a process, or of the mapping given in its place."""
    variables = os.environ if environment is None else environment
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
