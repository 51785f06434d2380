"""Turns numbers of things into 64-bit marks that stand for them where counting them one by one costs too much.

Assumes that marks are compared within one process: they are keyed with random bits that each process draws for itself,
so nobody can write a schedule whose wrong sum has the right fingerprint. A mark decides whether two things are equal,
and does not show in anything that is printed, stored or put in order.
"""

from __future__ import annotations

import hashlib
import secrets
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Marks: TypeAlias = NDArray[np.uint64]

OPENING = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


@cache
def _keys() -> tuple[np.uint64, np.uint64]:
    """Return the keys of this process."""
    return np.uint64(secrets.randbits(64)), np.uint64(secrets.randbits(64))


def mark(numbers: Marks) -> Marks:
    """Return a mark of each number: distinct for distinct numbers, and different in every process."""
    first, second = _keys()
    return mix(mix(numbers + first) ^ second)


@cache
def named(name: str, number: int) -> np.uint64:
    """Return a mark of a name and a number."""
    digest = hashlib.blake2b(f"{name} {number}".encode(), digest_size=8).digest()
    return np.uint64(mark(np.array([int.from_bytes(digest, "little")], np.uint64))[0])


def mix(numbers: Marks) -> Marks:
    """Return a fixed bijection of 64-bit numbers that looks random."""
    return finish((numbers + np.uint64(1)) * OPENING)


def finish(values: Marks) -> Marks:
    """Scramble values in place and return them (the finisher of SplitMix64, Steele et al. 2014), a bijection."""
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        values ^= values >> shift
        values *= factor
    values ^= values >> _SHIFTS[2]
    return values
