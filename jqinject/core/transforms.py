"""Transforms of a tensor before it is quantized: invertible linear maps of the features that one contraction sums over.

| transform | of the channels |
|---|---|
| by a factor, by a permutation | each, or their order |
| Hadamard | all, or blocks of them |
| by a matrix | all; orthogonal, so that its transpose undoes it |
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import check, component, state
from jqinject.ops import hadamard


class Transform(component.Component):
    """Abstract: an invertible linear map `T` of the last axis, in float32 inside and in the dtype of `x` outside.

    Before the quantizer of an input, `x T` is quantized; the weight that it meets is stored as `T^-1 w`, so that the
    function in float is that of `x w`. A subclass without Variables is a value, compared by its parts.
    """

    @abstractmethod
    def inverse(self, x: jax.Array) -> jax.Array:
        """`x T^-1`, as the call is `x T`.

        Args:
            x: `(..., channels)`, float.

        Raises:
            TypeError: the class does not define it.
        """
        raise TypeError(f"{type(self).__name__} has no inverse.\n  cure: define inverse")

    def dual(self, w: jax.Array) -> jax.Array:
        """`w T^-T`: the rows of a weight `(..., channels)` that contracts `x T` as it contracted `x`.

        That of an orthogonal map is the map itself.

        Args:
            w: `(..., channels)`, its last axis the one that is contracted.
        """
        return self(w)


@dataclass(frozen=True)
class Sized:
    """A transform with numbers of its own, as a declaration: made where it is declared, filled by `put` or by loading.

    Compared by value, so that inputs with equal declarations are transformed and quantized once for all their readers.

    Attributes:
        kind: the class of the transform, which takes the number of channels.
        channels: how many channels it transforms.
        label: tells transforms apart that hold different numbers.

    Example:
        >>> from jqinject.core.transforms import ChannelScale
        >>> Sized(ChannelScale, 3).made().factors[...].tolist()
        [1.0, 1.0, 1.0]
    """

    kind: Callable[[int], Transform]
    channels: int
    label: str = ""

    def made(self) -> Transform:
        """The transform, which leaves its input as it is."""
        return self.kind(self.channels)


class Chain(Transform):
    """Several transforms, one after the other.

    Args:
        parts: transforms; the first is applied first. As a declaration, transforms without numbers and `Sized` ones.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core.transforms import ChannelScale, Hadamard
        >>> chain = Chain((Hadamard(4, signs=(1, -1, 1, -1)), Hadamard(4)))
        >>> chain(jnp.array([3.0, 1.0, 2.0, 5.0]))
        Array([ 3., -1.,  2., -5.], dtype=float32)
        >>> len(Chain((Sized(ChannelScale, 4), Hadamard(4))).made().parts)
        2
    """

    parts: Any

    def __init__(self, parts: tuple[object, ...]) -> None:
        stateful = any(isinstance(part, nnx.Module) for part in parts)
        self.parts = nnx.data(nnx.List(parts)) if stateful else tuple(parts)

    def made(self) -> "Chain":
        """The chain that this one declares: see `Sized`."""
        return Chain(tuple(part.made() if isinstance(part, Sized | Chain) else part for part in self.parts))

    def __call__(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        return reduce(lambda x, part: part(x), self.parts, x)

    def inverse(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        return reduce(lambda x, part: part.inverse(x), reversed(tuple(self.parts)), x)

    def dual(self, w: jax.Array) -> jax.Array:
        """See `Transform`."""
        return reduce(lambda w, part: part.dual(w), self.parts, w)


def along(apply: Callable[[jax.Array], jax.Array], x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """A map of the last axis, on other axes of an array.

    Args:
        apply: the map, from `(..., channels)` to the same shape.
        x: the array.
        axes: the axes that it maps, together: channels count along the last of them first.

    Example:
        >>> import jax.numpy as jnp
        >>> along(lambda x: 2 * x[..., ::-1], jnp.array([[1.0, 2.0], [3.0, 4.0]]), (0, 1)).tolist()
        [[8.0, 6.0], [4.0, 2.0]]
    """
    last = tuple(axis % x.ndim for axis in axes)
    if last == (x.ndim - 1,):
        return apply(x)
    order = (*(axis for axis in range(x.ndim) if axis not in last), *last)
    moved = x.transpose(order)
    front = moved.shape[: x.ndim - len(last)]
    y = apply(moved.reshape(*front, math.prod(moved.shape[len(front) :])))
    return y.reshape(moved.shape).transpose([order.index(axis) for axis in range(x.ndim)])


class ChannelScale(Transform):
    """`x diag(factors)`: a factor for each channel, as those of SmoothQuant, AWQ and activation equalization.

    Args:
        channels: how many there are.

    Attributes:
        factors: float32, `(channels,)`; 1 until `put`.

    Example:
        >>> scale = ChannelScale(2)
        >>> scale.put(jnp.array([2.0, 0.5]))
        >>> x = jnp.array([[1.0, 1.0]])
        >>> scale(x).tolist(), scale.inverse(x).tolist(), scale.dual(x).tolist()
        ([[2.0, 0.5]], [[0.5, 2.0]], [[0.5, 2.0]])
    """

    def __init__(self, channels: int) -> None:
        self.factors = state.QuantStat(state.float_array(1.0, (channels,)))

    def put(self, factors: jax.Array) -> None:
        """Set the factors.

        Args:
            factors: finite and not 0, `(channels,)`.

        Raises:
            ValueError: another shape, 0, nan or inf.
        """
        factors = _of_shape(factors, self.factors, "ChannelScale: expected numbers")
        if not bool(jnp.isfinite(factors).all() and (factors != 0).all()):
            raise ValueError("ChannelScale: factors must be finite and not 0, or they have no inverse")
        self.factors.set_value(factors)

    def __call__(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        return (x.astype(jnp.float32) * self.factors.get_value()).astype(x.dtype)

    def inverse(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        return (x.astype(jnp.float32) / self.factors.get_value()).astype(x.dtype)

    def dual(self, w: jax.Array) -> jax.Array:
        """See `Transform`."""
        return self.inverse(w)


class Permutation(Transform):
    """`x[..., order]`: the channels in another order.

    Args:
        channels: how many there are.

    Attributes:
        order: int32, `(channels,)`; as they come until `put`.

    Example:
        >>> swap = Permutation(3)
        >>> swap.put(jnp.array([2, 0, 1]))
        >>> y = swap(jnp.array([10.0, 20.0, 30.0]))
        >>> y.tolist(), swap.inverse(y).tolist()
        ([30.0, 10.0, 20.0], [10.0, 20.0, 30.0])
    """

    def __init__(self, channels: int) -> None:
        self.order = state.QuantStat(jnp.arange(channels, dtype=jnp.int32))

    def put(self, order: jax.Array) -> None:
        """Set the order.

        Args:
            order: each channel once, `(channels,)`.

        Raises:
            ValueError: it is no permutation.
        """
        current = self.order.get_value()
        order = jnp.asarray(order)
        if order.shape != current.shape or not bool((jnp.sort(order) == jnp.arange(current.size)).all()):
            raise ValueError(f"Permutation: expected each of {current.size} channels once, got {order}")
        self.order.set_value(order.astype(jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        return jnp.take(x, self.order.get_value(), axis=-1)

    def inverse(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        return jnp.take(x, jnp.argsort(self.order.get_value()), axis=-1)


def _of_shape(value: jax.Array, variable: state.QuantStat, expected: str) -> jax.Array:
    """Numbers as float32; a ValueError if the shape differs from that of the numbers held."""
    shape = variable.get_value().shape
    if jnp.shape(value) != shape:
        raise ValueError(f"{expected} of shape {shape}, got {jnp.shape(value)}")
    return jnp.asarray(value, jnp.float32)


class Hadamard(Transform):
    """`x diag(signs) H`: the orthogonal Hadamard matrix of each block of channels, in `n log n` additions.

    `H` is `kron(T^T, Sylvester(n / k)) / sqrt(n)` for the table `T` of size `k`, as in QuaRot and Brevitas; of a power
    of two, Sylvester's matrix.

    Args:
        block_size: consecutive channels that are transformed together; None for all of them.
        signs: 1 or -1 for each channel of a block, by which it is multiplied before; None if absent. Static.
        seed: of signs that are drawn for as many channels as come; None if absent. The same everywhere and always.
        factor_dtype: the dtype that `1 / sqrt(n)` is rounded to, for libraries that build the matrix in 16 bits; None
            for float32. The inverse is the transpose, which then is off by twice the rounding.

    Raises:
        ValueError: there is no such matrix (`jqinject.ops.hadamard.table_size`), the blocks do not fill the channels,
            signs are not 1 and -1, one for each channel of a block, or there is a seed beside them.

    Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024; NVIDIA's
    TransformerEngine, whose random Hadamard transform of 16 channels is `Hadamard(16, signs=...)`.

    Example:
        >>> transform = Hadamard(2, signs=(1, -1))
        >>> y = transform(jnp.array([2.0, 0.0, 0.0, 2.0]))
        >>> y.round(2), transform.inverse(y).round(2)
        (Array([ 1.41,  1.41, -1.41,  1.41], dtype=float32), Array([ 2., -0.,  0.,  2.], dtype=float32))
        >>> x = jnp.eye(6, 8)
        >>> bool(jnp.allclose(Hadamard(seed=1).inverse(Hadamard(seed=1)(x)), x, atol=1e-6)), Hadamard(seed=1)
        (True, Hadamard(block_size=None, signs=None, factor_dtype=None, seed=1))
    """

    seed: int | None = None

    def __init__(
        self,
        block_size: int | None = None,
        signs: tuple[int, ...] | None = None,
        factor_dtype: Any = None,
        seed: int | None = None,
    ) -> None:
        if signs is not None:
            array = np.asarray(signs)
            if array.ndim != 1 or array.dtype.kind not in "iu" or not np.all(np.abs(array) == 1):
                raise ValueError(
                    f"Hadamard: signs must be 1 or -1, one for each channel of a block, got {signs!r:.80}"
                )
            signs = tuple(array.tolist())
            block_size = len(signs) if block_size is None else block_size
            if len(signs) != block_size:
                raise ValueError(
                    f"Hadamard: one sign for each of the {block_size} channels of a block, got {len(signs)}"
                )
        if block_size is not None:
            block_size = int(check.between(1, math.inf, check.integer)(block_size, "Hadamard", "block_size"))
            hadamard.table_size(block_size)
        self.block_size, self.signs = block_size, signs
        self.factor_dtype = None if factor_dtype is None else np.dtype(factor_dtype)
        if seed is not None:
            if signs is not None:
                raise ValueError(
                    f"Hadamard: seed = {seed!r} draws signs, and others are given.\n  cure: one of both"
                )
            self.seed = check.integer(seed, "Hadamard", "seed")

    def __call__(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        blocks = self._signed(self._blocks(x))
        return hadamard.transform(blocks, factor_dtype=self.factor_dtype).reshape(x.shape)

    def inverse(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        blocks = hadamard.transform(self._blocks(x), inverse=True, factor_dtype=self.factor_dtype)
        return self._signed(blocks).reshape(x.shape)

    def _signed(self, blocks: jax.Array) -> jax.Array:
        signs = self.signs
        if self.seed is not None:
            # The numbers of a bit generator never change, those of distributions may with NumPy's version.
            signs = 1 - 2 * (np.random.PCG64(self.seed).random_raw(blocks.shape[-1]) & 1).astype(np.int8)
        return blocks if signs is None else blocks * jnp.asarray(np.asarray(signs), blocks.dtype)

    def _blocks(self, x: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        size = channels if self.block_size is None else self.block_size
        if size < 1 or channels % size:
            raise ValueError(
                f"Hadamard: blocks of {size} do not fill {channels} channels.\n  cure: a block_size that divides them"
            )
        return x.reshape(*x.shape[:-1], channels // size, size)


#: How far `R^T R` may be from the identity.
ORTHOGONAL = 1e-4


class Orthogonal(Transform):
    """`x R` for an orthogonal matrix `R`: a learned rotation, for example.

    Args:
        channels: the size of the matrix.

    Attributes:
        matrix: float32, `(channels, channels)`; the identity until `put`.

    Example:
        >>> turn = Orthogonal(2)
        >>> turn.put(jnp.array([[0.0, 1.0], [-1.0, 0.0]]))
        >>> y = turn(jnp.array([[1.0, 2.0]]))
        >>> y.tolist(), turn.inverse(y).tolist()
        ([[-2.0, 1.0]], [[1.0, 2.0]])
    """

    def __init__(self, channels: int) -> None:
        self.matrix = state.QuantStat(jnp.eye(channels, dtype=jnp.float32))

    def put(self, matrix: jax.Array) -> None:
        """Set the matrix.

        Args:
            matrix: orthogonal, `(channels, channels)`.

        Raises:
            ValueError: another shape, or `R^T R` is not the identity.
        """
        matrix = _of_shape(matrix, self.matrix, "Orthogonal: expected a matrix")
        product = jnp.matmul(matrix.T, matrix, precision="highest")
        off = float(jnp.abs(product - jnp.eye(matrix.shape[-1])).max())
        if not off <= ORTHOGONAL:
            raise ValueError(
                f"Orthogonal: R^T R is {off:.2g} away from the identity, and at most {ORTHOGONAL} is rounding.\n"
                "  cure: jnp.linalg.qr(R)[0]"
            )
        self.matrix.set_value(matrix)

    def __call__(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        return self._times(x, self.matrix.get_value())

    def inverse(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        return self._times(x, self.matrix.get_value().T)

    def _times(self, x: jax.Array, matrix: jax.Array) -> jax.Array:
        return jnp.matmul(x.astype(jnp.float32), matrix, precision="highest").astype(x.dtype)
