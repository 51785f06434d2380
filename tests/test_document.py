"""Hamilton Attention by its names: what its forwards return on host ranks, in every configuration of the document,
beside attention over the whole sequence in float64; and what they refuse.

Assumes ranks that are threads. Does not time anything: that steps are timed is `test_timing`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forked import launched  # noqa: E402 - after the check for torch
from thread_ranks import in_group, outcomes  # noqa: E402 - as above

import commdsl  # noqa: E402 - as above
from commdsl import attention  # noqa: E402 - as above
from commdsl.attention import circling  # noqa: E402 - as above
from commdsl.attention.peers import Place  # noqa: E402 - as above

ROOT = Path(__file__).parent.parent
Tensor = torch.Tensor
BOUND = 1e-5


def whole(length: int, heads: tuple[int, int] = (2, 1), batch: int = 2, dim: int = 8) -> list[Tensor]:
    """q, k and v of a whole sequence, (B, S, H, D)."""
    made = torch.Generator().manual_seed(length)
    return [torch.randn(batch, length, count, dim, generator=made) for count in (heads[0], heads[1], heads[1])]


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, left: float, right: float, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs (B, S, H, D) and log-sum-exps (B, H, S) in float64: query i sees the keys from i - left to i + right."""
    q, k, v = (one.double().transpose(1, 2) for one in (q, k, v))
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    away = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    scores = scores.masked_fill((away < -left) | (away > right), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def near(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert one.dtype == torch.float32
        assert one.is_contiguous()
        assert (one - other).abs().max() <= BOUND * other.abs().max()


EVERY = float("inf")
FULL, CAUSAL = (EVERY, EVERY), (EVERY, 0)


# --- rings ------------------------------------------------------------------------------------------------------------

RINGS = [
    ({}, FULL),
    ({"causal": True}, CAUSAL),
    ({"window_size": (5, 3)}, (5, 3)),
    ({"causal": True, "window_size": (9, -1)}, (9, 0)),
    ({"causal": True, "window_size": (-1, 4)}, CAUSAL),
    ({"softmax_scale": 0.5, "dropout_p": 0.0}, FULL),
]


@pytest.mark.parametrize(("settings", "bounds"), RINGS, ids=lambda value: str(value))
@pytest.mark.parametrize("zigzag", [False, True], ids=["ring", "zigzag"])
def test_rings(zigzag: bool, settings: dict[str, Any], bounds: tuple[float, float]) -> None:
    """A ring of 4 ranks gives what one rank does, full, causal and in a window, in both placements."""
    q, k, v = whole(4 * 6)
    settings = {"softmax_scale": None, "causal": False, **settings}
    wanted = by_definition(q, k, v, *bounds, settings["softmax_scale"])
    names = ["ring_attention_forward_flash_attn", "zigzag_ring_attention_forward_flash_attn"]
    placement = "zigzag" if zigzag else "contiguous"

    def run(rank: int, group: str) -> None:
        mine = [attention.shard_sequence(one, 1, group, placement) for one in (q, k, v)]
        expected = [attention.shard_sequence(one, at, group, placement) for one, at in zip(wanted, (1, 2), strict=True)]
        near(getattr(attention, names[zigzag])(group, *mine, **settings), expected)

    in_group(4, run)


# --- cycles -----------------------------------------------------------------------------------------------------------


def chunks(x: Tensor, count: int, dim: int) -> list[Tensor]:
    """As many pieces, equally long but for what is left over."""
    return list(x.tensor_split(count, dim))


def causal_chunks(x: Tensor, count: int, dim: int) -> list[Tensor]:
    """Piece j of the front half, and behind it piece j of the back half."""
    front, back = (chunks(half, count, dim) for half in x.chunk(2, dim))
    return [torch.cat(pair, dim) for pair in zip(front, back, strict=True)]


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("ranks", [3, 8])
def test_hamilton(ranks: int, causal: bool, layout: str) -> None:
    """On n - 1 cycles, in both layouts, with the tables that follow from them and without, of lengths that n - 1 does
    not divide.
    """
    q, k, v = whole(ranks * 10)
    wanted = by_definition(q, k, v, *(CAUSAL if causal else FULL))
    placement, cut = ("zigzag", causal_chunks) if causal else ("contiguous", chunks)
    dim = 1 if layout == "BSND" else 2
    looping = attention.gen_hamilton_circle(ranks)
    tables: dict[str, Any] = {
        "looping": looping,
        "out_mapping": attention.calculate_out_mapping_circle(looping),
        "in_mapping": attention.calculate_in_mapping_circle(looping),
    }
    if causal:
        tables["source_rank_per_iter"] = attention.calculate_source_rank_per_iter(looping)
    kind = "causal" if causal else "full"
    function = getattr(attention, f"hamilton_attention_forward_{kind}_flash_attn")

    def laid(x: Tensor) -> Tensor:
        return x if layout == "BSND" else x.transpose(1, 2)

    def run(rank: int, group: str) -> None:
        mine = [laid(attention.shard_sequence(one, 1, group, placement)) for one in (q, k, v)]
        pieces = [cut(one, ranks - 1, dim) for one in mine[1:]]
        expected = [attention.shard_sequence(one, at, group, placement) for one, at in zip(wanted, (1, 2), strict=True)]
        expected[0] = laid(expected[0])
        near(function(group, mine[0], *pieces, None, world_size=ranks, layout=layout), expected)
        near(function(group, mine[0], *pieces, None, 0, ranks, **tables, layout=layout), expected)

    in_group(ranks, run)


@pytest.mark.parametrize(("ranks", "m"), [(4, 2), (8, 4)])
def test_nodes(ranks: int, m: int) -> None:
    """On the cycles through nodes, by their mappings."""
    q, k, v = whole(ranks * 5)
    wanted = by_definition(q, k, v, *FULL)
    path, looping = attention.gen_hamilton_path_local(m), attention.gen_hamilton_circle_two_nodes(ranks, m)
    incoming, outgoing = attention.calculate_inter_node_mapping(looping)
    out = attention.calculate_intra_node_out_mapping_two_nodes(path)
    into = attention.calculate_intra_node_in_mapping_two_nodes(path)

    def run(rank: int, group: str) -> None:
        mine = [attention.shard_sequence(one, 1, group, "contiguous") for one in (q, k, v)]
        pieces = [chunks(one, m, 1) for one in mine[1:]]
        expected = [
            attention.shard_sequence(one, at, group, "contiguous") for one, at in zip(wanted, (1, 2), strict=True)
        ]
        function = attention.hamilton_attention_forward_full_flash_attn_two_nodes
        near(function(group, mine[0], *pieces, None, 0, incoming, outgoing, out, into), expected)

    in_group(ranks, run)


def test_one_rank() -> None:
    """A ring of one is attention over its own tokens, and is timed."""
    q, k, v = whole(9)

    def run(rank: int, group: str) -> None:
        *found, times = attention.ring_attention_forward_flash_attn_profile(group, q, k, v, None, causal=True)
        near(found, by_definition(q, k, v, *CAUSAL))
        assert [step.communication for step in times.steps] == [0]
        assert times.total >= times.computation > 0

    in_group(1, run)


@pytest.mark.parametrize("cycles", [1, 4])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_other_cycles(cycles: int, causal: bool) -> None:
    """Cycles of one's own are followed, in any number, turned and in any order; one is a ring."""
    ranks = 8
    looping = [[*cycle[3:], *cycle[:3]] for cycle in reversed(attention.gen_hamilton_circle(ranks))][:cycles]
    q, k, v = whole(ranks * 4)
    wanted = by_definition(q, k, v, *(CAUSAL if causal else FULL))[0]
    placement, cut = ("zigzag", causal_chunks) if causal else ("contiguous", chunks)
    kind = "causal" if causal else "full"
    function = getattr(attention, f"hamilton_attention_forward_{kind}_flash_attn")
    op = circling.cycles_op(tuple(map(tuple, looping)))
    came = op.program(ranks).visits.held[1].origin[0]
    hops = {(int(came[r, h * cycles + c, 0]), r, c) for r in range(ranks) for h in range(2) for c in range(cycles)}
    assert hops == {
        (a, b, c) for c, cycle in enumerate(looping) for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    }

    def run(rank: int, group: str) -> None:
        mine = [attention.shard_sequence(one, 1, group, placement) for one in (q, k, v)]
        found, _ = function(group, mine[0], *(cut(one, cycles, 1) for one in mine[1:]), None, looping=looping)
        near([found], [attention.shard_sequence(wanted, 1, group, placement)])

    in_group(ranks, run)


def test_scattered_tokens() -> None:
    """Without a mask the tokens of a rank need not be neighbours: here block i * n + j is with the j-th of cycle i, as
    the paper has them.
    """
    ranks, looping = 8, attention.gen_hamilton_circle(8)
    q, k, v = whole(ranks * 7 * 2, (2, 2))
    wanted = by_definition(q, k, v, *FULL)

    def run(rank: int, group: str) -> None:
        mine = [i * ranks + cycle.index(rank) for i, cycle in enumerate(looping)]

        def own(x: Tensor, dim: int) -> list[Tensor]:
            blocks = x.chunk(ranks * 7, dim)
            return [blocks[number] for number in mine]

        found = attention.hamilton_attention_forward_full_flash_attn(
            group, torch.cat(own(q, 1), 1), own(k, 1), own(v, 1), None
        )
        near(found, [torch.cat(own(wanted[0], 1), 1), torch.cat(own(wanted[1], 2), 2)])

    in_group(ranks, run)


CONFIGURATIONS = [
    *(f"{kind} on {ranks}" for ranks in (8, 12, 16, 32) for kind in ("full", "causal")),
    *(f"nodes of {m} on {ranks}" for m, ranks in ((8, 16), (8, 32), (2, 6), (4, 8), (4, 12), (6, 12), (10, 20))),
]


@pytest.mark.sweep
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_configurations(configuration: str) -> None:
    """The tables of the document: cycles of 8, 16, 32 and other n % 4 == 0 ranks, full and causal, nodes of 8 and of
    other sizes; heads of 64 as in its example, whose length its own rule would not let pass.
    """
    kind, *_, last = configuration.split()
    ranks, m = int(last), int(configuration.split()[2])
    q, k, v = whole(ranks * 4, (2, 2), 1, 64)
    wanted = by_definition(q, k, v, *(CAUSAL if kind == "causal" else FULL))[0]
    placement, cut = ("zigzag", causal_chunks) if kind == "causal" else ("contiguous", chunks)
    path, looping = [], []
    if kind == "nodes":
        path, looping = attention.gen_hamilton_path_local(m), attention.gen_hamilton_circle_two_nodes(ranks, m)

    def run(rank: int, group: str) -> None:
        mine = [attention.shard_sequence(one, 1, group, placement) for one in (q, k, v)]
        pieces = [cut(one, m if kind == "nodes" else ranks - 1, 1) for one in mine[1:]]
        if kind == "nodes":
            mappings = {
                "inter_out_mapping": attention.calculate_inter_node_mapping(looping)[1],
                "out_mapping": attention.calculate_intra_node_out_mapping_two_nodes(path),
            }
            function = attention.hamilton_attention_forward_full_flash_attn_two_nodes
            found, _ = function(group, mine[0], *pieces, None, **(mappings if m != 8 else {}))
        else:
            function = getattr(attention, f"hamilton_attention_forward_{kind}_flash_attn")
            found, _ = function(group, mine[0], *pieces, None, world_size=ranks)
        near([found], [attention.shard_sequence(wanted, 1, group, placement)])

    in_group(ranks, run)


# --- the README -------------------------------------------------------------------------------------------------------


def test_readme(tmp_path: Path) -> None:
    """The programs of the README, one after the other, run on three processes."""
    text = (ROOT / "commdsl" / "attention" / "README.md").read_text(encoding="utf-8")
    script = tmp_path / "program.py"
    script.write_text("".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)))
    done = launched(3, str(script))

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 2: ") == 3


# --- times ------------------------------------------------------------------------------------------------------------


def test_profiles() -> None:
    """Each `_profile` has the signature of its forward, returns the same, and the times of every step."""
    q, k, v = whole(8 * 4)
    path, looping = attention.gen_hamilton_path_local(4), attention.gen_hamilton_circle_two_nodes(8, 4)
    nodes = {
        "out_mapping": attention.calculate_intra_node_out_mapping_two_nodes(path),
        "inter_out_mapping": attention.calculate_inter_node_mapping(looping)[1],
    }
    calls: list[tuple[str, int, dict[str, Any]]] = [
        ("ring_attention_forward_flash_attn", 0, {}),
        ("zigzag_ring_attention_forward_flash_attn", 0, {}),
        ("hamilton_attention_forward_full_flash_attn", 7, {}),
        ("hamilton_attention_forward_causal_flash_attn", 7, {}),
        ("hamilton_attention_forward_full_flash_attn_two_nodes", 4, nodes),
    ]

    def run(rank: int, group: str) -> None:
        mine = [one[:, 4 * rank : 4 * rank + 4] for one in (q, k, v)]
        for name, count, settings in calls:
            cut = causal_chunks if "causal" in name else chunks
            tensors = (mine[0], *(cut(one, count, 1) if count else one for one in mine[1:]))
            plain, profiled = getattr(attention, name), getattr(attention, f"{name}_profile")
            parameters = dict(inspect.signature(profiled).parameters)
            if "ring" in name:
                settings = {**settings, "world_size": 8}
                assert parameters.pop("world_size").default is None
            assert inspect.signature(plain).parameters == parameters
            if "causal" in name:  # pieces of 4 rows over 7 cycles: some have none
                tensors = (mine[0], *([one[:, :2], one[:, 2:], *[one[:, :0]] * 5] for one in mine[1:]))
            *found, times = profiled(group, *tensors, None, **settings)
            settings.pop("world_size", None)
            for one, other in zip(found, plain(group, *tensors, None, **settings), strict=True):
                assert torch.equal(one, other)
            assert dict(times) == {
                "total_time": 1e3 * times.total,
                "comm_total_time": 1e3 * times.communication,
                "comp_total_time": 1e3 * times.computation,
            }
            assert times["total_time"] == dict(times.items())["total_time"] > 0
            with pytest.raises(KeyError):
                times["total"]
            assert len(times.steps) == 8
            assert all(step.computation > 0 for step in times.steps)
            assert times.steps[0].communication == 0
            assert all(step.communication > 0 for step in times.steps[1:])
            assert times.total >= times.exposed + times.computation

    in_group(8, run)


# --- two blocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kept", [False, True], ids=["BHS", "BSH1"])
def test_two_blocks(dtype: Any, kept: bool) -> None:
    """Attention over two blocks of keys is that over all, whichever way the log-sum-exp is kept; the result is in
    float32, from which a block's type is converted first.
    """
    q, k, v = whole(12, (2, 2))
    blocks = [by_definition(q, k[:, part], v[:, part], *FULL) for part in (slice(0, 5), slice(5, 12))]
    (out, lse), (block_out, block_lse) = [(one.to(dtype), other.float()) for one, other in blocks]
    wanted = by_definition(q, k, v, *FULL)
    found = attention._update_out_and_lse(out, as_kept(lse, kept), block_out, block_lse)
    assert [one.dtype for one in found] == [torch.float32, torch.float32]
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert (found[0] - wanted[0]).abs().max() <= bound
    assert (found[1] - as_kept(wanted[1], kept)).abs().max() <= 1e-5


def as_kept(lse: Tensor, kept: bool) -> Tensor:
    return lse.transpose(-2, -1).unsqueeze(-1) if kept else lse


@pytest.mark.parametrize("kept", [False, True], ids=["BHS", "BSH1"])
def test_blocks_of_no_keys_and_of_large_scores(kept: bool) -> None:
    """A row that has seen no key takes the other's values as they are, of two such rows nothing comes, and scores far
    apart or large are no overflow.
    """
    inf = float("inf")
    lse = torch.tensor([-inf, 3.0, -inf, 1e4, -1e4, 0.0]).view(1, 1, 6)
    block_lse = torch.tensor([2.0, -inf, -inf, 1e4, 1e4, 0.0]).view(1, 1, 6)
    out, block_out = torch.full((1, 6, 1, 2), 7.0), torch.full((1, 6, 1, 2), 3.0)
    out[:, 2] = block_out[:, 2] = 0
    found, sums = attention._update_out_and_lse(out, as_kept(lse, kept), block_out, block_lse)
    assert found[0, :, 0, 0].tolist() == [3.0, 7.0, 0.0, 5.0, 3.0, 5.0]
    log2 = torch.tensor(2.0).log().item()
    wanted = torch.tensor([2.0, 3.0, -inf, 1e4 + log2, 1e4, log2]).view(1, 1, 6)
    torch.testing.assert_close(sums, as_kept(wanted, kept))


# --- names ------------------------------------------------------------------------------------------------------------

BOTH = (
    "process_group q k v softmax_scale dropout_p=0 causal={} window_size=(-1, -1) alibi_slopes=None deterministic=False"
)
RING, ZIGZAG = BOTH.format(False), BOTH.format(True)
"""The document has the last two parameters of the second alone; the original code of both."""
CYCLES = (
    "process_group q k v softmax_scale0 dropout_p=0 world_size=8 looping=None out_mapping=None in_mapping=None "
    "layout='BSND'"
)
NODES = (
    "process_group q k v softmax_scale0 dropout_p=0 inter_in_mapping=None inter_out_mapping=None out_mapping=None "
    "in_mapping=None layout='BSND'"
)
SIGNATURES = {
    "RingComm": "process_group",
    "RingComm.send_recv": "self to_send recv_tensor=None",
    "RingComm.send_recv_kv": "self k v k_buffer=None v_buffer=None",
    "A2AComm": "process_group",
    "A2AComm.all_to_all": "self send_tensors recv_tensors",
    "ring_attention_forward_flash_attn": RING,
    "zigzag_ring_attention_forward_flash_attn": ZIGZAG,
    "hamilton_attention_forward_full_flash_attn": CYCLES,
    "hamilton_attention_forward_causal_flash_attn": CYCLES.replace(" layout", " source_rank_per_iter=None layout"),
    "hamilton_attention_forward_full_flash_attn_two_nodes": NODES,
    "_update_out_and_lse": "out lse block_out block_lse",
    "gen_hamilton_circle": "n",
    "gen_hamilton_circle_two_nodes": "n m=8",
    "gen_hamilton_path_local": "m",
    "calculate_out_mapping_circle": "looping",
    "calculate_in_mapping_circle": "looping",
    "calculate_intra_node_out_mapping_two_nodes": "path0",
    "calculate_intra_node_in_mapping_two_nodes": "path0",
    "calculate_inter_node_mapping": "looping",
    "calculate_source_rank_per_iter": "looping",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    """Every name of the document is there, with its parameters in their order and their defaults."""
    found: Any = attention
    for part in name.split("."):
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters.values()
    words = [one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in parameters]
    assert " ".join(words) == SIGNATURES[name]
    assert found.__doc__


# --- what is refused --------------------------------------------------------------------------------------------------

X = torch.zeros(1, 4, 2, 8)
PIECES = list(X.split(2, 1))
RINGED = attention.ring_attention_forward_flash_attn
ZIGZAGGED = attention.zigzag_ring_attention_forward_flash_attn
PROFILED = attention.zigzag_ring_attention_forward_flash_attn_profile
FULLY = attention.hamilton_attention_forward_full_flash_attn
CAUSALLY = attention.hamilton_attention_forward_causal_flash_attn
IN_NODES = attention.hamilton_attention_forward_full_flash_attn_two_nodes
REFUSED: list[tuple[Callable[[str], Any], type[Exception], str]] = [
    (lambda g: RINGED(g, X, X, X, None, 0.1), commdsl.ArgumentError, "no dropout"),
    (lambda g: FULLY(g, X, PIECES, PIECES, None, 0.1, 3), commdsl.ArgumentError, "no dropout"),
    (lambda g: ZIGZAGGED(g, X, X, X, None, alibi_slopes=X), commdsl.ArgumentError, "no mask or bias"),
    (lambda g: RINGED(g, X, X, X, None, alibi_slopes=X), commdsl.ArgumentError, "no mask or bias"),
    (lambda g: RINGED(g, X, X, X, None, deterministic=1), commdsl.ArgumentError, "True or False, not 1"),
    (lambda g: RINGED(g, X, X, X, None, 0, 8), commdsl.ArgumentError, "`causal` is True or False, not 8"),
    (lambda g: PROFILED(g, X, X, X, None, world_size=9), commdsl.ArgumentError, "`world_size` is 9"),
    (lambda g: attention.gen_hamilton_circle("8"), commdsl.ArgumentError, "`n` is a whole number from 0 on, not '8'"),
    (
        lambda g: attention.gen_hamilton_path_local(2.5),
        commdsl.ArgumentError,
        "`m` is a whole number from 0 on, not 2.5",
    ),
    (lambda g: attention.gen_hamilton_circle_two_nodes(None), commdsl.ArgumentError, "`n` is a whole number"),
    (lambda g: RINGED(g, X, X, X, None, window_size=(-2, 0)), commdsl.ArgumentError, "-1 for no bound"),
    (lambda g: RINGED(g, X, X, X, None, window_size=7), commdsl.ArgumentError, "two whole numbers"),
    (lambda g: RINGED(g, X, X, X, "large"), commdsl.ArgumentError, "`scale` is a number"),
    (lambda g: RINGED(g, X, X, X, None, window_size=(0.5, 0)), commdsl.ArgumentError, "whole numbers"),
    (lambda g: RINGED(g, X[0], X, X, None), commdsl.TensorError, "4 dimensions"),
    (lambda g: RINGED(g, X, X[:, :3], X[:, :3], None), commdsl.TensorError, "has 4 rows, and k, .*, 3"),
    (lambda g: RINGED(g, X, X, X[..., :4], None), commdsl.TensorError, "v"),
    (lambda g: RINGED(g, X, X, X.double(), None), commdsl.TensorError, "float64"),
    (lambda g: RINGED(g, None, X, X, None), commdsl.TensorError, "takes a torch tensor"),
    (lambda g: RINGED("nobody", X, X, X, None), commdsl.GroupError, "nobody"),
    (lambda g: RINGED(g, X.clone().requires_grad_(), X, X, None), commdsl.GradientError, "attention.attention"),
    (lambda g: FULLY(g, X, PIECES, PIECES, None), commdsl.ArgumentError, "`world_size` is 8, the group has 3 ranks"),
    (lambda g: FULLY(g, X, X, X, None, 0, 3), commdsl.TensorError, "a list of a piece for each of 2 cycles"),
    (lambda g: FULLY(g, X, [X], [X], None, 0, 3), commdsl.TensorError, "not 1"),
    (lambda g: FULLY(g, X, PIECES, [X, X.int()], None, 0, 3), commdsl.TensorError, "differ in their rows alone"),
    (lambda g: FULLY(g, X, PIECES, PIECES, None, 0, 3, layout="SBHD"), commdsl.ArgumentError, "BSND, BNSD"),
    (lambda g: FULLY(g, X, PIECES, PIECES, None, 0, 3, [[0, 1]]), commdsl.ArgumentError, "of 2 ranks"),
    (lambda g: FULLY(g, X, PIECES, PIECES, None, 0, 3, ["ab"]), commdsl.ArgumentError, "`looping` is a list of cycles"),
    (lambda g: FULLY(g, X, PIECES, PIECES, None, 0, 3, 7), commdsl.ArgumentError, "`looping` is a list of cycles"),
    (
        lambda g: FULLY(g, X, PIECES, PIECES, None, 0, 3, [[0, 1, 2], [1, 2, 0]]),
        commdsl.ArgumentError,
        "use the same link",
    ),
    (
        lambda g: FULLY(g, X, PIECES, PIECES, None, 0, 3, None, [[-1, 1, 0], [1, -1, 1], [1, 0, -1]]),
        commdsl.ArgumentError,
        r"`out_mapping`\[\d, \d\] is \d, by the cycles it is \d",
    ),
    (
        lambda g: FULLY(g, X, PIECES, PIECES, None, 0, 3, None, None, [[-1, 0]]),
        commdsl.ArgumentError,
        r"`in_mapping` is of shape \(1, 2\), by the cycles it is \(3, 3\)",
    ),
    (
        lambda g: FULLY(g, X, PIECES, PIECES, None, 0, 3, None, None, [[-1, 0], [1]]),
        commdsl.ArgumentError,
        "`in_mapping` does not have the shape",
    ),
    (
        lambda g: CAUSALLY(g, X, PIECES, PIECES, None, 0, 3, source_rank_per_iter=[[[True] * 2] * 3] * 3),
        commdsl.ArgumentError,
        "`source_rank_per_iter`",
    ),
    (
        lambda g: CAUSALLY(g, X, [X[:, :1], X[:, 1:]], PIECES, None, 0, 3),
        commdsl.TensorError,
        "as many of the back half, not 1",
    ),
    (lambda g: IN_NODES(g, X, PIECES, PIECES, None), commdsl.ArgumentError, "not two or more nodes of 8"),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_refused(call: Callable[[str], Any], kind: type[Exception], words: str) -> None:
    """What is not held to, and what differs from the cycles, is one line, before any rank is waited for."""
    with pytest.raises(kind, match=words) as caught:
        call(commdsl.threads(3)[1])
    assert "\n" not in str(caught.value)


def test_ranks_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the schedule does not know is agreed on: ranks that differ in the scale are told both."""
    monkeypatch.setenv("COMMDSL_TIMEOUT", "20")
    names = commdsl.threads(2)
    found = outcomes(2, lambda rank: RINGED(names[rank], X, X, X, 1.0 + rank))
    assert {type(one) for one in found} <= {commdsl.AgreementError, commdsl.PeerError}
    assert any("scale 1.0" in str(one) and "scale 2.0" in str(one) for one in found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"out_mapping": [[-1, 1], [0, -1]]}, "neither mapping"),
        ({"in_mapping": [[-1, 0], [1, -1]]}, "`in_mapping`"),
        ({"inter_in_mapping": [(1, 0), (2, 1), (1, 0), (0, 1)]}, "`inter_in_mapping`"),
        ({"inter_out_mapping": [(3, 1), (2, 0), (1, 1), (0, 1)]}, "each of the ranks|neither mapping"),
        ({"inter_out_mapping": [(3, 1), (2, 0)]}, "names ranks|of 2 ranks"),
        ({"out_mapping": [[-1, 0], [1, 0]]}, "`out_mapping`"),
    ],
)
def test_mappings_of_nodes_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    """Mappings of nodes that lead nowhere, or not where the others do, are refused."""
    looping = attention.gen_hamilton_circle_two_nodes(4, 2)
    incoming, outgoing = attention.calculate_inter_node_mapping(looping)
    path = attention.gen_hamilton_path_local(2)
    known: dict[str, Any] = {
        "inter_in_mapping": incoming,
        "inter_out_mapping": outgoing,
        "out_mapping": attention.calculate_intra_node_out_mapping_two_nodes(path),
        "in_mapping": attention.calculate_intra_node_in_mapping_two_nodes(path),
    }
    place = Place(commdsl.threads(4)[0])
    arcs = [set(zip(cycle, [*cycle[1:], cycle[0]], strict=True)) for cycle in circling.nodes(place, **known)]
    assert arcs == [set(zip(cycle, [*cycle[1:], cycle[0]], strict=True)) for cycle in looping]
    with pytest.raises(commdsl.ArgumentError, match=words):
        circling.nodes(place, **{**known, **change})
