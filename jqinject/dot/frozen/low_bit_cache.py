"""`LowBitCache`: keys or values of a model's cache in low bits, with a scale for each position and head.

It stands in the place of the float array, in a dict that a model takes and returns or in a Variable. The payload and
the scales are those of frozen weights (`frozen_numbers`), but for the scales' axes: every row of features has its own,
so that rows are written and read one by one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jqinject.core.transforms import Transform
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_numbers import ScaleForms, frozen_numbers, has_low_bits
from jqinject.dot.frozen.frozen_param import LowBitArray
from jqinject.quant_tensor import is_grouped, is_quantized


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class LowBitCache(LowBitArray):
    """An array of a cache in low bits: its payload, and what each row along the last axis is scaled by.

    It answers `shape`, `dtype`, `ndim`, `size` and `sharding` as the float array did; `nbytes` is what it takes in
    memory. Read as an array (`jnp.asarray`, an index), it is dequantized. A pytree: it passes `jax.jit`, `lax.scan`
    and `jax.device_put` as the dict of its arrays does.

    Attributes:
        numbers: arrays by name: `value` (the payload), `scale`, and maybe `zero_point`.
        form: what is static in them.
        transform: of the features, through which the rows went before they were quantized, and which reading them as an
            array undoes; None without one.

    Example:
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> row = IntQuantTensor.from_int(jnp.array([[[[2, -1]]]], jnp.int8), jnp.array([[[[0.5]]]]))
        >>> cache = LowBitCache.of(row)
        >>> cache.shape, cache.dtype.name, cache.nbytes, cache[0, 0, 0]
        ((1, 1, 1, 2), 'float32', 6, Array([ 1. , -0.5], dtype=float32))
    """

    numbers: dict[str, Any]
    form: FrozenForm = field(metadata={"static": True})
    transform: Transform | None = field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, x: Any, has_zero_point: bool = False, transform: Transform | None = None) -> "LowBitCache":
        """The rows of a quantized array.

        Args:
            x: a QuantTensor of at least 2 axes.
            has_zero_point: whether its zero point may be another than 0.
            transform: through which the rows went before they were quantized, if reading has to undo it.

        Raises:
            ValueError: it has no payload of at most 8 bits; scales along the features, or groups of several rows; a
                transform that holds numbers.
        """
        _check(x)
        if isinstance(transform, nnx.Module):
            raise ValueError(
                f"a cache undoes its transform by itself, and {type(transform).__name__} holds numbers of the model.\n"
                "  cure: pre_transform = jqinject.core.transforms.Hadamard(seed=0), or undo_transform = False"
            )
        numbers, form = frozen_numbers(x, (), has_zero_point, None, ScaleForms())
        own = 1 if form.groups is None else 2  # the axes of a row, as stored
        for name in numbers.keys() - {"value"}:
            array = numbers[name]
            if array.shape[-1] != 1:
                raise ValueError(
                    f"a cache has a scale for each row of features, this quantizer has {array.shape[-1]} for each.\n"
                    "  cure: a dynamic quantizer of rows or groups, such as Int8DynamicActPerRowFloat"
                )
            rows = (*x.shape[:-1], *array.shape[array.ndim - own :])
            numbers[name] = jnp.broadcast_to(array, rows)
        return cls(numbers, form, transform)

    def dequantized(self) -> jax.Array:
        """The numbers as an array of the cache's dtype, without the transform."""
        rows = self.quant_tensor().value
        return rows if self.transform is None else self.transform.inverse(rows)

    def with_numbers(self, numbers: Mapping[str, object]) -> "LowBitCache":
        """The same form with other numbers."""
        return replace(self, numbers=dict(numbers))

    def fits(self, rows: "LowBitCache") -> bool:
        """Whether rows are stored in the same form: they may have other sizes, but for the features."""
        shape = tuple(rows.numbers["value"].shape)
        alike = self.numbers.keys() == rows.numbers.keys() and self.transform == rows.transform
        return alike and self.ndim == rows.ndim and self.form.fitted(shape) == rows.form.fitted(shape)

    @property
    def stand_in(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of the float array in whose place it stands."""
        payload = self.numbers["value"]
        sharding = None if isinstance(payload, jax.ShapeDtypeStruct) else jax.typeof(payload).sharding
        if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.empty:
            return jax.ShapeDtypeStruct(self.shape, self.dtype)
        spec = self.form.partition_spec(sharding.spec, tuple(payload.shape))
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding.update(spec=spec))

    @property
    def nbytes(self) -> int:
        """Bytes of payload, scales and zero points."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.numbers.values())

    @property
    def sharding(self) -> Any:
        """Of the payload."""
        return self.numbers["value"].sharding

    def __getitem__(self, index: object) -> jax.Array:
        return self.dequantized()[index]

    def __jax_array__(self) -> jax.Array:
        return self.dequantized()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.dequantized(), dtype=dtype)

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name}={x.dtype}{list(x.shape)}" for name, x in self.numbers.items())
        return f"LowBitCache({self.dtype}{list(self.shape)}: {arrays})"


def is_low_bit_cache(x: object) -> bool:
    """Whether something is a `LowBitCache`: for `is_leaf=`."""
    return isinstance(x, LowBitCache)


def _check(x: object) -> None:
    """Refuse what has no payload, or shares scales between rows in groups."""
    if is_grouped(x) and x.groups.dim % x.ndim != x.ndim - 1:
        raise ValueError(
            "a cache is written row by row, and groups of several rows are not known at one of them.\n"
            "  cure: groups along the features, group_dim = -1"
        )
    if not has_low_bits(x):
        bits = x.bit_width if is_quantized(x) else None
        kind = f"{bits} bits" if isinstance(bits, int) else type(x).__name__
        raise ValueError(
            f"a cache in low bits needs a payload of at most 8 bits, got {kind}.\n"
            "  cure: a quantizer such as Int8DynamicActPerRowFloat"
        )
