"""Turns the size of a product of matrices into the tiling that takes the least time on an H200.

Assumes `build.matmul`'s kernel, and figures that benchmarks/matmul.py measured. Does not measure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from commdsl.build.matmul import FLOAT8, Form, Product, Tiling, cut_tiles, shares

_SPLIT = {2: (80, 128, 160, 224), 4: (64, 96, 128)}
WAYS = (
    *(Tiling(columns, 1) for columns in (64, 80, 96, 112, 128, 144, 160, 192, 224, 256)),
    *(Tiling(columns, 2) for columns in (128, 160, 256)),
    *(Tiling(columns, cluster, 4) for columns in (128, 256) for cluster in (1, 2)),
    *(Tiling(columns, 1, 4) for columns in (96, 224)),
    Tiling(160, 1, rows=256),
    *(Tiling(columns, 1, split=split) for split, found in _SPLIT.items() for columns in found),
)
"""Those that were the fastest for some product."""

# Microseconds, fitted to what was measured. Of a stage, 128 rows and a column of a tile: to multiply them; a line of
# 128 bytes that comes from the L2 cache, where a product is of so many operations that power limits its clock; to read
# one when all SMs read and, of that, when the others are idle; how much of it a cluster of two saves.
_MULTIPLY, _HEAT, _HOT, _READ, _ALONE, _SAVED = 0.00295, 0.00012, 7e11, 0.00167, 0.72, 0.063
# A launch; a tile, whatever its size; what becomes of the sums of one of 128 x 256, and how much of that the next one's
# products hide; what it costs a tile that two blocks meet, or that several share its depth, in all and for what they
# send each other; a part more, of such a tile; that parts are uneven, and that no two blocks read the same at a time.
_LAUNCH, _TILE, _STORE, _HIDDEN, _MEET, _SHARE, _SEND = 0.4, 0.14, 1.68, 0.9, 0.45, 1.5, 5.7
_PART, _UNEVEN, _APART = 3.4, 5.0, 44.0
# To read a line of tiles that are so wide and are not cut, and how much longer they are multiplied.
_BETWEEN, _SOONER, _LONGER = (96, 112, 144), 0.0014, 1.02
_BYTES, _ENOUGH = 3.7e6, 106  # that memory brings, to so many SMs or more
_KEPT = 50e6  # that stay in the L2 cache from call to call


def chosen(product: Product, sms: int, there: float = 0.0) -> Tiling:
    """The tiling that takes the least time on so many SMs, by the figures above. `there`: after so many microseconds
    the rows of the last turn are.
    """
    return ranked(product, sms, there)[0]


def chosen_for(products: Sequence[Product], form: Form, sms: int, there: float = 0.0) -> Tiling:
    """As `chosen`, for all tasks of a launch."""
    alike = Counter(products)
    ways = (way for way in WAYS if form.fits(way) and all(map(way.fits, alike)))
    return min(ways, key=lambda way: sum(_time(replace(one, turns=n), way, sms, there) for one, n in alike.items()))


def ranked(product: Product, sms: int, there: float = 0.0) -> list[Tiling]:
    """All that there are of this product, the fastest first."""
    return sorted((way for way in WAYS if way.fits(product)), key=lambda tiling: _time(product, tiling, sms, there))


def _time(product: Product, tiling: Tiling, sms: int, there: float) -> float:
    cut = cut_tiles([product] * product.turns, tiling, tiling.workers(sms))
    last = _making(replace(product, turns=1), tiling, sms, cut[-1:])
    return _LAUNCH + max(there + last, _making(product, tiling, sms, cut))


def _making(product: Product, tiling: Tiling, sms: int, cut: Sequence[int]) -> float:
    """Of all its turns, of whose tiles these are cut."""
    (high, wide, depth), workers = product.tiles(tiling), tiling.workers(sms)
    size, whole = tiling.rows * tiling.columns / 2**15, high * wide * product.turns - sum(cut)
    each = _TILE + _STORE * size + _MEET * (tiling.cluster - 1)
    if tiling.split > 1:
        each += _SHARE + _SEND * size * (1 - 1 / tiling.split)
    waves, products, others = -(-whole // workers), 0.0, 0.0
    hidden = _HIDDEN * size / tiling.cluster if _stores_late(product, tiling) else 0.0
    if waves:
        products = waves * -(-depth // tiling.split) * _stage(product, tiling, whole / waves)
    for left in filter(None, cut):
        dealt = shares(left, depth, tiling.parts, workers)
        products += left * depth / dealt * _stage(product, tiling, dealt)
        others += each + _PART * size * (dealt / left - 1)
        if dealt % left:
            others += _UNEVEN + _APART * (-dealt % left / left) / tiling.cluster
    stored = waves * each - max(waves - 1, 0) * hidden
    return stored + others + max(products, _brought(product, _ENOUGH if sum(cut) else whole * tiling.blocks))


def _stores_late(product: Product, tiling: Tiling) -> bool:
    """As matmul_worker.cuh has it."""
    return (tiling.columns, tiling.rows) == (256, 128) and product.dtype != FLOAT8 and product.result_bytes == 2


def _stage(product: Product, tiling: Tiling, clusters: float) -> float:
    """While so many clusters are at work."""
    lines = tiling.rows + tiling.columns * (1 - _SAVED * (tiling.cluster - 1))
    busy = _ALONE + (1 - _ALONE) * clusters * tiling.blocks / 132
    heat = _HEAT * (tiling.rows + tiling.columns / tiling.cluster) if _is_hot(product) else 0.0
    is_between = tiling.columns in _BETWEEN and tiling.parts == tiling.split == 1
    read, longer = (_SOONER, _LONGER) if is_between else (_READ, 1.0)
    return max(_MULTIPLY * longer * tiling.columns * tiling.rows / 128 + heat, read * lines * busy)


def _is_hot(product: Product) -> bool:
    """Of float8 nothing was measured."""
    return product.dtype != FLOAT8 and 2.0 * product.turns * product.rows * product.columns * product.depth >= _HOT


def _brought(product: Product, blocks: int) -> float:
    """From memory, to so many blocks."""
    found = _bytes(product)
    return found / (_BYTES * (min(blocks / _ENOUGH, 1.0) if found > _KEPT else 1.0))


def _bytes(product: Product) -> int:
    factor = product.columns * product.depth * (2 if product.gated else 1)
    rows = product.turns * product.rows
    return product.itemsize * (factor + rows * product.depth) + product.result_bytes * rows * product.columns
