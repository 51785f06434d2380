"""Says of a call's tensors whether torch's dispatcher has anything to do but to hand them on to the op's own kernel.

Assumes an op without kernels for autocast and the like: what looks at its calls is gradients, modes, transforms,
tracers, the profiler, and tensors that are not what they seem. Does not look at shapes. In doubt the answer is no: the
dispatcher is right, only slower; but for the gradients of torch.func and forward-mode, of which it makes zeros.
"""

from __future__ import annotations

import torch
from torch._C import (
    _functorch,
    _get_function_stack_at,
    _get_tracing_state,
    _has_storage,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    is_grad_enabled,
)
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._device import DeviceContext

from commdsl.runtime.errors import GradientError


def skips_dispatcher(tensors: tuple[torch.Tensor, ...], *, but_gradients: bool = False) -> bool:
    """`but_gradients`: the caller sees to those itself, with a Function of torch's. Raises GradientError as
    `refuse_transforms` does.
    """
    if is_dynamo_compiling():  # first, as torch.compile takes this branch and traces no further
        return False
    if forward_ad._current_level >= 0 or _functorch.peek_interpreter_stack() is not None:
        refuse_transforms(tensors)
    if (
        _len_torch_dispatch_stack()
        or _functorch.peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or _profiler_enabled()
        or (_len_torch_function_stack() and not _only_default_devices())
    ):
        return False
    grad = is_grad_enabled() and not but_gradients
    for tensor in tensors:
        kind = type(tensor)
        if (
            (kind is not torch.Tensor and kind is not torch.nn.Parameter)  # a subclass sees its calls
            or not (tensor.is_cuda or tensor.is_cpu)
            or (grad and tensor.requires_grad)
            or tensor.is_conj()  # its memory does not hold its values as they are read; nor in the next two
            or tensor.is_neg()
            or tensor._is_zerotensor()
            or not _has_storage(tensor)  # as one of the gradients that autograd makes at once has none
        ):
            return False
    return True


def refuse_transforms(tensors: tuple[torch.Tensor, ...]) -> None:
    """Raises GradientError where torch.func makes a gradient of one of these, or one has a tangent."""
    if any(map(_is_transformed, tensors)):
        raise GradientError(
            "ops of commdsl have no gradient in torch.func.grad, vjp, jvp and their like, nor in forward mode: "
            "use torch.autograd.grad or backward()"
        )


def _is_transformed(tensor: torch.Tensor) -> bool:
    is_forward, is_batched = forward_ad._current_level >= 0, _functorch.is_batchedtensor(tensor)
    if is_forward and not is_batched and forward_ad.unpack_dual(tensor).tangent is not None:
        return True
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_gradtrackingtensor(tensor) and (
            (tensor.requires_grad and is_grad_enabled()) or (is_forward and is_batched)  # which cannot be looked into
        ):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def _only_default_devices() -> bool:
    """Whether the modes are those of `torch.set_default_device`, which concern functions that make tensors."""
    return all(isinstance(_get_function_stack_at(level), DeviceContext) for level in range(_len_torch_function_stack()))
