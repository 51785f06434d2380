"""Dispatch and combine as operators: gradients beside a model in float64 that has all tokens and experts on one rank;
opcheck; torch.compile.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - after the check for torch
from commdsl import ep  # noqa: E402 - after the check for torch
from commdsl.ep import simulate  # noqa: E402 - after the check for torch
from commdsl.runtime.errors import DispatchError, GradientError, TensorError  # noqa: E402 - after the check for torch

WIDTH = 6
KINDS = ("any", "some have none", "all to one expert", "most are dropped", "nobody has tokens")


@dataclass(frozen=True, eq=False)
class Tokens:
    """What all ranks have in a call, and what experts are, in float64."""

    x: list[Any]
    expert: list[Any]
    weight: list[Any]
    matrices: Any  # of every expert: what it makes of a row is tanh(row @ matrix)
    wanted: list[Any]  # the gradient of what comes back

    @staticmethod
    def drawn(kind: str, ranks: int, keys: int, experts: int, seed: int) -> Tokens:
        dice = torch.Generator().manual_seed(seed)
        counts = [0 if kind == "nobody has tokens" else 3 + 2 * rank for rank in range(ranks)]
        if kind == "some have none":
            counts[seed % ranks] = 0

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, generator=dice, dtype=torch.float64)

        expert = [torch.randint(0, experts + 1, (count, keys), generator=dice) for count in counts]
        if kind == "all to one expert":
            expert = [torch.full_like(one, experts - 1) for one in expert]
        if kind == "most are dropped":
            expert = [torch.where(torch.rand(one.shape, generator=dice) < 0.8, experts, one) for one in expert]
        return Tokens(
            [normal(count, WIDTH) for count in counts],
            [one.int() for one in expert],
            [normal(count, keys) for count in counts],
            normal(experts, WIDTH, WIDTH),
            [normal(count, WIDTH) for count in counts],
        )

    def alone(self) -> tuple[Any, ...]:
        """One rank with everything: results, and the gradients of tokens, weights and matrices, by rank or expert."""
        x, weight = ([one.clone().requires_grad_() for one in part] for part in (self.x, self.weight))
        matrices = self.matrices.clone().requires_grad_()
        found = []
        for tokens, experts, weights in zip(x, self.expert, weight, strict=True):
            y = torch.zeros_like(tokens)
            for k in range(experts.shape[1]):
                kept = experts[:, k] < len(matrices)
                chosen = matrices[experts[:, k].clamp(max=len(matrices) - 1).long()]
                made = torch.tanh(torch.einsum("tw,twv->tv", tokens, chosen))
                y = y + torch.where(kept[:, None], weights[:, [k]] * made, 0)
            found.append(y)
        sum((y * one).sum() for y, one in zip(found, self.wanted, strict=True)).backward()
        return [y.detach() for y in found], [one.grad for one in x], [one.grad for one in weight], matrices.grad


def computed(rows: Any, offsets: Any, matrices: Any) -> Any:
    """What a rank's experts make of the rows that came, each of its own."""
    ends = offsets.tolist()
    made = [torch.tanh(rows[begin:end] @ one) for begin, end, one in zip([0, *ends], ends, matrices, strict=False)]
    return torch.cat(made)


def limits(ranks: int, keys: int, received: int | None = None, dtype: Any = torch.float32) -> Any:
    rows = 3 + 2 * ranks
    width = WIDTH * dtype.itemsize
    return ep.Limits(rows, keys, ranks * rows * keys if received is None else received, (width,), width)


def near(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


WHERE = ("weighed by experts", "weighed at home", "added up by experts", "aligned")
SHAPES = [(*shape, where) for shape in ((1, 3, 5), (2, 1, 6), (3, 4, 9), (2, 32, 2)) for where in WHERE]


@pytest.mark.parametrize(("ranks", "keys", "experts", "where"), [*SHAPES, (4, 3, 8, "added up by experts")])
def test_gradients(ranks: int, keys: int, experts: int, where: str) -> None:
    """Results and the gradients of tokens, of routing weights and of experts are those of one rank, also where the rows
    of an expert begin at a multiple of a number. Four ranks are two nodes.
    """
    cases = [Tokens.drawn(kind, ranks, keys, experts, seed) for seed, kind in enumerate(KINDS)]
    wanted = [case.alone() for case in cases]

    def work(rank: int, group: str) -> None:
        local, align = where == "added up by experts", 5 if where == "aligned" else 1
        room = ranks * limits(ranks, keys).rows * keys + experts * align
        most = limits(ranks, keys, room)
        exchange = ep.Exchange(
            most, experts, group, "cpu", local_combine=local, align=align, node=2 if ranks == 4 else 0, check=True
        )
        share = experts // ranks
        for case, (results, of_x, of_weight, of_matrices) in zip(cases, wanted, strict=True):
            x, weight = (part[rank].float().requires_grad_() for part in (case.x, case.weight))
            matrices = case.matrices[rank * share : (rank + 1) * share].float().requires_grad_()
            there = ep.dispatch(exchange, x, case.expert[rank], None if where == "weighed at home" else weight)
            made = computed(there.rows, there.offsets, matrices)
            if where == "weighed at home":
                home = ep.combine(exchange, made, there.handle, weight)
            elif local:
                home = ep.combine(exchange, made, there.handle, there.weights[: len(made)])
            else:
                home = ep.combine(exchange, made * there.weights[: len(made), None], there.handle)
            near(home.detach(), results[rank])
            home.backward(case.wanted[rank].float())
            near(x.grad, of_x[rank])
            near(weight.grad, of_weight[rank])
            near(matrices.grad, of_matrices[rank * share : (rank + 1) * share])
        exchange.release()

    in_group(ranks, work)


@pytest.mark.parametrize("local", [False, True], ids=["", "added up by experts"])
def test_float8_is_straight_through(local: bool) -> None:
    """Tokens that travel in float8 are experts' as their values times their scales, to the bit; results and all
    gradients are those of one rank that has these, and the tokens' go through the rounding as if there were none.
    """
    wide, stretch = 24, 16
    dice = torch.Generator().manual_seed(5)
    matrix = torch.randn(6, wide, wide, generator=dice) / 5
    x = [torch.randn(4 + rank, wide, generator=dice) for rank in range(2)]
    expert = [torch.randint(0, 7, (len(one), 3), generator=dice).int() for one in x]
    weight = [torch.rand(one.shape, generator=dice) for one in expert]

    def rounded(one: Any) -> Any:
        codes, scales = simulate.quantised(one.numpy(), stretch)
        wide_codes = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
        return wide_codes * torch.from_numpy(scales).repeat_interleave(stretch, 1)[:, :wide]

    def work(rank: int, group: str) -> None:
        most = ep.Limits(6, 3, 40, (wide,), 4 * wide)
        exchange = ep.Exchange(most, 6, group, "cpu", local_combine=local, float8=stretch, check=True)
        mine, weights = x[rank].clone().requires_grad_(), weight[rank].clone().requires_grad_()
        matrices = matrix[3 * rank : 3 * rank + 3].clone().requires_grad_()
        with pytest.raises(GradientError, match=r"pass them to `ep.dequantise`"):
            ep.dispatch(exchange, mine, expert[rank], weights)
        there = ep.dispatch(exchange, mine.detach(), expert[rank], weights)
        assert isinstance(there.rows, ep.Quantised)
        assert not there.rows.rows.requires_grad
        rows = ep.dequantise(exchange, mine, there)
        total = int(there.offsets[-1])
        came = [(int(one) >> 32 & 0xFFFF, (int(one) & 0xFFFFFFFF) // 3) for one in there.handle.origins[:total]]
        assert all(
            torch.equal(row, rounded(x[source])[token]) for row, (source, token) in zip(rows, came, strict=False)
        )
        made = computed(rows, there.offsets, matrices)
        if local:
            home = ep.combine(exchange, made, there.handle, there.weights[: len(made)])
        else:
            home = ep.combine(exchange, made * there.weights[: len(made), None], there.handle)
        home.sum().backward()

        given = rounded(x[rank]).double().requires_grad_()
        asked, every = weight[rank].double().requires_grad_(), matrix.double()
        alone = torch.zeros_like(given)
        for k in range(3):
            of = expert[rank][:, k].long()
            made = torch.tanh(torch.einsum("tw,twv->tv", given, every[of.clamp(max=5)]))
            alone = alone + torch.where((of < 6)[:, None], asked[:, [k]] * made, 0)
        alone.sum().backward()
        near(home.detach(), alone.detach())
        near(mine.grad, given.grad)
        near(weights.grad, asked.grad)
        assert matrices.grad.abs().sum() > 0
        exchange.release()

    in_group(2, work)


def test_tensors_beside_float8() -> None:
    """A second tensor travels as it is beside tokens in float8; of many calls held all is copied out, scales too."""

    def work(rank: int, group: str) -> None:
        exchange = ep.Exchange(ep.Limits(4, 1, 8, (32, 4), 64), 2, group, "cpu", float8=16, gradients=False)
        expert, names = torch.full((4, 1), 1 - rank, dtype=torch.int32), torch.arange(4, dtype=torch.int32)[:, None]
        held = []
        for number in range(4):
            x = torch.full((4, 32), 448.0 * (number + 1)).bfloat16()
            held.append(ep.dispatch(exchange, (x, names + 10 * rank), expert))
        for number, there in enumerate(held):
            (codes, scales), beside = there.rows
            assert (codes[:4].float() == 448).all()
            assert (scales[:4] == number + 1).all()
            assert beside[:4, 0].tolist() == [10 * (1 - rank) + at for at in range(4)]
            wide = ep.dequantise(exchange, torch.empty(0, 32).half(), there)[:4]
            assert wide.dtype is torch.float16
            assert (wide == 448 * (number + 1)).all()
        plain = ep.Exchange(ep.Limits(4, 1, 8, (64,), 64), 2, group, "cpu", gradients=False)
        there = ep.dispatch(plain, torch.zeros(4, 32).bfloat16(), expert)
        with pytest.raises(GradientError, match="did not travel in float8"):
            ep.dequantise(plain, torch.zeros(4, 32), there)

    in_group(2, work)


def test_tensors_beside() -> None:
    """Bytes travel beside tokens that have a gradient; they have none, nor have tokens that are bytes."""

    def work(rank: int, group: str) -> None:
        exchange = ep.Exchange(ep.Limits(4, 2, 16, (24, 4), 24), 4, group, "cpu")
        x = torch.randn(4, WIDTH, requires_grad=True)
        scale = torch.arange(16, dtype=torch.uint8).reshape(4, 4) + 100 * rank
        expert = torch.tensor([[0, 3], [1, 2], [3, 0], [4, 4]], dtype=torch.int32)
        there = ep.dispatch(exchange, (x, scale), expert)
        assert there.rows[1][: int(there.offsets[-1])].tolist() == [
            scale[row].add(100 * (source - rank)).tolist()
            for key in (2 * rank, 2 * rank + 1)
            for source in range(2)
            for row in range(4)
            if key in expert[row]
        ]
        ep.combine(exchange, there.rows[0] * 3, there.handle).sum().backward()
        assert x.grad.tolist() == [[6.0] * WIDTH] * 3 + [[0.0] * WIDTH]
        with pytest.raises(GradientError, match="no gradient"):
            ep.dispatch(exchange, (scale.half().requires_grad_(), x), expert)

    in_group(2, work)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_numbers(dtype: Any) -> None:
    """In 16 bits the result is rounded once, and so is each gradient."""

    def work(rank: int, group: str) -> None:
        exchange = ep.Exchange(limits(2, 4, dtype=dtype), 4, group, "cpu")
        torch.manual_seed(rank)
        x, weight = torch.randn(5, WIDTH).to(dtype).requires_grad_(), torch.rand(5, 4).requires_grad_()
        expert = torch.stack([torch.randperm(4) for _ in range(5)]).int()
        there = ep.dispatch(exchange, x, expert)
        home = ep.combine(exchange, there.rows, there.handle, weight)
        home.backward(torch.ones_like(home))
        one = x.detach().float()
        torch.testing.assert_close(home.float(), (one * weight.sum(1, keepdim=True)), rtol=0.01, atol=0.01)
        torch.testing.assert_close(x.grad.float(), weight.sum(1, keepdim=True).expand(5, WIDTH), rtol=0.02, atol=0.01)
        torch.testing.assert_close(weight.grad, one.sum(1, keepdim=True).expand(5, 4), rtol=1e-5, atol=1e-5)

    in_group(2, work)


def test_refused() -> None:
    """Of combine there is no gradient of a gradient; what an Exchange cannot take is refused by name."""
    (name,) = commdsl.threads(1)
    exchange = ep.Exchange(limits(1, 2), 3, name, "cpu")
    x, expert = torch.randn(2, WIDTH, requires_grad=True), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    there = ep.dispatch(exchange, x, expert)
    home = ep.combine(exchange, there.rows, there.handle)
    (first,) = torch.autograd.grad(home.square().sum(), there.rows, create_graph=True)
    with pytest.raises(GradientError, match="gradient of their gradient"):
        first[:3].sum().backward()
    plain = ep.Exchange(limits(1, 2), 3, name, "cpu", gradients=False)
    there = ep.dispatch(plain, x, expert)
    there.rows[:3].sum().backward()
    with pytest.raises(GradientError, match="gradients=False"):
        ep.combine(plain, there.rows, there.handle)
    for arguments, kind in (
        ((x, expert.long()), TensorError),
        ((x.t(), expert), TensorError),
        ((torch.randn(9, WIDTH), torch.zeros(9, 2, dtype=torch.int32)), DispatchError),
        ((x, expert, torch.rand(2, 2).double()), TensorError),
        ((x, expert, torch.rand(2, 1)), TensorError),
    ):
        with pytest.raises(kind):
            ep.dispatch(exchange, *arguments)
    exchange.release()
    with pytest.raises(DispatchError):
        ep.dispatch(exchange, x, expert)


def test_opcheck_float8() -> None:
    """As for other tokens; what comes in float8 has no gradient, and what is made of it has."""
    (name,) = commdsl.threads(1)
    exchange = ep.Exchange(ep.Limits(3, 1, 3, (32,), 128), 4, name, "cpu", results=12, float8=16)
    x, weight = torch.randn(3, 32, requires_grad=True), torch.rand(3, 1, requires_grad=True)
    expert = torch.tensor([[0], [3], [1]], dtype=torch.int32)
    there = ep.dispatch(exchange, x.detach(), expert, weight.detach())
    left = there.handle
    handle = [left.counts, left.origins, left.offsets, left.places, left.mates, left.values]
    check = torch.library.opcheck
    # The others compute with what is given or returned, which torch does not with float8.
    alone = ["test_autograd_registration", "test_faketensor"]
    check(torch.ops.commdsl.ep_dispatch.default, ([x.detach()], expert, weight, exchange.name, ""), test_utils=alone)
    given = x, *there.rows, expert, handle, exchange.name
    check(torch.ops.commdsl.ep_dequantise.default, given, test_utils=[*alone, "test_aot_dispatch_dynamic"])


@pytest.mark.parametrize("local", [False, True], ids=["", "local_combine"])
def test_opcheck(local: bool) -> None:
    """Schemas, shapes and gradients as torch wants them; every place is written, so that results can be compared."""
    (name,) = commdsl.threads(1)
    exchange = ep.Exchange(limits(1, 1, received=3), 4, name, "cpu", results=12, local_combine=local)
    x, weight = torch.randn(3, WIDTH, requires_grad=True), torch.rand(3, 1, requires_grad=True)
    expert = torch.tensor([[0], [3], [1]], dtype=torch.int32)
    left = ep.dispatch(exchange, x.detach(), expert, weight.detach()).handle
    handle, rows = (
        [left.counts, left.origins, left.offsets, left.places, left.mates, left.values],
        torch.randn(3, WIDTH),
    )
    beside = torch.rand(3, requires_grad=True) if local else weight
    ops, check = torch.ops.commdsl, torch.library.opcheck
    check(ops.ep_dispatch.default, ([x], expert, weight, exchange.name, ""))
    check(ops.ep_dispatch.default, ([x], expert, None, exchange.name, ""))
    check(ops.ep_combine.default, (rows.clone().requires_grad_(), expert, handle, None, exchange.name))
    check(ops.ep_combine.default, (rows.clone().requires_grad_(), expert, handle, beside, exchange.name))
    check(ops.ep_dispatch_again.default, (x.detach(), expert, handle, exchange.name))
    check(ops.ep_combine_values.default, (torch.rand(3), expert, handle, exchange.name))


@pytest.mark.parametrize("float8", [0, 16], ids=["", "float8"])
def test_compiled(float8: int) -> None:
    """One graph, there and back, whose gradients are those of eager calls."""
    (name,) = commdsl.threads(1)
    exchange = ep.Exchange(limits(1, 2, received=6), 4, name, "cpu", results=8, float8=float8)

    def there_and_back(x: Any, expert: Any, weight: Any) -> Any:
        there = ep.dispatch(exchange, x.detach() if float8 else x, expert, weight)
        rows = ep.dequantise(exchange, x, there) if float8 else there.rows
        made = torch.tanh(rows) * there.weights[:, None]
        return ep.combine(exchange, made, there.handle) + ep.combine(exchange, rows, there.handle, weight)

    expert = torch.tensor([[0, 1], [3, 2], [1, 1]], dtype=torch.int32)
    found = []
    for call in (there_and_back, torch.compile(there_and_back, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(1)
        x, weight = torch.randn(3, WIDTH, requires_grad=True), torch.rand(3, 2, requires_grad=True)
        y = call(x, expert, weight)
        y.square().sum().backward()
        found.append((y, x.grad, weight.grad))
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_readme() -> None:
    """The lines of the README that have gradients run, and give what they say."""
    page = (ROOT / "commdsl" / "ep" / "README.md").read_text(encoding="utf-8")
    section = page.partition("\n## With gradients\n")[2]
    lines = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[0]

    def work(rank: int, group: str) -> None:
        torch.manual_seed(rank)
        names: dict[str, Any] = {"torch": torch, "ep": ep, "ranks": 2, "group": group}
        names["x"], scores = torch.randn(64, 128, requires_grad=True), torch.randn(64, 8)
        names["weights"], names["chosen"] = scores.softmax(1).requires_grad_().topk(2)
        names["matrices"] = torch.eye(128).expand(4, 128, 128).contiguous().requires_grad_()
        exec(lines, names)
        torch.testing.assert_close(names["y"], names["x"] * names["weights"].sum(1, keepdim=True))
        torch.testing.assert_close(names["x"].grad, names["weights"].sum(1, keepdim=True).expand(64, 128))
        assert names["matrices"].grad.abs().sum() > 0

    in_group(2, work)
