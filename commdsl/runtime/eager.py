"""Says of a call's tensors whether torch's dispatcher has anything to do but to hand them on to the op's own kernel.

Assumes an op without kernels for autocast and the like: what looks at its calls is gradients, modes, transforms,
tracers, the profiler, and tensors that are not what they seem. Does not look at shapes. In doubt the answer is no: the
dispatcher is always right, only slower.
"""

from __future__ import annotations

import torch
from torch._C import (
    _functorch,
    _get_function_stack_at,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    is_grad_enabled,
)
from torch._C._autograd import _profiler_enabled
from torch.compiler import is_dynamo_compiling
from torch.utils._device import DeviceContext


def skips_dispatcher(tensors: tuple[torch.Tensor, ...], *, but_gradients: bool = False) -> bool:
    """`but_gradients`: the caller sees to those itself, with a Function of torch's."""
    if is_dynamo_compiling():  # first, as torch.compile takes this branch and traces no further
        return False
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
        ):
            return False
    return True


def _only_default_devices() -> bool:
    """Whether the modes are those of `torch.set_default_device`, which concern functions that make tensors."""
    return all(isinstance(_get_function_stack_at(level), DeviceContext) for level in range(_len_torch_function_stack()))
