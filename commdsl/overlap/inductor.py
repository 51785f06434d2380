"""Turns graphs that Inductor compiles into ones whose products travel beside what they need: a pass that finds a
product next to a functional collective, and puts an operator of ours in place of both.

Assumes graphs after autograd, each of a forward or a backward alone, as Inductor has them. Does not touch collectives
along another dimension than the first, averages, nor sums that something else than one collective needs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, TypeAlias

import torch
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from commdsl.overlap import functional

Argument: TypeAlias = Any
"""As a graph has them: nodes, numbers, lists."""

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)

SUMS: dict[Any, str] = {
    c10d.reduce_scatter_tensor.default: "matmul_reduce_scatter",
    c10d.all_reduce.default: "matmul_all_reduce",
}
"""Collectives, and what they are with the product before them."""

LEFT = "left"


class MicroPipelineTP(CustomGraphPass):
    """A pass for `torch.compile(model, options={"post_grad_custom_pre_pass": MicroPipelineTP()})`, named after torch's
    own, `torch._inductor.config._micro_pipeline_tp`.

    `count`, over all graphs so far: by the name of an operator, how often it stands in place of a product and its
    collective; under `left`, how many products next to a collective stayed as they are. No graph is kept in Inductor's
    cache: of one that was found there nothing would be counted.
    """

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def __str__(self) -> str:
        return ", ".join(f"{number} {name}" for name, number in sorted(self.count.items())) or "nothing found"

    def __call__(self, graph: Graph) -> None:
        functional.library()
        for product in graph.find_nodes(op="call_function", target=aten.mm.default):
            found = [one for one in (_gathered(product), _summed(product)) if one is not None]
            chosen = next((one for one in found if one.is_alone), None)
            if chosen is not None:
                _replace(graph, chosen)
            if found:
                self.count[LEFT if chosen is None else chosen.operator] += 1
        graph.eliminate_dead_code()

    def uuid(self) -> None:
        """No graph is kept."""


@dataclass(frozen=True)
class _Found:
    """A product next to a collective: `gone`, from the last to the first. `end`: what an operator of ours gives in
    place of both; `is_alone`: it may. `there`: rows that were gathered, where others need them, too; it gives these as
    well.
    """

    operator: str
    rows: Node
    factor: Node
    group: str
    end: Node
    gone: tuple[Node, ...]
    is_alone: bool
    there: Node | None = None

    @property
    def place(self) -> Node:
        """Before what the operator is to stand: the first who needs something of it."""
        return self.end if self.there is None else min(self.there.users)


def _gathered(product: Node) -> _Found | None:
    """A product of rows that were gathered."""
    rows, factor = _nodes(product)
    path = [rows]
    while path[-1].target in VIEWS:
        path.append(_nodes(path[-1])[0])
    if path[-1].target is not c10d.wait_tensor.default:
        return None
    gather = _nodes(path[-1])[0]
    if gather.target is not c10d.all_gather_into_tensor.default:
        return None
    shard, _, group = gather.args
    assert isinstance(shard, Node)
    is_alone = len(gather.users) == 1 and _shape(shard)[-1] == _shape(rows)[-1] and len(_shape(shard)) > 1
    gone = (product, *path, gather)
    found = _Found("all_gather_matmul", shard, factor, str(group), product, gone, is_alone)
    if all(len(node.users) == 1 for node in path):
        return found
    found = replace(found, operator="all_gather_matmul_rows", there=path[-1])
    return replace(found, is_alone=is_alone and _unturned(factor)[0] < found.place)


def _summed(product: Node) -> _Found | None:
    """A product that is summed over the ranks, each of which has some rows, or all."""
    path = [product]
    while len(path[-1].users) == 1 and (user := next(iter(path[-1].users))).target in VIEWS:
        path.append(user)
    below = path[-1]
    total = next((user for user in below.users if user.target in SUMS), None)
    if total is None:
        return None
    _, operation, *ranks, group = total.args
    (end,) = total.users
    rows, factor = _nodes(product)
    is_alone = len(below.users) == 1 and operation == "sum" and all(_shape(rows)[0] % number == 0 for number in ranks)
    gone = (end, total, *reversed(path))
    return _Found(SUMS[total.target], rows, factor, str(group), end, gone, is_alone)


def _unturned(matrix: Node) -> tuple[Node, bool]:
    """The matrix that this is, or the transpose of, as it lies before any of the nodes that turn it."""
    is_turned = False
    while matrix.target is aten.permute.default:
        is_turned ^= matrix.args[1] == [1, 0]
        (matrix,) = _nodes(matrix)
    return matrix, is_turned


def _nodes(node: Node) -> list[Node]:
    return [argument for argument in node.args if isinstance(argument, Node)]


def _shape(node: Node) -> Any:
    return node.meta["val"].shape


def _replace(graph: Graph, found: _Found) -> None:
    shape = _shape(found.end)
    with graph.inserting_before(found.place):
        weights, is_turned = _unturned(found.factor)
        if not is_turned:
            weights = _call(graph, aten.permute.default, weights, [1, 0])
        operator = getattr(torch.ops.commdsl_overlap, found.operator).default
        made = _call(graph, operator, found.rows, weights, found.group)
        if found.there is not None:
            both = made
            made, rows = (_call(graph, getitem, both, number) for number in range(2))
            found.there.replace_all_uses_with(rows)
        if len(_shape(made)) != len(shape):
            made = _call(graph, aten.reshape.default, made, [-1, *shape[1:]])
    found.end.replace_all_uses_with(made)
    for node in found.gone:  # what waits has an effect, so that no pass of torch's takes it for dead
        if not node.users:
            graph.erase_node(node)


def _call(graph: Graph, target: Any, *arguments: Argument) -> Node:
    """A new node, and what it would give."""
    node = graph.call_function(target, arguments)
    values = pytree.tree_map_only(Node, lambda one: one.meta["val"], arguments)
    mode = detect_fake_mode(values)
    assert mode is not None
    with mode:
        node.meta["val"] = target(*values)
    return node
