"""Turns a stretch of symmetric memory into results: tensors that give their memory back when nobody holds them.

Assumes calls of one stream, or of streams that torch orders: memory that is given back is used by the next call that is
enqueued, as in torch's own allocator. Does not grow. Ranks need not take the same places: they tell each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from commdsl.runtime.errors import DispatchError
from commdsl.runtime.tensors import contiguous_strides

ALIGNMENT = 256

_uses_of: Callable[[int], int] = torch._C._storage_Use_Count
"""How many hold a storage: tensors, and whoever asked one for its storage."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of what shape a result is, and where it lies behind the beginning of its place."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    at: int  # bytes, as the next
    nbytes: int
    dtype: torch.dtype


Results: TypeAlias = tuple[Result, ...]


def results_of(rows: Sequence[int], like: Sequence[torch.Tensor]) -> Results:
    """Of one call: one behind the other, with so many rows, like those of other tensors."""
    found, at = [], 0
    for count, tensor in zip(rows, like, strict=True):
        # Strides of `like` may be any where it has no row, or one.
        shape = (count, *tensor.shape[1:])
        found.append(Result(shape, contiguous_strides(shape), at, count * row_bytes(tensor), tensor.dtype))
        at += aligned(found[-1].nbytes)
    return tuple(found)


class Place:
    """Memory for the results of one call. It keeps a tensor of its own for each: the results of the next call of that
    form are tensors of the same storages, and are let go when these have no more uses than the place itself.
    """

    def __init__(self, address: int) -> None:
        self.address = address
        self.is_kept = False
        self.form: Results = ()
        self._own: list[torch.Tensor] = []
        self._storages: list[int] = []  # their handles
        self._uses: list[int] = []  # and how many uses each has when nobody holds the result

    @property
    def is_held(self) -> bool:
        """Whether somebody holds a result."""
        return [*map(_uses_of, self._storages)] != self._uses

    @property
    def is_free(self) -> bool:
        return not self.is_kept and not self.is_held

    def shape(self, form: Results, own: list[torch.Tensor]) -> None:
        """The results are of that form from now on, in the memory of these tensors, which nobody else has."""
        self.form, self._own = form, own
        self._storages = [one.untyped_storage()._cdata for one in own]
        self._uses = [*map(_uses_of, self._storages)]

    def results(self) -> list[torch.Tensor]:
        """New tensors, each with a version of its own."""
        return [one.data for one in self._own]


class Pool:
    """Places for the results of so many calls there, and of so many back, each for the largest: so whether a call has
    room does not depend on the sizes of those before it, which differ from rank to rank.
    """

    def __init__(self, name: str, address: int, sizes: tuple[int, int], calls: int) -> None:
        self._name = name
        self._sizes = sizes  # of a call's results: there, back
        there, back = sizes
        middle = address + calls * there
        self._places = (
            [Place(address + call * there) for call in range(calls)],
            [Place(middle + call * back) for call in range(calls)],
        )
        self._loans: list[Place] = []

    def empty(self, rows: Sequence[int], like: Sequence[torch.Tensor], *, goes: bool, keep: bool) -> list[torch.Tensor]:
        """New tensors for the results of one call, `goes` there or back, with `rows` rows like those of others; their
        memory comes back when none of them is held. With `keep` never: a graph that is being captured will write there
        at every replay.

        Raises DispatchError (C961) when there is no room.
        """
        return self._taken(self._free(goes), results_of(rows, like), like, goes=goes, keep=keep)

    def take(
        self, results: Results, like: Sequence[torch.Tensor], *, goes: bool, keep: bool
    ) -> list[torch.Tensor] | None:
        """As `empty`, of `results_of` such rows, which calls of one form may keep; None when there is no room."""
        place = self._find(goes)
        return None if place is None else self._taken(place, results, like, goes=goes, keep=keep)

    def _taken(
        self, place: Place, results: Results, like: Sequence[torch.Tensor], *, goes: bool, keep: bool
    ) -> list[torch.Tensor]:
        if place.form != results:
            self._shape(place, results, like, goes=goes)
        place.is_kept = keep
        return place.results()

    def lend(self, results: Results, like: Sequence[torch.Tensor], *, goes: bool) -> list[torch.Tensor]:
        """Tensors over the memory that `take` will return next, which stays free for that call. While one is held the
        memory stays allocated, also after a release.
        """
        loan = Place(self._free(goes).address)
        self._shape(loan, results, like, goes=goes)
        self._loans = [*(one for one in self._loans if one.is_held), loan]
        return loan.results()

    def _shape(self, place: Place, results: Results, like: Sequence[torch.Tensor], *, goes: bool) -> None:
        with torch.inference_mode(mode=False):  # a tensor of a later call may need a gradient
            place.shape(results, self._at(place, results, like, goes=goes))

    def look(self, results: Results, like: Sequence[torch.Tensor], *, goes: bool) -> list[torch.Tensor]:
        """Return what `take` will return next, without taking it. It does not keep the memory: copy it at once."""
        return self._at(self._free(goes), results, like, goes=goes)

    def _at(self, place: Place, results: Results, like: Sequence[torch.Tensor], *, goes: bool) -> list[torch.Tensor]:
        most = self._sizes[not goes]
        found = []
        for result, tensor in zip(results, like, strict=True):
            if result.at + result.nbytes > most:
                raise DispatchError(f"the results of a call of `{self._name}` have {most} bytes, and these need more")
            address = place.address + result.at
            storage = torch._C._construct_storage_from_data_pointer(address, tensor.device, result.nbytes)
            found.append(tensor.new_empty(0).set_(storage, 0, result.shape, result.strides))
        return found

    def has_room(self, *, goes: bool) -> bool:
        """Whether one more call there, or back, has a place."""
        return self._find(goes) is not None

    @property
    def is_held(self) -> bool:
        """Return whether a result, or a tensor that was lent, is still held."""
        return any(place.is_held for places in (*self._places, self._loans) for place in places)

    @property
    def is_idle(self) -> bool:
        """Whether nobody holds a result, and no graph writes one."""
        return all(place.is_free for places in self._places for place in places)

    def _find(self, goes: bool) -> Place | None:
        for place in self._places[not goes]:
            if place.is_free:
                return place
        return None

    def _free(self, goes: bool) -> Place:
        place = self._find(goes)
        if place is None:
            held = f"{len(self._places[not goes])} calls {'there' if goes else 'back'}"
            raise DispatchError(
                f"`{self._name}` has no memory left: the results of {held} are held. Let some go, or make room for "
                "more `results`"
            )
        return place


def aligned(size: int) -> int:
    """Bytes that a result of `size` takes."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def row_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one row: of what lies along all dimensions but the first."""
    return prod(tensor.shape[1:]) * tensor.element_size()
