"""Frozen 4-bit weights as `MatMulNBits`, onnxruntime's product of floats with packed integers in blocks.

y[..., n] = sum over k of a[..., k] * (b[n, k] - zero_point[n, k // block]) * scale[n, k // block]

Every contraction of floats with a stored weight is one operation of the traced program, `StoredDot`, whether a layer
or a model's own code contracts, so a rule of `evaluate` writes it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.dot import FrozenParam, quant_tensor_of
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.stored_dot import StoredDot, product_of
from jqinject.export._marks import OPERATOR, Parameters, Rule
from jqinject.ops.processes import ONE_DEVICE
from jqinject.quant_tensor import is_concrete

DOMAIN = "com.microsoft"
BLOCKS = (256, 128, 64, 32, 16)
#: A form -> the paths of the weights that have it.
Paths: TypeAlias = Mapping[FrozenForm, Sequence[str]]


def check_block(block: object, accuracy_level: object) -> None:
    """Refuse blocks and accuracies that onnxruntime does not have."""
    if block is not None and (isinstance(block, bool) or block not in BLOCKS):
        raise ValueError(
            f"onnx: block is {block!r}; expected None or the largest block of MatMulNBits, one of {BLOCKS[::-1]}.\n"
            "  cure: block=32, or the group size of the weights"
        )
    if accuracy_level not in range(5) or isinstance(accuracy_level, bool):
        raise ValueError(
            f"onnx: accuracy_level is {accuracy_level!r}; expected 0 to 4, the attribute of MatMulNBits.\n"
            "  cure: 0 contracts in the inputs' dtype; 4 lets onnxruntime round inputs to 8-bit integers"
        )


def has_four_bits(form: FrozenForm) -> bool:
    """Whether a frozen weight has integers of 3 or 4 bits."""
    return form.grid.is_integer and form.stored.packed_bits in (3, 4)


def paths_by_form(model: nnx.Module) -> Paths:
    """Return the paths of a model's frozen weights in 3 or 4 bits, by their form.

    Raises:
        ValueError: there are none.
    """
    paths: dict[FrozenForm, list[str]] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, graph=True)):
        if isinstance(variable, FrozenParam) and has_four_bits(variable.form):
            paths.setdefault(variable.form, []).append(".".join(map(str, path)))
    if not paths:
        raise ValueError(
            f"onnx(block=...): {type(model).__name__} has no frozen weight in integers of 3 or 4 bits; expected at "
            "least one.\n  cure: jqinject.freeze(model) of a model with such weights (Int4WeightPerGroupAbsMax, "
            "IntWeightSymmetricGroupQuant with bit_width = 4); or block=None"
        )
    return paths


def products(block: int, accuracy_level: int, paths: Paths) -> dict[str, Rule]:
    """Return the rule by which `evaluate` writes contractions of floats with weights in 3 or 4 bits.

    Args:
        block: the largest block.
        accuracy_level: the attribute of `MatMulNBits`.
        paths: of the weights, for error texts.
    """

    def write(operands: Sequence[jax.Array], facts: Parameters) -> Sequence[jax.Array] | None:
        product = product_of(facts["otherwise"])
        if product is None or not has_four_bits(product.form):
            return None
        where = f"onnx(block={block}): {', '.join(paths.get(product.form, ['a weight']))}"
        return [_written(where, product, operands, block, accuracy_level)]

    return {ONE_DEVICE.name: write}


def _written(
    where: str, product: StoredDot, operands: Sequence[jax.Array], block: int, accuracy_level: int
) -> jax.Array:
    """Return the product of floats with a stored weight, as the operator."""
    x, *arrays = operands
    dims = product.dims
    if dims.rhs_batch or not is_concrete(*arrays):
        raise ValueError(
            f"{where}: contracted in a loop over layers, or apart for each index of a batch axis; expected one matrix "
            "for all inputs.\n  cure: unroll the loop over layers; or block=None, which contracts dequantized floats"
        )
    with jax.ensure_compile_time_eval():
        weight = quant_tensor_of(dict(zip(product.names, arrays, strict=True)), product.form)
        parts = weight.int(), weight.scale, weight.zero_point
    depth, order = len(dims.rhs_contract), (*dims.rhs_free, *dims.rhs_contract)
    features = [weight.shape[axis] for axis in dims.rhs_free]
    n, k = math.prod(features), math.prod(weight.shape[axis] for axis in dims.rhs_contract)
    rows_of = (np.broadcast_to(np.asarray(part), weight.shape).transpose(order) for part in parts)
    codes, scale, zero = (part.reshape(n, k).astype(np.float32) for part in rows_of)
    size = next((size for size in BLOCKS if size <= block and _in_blocks(scale, zero, size)), None)
    if size is None:
        raise ValueError(
            f"{where}: scales or zero points vary within {BLOCKS[-1]} neighbours along the summed axes; expected "
            f"groups of a multiple of {BLOCKS[-1]} along the last of them.\n"
            f"  cure: weight_group_size={min(block, 32)}; or block=None, which contracts dequantized floats"
        )
    matrix = _matrix(codes, scale[:, ::size], zero[:, ::size], size, product.form.grid.signed)
    rows = jnp.moveaxis(x.astype(jnp.float32), dims.lhs_contract, range(-depth, 0))
    free = rows.shape[: rows.ndim - depth]
    if depth > 1 or not free:
        rows = rows.reshape(*(free or (1,)), k)
    attributes = {"K": k, "N": n, "bits": 4, "block_size": size, "accuracy_level": accuracy_level}
    y = OPERATOR.bind(
        rows,
        *map(jnp.asarray, matrix),
        operator="MatMulNBits",
        shape=(*rows.shape[:-1], n),
        dtype=np.dtype(np.float32),
        attributes=(*attributes.items(), ("_domain", DOMAIN)),  # the graph's builder takes the domain so
    )
    out = (*free, *features)
    return (y if y.shape == out else y.reshape(out)).astype(product.dtype)


def _in_blocks(scale: np.ndarray, zero: np.ndarray, size: int) -> bool:
    """Return whether scales and zero points are the same within each block of a row."""
    return all(
        np.array_equal(np.repeat(x[:, ::size], size, axis=1)[:, : x.shape[1]], x) for x in (scale, zero)
    )


def _matrix(
    codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, size: int, signed: bool
) -> list[np.ndarray]:
    """Return the inputs B, scales and, unless it is 8 everywhere, zero_points of the operator.

    Args:
        codes: (n, k), the integers.
        scale, zero: (n, blocks).
        size: of a block.
        signed: whether the integers are; the operator's are not, and 8 is its zero point.
    """
    codes, zero = (codes + 8, zero + 8) if signed else (codes, zero)
    matrix = [_packed(codes, size).reshape(len(codes), -1, size // 2), scale.reshape(-1)]
    if np.any(zero != 8):
        between = np.any(zero != np.clip(np.rint(zero), 0, 15))  # the operator takes floats too
        matrix.append(zero.reshape(-1) if between else _packed(zero, 2).reshape(-1))
    return matrix


def _packed(numbers: np.ndarray, multiple: int) -> np.ndarray:
    """Return integers below 16 two a byte, the first in the low half; rows are padded to a multiple."""
    padded = np.pad(numbers.astype(np.uint8), ((0, 0), (0, -numbers.shape[1] % multiple)))
    return padded[:, ::2] | padded[:, 1::2] << 4
