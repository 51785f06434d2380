"""The public calls that end in collective work, each with what one rank may get wrong: for test_reporting.py.

Assumes ranks that are threads. What does no collective work is listed with the others, so that a new name is in one of
the lists or fails a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from dispatch_plans import Case as Planned
from dispatch_plans import limits

import commdsl
from commdsl import attention, dispatch, ep, overlap
from commdsl.ep import engines
from commdsl.planner.chance import Draw, random_plan

Change = Callable[[Any], Any]
RANKS = 2


@dataclass
class Call:
    """A call of one rank: it can be made again and again."""

    function: Callable[..., Any]
    given: list[Any]
    named: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        return self.function(*self.given, **self.named)


@dataclass(frozen=True)
class Entry:
    """A public call. `made`: the right call of a rank of a group, collective; `wrong`: what is wrong with that of one
    rank, by name: the position of an argument, and what becomes of it.
    """

    made: Callable[[int, str], Call]
    wrong: Mapping[str, tuple[int, Change]]
    ranks: int = RANKS
    keyword: bool = True  # whether it refuses keywords that it does not know


def sparse(x: Any) -> Any:
    return x.to_sparse()


def complexes(x: Any) -> Any:
    return x.to(torch.complex64)


def doubled(x: Any) -> Any:
    return x.double()


def flat(x: Any) -> Any:
    return x.flatten()


def narrow(x: Any) -> Any:
    return x[..., :-1].contiguous()


def lists(x: Any) -> Any:
    return x.tolist()


def nothing(x: Any) -> Any:
    return None


def first(change: Change) -> Change:
    return lambda several: [change(several[0]), *several[1:]]


X, Y = torch.ones(8, 8), torch.ones(4, 8)
PRODUCT = {"dtype": (1, doubled), "shape": (1, narrow), "layout": (0, sparse), "type": (0, lists)}
ONE = {"layout": (0, sparse), "type": (0, lists)}


def collective(name: str, *given: Any, **named: Any) -> Callable[[int, str], Call]:
    return lambda rank, group: Call(getattr(commdsl, name), [X.clone(), *given], {**named, "group": group})


def product(name: str, rows: int = 4, **named: Any) -> Callable[[int, str], Call]:
    function = getattr(overlap, name)
    return lambda rank, group: Call(function, [torch.ones(rows, 8), torch.ones(8, 8)], {**named, "group": group})


def scheduled(method: str) -> Callable[[int, str], Call]:
    op = commdsl.load("allreduce_ring", ranks=RANKS)
    return lambda rank, group: Call(getattr(op, method), [X.clone()], {"group": group})


def visited(rank: int, group: str) -> Call:
    op = commdsl.load("rotation_ring", ranks=RANKS)
    return Call(op.visit, [X.clone(), lambda *_: None], {"group": group})


COLLECTIVES = {
    "all_reduce": Entry(collective("all_reduce"), {**ONE, "dtype": (0, complexes)}),
    "all_reduce_": Entry(collective("all_reduce_"), {**ONE, "dtype": (0, complexes)}),
    "all_gather": Entry(collective("all_gather"), ONE),
    "reduce_scatter": Entry(
        collective("reduce_scatter"), {**ONE, "shape": (0, lambda x: x[:3]), "dtype": (0, complexes)}
    ),
    "all_to_all": Entry(collective("all_to_all"), {**ONE, "shape": (0, lambda x: x[:3])}),
    "broadcast": Entry(collective("broadcast", 1), ONE),
    "Op": Entry(scheduled("__call__"), {**ONE, "dtype": (0, complexes)}),
    "Op.in_place": Entry(scheduled("in_place"), {**ONE, "dtype": (0, complexes)}),
    "Op.profiled": Entry(scheduled("profiled"), {**ONE, "dtype": (0, complexes)}),
    "Op.visit": Entry(visited, {**ONE, "function": (1, nothing)}),
    "prepare": Entry(
        lambda rank, group: Call(commdsl.prepare, [["all_reduce"], 1024, [torch.float32]], {"group": group}),
        {"dtype": (2, lambda one: ["float"]), "type": (1, str)},
    ),
}

ATTENTION: dict[str, Entry] = {}
DOCUMENT = {"dtype": (2, doubled), "shape": (1, flat), "type": (1, nothing)}
PIECES = {"dtype": (2, first(doubled)), "shape": (1, flat), "type": (2, nothing)}


def attended(rank: int, group: str) -> Call:
    q = torch.ones(1, 4, 2, 8)
    return Call(attention.attention, [q, q.clone(), q.clone()], {"group": group})


def within(rank: int, group: str) -> Call:
    q = torch.ones(1, 2, 4, 8)

    def call(*given: Any, **named: Any) -> Any:
        with attention.sequence_parallel(group):
            return torch.nn.functional.scaled_dot_product_attention(*given, **named)

    return Call(call, [q, q.clone(), q.clone()])


def ring(name: str) -> Callable[[int, str], Call]:
    q = torch.ones(1, 4, 2, 8)
    return lambda rank, group: Call(getattr(attention, name), [group, q, q.clone(), q.clone(), None])


def hamilton(name: str, ranks: int, **named: Any) -> Callable[[int, str], Call]:
    def made(rank: int, group: str) -> Call:
        q, count = torch.ones(1, 4, 2, 8), named.get("pieces", ranks - 1)
        settings = {key: value for key, value in named.items() if key != "pieces"}
        pieces = [torch.ones(1, 4 // count, 2, 8) for _ in range(count)]
        return Call(getattr(attention, name), [group, q, pieces, list(pieces), None], settings)

    return made


def rings(method: str) -> Callable[[int, str], Call]:
    return lambda rank, group: Call(
        getattr(attention.RingComm(group), method), [X, Y] if method != "send_recv" else [X]
    )


def blocks(rank: int, group: str) -> Call:
    return Call(attention.A2AComm(group).all_to_all, [[X, X.clone()], [torch.empty(8, 8), torch.empty(8, 8)]])


NODES = attention.gen_hamilton_circle_two_nodes(4, 2)
for _name in ("ring_attention_forward_flash_attn", "zigzag_ring_attention_forward_flash_attn"):
    ATTENTION |= {_name: Entry(ring(_name), DOCUMENT), f"{_name}_profile": Entry(ring(f"{_name}_profile"), DOCUMENT)}
for _name in ("hamilton_attention_forward_full_flash_attn", "hamilton_attention_forward_causal_flash_attn"):
    for _full in (_name, f"{_name}_profile"):
        ATTENTION[_full] = Entry(hamilton(_full, 2, world_size=2), PIECES)
for _full in (
    "hamilton_attention_forward_full_flash_attn_two_nodes",
    "hamilton_attention_forward_full_flash_attn_two_nodes_profile",
):
    ATTENTION[_full] = Entry(
        hamilton(
            _full,
            4,
            pieces=2,
            out_mapping=attention.calculate_intra_node_out_mapping_two_nodes(attention.gen_hamilton_path_local(2)),
            inter_out_mapping=attention.calculate_inter_node_mapping(NODES)[1],
        ),
        PIECES,
        4,
    )
ATTENTION |= {
    "attention": Entry(
        attended, {"dtype": (1, doubled), "shape": (0, flat), "layout": (2, sparse), "type": (0, lists)}
    ),
    # A keyword that there is not is refused by torch itself.
    "sequence_parallel": Entry(
        within, {"dtype": (1, doubled), "shape": (0, flat), "layout": (2, sparse)}, keyword=False
    ),
    "unshard_sequence": Entry(
        lambda rank, group: Call(attention.unshard_sequence, [X, 0], {"group": group}),
        {**ONE, "shape": (1, lambda dim: 7)},
    ),
    "RingComm.send_recv": Entry(rings("send_recv"), ONE),
    "RingComm.send_recv_kv": Entry(rings("send_recv_kv"), {**ONE, "second": (1, lists)}),
    "A2AComm.all_to_all": Entry(
        blocks, {"dtype": (0, first(doubled)), "shape": (0, lambda one: one[:1]), "type": (1, nothing)}
    ),
}


def replicated(rank: int, group: str) -> Call:
    """Nothing travels but for the gradient: the others hear of a refused one in what follows."""

    def call(*given: Any, **named: Any) -> None:
        overlap.replicated_matmul(*given, group=group, **named)
        commdsl.all_reduce(X.clone(), group=group)

    return Call(call, [Y.clone(), X.clone()])


OVERLAP = {
    "all_gather_matmul": Entry(product("all_gather_matmul"), PRODUCT),
    "matmul_reduce_scatter": Entry(product("matmul_reduce_scatter", 8), PRODUCT),
    "matmul_all_reduce": Entry(product("matmul_all_reduce"), PRODUCT),
    "matmul_all_to_all": Entry(product("matmul_all_to_all"), PRODUCT),
    "all_to_all_matmul": Entry(
        lambda rank, group: Call(overlap.all_to_all_matmul, [X.clone(), torch.ones(8, 16)], {"group": group}), PRODUCT
    ),
    "replicated_matmul": Entry(replicated, PRODUCT),
    "all_reduce_rms_norm": Entry(
        lambda rank, group: Call(
            overlap.all_reduce_rms_norm, [Y.clone(), Y.clone(), torch.ones(8), 1e-6], {"group": group}
        ),
        {**PRODUCT, "number": (3, str)},
    ),
    "profiled": Entry(
        lambda rank, group: Call(
            overlap.profiled, ["matmul_reduce_scatter", X.bfloat16(), X.bfloat16()], {"group": group}
        ),
        {"dtype": (2, doubled), "shape": (1, flat), "name": (0, lambda one: "matmul")},
    ),
}


def layer(kind: Any, rows: int, width: int, **named: Any) -> Callable[[int, str], Call]:
    def made(rank: int, group: str) -> Call:
        return Call(kind(8, 8, group=group, **named), [torch.ones(rows, width)])

    return made


def model(group: str) -> Any:
    found = torch.nn.Sequential(overlap.ColumnParallelLinear(8, 8, group=group), torch.nn.LayerNorm(4))
    for one in found.parameters():
        torch.nn.init.ones_(one)
        one.grad = torch.ones_like(one)
    return found


def synced(rank: int, group: str) -> Call:
    def call(found: Any, *given: Any, **named: Any) -> None:
        for handle in overlap.sync_replicated(found, *given, **named):
            handle.remove()

    return Call(call, [model(group), group])


def clipped(rank: int, group: str) -> Call:
    return Call(
        lambda one, *given, **named: overlap.clip_grad_norm_(one, *given, **named),
        [[*model(group).parameters()], 1.0, 2.0],
    )


LAYER = {"dtype": (0, doubled), "shape": (0, narrow), "layout": (0, sparse)}
OVERLAP |= {
    "ColumnParallelLinear": Entry(layer(overlap.ColumnParallelLinear, 4, 8), LAYER),
    "RowParallelLinear": Entry(layer(overlap.RowParallelLinear, 8, 4), LAYER),
    "RowParallelLinear whole": Entry(layer(overlap.RowParallelLinear, 8, 4, sequence_parallel=False), LAYER),
    "clip_grad_norm_": Entry(clipped, {"number": (2, lambda one: -1.0), "type": (1, nothing)}),
    "sync_replicated": Entry(synced, {"device": (0, lambda one: torch.nn.LayerNorm(4, device="meta"))}),
}

PLAN = Planned(random_plan(Draw(RANKS, 40, empty=0.0), 0))
WIDTHS = (32, 32, 32)


def sender(name: str) -> Callable[[int, str], Call]:
    def made(rank: int, group: str) -> Call:
        if name == "attend":
            route = dispatch.plan([[5, 3], [6]], group=group, device="cpu")
            found = dispatch.Dispatcher.for_tokens(8, 2, 2, 4, torch.float32, group, "cpu")
            return Call(found.attend, [*(torch.ones(route.rows, 2, 4) for _ in range(3)), route])
        route = dispatch.Route(*PLAN.metadata[:4], rank=rank)
        found = dispatch.Dispatcher(limits([PLAN], WIDTHS), group, "cpu")
        rows = {"collect": route.queries, "collect_qkv": route.queries}.get(name, route.rows)
        others = route.keys if name == "collect_qkv" else rows
        count = 2 if name.endswith("_qkv") else 0
        return Call(
            getattr(found, name), [torch.ones(rows, 2, 4), *(torch.ones(others, 2, 4) for _ in range(count)), route]
        )

    return made


def kernel(rank: int, group: str) -> Call:
    route = dispatch.Route(*PLAN.metadata[:4], rank=rank)
    found = dispatch.Dispatcher(limits([PLAN], WIDTHS), group, "cpu")
    return Call(dispatch.dispatch_kernel, [torch.ones(route.rows, 8), torch.empty(route.queries, 8), route, found])


def planned(rank: int, group: str) -> Call:
    """A Route asks nobody but on a group's first call: the others hear of a refused one in what follows."""

    def call(lengths: Any, **named: Any) -> None:
        dispatch.plan(lengths, group=group, device="cpu", **named)
        commdsl.all_reduce(X.clone(), group=group)

    return Call(call, [[[5, 3], [6]]])


ROUTED = {"shape": (0, lambda x: x[1:]), "layout": (0, sparse), "type": (0, lists), "route": (-1, nothing)}
DISPATCH = {
    "Dispatcher": Entry(
        lambda rank, group: Call(dispatch.Dispatcher, [limits([PLAN], WIDTHS), group, "cpu"]),
        {"limits": (0, nothing), "device": (2, lambda one: "nowhere")},
    ),
    "Dispatcher.for_tokens": Entry(
        lambda rank, group: Call(dispatch.Dispatcher.for_tokens, [8, 2, 2, 8, torch.float32, group, "cpu"]),
        {"dtype": (4, nothing)},
    ),
    **{
        f"Dispatcher.{one}": Entry(sender(one), ROUTED)
        for one in ("attend", "collect", "dispatch", "dispatch_qkv", "collect_qkv")
    },
    "plan": Entry(planned, {"shape": (0, lambda one: one[:1]), "type": (0, nothing)}),
    "dispatch_kernel": Entry(
        kernel, {"shape": (0, lambda x: x[1:]), "type": (1, nothing), "small": (1, lambda x: x[1:])}
    ),
}

LIMITS = ep.Limits(6, 3, 36, (16,), 16, width_again=16)


def experts(name: str) -> Callable[[int, str], Call]:
    def made(rank: int, group: str) -> Call:
        found = ep.Experts(LIMITS, group, "cpu", results=4, source="tokens", name="tokens", params={"E": 4})
        return Call(*_way(found, (torch.ones(6, 4),), torch.ones(6, 3), name))

    return made


def _way(found: Any, rows: Any, values: Any, name: str) -> tuple[Any, list[Any]]:
    """The call of this name, of Experts or an Exchange; one of two launches makes both."""
    keys = torch.zeros(6, 3, dtype=torch.int32)
    call = getattr(found, name)
    if name.endswith("_send"):
        call = lambda *given, **named: getattr(found, name)(*given, **named).receive()  # noqa: E731 - as short as it is
    what = name.removesuffix("_send")
    if what == "dispatch":
        return call, [rows, keys, values]
    handle = found.dispatch(rows, keys, values).handle
    back = torch.ones(36, 4)
    return call, {
        "dispatch_again": [rows[0], handle],
        "combine": [back, handle, values],
        "combine_values": [torch.ones(36), handle],
    }[what]


EXPERTS = {
    "dispatch": {"dtype": (1, doubled), "shape": (1, flat), "layout": (1, sparse), "type": (0, nothing)},
    "dispatch_again": {"shape": (0, lambda x: x[1:]), "layout": (0, sparse), "type": (1, nothing)},
    "combine": {"dtype": (0, complexes), "shape": (2, flat), "layout": (0, sparse), "type": (1, nothing)},
    "combine_values": {"dtype": (0, doubled), "layout": (0, sparse), "type": (1, nothing)},
}


def exchange(group: str) -> Any:
    return ep.Exchange(ep.Limits(6, 3, 36, (16,), 16), 4, group, "cpu", results=4)


def exchanging(name: str) -> Callable[[int, str], Call]:
    return lambda rank, group: Call(*_way(exchange(group), (torch.ones(6, 4),), torch.ones(6, 3), name))


def operator(name: str) -> Callable[[int, str], Call]:
    def made(rank: int, group: str) -> Call:
        found, x = exchange(group), torch.ones(6, 4)
        keys, weight = torch.zeros(6, 3, dtype=torch.int32), torch.ones(6, 3)
        if name == "dispatch":
            return Call(ep.dispatch, [found, x, keys, weight])
        handle = ep.dispatch(found, x, keys, weight).handle
        return Call(ep.combine, [found, torch.ones(36, 4), handle, weight])

    return made


def layer_of_experts(name: str) -> Callable[[int, str], Call]:
    def made(rank: int, group: str) -> Call:
        given = [group, 6, 4, 3, rank, 4, RANKS, RANKS, torch.float32]
        if not name:
            return Call(lambda *said, **named: ep.EPAll2AllLayer(*said, device="cpu", **named), given)
        found = ep.EPAll2AllLayer(*given, device="cpu", results=4)
        x, keys = torch.ones(6, 4), torch.zeros(6, 3, dtype=torch.int32)
        if name == "dispatch":
            return Call(found.dispatch, [x, keys, torch.ones(6, 3)])
        rows, _, desc = found.dispatch(x, keys, torch.ones(6, 3))
        return Call(found.combine, [rows.clone(), desc])

    return made


def growing(rank: int, group: str) -> Call:
    config = ep.EPConfig(6, 4, 3, 4, rank, RANKS, RANKS, torch.float32, torch.float32)
    found = ep.DispatchCombineContext.create(config, 0.1, group=group, device="cpu")

    def grow(rows: Any, **named: Any) -> None:
        found.reallocate_dispatch_output_buf(rows, **named)
        commdsl.all_reduce(X.clone(), group=group)  # where there is room enough nothing is asked of the others

    return Call(grow, [30])


def vllm(name: str) -> Callable[[int, str], Call]:
    def made(rank: int, group: str) -> Call:
        way = engines.PrepareAndFinalize(exchange(group), exact=True)
        x, keys, weights = torch.ones(6, 4), torch.zeros(6, 3, dtype=torch.int32), torch.ones(6, 3)
        prepared = [x, weights, keys, 4, None, False, None]
        if name == "prepare":
            return Call(way.prepare, prepared)

        def finalize(output: Any, change: Change, **named: Any) -> None:
            rows, _, _, ids, came = way.prepare(*prepared)
            way.finalize(output, change(rows), came, ids, False, **named)

        return Call(finalize, [torch.empty(6, 4), torch.clone])

    return made


def sglang(name: str) -> Callable[[int, str], Call]:
    def made(rank: int, group: str) -> Call:
        way = engines.Dispatcher(exchange(group))
        topk = SimpleNamespace(topk_ids=torch.zeros(6, 3, dtype=torch.int32), topk_weights=torch.ones(6, 3))
        if name == "dispatch":
            return Call(way.dispatch, [torch.ones(6, 4), topk])

        def combine(rows: Any, *given: Any, **named: Any) -> Any:
            found = way.dispatch(torch.ones(6, 4), topk)
            return way.combine(found._replace(hidden_states=rows(found.hidden_states)), *given, **named)

        return Call(combine, [torch.clone])

    return made


EP = {
    "Experts": Entry(
        lambda rank, group: Call(
            lambda *given, **named: ep.Experts(*given, source="tokens", name="tokens", params={"E": 4}, **named),
            [LIMITS, group, "cpu"],
        ),
        {"limits": (0, nothing), "device": (2, lambda one: "nowhere")},
    ),
    **{f"Experts.{one}": Entry(experts(one), wrong) for one, wrong in EXPERTS.items()},
    **{f"Experts.{one}_send": Entry(experts(f"{one}_send"), wrong) for one, wrong in EXPERTS.items()},
    "Exchange": Entry(
        lambda rank, group: Call(ep.Exchange, [ep.Limits(6, 3, 36, (16,), 16), 4, group, "cpu"]),
        {"limits": (0, nothing), "keys": (1, str)},
    ),
    **{f"Exchange.{one}": Entry(exchanging(one), wrong) for one, wrong in EXPERTS.items()},
    "dispatch": Entry(operator("dispatch"), {"dtype": (2, doubled), "shape": (2, flat), "layout": (1, sparse)}),
    "combine": Entry(operator("combine"), {"dtype": (1, complexes), "shape": (3, flat), "type": (2, nothing)}),
    "DispatchCombineContext.create": Entry(
        lambda rank, group: Call(
            lambda *given, **named: ep.DispatchCombineContext.create(*given, group=group, device="cpu", **named),
            [ep.EPConfig(6, 4, 3, 4, rank, RANKS, RANKS, torch.float32, torch.float32), 2],
        ),
        {"number": (1, lambda one: -1), "type": (0, nothing)},
    ),
    "DispatchCombineContext.reallocate_dispatch_output_buf": Entry(
        growing, {"number": (0, lambda one: -1), "type": (0, str)}
    ),
    "EPAll2AllLayer": Entry(layer_of_experts(""), {"number": (1, lambda one: -1), "dtype": (8, nothing)}),
    "EPAll2AllLayer.dispatch": Entry(
        layer_of_experts("dispatch"), {"dtype": (0, doubled), "shape": (1, flat), "type": (0, lists)}
    ),
    "EPAll2AllLayer.combine": Entry(
        layer_of_experts("combine"),
        {"dtype": (0, doubled), "shape": (0, lambda x: torch.ones(99, 4)), "type": (1, nothing)},
    ),
    "PrepareAndFinalize.prepare": Entry(
        vllm("prepare"), {"shape": (2, flat), "number": (3, lambda one: 5), "type": (0, lists)}
    ),
    "PrepareAndFinalize.finalize": Entry(
        vllm("finalize"), {"dtype": (1, lambda one: complexes), "type": (1, lambda one: str)}
    ),
    "Dispatcher.dispatch": Entry(sglang("dispatch"), {"shape": (0, flat), "type": (1, nothing)}),
    "Dispatcher.combine": Entry(sglang("combine"), {"dtype": (0, lambda one: complexes), "type": (0, lambda one: str)}),
}

LOCAL = {
    "commdsl": "check choice load memory_summary release reset shutdown threads",
    "attention": """_update_out_and_lse calculate_in_mapping_circle calculate_inter_node_mapping
        calculate_intra_node_in_mapping_two_nodes calculate_intra_node_out_mapping_two_nodes
        calculate_out_mapping_circle calculate_source_rank_per_iter choice contiguous
        gen_hamilton_circle gen_hamilton_circle_two_nodes gen_hamilton_path_local positions shard_sequence zigzag""",
    "dispatch": """compute_attn_layout_seqlens compute_metadata compute_metadata_kv create_qkv_dispatch
        exclusive_cumsum from_plan gen_seq_lens load_plan orchestrate_simulate simulate_reduce test_qkv_dispatch
        test_query_dispatch validate""",
    "ep": "dequantise",
    "overlap": "choice shard_states",
}
"""Public functions that do no collective work, or end it."""

LOCAL_CLASSES = {
    "commdsl": """AgreementError ArgumentError BrokenGroupError CacheError CaptureError CommError CommTimeout
        ConfigError DeviceError DispatchError Error GradientError GroupError HeapError KeysError MaskError MetadataError
        MissingPackageError MissingToolError NotFoundError OpError PeerError RendezvousError ReductionError ReplicaError
        ResourceError RowError TableError TensorError Work WorkTimeoutError""",
    "attention": "Choice Placement Run",
    "dispatch": "AttentionLayout DispatchError Limits Metadata MetadataError QKVMetadata Route RowError Span Varlen",
    "ep": """Dispatched EPAllToAllLayoutDesc EPConfig Handle KeyMap KeysError Limits Living Pending
        Quantised Received""",
    "overlap": "MicroPipelineTP ShardedModule",
}
"""Public classes whose methods begin no collective work, or whose collective work is not ours."""

LOCAL_METHODS = {
    "DispatchCombineContext": "finalize prepare refuse_released release_outgrown",
    "A2AComm": "wait",
    "ColumnParallelLinear": "*",
    "Dispatcher": "admit again call explain judge_gradients launch make prepare release synchronize tables",
    "EPAll2AllLayer": "*",
    "Exchange": "coming is_prepared prepare refuse_capture release synchronize",
    "Experts": "coming explain is_prepared prepare release synchronize",
    "Op": "bound fake functional held inverse lands mutating program release split started synchronize traced",
    "RingComm": "commit wait",
    "RowParallelLinear": "*",
    "sequence_parallel": "*",
}
"""Of the classes of the tables, public methods that do no collective work, or that only calls of these make."""
