"""Scales in two levels, from the given tensor at every call: a minifloat for each block, and one float32 number that
they share.

`x` is rounded as `x * factor`, and `value = minifloat * block * shared`. Libraries take `factor` from the two levels in
different orders of float32 operations, which moves numbers on rounding ties: each order is a component here.

| component               | block scale                            | factor                |
|-------------------------|----------------------------------------|-----------------------|
| `NVFP4Scales`           | `e4m3(a * (G / 6))`, `G = 2688 / A`    | `1 / (s * (1 / G))`   |
| `FourOverSixScales`     | of two, the one with less error        | likewise              |
| `LeastErrorScales`      | of all, the one with the least error   | likewise              |
| `LeastNormalScales`     | `e4m3(max(a / 6 / t, 2**-6))`          | `(1 / t) / s`         |
| `EdenScales`            | `e4m3(S e4m3(a * (G / 6)))`, at random | `1 / (s * (1 / G))`   |

`a` is the largest magnitude of a block, `A` that of the tensor, `t = A / 2688`, and 2688 = 6 * 448.
"""

from collections.abc import Callable
from functools import reduce
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import _protocols, check, component
from jqinject.core.memory.memory import Dynamic
from jqinject.ops import groups, minifloat, power

E2M1_MAX, E4M3_MAX = 6.0, 448.0
LARGEST = float(np.finfo(np.float32).max)
SIXTH = float(np.float32(1) / np.float32(6))
#: Tensors below `SMALL` are multiplied by `RAISED` first: their reciprocals leave the range of normal numbers.
SMALL, RAISED = 2.0**-60, 2.0**60


class BlockScales(NamedTuple):
    """What a block is rounded with.

    Attributes:
        block: numbers of the scales' format, float32, 1 along the elements of a block.
        shared: the other level, float32, a scalar or one for each row.
        scale: their product, float32.
        factors: what `x` is multiplied by, one after the other, before it is rounded.
    """

    block: jax.Array
    shared: jax.Array
    scale: jax.Array
    factors: tuple[jax.Array, ...]

    def steps(self, x: jax.Array) -> jax.Array:
        """`x`, float32, in units of its scale; finite."""
        for factor in self.factors:
            x = x * factor
        return jnp.clip(x, -LARGEST, LARGEST)


class BlockScaleImpl(component.Component):
    """Abstract `block_scale_impl`: the scales of a block; if it has several, `errors` says what each number costs.

    Attributes:
        reaches_largest: whether the largest block scale is always the largest number of e4m3.
        keeps_negative_zero: whether a zero with a sign keeps it; negative numbers that are rounded to zero do.
    """

    reaches_largest: bool = False
    keeps_negative_zero = False

    def corrected(
        self, x: jax.Array, minifloats: jax.Array, scales: BlockScales, group_dim: int
    ) -> BlockScales:
        """Return the scales that rounded numbers are multiplied by; those that they were rounded with by default.

        Args:
            x: the numbers, in blocks.
            minifloats: what they were rounded to.
            scales: with these scales.
            group_dim: the axis that was cut into blocks.
        """
        return scales


def _raised(shared: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What numbers are multiplied by so that reciprocals of small ones are normal, and the inverse; exact."""
    small = shared < SMALL
    return jnp.where(small, RAISED, 1.0), jnp.where(small, 1 / RAISED, 1.0)


def to_e4m3(x: jax.Array, rounding: Callable[[jax.Array], jax.Array] = jnp.round) -> jax.Array:
    """Return numbers of e4m3 up to 448, float32, rounded to nearest with ties to even; the same in every program.

    Args:
        x: float32, not negative.
        rounding: another rounding to whole numbers, of steps of e4m3.

    Example:
        >>> to_e4m3(jnp.array([0.3, 500.0]))
        Array([3.125e-01, 4.480e+02], dtype=float32)
    """
    return jnp.minimum(minifloat.to_float_grid(jnp.minimum(x, E4M3_MAX), 3, 7, rounding), E4M3_MAX)


def sum_in_order(x: jax.Array, axis: int) -> jax.Array:
    """Return the sums along an axis, one number after the other, so that their rounding is the same everywhere."""
    return reduce(jnp.add, (jax.lax.index_in_dim(x, place, axis) for place in range(x.shape[axis])))


def sums_of_runs(x: jax.Array, size: int, axis: int) -> jax.Array:
    """Return the sum of each run of numbers along an axis, once for each of its numbers.

    Halves are added as long as there are two, so that the rounding is the same everywhere.

    Args:
        x: float array.
        size: the numbers of a run; an axis that is shorter is one run.
        axis: the axis, not negative.

    Example:
        >>> sums_of_runs(jnp.array([1.0, 2.0, 3.0]), 2, 0)
        Array([3., 3., 3.], dtype=float32)
    """
    length = x.shape[axis]
    width = groups.fitting_size(size, length)
    cut = groups.split_groups(x, width, axis)
    inner = groups.elements_axis(axis)
    while cut.shape[inner] % 2 == 0:
        first, second = jnp.split(cut, 2, inner)
        cut = first + second
    return groups.spread_groups(sum_in_order(cut, inner), width, axis, length)


class _Encoded:
    """Both maxima, raised, and what follows from the tensor's.

    Attributes:
        block, shared: raised.
        largest: what the tensor's becomes.
        encode: `largest / shared`, from 0 (which is 1) to the largest float32.
        decode: `1 / encode`.
        raised, lowered: factors of `_raised`.
    """

    def __init__(self, block: jax.Array, shared: jax.Array, e4m3_max: float) -> None:
        self.raised, self.lowered = _raised(shared)
        self.block, self.shared, self.largest = block * self.raised, shared * self.raised, E2M1_MAX * e4m3_max
        ratio = power.divide(jnp.full_like(self.shared, self.largest), self.shared)
        encode = jnp.minimum(ratio, LARGEST * self.lowered)
        self.encode = jnp.where(encode == 0, 1.0, encode)
        self.decode = power.divide(jnp.ones_like(self.encode), self.encode)

    def scales(self, block: jax.Array) -> BlockScales:
        """The scales, given those of the blocks."""
        factor = jnp.minimum(power.divide(jnp.ones_like(block), block * self.decode), LARGEST * self.lowered)
        shared = power.divide(self.shared, self.largest)
        return BlockScales(block, shared * self.lowered, block * shared * self.lowered, (self.raised, factor))


@component.component
class NVFP4Scales(BlockScaleImpl):
    """NVFP4's scales as TransformerEngine computes them: `s = e4m3(a * (G * (1 / 6)))`, `factor = 1 / (s * (1 / G))`.

    `G = 2688 / A`, at most the largest float32. Blocks far below the largest one get the scale 0.

    Args:
        folded: multiply `a` by `G * (1 / 6)`, as its kernels and its PyTorch side do; False divides first,
            `(a / 6) * G`, as its JAX side does.

    Source: NVIDIA's TransformerEngine, `NVFP4QuantizerRef` and `transformer_engine.jax.quantize.NVFP4Quantizer`.

    Example:
        >>> (scales,) = NVFP4Scales()(jnp.array([3.0, 6.0]), jnp.float32(6.0))
        >>> scales.block, scales.shared
        (Array([224., 448.], dtype=float32), Array(0.00223214, dtype=float32))
    """

    reaches_largest = True
    folded: bool = True

    def __call__(self, block: jax.Array, shared: jax.Array) -> tuple[BlockScales, ...]:
        """The scales.

        Args:
            block: the largest magnitude of each block, float32.
            shared: that of the tensor, or of each row; broadcasts.
        """
        encoded = _Encoded(block, shared, E4M3_MAX)
        folded = encoded.block * (encoded.encode * SIXTH)
        scale = folded if self.folded else power.divide(encoded.block, E2M1_MAX) * encoded.encode
        return (encoded.scales(to_e4m3(scale)),)


@component.component
class FourOverSixScales(BlockScaleImpl):
    """Two scales to choose from: the largest number of a block becomes 6, or 4, whose neighbours are nearer.

    `s6 = e4m3((a / 6) * G)` and `s4 = e4m3(1.5 * (a / 6) * G)` with `G = 6 * e4m3_max / A`; ties take `s6`.

    Args:
        error: what is least over a block: "mae", the sum of magnitudes of errors, or "mse", that of squares.
        e4m3_max: the block scale of the tensor's largest number: 448, or 256, which leaves room for `s4`.
        scaled_error: measure errors in units of the shared scale, before the division by it, as fast kernels do.

    Raises:
        ValueError: another `error`, or another `e4m3_max`.

    Source: Cook et al., "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling", 2025; NVIDIA's
    TransformerEngine, `nvfp4_use_4over6`.

    Example:
        >>> six, four = FourOverSixScales()(jnp.array([3.0, 6.0]), jnp.float32(6.0))
        >>> six.block, four.block
        (Array([224., 448.], dtype=float32), Array([320., 448.], dtype=float32))
    """

    error: Annotated[Literal["mae", "mse"], check.among(("mae", "mse"), "'mae' or 'mse'")] = "mae"
    e4m3_max: Annotated[float, check.among((256, 448), "448 or 256", check.number)] = E4M3_MAX
    scaled_error: bool = False

    def __call__(self, block: jax.Array, shared: jax.Array) -> tuple[BlockScales, ...]:
        """Both scales; arguments as of `NVFP4Scales`."""
        encoded = _Encoded(block, shared, self.e4m3_max)
        base = power.divide(encoded.block, E2M1_MAX) * encoded.encode
        return tuple(encoded.scales(to_e4m3(times * base)) for times in (1.0, 1.5))

    def errors(
        self, x: jax.Array, minifloats: jax.Array, scales: BlockScales, shared: jax.Array
    ) -> jax.Array:
        """What each number adds to the error of its block.

        Args:
            x: in blocks, float32.
            minifloats: what it was rounded to.
            scales: with these scales.
            shared: the largest magnitude of the tensor, or of each row.
        """
        encoded = _Encoded(shared, shared, self.e4m3_max)
        rounded = minifloats * scales.block
        if self.scaled_error:
            off = rounded - x * encoded.raised * encoded.encode
        else:
            off = power.divide(rounded * encoded.shared, encoded.largest) - x * encoded.raised
        # The bound keeps a compiler from fusing the square with the sum that follows.
        return jnp.abs(off) if self.error == "mae" else jax.lax.clamp(0.0, off * off, jnp.inf)


#: Numbers of e4m3 below and above the one at which the largest number of a block becomes 6; an octave has 8. With a
#: scale of less than 0.35 of that one, the clamped largest number alone has more than the squared error of 15 others,
#: at most 1 each. Where nothing is clamped, half of a scale is no worse, so none above an octave is needed. Both have
#: one more for what e4m3 rounds.
_BELOW, _ABOVE = 14, 9


@component.component
class LeastErrorScales(BlockScaleImpl):
    """The number of e4m3 with the least squared error of a block, of all that can have it.

    `s = argmin sum (x - q)^2` over the numbers of e4m3 from 0.35 to 2 times `e4m3((a / 6) * G)`, `G = 2688 / A`: no
    other can be better. The least scale is tried first, and the first of equals counts.

    This is so for blocks of 16 numbers; larger ones may have a better scale below.

    Source: the exhaustive search that NVIDIA's ModelOpt offers for NVFP4's weights. Cook et al., "Four Over Six", 2025,
    choose of two.

    Example:
        >>> from jqinject import quant
        >>> from jqinject.nn import QuantIdentity
        >>> exact = QuantIdentity(act_quant=quant.NVFP4TrainingAct.let(block_scale_impl=LeastErrorScales))
        >>> exact(jnp.array([6.0, 5.0, 5.0, 5.0, 5.0]))[:2]  # 6 * 384 / 448
        Array([5.1428576, 5.1428576], dtype=float32)
    """

    def __call__(self, block: jax.Array, shared: jax.Array) -> tuple[BlockScales, ...]:
        """All scales that are tried; arguments as of `NVFP4Scales`."""
        encoded = _Encoded(block, shared, E4M3_MAX)
        at_six = to_e4m3(power.divide(encoded.block, E2M1_MAX) * encoded.encode)
        code = jax.lax.bitcast_convert_type(at_six.astype(jnp.float8_e4m3fn), jnp.uint8).astype(jnp.int32)

        def scales(step: int) -> BlockScales:
            # The codes of e4m3 ascend with its numbers: 0 is 0 and 126 is 448.
            neighbour = jnp.where(code > 0, jnp.clip(code + step, 1, 126), 0).astype(jnp.uint8)
            return encoded.scales(
                jax.lax.bitcast_convert_type(neighbour, jnp.float8_e4m3fn).astype(jnp.float32)
            )

        return tuple(scales(step) for step in range(-_BELOW, _ABOVE + 1))

    def errors(
        self, x: jax.Array, minifloats: jax.Array, scales: BlockScales, shared: jax.Array
    ) -> jax.Array:
        """What each number adds to the error of its block; arguments as of `FourOverSixScales.errors`."""
        off = minifloats * scales.scale - x
        return jax.lax.clamp(0.0, off * off, jnp.inf)


@component.component
class LeastNormalScales(BlockScaleImpl):
    """NVFP4's scales as torchao computes them: at least 2**-6, so that no block gets the scale 0.

    `s = e4m3(clip(a / 6 / t, 2**-6, 448))` and `factor = (1 / t) / s`, with `t = A / 2688` or, in one level, 1.

    Args:
        two_levels: whether the tensor has a scale of its own.

    Source: torchao, `torchao.prototype.mx_formats.nvfp4_tensor`.

    Example:
        >>> (scales,) = LeastNormalScales(two_levels=False)(jnp.array([3.0, 0.0]), jnp.float32(3.0))
        >>> scales.block
        Array([0.5     , 0.015625], dtype=float32)
    """

    keeps_negative_zero = True
    least = 2.0**-6
    two_levels: bool = True

    @property
    def reaches_largest(self) -> bool:  # type: ignore[override]
        """Whether the largest block scale is always 448."""
        return self.two_levels

    def __call__(self, block: jax.Array, shared: jax.Array) -> tuple[BlockScales, ...]:
        """The scales; arguments as of `NVFP4Scales`."""
        ones = jnp.ones_like(shared)
        raised, lowered = _raised(shared)
        shared = power.divide(shared * raised, E2M1_MAX * E4M3_MAX)
        shared = jnp.where(shared == 0, 1.0, shared)
        if not self.two_levels:
            shared = raised = lowered = ones
        scale = to_e4m3(jnp.maximum(power.divide(power.divide(block * raised, E2M1_MAX), shared), self.least))
        factor = power.divide(jnp.broadcast_to(power.divide(ones, shared), jnp.shape(scale)), scale)
        return (BlockScales(scale, shared * lowered, scale * shared * lowered, (raised, factor)),)


#: The largest number of a block becomes `6 / EDEN_CLIP`, a little beyond 6: of 16 normal numbers the squared error is
#: least there. `EDEN_E4M3_MAX` leaves room for `S`, which is at most 1.25.
EDEN_CLIP, EDEN_E4M3_MAX = 0.988, 256.0


@component.component
class EdenScales(BlockScaleImpl):
    """MS-EDEN's scales: numbers are rounded to nearest, and the scales, corrected for what is lost, at random.

    Numbers are rounded with `s = e4m3(0.988 (a / 6) G)`, `G = 6 * 256 / A`; then block scales are

        e4m3(S s),    S = <x, x> / <x, q>    over `correction_size` numbers, `q` their rounded ones

    so that `<x, S q> = <x, x>`: what rounding adds is orthogonal to `x`. If `x` went through a random rotation of these
    numbers, nothing of it is left on average over rotations, and what e4m3 adds averages out over keys. For this,
    `scale_to_int_impl` rounds stochastically. There is one random number for a block, and the squared error is about
    half of that of numbers that are rounded stochastically themselves.

    Args:
        scale_to_int_impl: how block scales are rounded, in steps of e4m3: `StochasticRoundSte(...)`.
        group_size: elements of a block.
        correction_size: numbers that share `S`: those that were rotated together.

    Raises:
        ValueError: `group_size` is that of blocks over two axes, or does not divide `correction_size`.

    Source: Panferov et al., 2026, "Quartet II: Accurate LLM Pre-Training in NVFP4 by Improved Unbiased Gradient
    Estimation"; Vargaftik et al., 2022, "EDEN". Differs from the authors' program, where a
    block whose `s` becomes 0 is lost (here `s` is not rounded then), and `S` weighs all blocks alike, whatever their
    scales.

    Example:
        >>> from jqinject import quant
        >>> from jqinject.nn import QuantIdentity
        >>> eden = QuantIdentity(act_quant=quant.NVFP4TrainingActEden)
        >>> x = jnp.array([6.0, 1.24, 1.24, 1.24])  # rounded to 1
        >>> y = eden(x)
        >>> float(y[0] / y[1]), abs(float((x * y).sum() / (x * x).sum()) - 1) < 0.1
        (6.0, True)
    """

    scale_to_int_impl: _protocols.Rounding
    group_size: Annotated[int, groups.checked_group_size] = 16
    correction_size: Annotated[int, groups.checked_group_size] = 128

    def __post_init__(self) -> None:
        size = self.group_size
        if self.correction_size % size:
            raise ValueError(
                f"EdenScales: blocks of {size} do not fill the {self.correction_size} numbers of a correction.\n"
                f"  cure: correction_size = {8 * size}, a multiple of group_size, as the block_size of the Hadamard"
            )

    def __call__(self, block: jax.Array, shared: jax.Array) -> tuple[BlockScales, ...]:
        """The scales that numbers are rounded with; arguments as of `NVFP4Scales`."""
        encoded = _Encoded(block, shared, EDEN_E4M3_MAX)
        scale = jnp.minimum(power.divide(encoded.block, E2M1_MAX) * encoded.encode * EDEN_CLIP, E4M3_MAX)
        rounded = to_e4m3(scale)
        return (encoded.scales(jnp.where(rounded == 0, scale, rounded)),)

    def corrected(
        self, x: jax.Array, minifloats: jax.Array, scales: BlockScales, group_dim: int
    ) -> BlockScales:
        """The scales that numbers are multiplied by; see `BlockScaleImpl.corrected`."""
        x = jax.lax.stop_gradient(x).astype(jnp.float32)
        numbers, rounded = scales.steps(x) * scales.block, minifloats * scales.block
        # The bounds keep a compiler from fusing products with the sums that follow.
        products = (jax.lax.clamp(0.0, numbers * factor, jnp.inf) for factor in (numbers, rounded))
        elements = groups.elements_axis(group_dim) % minifloats.ndim
        blocks = self.correction_size // self.group_size
        square, product = (
            sums_of_runs(sum_in_order(terms, elements), blocks, elements - 1) for terms in products
        )
        factor = jnp.where(product > 0, power.divide(square, jnp.where(product > 0, product, 1.0)), 1.0)
        block = to_e4m3(scales.block * factor, self.scale_to_int_impl)
        return scales._replace(block=block, scale=block * scales.shared)


@component.component
class RuntimeDynamicTwoLevelScaling(Dynamic):
    """A scale for each block of the given tensor: a minifloat, times a float32 number that all share. No state.

    Args:
        group_size: elements of a block along `group_dim`, or both lengths of a block.
        group_dim: the axis to cut.
        input_view_impl: the grouping view.
        scaling_stats_impl: the statistic of a block, its largest magnitude, keeping the reduced axes with size 1.
        block_scale_impl: from these and the tensor's to the scales: `NVFP4Scales`, `FourOverSixScales`,
            `LeastErrorScales`, `LeastNormalScales`, `EdenScales`.
        shared_per_row: every row, the numbers along `group_dim`, has a shared scale of its own.

    Raises:
        ValueError: a group size below 1.

    Example:
        >>> from jqinject.core import AbsMax, DynamicOverSubChannelBlockView, NVFP4Scales
        >>> scaling = RuntimeDynamicTwoLevelScaling(
        ...     2, -1, DynamicOverSubChannelBlockView(2, -1), AbsMax(stats_reduce_dim=-1, keepdim=True), NVFP4Scales())
        >>> scaling(jnp.array([1.0, -3.0, 6.0, 0.0])).tolist()
        [[0.5], [1.0]]
    """

    group_size: int | tuple[int, int]
    group_dim: int
    input_view_impl: _protocols.View
    scaling_stats_impl: _protocols.Stat
    block_scale_impl: BlockScaleImpl
    shared_per_row: bool = False

    @property
    def scale_dtype(self) -> np.dtype | None:
        """e4m3, if the largest of the block scales is its largest number."""
        is_known = self.block_scale_impl.reaches_largest and not self.shared_per_row
        return np.dtype(jnp.float8_e4m3fn) if is_known else None

    def candidates(self, x: jax.Array) -> tuple[tuple[BlockScales, ...], jax.Array]:
        """The scales that `x` may have, one or several, and the largest magnitude of `x`, or of each row."""
        block = jax.lax.stop_gradient(self.number(x).statistic)
        axis = groups.elements_axis(self.group_dim) - 1 if self.shared_per_row else None
        shared = jnp.max(block, axis=axis, keepdims=self.shared_per_row, initial=0.0)
        return self.block_scale_impl(block, shared), shared

    def __call__(self, x: jax.Array, threshold: Any = None) -> jax.Array:
        """The scales of `x`, float32, in the grouped shape with 1 along the elements of a block; of several the first.

        Args:
            x: float array.
            threshold: unused: the block scales know what they map to.
        """
        return self.candidates(x)[0][0].scale
