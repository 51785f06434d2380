"""Expert parallelism: rows to the ranks of their keys, which never leave the device, and back as weighted sums.

Importing this imports nothing else; each name below loads what it needs when it is first used.

    simulate   what it means, on arrays of all ranks: the oracle of the kernels
    float8     what arrives of tensors that travel in float8
    limits     the most that any call moves -> symmetric memory
    way_there  the ways there: their memory, their kernels, what a call passes to them
    way_back   one way back: its memory, its kernels, what a call passes to them
    pending    a call of two launches, between them
    handles    what a rank holds of a call there, and what calls back need
    experts    one rank's end: the calls that launch
    living     the ranks that are left of a group, and their keys
    exchange   the same with a value for each row, and both ways of values: what gradients need
    functional operators with gradients, for autograd and torch.compile
    layer      EPAll2AllLayer, on these
    engines    the forms of vLLM's and SGLang's dispatchers
    scatter    scatter indices of all ranks -> the first that is wrong
    config, context, layout  what it is made of: its numbers, its memory, its descriptors
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commdsl.machine.lazy import lazy

if TYPE_CHECKING:
    from commdsl.ep.config import EPConfig as EPConfig
    from commdsl.ep.context import DispatchCombineContext as DispatchCombineContext
    from commdsl.ep.exchange import Exchange as Exchange
    from commdsl.ep.experts import Experts as Experts
    from commdsl.ep.float8 import Quantised as Quantised
    from commdsl.ep.functional import Dispatched as Dispatched
    from commdsl.ep.functional import combine as combine
    from commdsl.ep.functional import dequantise as dequantise
    from commdsl.ep.functional import dispatch as dispatch
    from commdsl.ep.handles import Handle as Handle
    from commdsl.ep.handles import Received as Received
    from commdsl.ep.layer import EPAll2AllLayer as EPAll2AllLayer
    from commdsl.ep.layout import EPAllToAllLayoutDesc as EPAllToAllLayoutDesc
    from commdsl.ep.limits import Limits as Limits
    from commdsl.ep.living import KeyMap as KeyMap
    from commdsl.ep.living import Living as Living
    from commdsl.ep.pending import Pending as Pending
    from commdsl.runtime.errors import KeysError as KeysError

__all__ = [
    "DispatchCombineContext",
    "Dispatched",
    "EPAll2AllLayer",
    "EPAllToAllLayoutDesc",
    "EPConfig",
    "Exchange",
    "Experts",
    "Handle",
    "KeyMap",
    "KeysError",
    "Limits",
    "Living",
    "Pending",
    "Quantised",
    "Received",
    "combine",
    "dequantise",
    "dispatch",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "DispatchCombineContext": "commdsl.ep.context",
        "Dispatched": "commdsl.ep.functional",
        "EPAll2AllLayer": "commdsl.ep.layer",
        "EPAllToAllLayoutDesc": "commdsl.ep.layout",
        "EPConfig": "commdsl.ep.config",
        "Exchange": "commdsl.ep.exchange",
        "Experts": "commdsl.ep.experts",
        "Handle": "commdsl.ep.handles",
        "KeysError": "commdsl.runtime.errors",
        "KeyMap": "commdsl.ep.living",
        "Limits": "commdsl.ep.limits",
        "Living": "commdsl.ep.living",
        "Pending": "commdsl.ep.pending",
        "Quantised": "commdsl.ep.float8",
        "Received": "commdsl.ep.handles",
        "combine": "commdsl.ep.functional",
        "dequantise": "commdsl.ep.functional",
        "dispatch": "commdsl.ep.functional",
    },
)
