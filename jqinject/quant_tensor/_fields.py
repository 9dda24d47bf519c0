"""The fields of an `IntQuantTensor`: normalization, checks and repr."""

import difflib
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.processes import on_host
from jqinject.quant_tensor._integer_fields import OnIntegers
from jqinject.quant_tensor.bit_widths import BitWidth
from jqinject.quant_tensor.concrete import brief, hidden, is_concrete
from jqinject.quant_tensor.validity import integer_bounds, pre_round_integers

FIELDS = ("value", "scale", "zero_point", "bit_width", "signed", "training")


def changed_fields(tensor: OnIntegers, changes: dict[str, Any]) -> dict[str, Any]:
    """All fields of `tensor`, some replaced; TypeError for an unknown name."""
    for name in changes:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"IntQuantTensor has no field {name!r}; it has {', '.join(FIELDS)}.{hint}")
    return {field: changes.get(field, getattr(tensor, field)) for field in FIELDS}


def flatten_with_keys(tensor: OnIntegers) -> tuple[list[tuple[Any, Any]], tuple[Any, bool, bool]]:
    """Children with their names, and the static fields; the static bit width is None if it is a child."""
    static_bits = tensor.bit_width if isinstance(tensor.bit_width, int) else None
    names = FIELDS[:4] if static_bits is None else FIELDS[:3]
    children = [(jax.tree_util.GetAttrKey(name), getattr(tensor, name)) for name in names]
    return children, (static_bits, tensor.signed, tensor.training)


def float_value(value: Any, kind: str = "IntQuantTensor") -> jax.Array:
    """`value` as a float array; Python floats and lists become float32."""
    array = value if isinstance(value, jax.Array | np.ndarray) else np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        how = {
            "IntQuantTensor": "From integers: IntQuantTensor.from_int(integers, scale, zero_point, bit_width, "
            "signed=...).",
            "CodebookQuantTensor": "From indices: CodebookQuantTensor.from_codes(codes, scale, codebook).",
            "FloatQuantTensor": "From minifloats: FloatQuantTensor.from_payload(payload, scale).",
        }
        raise TypeError(
            f"{kind}(value=...) got {array.dtype} of shape {array.shape}, expected the dequantized floats. "
            + how[kind]
        )
    if isinstance(value, jax.Array | np.ndarray):
        return jnp.asarray(value)
    return jnp.asarray(value, jnp.float32)


def metadata(x: Any, shape: tuple[int, ...], name: str) -> jax.Array:
    """Scale or zero point as a float32 array that broadcasts against a value of this shape."""
    known = isinstance(x, jax.Array) and x.dtype == jnp.float32 and not x.aval.weak_type
    array = x if known else jnp.asarray(x, jnp.float32)
    if array.ndim and not broadcasts_to(array.shape, shape):
        raise ValueError(
            f"{name} of shape {array.shape} does not broadcast against the value of shape {shape}. Expected "
            "shape () for a whole tensor, or size 1 on every axis but those it varies over, for example "
            f"{(*(1,) * (len(shape) - 1), shape[-1]) if shape else ()} for one {name} a channel on the last "
            "axis."
        )
    return array


@lru_cache(maxsize=1024)
def are_metadata(shape: tuple[int, ...], scale: Any, zero_point: Any) -> bool:
    """Whether scale and zero point, of these abstract values, can be kept as they are beside a value of a shape."""
    both = scale, zero_point
    floats = all(x.dtype == jnp.float32 and not x.weak_type for x in both)
    return floats and all(not x.shape or broadcasts_to(x.shape, shape) for x in both)


@lru_cache(maxsize=1024)
def broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether an array of `shape` broadcasts against `target` without enlarging it."""
    offset = len(target) - len(shape)
    return offset >= 0 and all(n in (1, target[offset + axis]) for axis, n in enumerate(shape))


def checked_bit_width(bit_width: Any) -> BitWidth:
    """A Python int for a whole Python or NumPy number, else a float32 array."""
    if isinstance(bit_width, int | float | np.number) and float(bit_width).is_integer():
        if bit_width < 1:
            raise ValueError(f"bit_width must be at least 1, got {bit_width}.")
        return int(bit_width)
    return jnp.asarray(bit_width, jnp.float32)


def format_name(bit_width: BitWidth, signed: bool) -> str:
    """For example "8-bit signed"."""
    bits = f"{brief(bit_width)}-bit" if is_concrete(bit_width) else "learned bit width,"
    return f"{bits} {'signed' if signed else 'unsigned'}"


def describe(tensor: OnIntegers) -> str:
    """The repr: format, shape, metadata, values. Works for traced tensors and for pytree prefixes too."""
    fields = (tensor.value, tensor.scale, tensor.zero_point)
    if not all(isinstance(field, jax.Array | np.ndarray) for field in fields):
        names = ("value", "scale", "zero_point", "bit_width", "signed", "training")
        return f"IntQuantTensor({', '.join(f'{name}={getattr(tensor, name)!r}' for name in names)})"
    head = f"{format_name(tensor.bit_width, tensor.signed)}, {tensor.dtype.name}{list(tensor.shape)}"
    training = ", training" if tensor.training else ""
    body = hidden(tensor.value) or _values(tensor.value)
    return (
        f"IntQuantTensor({head}, scale={brief(tensor.scale)}, "
        f"zero_point={brief(tensor.zero_point)}{training},\n  value={body})"
    )


def _values(value: jax.Array) -> str:
    return np.array2string(
        np.asarray(value), precision=6, separator=", ", threshold=20, edgeitems=2, prefix="  value="
    )


def why_invalid(tensor: OnIntegers) -> str:
    """The error text of a concrete tensor whose value is not on its grid."""
    exact = on_host(pre_round_integers(tensor.value, tensor.scale, tensor.zero_point))
    lower, upper = integer_bounds(tensor.bit_width, tensor.signed)
    with np.errstate(invalid="ignore"):  # inf - inf
        off = np.max(np.abs(exact - np.round(exact)))
    two = " (two different ones, or one of them everywhere)" if float(tensor.bit_width) < 2 else ""
    return (
        f"QuantTensor not valid: value / scale + zero_point lies up to {off:.3g} away from an integer and "
        f"runs from {exact.min():.6g} to {exact.max():.6g}, while "
        f"{format_name(tensor.bit_width, tensor.signed)} holds integers from {float(lower):.0f} to "
        f"{float(upper):.0f}{two}. Operands of different scales (allowed in training mode) and a scale along "
        "the wrong axis lead here. Quantize the tensor again, or use `.value` where no integers are needed."
    )
