"""Attention over a group as torch's tools see it: opcheck, torch.compile, fake tensors."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attention_texts import RING  # noqa: E402 - after the check for torch
from thread_ranks import in_group  # noqa: E402 - as above
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 - as above
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402 - as above
from torch.nn import functional  # noqa: E402 - as above
from traced import assert_as_eager  # noqa: E402 - as above

import commdsl  # noqa: E402 - as above
from commdsl.attention import (  # noqa: E402 - as above
    Placement,
    Run,
    attention,
    choice,
    sequence_parallel,
    shard_sequence,
    unshard_sequence,
)


@pytest.fixture
def ring(tmp_path: Path) -> str:
    path = tmp_path / "ring.comm"
    path.write_text(RING, encoding="utf-8")
    return str(path) + ":ring"


def own(length: int, group: str, layout: str = "BSND", ends: list[int] | None = None) -> list[torch.Tensor]:
    """A rank's rows of q, k and v."""
    generator = torch.Generator().manual_seed(length)
    whole = [torch.randn(2, length, heads, 16, generator=generator) for heads in (4, 2, 2)]
    rows = [shard_sequence(one, 1, group, cu_seqlens=ends) for one in whole]
    return [(one.transpose(1, 2) if layout == "BNSD" else one).contiguous().requires_grad_() for one in rows]


def test_opcheck() -> None:
    """Both operators hold what torch asks of operators."""
    (group,) = commdsl.threads(1)
    q, k, v = own(12, group)
    out, lse = attention(q, k, v, group, causal=True, return_lse=True)
    said: list[Any] = [group, "auto", "", "zigzag", None, None, 0, 0.2, "BSND", "auto"]
    packed = (*own(12, group, "BNSD"), torch.tensor([0, 5, 12]), *said[:8], "BNSD", "auto")
    torch.library.opcheck(torch.ops.commdsl.sequence_attention.default, packed)
    plain = [one.detach() for one in (torch.ones_like(out), q, k, v, out, lse)]
    torch.library.opcheck(torch.ops.commdsl.sequence_attention_backward.default, (*plain, [], None, *said))


def test_compiled(ring: str) -> None:
    """torch.compile takes a model without a break, with gradients, serves every length, and packed documents; beside
    a rank that does not compile.
    """

    def rank_does(rank: int, group: str) -> None:
        def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
            return attention(q * 2, k, v.sin(), group, ring, causal=True, cu_seqlens=ends).cos()

        traced = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True) if rank == 0 else model
        for length, cuts in ((32, None), (64, None), (48, [0, 24, 48])):
            ends = None if cuts is None else torch.tensor(cuts)
            assert_as_eager(traced, model, own(length, group, ends=cuts), ends)

    in_group(2, rank_does)


def test_compiled_numbers() -> None:
    """Lists, lengths and windows that change from call to call are taken without a break."""
    (group,) = commdsl.threads(1)

    def model(q: torch.Tensor, ends: list[int], window: int) -> torch.Tensor:
        return attention(q, q, q, group, causal=True, window=window, cu_seqlens=ends, length=ends[-1])

    traced = torch.compile(model, fullgraph=True, backend="aot_eager")
    for ends, window in (([0, 5, 12], 4), ([0, 9, 16], 4), ([0, 2, 11], 4), ([0, 2, 11], 3)):
        q = torch.randn(1, ends[-1], 2, 16)
        torch.testing.assert_close(traced(q, ends, window), model(q, ends, window))


def test_compiled_placements() -> None:
    """A Placement of one's own that changes from call to call is taken without a break, in attention and around it."""
    (group,) = commdsl.threads(1)

    def model(x: torch.Tensor, mine: Placement) -> torch.Tensor:
        q = shard_sequence(x, 1, group, mine)
        out = attention(q, q, q, group, causal=True, placement=mine)
        return unshard_sequence(out, 1, group, mine)

    traced = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length, cut in ((8, 3), (12, 3), (12, 5)):
        x = torch.randn(1, length, 2, 16)
        mine = Placement("odd]one", (((Run(0, cut, length - cut),), (Run(0, 0, cut),)),))
        torch.testing.assert_close(traced(x, mine), model(x, mine))
        torch.testing.assert_close(traced(x, mine), attention(x, x, x, group, causal=True))


@pytest.mark.parametrize("ends", [None, [0, 12, 31]], ids=["one", "packed"])
def test_compiled_exchange_of_heads(ends: list[int] | None) -> None:
    """What a way back is given beside the output is known to torch.compile, too, with the rows that documents say."""

    def rank_does(rank: int, group: str) -> None:
        def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
            made = attention(q * 2, k, v, group, "ulysses", causal=True, cu_seqlens=ends, length=31)
            return made.cos()

        traced = torch.compile(model, fullgraph=True, backend="aot_eager") if rank == 0 else model
        assert_as_eager(traced, model, own(31, group, ends=ends), None if ends is None else torch.tensor(ends))

    in_group(2, rank_does)


def test_compiled_drop_in(ring: str) -> None:
    """`sequence_parallel` holds for what is compiled, entered outside of it or within; and no longer than it lasts."""

    def rank_does(rank: int, group: str) -> None:
        def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) + 1

        def within(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sequence_parallel(group, ring):
                return model(q, k, v)

        tensors = own(32, group, "BNSD")
        wanted, local = within(*tensors), model(*tensors)
        traced, traced_within = (
            torch.compile(one, fullgraph=True, backend="aot_eager") if rank == 0 else one for one in (model, within)
        )
        torch.testing.assert_close(traced_within(*tensors), wanted)
        for _ in range(2):
            with sequence_parallel(group, ring):
                torch.testing.assert_close(traced(*tensors), wanted)
            torch.testing.assert_close(traced(*tensors), local)

    in_group(2, rank_does)


def test_traced_with_fake_tensors() -> None:
    """What is traced with fake tensors runs, there and back, where a call as it is would exchange heads for rows."""
    lock = threading.Lock()  # make_fx is for one thread at a time

    def rank_does(rank: int, group: str) -> None:
        def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
            out = attention(q, k, v, group, causal=True)
            return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

        mine = [one.clone().requires_grad_() for one in torch.randn(3, 1, 6, 4, 64)]
        with lock:
            traced = make_fx(model, tracing_mode="fake")(*mine)
        for got, wanted in zip(traced(*mine), model(*mine), strict=True):
            torch.testing.assert_close(got, wanted)

    in_group(4, rank_does)
    asked = choice(24, 4, 64, ranks=4, itemsize=4, causal=True, backward=True)
    assert asked.schedule == "attention_ulysses"


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "SBND"])
def test_fake_tensors(layout: str) -> None:
    """Shapes, dtypes and layout in memory follow from the arguments alone: nothing is loaded, no rank is asked."""
    (group,) = commdsl.threads(1)
    q = torch.randn(2, 8, 4, 16, dtype=torch.float64)
    real = attention(q, q, q, group, layout=layout, return_lse=True)
    with FakeTensorMode():
        q = torch.empty(2, 8, 4, 16, dtype=torch.float64)
        made = attention(q, q, q, "nobody's", "hamilton K=3", layout=layout, return_lse=True)
    for one, other in zip(made, real, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
