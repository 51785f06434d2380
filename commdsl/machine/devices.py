"""Turns the name of a device into the GPU that it means, and says whether two names mean the same one.

Names are compared word by word: blanks, `-` and `_` separate words, and upper and lower case are alike. Words of the
maker (NVIDIA, AMD, Instinct, Tesla), of the memory (80GB, HBM3) and of the module (SXM5, OAM) do not count. So `h200`,
`H200` and `NVIDIA H200` are one GPU, and so are `H100` and `NVIDIA H100 80GB HBM3`; `NVIDIA H200 NVL` is another one,
a variant of the H200, as is every name with a known GPU and further words.

Assumes that a name has its GPU as a word of its own. Does not know speeds (`attention.machines` does), asks no driver.
"""

from __future__ import annotations

import re

from commdsl.machine.errors import ArgumentError

CPU = "cpu"
"""The name of the processor, in place of a GPU's."""

GPUS = ("H200", "H100", "A100", "MI300X")
"""The GPUs whose speeds are known or estimated."""

_UNCOUNTED = re.compile(r"nvidia|amd|instinct|tesla|gpu|\d+gi?b|hbm\d*e?|sxm\d*|oam")
_TORCH_DEVICE = re.compile(r"(cuda|gpu|hip|xpu)(:\d+)?")


def named(device: object) -> str:
    """Return the name without surrounding blanks, and `cpu` in lower case.

    Raises ArgumentError where it cannot be the name of a device: no text, an empty one, or a torch device (`cuda:0`).
    """
    name = device.strip() if isinstance(device, str) else ""
    if not name or _TORCH_DEVICE.fullmatch(name.lower()):
        raise ArgumentError(f"a device is named as torch names the GPU, as in NVIDIA H200, or cpu; got {device!r}")
    return CPU if name.lower() == CPU else name


def words(name: str) -> tuple[str, ...]:
    """Return the words of a name that count, in lower case."""
    return tuple(word for word in re.split(r"[\s_-]+", name.lower()) if word and not _UNCOUNTED.fullmatch(word))


def same(one: str, other: str) -> bool:
    """Return whether two names mean the same GPU; names without a word that counts are compared as they are."""
    return (words(one) or one) == (words(other) or other)


def known(name: str) -> str | None:
    """Return the one of `GPUS` that the name has among its words, of a GPU, a variant of it, or a topology."""
    return next((gpu for gpu in GPUS if gpu.lower() in words(name)), None)


def doubt(name: str) -> str:
    """Return a clause that says that a GPU is not known, and which are; empty for a known one and the processor."""
    return "" if name == CPU or known(name) else f"`{name}` is not a known GPU ({', '.join(GPUS)})"
