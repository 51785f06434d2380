"""Turns the words of a command line into what is measured: collectives, sizes, candidates; knows their bytes.

Assumes nothing but Python. A size is the bytes of the larger side on one rank: an all-gather's output, a
reduce-scatter's input. Does not import torch, so all of it is tested without a GPU.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import TypeAlias, assert_never

SIZES = tuple(4**power for power in range(5, 16))  # 1 KB to 1 GB
CALLS = 24
"""Calls in a CUDA graph, of every contender at every size: NCCL's time a call depends on their number. A multiple of 2,
3, 4 and 8, so that every root has its turn."""

TUNE_KEYS = ("protocol", "lanes", "threads", "tile", "sms")
MOST_LANES_PER_SM, MOST_THREADS = 8, 1024  # C505: of an SM
_UNITS = {"": 0, "B": 0, "K": 10, "KB": 10, "M": 20, "MB": 20, "G": 30, "GB": 30}

Tune: TypeAlias = tuple[tuple[str, int | str], ...]


class Collective(StrEnum):
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"


PREFIXES = {
    "allreduce": Collective.ALL_REDUCE,
    "allgather": Collective.ALL_GATHER,
    "reducescatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
}
"""How the file of a schedule starts."""


class CandidateError(ValueError):
    """A candidate that says nothing this benchmark understands."""


@dataclass(frozen=True, slots=True)
class Case:
    """One collective at one size on a number of ranks; `itemsize` is that of the element, `calls` those of a graph."""

    collective: Collective
    nbytes: int
    ranks: int
    itemsize: int = 2
    calls: int = CALLS

    @property
    def numel(self) -> int:
        """Elements of the larger side; a whole number of blocks where the collective deals in blocks."""
        elements = self.nbytes // self.itemsize
        if self.collective in (Collective.ALL_REDUCE, Collective.BROADCAST):
            return elements
        return elements // self.ranks * self.ranks

    @property
    def block(self) -> int:
        return self.numel // self.ranks

    @property
    def num_in(self) -> int:
        return self.block if self.collective is Collective.ALL_GATHER else self.numel

    @property
    def num_out(self) -> int:
        return self.block if self.collective is Collective.REDUCE_SCATTER else self.numel

    @property
    def sent_bytes(self) -> int:
        """What every GPU has to send at least; a broadcast's is what all but one rank of a chain pass on."""
        nbytes = self.numel * self.itemsize
        match self.collective:
            case Collective.ALL_REDUCE:
                return 2 * (self.ranks - 1) * nbytes // self.ranks
            case Collective.BROADCAST:
                return nbytes
            case Collective.ALL_GATHER | Collective.REDUCE_SCATTER | Collective.ALL_TO_ALL:
                return (self.ranks - 1) * nbytes // self.ranks
            case _:
                assert_never(self.collective)

    def gigabytes_per_second(self, microseconds: float) -> float:
        """Bus bandwidth: bytes through every GPU's port, whatever the collective."""
        return self.sent_bytes / microseconds / 1000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with parameters and a tuning, to be measured beside others."""

    schedule: str
    params: tuple[tuple[str, int], ...] = ()
    tune: Tune = ()

    @property
    def collective(self) -> Collective:
        prefix = PurePath(self.schedule).stem.split("_")[0]
        if prefix not in PREFIXES:
            raise CandidateError(f"`{self.schedule}`: its name has to start with one of {', '.join(PREFIXES)}")
        return PREFIXES[prefix]

    def __str__(self) -> str:
        name = "@".join([PurePath(self.schedule).stem, *(f"{key}={value}" for key, value in self.params)])
        given = dict(self.tune)
        fields = [str(given.get(key, "")) for key in TUNE_KEYS]
        return ":".join([name, *fields]).rstrip(":")


def parse_size(text: str) -> int:
    """`64K`, `4 MB`, `1G` or bytes."""
    match = re.fullmatch(r"(\d+) ?([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"`{text}` is no size: expected a number with K, M or G, or of bytes")
    return int(match[1]) << _UNITS[match[2]]


def size_name(nbytes: int) -> str:
    for unit, shift in (("GB", 30), ("MB", 20), ("KB", 10)):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def parse_sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({parse_size(part) for part in text.split(",") if part}))


def parse_counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(",") if part.strip())
    if not counts or min(counts) < 1:
        raise ValueError(f"`{text}`: expected numbers from 1, with commas between them")
    return counts


def parse_collectives(text: str) -> tuple[Collective, ...]:
    known = {collective.value for collective in Collective}
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"no collective `{name}`; there are {', '.join(sorted(known))}")
    return tuple(collective for collective in Collective if collective.value in names)


def parse_candidates(texts: Iterable[str]) -> tuple[Candidate, ...]:
    """`SCHEDULE[@PARAM=VALUE...][:protocol[:lanes[:threads[:tile[:sms]]]]]`; commas in a field stand for one
    candidate each, an empty field leaves the schedule's own. Duplicates are dropped."""
    found = [candidate for text in texts for candidate in _expand(text)]
    for candidate in found:
        # A name of no known collective is refused before anything starts.
        if candidate.collective is Collective.BROADCAST and "root" in dict(candidate.params):
            raise CandidateError(f"`{candidate}`: no root is to be given, every rank has its turn")
    return tuple(dict.fromkeys(found))


def _expand(text: str) -> Iterator[Candidate]:
    head, *fields = text.split(":")
    if not head or len(fields) > len(TUNE_KEYS):
        raise CandidateError(f"`{text}`: expected SCHEDULE[:{'[:'.join(TUNE_KEYS)}{']' * len(TUNE_KEYS)}")
    schedule, *params = head.split("@")
    given = [_alternatives(text, *param.partition("=")[::2]) for param in params]
    tuned = [_alternatives(text, key, field) for key, field in zip(TUNE_KEYS, fields, strict=False) if field]
    for values in itertools.product(*given):
        for tune in itertools.product(*tuned):
            yield Candidate(schedule, tuple((key, int(value)) for key, value in values), tune)


def _alternatives(text: str, key: str, field: str) -> list[tuple[str, int | str]]:
    if key == "protocol":
        return [(key, value) for value in field.split(",")]
    try:
        return [(key, parse_size(value)) for value in field.split(",")]
    except ValueError as error:
        raise CandidateError(f"`{text}`: `{key}` is a number, not `{field}`") from error


def on_sms(candidate: Candidate, lanes: int, sms: int) -> Candidate:
    """The candidate on so many SMs: a multiple of them, as near to its lanes and threads as the language allows."""
    per_sm = min(max(1, lanes // sms), MOST_LANES_PER_SM)
    given = {**dict(candidate.tune), "lanes": sms * per_sm, "sms": sms}
    if "threads" in given:
        given["threads"] = min(int(given["threads"]), MOST_THREADS // per_sm // 32 * 32)
    tune = tuple((key, given[key]) for key in TUNE_KEYS if key in given)
    return Candidate(candidate.schedule, candidate.params, tune)
