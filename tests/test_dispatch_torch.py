"""Dispatches as torch knows them: opcheck, torch.compile, gradients against dense indexing; and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from dispatch_plans import Case, cases, limits  # noqa: E402 - after the check for torch
from thread_ranks import in_group  # noqa: E402 - after the check for torch
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - after the check for torch
from commdsl import compiler, dispatch  # noqa: E402 - after the check for torch
from commdsl.dispatch.route import Way  # noqa: E402 - after the check for torch
from commdsl.ir.routes import Mask, Sharing  # noqa: E402 - after the check for torch
from commdsl.planner.chance import Draw, random_plan, varied  # noqa: E402 - after the check for torch
from commdsl.runtime import lasting  # noqa: E402 - after the check for torch
from commdsl.runtime.errors import AgreementError, TensorError  # noqa: E402 - after the check for torch
from commdsl.runtime.lent import Lent  # noqa: E402 - after the check for torch
from commdsl.runtime.pool import Pool, row_bytes  # noqa: E402 - after the check for torch

DispatchError = dispatch.DispatchError
PUTS = ("rows", "packed")
WIDTHS = (32, 16, 8)
"""Bytes of a row of q, k and v: (2, 4), (4,) and (2,) numbers of float32."""


@dataclass(frozen=True, eq=False)
class Rank:
    """One rank of a group of threads."""

    number: int
    group: str

    def route(self, case: Case) -> Any:
        return dispatch.Route(*case.metadata[:4], rank=self.number)

    def sender(self, found: Sequence[Case], put: str = "rows", widths: tuple[int, ...] = WIDTHS, **options: Any) -> Any:
        return dispatch.Dispatcher(limits(found, widths), group=self.group, put=put, **options)

    def tensors(self, rows: Sequence[int], seed: int = 0) -> list[Any]:
        """Small whole numbers: every order of summation gives the same bits. `rows` of q, and of k and v."""
        generator = torch.Generator().manual_seed(100 * seed + self.number)
        shapes = ((rows[0], 2, 4), (rows[-1], 4), (rows[-1], 2))
        return [torch.randint(-8, 9, shape, generator=generator).float() for shape in shapes]


def on_ranks(num_ranks: int, work: Callable[[Rank], Any]) -> list[Any]:
    """What `work` returns on each rank of a new group; the first exception of any."""
    return in_group(num_ranks, lambda rank, group: work(Rank(rank, group)))


def one_case(num_ranks: int, seed: int = 0, **draw: Any) -> Case:
    return Case(random_plan(Draw(num_ranks, 40, **{"empty": 0.0, **draw}), seed))


# --- what torch checks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("put", PUTS)
@pytest.mark.parametrize("way", Way)
def test_opcheck(put: str, way: Way) -> None:
    """The op is what torch wants of an op: its schema, its shapes without data, its gradients, traced and not."""
    case = one_case(1, most_shards=4)

    def work(rank: Rank) -> None:
        sender, route = rank.sender([case], put, results=20), rank.route(case)
        here = (route.rows, route.rows) if way.goes else (route.queries, route.keys)
        there = (route.queries, route.keys, route.keys) if way.goes else (route.rows,) * 3
        tensors = [one.requires_grad_() for one in rank.tensors(here)][: 3 if way.has_keys else 1]
        tables = sender.tables(route, way, tensors)
        for padded in (False, True):
            arguments = (tensors, *tables, list(there[: len(tensors)]), way.value, padded, padded, sender.name, "")
            torch.library.opcheck(torch.ops.commdsl.move_rows, arguments)

    on_ranks(1, work)


def both_ways(sender: Any, route: Any) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any) -> Any:
        q_here, k_here, v_here = sender.dispatch_qkv(q, k, v, route)
        return sender.collect(q_here, route), k_here, v_here

    return call


def same_as_eager(compiled: Callable[..., Any], eager: Callable[..., Any], tensors: list[Any]) -> None:
    """Results and gradients are equal, bit for bit."""
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out, want = compiled(*leaves), eager(*leaves)
    weights = [torch.arange(one.numel()).view(one.shape).float() % 7 for one in want]
    gradients = torch.autograd.grad(out, leaves, weights), torch.autograd.grad(want, leaves, weights)

    assert all(map(torch.equal, out, want))
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize(("num_ranks", "backend"), [(1, "inductor"), (2, "aot_eager")])
@pytest.mark.parametrize("put", PUTS)
def test_compile(put: str, num_ranks: int, backend: str) -> None:
    """torch.compile(fullgraph=True) traces a call; for Routes of other sizes it compiles once more, then never."""
    found = [one_case(num_ranks, seed, stays=0.0) for seed in range(1, 6)]

    def work(rank: Rank) -> int:
        sender = rank.sender(found, put, results=6)

        def call(q: Any, k: Any, v: Any, route: Any) -> Any:
            return both_ways(sender, route)(q, k, v)

        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(call, fullgraph=True, backend=counter)
        for case in found:
            route = rank.route(case)
            tensors = rank.tensors((route.rows,))
            sender.prepare(route, *tensors)
            same_as_eager(lambda *t, route=route: compiled(*t, route), both_ways(sender, route), tensors)
        return counter.frame_count

    torch.compiler.reset()
    assert all(1 <= count <= 3 for count in on_ranks(num_ranks, work))


def test_compile_asks_for_tables() -> None:
    """A Route that was not prepared: with fullgraph the message says what to do, else torch makes a break of it."""
    case = one_case(1)

    def work(rank: Rank) -> None:
        sender, route = rank.sender([case], "packed"), rank.route(case)
        tensors = rank.tensors((route.rows,))
        call = both_ways(sender, route)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="prepare"):
            torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
        same_as_eager(torch.compile(call, backend="aot_eager"), call, tensors)

    torch.compiler.reset()
    on_ranks(1, work)


# --- gradients --------------------------------------------------------------------------------------------------------


def dense(case: Case, given: list[list[Any]]) -> list[list[Any]]:
    """What every rank receives, by indexing the rows of all ranks: torch knows the gradient of that."""
    everyone = [torch.cat([tensors[part] for tensors in given]) for part in range(3)]
    traced = case.traced
    ids = (traced.queries, traced.keys, traced.keys)
    return [[everyone[part][ids[part][rank]] for part in range(3)] for rank in range(len(case.rows))]


@pytest.mark.parametrize("put", PUTS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gradients(put: str, num_ranks: int) -> None:
    """Gradients, and theirs, are those of dense indexing, with copies, empty ranks and shards that stay."""
    draws = [draw for draw in varied(num_ranks, 40, 8) if draw.mask is not None]
    for case in cases(draws[:: 5 - num_ranks], seed=31 * num_ranks):
        ranks = [Rank(number, "") for number in range(num_ranks)]
        given = [[one.requires_grad_() for one in rank.tensors((case.rows[rank.number],))] for rank in ranks]
        wanted = dense(case, given)
        weights = [
            [one.requires_grad_() for one in rank.tensors((len(out[0]), len(out[1])), seed=1)]
            for rank, out in zip(ranks, wanted, strict=True)
        ]
        flat = [one for tensors in given for one in tensors]
        out, weight = ([one for tensors in many for one in tensors] for many in (wanted, weights))
        gradients = torch.autograd.grad(out, flat, weight, create_graph=True)
        further = torch.autograd.grad(gradients, weight, [one.detach() for one in flat], allow_unused=True)

        def work(rank: Rank, case: Case = case, given: Any = given, weights: Any = weights) -> list[Any]:
            sender, route = rank.sender([case], put, results=4), rank.route(case)
            mine = [one.detach().clone().requires_grad_() for one in given[rank.number]]
            weight = [one.detach().clone().requires_grad_() for one in weights[rank.number]]
            got = sender.dispatch_qkv(*mine, route)
            first = torch.autograd.grad(got, mine, weight, create_graph=True)
            second = torch.autograd.grad(first, weight, [one.detach() for one in mine])
            return [one.detach().clone() for one in (*got, *first, *second)]

        for rank, got in enumerate(on_ranks(num_ranks, work)):
            mine = slice(3 * rank, 3 * rank + 3)
            assert all(map(torch.equal, got, (*wanted[rank], *gradients[mine], *further[mine])))


def test_tables_outlive_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are of what is kept from call to call, also where the first is in inference mode: the next may train."""
    case, kept, give = one_case(2, 1, stays=0.0), list[int](), lasting.room

    def room(nbytes: int, device: torch.device) -> torch.Tensor:
        found = give(nbytes, device)
        kept.append(found.data_ptr())
        return found

    def work(rank: Rank) -> None:
        sender, route = rank.sender([case]), rank.route(case)
        tensors = rank.tensors((route.rows,))
        with torch.inference_mode():
            sender.prepare(route, *tensors)
        there, back = sender.tables(route, Way.ALL, tensors)
        assert {there.data_ptr(), back.data_ptr()} <= set(kept)
        call = both_ways(sender, route)
        same_as_eager(call, call, tensors)

    monkeypatch.setattr(lasting, "room", room)
    on_ranks(2, work)


def test_a_gradient_that_is_not_asked_for() -> None:
    """An output that the loss leaves out has a gradient of zeros; an input that needs none gets none."""
    case = one_case(2, sharing=Sharing.RANK)

    def work(rank: Rank) -> None:
        sender, route = rank.sender([case], "packed"), rank.route(case)
        q, k, v = rank.tensors((route.rows,))
        _, k_here, _ = sender.dispatch_qkv(q, k.requires_grad_(), v.requires_grad_(), route)
        k_here.sum().backward()

        assert q.grad is None
        assert torch.equal(v.grad, torch.zeros_like(v))
        assert k.grad is not None
        assert int(k.grad.max()) >= 1

    on_ranks(2, work)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("put", PUTS)
def test_results_are_the_callers(put: str) -> None:
    """What a call returned is not touched by later ones, as long as somebody holds any of it."""
    case = one_case(3, most_shards=3)

    def work(rank: Rank) -> None:
        sender, route = rank.sender([case], put, results=3), rank.route(case)
        calls = [rank.tensors((route.rows,), seed) for seed in range(6)]
        first = sender.dispatch_qkv(*calls[0], route)
        kept = [first[0].clone(), first[2][:3].clone()]
        held = first[0], first[2][:3]
        del first
        for tensors in calls:
            there = sender.dispatch_qkv(*tensors, route)
            back = sender.collect_qkv(*there, route)

            assert torch.equal(sender.collect(there[0], route), back[0])
            assert all(map(torch.equal, held, kept))

    on_ranks(3, work)


def test_results_come_back() -> None:
    """Results lie in symmetric memory while it has places, else in ordinary memory; who lets go makes room. Any number
    may be held.
    """
    found = [one_case(2, seed, stays=0.0) for seed in range(8)]

    def work(rank: Rank) -> None:
        sender, routes = rank.sender(found, "rows", results=3), [rank.route(case) for case in found]
        heap = range(sender._launches.heap, sender._launches.heap + sender._layout.size)
        alive: list[Any] = []
        for call in range(60):
            route = routes[call * 5 % 8]
            held = sum(one.untyped_storage().data_ptr() in heap for one in alive)
            alive.append(sender.dispatch(torch.full((route.rows, 8), float(call)), route))
            assert (alive[-1].untyped_storage().data_ptr() in heap) == (held < 2)
            if len(alive) == 5:
                del alive[call % 5]
            assert all(one.unique().numel() == min(len(one), 1) for one in alive)

    on_ranks(2, work)


def test_places() -> None:
    """A place is taken until nobody holds a result in it, a kept one for ever; none is larger than the others."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    pool, like = Pool("p", memory.data_ptr(), (512, 256), 2), torch.zeros(1, 2, dtype=torch.int64)
    (first,) = pool.empty([32], [like], goes=True, keep=False)
    pair = pool.empty([3, 4], [like, like], goes=True, keep=False)
    assert [one.data_ptr() - memory.data_ptr() for one in (first, *pair)] == [0, 512, 768]
    with pytest.raises(DispatchError, match="2 calls there"):
        pool.empty([1], [like], goes=True, keep=False)
    del pair[0]
    with pytest.raises(DispatchError, match="2 calls there"):
        pool.empty([1], [like], goes=True, keep=False)
    view = pair.pop().view(torch.int32)[1:]
    with pytest.raises(DispatchError, match="2 calls there"):
        pool.empty([1], [like], goes=True, keep=False)
    del view
    with pytest.raises(DispatchError, match="256 bytes, and these need more"):
        pool.empty([17], [like], goes=False, keep=False)
    for _ in range(2):
        assert pool.empty([1], [like], goes=False, keep=True)[0].shape == (1, 2)
    with pytest.raises(DispatchError, match="2 calls back"):
        pool.empty([1], [like], goes=False, keep=False)


def test_results_are_of_no_mode() -> None:
    """What is taken after results of inference may get a gradient; what was done to a result before is not known."""
    memory = torch.zeros(256, dtype=torch.uint8)
    pool, like = Pool("p", memory.data_ptr(), (256, 0), 1), torch.zeros(1, 2)
    with torch.inference_mode():
        pool.empty([4], [like], goes=True, keep=False)[0].fill_(3)
    (found,) = pool.empty([4], [like], goes=True, keep=False)

    assert found._version == 0
    assert (found.requires_grad_() * found).sum().backward() is None
    assert found.grad is not None


@pytest.mark.parametrize("put", PUTS)
def test_a_call_is_judged_once(put: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are looked up for a call that differs from the last one with its Route, and for no other."""
    case = one_case(1)

    def work(rank: Rank) -> None:
        sender, route = rank.sender([case], put, results=6), rank.route(case)
        tensors, asked = rank.tensors((route.rows,)), []
        there = sender.dispatch_qkv(*tensors, route)
        tables = sender.tables
        monkeypatch.setattr(sender, "tables", lambda *given: asked.append(given[1]) or tables(*given))
        again = sender.dispatch_qkv(*(one.clone().requires_grad_() for one in tensors), route)

        assert not asked
        assert all(map(torch.equal, again, there))
        sender.dispatch_qkv(*tensors, route, padded=True)
        sender.dispatch_qkv(*(one.view(torch.int32) for one in tensors), route)
        sender.dispatch_qkv(*tensors, rank.route(case))
        assert asked == [Way.ALL] * 3

    on_ranks(1, work)


@pytest.mark.parametrize("put", PUTS)
def test_strides_of_one_row(put: str) -> None:
    """A tensor of one row, or none, is contiguous whatever its strides; its results are, as any others."""
    plan = compiler.check(files("plan p for 2 ranks { full rank 0 { doc a 1 -> 0 } rank 1 { doc a 4 -> 1 } }")).plan
    case = Case(plan)

    def work(rank: Rank) -> None:
        sender, route = rank.sender([case], put, results=3), rank.route(case)
        wide = torch.arange(96.0).view(2, 3, 4, 4)[:, 1][:, :, :2].flatten(1)[:, :8]
        k = torch.as_strided(torch.arange(100.0), (1, 4), (50, 1)) if rank.number == 0 else torch.ones(4, 4)
        k_here = sender.dispatch_qkv(torch.zeros(route.rows, 8), k, None, route)[1]

        assert wide[:1].is_contiguous()
        assert k_here.stride() == (4, 1)
        assert torch.equal(k_here[0], torch.arange(4.0))

    on_ranks(2, work)


# --- dtypes and sizes -------------------------------------------------------------------------------------------------

MOVED = (torch.uint8, torch.int64, torch.float64, torch.bool, torch.float8_e4m3fn, torch.complex64)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_moved_dtypes(dtype: torch.dtype) -> None:
    """Rows of any dtype go there, and where no shard has copies they come back, in both ways of putting."""
    case = one_case(3, stays=0.2, most_shards=1)
    widths = tuple(8 * part * dtype.itemsize for part in (4, 2, 1))
    assert case.copies == 1

    def work(rank: Rank) -> None:
        route = rank.route(case)
        bits = [torch.randint(0, 2 if dtype == torch.bool else 256, (route.rows, w)).to(torch.uint8) for w in widths]
        mine = [one.view(dtype) for one in bits]
        there, back = [], []
        for put in PUTS:
            sender = rank.sender([case], put, widths)
            there.append(sender.dispatch_qkv(*mine, route))
            back.append(sender.collect_qkv(*there[-1], route))
        stays = torch.tensor([bool((one.view(torch.uint8) == 0).all()) for one in back[0][0]])

        assert all(one.dtype == dtype for one in (*there[0], *back[0]))
        assert all(same(*pair) for many in (there, back) for pair in zip(*many, strict=True))
        assert same(back[0][0][~stays], mine[0][~stays])

    on_ranks(3, work)


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_what_is_summed() -> None:
    """Copies are summed in float32, float16 or bfloat16, in the same for all tensors; other dtypes go there alone."""
    case = one_case(2, most_shards=6, spans=1.0, mask=Mask.FULL, stays=0.0)
    assert case.copies > 1

    def work(rank: Rank) -> None:
        sender, route = rank.sender([case], "packed", (64, 32, 32)), rank.route(case)
        q, k, v = (torch.ones(route.rows, width) for width in (8, 4, 4))
        for wrong in ((k.double(), v.double()), (k.half(), v), (k.long(), v.long())):
            there = sender.dispatch_qkv(q, *wrong, route)
            with pytest.raises(TensorError, match="are summed in one of float32, float16, bfloat16"):
                sender.collect_qkv(*there, route)
        with pytest.raises(TensorError, match="summed"):
            sum(one.sum() for one in sender.dispatch_qkv(q, k.double().requires_grad_(), v.double(), route)).backward()
        sender.collect_qkv(*sender.dispatch_qkv(q.long(), k.bfloat16(), v.bfloat16(), route), route)

    on_ranks(2, work)


@pytest.mark.parametrize("put", PUTS)
def test_nothing(put: str) -> None:
    """Ranks without rows, ranks that receive none, and no rows at all."""
    texts = (
        "plan p for 3 ranks { causal rank 1 { doc 5 -> 2 } }",
        "plan p for 3 ranks { full rank 0 { doc 0 -> 1 } rank 2 { doc 3 as 5 shards -> none } }",
        "plan p for 3 ranks { causal }",
    )
    found = [Case(compiler.check(files(text)).plan) for text in texts]

    def work(rank: Rank) -> list[Any]:
        sender = rank.sender(found, put)
        shapes: list[Any] = []
        for case in found:
            route = rank.route(case)
            leaves = [one.requires_grad_() for one in rank.tensors((route.rows,))]
            there = sender.dispatch_qkv(*leaves, route)
            gradients = torch.autograd.grad(there, leaves, [torch.ones_like(one) for one in there])
            shapes.append((len(there[0]), len(there[1]), [one.sum().item() for one in gradients]))
            assert torch.equal(sender.collect(there[0], route), leaves[0] if case is found[0] else 0 * leaves[0])
        return shapes

    nothing = (0, 0, [0.0, 0.0, 0.0])
    assert on_ranks(3, work) == [
        [nothing, nothing, nothing],
        [(0, 0, [40.0, 20.0, 10.0]), nothing, nothing],
        [(5, 5, [0.0, 0.0, 0.0]), nothing, nothing],
    ]


def files(text: str) -> Any:
    return compiler.read_text(text, "test.comm", ROOT)


# --- rows that go to several ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("put", PUTS)
def test_copies_of_rows(put: str) -> None:
    """Rows of a plan without keys may go to several ranks, or twice to one; their sum comes back, in float32."""
    case = Case(checked("copies"))

    def work(rank: Rank) -> None:
        route = rank.route(case)
        most = dispatch.Limits.of([route], (12,))
        x = (torch.arange(3.0 * route.rows) % 13).view(-1, 3).requires_grad_()
        sender = dispatch.Dispatcher(most, group=rank.group, put=put, source="rows", results=4)
        there = sender.dispatch(x, route)
        copies = copies_of(case, rank.number)[:, None]

        assert most == dispatch.Limits(rows=1064, queries=1794, keys=0, copies=4, widths=(12,))
        assert set(copies.unique().tolist()) == ({0, 1, 2, 4} if rank.number == 2 else {0, 1, 4})
        assert torch.equal(sender.collect(there, route), x * copies)
        (gradient,) = torch.autograd.grad(there, x, torch.ones_like(there))
        assert torch.equal(gradient, copies.expand(-1, 3))
        with pytest.raises(TensorError, match="are summed"):
            sender.collect(sender.dispatch(torch.ones(route.rows, 1, dtype=torch.int64), route), route)

    on_ranks(4, work)


def copies_of(case: Case, rank: int) -> Any:
    """How often each row of a rank is sent."""
    shards = case.plan.shards
    mine = shards.rank == rank
    times = torch.from_numpy((case.plan.dest[mine] >= 0).sum(axis=1))
    return times.repeat_interleave(torch.from_numpy(shards.length[mine])).float()


def test_least_limits() -> None:
    """`Limits.of` says what the Routes need, and a call under them works."""
    found = [one_case(2, seed, most_shards=6) for seed in range(3)]

    def work(rank: Rank) -> None:
        routes = [rank.route(case) for case in found]
        most = dispatch.Limits.of(routes, WIDTHS)
        sender = dispatch.Dispatcher(most, group=rank.group)
        wanted = limits(found, WIDTHS)

        assert (most.rows, most.queries, most.keys, most.widths) == (wanted.rows, wanted.queries, wanted.keys, WIDTHS)
        assert 1 <= most.copies <= wanted.copies
        for route in routes:
            there = sender.dispatch_qkv(*rank.tensors((route.rows,)), route)
            assert len(sender.collect_qkv(*there, route)[2]) == route.rows

    on_ranks(2, work)


def test_load_plan(tmp_path: Path) -> None:
    """A plan of a file, or a shipped one by its name, as Metadata; one with a fault is a CommError."""
    found = dispatch.load_plan("spanning")
    (tmp_path / "two.comm").write_text("plan a for 2 ranks { rank 0 { doc 3 -> 1 } } plan b for 3 ranks { causal }")
    (tmp_path / "lost.comm").write_text("plan lost for 2 ranks { rank 0 { doc 5 -> 2   doc 5 -> 3 } }")

    assert torch.equal(found.fwd_k.dst_offset, dispatch.from_plan(checked("spanning")).fwd_k.dst_offset)
    assert dispatch.load_plan(tmp_path / "two.comm", "b").fwd_k.world_size == 3
    assert dispatch.load_plan(tmp_path / "two.comm", "a").fwd_k is None
    with pytest.raises(commdsl.CommError, match="C191"):
        dispatch.load_plan(tmp_path / "two.comm")
    with pytest.raises(commdsl.CommError) as caught:
        dispatch.load_plan(tmp_path / "lost.comm")
    assert [one.code for one in caught.value.diagnostics] == ["C603", "C603"]
    with pytest.raises(FileNotFoundError, match="no shipped schedule of that name"):
        dispatch.load_plan("nowhere")


def checked(name: str) -> Any:
    return compiler.check(ROOT / f"schedules/dispatch/{name}.comm").plan


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": 3}, "rows, and the Limits are for 3"),
        ({"queries": 3}, "queries, and the Limits are for 3"),
        ({"keys": 3}, "keys, and the Limits are for 3"),
        ({"copies": 1}, "copies, and the Limits are for 1"),
        ({"widths": (32, 16, 6)}, "a row of `v` takes 8 bytes, and the Limits are for 6"),
        ({"widths": (32, 16)}, "3 tensors, and the Limits have the widths of 2"),
        ({"widths": (32, 16, 8, 8)}, "the widths of 1 to 3 tensors"),
        ({"widths": ()}, "the widths of 1 to 3 tensors"),
        ({"widths": (32, 16, 7)}, "even number of bytes, 2 or more, not 7"),
        ({"widths": (32, 16, 0)}, "even number of bytes, 2 or more, not 0"),
        ({"rows": -1}, "expected 0 <= rows"),
        ({"keys": 2**32}, "expected 0 <= keys"),
        ({"copies": 0}, "at least 1 copy"),
    ],
    ids=str,
)
@pytest.mark.parametrize("put", PUTS)
def test_limits(put: str, changed: dict[str, Any], message: str) -> None:
    """What does not fit is refused on all ranks alike, before anything is sent: the next call works."""
    case = one_case(2, most_shards=6, spans=1.0, mask=Mask.FULL, stays=0.0)
    most = replace(limits([case], WIDTHS), **changed)

    def work(rank: Rank) -> None:
        route = rank.route(case)
        tensors = rank.tensors((route.rows,))
        with pytest.raises(DispatchError, match=message):
            dispatch.Dispatcher(most, group=rank.group, put=put).dispatch_qkv(*tensors, route)
        with pytest.raises(DispatchError, match=message):
            dispatch.Dispatcher(most, group=rank.group, put=put).prepare(route, *tensors)
        assert len(rank.sender([case], put).dispatch_qkv(*tensors, route)[0]) == route.queries

    on_ranks(2, work)


def test_tensors() -> None:
    """A tensor that a call cannot take is refused, and the message says why."""
    case = one_case(1)

    def work(rank: Rank) -> None:
        sender, route = rank.sender([case], "packed"), rank.route(case)
        q, k, v = rank.tensors((route.rows,))
        sender.collect_qkv(*sender.dispatch_qkv(q, k, v, route), route)
        sender.dispatch(q, route)  # what went well before goes well again, and nothing else
        refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (TensorError, "sparse", lambda: sender.dispatch(q.to_sparse(), route)),
            (TensorError, "nested", lambda: sender.dispatch(torch.nested.nested_tensor([q]), route)),
            (TensorError, "not contiguous", lambda: sender.dispatch(q.transpose(1, 2), route)),
            (TensorError, "not contiguous", lambda: sender.dispatch_qkv(q, k[:, :2], v, route)),
            (TensorError, f"expected {route.rows} rows", lambda: sender.dispatch(q[1:], route)),
            (TensorError, "rows", lambda: sender.dispatch(torch.zeros((), dtype=torch.int64), route)),
            (TensorError, f"expected {route.keys} rows", lambda: sender.collect_qkv(q, k, v[:0], route)),
            (TensorError, "rows", lambda: sender.dispatch(torch.zeros(1000, 2, 4), route, padded=True)),
            (TensorError, "on meta", lambda: sender.dispatch(q.to("meta"), route)),
            (DispatchError, "even number", lambda: sender.dispatch(torch.zeros(route.rows, dtype=torch.int8), route)),
            (DispatchError, "even number", lambda: sender.dispatch(torch.zeros(route.rows, 0), route)),
            (DispatchError, "`q` takes 64 bytes", lambda: sender.dispatch(q.double(), route)),
        ]
        for error, message, call in refused:
            with pytest.raises(error, match=message):
                call()
        assert len(sender.dispatch_qkv(q, k, None, route)) == 2

    on_ranks(1, work)


def test_routes() -> None:
    """A Route of another rank, of another number of ranks, without keys, or with copies of queries, is refused."""
    here, alone, rows = one_case(2), one_case(1), one_case(2, mask=None)
    several = Case(compiler.check(files("plan p for 2 ranks { rank 0 { doc 3 -> [0 1] } }")).plan)

    def work(rank: Rank) -> None:
        sender = rank.sender([here, rows, alone], "packed")
        only_rows = dispatch.Dispatcher(sender.limits, group=rank.group, put="packed", source="qkv")
        other = Rank(1 - rank.number, "").route(here)
        q, k, v = rank.tensors((rank.route(rows).rows,))
        with pytest.raises(DispatchError, match=r"rank [01]'s of 2; this is rank [01] of 2"):
            sender.dispatch(torch.zeros(other.rows, 2, 4), other)
        with pytest.raises(DispatchError, match="rank 0's of 1"):
            sender.dispatch(torch.zeros(40, 2, 4), Rank(0, "").route(alone))
        with pytest.raises(DispatchError, match="no keys and values"):
            sender.dispatch_qkv(q, k, v, rank.route(rows))
        with pytest.raises(DispatchError, match="`qkv` sends a shard of it to one rank"):
            sender.dispatch(torch.zeros(rank.route(several).rows, 2, 4), rank.route(several))
        with pytest.raises(DispatchError, match=r"expected a rank 0 ..< 2, got 2"):
            Rank(2, "").route(here)
        assert len(sender.dispatch(q, rank.route(rows))) == len(only_rows.dispatch(q, rank.route(rows)))

    on_ranks(2, work)


def test_makers(tmp_path: Path) -> None:
    """A Dispatcher that cannot be made is refused: no such way to put, no such dispatch, ranks that differ."""
    case = one_case(2)
    alike = tmp_path / "alike.comm"
    alike.write_text(
        "dispatch two for P ranks { rows a[T] rows b[T] route home[S] for a, b place by (source rank, shard) }"
    )

    def work(rank: Rank) -> None:
        with pytest.raises(DispatchError, match=r"`two` is none that these calls run: the first tensor is placed by"):
            rank.sender([case], source=alike, widths=(8, 8))
        with pytest.raises(commdsl.CommError, match=r"C505.*`rows` or `packed`"):
            rank.sender([case], "direct")
        with pytest.raises(commdsl.CommError, match=r"C191.*one dispatch"):
            rank.sender([case], source="balanced_16k")
        with pytest.raises(commdsl.CommError, match="C191"):
            rank.sender([case], source="qkv", name="qkv_other")
        with pytest.raises(AgreementError, match=r"set up another `qkv`: put packed: (True|False) on rank"):
            rank.sender([case], PUTS[rank.number])
        with pytest.raises(AgreementError, match=r"set up another `qkv`: results: [12] on rank"):
            rank.sender([case], results=1 + rank.number)

    on_ranks(2, work)


@pytest.mark.parametrize("put", PUTS)
def test_no_way_back(put: str, tmp_path: Path) -> None:
    """What a dispatch does not say to come back does not: neither by a call nor as a gradient."""
    case = one_case(2)
    one_way = tmp_path / "one_way.comm"
    text = (ROOT / "schedules/dispatch/qkv.comm").read_text(encoding="utf-8")
    one_way.write_text(text.replace("back q, k, v by sum", "back q by sum"))

    def work(rank: Rank) -> None:
        sender, route = rank.sender([case], put, source=one_way), rank.route(case)
        q, k, v = (one.requires_grad_() for one in rank.tensors((route.rows,)))
        q_there, k_there, v_there = sender.dispatch_qkv(q, k, v, route)
        with pytest.raises(DispatchError, match=r"`qkv` has no way back for `k`: write `back k by sum`"):
            sender.collect_qkv(q_there, k_there, v_there, route)
        with pytest.raises(DispatchError, match="no way back for `k`"):
            k_there.sum().backward()
        assert torch.equal(sender.collect(q_there, route), q)

    on_ranks(2, work)


def test_after_release() -> None:
    """A Dispatcher that was released, or is gone, refuses calls and gradients of earlier ones; others go on."""
    case = one_case(2)

    def work(rank: Rank) -> None:
        first, second, route = rank.sender([case]), rank.sender([case], "packed"), rank.route(case)
        q, k, v = (one.requires_grad_() for one in rank.tensors((route.rows,)))
        loss = second.dispatch(q, route).sum() + sum(one.sum() for one in first.dispatch_qkv(q, k, v, route))
        first.release()
        with pytest.raises(DispatchError, match="`qkv` was released"):
            first.dispatch(q, route)
        with pytest.raises(DispatchError, match="no Dispatcher `qkv"):
            loss.backward()
        assert len(second.dispatch(q, route)) == route.queries

    on_ranks(2, work)


def test_results_outlive_release() -> None:
    """What is held when a Dispatcher is released stays as it is, longer than the group too."""
    case = one_case(2)

    def work(rank: Rank) -> tuple[Any, Any]:
        sender, route = rank.sender([case], results=3), rank.route(case)
        tensors = rank.tensors((route.rows,))
        there = sender.dispatch_qkv(*tensors, route)
        back = sender.collect_qkv(*there, route)
        wanted = [one.clone() for one in (*there, *back)]
        sender.release()
        rank.sender([case]).dispatch_qkv(*tensors, route)
        return (*there, *back), wanted

    for results, wanted in on_ranks(2, work):
        assert all(torch.equal(*pair) for pair in zip(results, wanted, strict=True))


def test_memory_of_results_goes_with_them() -> None:
    """A heap that was given back is freed when none of its results is held, and others when something else happens."""
    memory, freed, waits = torch.zeros(64), [], []
    pool = Pool("a", memory.data_ptr(), (256, 0), 1)
    lent, heap = Lent(lambda: waits.append(True)), SimpleNamespace(free=lambda: freed.append(True))
    result = pool.empty((2,), (torch.zeros(2, 2),), goes=True, keep=False)

    lent.give_back(heap, [pool])
    assert not freed
    del result
    lent.sweep()
    lent.sweep()
    assert (freed, waits) == ([True], [True])


# --- plans that change ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("put", PUTS)
def test_update(put: str) -> None:
    """A Route follows another plan in the same memory; one that does not fit is refused, and changes nothing."""
    first, second = one_case(2, 1), one_case(2, 2, sharing=Sharing.RANK)
    large = Case(random_plan(Draw(2, 400, is_full=True), 3))
    alone = one_case(1)

    def work(rank: Rank) -> None:
        sender, route = rank.sender([first, second], put, results=4), rank.route(first)
        tensors = rank.tensors((route.rows,))
        before = sender.dispatch_qkv(*tensors, route)
        tables = tables_of(route)
        with pytest.raises(DispatchError, match="the Limits are for"):
            route.update_(rank.route(large))
        with pytest.raises(DispatchError, match="no keys"):
            route.update_(rank.route(one_case(2, 1, mask=None)))
        with pytest.raises(DispatchError, match="the other rank"):
            route.update_(Rank(1 - rank.number, "").route(second))
        with pytest.raises(DispatchError, match="of 1"):
            route.update_(Rank(0, "").route(alone))
        assert all(map(torch.equal, sender.dispatch_qkv(*tensors, route), before))
        other = rank.route(second)
        route.update_(other)
        tensors = rank.tensors((route.rows,))
        padded = [torch.cat([one, one.new_full((sender.limits.rows - len(one), *one.shape[1:]), 9)]) for one in tensors]
        got, want = sender.dispatch_qkv(*padded, route, padded=True), sender.dispatch_qkv(*tensors, other)
        assert (route.rows, route.queries, route.keys) == (other.rows, other.queries, other.keys)
        assert [len(one) for one in got] == [sender.limits.queries, sender.limits.keys, sender.limits.keys]
        assert all(torch.equal(one[: len(two)], two) for one, two in zip(got, want, strict=True))
        assert all(one is two for one, two in zip(tables_of(route), tables, strict=True))

    on_ranks(2, work)


def tables_of(route: Any) -> list[Any]:
    return [table for pair in route.ready.values() for table in pair]


def test_update_to_more_shards() -> None:
    """A plan of more shards than a table has room for is refused on both ranks, also where one has few."""
    first = Case(compiler.check(files("plan p for 2 ranks { full rank 0 { doc 900 -> 1 } }")).plan)
    many = "plan p for 2 ranks { full rank 0 { repeat 900 { doc 2 as 2 shards -> 1 none } } }"
    second = Case(compiler.check(files(many)).plan)

    def work(rank: Rank) -> None:
        sender, route = rank.sender([first, second], results=3), rank.route(first)
        x = torch.ones(route.rows, 2)
        before = sender.dispatch(x, route)
        with pytest.raises(DispatchError, match="has room for 4096 words, the other plan takes up to"):
            route.update_(rank.route(second))
        assert torch.equal(sender.dispatch(x, route), before)

    on_ranks(2, work)


def test_update_of_a_compiled_call() -> None:
    """What was compiled with padded results follows the Route's plans without being compiled again."""
    found = [one_case(2, seed) for seed in range(4)]

    def work(rank: Rank) -> int:
        sender, route = rank.sender(found, "packed"), rank.route(found[0])
        counter = CompileCounterWithBackend("aot_eager")

        def call(x: Any) -> Any:
            return sender.collect(sender.dispatch(x, route, padded=True), route, padded=True)

        compiled = torch.compile(call, fullgraph=True, backend=counter)
        x = torch.randint(-9, 9, (sender.limits.rows, 4)).float()
        sender.prepare(route, x)
        for case in found:
            route.update_(rank.route(case))
            assert torch.equal(compiled(x)[: route.rows], call(x)[: route.rows])
        return counter.frame_count

    torch.compiler.reset()
    assert all(count <= 2 for count in on_ranks(2, work))


def test_a_gradient_of_a_plan_that_changed() -> None:
    """Between a call and its backward the tables must not change: torch says so instead of using the wrong ones."""
    first, second = one_case(2, 1), one_case(2, 2)

    def work(rank: Rank) -> None:
        sender, route = rank.sender([first, second], "packed"), rank.route(first)
        out = sender.dispatch(torch.ones(route.rows, 2, requires_grad=True), route)
        route.update_(rank.route(second))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    on_ranks(2, work)


def test_room_of_tables() -> None:
    """The room of a table is the same on all ranks, and no rank's table takes more."""
    for case in cases(varied(4, 200, 24), seed=77):
        routes = [Rank(rank, "").route(case) for rank in range(4)]
        for way in Way:
            if way.has_keys and case.plan.mask is None:
                continue
            for packed in (False, True):
                form = dispatch.route.Form(way, (6, 10, 2), packed, 64)
                tables = [route._make(form) for route in routes]
                (most,) = {one.most_words for one in tables}
                assert max(len(one.words) for one in tables) <= most


def test_row_bytes() -> None:
    """Bytes of a row, for any number of dimensions and of rows."""
    assert [row_bytes(torch.empty(shape)) for shape in ((5,), (0, 3), (4, 2, 3))] == [4, 12, 24]
