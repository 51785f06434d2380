"""What users get wrong in Python: each is one line that says what to do, and no rank waits for another to hear it.

Assumes that rank 1 of a group never comes: a mistake that is only seen together would be a time-out here. Does not test
the command line.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - as above
from commdsl import dispatch, ep  # noqa: E402 - as above
from commdsl.build import host  # noqa: E402 - as above
from commdsl.machine import resources  # noqa: E402 - as above
from commdsl.machine.config import from_environment  # noqa: E402 - as above
from commdsl.runtime import menu  # noqa: E402 - as above

Mistake: TypeAlias = Callable[[], Any]
ReduceOp = torch.distributed.ReduceOp


@pytest.fixture(scope="module")
def group() -> str:
    return commdsl.threads(2)[0]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMDSL_TIMEOUT", "5")


def says(mistake: Mistake, kind: type[commdsl.Error], *words: str) -> None:
    """An error of that class, of one line, that has a code, the words, and no word of a bug."""
    with pytest.raises(kind) as caught:
        mistake()
    said = str(caught.value)
    assert "\n" not in said
    assert re.search(r"error\[C\d{3}\]: ", said)
    assert "bug" not in said
    assert [word for word in words if word not in said] == []


# --- tensors ----------------------------------------------------------------------------------------------------------

NO_TENSORS = [
    ([1.0, 2.0], "torch.tensor(x)"),
    (1.0, "torch.tensor(x)"),
    (None, "got `None`"),
    (np.ones(3), "torch.from_numpy(x)"),
    ([torch.ones(2), torch.ones(2)], "torch.stack(x)"),
    (torch.nn.Linear(2, 2), "Linear"),
    (torch.ones(4).to_sparse(), "x.to_dense()"),
]


@pytest.mark.parametrize(("value", "words"), NO_TENSORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("async_op", [False, True])
def test_no_tensor(group: str, value: Any, words: str, async_op: bool) -> None:
    """What is no dense tensor is refused with what to pass instead, by collectives and by loaded ops."""
    op = commdsl.load("allreduce_ring", ranks=2)
    for call in (op, commdsl.all_reduce, commdsl.all_gather, commdsl.reduce_scatter, commdsl.all_to_all):
        says(lambda call=call: call(value, group=group, async_op=async_op), commdsl.TensorError, words)
    says(lambda: op.in_place(value, group=group), commdsl.TensorError, words)
    says(lambda: commdsl.all_reduce_(value, group=group, async_op=async_op), commdsl.TensorError, words)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_wrong_tensors(group: str) -> None:
    """Tensors that no rank could pass are refused before any is waited for."""
    op, scatter = commdsl.load("allreduce_ring", ranks=2), commdsl.load("reducescatter_direct", ranks=2)
    x = torch.ones(4, 4)
    nested = torch.nested.nested_tensor([x, x])
    for async_op in (False, True):
        says(lambda a=async_op: op(group=group, async_op=a), commdsl.TensorError, "takes 1 tensor, got 0")
        says(lambda a=async_op: op(x, x, group=group, async_op=a), commdsl.TensorError, "takes 1 tensor, got 2")
        says(lambda a=async_op: op(x[:, 1], group=group, async_op=a), commdsl.TensorError, "x.contiguous()")
        says(lambda a=async_op: scatter(torch.ones(7), group=group, async_op=a), commdsl.TensorError, "2 equal blocks")
        says(lambda a=async_op: op(x.to(torch.complex64), group=group, async_op=a), commdsl.TensorError, "complex64")
    says(lambda: commdsl.all_reduce(nested, group=group), commdsl.TensorError, "nested")
    says(lambda: commdsl.all_reduce_(x.t(), group=group), commdsl.TensorError, "x.contiguous()")


def test_meta_tensors(group: str) -> None:
    """A tensor without memory gives one of the result's shape, as in torch; a Work has nothing to wait for."""
    x = torch.ones(4, device="meta")
    assert commdsl.load("allgather_recursive_doubling", ranks=2)(x, group=group).shape == (8,)
    says(lambda: commdsl.all_reduce(x, group=group, async_op=True), commdsl.TensorError, "not on meta")


# --- reductions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "expected"),
    [(ReduceOp.SUM, 3), ("SUM", 3), (ReduceOp(ReduceOp.MAX), 2), (ReduceOp.PRODUCT, 2), ("product", 2), ("Min", 1)],
    ids=("SUM of torch", "SUM", "MAX of torch, wrapped", "PRODUCT of torch", "product", "Min"),
)
def test_names_of_torch(op: Any, expected: int) -> None:
    """A reduction may be named as torch.distributed does, by calls of every kind."""
    loaded = commdsl.load("allreduce_oneshot", ranks=2)

    def run(rank: int, group: str) -> list[list[float]]:
        x = torch.full((3,), rank + 1.0)
        mine = [commdsl.all_reduce(x, op, group=group), loaded(x, group=group, op=op)]
        mine.append(commdsl.all_reduce(x, op, group=group, async_op=True).wait())
        mine.append(commdsl.all_reduce(x.clone().requires_grad_(), op, group=group).detach())
        mine.append(commdsl.all_reduce_(x, op, group=group))
        return [one.tolist() for one in mine]

    assert in_group(2, run) == [[[float(expected)] * 3] * 5] * 2


WRONG_REDUCTIONS = [
    ("mean", "did you mean `avg`?"),
    ("add", "did you mean `sum`?"),
    ("summ", "did you mean `sum`?"),
    ("xyz", "there are sum, max, min, prod, avg"),
    (ReduceOp.BAND, "ReduceOp.BAND"),
    (ReduceOp.PREMUL_SUM, "multiply the tensor"),
    (None, "not `None`"),
    (3, "not `int`"),
    (["sum"], "not `list`"),
    (torch.sum, "torch.distributed.ReduceOp"),
]


@pytest.mark.parametrize(("op", "words"), WRONG_REDUCTIONS, ids=lambda op: str(op)[:12])
def test_no_reduction(group: str, op: Any, words: str) -> None:
    """What is no reduction is refused in words, at once."""
    loaded = commdsl.load("allreduce_ring", ranks=2)
    x = torch.ones(4)
    for async_op in (False, True):
        says(lambda a=async_op: commdsl.all_reduce(x, op, group, async_op=a), commdsl.ReductionError, words)
        says(lambda a=async_op: loaded(x, group=group, op=op, async_op=a), commdsl.ReductionError, words)
    says(lambda: commdsl.all_reduce(x.requires_grad_(), op, group), commdsl.ReductionError, words)


def test_reduction_of_nothing(group: str) -> None:
    """An op that reduces nothing takes `sum`, by any of its names, and no other; integers have no mean."""
    says(
        lambda: commdsl.load("allgather_ring", ranks=2)(torch.ones(4), group=group, op=ReduceOp.MAX),
        commdsl.ReductionError,
        "reduces nothing",
    )
    says(lambda: commdsl.all_reduce(torch.ones(4).int(), ReduceOp.AVG, group), commdsl.ReductionError, "has no `avg`")


# --- groups and roots -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [0, [0, 1], ("a", "b"), torch.ones(2), torch, 2.5, b"x"], ids=lambda v: type(v).__name__
)
def test_no_group(value: Any) -> None:
    """What is no group is refused by its type; a name that leads nowhere, and none at all, say so."""
    x = torch.ones(4)
    op = commdsl.load("allreduce_ring", ranks=2)
    says(lambda: commdsl.all_reduce(x, group=value), commdsl.GroupError, "expected a process group")
    says(lambda: op(x, group=value), commdsl.GroupError, "expected a process group")
    says(lambda: commdsl.load("allreduce_ring", group=value), commdsl.GroupError, "expected a process group")


def test_unknown_group() -> None:
    """A name that leads nowhere, and no group at all, say so; `load` does not guess."""
    x = torch.ones(4)
    for mistake in (
        lambda: commdsl.all_reduce(x, group="nobody"),
        lambda: commdsl.load("allreduce_ring", group="nobody"),
        lambda: commdsl.load("allreduce_ring", ranks=2)(x, group="nobody"),
    ):
        says(mistake, commdsl.GroupError, "no process group named `nobody`")
    says(lambda: commdsl.all_reduce(x), commdsl.GroupError, "init_process_group")


@pytest.mark.parametrize("root", [2, -1, "0", 1.5, None])
def test_root_outside(group: str, root: Any) -> None:
    """A root is a rank of the group."""
    says(
        lambda: commdsl.broadcast(torch.ones(4), root=root, group=group),
        commdsl.GroupError,
        f"a rank of the group, 0 to 1, not {root!r}",
    )


# --- load and its kin -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("allreduce_rign", "did you mean `allreduce_ring`"),
        ("all_reduce_ring.comm", "did you mean `allreduce_ring`"),
        ("schedules/collectives/allreduce_rign.comm", "schedules/collectives/allreduce_ring.comm"),
        ("schedules", "is a folder"),
        ("/nowhere/at_all.comm", "is no file"),
    ],
)
def test_no_such_schedule(path: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is nearly one is answered with the near ones; it is a FileNotFoundError, too."""
    monkeypatch.chdir(commdsl.__path__[0] + "/..")
    says(lambda: commdsl.load(path), commdsl.NotFoundError, words)
    with pytest.raises(FileNotFoundError):
        commdsl.load(path)


def test_other_declarations() -> None:
    """A plan and a dispatch say who loads them; a schedule of another name, which there is."""
    says(lambda: commdsl.load("balanced_16k"), commdsl.CommError, "`commdsl.dispatch.load_plan` loads it")
    says(lambda: commdsl.load("qkv"), commdsl.CommError, "`commdsl.dispatch.Dispatcher`")
    says(lambda: commdsl.load("allreduce_ring", schedule="ring"), commdsl.CommError, "this file has `allreduce_ring`")
    says(lambda: commdsl.load("allreduce_ring", on="h200_8x2"), commdsl.CommError, "did you mean `h200")


WRONG_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"path": None}, "the path of a .comm file"),
    ({"path": ""}, "the path of a .comm file"),
    ({"path": 3}, "the path of a .comm file"),
    ({"ranks": 0}, "`ranks` is a whole number from 1 on, not 0"),
    ({"ranks": "2"}, "not '2'"),
    ({"ranks": 2.0}, "not 2.0"),
    ({"ranks": True}, "not True"),
    ({"params": {"K": 1.5}}, "the parameter `K` is a whole number, not 1.5"),
    ({"params": {"K": "1"}}, "not '1'"),
    ({"params": [("K", 1)]}, "as in {'K': 1}"),
    ({"params": {1: 1}}, "`params` is a mapping from names"),
    ({"tune": "lanes=4"}, "as in {'lanes': 16"),
    ({"tune": {"lanes": 4.0}}, "`lanes` is a whole number or a name, not 4.0"),
    ({"on": 8}, "`on` is a name, not 8"),
    ({"schedule": 8}, "`schedule` is a name, not 8"),
]


@pytest.mark.parametrize(("given", "words"), WRONG_ARGUMENTS, ids=lambda value: str(value)[:24])
def test_arguments_of_load(given: dict[str, Any], words: str) -> None:
    """What `load` does not take is refused by the argument's name."""
    says(lambda: commdsl.load(**{"path": "permutation_shift", "ranks": 2, **given}), commdsl.ArgumentError, words)


def test_near_names() -> None:
    """Parameters and keys of tunings that are nearly right are answered with the right ones; numpy's numbers serve."""
    says(lambda: commdsl.load("permutation_shift", params={"k": 1}, ranks=2), commdsl.CommError, "there is `K`")
    says(lambda: commdsl.load("allreduce_ring", tune={"lane": 1}, ranks=2), commdsl.CommError, "did you mean `lanes`")
    says(lambda: commdsl.load("allreduce_ring", tune={"protocol": "LL"}, ranks=2), commdsl.CommError, "there is `bulk`")
    one = commdsl.load("permutation_shift", params={"K": np.int64(1)}, ranks=2)
    assert one is commdsl.load("permutation_shift", params={"K": 1}, ranks=2)


def test_arguments_of_the_others(group: str) -> None:
    """So are those of `choice`, `prepare` and `threads`."""
    wrong: list[tuple[Mistake, str]] = [
        (lambda: commdsl.choice("allreduce", 4, 2), "expected one of all_reduce"),
        (lambda: commdsl.choice("all_reduce", "1KB", 2), "`nbytes` is a whole number from 0 on, not '1KB'"),
        (lambda: commdsl.choice("all_reduce", 4, 0), "`ranks` is a whole number from 1 on, not 0"),
        (lambda: commdsl.prepare(["allreduce"], group=group), "expected one of all_reduce"),
        (lambda: commdsl.prepare("allreduce", group=group), "got `allreduce`"),
        (lambda: commdsl.prepare("all_reduce", "1KB", group=group), "not '1KB'"),
        (lambda: commdsl.prepare("all_reduce", 64, dtypes=["bf16"], group=group), "as in torch.bfloat16"),
        (lambda: commdsl.threads(0), "not 0"),
        (lambda: commdsl.threads("2"), "not '2'"),
    ]
    for mistake, words in wrong:
        says(mistake, commdsl.ArgumentError, words)


UNEXPECTED: list[tuple[Callable[[Any], Any], str, list[str]]] = [
    (
        lambda op: commdsl.load("broadcast_tree", root=1),
        "`load` takes no argument `root`",
        ["write params={'root': 1}"],
    ),
    (lambda op: commdsl.load("allreduce_ring", lanes=2), "no argument `lanes`", ["write tune={'lanes': 2}"]),
    (
        lambda op: commdsl.load("allreduce_ring", rank=2),
        "no argument `rank`",
        ["write `ranks`", "path, schedule, params"],
    ),
    (lambda op: op(x=torch.ones(2)), "by position: write allreduce_ring(x, ...) without `x=`", []),
    (lambda op: op.in_place(x=torch.ones(2)), "write allreduce_ring.in_place(x, ...)", []),
    (lambda op: op(torch.ones(2), groups="0"), "no argument `groups`", ["write `group`"]),
    (lambda op: op(torch.ones(2), root=1), "no argument `root`", ["group, op, async_op, timeout, lengths"]),
    (lambda op: op.profiled(torch.ones(2), async_op=True), "no argument `async_op`", ["group, op, timeout, lengths"]),
    (lambda op: commdsl.broadcast(torch.ones(2), src=0), "`broadcast` takes no argument `src`", ["write `root`"]),
    (
        lambda op: commdsl.all_reduce(torch.ones(2), rank=0),
        "no argument `rank`",
        ["x, op, group, async_op, timeout, wire"],
    ),
    (lambda op: commdsl.all_reduce_(torch.ones(2), reduce_op="max"), "no argument `reduce_op`", ["write `op`"]),
    (lambda op: commdsl.all_gather(torch.ones(2), out=None), "no argument `out`", ["output_split_sizes"]),
    (lambda op: commdsl.reduce_scatter(torch.ones(2), out=None), "no argument `out`", ["input_split_sizes"]),
    (lambda op: commdsl.all_to_all(torch.ones(2), splits=1), "no argument `splits`", ["input_split_sizes"]),
]


@pytest.mark.parametrize(("mistake", "words", "more"), UNEXPECTED)
def test_unexpected_keywords(mistake: Callable[[Any], Any], words: str, more: list[str]) -> None:
    """A keyword that there is not is answered with the one that is meant, or with those that there are."""
    op = commdsl.load("allreduce_ring", ranks=2)
    says(lambda: mistake(op), commdsl.ArgumentError, words, *more)


# --- dispatches -------------------------------------------------------------------------------------------------------


def test_routes() -> None:
    """What a Route and Limits are made of is named; a plan that is nearly one, too."""
    metadata = dispatch.load_plan("balanced_16k")
    numbers = metadata[:4]
    route = dispatch.Route(*numbers, rank=0)
    wrong: list[tuple[Mistake, str]] = [
        (lambda: dispatch.Route(metadata, None, rank=0), "the four Metadata of a dispatch one by one"),
        (lambda: dispatch.Route(torch.ones(3), *numbers[1:], rank=0), "got `Tensor`"),
        (lambda: dispatch.Route(*numbers, rank="0"), "got '0'"),
        (lambda: dispatch.Route(*numbers, rank=4), "expected a rank 0 ..< 4, got 4"),
        (lambda: dispatch.Limits.of([], widths=(256,)), "one Route or more, as in [route], got []"),
        (lambda: dispatch.Limits.of(route, widths=(256,)), "as in [route]"),
        (lambda: dispatch.Limits.of([route], widths=256), "as in (256, 64, 64), got 256"),
        (lambda: dispatch.Limits.of([route], widths=(2.5,)), "got (2.5,)"),
    ]
    for mistake, words in wrong:
        says(mistake, commdsl.DispatchError, words)
    says(lambda: dispatch.load_plan("balanced16k"), commdsl.NotFoundError, "did you mean `balanced_16k`")
    says(lambda: dispatch.load_plan("allreduce_ring"), commdsl.CommError, "`commdsl.load` loads it")


# --- the environment --------------------------------------------------------------------------------------------------

SETTINGS = [
    ("COMMDSL_TIMEOUT", "abc"),
    ("COMMDSL_TIMEOUT", "-1"),
    ("COMMDSL_TIMEOUT", "nan"),
    ("COMMDSL_DEBUG", "yes"),
    ("COMMDSL_TRANSPORT", "nccl"),
    ("COMMDSL_NODES", "0,a"),
]


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_settings(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that says what it cannot say is refused by its name, when something is loaded or called."""
    monkeypatch.setenv(name, value)
    menu.menu.cache_clear()
    says(lambda: commdsl.load("allreduce_ring", ranks=2), commdsl.ConfigError, name, f"not `{value}`")
    says(lambda: commdsl.all_reduce(torch.ones(4), group=commdsl.threads(2)[0]), commdsl.ConfigError, name)


@pytest.mark.parametrize(("value", "words"), [("'unclosed", "a shell could not read it"), ("nosuch", "does not run")])
def test_compiler(value: str, words: str) -> None:
    """A CXX that is no command is a mistake, which no other compiler hides."""
    says(lambda: host.find_compiler(from_environment({"CXX": value})), commdsl.ConfigError, f"CXX is `{value}`", words)


def test_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is not there is refused by its path."""
    monkeypatch.setenv("COMMDSL_TABLES", "nosuch.json")
    menu.menu.cache_clear()
    says(lambda: commdsl.all_reduce(torch.ones(4), group=commdsl.threads(2)[0]), commdsl.TableError, "nosuch.json")
    menu.menu.cache_clear()


# --- modules that hold an op ------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """What users write."""

    def __init__(self) -> None:
        super().__init__()
        self.op = commdsl.load("allreduce_ring", ranks=2)
        self.inner = torch.nn.Linear(2, 2)


def test_copied() -> None:
    """A module that holds an op can be copied: weights are new, the op is the same one."""
    layer = Layer()
    again = copy.deepcopy(layer)
    assert again.op is layer.op is copy.copy(layer.op)
    assert again.inner.weight is not layer.inner.weight
    assert list(layer.state_dict()) == ["inner.weight", "inner.bias"]


def test_saved(tmp_path: Path) -> None:
    """A saved module is loaded again: a shipped op by its name, in this process the same object."""
    layer = Layer()
    torch.save(layer, tmp_path / "layer.pt")
    again = torch.load(tmp_path / "layer.pt", weights_only=False)

    assert again.op is layer.op
    assert torch.equal(again.inner.weight, layer.inner.weight)
    shift = commdsl.load("permutation_shift", params={"K": 1}, ranks=3, tune={"lanes": 2})
    assert pickle.loads(pickle.dumps(shift)) is shift


BOX = """topology pair {
  nodes 1   gpus 2 per node   sms 132
  link wire in node     100 GB/s per pair   1 us
}
"""

ELSEWHERE = """
import pickle, sys, threading, torch, commdsl
op = pickle.loads(sys.stdin.buffer.read())
names, found = commdsl.threads(2), {}
def rank(number):
    found[number] = op(torch.full((4,), number + 1.0), group=names[number]).tolist()
ranks = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
for one in ranks: one.start()
for one in ranks: one.join()
print(op.name, found[0], found[1])
"""


def test_saved_and_moved(tmp_path: Path) -> None:
    """An op of one's own file travels with its text, with what that uses and its machine, to where no file of it is."""
    shipped = resources.shipped_file("allreduce_oneshot")
    assert shipped is not None
    (tmp_path / "box.comm").write_text(BOX)
    (tmp_path / "own").mkdir()
    text = shipped.read_text().replace("_oneshot", "_mine")
    (tmp_path / "own" / "mine.comm").write_text(f'use "../box.comm"\n{text}')
    env = {**os.environ, "PYTHONPATH": str(Path(commdsl.__path__[0]).parent)}
    op = commdsl.load(tmp_path / "own" / "mine.comm", ranks=2, on=str(tmp_path / "box.comm"))
    data = pickle.dumps(op)
    assert str(tmp_path).encode() not in data
    hidden = tmp_path.rename(tmp_path.with_name("hidden"))
    command = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(command, input=data, capture_output=True, check=False, env=env)
    hidden.rename(tmp_path)
    assert done.stdout.decode().endswith(" [3.0, 3.0, 3.0, 3.0] [3.0, 3.0, 3.0, 3.0]\n"), done.stderr.decode()


def test_dispatchers_stay() -> None:
    """What has memory on a group is neither copied nor saved, and says so."""
    route = dispatch.Route(*dispatch.load_plan("balanced_16k")[:4], rank=0)
    (alone,) = commdsl.threads(1)
    sender = dispatch.Dispatcher(dispatch.Limits.of([route], widths=(256, 64, 64)), group=alone)
    experts = ep.Experts(ep.Limits(8, 2, 8, (64, 4), 64), group=alone)
    for one in (sender, experts):
        says(lambda one=one: copy.deepcopy(one), commdsl.DispatchError, "not copied or saved")
        says(lambda one=one: pickle.dumps(one), commdsl.DispatchError, "make")
