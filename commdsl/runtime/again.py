"""Turns calls on tensors where others were before into what those asked of the driver: a list, which is made once.

Assumes calls of one op of one shape on one GPU, of which all that changes are addresses: rounds are counted on the
device. Training and inference have the same ones in every step. Does not list calls itself, nor inside the caller's
capture: what a graph asks is asked once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeAlias

import torch

from commdsl.runtime.device import DeviceCommunicator
from commdsl.runtime.driver import Listing, of_cupy
from commdsl.runtime.implied import needed
from commdsl.runtime.kept import keep
from commdsl.runtime.landing import Region
from commdsl.runtime.lasting import room
from commdsl.runtime.listed import ListedStreams
from commdsl.runtime.streams import CallersStream

MOST = 1024
"""Lists of one op and shape, some ten kilobytes each. A layer of a model has one or two, as its weights are its own."""

List: TypeAlias = Callable[[ListedStreams, Region], bool]
"""Lists a call in a region; False where that cannot be."""


class Again:
    """The lists of one op and shape on one group. They go with it."""

    def __init__(self, communicator: DeviceCommunicator) -> None:
        self._communicator = communicator
        self._driver = of_cupy()
        self._known: dict[Hashable, Listing] = {}
        self._met = set[Hashable]()
        self._words: dict[Region, torch.Tensor] = {}

    def __call__(self, region: Region | None, touched: Sequence[torch.Tensor], lie: Hashable, make: List) -> bool:
        """Makes a call, which has that region, as it was made before, if it was, and says so. `touched`: all tensors
        that it has; `lie`: how those lie of which shapes do not say it.
        """
        communicator = self._communicator
        if region is None or communicator.is_capturing:  # the region puts calls that share words in order
            return False
        stream = communicator.current_stream
        key = (region, stream, lie, *map(_address, touched))
        listing = self._known.get(key) or self._listed(key, make, region, stream)
        if listing is None:
            return False
        region.enter(CallersStream(communicator.index, region.last))
        communicator.play(listing.calls)
        return True

    def _listed(self, key: Hashable, make: List, region: Region, stream: int) -> Listing | None:
        """Of a call that is made the second time; None of one that is not, or that no list is made of."""
        if key not in self._met:
            if len(self._met) >= MOST:
                self._met.clear()
            self._met.add(key)
            return None
        listing = Listing(self._driver)
        words = partial(self._room, region)
        with self._communicator.bound():  # events are of the current one
            if not make(ListedStreams(listing, stream, self._communicator.beside, words), region):
                return None
        listing.calls[:] = needed(self._driver, listing.calls)
        keep(self._known, key, listing, MOST)
        return listing

    def _room(self, region: Region, words: int, like: torch.Tensor) -> int:
        """One for all lists in a region, which calls have one after another."""
        if region not in self._words:
            self._words[region] = room(8 * words, like.device)
        found = self._words[region]
        assert found.nbytes == 8 * words
        return found.data_ptr()


_address = torch.Tensor.data_ptr
