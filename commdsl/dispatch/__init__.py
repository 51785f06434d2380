"""The routing of distributed attention: `Metadata` that says which rows go where, and the ops that move them.

Importing this imports nothing else; each name below loads what it needs when it is first used.

    errors        what is wrong with the numbers of a dispatch
    metadata, form   which rows go where, for all ranks or one; its arrays in the one form
    layout        routes <-> Metadata
    spans         query shards and the keys that they see -> what attention walks
    planned, compute, generate   a plan, shards with destinations, or chance -> Metadata
    validator, attention_laws   whether it may be used
    simulate      what it means: the oracle of the kernels
    route         Metadata of all ranks -> the tables of one, on its device
    limits        the most that any call moves -> symmetric memory
    repeats       a call -> the same call again, without what need not be asked twice
    untraced      what `torch.compile` does not look into
    launcher      one rank's end of a dispatch
    attended      the attention of received rows, by the kernels of `commdsl.attention`
    dispatcher    the torch op, and the calls users make
    planning      document lengths -> a balanced, proved Route
    document      the documents' kernel and tests, by their names
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commdsl.machine.lazy import lazy

if TYPE_CHECKING:
    from commdsl.dispatch.compute import compute_attn_layout_seqlens as compute_attn_layout_seqlens
    from commdsl.dispatch.compute import compute_metadata as compute_metadata
    from commdsl.dispatch.compute import compute_metadata_kv as compute_metadata_kv
    from commdsl.dispatch.compute import exclusive_cumsum as exclusive_cumsum
    from commdsl.dispatch.dispatcher import Dispatcher as Dispatcher
    from commdsl.dispatch.document import dispatch_kernel as dispatch_kernel
    from commdsl.dispatch.document import test_qkv_dispatch as test_qkv_dispatch
    from commdsl.dispatch.document import test_query_dispatch as test_query_dispatch
    from commdsl.dispatch.errors import DispatchError as DispatchError
    from commdsl.dispatch.errors import RowError as RowError
    from commdsl.dispatch.generate import create_qkv_dispatch as create_qkv_dispatch
    from commdsl.dispatch.generate import gen_seq_lens as gen_seq_lens
    from commdsl.dispatch.limits import Limits as Limits
    from commdsl.dispatch.metadata import AttentionLayout as AttentionLayout
    from commdsl.dispatch.metadata import Metadata as Metadata
    from commdsl.dispatch.metadata import MetadataError as MetadataError
    from commdsl.dispatch.metadata import QKVMetadata as QKVMetadata
    from commdsl.dispatch.planned import from_plan as from_plan
    from commdsl.dispatch.planned import load_plan as load_plan
    from commdsl.dispatch.planning import plan as plan
    from commdsl.dispatch.route import Route as Route
    from commdsl.dispatch.simulate import orchestrate_simulate as orchestrate_simulate
    from commdsl.dispatch.simulate import simulate_reduce as simulate_reduce
    from commdsl.dispatch.spans import Span as Span
    from commdsl.dispatch.spans import Varlen as Varlen
    from commdsl.dispatch.validator import validate as validate

__all__ = [
    "AttentionLayout",
    "DispatchError",
    "Dispatcher",
    "Limits",
    "Metadata",
    "MetadataError",
    "QKVMetadata",
    "Route",
    "RowError",
    "Span",
    "Varlen",
    "compute_attn_layout_seqlens",
    "compute_metadata",
    "compute_metadata_kv",
    "create_qkv_dispatch",
    "dispatch_kernel",
    "exclusive_cumsum",
    "from_plan",
    "gen_seq_lens",
    "load_plan",
    "orchestrate_simulate",
    "plan",
    "simulate_reduce",
    "test_qkv_dispatch",
    "test_query_dispatch",
    "validate",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "AttentionLayout": "commdsl.dispatch.metadata",
        "DispatchError": "commdsl.dispatch.errors",
        "Dispatcher": "commdsl.dispatch.dispatcher",
        "Limits": "commdsl.dispatch.limits",
        "Metadata": "commdsl.dispatch.metadata",
        "MetadataError": "commdsl.dispatch.metadata",
        "QKVMetadata": "commdsl.dispatch.metadata",
        "Route": "commdsl.dispatch.route",
        "RowError": "commdsl.dispatch.errors",
        "Span": "commdsl.dispatch.spans",
        "Varlen": "commdsl.dispatch.spans",
        "compute_attn_layout_seqlens": "commdsl.dispatch.compute",
        "compute_metadata": "commdsl.dispatch.compute",
        "compute_metadata_kv": "commdsl.dispatch.compute",
        "create_qkv_dispatch": "commdsl.dispatch.generate",
        "dispatch_kernel": "commdsl.dispatch.document",
        "exclusive_cumsum": "commdsl.dispatch.compute",
        "from_plan": "commdsl.dispatch.planned",
        "gen_seq_lens": "commdsl.dispatch.generate",
        "load_plan": "commdsl.dispatch.planned",
        "orchestrate_simulate": "commdsl.dispatch.simulate",
        "plan": "commdsl.dispatch.planning",
        "simulate_reduce": "commdsl.dispatch.simulate",
        "test_qkv_dispatch": "commdsl.dispatch.document",
        "test_query_dispatch": "commdsl.dispatch.document",
        "validate": "commdsl.dispatch.validator",
    },
)
