"""The usage examples of EPAll2AllLayer's document, verbatim but for imports: what these would import is given.

Assumes ranks that are threads: as many as the examples say.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent.parent))
from thread_ranks import in_group  # noqa: E402 - after the check for torch

from commdsl import ep  # noqa: E402 - after the check for torch

BASIC = """
# Initialize distributed runtime
rank, world_size = initialize_distributed()

# Create EP group (all ranks)
ep_group = dist.group.WORLD

# Create layer
ep_layer = EPAll2AllLayer(
    ep_group=ep_group,
    max_tokens=256,
    hidden=7168,
    topk=8,
    rank=rank,
    num_tot_experts=256,      # 256 experts / 32 ranks = 8 per rank
    local_world_size=8,
    world_size=32,
    dtype=torch.bfloat16,
    weight_dtype=torch.float32,
    num_sm=20,
)

# Simulate input
tokens = torch.randn(128, 7168, dtype=torch.bfloat16, device="cuda")
expert_ids = torch.randint(0, 256, (128, 8), dtype=torch.int32, device="cuda")
routing_weights = torch.softmax(torch.randn(128, 8, device="cuda"), dim=-1).float()

# Dispatch
recv_tokens, recv_weights, layout_desc = ep_layer.dispatch(
    input=tokens,
    exp_indices=expert_ids,
    weight=routing_weights,
)

# Expert FFN computation (example)
# recv_tokens: [recv_count, hidden]
expert_output = your_expert_ffn(recv_tokens)

# Combine
combined = ep_layer.combine(expert_output, layout_desc)
# combined: [128, 7168] - back to original token positions

# Cleanup
ep_layer.finalize()
"""

AOT = """
# Enable AOT for production
ep_layer = EPAll2AllLayer(
    ...,
    use_aot=True,  # Use pre-compiled kernels
)
"""


LOCAL_COMBINE = """
# For intra-node scenarios with tokens routed to multiple same-rank experts
ep_layer = EPAll2AllLayer(
    ...,
    world_size=8,             # Single node
    local_world_size=8,
    enable_local_combine=True, # Pre-aggregate locally
)
"""


class Here:
    """torch, on whatever there is: a GPU is this processor."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return self._on_cpu(found) if name in ("randn", "randint") else found

    @staticmethod
    def _on_cpu(make: Any) -> Any:
        return lambda *arguments, device=None, **options: make(*arguments, device="cpu", **options)


def test_basic_usage() -> None:
    """There and back on 32 ranks, in 4 nodes by the numbers: what comes back is each token as often as it was sent."""

    def work(rank: int, group: str) -> None:
        names = {
            "torch": Here(),
            "dist": SimpleNamespace(group=SimpleNamespace(WORLD=group)),
            "initialize_distributed": lambda: (rank, 32),
            "EPAll2AllLayer": ep.EPAll2AllLayer,
            "your_expert_ffn": lambda rows: rows * 2,
        }
        exec(BASIC, names)
        assert torch.equal(names["combined"], names["tokens"] * 16)
        weights, desc = names["recv_weights"], names["layout_desc"]
        assert weights.shape == names["recv_tokens"].shape[:1]
        assert desc.num_input_tokens_per_rank.tolist() == [128] * 32

    in_group(32, work)


def test_with_aot_compilation() -> None:
    """What the example leaves out is a layer's: kernels are there when it returns."""

    def work(rank: int, group: str) -> None:
        def made(*left_out: Any, **options: Any) -> ep.EPAll2AllLayer:
            assert left_out == (...,)
            given = {"max_tokens": 4, "hidden": 8, "topk": 2, "rank": rank, "num_tot_experts": 4}
            return ep.EPAll2AllLayer(group, **given, local_world_size=2, world_size=2, **options)

        names: dict[str, Any] = {"EPAll2AllLayer": made}
        exec(AOT, names)
        assert names["ep_layer"].use_aot
        assert names["ep_layer"].a2a_ctx.exchange.is_prepared(torch.bfloat16)

    in_group(2, work)


def test_with_local_combine() -> None:
    """On 8 ranks of one node: what comes back is added up where the experts are, each of which makes something else."""

    def work(rank: int, group: str) -> None:
        def made(*left_out: Any, **options: Any) -> ep.EPAll2AllLayer:
            assert left_out == (...,)
            given = {"max_tokens": 4, "hidden": 8, "topk": 3, "rank": rank, "num_tot_experts": 16}
            return ep.EPAll2AllLayer(group, **given, dtype=torch.float32, device="cpu", **options)

        names: dict[str, Any] = {"EPAll2AllLayer": made}
        exec(LOCAL_COMBINE, names)
        layer = names["ep_layer"]
        assert layer.a2a_ctx.exchange.local_combine
        x, chosen = torch.full((2, 8), 1.0 + rank), torch.tensor([[0, 1, 15], [7, 6, 7]], dtype=torch.int32)
        rows, _, desc = layer.dispatch(x, chosen)
        ends = desc.known.offsets.tolist()
        for own in range(2):
            rows[ends[own - 1] if own else 0 : ends[own]] *= 2 * rank + own + 1  # expert e multiplies by e + 1
        assert layer.combine(rows, desc).tolist() == [[factor * (1.0 + rank)] * 8 for factor in (19.0, 23.0)]

    in_group(8, work)
