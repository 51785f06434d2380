"""Turns a declaration that a parameter is one rank's block into shapes, blocks of whole tensors, and DTensors.

Assumes that all ranks of a group have equally long blocks, in rank order. Does not send anything, except to bring
together a DTensor that is laid out otherwise.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from commdsl.machine.errors import ArgumentError
from commdsl.runtime import groups, menu
from commdsl.runtime.errors import GroupError, TensorError

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True, slots=True)
class Split:
    """A declaration that a tensor is its rank's block, along `dim`, of a whole that the ranks of a group share.

    `parts` equal tensors may lie one behind the other along `dim`, each of them shared: the block then has this rank's
    block of each. The whole has a dimension for them, (..., parts, length of a part, ...), so that a rank's blocks are
    one block of it.
    """

    group_name: str
    dim: int
    parts: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks. Raises GroupError in a process that has no such group."""
        return menu.size(self.group_name)

    def check(self, name: str, shape: torch.Size) -> None:
        """Raise ArgumentError unless a block may have this shape."""
        if not 0 <= self.dim < len(shape):
            raise ArgumentError(f"`{name}` of shape {tuple(shape)} has no dimension {self.dim}")
        if self.parts < 1 or shape[self.dim] % self.parts:
            raise ArgumentError(f"dimension {self.dim} of `{name}`, {tuple(shape)}, is no {self.parts} equal parts")

    def flat_shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape of the tensor that one rank would have in place of blocks of this shape."""
        return torch.Size((*shape[: self.dim], shape[self.dim] * self.ranks, *shape[self.dim + 1 :]))

    def whole_shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape of the whole: the flat shape, with a dimension for several parts."""
        flat = self.flat_shape(shape)
        if self.parts == 1:
            return flat
        return torch.Size((*flat[: self.dim], self.parts, flat[self.dim] // self.parts, *flat[self.dim + 1 :]))

    def whole_shapes(self, shape: torch.Size) -> tuple[torch.Size, torch.Size]:
        """Return both shapes in which the whole of blocks of this shape may come."""
        return self.whole_shape(shape), self.flat_shape(shape)

    @property
    def is_distributed(self) -> bool:
        """True if a torch process group of several ranks has the blocks."""
        group = self._process_group()
        return group is not None and group.size() > 1

    def cut(self, whole: Tensor, shape: torch.Size) -> Tensor:
        """Return this rank's block, of this shape, of a whole tensor in its whole or flat shape: a view or a copy."""
        if self.parts > 1 and whole.shape == self.flat_shape(shape):
            whole = self._unfold(whole)
        block = whole.chunk(self.ranks, self._whole_dim)[groups.own_rank(self.group_name)]
        return block.reshape(shape)

    def spread(self, block: Tensor) -> Tensor:
        """Return a DTensor of the whole whose local tensor is a view of `block`.

        Return a plain tensor for a group of one rank, in the shape of the whole, and the block itself where this
        process has no process group of that name, as where ranks are threads. Raises TensorError (C951) for a block
        that is a DTensor.
        """
        if not self.is_distributed:
            return self._unfold(block) if groups.size_of(self.group_name) == 1 else block
        if is_dtensor(block):
            raise TensorError(
                f"expected a plain tensor, this rank's block, got a DTensor of shape {tuple(block.shape)}: another "
                "system (as fully_shard does) has laid it out anew; use DistributedDataParallel over such layers"
            )
        tensors = _distributed_tensors()
        mesh = _mesh(self._process_group(), block.device)
        placement = tensors.Shard(self._whole_dim)
        whole: Tensor = tensors.DTensor.from_local(self._unfold(block), mesh, [placement], run_check=False)
        return whole

    def block(self, value: Tensor, shape: torch.Size) -> Tensor:
        """Return this rank's block, of this shape, of what was loaded: a DTensor, a whole tensor, or the block itself.

        A DTensor that is not laid out as `spread` does it is brought together by its mesh, which is collective. Raises
        TensorError (C951) for other shapes.
        """
        found: Any = value
        if value.shape == shape and not is_dtensor(value):
            return value
        if value.shape not in self.whole_shapes(shape):
            expected = " or ".join(map(str, dict.fromkeys(map(tuple, self.whole_shapes(shape)))))
            raise TensorError(
                f"expected the whole of {self.ranks} ranks, {expected}, or this rank's block of it, {tuple(shape)}, "
                f"got {tuple(value.shape)}"
            )
        if is_dtensor(value):
            if self._is_laid_out(value):
                block: Tensor = found.to_local()
                return block.reshape(shape)
            value = found.full_tensor()
        return self.cut(value, shape).clone(memory_format=torch.contiguous_format)

    @property
    def _whole_dim(self) -> int:
        """The dimension of the whole that ranks share."""
        return self.dim + (self.parts > 1)

    def _unfold(self, x: Tensor) -> Tensor:
        return x if self.parts == 1 else x.unflatten(self.dim, (self.parts, -1))

    def _is_laid_out(self, value: Any) -> bool:
        """Return whether the local tensor of a DTensor of the whole is this rank's block."""
        group, mesh, tensors = self._process_group(), value.device_mesh, _distributed_tensors()
        if group is None or mesh.mesh.flatten().tolist() != torch.distributed.get_process_group_ranks(group):
            return False
        return bool(mesh.ndim == 1 and value.placements[0] == tensors.Shard(self._whole_dim))

    def _process_group(self) -> Any | None:
        return _process_group(self.group_name)

    def is_over(self, group_name: str) -> bool:
        """Return whether the ranks of another group have different blocks, False where all have the same one.

        Raises GroupError (C953) where some have the same one and others do not.
        """
        if self.group_name == group_name:
            return True
        own, other = _process_group(self.group_name), _process_group(group_name)
        if own is None or other is None:
            return False
        mine, theirs = ({*torch.distributed.get_process_group_ranks(one)} for one in (own, other))
        if len(mine & theirs) == 1:
            return False
        if theirs <= mine:
            return True
        raise GroupError(
            f"some ranks of group `{group_name}`, {sorted(theirs)}, have blocks of one tensor and others the same one: "
            f"it is split over group `{self.group_name}`, {sorted(mine)}"
        )


def mark(parameter: Tensor, split: Split) -> None:
    """Write a split on a parameter: optimizers and `clip_grad_norm_` are given parameters alone."""
    # Plain values: a parameter is saved with its attributes, and torch.load reads no classes by weights alone.
    parameter._commdsl_split = (split.group_name, split.dim, split.parts)  # type: ignore[attr-defined] # ours


def split_of(parameter: Tensor) -> Split | None:
    """Return the split that was declared of a parameter, None for one that all ranks have whole."""
    found = getattr(parameter, "_commdsl_split", None)
    return None if found is None else Split(*found)


def is_dtensor(value: object) -> bool:
    """Return whether it is a DTensor, without the import of its module, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _process_group(name: str) -> Any | None:
    """Return torch's process group of this name, None where there is none or its ranks are threads."""
    if not torch.distributed.is_available():
        return None
    found = groups.resolve(name)[1]
    return found if isinstance(found, torch.distributed.ProcessGroup) else None


def _distributed_tensors() -> Any:
    # Half a second, which only those pay who save.
    import torch.distributed.tensor

    return torch.distributed.tensor


def _mesh(group: Any, device: torch.device) -> Any:
    kind = device.type
    if kind == "meta":
        kind = "cuda" if any(one.type == "cuda" for one in group._device_types) else "cpu"
    return torch.distributed.device_mesh.DeviceMesh.from_group(group, kind)
