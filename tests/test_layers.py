"""Linear layers whose weights lie on all ranks: host ranks beside the layers of one rank, and what torch's do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - as above
from commdsl import overlap  # noqa: E402 - as above
from commdsl.overlap import ColumnParallelLinear, RowParallelLinear  # noqa: E402 - as above


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_two_layers(sequence_parallel: bool) -> None:
    """Two layers between rows that lie on all ranks, or that all have, are those of one rank: results, and gradients of
    every number.
    """
    ranks = 3
    torch.manual_seed(0)
    first, second = (torch.nn.Linear(*sizes, dtype=torch.float64) for sizes in ((12, 24), (24, 12)))
    x = torch.randn(4 * ranks, 2, 12, dtype=torch.float64, requires_grad=True)
    whole = second(torch.nn.functional.gelu(first(x)))
    whole.square().sum().backward()
    blocks = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": 0}
    wanted = dict(zip(blocks, (first.weight, first.bias, second.weight, second.bias), strict=True))

    def block(one: Any, name: str, rank: int) -> Any:
        is_whole = name == "down.bias" and not sequence_parallel
        return one if is_whole else one.chunk(ranks, blocks[name])[rank]

    def own(rows: Any, rank: int) -> Any:
        return rows.chunk(ranks)[rank] if sequence_parallel else rows

    def rank_does(rank: int, group: str) -> None:
        made = {"sequence_parallel": sequence_parallel, "group": group, "dtype": torch.float64}
        up, down = ColumnParallelLinear(12, 24, **made), RowParallelLinear(24, 12, **made)
        model = torch.nn.ModuleDict({"up": up, "down": down})
        with torch.no_grad():
            for name, one in model.named_parameters():
                one.copy_(block(wanted[name], name, rank))
        mine = own(x.detach(), rank).clone().requires_grad_()
        found = down(torch.nn.functional.gelu(up(mine)))
        found.square().sum().backward()
        torch.testing.assert_close(found, own(whole, rank))
        torch.testing.assert_close(mine.grad, own(x.grad, rank))
        for name, one in model.named_parameters():
            torch.testing.assert_close(one.grad, block(wanted[name].grad, name, rank))

    in_group(ranks, rank_does)


def test_beginnings() -> None:
    """Ranks that are seeded alike draw the blocks of one layer of torch's, and the same afterwards, also where memory
    comes later; a share that is none is refused, and rows to keep where none come.
    """
    names = commdsl.threads(4)

    def drawn(layer: Any, *sizes: int, **made: Any) -> Any:
        torch.manual_seed(0)
        found = layer(*sizes, **made)
        if made.get("device") == "meta":
            found.to_empty(device="cpu").reset_parameters()
        return found, torch.rand(()).item()

    one, _ = drawn(torch.nn.Linear, 512, 64)
    for device in ("cpu", "meta"):
        up = [drawn(ColumnParallelLinear, 512, 64, group=name, device=device) for name in names]
        assert torch.equal(torch.cat([layer.weight for layer, _ in up]), one.weight)
        assert torch.equal(torch.cat([layer.bias for layer, _ in up]), one.bias)
        for is_sequence in (True, False):
            made = {"sequence_parallel": is_sequence, "device": device}
            down = [drawn(RowParallelLinear, 512, 64, group=name, **made) for name in names]
            assert torch.equal(torch.cat([layer.weight for layer, _ in down], 1), one.weight)
            assert not torch.cat([layer.bias for layer, _ in down]).any()
            assert len({after for _, after in up}) == len({after for _, after in down}) == 1
        gated = [drawn(ColumnParallelLinear, 512, 64, parts=2, group=name, device=device)[0] for name in names]
        for name in ("weight", "bias"):
            each = [getattr(layer, name).chunk(2) for layer in gated]
            assert torch.equal(torch.cat([half[number] for number in (0, 1) for half in each]), getattr(one, name))
    with pytest.raises(commdsl.ArgumentError, match="4 ranks share `out_features` equally: 6"):
        ColumnParallelLinear(8, 6, group=names[0])
    with pytest.raises(commdsl.ArgumentError, match="4 ranks share each of 2 parts of `out_features` equally: 12"):
        ColumnParallelLinear(8, 12, parts=2, group=names[0])
    with pytest.raises(commdsl.ArgumentError, match="`parts` is a whole number from 1 on, not 0"):
        ColumnParallelLinear(8, 12, parts=0, group=names[0])
    with pytest.raises(commdsl.ArgumentError, match="without `sequence_parallel` none are"):
        ColumnParallelLinear(8, 8, group=names[0], sequence_parallel=False, keep_rows=True)


def test_norms_between_layers() -> None:
    """On ranks that are threads, too, gradients of replicated parameters are summed, and norms are of all blocks."""
    torch.manual_seed(1)
    norm, up = torch.nn.LayerNorm(8), torch.nn.Linear(8, 12)
    x = torch.randn(6, 8)
    up(norm(x)).square().sum().backward()
    total = torch.nn.utils.clip_grad_norm_([*norm.parameters(), *up.parameters()], 1.0)

    def rank_does(rank: int, group: str) -> None:
        model = torch.nn.Sequential(torch.nn.LayerNorm(8), ColumnParallelLinear(8, 12, group=group))
        model[1].load_state_dict(up.state_dict())
        overlap.sync_replicated(model)
        model(x.chunk(3)[rank]).square().sum().backward()
        torch.testing.assert_close(overlap.clip_grad_norm_(model.parameters(), 1.0), total, rtol=1e-6, atol=0)
        torch.testing.assert_close(model[0].weight.grad, norm.weight.grad)
        torch.testing.assert_close(model[1].weight.grad, up.weight.grad.chunk(3)[rank])

    in_group(3, rank_does)


LAYERS = [
    (ColumnParallelLinear, {}),
    (ColumnParallelLinear, {"sequence_parallel": False}),
    (RowParallelLinear, {}),
    (RowParallelLinear, {"sequence_parallel": False}),
]


@pytest.mark.parametrize(("layer", "made"), LAYERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_autocast(ranks: int, layer: Any, made: dict[str, bool]) -> None:
    """Under autocast a layer gives what torch's gives, its bias cast as well, and gradients of its own type."""

    def rank_does(rank: int, group: str) -> None:
        own, one = layer(8, 8, group=group, **made), torch.nn.Linear(8, 8)
        for dtype in (torch.float32, torch.bfloat16):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = own(torch.ones(4, own.in_features, dtype=dtype))
                assert found.dtype == one(torch.ones(4, 8, dtype=dtype)).dtype
            found.sum().backward()
        assert own.weight.grad.dtype == own.bias.grad.dtype == torch.float32

    in_group(ranks, rank_does)


@pytest.mark.parametrize(("layer", "made"), LAYERS)
def test_as_a_module(layer: Any, made: dict[str, bool]) -> None:
    """What torch does with modules: copies, files, states, other types, calls with other weights, no data; and a line
    that says on how many ranks.
    """
    group, _ = commdsl.threads(2)
    own = layer(8, 16, group=group, **made)
    assert f"ranks=2, sequence_parallel={own.sequence_parallel}" in repr(own)
    other = layer(8, 16, group=group, **made)
    other.load_state_dict(own.state_dict())
    for again in (copy.deepcopy(own), pickle.loads(pickle.dumps(own)), other):
        assert again.state_dict().keys() == {"weight", "bias"}
        assert all(torch.equal(one, again.state_dict()[name]) for name, one in own.state_dict().items())
        assert (again.group_name, repr(again)) == (group, repr(own))
    assert own.half().weight.dtype == torch.float16

    empty = layer(8, 16, group=group, device="meta", **made)
    x = torch.empty(4, empty.in_features, device="meta")
    assert empty(x).shape[1] == empty.out_features
