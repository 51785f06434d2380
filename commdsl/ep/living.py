"""Turns a group some of whose ranks are gone into the group of those that live, and numbers of keys of all ranks into
numbers of theirs.

Assumes that the living agree on who is gone. Does not find that out: PeerError names a rank that is, and who starts the
processes knows. Kernels know nothing of it: calls of the living are those of a smaller group, with its proofs, and no
memory of a rank that is gone is touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from commdsl.runtime import given, groups
from commdsl.runtime.errors import DispatchError, GroupError, RendezvousError
from commdsl.runtime.given import Patience


@dataclass(frozen=True, eq=False)
class Living:
    """The ranks of a group that live, as a group: to be given where a group is."""

    group: torch.distributed.ProcessGroup
    ranks: tuple[int, ...]  # by rank of it the rank of the group before
    before: int  # how many that had

    @classmethod
    def of(cls, group: Any = None, dead: Iterable[int] = (), timeout: Patience = None) -> Living:
        """Collective of all ranks of `group` but the `dead`, who are named alike on all of them: their group. Of a
        Living the dead are ranks of the group before all. What was set up for `group` is not given back: `release` does
        so, when nothing of it is used any more. `timeout`: how long the living wait for each other, here and in calls.

        Raises GroupError (C953) for ranks that there are not, or that are threads, and on a rank that is named itself;
        RendezvousError (C956) where not all come.
        """
        _, found = groups.resolve(groups.name_of(group))
        if not isinstance(found, torch.distributed.ProcessGroup):
            raise GroupError("ranks that are threads live as long as each other: the living are of a process group")
        world = torch.distributed.get_process_group_ranks(found)
        ranks, before = (group.ranks, group.before) if isinstance(group, Living) else (range(len(world)), len(world))
        gone = set(dead)
        if strange := sorted(gone - set(ranks)):
            raise GroupError(f"rank {strange[0]} cannot have gone: the ranks are {', '.join(map(str, ranks))}")
        own = ranks[found.rank()]
        if own in gone:
            raise GroupError(f"rank {own} is this one, and it lives")
        kept = [(rank, process) for rank, process in zip(ranks, world, strict=True) if rank not in gone]
        seconds = given.seconds(timeout)
        try:
            made = torch.distributed.new_group(
                [process for _, process in kept],
                timeout=None if seconds is None else timedelta(seconds=seconds),
                backend="gloo",
                use_local_synchronization=True,
            )
        except RuntimeError as error:
            names = ", ".join(str(rank) for rank, _ in kept)
            raise RendezvousError(f"ranks {names} did not meet as those that live: {error}") from error
        return cls(made, tuple(rank for rank, _ in kept), before)

    @property
    def group_name(self) -> str:
        return str(self.group.group_name)

    @property
    def rank(self) -> int:
        """This rank's number among the living."""
        return int(self.group.rank())

    def key_map(self, keys: int, device: torch.device | str) -> KeyMap:
        """Of so many keys of the group before, as many on each of its ranks. Raises DispatchError (C961)."""
        if keys < 1 or keys % self.before:
            raise DispatchError(f"{keys} keys are not as many on each of {self.before} ranks")
        share = keys // self.before
        table = torch.full((keys + 1,), share * len(self.ranks), dtype=torch.int32)
        for new, old in enumerate(self.ranks):
            table[old * share : (old + 1) * share] = torch.arange(new * share, (new + 1) * share)
        return KeyMap(share * len(self.ranks), table.to(device), torch.zeros((), dtype=torch.int64, device=device))


@dataclass(frozen=True, eq=False)
class KeyMap:
    """Keys of a group before to those of the living; keys of ranks that are gone are dropped, and counted."""

    num_keys: int  # of all the living together
    table: torch.Tensor  # (keys before + 1,) int32, the last for a key that was dropped
    lost: torch.Tensor  # () int64, on the device: how many entries were dropped since this was made

    def __call__(self, keys: torch.Tensor) -> torch.Tensor:
        """keys: int32, 0 ..< E of the group before; E drops. Nothing is read on the host. A key that there is not stays
        as it is, and the call that takes it reports it.
        """
        last = len(self.table) - 1
        is_known = (keys >= 0) & (keys <= last)
        found = torch.where(is_known, self.table[keys.clamp(0, last).long()], keys)
        self.lost.add_(((found == self.num_keys) & (keys != last)).sum())
        return found
