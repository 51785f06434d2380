"""Which calls skip torch's dispatcher: those for which it would do nothing, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 - after the check for torch
from torch.autograd import forward_ad  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.profiler import profile  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import commdsl  # noqa: E402
from commdsl.runtime.eager import skips_dispatcher  # noqa: E402


def skips(*tensors: torch.Tensor) -> bool:
    return skips_dispatcher(tensors)


def test_plain_tensors() -> None:
    """Tensors in memory, parameters without a gradient, inference and autocast need no dispatcher."""
    x = torch.zeros(4)
    assert skips(x)
    assert skips(x, x[1:], torch.zeros(4, dtype=torch.complex64))
    assert skips(torch.nn.Parameter(x, requires_grad=False))
    with torch.inference_mode(), torch.autocast("cpu"):
        assert skips(torch.zeros(4))
        assert skips(x)


def test_gradients() -> None:
    """A wanted gradient takes the dispatcher, unless gradients are off."""
    x = torch.zeros(4, requires_grad=True)
    assert not skips(x)
    assert not skips(torch.zeros(4), x * 2)
    assert skips(x.detach())
    with torch.no_grad():
        assert skips(x)
        assert skips(torch.nn.Parameter(x))


def test_other_tensors() -> None:
    """Subclasses, and tensors whose memory does not hold their values, take the dispatcher."""
    x = torch.zeros(4)

    class Named(torch.Tensor):
        """What subclasses of users look like."""

    assert not skips(x.as_subclass(Named))
    assert not skips(TwoTensor(x, x))
    assert not skips(FakeTensorMode().from_tensor(x))
    assert not skips(torch.zeros(4, device="meta"))
    assert not skips(torch.zeros(4, dtype=torch.complex64).conj())
    assert not skips(torch.zeros(4, dtype=torch.complex64).conj().imag)
    assert not skips(torch._efficientzerotensor(4))


def test_modes() -> None:
    """Modes of dispatch and of functions take it; the mode behind a default device does not mind."""
    x = torch.zeros(4)
    with TorchDispatchMode():
        assert not skips(x)
    with FakeTensorMode():
        assert not skips(x)
    with TorchFunctionMode():
        assert not skips(x)
    with torch.device("cpu"):
        assert skips(x)
    assert skips(x)


def test_transforms() -> None:
    """vmap, functionalization, tracing and the profiler take it."""
    found: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(skips(x))
        return x + 1

    x = torch.zeros(2, 4)
    for transform in transforms(look):
        found.clear()
        transform(x)
        assert found
        assert not any(found)
    with profile():
        assert not skips(x)


def transforms(look: Callable[[torch.Tensor], torch.Tensor]) -> list[Callable[[torch.Tensor], object]]:
    def traced(x: torch.Tensor) -> object:
        return torch.jit.trace(look, x, check_trace=False)

    return [torch.vmap(look), torch.func.functionalize(look), traced]


def test_gradients_of_functions() -> None:
    """What torch.func or forward mode makes gradients of is refused, as torch would make zeros, or fail; what has none
    is not.
    """
    (group,) = commdsl.threads(1)
    x, one = torch.ones(2, 4), torch.ones(2, 4)

    def multiplied(x: torch.Tensor) -> torch.Tensor:
        return commdsl.overlap.all_gather_matmul(x, one, group=group).sum()

    def shared(x: torch.Tensor) -> torch.Tensor:
        return (x * multiplied(one)).sum() + (x * multiplied(x.detach())).sum()

    rows = torch.vmap(multiplied)
    for refused in (
        lambda: torch.func.grad(multiplied)(x),
        lambda: torch.func.grad(lambda x: rows(x[None]).sum())(x),
        lambda: torch.vmap(torch.func.grad(multiplied))(x[None]),
        lambda: torch.func.jvp(multiplied, (x,), (one,)),
        lambda: torch.func.jvp(lambda x: rows(x[None]).sum(), (x,), (one,)),
        lambda: torch.func.grad(lambda x: commdsl.all_reduce(x, group=group).sum())(x),
    ):
        with pytest.raises(commdsl.GradientError, match=r"torch\.func\.grad, vjp, jvp"):
            refused()
    with forward_ad.dual_level():
        with pytest.raises(commdsl.GradientError, match="nor in forward mode"):
            multiplied(forward_ad.make_dual(x, one))
        assert multiplied(x) == 16
    assert torch.equal(rows(x[None]), torch.tensor([16.0]))
    assert torch.equal(torch.func.grad(shared)(x), torch.full((2, 4), 32.0))


def test_compiled() -> None:
    """torch.compile traces the dispatcher's way, so a compiled call is an op of the graph."""

    def both(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if skips_dispatcher((x,)) else x + 2

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(4)), torch.full((4,), 2.0))


def test_wrong_number_of_tensors() -> None:
    """An op says how many tensors it takes."""
    op = commdsl.load("allreduce_ring", ranks=2)
    (name, _) = commdsl.threads(2)
    x = torch.zeros(4)
    with pytest.raises(commdsl.TensorError, match="takes 1 tensor, got 2"):
        op(x, x, group=name)
    with pytest.raises(commdsl.TensorError, match="takes 1 tensor, got 0"):
        op(group=name)
