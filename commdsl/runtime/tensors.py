"""Turns the tensors of a call into the size of a block, and block counts into output shapes; refuses what cannot be
run.

Assumes a Signature. Works on real tensors and on fake ones with symbolic sizes alike. Does not touch memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch

from commdsl.ir.classes import MADE, Dim
from commdsl.machine import dtypes
from commdsl.runtime.errors import ReductionError, TensorError
from commdsl.runtime.program import Port, Signature

FLOAT8 = torch.float8_e4m3fn
"""What is multiplied with scales."""

ALIGNMENT = 16
"""Bytes between whose multiples a row begins that TMA reads."""


def element_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check(name: str, signature: Signature, tensors: Sequence[torch.Tensor]) -> None:
    """Refuses tensors that differ in device, do not lie as a call takes them, or are not of the dtypes or blocks they
    should be.
    """
    first, scales = tensors[0], tensors[len(signature.inputs) :]
    tensors = tensors[: len(signature.inputs)]
    for port, tensor in zip(signature.inputs, tensors, strict=True):
        if tensor.device != first.device:
            raise TensorError(
                f"`{name}`: `{port.name}` is on {tensor.device}, `{signature.inputs[0].name}` on {first.device}"
            )
        if tensor.dtype != (wanted := dtype_of(signature, port, tensors)):
            element = None if port.unit is None else port.unit.element
            said = f"`{signature.inputs[_typed(signature, port)].name}`" if element is None else "it is declared"
            raise TensorError(f"`{name}`: `{port.name}` is {tensor.dtype}, {said} {wanted}")
        if not lies_as(port, tensor):
            what = "has neither rows nor columns that TMA reads" if port.any_lines else "is not contiguous"
            raise TensorError(f"`{name}`: `{port.name}` {what}: pass {port.name}.contiguous()")
    if first.device.type not in ("cpu", "cuda"):
        raise TensorError(f"`{name}` runs on cpu and cuda tensors, not on {first.device.type}")
    if signature.lengths is None:
        _check_blocks(name, signature, tensors)
    if signature.products:
        _check_products(name, signature, tensors, scales)
    if signature.row is not None:
        _check_row(name, signature, signature.row, tensors)


def lies_as(port: Port, tensor: torch.Tensor) -> bool:
    """Whether it lies in memory as a call takes it."""
    if tensor.layout != torch.strided:
        return False
    return tensor.is_contiguous() or (port.any_lines and lies_in_lines(tensor))


def lies_in_lines(tensor: torch.Tensor) -> bool:
    """Whether it is a matrix whose rows, or whose columns, lie side by side, as far apart as TMA reads them; or are
    such matrices.
    """
    if tensor.dim() not in (2, 3):
        return False
    (rows, columns), (*between, down, across) = tensor.shape[-2:], tensor.stride()
    step = down if across == 1 and down >= columns else across if down == 1 and across >= rows else 0
    return step > 0 and all(one * tensor.element_size() % ALIGNMENT == 0 for one in (step, *between))


def _check_row(name: str, signature: Signature, row: int, tensors: Sequence[torch.Tensor]) -> None:
    """What is made row by row is of floats, and whole rows; a number is one."""
    first, one = tensors[0], tensors[row]
    rows, port = signature.inputs[0].name, signature.inputs[row].name
    if not first.dtype.is_floating_point or one.dtype != first.dtype:
        raise TensorError(f"`{name}`: `{rows}` and `{port}` are floats of one type, not {first.dtype} and {one.dtype}")
    if one.dim() != 1 or first.dim() == 0 or one.shape != first.shape[-1:]:
        what = f"`{port}` is {tuple(one.shape)}, a row of `{rows}` {tuple(first.shape[-1:])}"
        raise TensorError(f"`{name}`: {what}, and they are equally long")
    for number in signature.numbers:
        if tensors[number].numel() != 1:
            port, shape = signature.inputs[number].name, tuple(tensors[number].shape)
            raise TensorError(f"`{name}`: `{port}` is one number, not {shape}")


def _check_products(
    name: str, signature: Signature, tensors: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
) -> None:
    """What is multiplied are matrices of floats; what is of one size in the schedule is so in tensors. Of float8 each
    has a scale.
    """
    sided = [one for one in zip(signature.inputs, tensors, strict=True) if one[0].unit is not None and one[0].unit.dims]
    for port, tensor in sided:
        _check_matrix(name, port, tensor)
    for port, tensor in sided:
        _check_sides(name, signature, port, tensor, tensors)
    for rows, factor, made in signature.products:
        one, other = (dtype_of(signature, Port(unit.size, 1, 0, unit), tensors) for unit in (rows, factor))
        if one != other:
            raise TensorError(f"`{name}`: `{factor.size}` is {other}, `{rows.size}` {one}, and they are multiplied")
        for dim in made.dims:
            value = _side(signature, dim, tensors)
            if dim.scale < 0 and value % 2:
                what = f"a gate and as many columns that it is multiplied with, not {value} in all"
                raise TensorError(f"`{name}`: a block of `{dim.size}` makes {what}")
    first = tensors[_input(signature, signature.products[0][0].size)]
    check_scales(name, first, tensors[_input(signature, signature.products[0][1].size)], scales)


def _check_matrix(name: str, port: Port, tensor: torch.Tensor) -> None:
    """What is multiplied is a matrix of floats, or as many as there are blocks."""
    are_blocks = port.blocks > 1 and tensor.dim() == 3 and len(tensor) == port.blocks
    is_given = port.unit is not None and port.unit.is_made  # beside a product: its shape is compared as a whole
    if not is_given and ((tensor.dim() != 2 and not are_blocks) or not tensor.dtype.is_floating_point):
        what = f"a matrix of floats, not {tuple(tensor.shape)} of {tensor.dtype}"
        raise TensorError(f"`{name}`: `{port.name}` is {what}")


def _check_sides(
    name: str, signature: Signature, port: Port, tensor: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> None:
    """A tensor that is multiplied or added has the sides that the schedule says."""
    assert port.unit is not None
    wanted = [_extent(signature, dim, tensors) for dim in port.unit.dims]
    if port.unit.is_made:  # a bias, or a residual
        whole = [port.blocks * wanted[0], *wanted[1:]]
        if list(tensor.shape) != whole:
            what = "a number for each row of a factor" if len(wanted) == 1 else "as what is made"
            raise TensorError(f"`{name}`: `{port.name}` is {tuple(tensor.shape)}, {what} {tuple(whole)}")
        return
    block = _block(signature, _input(signature, port.name), tensors)[-2:]
    for side, (found, due, dim) in enumerate(zip(block, wanted, port.unit.dims, strict=True)):
        if found != due:
            words = "a column", "a row"
            what = f"{words[side]} of `{port.name}` has {found}"
            raise TensorError(f"`{name}`: {what}, {words[dim.side]} of `{dim.size}` {due}: they are of one size")


def check_scales(name: str, rows: torch.Tensor, factor: torch.Tensor, scales: Sequence[torch.Tensor]) -> None:
    """Float8 is multiplied where it lies by rows, with a float32 number of each factor; nothing else has such."""
    is_float8 = rows.dtype == FLOAT8
    if (2 if is_float8 else 0) != len(scales) or (rows.dtype.itemsize == 1 and not is_float8):
        what = f"{rows.dtype} with {len(scales)} scales"
        raise TensorError(f"`{name}` multiplies {FLOAT8} with two scales, and wider floats without, not {what}")
    for scale in scales:
        if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != rows.device:
            what = f"{tuple(scale.shape)} of {scale.dtype} on {scale.device}"
            raise TensorError(f"`{name}`: a scale is one float32 number on {rows.device}, not {what}")
    if is_float8 and not (is_deep(rows) and is_deep(factor)):
        raise TensorError(f"`{name}`: a factor of {FLOAT8} lies by columns, and is multiplied by rows: copy it")


def is_deep(matrix: torch.Tensor) -> bool:
    """Whether the elements of a row lie side by side; else those of a column do."""
    return matrix.stride(-1) == 1 or matrix.is_contiguous()


def block_and_row(signature: Signature, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """The bytes of a block, and of a row where the op makes rows; else 0."""
    row = 0 if signature.row is None else tensors[signature.row].nbytes
    return tensors[0].nbytes // signature.inputs[0].blocks, row


def _check_blocks(name: str, signature: Signature, tensors: Sequence[torch.Tensor]) -> None:
    ports = signature.inputs
    shapes = [tuple(_block_shape(name, port, tensor)) for port, tensor in zip(ports, tensors, strict=True)]
    if len({_sized(signature, port) for port in ports}) == 1 and len({*shapes}) > 1:
        found = " and ".join(map(str, sorted({*shapes})))
        raise TensorError(f"`{name}`: all blocks of a schedule are equally long, got {found}")
    for port, shape in zip(ports, shapes, strict=True):
        like = _sized(signature, port)
        if shape != shapes[like]:
            what = f"a block of `{port.name}` is {shape}, one of `{ports[like].name}` {shapes[like]}"
            raise TensorError(f"`{name}`: {what}, and they are equally long")


def dtype_of(signature: Signature, port: Port, tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """What a tensor of the op is of, given the inputs."""
    if port.unit is None or port.unit.element is None:
        found = tensors[_typed(signature, port)].dtype
        return made_of(found) if port.unit is not None and port.unit.is_made else found
    return dtype_named(port.unit.element)


def dtype_named(element: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, element)
    return found


def made_of(dtype: torch.dtype) -> torch.dtype:
    """What a product is of, where nothing else is declared."""
    return dtype_named(MADE.get(element_name(dtype), element_name(dtype)))


def block_elements(signature: Signature, port: Port, tensors: Sequence[torch.Tensor]) -> int:
    """How many elements a block of it has."""
    like = _sized(signature, port)
    if _is_made(port):
        rows, columns = _made_block(signature, port, tensors)
        return int(rows * columns)
    return tensors[like].numel() // signature.inputs[like].blocks


def _typed(signature: Signature, port: Port) -> int:
    """The input whose dtype it has, unless one is declared."""
    return 0 if port.unit is None else _input(signature, port.unit.typed)


def _sized(signature: Signature, port: Port) -> int:
    """The input whose blocks are as long."""
    return 0 if port.unit is None else _input(signature, port.unit.size)


def _input(signature: Signature, name: str) -> int:
    return next(number for number, port in enumerate(signature.inputs) if port.name == name)


def check_reduction(name: str, signature: Signature, dtype: torch.dtype, op: str) -> None:
    if signature.cast is not None:
        casts = [known.name for known in dtypes.ALL if known.casts]
        if element_name(dtype) not in casts:
            raise TensorError(f"`{name}` rounds {', '.join(casts)} to {signature.cast}, not {dtype}")
    if op != "sum" and not signature.has_reduction:
        raise no_meaning(name, signature, op)
    if not signature.combines:
        return
    known = dtypes.BY_NAME.get(element_name(dtype))
    if known is None or not known.ops:
        reduced = ", ".join(known.name for known in dtypes.REDUCED)
        raise TensorError(f"`{name}` reduces {reduced}, not {dtype}")
    if op not in known.ops:
        raise ReductionError(f"`{name}`: {dtype} has no `{op}`; it has {', '.join(known.ops)}")


def no_meaning(name: str, signature: Signature, op: str) -> ReductionError:
    """Of an operation that a call asks for where it has none to ask for."""
    why = "says itself how it combines" if signature.combines else "reduces nothing"
    return ReductionError(f"`{name}` {why}: op=`{op}` has no meaning")


def _block_shape(name: str, port: Port, tensor: torch.Tensor) -> list[Any]:
    if port.blocks == 1:
        return list(tensor.shape)
    if tensor.dim() == 0:
        raise TensorError(f"`{name}`: `{port.name}` is {port.blocks} blocks along its first dimension, got a scalar")
    if many := _counting(port, tensor):
        return list(tensor.shape[many:])
    if tensor.shape[0] % port.blocks:
        raise TensorError(
            f"`{name}`: `{port.name}` is {port.blocks} equal blocks along its first dimension of {tensor.shape[0]}"
        )
    return [tensor.shape[0] // port.blocks, *tensor.shape[1:]]


def _counting(port: Port, tensor: torch.Tensor) -> int:
    """How many of its first dimensions count the blocks, as those of `k[2 blocks, K blocks]` of shape (2, K, ...) do;
    0 where the first holds whole blocks.
    """
    if port.unit is None or port.blocks == 1 or tensor.shape[0] % port.blocks == 0:
        return 0
    counts = accumulate(tensor.shape, mul)
    return next((number for number, count in enumerate(counts, 1) if count == port.blocks), 0)


def output_shapes(signature: Signature, tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Shapes may be symbolic: the blocks are multiplied in, and `torch._check` states what has to divide."""
    return shapes(signature, tensors, signature.outputs)


def own_shapes(signature: Signature, tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Of what a call needs for itself."""
    return shapes(signature, tensors, signature.own)


def shapes(signature: Signature, tensors: Sequence[torch.Tensor], ports: Sequence[Port]) -> list[list[Any]]:
    return [_shape(signature, port, tensors) for port in ports]


def _shape(signature: Signature, port: Port, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """As the input whose blocks are as long, where there are as many."""
    if _is_made(port):
        return _stacked(port, _made_block(signature, port, tensors))
    number = _sized(signature, port)
    if port.unit is not None and port.blocks == signature.inputs[number].blocks:
        return list(tensors[number].shape)
    return _stacked(port, _block(signature, number, tensors))


def _is_made(port: Port) -> bool:
    """Whether a product makes it."""
    return port.unit is not None and port.unit.is_made and len(port.unit.dims) > 1


def _made_block(signature: Signature, port: Port, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The sides of a block that a product makes."""
    assert port.unit is not None
    return [_extent(signature, dim, tensors) for dim in port.unit.dims]


def _extent(signature: Signature, dim: Dim, tensors: Sequence[torch.Tensor]) -> Any:
    value = _side(signature, dim, tensors)
    return value * 2**dim.scale if dim.scale >= 0 else value // 2**-dim.scale


def _side(signature: Signature, dim: Dim, tensors: Sequence[torch.Tensor]) -> Any:
    """The side of the tensor that gives a size: its name says where to look."""
    number = _input(signature, dim.size)
    unit, block = signature.inputs[number].unit, _block(signature, number, tensors)
    return block[-1] if unit is not None and len(unit.dims) == 1 else block[-2:][dim.side]


def _block(signature: Signature, number: int, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The shape of a block of an input."""
    port, tensor = signature.inputs[number], tensors[number]
    shape: list[Any] = list(tensor.shape)
    if many := _counting(port, tensor):
        return shape[many:]
    if port.blocks > 1:
        must(tensor.dim() > 0, f"expected {port.blocks} blocks along dimension 0, got a number")
        must(tensor.shape[0] % port.blocks == 0, f"dimension 0, {tensor.shape[0]}, is no multiple of {port.blocks}")
        shape[0] = shape[0] // port.blocks
    return shape


def must(holds: Any, otherwise: str) -> None:
    """Raises TensorError (C951), which says `otherwise`, unless something holds of sizes. torch is told where they are
    symbolic, or where it does not: it imports sympy before it looks, which would cost the first call of every process
    0.4 s.
    """
    if holds is not True:
        torch._check_with(TensorError, holds, lambda: otherwise)


def _stacked(port: Port, block: list[Any]) -> list[Any]:
    if port.blocks == 1:
        shape = list(block)
    elif block:
        shape = [block[0] * port.blocks, *block[1:]]
    else:
        shape = [port.blocks]
    return [port.stack, *shape] if port.stack else shape


def described(name: str, inputs: Sequence[torch.Tensor], op: str) -> str:
    """A call in words, as ranks compare it."""
    shapes = (f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in inputs)
    return f"`{name}` of {', '.join(shapes)} by {op}{in_backward()}"


def in_backward() -> str:
    """Return words that tell a call of a backward pass from the same call outside of one; empty outside.

    A rank whose input requires no gradient makes no call in the backward pass; its next one would meet those of others.
    """
    return ", in a backward pass" if torch._C._current_graph_task_id() != -1 else ""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor whose last dimension is innermost, without gaps."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides)) if len(shape) else ()
