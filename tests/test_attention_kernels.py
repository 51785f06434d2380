"""Attention kernels behind one form: forward and backward against float64, and the rule that chooses one."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from commdsl.attention import cudnn_kernels, torch_kernels
from commdsl.attention.kernel import Kernel, Shape, ready
from commdsl.attention.kernels import BLACKWELL, HOPPER, MENU, PACKAGES, Machine, apart, chosen, here, suited
from commdsl.attention.masks import Call
from commdsl.machine.errors import ArgumentError

FULL = Call((0, 12), (0, 20), None, None)
CAUSAL = Call((0, 16), (0, 16), None, 0)
BAND = Call((0, 12), (0, 20), 5, 3)
LATE = Call((2, 12), (3, 9), None, 4)
PACKED = Call((1, 4, 9), (2, 8, 13), None, None)
GAPS = Call((1, 4, 6, 6, 9), (2, 8, 8, 10, 13), None, 0)
"""Two queries beside no keys, then two keys beside no queries."""
CPU = torch.device("cpu")


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float) -> list[torch.Tensor]:
    """Softmax attention as its words say, head by head: output and log-sum-exp of the call's queries."""
    heads, serves = q.shape[1], q.shape[1] // k.shape[1]
    seen = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    for first, end, key, key_end, low, high in call.admits():
        for i in range(first, end):
            for j in range(key, key_end):
                distance = (j - key) - (i - first)
                seen[i, j] = (low is None or distance >= low) and (high is None or distance <= high)
    out, lse = [], []
    for head in range(heads):
        scores = (q[:, head] @ k[:, head // serves].T) * scale
        scores = scores.masked_fill(~seen, -torch.inf)[call.queries[0] : call.queries[-1]]
        lse.append(torch.logsumexp(scores, 1))
        share = torch.exp(scores - lse[-1].masked_fill(lse[-1] == -torch.inf, 0)[:, None])
        out.append(share @ v[:, head // serves])
    return [torch.stack(out, 1), torch.stack(lse)]


def given(call: Call, heads: int, of_keys: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(heads + dim)
    m, n = call.queries[-1], call.keys[-1]
    shapes = ((m, heads, dim), (n, of_keys, dim), (n, of_keys, dim))
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize(
    "call", [FULL, CAUSAL, BAND, LATE, PACKED, GAPS], ids=["full", "causal", "band", "late", "packed", "gaps"]
)
@pytest.mark.parametrize(
    ("kernel", "dtype", "bound"),
    [
        (torch_kernels.PLAIN, torch.float64, 1e-13),
        (torch_kernels.PLAIN, torch.float32, 2e-6),
        (torch_kernels.CPU, torch.float32, 2e-6),
        (torch_kernels.CPU, torch.bfloat16, 2e-6),
    ],
    ids=["plain-64", "plain-32", "cpu-32", "cpu-bf16"],
)
def test_against_float64(kernel: Kernel, dtype: torch.dtype, bound: float, call: Call, heads: tuple[int, int]) -> None:
    """Output, log-sum-exp and all gradients; of bfloat16 as exact as float32, since nothing is rounded to it."""
    q, k, v = given(call, *heads, 10, dtype)
    exact = [one.to(torch.float64).requires_grad_() for one in (q, k, v)]
    out, lse = oracle(*exact, call, 0.3)
    dout = torch.randn_like(out).to(dtype)
    wanted = torch.autograd.grad(out, exact, dout.to(torch.float64))
    made = [torch.zeros_like(one) for one in wanted]
    for one in suited(kernel, Shape(dtype, 10), [call]):
        prepared = ready(one, CPU)
        rows = slice(prepared.queries.start - call.queries[0], prepared.queries.stop - call.queries[0])
        found = kernel.forward(q[prepared.queries], k[prepared.keys], v[prepared.keys], prepared, 0.3)
        torch.testing.assert_close(found[0].double(), out[rows].detach(), rtol=bound, atol=bound)
        torch.testing.assert_close(found[1].double(), lse[:, rows].detach(), rtol=bound, atol=bound)
        back = kernel.backward(
            dout[rows], q[prepared.queries], k[prepared.keys], v[prepared.keys], *found, prepared, 0.3
        )
        for place, part, part_rows in zip(made, back, (prepared.queries, *2 * [prepared.keys]), strict=True):
            place[part_rows] += part
    for place, one in zip(made, wanted, strict=True):
        torch.testing.assert_close(place, one, rtol=4 * bound, atol=4 * bound)


def test_parts_of_the_keys_have_parts_of_the_gradient() -> None:
    """Backward over a part of the keys, given output and log-sum-exp of all, is that part: they sum to the whole."""
    q, k, v = given(FULL, 4, 2, 8, torch.float64)
    exact = [one.clone().requires_grad_() for one in (q, k, v)]
    out, lse = oracle(*exact, FULL, 0.4)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(out, exact, dout)
    dq, rest = torch.zeros_like(q), []
    for first, end in ((0, 9), (9, 20)):
        part = ready(Call((0, 12), (0, end - first), None, None), CPU)
        more, *others = torch_kernels.CPU.backward(dout, q, k[first:end], v[first:end], out, lse, part, 0.4)
        dq += more
        rest.append(others)
    torch.testing.assert_close(dq, wanted[0])
    torch.testing.assert_close(torch.cat([one[0] for one in rest]), wanted[1])
    torch.testing.assert_close(torch.cat([one[1] for one in rest]), wanted[2])


# --- the rule ---------------------------------------------------------------------------------------------------------

H200 = Machine("cuda", HOPPER, ())


@pytest.mark.parametrize(
    ("machine", "dtype", "calls", "forward", "backward"),
    [
        (here(CPU), torch.float64, [BAND, PACKED], "plain", "plain"),
        (here(CPU), torch.float32, [BAND, PACKED], "cpu", "cpu"),
        (here(CPU), torch.bfloat16, [FULL], "cpu", "cpu"),
        (H200, torch.bfloat16, [FULL, CAUSAL], "cudnn", "flash"),
        (Machine("cuda", HOPPER, ("cudnn_exact",)), torch.bfloat16, [FULL, CAUSAL], "cudnn", "cudnn_exact"),
        (Machine("cuda", HOPPER, ("cudnn_exact",)), torch.bfloat16, [BAND], "flash", "flash"),
        (H200, torch.bfloat16, [FULL, PACKED], "flash", "flash"),
        (H200, torch.float16, [BAND], "flash", "flash"),
        (H200, torch.float32, [FULL, CAUSAL], "efficient", "efficient"),
        (H200, torch.float32, [BAND], "plain", "plain"),
        (H200, torch.float64, [FULL], "plain", "plain"),
        (Machine("cuda", 8, ()), torch.bfloat16, [FULL], "flash", "flash"),
        (Machine("cuda", 8, ("flash2", "flash3")), torch.bfloat16, [FULL], "flash2", "flash2"),
        (Machine("cuda", HOPPER, ("flash2", "flash3", "flash4")), torch.bfloat16, [BAND], "flash3", "flash3"),
        (Machine("cuda", BLACKWELL, ("flash4",)), torch.bfloat16, [PACKED], "flash4", "flash4"),
    ],
)
def test_rule(machine: Machine, dtype: torch.dtype, calls: list[Call], forward: str, backward: str) -> None:
    """The rule as the module states it."""
    assert chosen("auto", machine, Shape(dtype, 64), calls, False).name == forward
    assert chosen("auto", machine, Shape(dtype, 64), calls, True).name == backward


def test_backward_by_rule_is_exact() -> None:
    """Whatever the rule chooses for a backward sums in a fixed order."""
    for machine in (here(CPU), H200, Machine("cuda", BLACKWELL, tuple(PACKAGES))):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            assert chosen("auto", machine, Shape(dtype, 64), [FULL], True).is_exact


@pytest.mark.parametrize(
    ("name", "machine", "shape", "call", "words"),
    [
        ("fast", H200, Shape(torch.bfloat16, 64), FULL, "not 'fast'"),
        ("cpu", H200, Shape(torch.bfloat16, 64), FULL, "does not run on cuda"),
        ("cudnn", here(CPU), Shape(torch.bfloat16, 64), FULL, "does not run on cpu"),
        ("flash3", H200, Shape(torch.bfloat16, 64), FULL, "needs the package `flash_attn_interface`"),
        ("cudnn", H200, Shape(torch.bfloat16, 64), BAND, "it has no window"),
        ("cudnn", H200, Shape(torch.bfloat16, 256), FULL, "heads are of 8 to 128"),
        ("flash", H200, Shape(torch.float32, 64), FULL, "not torch.float32"),
        ("efficient", H200, Shape(torch.float32, 6), FULL, "multiple of 8"),
        ("auto", here(CPU), Shape(torch.int32, 64), FULL, "no attention kernel for torch.int32"),
    ],
)
def test_refused(name: str, machine: Machine, shape: Shape, call: Call, words: str) -> None:
    """A kernel that cannot run is refused with the reason, before anything is sent."""
    with pytest.raises(ArgumentError, match=words):
        chosen(name, machine, shape, [call], False)


def test_a_named_kernel_takes_packed_calls_apart() -> None:
    """What takes one sequence at a time is called for each."""
    kernel = chosen("cudnn", H200, Shape(torch.bfloat16, 64), [PACKED], False)
    assert suited(kernel, Shape(torch.bfloat16, 64), [PACKED]) == tuple(apart(PACKED))
    assert suited(torch_kernels.FLASH, Shape(torch.bfloat16, 64), [PACKED]) == (PACKED,)


@pytest.mark.parametrize("call", [FULL, CAUSAL, BAND, PACKED], ids=["full", "causal", "band", "packed"])
@pytest.mark.parametrize(
    "kernel", [torch_kernels.FLASH, torch_kernels.CUDNN, torch_kernels.EFFICIENT], ids=lambda one: one.name
)
def test_gpu_ops_are_called_as_torch_has_them(kernel: Kernel, call: Call) -> None:
    """torch's own fake kernels take the arguments, and the shapes that come back are those of the plug."""
    dtype = torch.float32 if kernel.name == "efficient" else torch.bfloat16
    if kernel.refuses(Shape(dtype, 64), call):
        return
    prepared = ready(call, CPU)
    with FakeTensorMode(allow_non_fake_inputs=True):
        m, n = (rows.stop - rows.start for rows in (prepared.queries, prepared.keys))
        q, k = (torch.empty(rows, heads, 64, dtype=dtype, device="cuda") for rows, heads in ((m, 6), (n, 2)))
        if prepared.cuts is not None:
            cut = torch.empty(len(call.queries), dtype=torch.int32, device="cuda")
            prepared = replace(prepared, cuts=(cut, cut))
        out, lse = kernel.forward(q, k, k, prepared, 0.1)
        assert (out.shape, lse.shape, lse.dtype) == ((m, 6, 64), (6, m), torch.float32)
        back = kernel.backward(out, q, k, k, out, torch.empty(6, m, device="cuda"), prepared, 0.1)
        assert [one.shape for one in back] == [q.shape, k.shape, k.shape]


def test_determinism_is_asked_for_and_given_back() -> None:
    """torch's switch is as it was afterwards."""
    was: list[Any] = [torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory]
    with torch_kernels.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert was == [torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory]


def test_menu() -> None:
    """Names are what users write, each once."""
    names = [kernel.name for kernel in MENU]
    assert sorted(names) == sorted({*names, *PACKAGES})


class FakeGraph:
    """Stands for a graph of the package `cudnn`: takes what it has words for, and computes plainly."""

    built: ClassVar[list[tuple[int, int, int, bool]]] = []

    def __init__(self, **types: Any) -> None:
        assert sorted(types) == ["compute_data_type", "handle", "intermediate_data_type", "io_data_type"]

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: str) -> FakePort:
        assert data_type == ("float" if name == "stats" else "bfloat16")
        return FakePort(dim, stride)

    def sdpa_backward(self, *, name: str, attn_scale: float, use_causal_mask: bool, **ports: Any) -> list[FakePort]:
        assert ports.pop("use_deterministic_algorithm") is True
        self.scale, self.is_causal = attn_scale, use_causal_mask
        self.given = [ports[one] for one in ("dO", "q", "k", "v", "o", "stats")]
        self.made = [FakePort(), FakePort(), FakePort()]
        q, k = self.given[1].dim, self.given[2].dim
        self.built.append((q[1], q[2], k[2], use_causal_mask))
        return self.made

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pack: dict[FakePort, torch.Tensor], workspace: torch.Tensor, handle: str) -> None:
        assert all((list(one.shape), list(one.stride())) == (port.dim, port.stride) for port, one in pack.items())
        dout, q, k, v, out, lse = (pack[port] for port in self.given)
        rows = [one.squeeze(0).transpose(0, 1) for one in (dout, q, k, v, out)]
        call = Call((0, q.shape[2]), (0, k.shape[2]), None, 0 if self.is_causal else None)
        found = torch_kernels.PLAIN.backward(*rows, lse.squeeze(0).squeeze(-1), ready(call, CPU), self.scale)
        for port, one in zip(self.made, found, strict=True):
            pack[port].copy_(one.transpose(0, 1).unsqueeze(0))

    def __getattr__(self, name: str) -> Any:
        assert name in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")
        return lambda *_: None


class FakePort:
    def __init__(self, dim: Any = None, stride: Any = None) -> None:
        self.dim, self.stride = dim, stride

    def set_output(self, is_output: bool) -> FakePort:
        return self

    def set_dim(self, dim: list[int]) -> FakePort:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> FakePort:
        self.stride = stride
        return self

    def set_data_type(self, data_type: str) -> FakePort:
        return self


@pytest.mark.parametrize(
    ("most", "graphs"),
    [
        (1 << 29, {(8, 300, 300, True)}),
        (2 * 4 * 320 * 320, {(4, 300, 300, True)}),
        (2 * 4 * 128 * 320, {(8, 128, 128, True), (8, 128, 128, False), (8, 44, 44, True), (8, 44, 256, False)}),
    ],
    ids=["at once", "by heads", "by queries"],
)
def test_fixed_order_by_parts(monkeypatch: pytest.MonkeyPatch, most: int, graphs: set[tuple[int, ...]]) -> None:
    """The package is asked for a fixed order, of whole calls or of parts whose workspace is not too large: the same."""
    fake = types.SimpleNamespace(
        pygraph=FakeGraph,
        data_type=types.SimpleNamespace(BFLOAT16="bfloat16", HALF="half", FLOAT="float"),
        heur_mode=types.SimpleNamespace(A=0, FALLBACK=1),
        set_stream=lambda *, handle, stream: None,
    )
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(cudnn_kernels, "_stream", lambda device: 0)
    monkeypatch.setattr(cudnn_kernels, "_handle", lambda where: "handle")
    monkeypatch.setattr(cudnn_kernels, "MOST", most)
    FakeGraph.built.clear()
    cudnn_kernels._graph.cache_clear()
    call = ready(Call((0, 300), (0, 300), None, 0), CPU)
    q, k, v = given(call.call, 8, 2, 8, torch.bfloat16)
    out, lse = torch_kernels.CPU.forward(q, k, v, call, 0.3)
    dout = torch.randn(300, 8, 8).bfloat16()
    wanted = torch_kernels.PLAIN.backward(dout, q, k, v, out, lse, call, 0.3)
    for found, one in zip(cudnn_kernels.EXACT.backward(dout, q, k, v, out, lse, call, 0.3), wanted, strict=True):
        torch.testing.assert_close(found.float(), one, rtol=2**-7, atol=0.02)
    assert {*FakeGraph.built} == graphs
    assert all(2 * heads * -(-m // 64) * 64 * -(-n // 64) * 64 <= most for heads, m, n, _ in FakeGraph.built)
    cudnn_kernels._graph.cache_clear()
