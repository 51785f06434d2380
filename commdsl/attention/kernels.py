"""Turns what a call of attention is of into the kernel that runs it: the rule by which one is chosen, and the menu.

Assumes that a package that is installed works. Does not measure anything: the rule is the same on every rank.

The rule, for `kernel="auto"`: the first of these that takes every call of every visit.

    CPU                       float64: plain. Others: torch's flash for the CPU, which computes in float32, then plain
    GPU, bfloat16, float16    forward: flash3 (Hopper) or flash4 (Blackwell) where installed; cuDNN from Hopper on;
                              flash2 where installed; torch's flash. Backward: the same, but cuDNN only where the
                              package `cudnn` is installed, which asks it to sum in a fixed order, as torch cannot
    GPU, others               memory efficient, then plain

Packed documents and windows are what cuDNN does not take. A kernel that takes one sequence at a time is called for each
(only where it is asked for by name, and on the CPU).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from commdsl.attention import cudnn_kernels, flash_kernels, torch_kernels
from commdsl.attention.kernel import Kernel, Ready, Shape, ready
from commdsl.attention.masks import Call
from commdsl.machine.errors import ArgumentError

MENU = (
    torch_kernels.PLAIN,
    torch_kernels.CPU,
    torch_kernels.FLASH,
    torch_kernels.CUDNN,
    cudnn_kernels.EXACT,
    torch_kernels.EFFICIENT,
    flash_kernels.FLASH2,
    flash_kernels.FLASH3,
    flash_kernels.FLASH4,
)
PACKAGES = {**flash_kernels.MODULES, cudnn_kernels.EXACT.name: cudnn_kernels.MODULE}
"""The module of each kernel that a package brings."""

ON_CPU = ("plain", "cpu")
HOPPER, BLACKWELL = 9, 10


@dataclass(frozen=True, slots=True)
class Machine:
    """What the rule asks of where it runs."""

    device: str  # its type
    major: int  # of the compute capability; 0 on a CPU
    installed: tuple[str, ...]  # kernels of packages


def here(device: torch.device) -> Machine:
    if device.type != "cuda":
        return Machine(device.type, 0, ())
    major, _ = torch.cuda.get_device_capability(device)
    return Machine("cuda", major, tuple(name for name, module in PACKAGES.items() if _installed(module)))


def _installed(module: str) -> bool:
    """Whether it can be found, of a package its part too."""
    top, _, rest = module.partition(".")
    return find_spec(top) is not None and (not rest or find_spec(module) is not None)


def chosen(name: str, machine: Machine, shape: Shape, calls: Sequence[Call], backward: bool) -> Kernel:
    """The kernel of that name, or by the rule. Raises ArgumentError where it does not take a call, with the reason."""
    if name != "auto":
        return _named(name, machine, shape, calls)
    reasons = []
    for kernel in _order(machine, shape, backward):
        reason = _reason(kernel, shape, calls)
        if not reason:
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    raise ArgumentError(f"no attention kernel for {shape.dtype} and heads of {shape.dim}: {'; '.join(reasons)}")


def suited(kernel: Kernel, shape: Shape, calls: Iterable[Call]) -> tuple[Call, ...]:
    """The calls as this kernel takes them: a packed one sequence by sequence where it must be."""
    found: list[Call] = []
    for call in calls:
        found += [call] if not kernel.refuses(shape, call) else apart(call)
    return tuple(found)


def prepared(
    kernel: Kernel, shape: Shape, calls: Iterable[Call], device: torch.device, *, backward: bool
) -> tuple[Ready, ...]:
    """The calls as `suited`, with all that needs no data, and of a backward the parts in which the kernel runs them."""
    taken = suited(kernel, shape, calls)
    return tuple(ready(call, device, kernel.parts(shape, call, device) if backward else ()) for call in taken)


def apart(call: Call) -> list[Call]:
    """Each sequence of a packed call by itself, unless it is empty."""
    return [Call((first, end), (key, key_end), call.left, call.right) for first, end, key, key_end, *_ in call.admits()]


def _named(name: str, machine: Machine, shape: Shape, calls: Sequence[Call]) -> Kernel:
    found = {kernel.name: kernel for kernel in MENU}.get(name)
    if found is None:
        known = ", ".join(f'"{kernel.name}"' for kernel in MENU)
        raise ArgumentError(f'`kernel` is "auto" or one of {known}, not {name!r}')
    if not (name in ON_CPU or machine.device == "cuda") or (name == "cpu" and machine.device != "cpu"):
        raise ArgumentError(f"the kernel `{name}` does not run on {machine.device}")
    if name in PACKAGES and name not in machine.installed:
        raise ArgumentError(f"the kernel `{name}` needs the package `{PACKAGES[name]}`")
    reason = next((found.refuses(shape, one) for call in calls for one in apart(call) if found.refuses(shape, one)), "")
    if reason:
        raise ArgumentError(f"the kernel `{name}` does not take this: {reason}")
    return found


def _order(machine: Machine, shape: Shape, backward: bool) -> list[Kernel]:
    if machine.device != "cuda":
        return [torch_kernels.PLAIN] if shape.dtype == torch.float64 else [torch_kernels.CPU, torch_kernels.PLAIN]
    if shape.dtype not in torch_kernels.HALVES:
        return [torch_kernels.EFFICIENT, torch_kernels.PLAIN]
    found = []
    if "flash3" in machine.installed and machine.major == HOPPER:
        found.append(flash_kernels.FLASH3)
    if "flash4" in machine.installed and machine.major == BLACKWELL:
        found.append(flash_kernels.FLASH4)
    if machine.major >= HOPPER and not backward:
        found.append(torch_kernels.CUDNN)
    if machine.major >= HOPPER and backward and cudnn_kernels.EXACT.name in machine.installed:
        found.append(cudnn_kernels.EXACT)
    if "flash2" in machine.installed:
        found.append(flash_kernels.FLASH2)
    return [*found, torch_kernels.FLASH, torch_kernels.PLAIN]


def _reason(kernel: Kernel, shape: Shape, calls: Sequence[Call]) -> str:
    """Why it does not take some call; the CPU's kernel takes them one sequence at a time."""
    asked = (one for call in calls for one in (apart(call) if kernel.name == "cpu" else [call]))
    return next((reason for one in asked if (reason := kernel.refuses(shape, one))), "")
