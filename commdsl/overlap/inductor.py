"""Turns graphs that Inductor compiles into ones whose products travel beside what they need: a pass that finds a
product next to a functional collective, and puts an operator of ours in place of both.

Assumes graphs after autograd, each of a forward or a backward alone, as Inductor has them. Does not touch collectives
along another dimension than the first, averages, blocks of unequal length, nor sums that something else than one
collective needs, or that have a bias before they are sums.
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
LAID = (*VIEWS, aten.permute.default, aten.clone.default)

PRODUCTS = (aten.mm.default, aten.addmm.default)

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
        for product in [node for node in graph.nodes if node.target in PRODUCTS and not node.kwargs]:
            known = (_gathered(product), _returned(product), _summed(product), _exchanged(product))
            found = [one for one in known if one is not None]
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
    place of both; `is_alone`: it may. `there`: rows that came, where others need them, too; it gives these as well.
    `width`: of the rows that it is given, where these may have another; `bias`: what is added to the product.
    """

    operator: str
    rows: Node
    factor: Node
    group: str
    end: Node
    gone: tuple[Node, ...]
    is_alone: bool
    there: Node | None = None
    width: Any = None
    bias: Node | None = None

    @property
    def place(self) -> Node:
        """Before what the operator is to stand: the first who needs something of it."""
        return self.end if self.there is None else min(self.there.users)

    @property
    def is_ended(self) -> bool:
        """Whether the operator adds the bias: one of columns, which is not made after the rows have come."""
        return self.bias is not None and len(_shape(self.bias)) == 1 and self.bias < self.place


def _gathered(product: Node) -> _Found | None:
    """A product of rows that were gathered."""
    *bias, rows, factor = _nodes(product)
    path = _brought(rows, VIEWS, c10d.all_gather_into_tensor.default)
    if path is None:
        return None
    *_, gather = path
    shard, _, group = gather.args
    assert isinstance(shard, Node)
    is_alone = len(gather.users) == 1 and _shape(shard)[-1] == _shape(rows)[-1] and len(_shape(shard)) > 1
    found = _Found("all_gather_matmul", shard, factor, str(group), product, (product, *path), is_alone)
    return _of_brought(replace(found, bias=next(iter(bias), None)))


def _returned(product: Node) -> _Found | None:
    """A product of this rank's rows, of columns that each rank has sent, side by side."""
    *bias, rows, factor = _nodes(product)
    path = _brought(rows, LAID, c10d.all_to_all_single.default)
    if path is None or len(_turned(path)) > 1:  # turned again, they are the columns of a gradient of weights
        return None
    *_, exchange = path
    blocks, came, sent, group = exchange.args
    assert isinstance(blocks, Node)
    (count, depth), ranks = _shape(rows), len(sent)  # type: ignore[arg-type] # a list of numbers
    lies = _strides(path) == ((count, ranks, depth // ranks), (depth // ranks, count * depth // ranks, 1))
    is_alone = len(exchange.users) == 1 and lies and _are_equal(came, sent)
    gone = (product, *path)
    found = _Found("all_to_all_matmul", blocks, factor, str(group), product, gone, is_alone, width=depth // ranks)
    return _of_brought(replace(found, bias=next(iter(bias), None)))


def _brought(rows: Node, laid: tuple[Any, ...], collective: Any) -> list[Node] | None:
    """From rows to what brought them, where there is but that they are laid otherwise."""
    path = [rows]
    while path[-1].target in laid:
        path.append(_nodes(path[-1])[0])
    if path[-1].target is not c10d.wait_tensor.default:
        return None
    path.append(_nodes(path[-1])[0])
    return path if path[-1].target is collective else None


def _of_brought(found: _Found) -> _Found:
    """What came is a result, too, where it is needed again."""
    _, *path, there, _ = found.gone
    if all(len(node.users) == 1 for node in (*path, there)):
        return found
    both = replace(found, operator=f"{found.operator}_rows", there=there)
    return replace(both, is_alone=found.is_alone and _unturned(found.factor)[0] < both.place)


def _exchanged(product: Node) -> _Found | None:
    """A product whose columns go to the ranks that they belong to."""
    path = _below(product, LAID)
    exchange = next((user for user in path[-1].users if user.target is c10d.all_to_all_single.default), None)
    if exchange is None:
        return None
    _, came, sent, group = exchange.args
    (end,) = exchange.users
    *bias, rows, factor = _nodes(product)
    (count, columns), ranks = _shape(product), len(sent)  # type: ignore[arg-type] # a list of numbers
    lies = _strides(path) == ((ranks, count, columns // ranks), (columns // ranks, columns, 1))
    is_alone = len(path[-1].users) == 1 and lies and _are_equal(came, sent) and not bias
    gone = (end, exchange, *reversed(path))
    return _Found("matmul_all_to_all", rows, factor, str(group), end, gone, is_alone)


def _strides(path: list[Node]) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """The extents of what is laid otherwise once, and how far apart its elements were; those that stay together are
    one. None: it is as it was, or laid otherwise twice.
    """
    if len(turned := _turned(path)) != 1:
        return None
    value = turned[0].meta["val"]
    shape, strides = list[Any](), list[Any]()
    for extent, stride in zip(value.shape, value.stride(), strict=True):
        if shape and strides[-1] == extent * stride:
            shape[-1], strides[-1] = shape[-1] * extent, stride
        else:
            shape.append(extent)
            strides.append(stride)
    return tuple(shape), tuple(strides)


def _turned(path: list[Node]) -> list[Node]:
    return [node for node in path if node.target is aten.permute.default]


def _are_equal(*sizes: Argument) -> bool:
    """Blocks of as many rows, sent and received."""
    return len({size for some in sizes for size in some}) == 1


def _below(product: Node, laid: tuple[Any, ...]) -> list[Node]:
    """A product, and it laid otherwise, as long as nobody else needs it."""
    path = [product]
    while len(path[-1].users) == 1 and (user := next(iter(path[-1].users))).target in laid:
        path.append(user)
    return path


def _summed(product: Node) -> _Found | None:
    """A product that is summed over the ranks, each of which has some rows, or all."""
    path = _below(product, VIEWS)
    below = path[-1]
    total = next((user for user in below.users if user.target in SUMS), None)
    if total is None:
        return None
    _, operation, *ranks, group = total.args
    (end,) = total.users
    *bias, rows, factor = _nodes(product)
    is_alone = len(below.users) == 1 and operation == "sum" and all(_shape(rows)[0] % number == 0 for number in ranks)
    gone = (end, total, *reversed(path))
    return _Found(SUMS[total.target], rows, factor, str(group), end, gone, is_alone and not bias)


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
    shape, is_ended = _shape(found.end), found.is_ended
    with graph.inserting_before(found.place):
        weights, is_turned = _unturned(found.factor)
        if not is_turned:
            weights = _call(graph, aten.permute.default, weights, [1, 0])
        operator = getattr(torch.ops.commdsl_overlap, found.operator).default
        given = found.rows
        if found.width is not None:
            given = _as(graph, given, [-1, found.width])
        end = (found.bias,) if is_ended else ()
        made = _call(graph, operator, given, weights, found.group, *end)
        if found.there is not None:
            both = made
            made, rows = (_call(graph, getitem, both, number) for number in range(2))
            found.there.replace_all_uses_with(_as(graph, rows, _shape(found.there)))
        made = _as(graph, made, [-1, *shape[1:]])
    if found.bias is not None and not is_ended:
        with graph.inserting_before(found.end):
            made = _call(graph, aten.add.Tensor, made, found.bias)
    found.end.replace_all_uses_with(made)
    for node in found.gone:  # what waits has an effect, so that no pass of torch's takes it for dead
        if not node.users:
            graph.erase_node(node)


def _as(graph: Graph, one: Node, shape: Any) -> Node:
    has = _shape(one)
    fits = len(has) == len(shape) and has[-1] == shape[-1]
    return one if fits else _call(graph, aten.reshape.default, one, [*shape])


def _call(graph: Graph, target: Any, *arguments: Argument) -> Node:
    """A new node, and what it would give."""
    node = graph.call_function(target, arguments)
    values = pytree.tree_map_only(Node, lambda one: one.meta["val"], arguments)
    mode = detect_fake_mode(values)
    assert mode is not None
    with mode:
        node.meta["val"] = target(*values)
    return node
