"""The tables of Hamilton Attention: its names and meanings, for every number of ranks that admits cycles.

Assumes nothing but the formulas of the paper's construction, written down here a second time. Does not run ranks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from commdsl.attention.hamilton import (
    calculate_in_mapping_circle,
    calculate_inter_node_mapping,
    calculate_intra_node_in_mapping_two_nodes,
    calculate_intra_node_out_mapping_two_nodes,
    calculate_out_mapping_circle,
    calculate_source_rank_per_iter,
    circles_of_nodes,
    gen_hamilton_circle,
    gen_hamilton_circle_two_nodes,
    gen_hamilton_path_local,
)
from commdsl.machine.errors import ArgumentError

NODES = [(m, u) for m in (2, 4, 6, 8, 16) for u in (2, 3, 4, 8)]


def arcs(cycle: list[int]) -> list[tuple[int, int]]:
    return [*pairwise(cycle), (cycle[-1], cycle[0])]


def by_the_rule(n: int) -> list[list[int]]:
    """For n % 4 == 0: a zigzag path through all residues but two ranks, turned; the last rank stands in one arc of
    each, and the arcs that it replaced are one more.
    """
    m, k = n - 2, n // 4 - 1
    zigzag = [(-(i // 2) if i % 2 == 0 else (i + 1) // 2) % m for i in range(m)]
    cuts = {0: 1, k + 1: n - 2, 2 * k + 2: 3, 3 * k + 2: n - 4}
    found, replaced = [], {}
    for i in range(m):
        old = [m] + [(v + i) % m for v in zigzag]
        cut = cuts.get(i, 2 * k)
        found.append([n - 1, *old[cut:], *old[:cut]])
        replaced[old[cut - 1]] = old[cut]
    last = [n - 1, m]
    while last[-1] in replaced:
        last.append(replaced[last[-1]])
    return [*found, last]


@pytest.mark.parametrize("n", [8, 12, 16, 20, 32])
def test_the_construction(n: int) -> None:
    """Where the document has cycles they are those of its construction, in its order."""
    assert gen_hamilton_circle(n) == by_the_rule(n)


@pytest.mark.parametrize("n", [2, 3, 5, 7, 8, 10, 12, 16, 32])
def test_cycles_and_their_tables(n: int) -> None:
    """n - 1 lists of Python's own integers use every link once; what r sends to p is what p receives from r, and every
    rank sends every piece in every step.
    """
    looping = gen_hamilton_circle(n)
    assert len(looping) == n - 1
    assert all(type(rank) is int for cycle in looping for rank in cycle)
    assert all(sorted(cycle) == list(range(n)) for cycle in looping)
    out, into = calculate_out_mapping_circle(looping), calculate_in_mapping_circle(looping)
    for number, cycle in enumerate(looping):
        for here, there in arcs(cycle):
            assert out[here][there] == into[there][here] == number
    for rank in range(n):
        assert out[rank][rank] == into[rank][rank] == -1
        assert sorted(out[rank]) == sorted(into[rank]) == [-1, *range(n - 1)]


def test_some_of_the_cycles() -> None:
    """Any number of the cycles has tables too: four of seven leave some links without a piece."""
    out = calculate_out_mapping_circle(gen_hamilton_circle(8)[:4])
    assert all(sorted(row) == [-1] * 4 + [0, 1, 2, 3] for row in out)


@pytest.mark.parametrize("n", [0, 1, 4, 6])
def test_no_cycles(n: int) -> None:
    """4 and 6 ranks have none, and neither has one rank."""
    with pytest.raises(ArgumentError, match="Hamiltonian cycles"):
        gen_hamilton_circle(n)


def test_the_paths_of_a_node_of_eight() -> None:
    """The first path of a node of eight, and where paths begin and end."""
    paths = gen_hamilton_path_local(8)
    assert paths[0] == [0, 1, 7, 2, 6, 3, 5, 4]
    assert [(path[0], path[-1]) for path in paths] == [(i, (i + 4) % 8) for i in range(8)]


@pytest.mark.parametrize(("m", "u"), NODES)
def test_paths_through_nodes(m: int, u: int) -> None:
    """m cycles use every link inside a node once, and every rank's one way to the next node: local rank l sends piece
    (l + m / 2) % m to that local rank there, and receives piece l.
    """
    looping = gen_hamilton_circle_two_nodes(m * u, m)
    assert len(looping) == m
    assert all(sorted(cycle) == list(range(m * u)) for cycle in looping)
    used = [arc for cycle in looping for arc in arcs(cycle)]
    inside = [(a, b) for a in range(m * u) for b in range(m * u) if a != b and a // m == b // m]
    assert sorted(arc for arc in used if arc[0] // m == arc[1] // m) == inside
    incoming, outgoing = calculate_inter_node_mapping(looping)
    half = m // 2
    for rank in range(m * u):
        node, local = divmod(rank, m)
        far = (local + half) % m
        assert outgoing[rank] == ((node + 1) % u * m + far, far)
        assert incoming[rank] == ((node - 1) % u * m + far, local)
    assert all(type(value) is int for pair in (*incoming, *outgoing) for value in pair)


def test_two_nodes_of_eight() -> None:
    """The numbers that the document tabulates for 16 ranks; for 32 the other node is the next."""
    assert len(gen_hamilton_circle_two_nodes(16)) == 8
    incoming, outgoing = calculate_inter_node_mapping(gen_hamilton_circle_two_nodes(16))
    assert outgoing[:5] == [(12, 4), (13, 5), (14, 6), (15, 7), (8, 0)]
    assert (incoming[0], incoming[4]) == ((12, 0), (8, 4))
    incoming, outgoing = calculate_inter_node_mapping(gen_hamilton_circle_two_nodes(32))
    assert (outgoing[0], outgoing[8], outgoing[28]) == ((12, 4), (20, 4), (0, 0))
    assert (incoming[0], incoming[8]) == ((28, 0), (4, 0))


@pytest.mark.parametrize("m", [2, 4, 6, 8, 16])
def test_tables_inside_a_node(m: int) -> None:
    """A rank sends each piece but one to a rank of its node, and that one to the next node; it receives all but its
    own number, which comes from the node before.
    """
    paths = gen_hamilton_path_local(m)
    out = calculate_intra_node_out_mapping_two_nodes(paths)
    into = calculate_intra_node_in_mapping_two_nodes(paths)
    for number, path in enumerate(paths):
        for here, there in pairwise(path):
            assert out[here][there] == into[there][here] == number
    incoming, outgoing = calculate_inter_node_mapping(gen_hamilton_circle_two_nodes(2 * m, m))
    for local in range(m):
        assert sorted(out[local]) == sorted({-1, *range(m)} - {outgoing[local][1]})
        assert sorted(into[local]) == sorted({-1, *range(m)} - {incoming[local][1]})


@pytest.mark.parametrize(("m", "u"), NODES)
def test_cycles_from_tables(m: int, u: int) -> None:
    """From the outgoing tables the cycles come back, begun at rank 0."""
    looping = gen_hamilton_circle_two_nodes(m * u, m)
    out = calculate_intra_node_out_mapping_two_nodes(gen_hamilton_path_local(m))
    again = circles_of_nodes(out, calculate_inter_node_mapping(looping)[1])
    assert [set(arcs(cycle)) for cycle in again] == [set(arcs(cycle)) for cycle in looping]


@pytest.mark.parametrize("looping", [gen_hamilton_circle(8), gen_hamilton_circle(5), gen_hamilton_circle_two_nodes(16)])
def test_where_pieces_come_from(looping: list[list[int]]) -> None:
    """Pieces that move along the out table, one hop a step: in step t piece c of rank r is said to be from r or a lower
    rank exactly where it is.
    """
    n = len(looping[0])
    said = calculate_source_rank_per_iter(looping)
    held = {(rank, piece): rank for rank in range(n) for piece in range(len(looping))}
    for step in range(n):
        for (rank, piece), origin in held.items():
            assert said[rank][step][piece] is (origin <= rank)
        held = {(there, piece): held[here, piece] for piece, cycle in enumerate(looping) for here, there in arcs(cycle)}
    assert all(held[rank, piece] == rank for rank, piece in held)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gen_hamilton_path_local(7), "even number"),
        (lambda: gen_hamilton_circle_two_nodes(8), "in one node use gen_hamilton_circle"),
        (lambda: gen_hamilton_circle_two_nodes(20), "not two or more nodes of 8"),
        (lambda: gen_hamilton_circle_two_nodes(14, 7), "even number"),
        (lambda: calculate_out_mapping_circle([]), "a list of cycles"),
        (lambda: calculate_out_mapping_circle([[0, 1, 2], [0, 1]]), "a list of cycles"),
        (lambda: calculate_out_mapping_circle([[0, 1, 1]]), "each of the ranks"),
        (lambda: calculate_in_mapping_circle([[0, 1, 2], [1, 2, 0]]), "the same link"),
        (lambda: calculate_source_rank_per_iter([[1, 2, 3]]), "each of the ranks"),
        (lambda: calculate_intra_node_in_mapping_two_nodes([[0, 1], [0, 1]]), "paths use the same link"),
        (lambda: calculate_inter_node_mapping(gen_hamilton_path_local(8)), "use the same link"),
        (lambda: calculate_inter_node_mapping(gen_hamilton_circle(8)), "two links to other nodes"),
        (lambda: calculate_inter_node_mapping([[0, 1, 2], [0, 2, 1]]), "two links to other nodes"),
        (lambda: circles_of_nodes([[-1, 0], [1, -1]], [(2, 1), (3, 0), (0, 1)]), "no nodes of 2"),
        (lambda: circles_of_nodes([[-1, 0], [1, -1]], [(2, 1), (2, 0), (0, 1), (0, 0)]), "each of the ranks"),
        (lambda: circles_of_nodes([[-1, 0], [1, -1]], [(4, 1), (3, 0), (0, 1), (1, 0)]), "names ranks, 0 to 3"),
        (lambda: circles_of_nodes([[-1, 0], [0, -1]], [(3, 1), (2, 1), (1, 1), (0, 1)]), "each of the ranks"),
        (lambda: circles_of_nodes([[-1, 0], [0, -1]], [(3, 0), (2, 0), (1, 0), (0, 0)]), "neither mapping"),
    ],
)
def test_refused(call: Any, words: str) -> None:
    """What is no set of cycles or paths, or none of nodes, is said in one line."""
    with pytest.raises(ArgumentError, match=words):
        call()
