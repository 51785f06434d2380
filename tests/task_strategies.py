"""Draws random valid schedules that compute beside what moves, and dispatches by keys, as `.comm` text.

Assumes that what is drawn is right by construction. Does not use any stage of commdsl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Arrays = Mapping[str, list[NDArray[np.generic]]]


@dataclass(frozen=True)
class Computed:
    """A schedule that computes, and what each rank must have of its result, from the blocks of every rank."""

    text: str
    ranks: int
    result: str
    meaning: Callable[[Arrays], list[NDArray[np.float64]]]


OPERATIONS = {"add": np.add, "multiply": np.multiply}


@st.composite
def element_by_element(draw: st.DrawFn) -> Computed:
    """Functions of what is given and of each other, whose last result is summed: a block for each rank, in one step or
    by way of scratch, or all of it on every rank.
    """
    ranks, cut = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    made, lines = ["a", "b"], list[str]()
    of: dict[str, tuple[str, str, str]] = {}
    for name in "cdef"[: draw(st.integers(1, 4))]:
        function = draw(st.sampled_from(sorted(OPERATIONS)))
        first = made[-1] if of else draw(st.sampled_from(made))  # each is used by the next
        of[name] = function, first, draw(st.sampled_from(made))
        made.append(name)
        lines.append(f"  compute {function}({first}, {of[name][2]} -> {name})")
    last = made[-1]
    if draw(st.booleans()):
        sent = [f"  each r, i in 0 ..< {cut} {{ reduce {last}[r, i] @ all -> y[i] }}"]
    else:
        order = draw(st.permutations(range(cut)))
        sent = [f"  each r {{ reduce {last}[r, {i}] @ all -> y[{i}] }}" for i in order]
    given = sorted({one for _, *pair in of.values() for one in pair} & {"a", "b"})
    head = [f"  input {name}[P blocks, {cut}]" for name in given] + [
        f"  scratch {name}[P blocks, {cut}]" for name in of
    ]
    terms = {name: f"{name}[r, i]" for name in "ab"}
    for name, (function, *pair) in of.items():
        terms[name] = f"{function}({', '.join(terms[one] for one in pair)})"
    ensure = [f"  output y[{cut}]", f"  ensure each r, i in 0 ..< {cut} {{ y[i] == sum({terms[last]} @ all) }}"]
    text = "\n".join([f"schedule drawn for P ranks where P == {ranks} {{", *head, *ensure, *lines, *sent, "}", ""])

    def meaning(inputs: Arrays) -> list[NDArray[np.float64]]:
        held = {name: [array.astype(np.float64) for array in arrays] for name, arrays in inputs.items()}
        for name, (function, *pair) in of.items():
            held[name] = [OPERATIONS[function](*both) for both in zip(*(held[one] for one in pair), strict=True)]
        return list(np.split(sum(held[last]), ranks))

    return Computed(text, ranks, "y", meaning)


def matrices(arrays: Arrays, name: str) -> list[NDArray[np.float64]]:
    """Rows as long as those of the weights."""
    depth = arrays["w"][0].shape[1]
    return [one.astype(np.float64).reshape(-1, depth) for one in arrays[name]]


@st.composite
def tuned(draw: st.DrawFn) -> str:
    protocol, landing = draw(
        st.sampled_from([("engine", "place"), ("engine", "cells"), ("bulk", "place"), ("bulk", "")])
    )
    return f"  tune {{ protocol {protocol}{f'   landing {landing}' if landing else ''} }}"


@st.composite
def gathered_products(draw: st.DrawFn) -> Computed:
    """The rows of all ranks, straight from each or around a ring, times the weights of each, piece by piece."""
    ranks, pieces = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    hops = draw(st.permutations(range(1, ranks)))
    is_ring = draw(st.booleans())
    own = ["    each r { compute matmul(x[i], w -> c[r, i]) }"]
    lines = [f"  for i in 0 ..< {pieces} {{", *own, "  }"] if draw(st.booleans()) else []
    for number in range(1, ranks):
        hop = number if is_ring else hops[number - 1]
        here = f"a[(r - {number - 1}) % P, i]" if is_ring and number > 1 else "x[i]"
        there = f"a[(r - {number - 1}) % P, i] @ (r + 1) % P" if is_ring else f"a[r, i] @ (r + {hop}) % P"
        moved = f"    each r {{ put {here} -> {there} }}"
        made = f"    each r {{ let q = (r - {hop}) % P   compute matmul(a[q, i], w -> c[q, i]) }}"
        lines += [f"  for i in 0 ..< {pieces} {{", moved, made, "  }"]
    lines += [] if lines[1] == own[0] else [f"  for i in 0 ..< {pieces} {{", *own, "  }"]
    head = [f"  input x[{pieces} blocks]", "  input w", f"  scratch a[P blocks, {pieces} blocks]"]
    head += [f"  output c[P blocks, {pieces} blocks]"]
    head += [f"  ensure each r, q, i in 0 ..< {pieces} {{ c[q, i] == matmul(x[i] @ q, w) }}"]
    text = "\n".join([f"schedule drawn for P ranks where P == {ranks} {{", *head, *lines, draw(tuned()), "}", ""])

    def meaning(inputs: Arrays) -> list[NDArray[np.float64]]:
        rows = np.concatenate(matrices(inputs, "x"))
        return [(rows @ weights.T).ravel() for weights in matrices(inputs, "w")]

    return Computed(text, ranks, "c", meaning)


@st.composite
def scattered_products(draw: st.DrawFn) -> Computed:
    """Products for every rank, put to it or fetched by it, in any order, and added to its own."""
    ranks, pieces = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    lines = list[str]()
    for hop in draw(st.permutations(range(1, ranks))):
        made = f"    each r {{ let q = (r + {hop}) % P   compute matmul(x[q, i], w -> c[q, i]) }}"
        put = f"put c[(r + {hop}) % P, i] -> s[{hop - 1}, i] @ (r + {hop}) % P"
        get = f"get c[r, i] @ (r - {hop}) % P -> s[{hop - 1}, i]"
        lines += [f"  for i in 0 ..< {pieces} {{", made, f"    each r {{ {draw(st.sampled_from([put, get]))} }}", "  }"]
    lines += [f"  for i in 0 ..< {pieces} {{", "    each r { compute matmul(x[r, i], w -> y[i]) }"]
    lines += [f"    each r {{ reduce s[{hop}, i] -> y[i] }}" for hop in draw(st.permutations(range(ranks - 1)))] + [
        "  }"
    ]
    head = [f"  input x[P blocks, {pieces} blocks]", "  input w", f"  scratch c[P blocks, {pieces} blocks]"]
    head += [f"  scratch s[P - 1 blocks, {pieces} blocks]", f"  output y[{pieces} blocks]"]
    head += [f"  ensure each r, i in 0 ..< {pieces} {{ y[i] == sum(matmul(x[r, i], w) @ all) }}"]
    text = "\n".join([f"schedule drawn for P ranks where P == {ranks} {{", *head, *lines, draw(tuned()), "}", ""])

    def meaning(inputs: Arrays) -> list[NDArray[np.float64]]:
        made = [rows @ w.T for rows, w in zip(matrices(inputs, "x"), matrices(inputs, "w"), strict=True)]
        return [part.ravel() for part in np.split(sum(made), ranks)]

    return Computed(text, ranks, "y", meaning)


def computed() -> st.SearchStrategy[Computed]:
    """Valid schedules that compute."""
    return st.one_of(element_by_element(), gathered_products(), scattered_products())
