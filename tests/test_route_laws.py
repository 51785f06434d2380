"""The laws of routes: none is broken by what `routes` computes, each by one number that is wrong."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from commdsl.checks import route_laws
from commdsl.ir.routes import (
    FEW,
    KeyStretches,
    Longs,
    Mask,
    Needs,
    Routes,
    Shards,
    Sharing,
    back,
    first_like,
    key_routes,
    needs,
    query_routes,
    running_count,
    running_sum,
    stable_order,
)


class Routed:
    """Random shards of documents that span ranks, and their routes, there and back."""

    def __init__(self, seed: int, mask: Mask, sharing: Sharing, num: int = 24, num_ranks: int = 4) -> None:
        dice = np.random.default_rng(seed)
        rank = np.sort(dice.integers(0, num_ranks, num))
        self.shards = Shards(num_ranks, rank, dice.integers(0, 5, num))
        self.document = dice.integers(0, max(num // 3, 1), num)
        order = dice.permutation(num)
        self.position, self.context = np.zeros(num, np.int64), np.zeros(num, np.int64)
        self.position[order] = running_count(self.document[order])
        ordered = np.lexsort((self.position, self.document))
        self.context[ordered] = running_sum(self.document[ordered], self.shards.length[ordered])
        self.dest = dice.integers(-1, num_ranks, num)
        self.mask = mask
        self.queries = query_routes(self.shards, self.dest[:, None])
        self.pairs = needs(self.document, self.position, mask)
        self.keys, self.stretches = key_routes(self.shards, self.pairs, self.dest, self.context, self.document, sharing)

    def broken(self, routes: Routes, returning: Routes | None = None) -> dict[str, int]:
        """How many rows break each law of any routes."""
        order = route_laws.landed(routes)
        found = {
            "out_of_bounds": route_laws.out_of_bounds(routes, self.shards),
            "not_its_shard": route_laws.not_its_shard(routes, self.shards),
            "nobody": route_laws.nobody(routes),
            "not_tiling": route_laws.not_tiling(routes, order),
            "not_placed": route_laws.not_placed(routes, order),
            "not_returned": not_returned(routes, returning or back(routes, self.shards), self.shards),
        }
        return {name: len(offences) for name, offences in found.items() if len(offences)}

    def broken_keys(self, **change: Any) -> dict[str, int]:
        """How many rows break each law of keys, with one of the parts replaced."""
        parts: dict[str, Any] = {"keys": self.keys, "stretches": self.stretches, "context": self.context, **change}
        keys, stretches, context = parts["keys"], parts["stretches"], parts["context"]
        length, dest = self.shards.length, self.dest
        asked = route_laws.asked(keys, stretches, self.pairs, dest, context)
        found = {
            "wrong_context": route_laws.wrong_context(length, self.document, self.position, context),
            "wrong_stretch": route_laws.wrong_stretch(stretches, length, self.document, context, dest, self.mask),
            "missing_keys": route_laws.missing_keys(keys, self.pairs, asked)[1],
            "unasked_keys": route_laws.unasked_keys(asked),
        }
        return {name: len(offences) for name, offences in found.items() if len(offences)}


def bumped(numbers: Longs, at: int, by: int = 1) -> Longs:
    changed = numbers.copy()
    changed[at] += by
    return changed


@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("mask", Mask)
def test_routes_obey_every_law(mask: Mask, sharing: Sharing) -> None:
    """No law is broken by computed routes, of no shard, of one, of many."""
    for seed in range(100):
        made = Routed(seed, mask, sharing, num=seed % 30, num_ranks=1 + seed % 5)

        assert made.broken(made.queries) == {}
        assert made.broken(made.keys) == {}
        assert made.broken_keys() == {}


def not_returned(routes: Routes, returning: Routes, shards: Shards) -> route_laws.Offences:
    return route_laws.not_returned(routes, route_laws.landed(routes), returning, shards)


def long_run(routes: Routes) -> int:
    """A run with rows, in the middle of the table."""
    real = np.flatnonzero(routes.length > 0)
    return int(real[len(real) // 2])


@pytest.mark.parametrize("which", ["queries", "keys"])
@pytest.mark.parametrize(
    ("field", "by", "laws"),
    [
        ("source_row", -100, {"out_of_bounds", "not_its_shard"}),
        ("source_row", 1, {"not_its_shard"}),
        ("length", 1, {"not_its_shard", "not_tiling"}),
        ("dest", 100, {"nobody"}),
        ("dest_row", 1, {"not_tiling"}),
        ("place", 1, {"not_placed"}),
    ],
)
def test_each_law_finds_its_break(which: str, field: str, by: int, laws: set[str]) -> None:
    """A number that is wrong breaks the laws about it, on its own row."""
    made = Routed(1, Mask.CAUSAL, Sharing.QUERY)
    routes: Routes = getattr(made, which)
    at = long_run(routes)
    wrong = replace(routes, **{field: bumped(getattr(routes, field), at, by)})

    assert laws <= made.broken(wrong, back(routes, made.shards)).keys()


def test_offences_say_where_and_what() -> None:
    """An offence is the row of the table, what should stand there and what does."""
    made = Routed(2, Mask.CAUSAL, Sharing.QUERY)
    at = long_run(made.queries)
    right = int(made.queries.dest_row[at])
    elsewhere = replace(made.queries, dest_row=bumped(made.queries.dest_row, at, 1000))
    found = route_laws.not_tiling(elsewhere, route_laws.landed(elsewhere))

    assert at in found.row
    assert found.got[found.row == at].tolist() == [right + 1000]
    found = route_laws.not_its_shard(replace(made.queries, source=bumped(made.queries.source, at)), made.shards)
    assert found.row.tolist() == [at]


@pytest.mark.parametrize("field", ["source", "source_row", "dest", "dest_row", "length"])
def test_a_way_back_that_leads_elsewhere(field: str) -> None:
    """One number of the way back is enough: the run does not come home."""
    made = Routed(4, Mask.CAUSAL, Sharing.QUERY)
    for routes in (made.queries, made.keys):
        home = back(routes, made.shards)
        wrong = replace(home, **{field: bumped(getattr(home, field), long_run(home))})

        assert len(not_returned(routes, wrong, made.shards)) > 0


def test_a_way_back_that_loses_a_run() -> None:
    """A run that does not come back is found, whichever it is."""
    made = Routed(5, Mask.CAUSAL, Sharing.QUERY)
    home = back(made.queries, made.shards)
    names = ("source", "source_row", "dest", "dest_row", "length", "shard", "copy", "place")
    for at in np.flatnonzero(home.length > 0):
        less = replace(home, **{name: np.delete(getattr(home, name), at) for name in names})

        assert len(not_returned(made.queries, less, made.shards)) > 0


@pytest.mark.parametrize("sharing", Sharing)
def test_keys_that_are_missing(sharing: Sharing) -> None:
    """A key that lies elsewhere is missed by its queries, and asked for by none where it is."""
    made = Routed(6, Mask.CAUSAL, sharing)
    at = long_run(made.keys)
    broken = made.broken_keys(keys=replace(made.keys, dest_row=bumped(made.keys.dest_row, at)))

    assert broken.keys() == {"missing_keys", "unasked_keys"}
    keys = replace(made.keys, shard=bumped(made.keys.shard, at))
    asked = route_laws.asked(keys, made.stretches, made.pairs, made.dest, made.context)
    pairs, missing = route_laws.missing_keys(keys, made.pairs, asked)
    assert set(made.pairs.query[pairs]) == set(missing.row)


def test_stretches_and_contexts() -> None:
    """A stretch that is too short, begins elsewhere, or a context that is not what lies before: each is found."""
    made = Routed(7, Mask.CAUSAL, Sharing.QUERY)
    query = int(np.flatnonzero(made.dest >= 0)[0])
    shorter = KeyStretches(made.stretches.row, bumped(made.stretches.length, query, -1), made.stretches.shards)
    moved = KeyStretches(bumped(made.stretches.row, query), made.stretches.length, made.stretches.shards)

    assert made.broken_keys(stretches=shorter) == {"wrong_stretch": 1}
    assert "missing_keys" in made.broken_keys(stretches=moved)
    assert "wrong_context" in made.broken_keys(context=bumped(made.context, query))


def test_stable_order() -> None:
    """Few and many, small ranges, large ones, negative ones and sorted ones: always numpy's stable order."""
    dice = np.random.default_rng(0)
    for low, high in ((0, 5), (-3, 3), (0, 2**40), (2**40, 2**40 + 9)):
        for count in (500, 2 * FEW):
            key = dice.integers(low, high, count)

            assert np.array_equal(stable_order(key), np.argsort(key, kind="stable"))
            assert np.array_equal(stable_order(np.sort(key)), np.arange(count))
    assert len(stable_order(np.zeros(0, np.int64))) == 0


def test_sums_and_counts_by_key() -> None:
    """Of each entry: the sum of those before it with its key, how many these are, and which is the first."""
    dice = np.random.default_rng(1)
    for keys in (1, 5, 2**40):
        key, value = dice.integers(0, keys, 300), dice.integers(0, 9, 300)
        before = [[at for at in range(one) if key[at] == key[one]] for one in range(300)]

        assert running_sum(key, value).tolist() == [int(value[one].sum()) for one in before]
        assert running_count(key).tolist() == [len(one) for one in before]
        assert first_like(key).tolist() == [one[0] if one else at for at, one in enumerate(before)]


def test_a_million_routes() -> None:
    """Routes of a million shards, and of a million keys for queries, are computed there and back in a second."""
    dice = np.random.default_rng(0)
    num = 1_000_000
    shards = Shards(512, np.sort(dice.integers(0, 512, num)), dice.integers(0, 4096, num))
    dest = dice.integers(-1, 512, (num, 1))
    begun = time.thread_time()
    back(query_routes(shards, dest), shards)
    queries = time.thread_time() - begun
    documents = 27_777
    document, position = np.repeat(np.arange(documents), 8), np.tile(np.arange(8), documents)
    shards = Shards(512, np.sort(dice.integers(0, 512, 8 * documents)), dice.integers(0, 4096, 8 * documents))
    context, home = running_sum(document, shards.length), dice.integers(0, 512, 8 * documents)
    begun = time.thread_time()
    pairs: Needs = needs(document, position, Mask.CAUSAL)
    keys, _ = key_routes(shards, pairs, home, context, document, Sharing.QUERY)
    back(keys, shards)
    taken = time.thread_time() - begun

    assert keys.num == 36 * documents
    # About 0.2 seconds each on one core.
    assert (queries < 1, taken < 1) == (True, True)
