"""Turns the name of a transport into the environment under which a group of so many ranks has it.

Assumes groups that are made afterwards: each reads the environment once. Does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable

TRANSPORTS: dict[str, Callable[[int], tuple[str, str]]] = {
    "peer": lambda ranks: ("peer", ""),
    "nvshmem": lambda ranks: ("nvshmem", ""),
    # Two nodes; of two ranks that would be all far, so there a kernel that reaches far ranks has a near peer.
    "mixed": lambda ranks: ("nvshmem", ",".join(str(2 * rank // ranks if ranks > 2 else 0) for rank in range(ranks))),
}
"""What COMMDSL_TRANSPORT and COMMDSL_NODES say."""

TRANSPORT_HELP = "peer: all ranks are near; nvshmem: all are far; mixed: two halves that are far from each other"


def choose_transport(name: str, ranks: int) -> None:
    os.environ["COMMDSL_TRANSPORT"], os.environ["COMMDSL_NODES"] = TRANSPORTS[name](ranks)
