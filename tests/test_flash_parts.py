"""The backward of flash attention by parts: what the rule takes together, and that parts are the whole."""

from __future__ import annotations

import heapq
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from commdsl.attention import flash_parts, kernels, torch_kernels
from commdsl.attention.flash_parts import Class, by_parts, classes, parts_of
from commdsl.attention.kernel import Shape, ready
from commdsl.attention.masks import Call

CPU = torch.device("cpu")
SHAPE = Shape(torch.bfloat16, 128, 32, 8)
PROCESSORS = 132
DOCUMENTS = (17113, 8540, 6411, 4482, 4103, 2715, 2070, 1957, 1614, 1076, 1024, 925, 30579)


def packed(lengths: tuple[int, ...], right: int | None = 0) -> Call:
    cuts = tuple(accumulate(lengths, initial=0))
    return Call(cuts, cuts, None, right)


def taken(call: Call, found: tuple[Class, ...], shape: Shape) -> float:
    """Pairs that the busiest processor walks over, as the kernel runs its blocks: head by head, each of every sequence
    and all its splits, by whichever processor is free.
    """
    total = 0.0
    for one in found:
        for key_heads in one.key_heads:
            heads = key_heads * shape.heads // shape.key_heads
            splits = -(-PROCESSORS // (heads * len(one.sequences)))
            free = [0.0] * PROCESSORS
            for _ in range(heads):
                for number in one.sequences:
                    length = call.queries[number + 1] - call.queries[number]
                    for _ in range(splits):
                        heapq.heapreplace(free, free[0] + length * (length + 1) / 2 / splits)
            total += max(free)
    return total


def whole(call: Call, shape: Shape) -> tuple[Class, ...]:
    return (Class(tuple(range(len(call.queries) - 1)), (shape.key_heads,)),)


@pytest.mark.parametrize("lengths", [DOCUMENTS, (65536,), (128,) * 300, (40000, *(300,) * 80)], ids=len)
def test_every_sequence_and_head_once(lengths: tuple[int, ...]) -> None:
    """Classes have every sequence once, the longest first, and their parts every head once."""
    found = classes(packed(lengths), SHAPE, PROCESSORS)
    numbers = [number for one in found for number in one.sequences]
    assert sorted(numbers) == [*range(len(lengths))]
    assert [lengths[number] for number in numbers] == sorted(lengths, reverse=True)
    assert {sum(one.key_heads) for one in found} == {8}


@pytest.mark.parametrize("lengths", [DOCUMENTS, (65536,), (31444, 16398, 11461)], ids=len)
def test_processors_are_busy(lengths: tuple[int, ...]) -> None:
    """Long documents: as the kernel runs its blocks, within a tenth of all work shared evenly; in one call they take
    half as long again and more.
    """
    call = packed(lengths)
    even = SHAPE.heads * sum(length * (length + 1) / 2 for length in lengths) / PROCESSORS
    assert taken(call, classes(call, SHAPE, PROCESSORS), SHAPE) < 1.1 * even
    assert taken(call, whole(call, SHAPE), SHAPE) > 1.5 * even


def test_a_call_that_is_well_as_it_is_stays_whole() -> None:
    """Short documents, or as many long ones as fill the processors, are one call: it has no parts."""
    for lengths in ((128,) * 300, (2048,) * 4, (500,)):
        call = packed(lengths)
        found = classes(call, SHAPE, PROCESSORS)
        assert [len(one.sequences) for one in found] == [len(lengths)]
        assert parts_of(call, SHAPE, found, CPU) == ()


@pytest.mark.parametrize("processors", [1, 108, 132, 148])
def test_model_is_no_less_than_what_blocks_take(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rule takes a call for is what its blocks take by any order of theirs, or more: 30 random calls."""
    monkeypatch.setitem(globals(), "PROCESSORS", processors)
    dice = np.random.default_rng(processors)
    for _ in range(30):
        count, key_heads = int(dice.integers(1, 9)), int(dice.integers(1, 5))
        shape = Shape(torch.bfloat16, 64, 2 * key_heads, key_heads)
        lengths = sorted((128 * dice.integers(1, 99, count)).tolist(), reverse=True)
        work = np.array([length * (length + 1) // 2 for length in lengths])
        sizes = flash_parts._Sizes(work, np.array(lengths), -(-np.array(lengths) // 128), [0, count])
        seconds = flash_parts._seconds(sizes, shape.heads, 64, processors)[0, 1]
        call = packed(tuple(lengths))
        assert seconds >= flash_parts.PAIR * 64 * taken(call, whole(call, shape), shape)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (packed((30, 7, 50)), (Class((2,), (1, 1)), Class((0, 1), (2,)))),
        (packed((20,), None), (Class((0,), (1, 1)),)),
        (Call((3, 13, 15, 15, 40), (2, 22, 22, 30, 70), None, 0), (Class((3,), (2,)), Class((0,), (1, 1)))),
        (Call((0, 20, 45), (0, 25, 55), 5, 2), (Class((1, 0), (1, 1)),)),
    ],
    ids=["packed", "full", "gaps", "windows"],
)
def test_parts_are_the_whole(call: Call, found: tuple[Class, ...]) -> None:
    """Gradients by parts are those of the call at once, in float64; rows beside nothing have none."""
    torch.manual_seed(len(found))
    rows, keys = call.queries[-1] - call.queries[0], call.keys[-1] - call.keys[0]
    q, k, v = (torch.randn(m, heads, 8, dtype=torch.float64) for m, heads in ((rows, 6), (keys, 2), (keys, 2)))
    parts = parts_of(call, Shape(q.dtype, 8, 6, 2), found, CPU)
    at_once, apart = ready(call, CPU), ready(call, CPU, parts)
    out, lse = torch_kernels.PLAIN.forward(q, k, v, at_once, 0.3)
    given = torch.randn_like(out), q, k, v, out, lse
    wanted = torch_kernels.PLAIN.backward(*given, at_once, 0.3)
    for one, other in zip(by_parts(torch_kernels.PLAIN.backward)(*given, apart, 0.3), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_only_backward_by_flash_has_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared calls of other kernels, and forward ones, are whole; flash's know how many processors there are."""
    properties = type("Properties", (), {"multi_processor_count": PROCESSORS})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    call = packed(DOCUMENTS)
    for kernel in (torch_kernels.FLASH, torch_kernels.PLAIN):
        for backward in (False, True):
            (one,) = kernels.prepared(kernel, SHAPE, [call], CPU, backward=backward)
            assert bool(one.parts) == (kernel is torch_kernels.FLASH and backward)
            lengths = [end - first for first, end in pairwise(call.queries)]
            assert all(part.ready.longest[0] in lengths for part in one.parts)
