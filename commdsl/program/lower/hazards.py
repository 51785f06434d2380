"""Turns accesses to cells, in order, into edges: which operation must follow which.

Assumes accesses of one phase do not conflict. Does not know which edges need a flag; `ordering` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.program.moves import Reason

Index: TypeAlias = NDArray[np.integer[Any]]
"""Positions, of whatever width numpy gives them."""

MANY = -2  # several ranks have read the cell since it was written; they stand in a table beside


@dataclass(frozen=True, eq=False, slots=True)
class Edges:
    """Operation `op` (counted through all ranks) on `rank` must follow operation `number` of `peer`, `back` rounds ago.

    One int32 array (6, n), as edges are taken and joined far more often than read.
    """

    table: Ints

    op = property(lambda self: self.table[0])
    rank = property(lambda self: self.table[1])
    peer = property(lambda self: self.table[2])
    number = property(lambda self: self.table[3])
    reason = property(lambda self: self.table[4])
    back = property(lambda self: self.table[5])

    def __len__(self) -> int:
        return len(self.table[0])

    def take(self, index: Index) -> Edges:
        return Edges(self.table[:, index])


class Cells:
    """The last accesses of every cell of every rank."""

    def __init__(self, size: int) -> None:
        self.write_rank, self.write_number = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        self.read_rank, self.read_number = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        self.readers: dict[int, dict[int, int]] = {}  # where read_rank is MANY
        self.first_rank, self.first_op = np.full(size, -1, np.int32), np.full(size, -1, np.int32)

    def reads(self, key: Index, op: Ints, rank: Ints, number: Ints) -> list[Edges]:
        """Edges of reads after writes; notes the readers."""
        writer = self.write_rank[key]
        far = (writer != rank) & (writer >= 0)
        edges = _edges(op[far], rank[far], writer[far], self.write_number[key[far]], Reason.READ_AFTER_WRITE)
        order = np.lexsort((number, rank, key))
        key, rank, number = key[order], rank[order], number[order]
        last = np.ones(len(key), np.bool_)
        last[:-1] = (key[1:] != key[:-1]) | (rank[1:] != rank[:-1])
        key, rank, number = key[last], rank[last], number[last]
        shared = np.zeros(len(key), np.bool_)
        shared[1:] |= key[1:] == key[:-1]
        shared[:-1] |= key[1:] == key[:-1]
        shared |= (self.read_rank[key] != -1) & (self.read_rank[key] != rank)
        for k, b, i in zip(key[shared].tolist(), rank[shared].tolist(), number[shared].tolist(), strict=True):
            if self.read_rank[k] != MANY:
                self.readers[k] = {} if self.read_rank[k] == -1 else {int(self.read_rank[k]): int(self.read_number[k])}
                self.read_rank[k] = MANY
            self.readers[k][b] = i
        self.read_rank[key[~shared]], self.read_number[key[~shared]] = rank[~shared], number[~shared]
        return [edges]

    def writes(self, key: Index, op: Ints, rank: Ints, number: Ints) -> list[Edges]:
        """Edges of writes after reads and after writes; notes the writer and forgets the readers."""
        edges = self.last_users(key, op, rank)
        new = self.write_rank[key] == -1
        self.first_rank[key[new]], self.first_op[key[new]] = rank[new], op[new]
        for k in key[self.read_rank[key] == MANY].tolist():
            del self.readers[k]
        self.read_rank[key] = -1
        self.write_rank[key], self.write_number[key] = rank, number
        return edges

    def last_users(self, key: Index, op: Ints, rank: Ints) -> list[Edges]:
        """Edges from the last readers of each cell, or from the last writer where nobody has read it since."""
        reader, writer = self.read_rank[key], self.write_rank[key]
        one = (reader >= 0) & (reader != rank)
        unread = (reader == -1) & (writer >= 0) & (writer != rank)
        edges = [
            _edges(op[one], rank[one], reader[one], self.read_number[key[one]], Reason.WRITE_AFTER_READ),
            _edges(op[unread], rank[unread], writer[unread], self.write_number[key[unread]], Reason.WRITE_AFTER_WRITE),
        ]
        several = np.nonzero(reader == MANY)[0].tolist()
        rows = [(op[i], rank[i], q, n) for i in several for q, n in self.readers[int(key[i])].items() if q != rank[i]]
        if rows:
            columns = [np.array(column, np.int32) for column in zip(*rows, strict=True)]
            edges.append(_edges(columns[0], columns[1], columns[2], columns[3], Reason.WRITE_AFTER_READ))
        return edges


def _edges(op: Ints, rank: Ints, peer: Ints, number: Ints, reason: Reason) -> Edges:
    table = np.zeros((6, len(op)), np.int32)
    table[0], table[1], table[2], table[3], table[4] = op, rank, peer, number, int(reason)
    return Edges(table)


def joined(parts: list[Edges]) -> Edges:
    return Edges(np.concatenate([np.zeros((6, 0), np.int32), *(edges.table for edges in parts)], axis=1))
