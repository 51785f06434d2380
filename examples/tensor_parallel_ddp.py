"""A small transformer, tensor parallel along one axis of a DeviceMesh and data parallel along the other, trained twice:

    torchrun --nproc-per-node 4 examples/tensor_parallel_ddp.py [--mesh 2x2] [--steps 100] [--dtype float32]

Once all that travels goes by commdsl, once by torch.distributed (NCCL on GPUs, gloo on the processor), from the same
start on the same data. The mesh is data x tensor. Tokens are cut among the tensor ranks outside of a block's matrix
products and heads inside (all-gather in, reduce-scatter out, each the other's gradient); DDP averages over the data
ranks by a communication hook.

Rank 0 prints how the losses compare. Along an axis of two ranks each sum is one of two numbers, which has no order: on
2x2 all losses and weights are the same bit for bit. Along more ranks each sums in an order of its own, and training
makes more of such roundings; how much more is seen in a third run, by torch.distributed from a start whose weights are
larger by one rounding: our losses may be apart from its own by as much as that, times a few. Exit code 1 otherwise.
"""

# No `from __future__ import annotations`: DDP looks at those of a communication hook.
import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import commdsl

VOCABULARY, WIDTH, HEADS, TOKENS, BATCH = 64, 64, 8, 32, 4
A_FEW = 8.0
"""How often the distance that one rounding of the start makes."""


# --- what travels -----------------------------------------------------------------------------------------------------


class Transport(Protocol):
    """The collectives of one training run; blocks lie along dimension 0."""

    def gather(self, x: torch.Tensor, group: Any) -> torch.Tensor: ...

    def scatter(self, x: torch.Tensor, group: Any) -> torch.Tensor: ...

    def total(self, x: torch.Tensor, group: Any) -> torch.Tensor: ...

    def average_gradients(self, model: DistributedDataParallel, group: Any) -> None: ...


class Commdsl:
    """Its ops have gradients: of an all-gather the reduce-scatter, and the other way round."""

    def gather(self, x: torch.Tensor, group: Any) -> torch.Tensor:
        return commdsl.all_gather(x.contiguous(), group=group)

    def scatter(self, x: torch.Tensor, group: Any) -> torch.Tensor:
        return commdsl.reduce_scatter(x.contiguous(), group=group)

    def total(self, x: torch.Tensor, group: Any) -> torch.Tensor:
        return commdsl.all_reduce(x, group=group)

    def average_gradients(self, model: DistributedDataParallel, group: Any) -> None:
        def average(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            work = commdsl.all_reduce(bucket.buffer(), op="avg", group=group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        model.register_comm_hook(group, average)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        found = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather_into_tensor(found, x.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        found = gradient.new_empty(gradient.shape[0] // dist.get_world_size(ctx.group), *gradient.shape[1:])
        dist.reduce_scatter_tensor(found, gradient.contiguous(), group=ctx.group)
        return found, None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        found = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
        dist.reduce_scatter_tensor(found, x.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        found = gradient.new_empty(gradient.shape[0] * dist.get_world_size(ctx.group), *gradient.shape[1:])
        dist.all_gather_into_tensor(found, gradient.contiguous(), group=ctx.group)
        return found, None


class Torch:
    """The same by torch.distributed, and DDP's own averaging."""

    def gather(self, x: torch.Tensor, group: Any) -> torch.Tensor:
        return Gather.apply(x, group)

    def scatter(self, x: torch.Tensor, group: Any) -> torch.Tensor:
        return Scatter.apply(x, group)

    def total(self, x: torch.Tensor, group: Any) -> torch.Tensor:
        found = x.clone()
        dist.all_reduce(found, group=group)
        return found

    def average_gradients(self, model: DistributedDataParallel, group: Any) -> None:
        """DDP does so by itself."""


# --- the model --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a perceptron. Norms see this rank's tokens, matrices this rank's heads and all tokens."""

    def __init__(self, transport: Transport, group: Any) -> None:
        super().__init__()
        self.transport, self.group, self.ranks = transport, group, dist.get_world_size(group)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH // self.ranks, bias=False)
        self.out = nn.Linear(WIDTH // self.ranks, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH // self.ranks, bias=False)
        self.down = nn.Linear(4 * WIDTH // self.ranks, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (this rank's tokens, batch, width)."""
        x = x + self.across(x, self.norms[0], self.attend)
        return x + self.across(x, self.norms[1], lambda h: self.down(F.gelu(self.up(h))))

    def across(self, x: torch.Tensor, norm: nn.Module, work: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`work` gives this rank's share of a sum for all tokens."""
        return self.transport.scatter(work(self.transport.gather(norm(x), self.group)), self.group)

    def attend(self, h: torch.Tensor) -> torch.Tensor:
        tokens, batch, _ = h.shape
        q, k, v = self.qkv(h).view(tokens, batch, HEADS // self.ranks, -1).permute(1, 2, 0, 3).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=h.device).triu(1)
        found = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.out(found.permute(2, 0, 1, 3).reshape(tokens, batch, -1))


class Model(nn.Module):
    def __init__(self, transport: Transport, group: Any, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(VOCABULARY, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(transport, group) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """words: (this rank's tokens, batch). As a product, whose gradient has one order on GPUs, too."""
        each = torch.arange(VOCABULARY, device=words.device)
        x = self.embedding((words[..., None] == each).to(self.embedding.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def whole(self) -> list[nn.Parameter]:
        """What every tensor rank has whole: its gradients come from that rank's tokens alone."""
        norms = [parameter for block in self.blocks for parameter in block.norms.parameters()]
        return [self.embedding.weight, self.head.weight, *norms]


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """Of a training run; the mesh is (data, tensor)."""

    mesh: tuple[int, int] = (2, 2)
    steps: int = 100
    layers: int = 2
    dtype: torch.dtype = torch.float32

    @property
    def has_order(self) -> bool:
        """Whether a sum over ranks depends on its order."""
        return max(self.mesh) > 2


@dataclass(frozen=True)
class Place:
    """This rank's place in the mesh."""

    data: Any
    tensor: Any
    data_rank: int
    tensor_rank: int
    device: torch.device

    @staticmethod
    def of(mesh: Any, device: torch.device) -> "Place":
        data, tensor = mesh["data"], mesh["tensor"]
        return Place(data.get_group(), tensor.get_group(), data.get_local_rank(), tensor.get_local_rank(), device)


def words(place: Place, step: int) -> torch.Tensor:
    """(TOKENS + 1, BATCH): each a multiple and a shift of the one before, mostly; the same on the ranks of a tensor."""
    generator = torch.Generator().manual_seed(1000 * step + place.data_rank)
    found = torch.randint(VOCABULARY, (TOKENS + 1, BATCH), generator=generator)
    noise = torch.rand(TOKENS + 1, BATCH, generator=generator) < 0.05
    for at in range(1, TOKENS + 1):
        found[at] = torch.where(noise[at], found[at], (5 * found[at - 1] + 7) % VOCABULARY)
    return found.to(place.device)


def built(transport: Transport, place: Place, size: Size, more: float) -> Model:
    """The same start for all runs and data ranks; another one for every tensor rank, but for what is whole. `more`: by
    what fraction the weights are larger."""
    torch.manual_seed(100 + place.tensor_rank)
    model = Model(transport, place.tensor, size.layers)
    torch.manual_seed(1)
    for parameter in model.whole():
        nn.init.ones_(parameter) if parameter.dim() == 1 else nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        for parameter in model.to(size.dtype).parameters():
            parameter.mul_(1 + more)
    return model.to(place.device)


def train(transport: Transport, place: Place, size: Size, more: float = 0.0) -> tuple[list[float], list[torch.Tensor]]:
    """The loss of every step, mean over all tokens of all data ranks, and the weights at the end."""
    model = built(transport, place, size, more)
    whole = model.whole()
    on = [place.device] if place.device.type == "cuda" else None
    parallel = DistributedDataParallel(model, device_ids=on, process_group=place.data)
    transport.average_gradients(parallel, place.data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    share = TOKENS // dist.get_world_size(place.tensor)
    mine = slice(place.tensor_rank * share, (place.tensor_rank + 1) * share)
    losses = []
    for step in range(size.steps):
        text = words(place, step)
        found = parallel(text[:-1][mine]).float()
        loss = F.cross_entropy(found.flatten(0, 1), text[1:][mine].flatten(), reduction="sum") / (TOKENS * BATCH)
        loss.backward()
        together(transport, whole, place.tensor)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().reshape(1))
    total = transport.total(transport.total(torch.cat(losses), place.tensor), place.data)
    means = total / dist.get_world_size(place.data)
    return means.tolist(), [parameter.detach().clone() for parameter in model.parameters()]


def together(transport: Transport, parameters: Sequence[nn.Parameter], group: Any) -> None:
    """Gradients that are each rank's share become the sum, in one call."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = transport.total(torch.cat([gradient.flatten() for gradient in gradients]), group)
    for gradient, part in zip(gradients, total.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    ours: list[float]
    theirs: list[float]
    nudged: list[float]  # theirs again where sums have an order, from a start that is larger by a rounding
    same_weights: bool  # bit for bit, on every rank

    @property
    def same(self) -> int:
        """Steps whose losses are the same bit for bit."""
        return sum(one == other for one, other in zip(self.ours, self.theirs, strict=True))

    @property
    def apart(self) -> float:
        """The largest difference, as a fraction of the loss."""
        return apart(self.ours, self.theirs)

    @property
    def learned(self) -> float:
        return self.ours[-1] / self.ours[0]

    @property
    def fault(self) -> str:
        """What is not as it must be; empty: nothing. Asked so that a number that is none is a fault, too."""
        if not self.learned < 0.9:
            return f"nothing was learned: the last loss is {self.learned:.2f} of the first"
        if not self.nudged and (self.same < len(self.ours) or not self.same_weights):
            return "sums of two numbers have no order, and yet losses or weights are not the same bit for bit"
        if self.nudged and not self.apart <= A_FEW * apart(self.nudged, self.theirs):
            return f"losses are {self.apart:.1e} apart, a rounding makes {apart(self.nudged, self.theirs):.1e}"
        return ""

    def text(self) -> str:
        said = [
            f"loss {self.ours[0]:.4f} -> {self.ours[-1]:.4f} by commdsl, {self.theirs[-1]:.4f} by torch.distributed",
            f"{self.same} of {len(self.ours)} losses the same bit for bit, at most {self.apart:.1e} apart"
            + (f" (from a start larger by a rounding: {apart(self.nudged, self.theirs):.1e})" if self.nudged else ""),
            f"weights the same bit for bit: {'yes' if self.same_weights else 'no'}",
        ]
        return "\n".join([*said, self.fault or "as it must be"])


def apart(some: list[float], others: list[float]) -> float:
    one, other = torch.tensor(some), torch.tensor(others)
    return float(((one - other) / other).abs().max())


def compare(size: Size, device: torch.device) -> Comparison:
    """Trains twice, or three times. Collective over the default group, whose ranks are the mesh's."""
    mesh = init_device_mesh(device.type, size.mesh, mesh_dim_names=("data", "tensor"))
    place = Place.of(mesh, device)
    ours, our_weights = train(Commdsl(), place, size)
    theirs, their_weights = train(Torch(), place, size)
    nudged = train(Torch(), place, size, torch.finfo(size.dtype).eps)[0] if size.has_order else []
    same = all(torch.equal(one, other) for one, other in zip(our_weights, their_weights, strict=True))
    everyone = torch.tensor([int(same)], device=device)
    dist.all_reduce(everyone, dist.ReduceOp.MIN)
    return Comparison(ours, theirs, nudged, bool(everyone.item()))


def options_of(arguments: Sequence[str]) -> Size:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2x2", help="data x tensor ranks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args(arguments)
    try:
        data, tensor = map(int, options.mesh.split("x"))
    except ValueError:
        parser.error(f"`--mesh {options.mesh}`: expected such as 2x2")
    return Size((data, tensor), options.steps, options.layers, getattr(torch, options.dtype))


def set_up() -> torch.device:
    """This rank's device; whatever is computed comes out the same when it is computed again."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def main() -> None:
    size = options_of(sys.argv[1:])
    found = compare(size, set_up())
    if dist.get_rank() == 0:
        print(found.text())
    commdsl.shutdown()
    dist.destroy_process_group()
    sys.exit(int(bool(found.fault)))


if __name__ == "__main__":
    main()
