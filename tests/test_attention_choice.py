"""What `schedule="auto"` chooses, machine by machine, and what it counts: against brute force and theory."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from thread_ranks import in_group

import commdsl
from commdsl import compiler
from commdsl.attention import auto, machines
from commdsl.attention.auto import Choice, Sizes, admitted, choice
from commdsl.attention.masks import Mask
from commdsl.attention.placement import Placement, placed
from commdsl.commands.cli import run_command
from commdsl.ir import resolve
from commdsl.ir.held import held
from commdsl.language.syntax import ScheduleDecl
from commdsl.machine.errors import ArgumentError
from commdsl.machine.topology import switch

ATTENTION = Path(__file__).parent.parent / "schedules" / "attention"

H200 = "NVIDIA H200"
LLAMA: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
MHA: dict[str, Any] = {"heads": 32, "head_dim": 128}


def seconds(found: Choice) -> dict[str, float]:
    """By schedule the fastest of its parameters."""
    fastest: dict[str, float] = {}
    for one in found.estimates:
        fastest[one.schedule] = min(one.seconds, fastest.get(one.schedule, np.inf))
    return fastest


# --- machine by machine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [2048, 8192, 65536])
def test_one_node_behind_a_switch(ranks: int, tokens: int) -> None:
    """Each owner puts what is needed, and no more, by the copy engine, where the next visit reads it: nothing is
    forwarded or copied, no SM is taken. Two ranks have a schedule of their own.
    """
    found = choice(ranks * tokens, ranks=ranks, causal=True, device=H200, **LLAMA)

    wanted = ("attention_pair", (("causal", 1),)) if ranks == 2 else ("attention_direct", (("K", 1), ("causal", 1)))
    assert (found.schedule, found.params) == wanted
    assert found.tune == (("protocol", "engine"), ("landing", "place"))


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_a_full_mesh(tokens: int) -> None:
    """Where every pair has its own link, rows are cut into a piece for each of them: seven times a ring's rate."""
    found = choice(8 * tokens, ranks=8, on="mi300x_1x8", **MHA)
    bound = choice(8 * 512, ranks=8, on="mi300x_1x8", heads=31, head_dim=128)

    assert (found.schedule, found.params) in (("attention_direct", (("K", 7),)), ("attention_hamilton", ()))
    assert seconds(bound)["attention_hamilton"] < 0.3 * seconds(bound)["attention_ring"]


@pytest.mark.parametrize("tokens", [4096, 16384])
@pytest.mark.parametrize(("nodes", "on"), [(2, "h200_2x8"), (4, "h200_4x8"), (2, None), (4, None)])
def test_several_nodes(nodes: int, on: str | None, tokens: int) -> None:
    """Between nodes all adapters share the work, each with as few bytes as can be; no copy engine reaches so far. Where
    heads can be divided in a node, a ring of groups between nodes has as few.
    """
    where: dict[str, Any] = {"on": on} if on else {"device": H200, "nodes": [n for n in range(nodes) for _ in range(8)]}
    found = choice(8 * nodes * tokens, ranks=8 * nodes, causal=True, heads=31, head_dim=128, **where)
    divided = choice(8 * nodes * tokens, ranks=8 * nodes, causal=True, **where, **MHA)

    assert found.schedule in ("attention_double_ring", "attention_paths")
    assert ("m", 8) in found.params
    assert found.tune[0][0] == "sms"
    assert divided.schedule == found.schedule or divided.params == (("U", 8),)


def test_the_order_that_theory_predicts() -> None:
    """Bytes alone, 2 nodes of 8 under a spine: double ring, paths, all pairs, ring; no heads to divide by 16 here."""
    found = seconds(choice(16 * 1024, ranks=16, on="h200_2x8_spine", heads=31, head_dim=128, batch=4))
    order = ("attention_double_ring", "attention_paths", "attention_hamilton", "attention_ring")
    times = [found[name] for name in order]

    assert times[0] == pytest.approx(times[1], rel=0.1)
    assert times[1] < 0.4 * times[2] < times[2] < 0.7 * times[3]


def test_a_ring_of_links() -> None:
    """Where neighbours alone are joined, only a ring has its links."""
    found = choice(65536, ranks=8, on="ring_8", **LLAMA)

    assert [one.schedule for one in found.estimates] == ["attention_ring"]


@pytest.mark.parametrize(
    ("window", "halves"), [((0, 0), (0, 0)), ((2048, 0), (1, 0)), ((4095, 0), (2, 0)), ((1, 5000), (1, 3))]
)
def test_a_window(window: tuple[int, int], halves: tuple[int, int]) -> None:
    """Rows in order: as many halves before and after as a window of tokens reaches into, and nothing else is sent."""
    found = choice(8 * 4096, ranks=8, on="h200_1x8", window=window, placement="contiguous", **LLAMA)

    assert found.schedule == "attention_window"
    assert found.params == (("B", halves[0]), ("A", halves[1]))


def test_where_the_figures_come_from() -> None:
    """The reason says what was measured, what is an estimate, and that a GPU, or a topology's, is not known."""
    estimate = "an estimate with the figures of an H200"
    sources = (
        ({"device": "h200"}, "speeds as measured on an H200"),
        ({"device": "NVIDIA H200 NVL"}, f"a variant of the H200: {estimate}"),
        ({"device": "NVIDIA H100 80GB HBM3"}, estimate),
        ({"device": "foo"}, f"`foo` is not a known GPU (H200, H100, A100, MI300X): {estimate}"),
        ({"on": "h100_1x8"}, estimate),
        ({"on": "mi300x_1x8"}, "an estimate from its data sheet"),
        ({"on": "dgx1"}, f"`dgx1` names no known GPU: {estimate}"),
    )
    for where, source in sources:
        assert choice(8192, ranks=4, **where, **LLAMA).reason.endswith(f" TFLOP/s, {source}")
    same = [choice(8192, ranks=4, device=name, **LLAMA).estimates for name in (H200, "h200", "foo")]
    assert same[0] == same[1] == same[2]
    with pytest.raises(ArgumentError, match="a device is named as torch names the GPU"):
        choice(8192, ranks=4, device="cuda", **LLAMA)


def test_short_sequences_by_heads() -> None:
    """Where latency is all, two exchanges of heads are sooner than P - 1 hops; if heads can be divided."""
    short = {"length": 8 * 128, "ranks": 8, "causal": True, "device": H200, "head_dim": 128}

    assert choice(heads=32, kv_heads=8, **short).schedule == "attention_ulysses"
    assert choice(heads=32, kv_heads=4, **short).schedule == "attention_ulysses_ring"
    assert choice(heads=31, **short).schedule == "attention_direct"
    assert choice(heads=32, kv_heads=8, **{**short, "by_heads": False}).schedule == "attention_direct"
    longer = choice(4 * 1024, ranks=4, causal=True, device=H200, backward=True, **MHA)
    assert longer.schedule in ("attention_direct", "attention_ring")  # as heads would not be faster by a quarter
    assert 0.75 < seconds(longer)["attention_ulysses"] / seconds(longer)[longer.schedule] < 1


def test_gradients() -> None:
    """The way back is counted by its own schedule, with bytes of the type of keys; the copy engine moves all of it."""
    found = choice(8 * 8192, ranks=8, causal=True, device=H200, backward=True, **LLAMA)
    forward = choice(8 * 8192, ranks=8, causal=True, device=H200, **LLAMA)
    there, back = found.estimates[0].times

    assert found.schedule == "attention_direct"
    assert found.tune == found.tune_backward == (("protocol", "engine"), ("landing", "place"))
    assert there == forward.estimates[0].times[0]
    assert 2.4 < back.visits / there.visits < 2.7
    assert 1.8 < back.launches / there.launches < 2.2
    assert forward.tune_backward == ()


def test_uneven_nodes() -> None:
    """Ranks of a node that are not neighbours, or not as many on each, are taken for ranks far from each other."""
    for nodes in ([0, 1, 0, 1], [0, 0, 0, 1]):
        topology = machines.of_device(H200, tuple(nodes)).topology
        assert (topology.num_nodes, topology.gpus_per_node) == (4, 1)
        assert choice(4 * 8192, ranks=4, device=H200, nodes=nodes, **LLAMA).tune[0][0] == "sms"
    topology = machines.of_device(H200, (5, 5, 2, 2)).topology
    assert (topology.num_nodes, topology.gpus_per_node) == (2, 2)


def test_processor() -> None:
    """Host ranks have one way to travel, and nothing of it is tuned."""
    found = choice(4 * 1024, ranks=4, causal=True, heads=8, head_dim=16)

    assert found.tune == ()
    assert "the processor" in found.reason


def test_why() -> None:
    """The reason has the time by the model, what is hidden, the next, and the machine it was for."""
    found = choice(4 * 8192, ranks=4, causal=True, device=H200, **LLAMA)

    for words in (
        "ms by the model",
        "by the copy engine",
        "all hidden",
        "next attention_",
        "one node of 4",
        "450 GB/s",
    ):
        assert words in found.reason
    assert str(found).startswith("attention_direct K=1 causal=1 protocol=engine landing=place: ")


def test_all_ranks_choose_alike() -> None:
    """Another process, with another seed for hashes, gives the same text."""
    code = "from commdsl.attention.auto import choice; import sys; "
    code += "print(choice(16384, 32, 128, ranks=8, causal=True, device='NVIDIA H200'), 'torch' in sys.modules)"
    here = f"{choice(16384, 32, 128, ranks=8, causal=True, device=H200)} False"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == here


@pytest.mark.parametrize(("change", "words"), [
    ({"ranks": 1}, "2 to 8 ranks of `h200_1x8`, not 1"),
    ({"ranks": 9}, "2 to 8 ranks of `h200_1x8`, not 9"),
    ({"placement": "striped"}, "`placement` is one of"),
    ({"on": None, "nodes": [0, 0]}, "`nodes` says where 2 ranks are; there are 8"),
    ({"on": "dgx1", "heads": 31, "kv_heads": 31}, "no shipped schedule has all its links on `dgx1`"),
])  # fmt: skip
def test_refusals(change: dict[str, Any], words: str) -> None:
    """What cannot be chosen for is an error that says why."""
    with pytest.raises(ArgumentError, match=words):
        choice(**{"length": 65536, "ranks": 8, "on": "h200_1x8", **LLAMA, **change})


@pytest.mark.parametrize("length", [0, 1, 5])
def test_few_tokens(length: int) -> None:
    """Hardly any tokens, and none, have a choice, too."""
    assert choice(length, ranks=8, device=H200, causal=True, **LLAMA).schedule.startswith("attention_")


def test_calls_run_what_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    """`attention` loads the chosen schedule, and says so in the log: short calls exchange heads where these are enough,
    unless the log-sum-exp is asked for; a call that wants gradients counts them.
    """
    torch = pytest.importorskip("torch")
    attention = commdsl.attention.attention

    def rank_does(rank: int, group: str) -> None:
        for heads in (4, 3):
            q, k, v = torch.randn(3, 1, 6, heads, 64)
            plain, _ = attention(q, k, v, group=group, causal=True, return_lse=True)
            without = attention(q, k, v, group=group, causal=True)
            with_gradient = attention(q.requires_grad_(), k, v, group=group, causal=True)
            assert torch.allclose(without, plain, atol=1e-5)
            assert torch.allclose(with_gradient, plain, atol=1e-5)
            with_gradient.sum().backward()

    with caplog.at_level(logging.DEBUG, "commdsl"):
        in_group(4, rank_does)
    said = {record.getMessage() for record in caplog.records if "runs attention_" in record.getMessage()}
    sizes = {"ranks": 4, "causal": True, "itemsize": 4}
    expected = {
        choice(24, heads, 64, backward=backward, by_heads=by_heads, **sizes)
        for heads in (4, 3)
        for backward, by_heads in ((False, False), (False, True), (True, True))
    }

    assert said == {f"attention over 24 tokens on 4 ranks runs {found}" for found in expected}
    assert {found.schedule for found in expected} == {"attention_ulysses", "attention_direct"}


# --- what is counted --------------------------------------------------------------------------------------------------


def sees(mask: Mask, query: int, key: int) -> bool:
    return (mask.left is None or query - key <= mask.left) and (mask.right is None or key - query <= mask.right)


def brute_force(placement: Placement, mask: Mask) -> np.ndarray:
    tokens = [
        [[(run.document, run.begin + at) for run in half for at in range(run.length)] for half in halves]
        for halves in placement.runs
    ]
    found = np.zeros((placement.ranks, placement.ranks, 2))
    for visitor, mine in enumerate(tokens):
        for owner, theirs in enumerate(tokens):
            for half, keys in enumerate(theirs):
                found[visitor, owner, half] = sum(
                    document == other and sees(mask, query, key)
                    for document, query in (*mine[0], *mine[1])
                    for other, key in keys
                )
    return found


def test_pairs_are_those_of_the_mask() -> None:
    """Random documents, ranks, placements and masks: the pairs of every rank and half are counted exactly."""
    dice = random.Random(11)
    for _ in range(40):
        lengths = tuple(dice.randrange(0, 24) for _ in range(dice.randrange(1, 4)))
        mask = Mask(dice.choice((None, 0, 3, 9)), dice.choice((None, 0, 0, 4)))
        found = placed(dice.choice(("zigzag", "contiguous")), dice.randrange(1, 5), lengths)
        assert (admitted(found, mask) == brute_force(found, mask)).all(), (lengths, mask, found.name)


def test_a_window_hands_over_what_is_seen() -> None:
    """Random documents in order and windows: what `attention_window` is told to send has all that the mask admits."""
    dice = random.Random(5)
    for _ in range(12):
        ranks, lengths = dice.randrange(2, 6), tuple(dice.randrange(0, 30) for _ in range(dice.randrange(1, 4)))
        mask = Mask(dice.choice((0, 2, 9, 40)), dice.choice((0, 0, 5, None)))
        sizes = Sizes(lengths, 4, 4, 64, mask=mask, placement="contiguous")
        window = next(auto.candidates(machines.of_device(H200, (0,) * ranks), ranks, sizes))
        files = compiler.read(ATTENTION / "attention_window.comm")
        decl = compiler.choose_kind(files, "attention_window", ScheduleDecl)
        handed = {
            (visitor, int(owner), int(half))
            for one in held(resolve.resolve(files, decl, ranks, switch(ranks), dict(window.params)))
            for visitor, row in enumerate(one.origin[0])
            for owner, half in row
        }
        wanted = np.argwhere(admitted(placed("contiguous", ranks, lengths), mask) > 0)
        assert {tuple(row) for row in wanted.tolist()} <= handed, (ranks, lengths, mask, window)


@pytest.mark.parametrize("schedule", ["attention_direct", "attention_ring", "attention_hamilton", "attention_ulysses"])
def test_visits_have_all_pairs(schedule: str) -> None:
    """Zigzag rows under a causal mask: every visit has the same work, and all together have the rank's."""
    ranks, tokens = 8, 8 * 64
    machine = machines.of_device(H200, (0,) * ranks)
    sizes = Sizes((tokens,), 8, 8, 64, mask=Mask(right=0))
    candidate = next(one for one in auto.candidates(machine, ranks, sizes) if one.schedule == schedule)
    flops = np.array(auto.modelled(candidate, machine, ranks, sizes).flops)
    whole = 4 * 8 * 64 * tokens * (tokens + 1) / 2 / ranks

    assert flops.sum() == pytest.approx(whole, rel=0.01)
    assert flops == pytest.approx(np.full(len(flops), whole / len(flops)), rel=0.02)


def test_lengths_that_differ_are_few() -> None:
    """Packed documents that differ in every step ask for few choices: of about as many tokens and pairs."""
    dice = random.Random(7)
    found = set()
    for _ in range(300):
        lengths = [dice.randrange(200, 4000) for _ in range(dice.randrange(20, 30))]
        made = auto.coarse(lengths)
        found.add(made)
        assert 0.8 < sum(made) / sum(lengths) < 1.25
        assert 2 / 3 < sum(one * one for one in made) / sum(one * one for one in lengths) < 3 / 2
    assert len(found) < 20
    assert auto.coarse([65536]) == (65536,)
    assert auto.coarse([0, 0]) == (0,)


# --- the command ------------------------------------------------------------------------------------------------------


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`commdsl choice attention` says the same, with all that was looked at."""
    words = ["choice", "attention", "64K", "--ranks", "8", "--on", "mi300x_1x8", "--heads", "32", "--causal"]
    expected = choice(65536, ranks=8, on="mi300x_1x8", causal=True, **MHA)
    assert run_command(words) == 0
    lines = capsys.readouterr().out.split("\n")
    assert f"{lines[0]}: {lines[1]}" == str(expected)
    assert any(line.endswith("attention_ring causal=1") for line in lines[2:])
    assert run_command([*words, "--json", "--backward"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tokens"], told["estimates"][0]["schedule"]) == (65536, told["schedule"])
    assert told["tune_backward"]


@pytest.mark.parametrize(("words", "said"), [
    (["all_reduce", "1KB", "--causal"], "--causal is for `attention`, not for all_reduce"),
    (["all_reduce", "1KB", "--head-dim", "64"], "--head-dim is for `attention`"),
    (["attention", "1KB"], "expected a number of tokens such as 8192 or 8K, got `1KB`"),
    (["attention", "8K", "--heads", "32:5"], "--heads is a number, or a multiple of another"),
    (["attention", "8K", "--window", "5"], "--window is two numbers of tokens"),
    (["attention", "8K", "--on", "h200_1x8", "--device", H200], "--device or --on, not both"),
    (["attention", "8K", "--on", "h200_1x8", "--placement", "odd"], "`placement` is one of"),
])  # fmt: skip
def test_command_refuses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What an option cannot mean is one line of help."""
    assert run_command(["choice", *words, "--ranks", "4"]) == 2
    assert said in capsys.readouterr().err
