"""HQQ: codes with zero points that are floats, packed across the first axis."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from jqinject.formats.checkpoint_errors import CONTRADICTION, CheckpointError
from jqinject.formats.files.tensors import Tensor, Tensors
from jqinject.formats.layouts.common import FLOATS, Settings
from jqinject.formats.stored_matrix import NumberFormat, Numbers, StoredMatrix

# Tensors of a layer that say what others say too, or nothing that its numbers need.
SETTINGS = (
    "nbits",
    "axis",
    "group_size",
    "channel_wise",
    "compute_dtype",
    "encoded_state_dict",
    "offload_meta",
    "optimize",
    "packing",
    "quant_scale",
    "quant_zero",
    "round_zero",
    "stores_quant_config",
    "unpack_view_dtype",
    "view_as_float",
    "quant_config",
)


def read_hqq(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """The matrices of HQQ's layout: `(codes - zero) * scale` in a view of the matrix.

    Groups lie along the rows of the view (axis 1) or down its columns (axis 0).

    Args:
        tensors: of the files.
        config: `quantization_config`; the tensors of each layer say the rest.

    Raises:
        CheckpointError: a layer's settings are unknown or contradict its tensors.
    """
    return [_matrix(tensors, module) for module in sorted(tensors.ending(".W_q"))]


def _matrix(tensors: Tensors, module: str) -> StoredMatrix:
    parts = [f"{module}.W_q", f"{module}.scale", f"{module}.zero", f"{module}.shape"]
    bits, axis = (_number(tensors, f"{module}.{name}") for name in ("nbits", "axis"))
    if bits not in (1, 2, 3, 4, 8) or axis not in (0, 1):
        raise CheckpointError(
            f"{module} has {bits} bits and axis {axis}; known are 1, 2, 3, 4 or 8 bits, axis 0 or 1"
        )
    shape = tuple(int(size) for size in tensors.take(f"{module}.shape", (None,)).read())
    if len(shape) < 2 or min(shape) < 1:
        raise CheckpointError(f"{module}.shape is {shape}, expected two sizes")
    count = math.prod(shape)
    size = _number(tensors, f"{module}.group_size", default=shape[-1] if axis == 1 else shape[0])
    if size < 1 or count % size:
        raise CheckpointError(f"{module}: groups of {size} do not divide {count} numbers")
    view = (count // size, size) if axis == 1 else (size, count // size)
    packed = tensors.take(parts[0], (None, None))
    scales = (view[0], 1) if axis == 1 else (1, view[1])
    scale, zero = (
        tensors.of_shape(f"{module}.{end}", [scales], f"groups of {size} of {shape}")
        for end in ("scale", "zero")
    )
    for end, each in (("scale", scale), ("zero", zero)):
        if each.dtype.name not in FLOATS:
            raise CheckpointError(
                f"{module}.{end} is {each.dtype.name}: statistics that are quantized are not read"
            )
    _check_rows(packed, module, bits, view)
    for name in SETTINGS:
        if f"{module}.{name}" in tensors:
            tensors.take(f"{module}.{name}")
    kind = NumberFormat("int", bits, signed=False, has_zero_point=True)
    decode = partial(_decode, packed, scale, zero, bits, axis, view)
    size_of = math.prod(packed.shape) * packed.dtype.itemsize
    made = StoredMatrix(f"{module}.weight", shape, kind, f"HQQ axis {axis}", tuple(parts), size_of, decode)
    # A view of `size` rows has whole rows of the matrix in each of its own, if these are so many.
    in_turn = size if axis == 0 and math.prod(shape[:-1]) % size == 0 else 0
    return replace(made, by_rows=axis == 1, in_turn=in_turn)


def _number(tensors: Tensors, name: str, default: int | None = None) -> int:
    if name not in tensors and default is not None:
        return default
    found = tensors.take(name).read()
    if found.size != 1 or not np.issubdtype(found.dtype, np.integer):
        raise CheckpointError(f"{name} is {found.dtype} {found.shape}, expected one integer")
    return int(found.reshape(()))


def _share(bits: int) -> int:
    """Codes in one stored integer."""
    return 10 if bits == 3 else 8 // bits


def _check_rows(packed: Tensor, module: str, bits: int, view: tuple[int, int]) -> None:
    rows = -(-view[0] // _share(bits))
    width = 4 if bits == 3 else 1
    columns = packed.shape[1] * packed.dtype.itemsize // width
    if packed.shape[0] != rows or columns != view[1] or (bits != 3 and view[0] % _share(bits)):
        raise CheckpointError(
            f"{module}.W_q has {packed.shape[0]}x{packed.shape[1]} of {packed.dtype.name}; {view[0]}x{view[1]} codes "
            f"of {bits} bits need {rows} rows{CONTRADICTION}"
        )


def _decode(
    packed: Tensor, scale: Tensor, zero: Tensor, bits: int, axis: int, view: tuple[int, int]
) -> Numbers:
    raw = np.ascontiguousarray(packed.read()).view(np.uint32 if bits == 3 else np.uint8)
    share = _share(bits)
    # The first rows of the codes are in the highest bits.
    shifts = [bits * (share - 1 - place) for place in range(share)]
    codes = np.concatenate([(raw >> shift) & (2**bits - 1) for shift in shifts]).astype(np.uint8)[: view[0]]
    block = (1, view[1]) if axis == 1 else (view[0], 1)
    return Numbers(codes, scale.read(), block, zero.read())
