"""Cases of test_sharded.py: each function runs in every process of a gloo group of four at once.

Assumes torch.distributed is initialised. What ranks write lies in a folder that rank 0 makes for all.
"""

from __future__ import annotations

import copy
import io
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sharded_model as small
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import commdsl
from commdsl import overlap
from commdsl.overlap.splits import Split, split_of

RANKS = 4


@contextmanager
def folder() -> Iterator[str]:
    """The same on all ranks."""
    with tempfile.TemporaryDirectory() as own:
        names: list[Any] = [own]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()


def alone() -> Any:
    """A group of this rank."""
    return [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]


def mesh() -> Any:
    """Two by two; ranks of a tensor axis are not neighbours of the data axis."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


# --- state dicts ------------------------------------------------------------------------------------------------------


def subgroups() -> None:
    """Two groups of two save one checkpoint, by their mesh; the four ranks, others of two, and each alone load it."""
    both = mesh()
    with folder() as path:
        small.save(path, both["tensor"])
        for group in (both["data"], both["data"].get_group(), None, alone()):
            small.load(path, group)


def placements() -> None:
    """Blocks are DTensors on the group's ranks, views of the parameters; what all have whole is a plain tensor."""
    group = mesh()["tensor"].get_group()
    model, _ = small.trained(group, 1)
    state = model.state_dict()
    for name, parameter in model.named_parameters():
        value = state[name]
        assert isinstance(value, DTensor) == (name in small.SHARDED)
        if isinstance(value, DTensor):
            assert value.placements == (Shard(small.SHARDED[name]),)
            assert value.device_mesh.mesh.tolist() == dist.get_process_group_ranks(group)
            assert value.to_local().data_ptr() == parameter.data_ptr()
            assert value.numel() == 2 * parameter.numel()
    assert state["gated.weight"].shape == (2, small.WIDTH, small.WIDTH)
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in model.named_parameters())


def loads() -> None:
    """A layer takes its block, the whole in either shape, and DTensors of any layout; copies, files and `assign` do."""
    rank = dist.get_rank()
    everyone = init_device_mesh("cpu", (RANKS,))
    for parts in (1, 2):
        torch.manual_seed(5)
        layer = overlap.ColumnParallelLinear(8, 16, parts=parts, bias=False)
        whole = torch.randn(16, 8)
        block = whole.unflatten(0, (parts, RANKS, -1))[:, rank].flatten(0, 1).clone()
        unfolded = whole if parts == 1 else whole.unflatten(0, (parts, -1))
        laid_out = distribute_tensor(unfolded, everyone, [Shard(parts - 1)], src_data_rank=None)
        given = [whole, unfolded, block, laid_out]
        given += [
            distribute_tensor(unfolded, everyone, [one], src_data_rank=None) for one in (Shard(parts), Replicate())
        ]
        for value in given:
            for assign in (False, True):
                nn.init.zeros_(layer.weight)
                layer.load_state_dict({"weight": value.clone()}, assign=assign)
                assert torch.equal(layer.weight, block)
                assert type(layer.weight) is nn.Parameter
                assert layer.weight.untyped_storage().nbytes() == block.nbytes
                assert layer.state_dict()["weight"].shape == unfolded.shape
        for again in (copy.deepcopy(layer), written(layer), copy.deepcopy(layer).to(torch.float64)):
            assert torch.equal(again.state_dict()["weight"].full_tensor(), unfolded)
            assert again.weight.shape == block.shape
        for state in (layer.state_dict(), written(layer.state_dict())):
            other = overlap.ColumnParallelLinear(8, 16, parts=parts, bias=False, device="meta")
            assert other.state_dict()["weight"].is_meta
            other.load_state_dict(state, assign=True)
            assert torch.equal(other.weight, block)
            assert torch.equal(other.state_dict()["weight"].full_tensor(), unfolded)


def written(value: Any) -> Any:
    """What torch.load makes of what torch.save wrote, of state dicts by weights alone."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=isinstance(value, dict))


def declarations() -> None:
    """A parameter is known to be a block however it came to be there; one that is saved by itself is a plain one."""
    made = overlap.ColumnParallelLinear(8, 16, device="meta").to_empty(device="cpu")
    replaced = overlap.ColumnParallelLinear(8, 16)
    replaced.weight = nn.Parameter(torch.ones(4, 8))
    assigned = overlap.ColumnParallelLinear(8, 16)
    assigned.load_state_dict({"weight": torch.ones(4, 8), "bias": torch.ones(16)}, assign=True)
    moved = overlap.ColumnParallelLinear(8, 16).double()
    for layer in (made, replaced, assigned, moved, copy.deepcopy(moved), written(moved)):
        assert split_of(layer.weight) == split_of(layer.bias) == Split(dist.group.WORLD.group_name, 0)
    saved = io.BytesIO()
    torch.save(replaced.weight, saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved, weights_only=True), replaced.weight)
    assert split_of(nn.Linear(2, 2).weight) is None


def refused_loads() -> None:
    """A shape that means neither is an error that names both, once; missing and unexpected keys are as torch has it."""
    layer = overlap.RowParallelLinear(8, 16)
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError) as raised:
        layer.load_state_dict({"weight": torch.zeros(16, 4), "bias": torch.zeros(4)})
    text = (
        "weight: error[C951]: expected the whole of 4 ranks, (16, 8), or this rank's block of it, (16, 2), got (16, 4)"
    )
    assert str(raised.value).count("(16, 4)") == 1
    assert text in str(raised.value)
    assert torch.equal(layer.weight, before)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "bias"'):
        layer.load_state_dict({"weight": before})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "other"'):
        layer.load_state_dict({**layer.state_dict(), "other": before})
    found = layer.load_state_dict({"weight": before, "other": before}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["bias"], ["other"])
    with pytest.raises(commdsl.ArgumentError, match="`up` is no parameter of this ShardedModule"):
        overlap.ShardedModule().shard_parameters("up")
    experts = small.Experts(None)
    with pytest.raises(commdsl.ArgumentError, match=r"`up` of shape \(1, 16, 16\) has no dimension 3"):
        experts.shard_parameters("up", dim=3)
    with pytest.raises(commdsl.ArgumentError, match=r"dimension 1 of `up`, \(1, 16, 16\), is no 3 equal parts"):
        experts.shard_parameters("up", dim=1, parts=3)
    layer.weight = nn.Parameter(distribute_tensor(before, init_device_mesh("cpu", (RANKS,)), [Replicate()]))
    with pytest.raises(commdsl.TensorError, match="expected a plain tensor, this rank's block, got a DTensor"):
        layer.state_dict()


def full_states() -> None:
    """torch's functions gather whole state dicts and load them, of models and optimizers, on other groups, too."""
    model, optimizer = small.trained(mesh()["tensor"], 3)
    options = StateDictOptions(full_state_dict=True)
    of_model = get_model_state_dict(model, options=options)
    of_optimizer = get_optimizer_state_dict(model, optimizer, options=options)
    for group in (None, alone()):
        other, its = small.trained(group, 4)
        set_model_state_dict(other, of_model, options=options)
        set_optimizer_state_dict(other, its, of_optimizer, options=options)
        wanted, of_wanted = small.trained(group, 3)
        small.same(small.checkpoint(other, its), small.checkpoint(wanted, of_wanted))


def optimizers() -> None:
    """States of blocks are loaded into an optimizer that has not stepped, plain or whole; other states are a rank's."""
    model, optimizer = small.trained(None, 3)
    for kind in (torch.optim.Adam, torch.optim.Adafactor):
        if kind is torch.optim.Adafactor:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter) * (1 + dist.get_rank())
            optimizer = kind(model.parameters(), lr=0.1)
            optimizer.step()
        saved = optimizer.state_dict()
        plain = {**saved, "state": dict(enumerate(optimizer.state.values()))}
        for state in (saved, written(saved), plain):
            other = kind(model.parameters(), lr=0.1)
            other.load_state_dict(copy.deepcopy(state))
            overlap.shard_states(other)
            overlap.shard_states(other)
            assert len(other._optimizer_state_dict_post_hooks) == 1
            small.same(other.state_dict()["state"], optimizer.state_dict()["state"])
            for parameter in model.parameters():
                for name, value in other.state[parameter].items():
                    assert type(value) is torch.Tensor
                    assert torch.equal(value, optimizer.state[parameter][name])
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            other.step()
    states = optimizer.state_dict()["state"].values()
    shapes = {tuple(one["col_var"].shape) for one in states if isinstance(one.get("col_var"), DTensor)}
    assert (RANKS, 1, small.WIDTH) in shapes  # a rank's own
    name, parameter = next(iter(model.column.named_parameters()))
    optimizer = torch.optim.Adam([parameter])
    optimizer.step()
    state = optimizer.state_dict()
    wrong = {
        **state,
        "state": {
            0: {
                **state["state"][0],
                "exp_avg": distribute_tensor(torch.ones(3, 5), init_device_mesh("cpu", (RANKS,)), [Replicate()]),
            }
        },
    }
    with pytest.raises(commdsl.TensorError, match="expected the whole of 4 ranks"):
        optimizer.load_state_dict(wrong)
    assert name == "weight"


# --- clipping ---------------------------------------------------------------------------------------------------------


def clipping() -> None:
    """Norms of any order, and gradients after clipping, are those of one rank to 1e-6."""
    for group in (None, mesh()["tensor"]):
        for order in (2.0, 1, 3.5, math.inf, "inf"):
            for max_norm in (0.5, 1e9):
                for foreach in (None, False):
                    one, model = (small.trained(each, 2)[0] for each in (alone(), group))
                    norm = torch.nn.utils.clip_grad_norm_(one.parameters(), max_norm, order, foreach=foreach)
                    found = overlap.clip_grad_norm_(model.parameters(), max_norm, order, foreach=foreach, group=group)
                    torch.testing.assert_close(found, norm, rtol=1e-6, atol=0)
                    split = {name: parameter.grad for name, parameter in one.named_parameters()}
                    rank, ranks = small.place(group)
                    for name, parameter in model.named_parameters():
                        whole = split[name]
                        if name in small.SHARDED:
                            whole = whole.unflatten(0, (2, -1)) if name.startswith("gated") else whole
                            whole = whole.chunk(ranks, small.SHARDED[name])[rank].reshape(parameter.shape)
                        torch.testing.assert_close(parameter.grad, whole, rtol=1e-6, atol=1e-9)


def clipping_some() -> None:
    """Ranks without a gradient take part; numbers that are none are told on all ranks; what is refused."""
    rank = dist.get_rank()
    experts = small.Experts(None)
    assert overlap.clip_grad_norm_(experts.parameters(), 1.0) == 0
    if rank:
        experts.up.grad = torch.full_like(experts.up, float(rank))
    norm = overlap.clip_grad_norm_(experts.up, 1.0)
    torch.testing.assert_close(norm, torch.tensor(16 * math.sqrt(14.0)), rtol=1e-6, atol=0)
    if rank == 2:
        experts.up.grad[0, 0, 0] = math.nan
    for order in (math.inf, 1, 2):
        with pytest.raises(RuntimeError, match="is nan: nothing was clipped"):
            overlap.clip_grad_norm_(experts.parameters(), 1.0, order, error_if_nonfinite=True)
    assert overlap.clip_grad_norm_(experts.parameters(), 1.0).isnan()
    assert overlap.clip_grad_norm_([], 1.0) == 0
    for order in (0, -1, math.nan):
        with pytest.raises(commdsl.ArgumentError, match="`norm_type` is a positive number or inf"):
            overlap.clip_grad_norm_(experts.parameters(), 1.0, order)
    with pytest.raises(commdsl.ArgumentError, match=r"a parameter of shape \(1, 16, 16\) is sharded over group"):
        overlap.clip_grad_norm_(experts.parameters(), 1.0, group=mesh()["tensor"])
    tensor = nn.Parameter(distribute_tensor(torch.ones(8), init_device_mesh("cpu", (RANKS,)), [Shard(0)]))
    with pytest.raises(commdsl.TensorError, match=r"torch.nn.utils.clip_grad_norm_ is right for DTensors"):
        overlap.clip_grad_norm_([tensor], 1.0)


# --- sums of gradients ------------------------------------------------------------------------------------------------


def sums() -> None:
    """Accumulated over two backward passes, compiled or not, gradients are those of one rank, the same bits on all
    ranks; handles end it, and a copy of the model has none.
    """
    rank = dist.get_rank()
    one = small.whole_model()
    for step in range(2):
        small.own_loss(one, step, 0, 1).backward()
    for compiled in (False, True):
        model = small.parallel_model(None)
        handles = overlap.sync_replicated(model)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for step in range(2):
            small.own_loss(run, step, rank, RANKS).backward()
        for (name, parameter), wanted in zip(model.named_parameters(), one.parameters(), strict=True):
            if "norm" in name or "embedding" in name or "head" in name:
                torch.testing.assert_close(parameter.grad, wanted.grad, rtol=2e-5, atol=1e-7)
                theirs = [torch.empty_like(wanted) for _ in range(RANKS)]
                dist.all_gather(theirs, parameter.grad)
                assert all(torch.equal(their, parameter.grad) for their in theirs)
    assert len(handles) == sum(
        parameter.shape == wanted.shape for parameter, wanted in zip(model.parameters(), one.parameters(), strict=True)
    )
    with pytest.raises(commdsl.ArgumentError, match=r"the gradient of `embedding.weight` is summed already"):
        overlap.sync_replicated(model)
    overlap.sync_replicated(copy.deepcopy(model))
    for handle in handles:
        handle.remove()
    model.zero_grad()
    small.own_loss(model, 0, rank, RANKS).backward()
    shares = [torch.empty_like(model.norm.weight) for _ in range(RANKS)]
    dist.all_gather(shares, model.norm.weight.grad)
    assert not torch.equal(shares[0], shares[1])
    model.embedding.weight.requires_grad_(False)
    assert len(overlap.sync_replicated(model)) == len(handles) - 1


def refused_sums() -> None:
    """What cannot be summed is refused on all ranks, before a hook is there."""
    rank = dist.get_rank()
    model = small.parallel_model(None)
    with torch.no_grad():
        model.norm.weight[3] += 1e-3 * (rank == 2)
    with pytest.raises(commdsl.ReplicaError) as raised:
        overlap.sync_replicated(model)
    assert "different values of `norm.weight` on ranks 0 and 2" in str(raised.value)
    texts: list[Any] = [None] * RANKS
    dist.all_gather_object(texts, str(raised.value))
    assert len(set(texts)) == 1
    assert not any(one._backward_hooks for one in model.parameters())
    with pytest.raises(commdsl.ArgumentError, match=r"`blocks.0.qkv` has sequence_parallel=False"):
        overlap.sync_replicated(small.parallel_model(None, sequence_parallel=False))
    with pytest.raises(commdsl.ArgumentError, match="sharded over 2 groups"):
        overlap.sync_replicated(nn.ModuleList([small.parallel_model(mesh()["tensor"]), small.Experts(None)]))
    with pytest.raises(commdsl.TensorError, match="`weight` is on meta"):
        overlap.sync_replicated(nn.LayerNorm(4, device="meta"))
    embedding = nn.Embedding(4, 4, sparse=True)
    nn.init.ones_(embedding.weight)
    overlap.sync_replicated(embedding)
    with pytest.raises(commdsl.TensorError, match=r"the gradient of `weight` is torch\.sparse_coo"):
        embedding(torch.ones(2, dtype=torch.int64)).sum().backward()
    assert overlap.sync_replicated(small.parallel_model(alone())) == ()


def groups_across() -> None:
    """Experts of all ranks are left alone by a sum over some of them; those of an axis across are summed; others that
    overlap are refused.
    """
    both, rank = mesh(), dist.get_rank()
    tensor, data = both["tensor"].get_group(), both["data"].get_group()
    for group, is_summed in ((None, False), (data, True), (tensor, False)):
        experts = nn.ModuleDict({"experts": small.Experts(group), "norm": nn.LayerNorm(4)})
        if is_summed:  # the two ranks of `tensor` have the same ones
            torch.manual_seed(dist.get_rank(data))
            nn.init.normal_(experts.experts.up)
        assert len(overlap.sync_replicated(experts, tensor)) == 2 + is_summed
        (2.0 * experts.experts.up.sum()).backward()
        assert experts.experts.up.grad.unique().tolist() == [4.0 if is_summed else 2.0]
    three = dist.new_group([0, 1, 2])
    if rank < 2:
        with pytest.raises(commdsl.GroupError, match=r"some ranks of group `.*`, \[0, 1, 2\], have blocks of one"):
            overlap.sync_replicated(small.Experts(tensor), three)


# --- what COMMDSL_DEBUG finds -----------------------------------------------------------------------------------------


def steps(model: nn.Module, loss: Callable[[int], torch.Tensor], before_step: Callable[[], object], kind: Any) -> None:
    optimizer = kind(model.parameters(), lr=0.01)
    for step in range(2):
        loss(step).backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def nothing() -> None:
    """Between backward and step."""


def debugged() -> None:
    """A forgotten sum, and a norm of each rank's own, are named in the first step, alike on all ranks; right gradients
    are not, however they became right.
    """
    rank = dist.get_rank()
    patch = pytest.MonkeyPatch()
    patch.setenv("COMMDSL_DEBUG", "1")
    try:
        both = mesh()
        tensor, data = both["tensor"].get_group(), both["data"].get_group()

        def forgotten(optimizer: Any = torch.optim.SGD) -> None:
            model = small.parallel_model(None)
            steps(model, lambda step: small.own_loss(model, step, rank, RANKS), nothing, optimizer)

        def by_one_norm() -> None:
            model = small.parallel_model(None)
            overlap.sync_replicated(model)
            clip = torch.nn.utils.clip_grad_norm_
            steps(
                model,
                lambda step: small.own_loss(model, step, rank, RANKS),
                lambda: clip(model.parameters(), 0.01),
                torch.optim.SGD,
            )

        def in_two_optimizers() -> None:
            """As where matrices have an optimizer of their own: the one of the norms has no block."""
            model = small.parallel_model(None)
            small.own_loss(model, 0, rank, RANKS).backward()
            torch.optim.SGD(model.blocks[0].norms.parameters(), lr=0.1).step()

        def one_has_none() -> None:
            model = small.parallel_model(None)
            overlap.sync_replicated(model)
            small.own_loss(model, 0, rank, RANKS).backward()
            if rank == 3:
                model.head.bias.grad = None
            torch.optim.SGD(model.parameters(), lr=0.1).step()

        for case, name in (
            (forgotten, "embedding.weight"),
            (lambda: forgotten(torch.optim.Adam), "embedding.weight"),
            (by_one_norm, "embedding.weight"),
            (in_two_optimizers, "blocks.0.norms.0.weight"),
            (one_has_none, "head.bias"),
        ):
            with pytest.raises(commdsl.ReplicaError) as raised:
                case()
            assert f"different gradients of `{name}`" in str(raised.value)
            texts: list[Any] = [None] * RANKS
            dist.all_gather_object(texts, str(raised.value))
            assert len(set(texts)) == 1

        def synchronised() -> None:
            model = small.parallel_model(None)
            overlap.sync_replicated(model)
            steps(
                model,
                lambda step: small.own_loss(model, step, rank, RANKS),
                lambda: overlap.clip_grad_norm_(model.parameters(), 0.01),
                torch.optim.Adam,
            )

        def by_hand() -> None:
            model = small.parallel_model(None)
            whole = [one for name, one in model.named_parameters() if "norm" in name or name[0] in "eh"]

            def add_up() -> None:
                for one in whole:
                    dist.all_reduce(one.grad)

            steps(model, lambda step: small.own_loss(model, step, rank, RANKS), add_up, torch.optim.SGD)

        def of_all_rows() -> None:
            model = small.parallel_model(None, sequence_parallel=False)
            steps(model, lambda step: small.own_loss(model, step, 0, 1), nothing, torch.optim.SGD)

        def data_parallel() -> None:
            model = small.parallel_model(tensor)
            overlap.sync_replicated(model)
            parallel = DistributedDataParallel(model, process_group=data)
            own = dist.get_rank(data)
            steps(
                parallel,
                lambda step: small.own_loss(parallel, 2 * step + own, dist.get_rank(tensor), 2),
                lambda: overlap.clip_grad_norm_(model.parameters(), 0.01),
                torch.optim.SGD,
            )

        def no_parallel_layer() -> None:
            torch.manual_seed(rank)
            model = nn.Linear(4, 4)
            nn.init.ones_(model.weight)
            steps(model, lambda step: model(torch.randn(2, 4)).sum(), nothing, torch.optim.SGD)

        def own_blocks() -> None:
            """Experts that were not declared, whose values differ."""
            torch.manual_seed(rank)
            model = nn.ModuleList([small.Experts(None), nn.Linear(4, 4, bias=False)])
            steps(model, lambda step: model[1](torch.randn(2, 4)).sum(), nothing, torch.optim.SGD)

        for case in (synchronised, by_hand, of_all_rows, data_parallel, no_parallel_layer, own_blocks):
            case()
    finally:
        patch.undo()
    forgotten()  # compares nothing without the variable
