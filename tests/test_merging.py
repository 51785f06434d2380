"""Results of attention over parts of the keys become one: the kernel's text, built for this processor and for a GPU."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fake_gpu import FakeGpu  # noqa: E402 - after the check for torch

from commdsl.attention.merge import Partial, by_kernel, summed, summed_by_kernel  # noqa: E402
from commdsl.attention.merge import merged as merged_by_torch  # noqa: E402
from commdsl.build import host, nvrtc  # noqa: E402
from commdsl.build.merge import DTYPES, MOST, THREADS, emitted  # noqa: E402
from commdsl.machine.config import from_environment  # noqa: E402
from commdsl.runtime import merging  # noqa: E402
from commdsl.runtime.errors import CaptureError, TensorError  # noqa: E402
from commdsl.runtime.merging import Part  # noqa: E402

ROWS, BATCH, HEADS, DIM = 37, 2, 3, 64
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""Relative to a power of two: what one rounding may cost."""


def merged(
    parts: Sequence[Part], running: Part | None = None, dtype: torch.dtype = torch.float32, into: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernel's text, built for the processor."""
    shape = next(iter(parts), running).out.shape  # type: ignore[union-attr]
    out, lse = run(parts, running, dtype, torch.full((*shape[1:3], ROWS), float("nan")), into)
    assert lse is not None
    return out, lse


def run(
    parts: Sequence[Part], running: Part | None, dtype: torch.dtype, lse: torch.Tensor | None, into: Any = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    shape = next(iter(parts), running).out.shape  # type: ignore[union-attr]
    out = torch.full((ROWS, *shape[1:]), float("nan"), dtype=dtype) if into is None else into
    made = merging.described(parts, running, out, lse)
    path = host.build(emitted(), made.defines(), from_environment())
    assert ctypes.CDLL(str(path)).commdsl_launch(made.packed(), 1, 1, bytes(8)) == 0
    return out, lse


def random_part(
    seed: int, first: int = 0, last: int = ROWS, dtype: torch.dtype = torch.bfloat16, shape: Any = (BATCH, HEADS, DIM)
) -> Part:
    """Outputs of size one, and logarithms that differ by some units from part to part."""
    made = torch.Generator().manual_seed(seed)
    out = torch.randn(last - first, *shape, generator=made).to(dtype)
    return Part(first, out, 4 * torch.randn(*shape[:2], last - first, generator=made))


def exact(parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, from the definition: exponentials weigh, and there is no largest one."""
    shape = parts[0].out.shape
    total = torch.zeros(ROWS, *shape[1:3], 1, dtype=torch.float64)
    out = torch.zeros(ROWS, *shape[1:], dtype=torch.float64)
    for part in parts:
        rows = slice(part.first, part.first + part.out.shape[0])
        weight = part.lse.double().permute(2, 0, 1)[..., None].exp()
        total[rows] += weight
        out[rows] += weight * part.out.double()
    return torch.where(total > 0, out / total, 0.0), total[..., 0].log().permute(1, 2, 0)


@pytest.mark.parametrize("result", ROUNDING, ids=str)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_merges_as_float64_does(dtype: torch.dtype, result: torch.dtype) -> None:
    """Parts of all rows and of some, a running one among them: as in float64 but for float32 sums and one rounding."""
    running = random_part(9, dtype=torch.float32)
    parts = [random_part(0, dtype=dtype), random_part(1, 5, 20, dtype), random_part(2, 11, ROWS, dtype)]
    wanted, logs = exact([running, *parts])

    out, lse = merged(parts, running, result)

    error = (out.double() - wanted).abs()
    assert (error <= ROUNDING[result] * 1.01 * wanted.abs() + 2e-6).all()
    assert (lse.double() - logs).abs().max() <= 1e-6 * logs.abs().max()


def test_order_of_sums() -> None:
    """The running part first, then the parts as given, each sum from zero in float32: the same bits as plain steps in
    that order, where cancellation shows any other.
    """
    given = [random_part(seed, dtype=torch.float32) for seed in range(5)]
    parts = [Part(0, one.out * 10.0**power, torch.full_like(one.lse, 3.25)) for power, one in enumerate(given)]
    total = np.zeros(parts[0].out.shape, np.float32)
    for part in parts:
        total = total + part.out.numpy() * (np.float32(1.0) / np.float32(5.0))  # each weighs exp(0) of a sum of five

    out, _ = merged(parts[1:], parts[0])

    assert np.array_equal(out.numpy(), total)
    assert not np.array_equal(merged(parts[:0:-1], parts[0])[0].numpy(), total)


def test_sums() -> None:
    """Without logarithms the parts are summed as they are, in the same order, the same bits as plain steps; rows that
    no part has are zeros.
    """
    running = random_part(9, 2, ROWS, torch.float32)
    parts = [random_part(seed, first, last) for seed, (first, last) in enumerate([(2, 30), (5, 20), (2, 35)])]
    parts = [replace(one, out=one.out * 10.0**power) for power, one in enumerate(parts)]
    total = np.zeros((ROWS, BATCH, HEADS, DIM), np.float32)
    for one in (running, *parts):
        total[one.first : one.first + len(one.out)] += one.out.float().numpy()

    out = run([replace(one, lse=None) for one in parts], replace(running, lse=None), torch.float32, None)[0]

    assert np.array_equal(out.numpy(), total)
    assert (out[:2] == 0).all()


def test_one_part_is_the_result() -> None:
    """Where a row has one part alone, the result is that part's bits, and its logarithm."""
    part = random_part(0, 4, 30)

    out, lse = merged([part], dtype=torch.bfloat16)

    assert torch.equal(out[4:30], part.out)
    assert torch.equal(lse[..., 4:30], part.lse)


def test_rows_of_no_part() -> None:
    """Rows that no part has, or of which all parts say that they have no key, are zeros, with -inf."""
    part, other = random_part(0, 4, 30), random_part(1, 2, 10)
    part.lse[..., :3] = -torch.inf
    other.lse[:] = -torch.inf
    other.out[:] = torch.nan  # what a kernel leaves where it has no key is not looked at

    out, lse = merged([part, other], dtype=torch.bfloat16)

    empty = torch.ones(ROWS, dtype=torch.bool)
    empty[7:30] = False
    assert (out[empty] == 0).all()
    assert (lse[..., empty] == -torch.inf).all()
    assert torch.equal(out[7:30], part.out[3:])


def test_plus_infinity() -> None:
    """A logarithm of inf, as flash attention has it for a row without keys, weighs nothing; a NaN beside it stays."""
    part, empty = random_part(0), random_part(1)
    empty.lse[:] = torch.inf
    empty.out[:] = 0
    empty.out[5] = torch.nan

    out, lse = merged([part, empty], dtype=torch.bfloat16)

    assert out[5].isnan().all()
    assert torch.equal(out[6:], part.out[6:])
    assert torch.equal(lse, part.lse)


def test_nan() -> None:
    """A logarithm that is not a number makes its row one, and no other."""
    part, bad = random_part(0), random_part(1)
    bad.lse[1, 2, 6] = torch.nan

    out, lse = merged([part, bad])

    assert out[6, 1, 2].isnan().all()
    assert int(out.isnan().sum()) == DIM
    assert int(lse.isnan().sum()) == 1


def test_far_apart() -> None:
    """Logarithms of thousands neither overflow nor vanish; what is e^-100 of another is nothing beside it."""
    part, other = random_part(0), random_part(1)
    parts = [
        replace(part, lse=torch.full_like(part.lse, 5000.0)),
        replace(other, lse=torch.full_like(part.lse, 4900.0)),
    ]

    out, lse = merged(parts)

    assert torch.equal(out, part.out.float())
    assert (lse == 5000).all()


@pytest.mark.parametrize("dim", [128, 96, 40, 36, 1])
def test_head_dimensions(dim: int) -> None:
    """Heads of any length; where 16 bytes do not fit, element by element, to the same bits."""
    parts = [random_part(seed, shape=(1, 2, dim)) for seed in range(3)]
    aside = [replace(one, out=torch.nn.functional.pad(one.out, (1, 2))[..., 1:-2]) for one in parts]  # no step of 16

    out, lse = merged(parts)

    assert merging.described(aside, None, out, lse).elements == 1
    assert merging.described(parts, None, out, lse).elements == (1 if dim % 8 else 8)
    assert all(map(torch.equal, merged(aside), (out, lse)))
    assert (out.double() - exact(parts)[0]).abs().max() < 1e-5


def test_any_strides() -> None:
    """Batch-major outputs, logarithms by rows, a result that lies in another tensor: the same bits."""
    parts = [random_part(seed) for seed in range(2)]
    wanted = merged(parts, dtype=torch.bfloat16)
    outs = [one.out.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for one in parts]
    turned = [Part(0, out, one.lse.mT.contiguous().mT) for out, one in zip(outs, parts, strict=True)]
    into = torch.zeros(BATCH, ROWS, HEADS + 1, DIM, dtype=torch.bfloat16)

    out, lse = merged(turned, into=into[:, :, 1:].permute(1, 0, 2, 3))

    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])
    assert (into[:, :, 0] == 0).all()


def test_running_part_in_place() -> None:
    """More parts than one launch takes: a float32 result is the running part of the next launch, and may lie there."""
    parts = [random_part(seed) for seed in range(MOST + 3)]
    out, lse = merged(parts[:MOST])

    out, lse = merged(parts[MOST:], Part(0, out, lse), into=out)

    wanted, logs = exact(parts)
    assert (out.double() - wanted).abs().max() < 1e-5
    assert (lse.double() - logs).abs().max() < 1e-5


def test_refused() -> None:
    """What the kernel does not take is refused by name."""
    out, lse = torch.empty(ROWS, BATCH, HEADS, DIM), torch.empty(BATCH, HEADS, ROWS)
    part = random_part(0)
    wrong: dict[str, tuple[list[Part], Part | None]] = {
        "9 of bfloat16": ([part] * 9, None),
        "got 2 of": ([part, random_part(1, dtype=torch.float16)], None),
        "running part is float32": ([part], part),
        "from row 5": ([replace(part, first=5)], None),
        "None from row 0": ([replace(part, lse=None)], None),
        "elements side by side": ([replace(part, out=part.out.mT.contiguous().mT)], None),
        "lse is float32": ([replace(part, lse=part.lse.double())], None),
        "got 1 of float64": ([random_part(1, dtype=torch.float64)], None),
    }
    for words, (parts, running) in wrong.items():
        with pytest.raises(TensorError, match=words):
            merging.described(parts, running, out, lse)
    long = torch.empty(1, 1, 1, 128).expand(1 << 24, 2, 128, 128)
    with pytest.raises(TensorError, match="in pieces"):
        merging.described([], None, long, torch.empty(1, 1, 1).expand(2, 128, 1 << 24))


@pytest.mark.parametrize(("dtype", "result"), [*itertools.product(DTYPES, DTYPES)])
def test_cubin(dtype: str, result: str) -> None:
    """NVRTC takes every pair of dtypes, in words of 16 bytes and element by element."""
    wide = 4 if dtype == "float32" else 8
    for elements, weighs in ((1, 1), (wide, 1), (wide, 0)):
        said = {"DTYPE": dtype, "RESULT": result, "ELEMENTS": elements, "WEIGHS": weighs}
        macros = tuple(f"COMMDSL_{name}={value}" for name, value in said.items())
        cubin = nvrtc.build(emitted(), macros, from_environment()).read_bytes()
        assert cubin.startswith(b"\x7fELF")
        assert b"commdsl_merge" in cubin


def test_of_partials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel makes of partials what torch's operations make of them, a float32 one that came of others included."""
    gpu = FakeGpu(1)
    gpu.install(monkeypatch)
    gpu.here.rank = 0
    merging._launcher.cache_clear()
    parts = [random_part(seed, shape=(1, HEADS, DIM)) for seed in range(3)]
    first = random_part(3, shape=(1, HEADS, DIM), dtype=torch.float32)
    partials = [Partial(slice(0, ROWS), one.out[:, 0], one.lse[0]) for one in (first, *parts)]
    partials.append(Partial(slice(3, 9), parts[0].out[:6, 0], parts[0].lse[0, :, :6]))

    for given in (partials, partials[1:], partials[:1], partials[4:]):
        out, lse = by_kernel(given, ROWS, torch.bfloat16)
        wanted, logs = merged_by_torch(given, ROWS, torch.bfloat16)
        assert (out.float() - wanted.float()).abs().max() <= 2.0**-6
        assert torch.allclose(lse, logs, atol=1e-5)
        sums = [(one.rows, one.out) for one in given]
        assert torch.equal(summed_by_kernel(sums, ROWS, torch.bfloat16), summed(sums, ROWS, torch.bfloat16))
    merging._launcher.cache_clear()


def test_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch on the current stream, as many threads as there is to make; its first kind is refused in a capture."""
    gpu = FakeGpu(1)
    gpu.install(monkeypatch)
    gpu.here.rank = 0
    grids: list[tuple[int, ...]] = []
    launch = sys.modules["cupy"].cuda.driver.launchKernel
    watched: Any = lambda *words: (grids.append(words[1:8]), launch(*words))  # noqa: E731 - in place of the driver's
    monkeypatch.setattr(sys.modules["cupy"].cuda.driver, "launchKernel", watched)
    merging._launcher.cache_clear()
    part, out, lse = random_part(0), torch.empty(ROWS, BATCH, HEADS, DIM), torch.empty(BATCH, HEADS, ROWS)

    stream = gpu.stream()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(CaptureError, match="attend once outside"):
            merging.merge([part], None, out, lse)
    with gpu.on(stream):
        merging.merge([part], None, out, lse)
        merging.merge([], None, out[:0], lse[..., :0])  # nothing to make: no launch
    merging._launcher.cache_clear()

    assert [launch.stream for launch in gpu.launches] == [stream]
    threads = ROWS * BATCH * HEADS * DIM // 32  # each makes four times 8 elements
    assert grids == [(-(-threads // THREADS), 1, 1, THREADS, 1, 1, 0)]
    assert torch.equal(out, part.out.float())
