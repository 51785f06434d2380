"""Turns (rank, position, call) into small whole numbers, and a collective into what every rank must hold of them.

Assumes at most 16 ranks: then every sum is exact in bfloat16, whatever the order, and one right answer has one set of
bits. Any rank computes any other's numbers by itself, so a check needs no communication. Does not synchronize the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

import torch

from benchmarks.cases import Case, Collective

CHUNK = 1 << 25  # elements computed at a time: bounds the memory of the 32-bit intermediates


def _int32(value: int) -> int:
    """The 32-bit integer of the same bits: torch refuses a scalar that does not fit."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def whole_numbers(
    numel: int, rank: int, call: int, dtype: torch.dtype, device: torch.device, start: int = 0
) -> torch.Tensor:
    """Elements `start` to `start + numel` of a rank's tensor in a call, each from -8 to 7."""
    out = torch.empty(numel, dtype=dtype, device=device)
    salt = _int32((rank + 1) * 0x9E3779B1 + (call + 1) * 0x85EBCA6B)
    for begin in range(0, numel, CHUNK):
        end = min(begin + CHUNK, numel)
        bits = torch.arange(start + begin, start + end, dtype=torch.int32, device=device)
        bits.add_(salt).mul_(_int32(0xCC9E2D51))
        bits.bitwise_xor_(bits >> 15).mul_(_int32(0x1B873593))
        out[begin:end] = bits.bitwise_right_shift_(13).bitwise_and_(15).sub_(8)
    return out


def total(parts: Iterator[torch.Tensor]) -> torch.Tensor:
    result = next(parts)
    for part in parts:
        result += part
    return result


def given(case: Case, rank: int, call: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a rank puts in."""
    return whole_numbers(case.num_in, rank, call, dtype, device)


def wanted(case: Case, rank: int, call: int, root: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a rank must get out."""

    def of(other: int, start: int, numel: int) -> torch.Tensor:
        return whole_numbers(numel, other, call, dtype, device, start)

    everyone = range(case.ranks)
    mine = rank * case.block
    match case.collective:
        case Collective.ALL_REDUCE:
            return total(of(other, 0, case.numel) for other in everyone)
        case Collective.REDUCE_SCATTER:
            return total(of(other, mine, case.block) for other in everyone)
        case Collective.ALL_GATHER:
            return torch.cat([of(other, 0, case.block) for other in everyone])
        case Collective.ALL_TO_ALL:
            return torch.cat([of(other, mine, case.block) for other in everyone])
        case Collective.BROADCAST:
            return of(root, 0, case.numel)
        case _:
            assert_never(case.collective)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def differs(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Whether a single bit is different, on the device. By elements of 2 bytes where the sizes allow, else by bytes."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return torch.ones((), dtype=torch.bool, device=want.device)
    if got.numel() == 0:
        return torch.zeros((), dtype=torch.bool, device=want.device)
    narrow = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    return (got.view(narrow) != want.view(narrow)).any()


def poison(numel: int, dtype: torch.dtype, device: torch.device) -> None:
    """The next tensor of this size on this stream is made of memory full of 0xFF: what stays unwritten shows."""
    torch.full((max(numel * dtype.itemsize, 1),), 255, dtype=torch.uint8, device=device)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Two 64-bit numbers that depend on every bit and its place: equal tensors have equal ones."""
    bits = bytes_of(tensor)
    if bits.numel() % 2 == 0:
        bits = bits.view(torch.int16)
    found = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for begin in range(0, bits.numel(), CHUNK):
        part = bits[begin : begin + CHUNK].to(torch.int64)
        places = torch.arange(begin + 1, begin + 1 + part.numel(), dtype=torch.int64, device=tensor.device)
        mixed = places.mul_(-7046029254386353131)
        found[0] += (part * mixed).sum()
        found[1] += (part * (mixed ^ (mixed >> 29))).sum()
    return found
