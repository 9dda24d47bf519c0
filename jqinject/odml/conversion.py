"""`OdmlConversion`: converts a trained or calibrated model for a device compiler.

The compiler knows a composite operation around quantizing and dequantizing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import ClippingRange, RangeScaling, RescalingIntQuant, scale_and_zero_point
from jqinject.core.component import InnerModule, component
from jqinject.odml.qat import Model, OdmlPolicy, OdmlQat, is_dynamic
from jqinject.ops.ste import straight_through
from jqinject.program import (
    HELD,
    Call,
    OpQuantizers,
    Quantizers,
    Site,
    Tracked,
    change_class,
    find_sites,
    quantized_class,
)
from jqinject.program.tracked_value import Evaluate
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant_tensor import as_array, is_concrete

COMPOSITE_NAME = "quant.fake_quant"


@component
class FakeQuantMarker(InnerModule):
    """One `quant.fake_quant`, in `model.op_quant[name]`: everything that is known before the program runs.

    Attributes:
        scale: of the tensor, flat; None if the range is found at run time.
        zero_point: flat; None if the range is symmetric.
        shape: of scale and zero point, for broadcasting with the tensor.
        dimension: the axis along which the scale varies, if any.
        is_weight: whether the tensor is a weight.
        dynamic: quantizes the tensor if the range is found at run time.
        bit_width: of the integers, which are signed.
        least: the smallest integer; None for that of the bit width.
        batch_axes: how many leading axes `jax.vmap` has added to the tensor.
    """

    scale: tuple[float, ...] | None = None
    zero_point: tuple[int, ...] | None = None
    shape: tuple[int, ...] = ()
    dimension: int | None = None
    is_weight: bool = False
    dynamic: RescalingIntQuant | None = None
    bit_width: int = 8
    least: int | None = None
    batch_axes: int = 0

    def attributes(self) -> dict[str, object]:
        """The compiler's attributes: `scale` (float32, empty if dynamic), `dtype` ("i4", "i8", "i16"), `narrow_range`
        (true for weights), and if present `zero_point` (int64) and `quantization_dimension`."""
        attributes: dict[str, object] = {
            "scale": np.asarray(() if self.scale is None else self.scale, np.float32),
            "dtype": f"i{self.bit_width}",
            "narrow_range": self.is_weight,
        }
        if self.zero_point is not None:
            attributes["zero_point"] = np.asarray(self.zero_point, np.int64)
        if self.dimension is not None:
            attributes["quantization_dimension"] = self.dimension + self.batch_axes
        return attributes

    def __call__(self, x: jax.Array) -> jax.Array:
        """Quantize and dequantize `x`, marked; the gradient passes straight through."""

        @jax.custom_batching.custom_vmap
        def composite(x: jax.Array) -> jax.Array:
            mark = jax.lax.composite(lambda x, **_: self.decomposed(x), name=COMPOSITE_NAME)
            return mark(x, **self.attributes())

        @composite.def_vmap
        def batched(size: int, in_batched: object, x: jax.Array) -> tuple[jax.Array, bool]:
            return replace(self, batch_axes=self.batch_axes + 1)(x), True

        # A composite has no derivative or batching rule of its own.
        return straight_through(composite)(x)

    def decomposed(self, x: jax.Array) -> jax.Array:
        """Quantize and dequantize `x` as the compiler does."""
        quantize = self.dynamic
        if quantize is not None:
            for _ in range(self.batch_axes):
                quantize = jax.vmap(quantize)
            return as_array(quantize(x).value)
        shape = (1,) * self.batch_axes + self.shape
        scale = np.asarray(self.scale, np.float32).reshape(shape)
        zero = np.asarray(self.zero_point or 0, np.float32).reshape(shape if self.zero_point else ())
        most = 2 ** (self.bit_width - 1) - 1
        least = -most - 1 if self.least is None else self.least
        integers = jnp.clip(jnp.round(x.astype(jnp.float32) / scale + zero), least, most)
        return ((integers - zero) * scale).astype(x.dtype)


@dataclass(frozen=True)
class ConvertedPolicy(OdmlPolicy):
    """Marks what `OdmlPolicy` quantizes, around weights too where they are contracted; and factors.

    Attributes:
        activation_bits: of all activations, and of factors: devices multiply integers of one width.
    """

    activation_bits: int = 8

    flattens_weights = True
    constants_now = True  # a factor's mark needs its number

    def arithmetic(self, name: str, operands: Sequence[Tracked], evaluate: Evaluate) -> jax.Array:
        """Return a product with a constant, which is marked: devices multiply quantized numbers, and divide none."""
        places = [place for place, x in enumerate(operands) if not x.is_activation and x.array.size == 1]
        dividing = name == "truediv" and places == [1]
        if len(places) == 1 and (name == "multiply" or dividing) and is_concrete(operands[places[0]].array):
            x = operands[1 - places[0]].array
            factor = np.float32(np.asarray(operands[places[0]].array).reshape(()))
            with np.errstate(divide="ignore"):
                factor = 1 / factor if dividing else factor
            if factor and np.isfinite(factor):
                bits = self.activation_bits
                step = float(abs(factor)) / (2 ** (bits - 1) - 1)
                marker = FakeQuantMarker((step,), shape=(1,) * x.ndim, bit_width=bits)
                return x * marker(jnp.full((1,) * x.ndim, factor, x.dtype))
        return super().arithmetic(name, operands, evaluate)


class OdmlConversion(OdmlQat):
    """Converts a model that was trained or calibrated under `OdmlQat` for a device compiler.

    Every fake quantization becomes a `jax.lax.composite` named `quant.fake_quant`, with `scale` and `zero_point` known
    before the program runs: of weights from their values, of activations from their statistics. Weights with more than
    two axes that are contracted over the first are flattened, because a device supports one axis of scales. A weight is
    clipped to [-127, 127], in 4 bits to [-7, 7], as its mark `narrow_range` says and LiteRT does. A factor that is one
    number is marked too: devices multiply quantized numbers, and division by it is multiplication by its reciprocal.

    Weights have 4 or 8 bits, activations 8 or, without a zero point, 16; all activations of a program have one width.

    Args:
        rules, disable_per_channel_weights, fixed_range_for_inputs, fixed_range_for_outputs, strict: as for `OdmlQat`;
            if none is given, those that the model was quantized with.

    Source: Qwix's `OdmlConversionProvider`. Differs from Qwix: parameters and statistics are those of the model; Qwix's
    decomposition has weights of -128, and leaves factors in float.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((3, 4))
        >>> model = OdmlQat().quantize(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), x)
        >>> y = model(x)
        >>> converted = OdmlConversion().quantize(model, x)
        >>> str(jax.make_jaxpr(converted.__call__)(x)).count("name=quant.fake_quant")
        3
    """

    def _of_calls(self, model: Model, calls: Sequence[Call]) -> Model:
        """The converted model, for evaluation; a method that is not among `calls` runs as it was written.

        Raises:
            ValueError: the model was not quantized by `OdmlQat`; statistics were never collected; a scale is nan, inf
                or 0, or varies along two axes; a quantizer makes no integers that devices have, or activations have
                several widths.
        """
        quantizers = vars(model).get(HELD)
        if not isinstance(quantizers, OpQuantizers) or type(quantizers.policy) is not OdmlPolicy:
            raise ValueError(
                f"{type(model).__name__} was not quantized by OdmlQat, so there are no statistics to convert it with.\n"
                "  cure: model = OdmlQat().quantize(model, x); train it, or run jqinject.calibrate(model, batches)"
            )
        own = quantizers.policy if self.policy == OdmlQat().policy else self.policy
        policy = ConvertedPolicy(**vars(own))
        collector = _Collector(quantizers)
        evaluated = nnx.clone(model, graph=True)
        evaluated.eval()
        find_sites(evaluated, policy, calls, collector)
        policy = replace(policy, activation_bits=_one_width(collector.markers.items()))
        change_class(evaluated, quantized_class(type(model), methods=[call.name for call in calls]))
        delattr(evaluated, HELD)
        # Modules of this trace, not of the one that made them.
        markers = nnx.clone(nnx.Dict(collector.markers))
        setattr(evaluated, HELD, OpQuantizers(policy, markers, same=quantizers.same))
        return evaluated


class _Collector(Quantizers):
    """Makes the marker of every site from the quantizer that the model holds there."""

    def __init__(self, quantizers: OpQuantizers) -> None:
        super().__init__()
        self._quantizers = quantizers
        self.markers: dict[str, FakeQuantMarker] = {}

    def quantize(self, site: Site, x: jax.Array, token: jax.Array | None = None) -> jax.Array:
        """`x` unchanged; records its marker."""
        if site.name not in self._quantizers.held:
            raise ValueError(
                f"{site.name} has no statistics: the model was quantized for other operations.\n"
                "  cure: quantize and calibrate it with inputs like these, and with the same rules"
            )
        if site.stack:
            raise ValueError(
                f"{site.name}: lies in a loop over layers, and each has a range of its own, where the body is "
                "marked once.\n  cure: unroll the loop over layers"
            )
        proxy = self._quantizers[site.name]
        with jax.ensure_compile_time_eval():
            self.markers[site.name] = _marker(site, proxy, x)
        return x


def _one_width(markers: Iterable[tuple[str, FakeQuantMarker]]) -> int:
    """Return the bit width of all activations; 8 without any."""
    first: dict[int, str] = {}
    for name, marker in markers:
        if not marker.is_weight:
            first.setdefault(marker.bit_width, name)
    if len(first) > 1:
        described = " and ".join(f"{name} of {bits} bits" for bits, name in sorted(first.items()))
        raise ValueError(
            f"OdmlConversion: the program has the activations {described}; devices have operations on activations of "
            "one width.\n  cure: Int8Act, or Int16Act, in all rules"
        )
    return next(iter(first), 8)


def _marker(site: Site, proxy: QuantProxyFromInjector, x: jax.Array) -> FakeQuantMarker:
    quantizer = proxy.tensor_quant
    scaling, dynamic = vars(quantizer).get("scaling_impl"), is_dynamic(quantizer) and not site.is_weight
    bits = int(quantizer.bit_width_impl()) if isinstance(quantizer, RescalingIntQuant) else 0
    # A weight that is multiplied or added number by number has the quantizer, and the width, of activations.
    contracted = site.is_weight and is_dynamic(site.quantizer)
    widths = (4, 8) if contracted else (8,) if dynamic else (8, 16)
    if bits not in widths or not isinstance(scaling, RangeScaling):
        kind = "weights" if contracted else "dynamic activations" if dynamic else "activations"
        raise ValueError(
            f"{site.name}: devices have {kind} in signed integers of {' or '.join(map(str, widths))} bits, and the "
            f"quantizer is {site.quantizer.__name__}.\n  cure: Int8Weight, Int4Weight, Int8Act, Int16Act or "
            "Int8DynamicAct of jqinject.odml, or a class derived from them"
        )
    if dynamic:
        return FakeQuantMarker(dynamic=quantizer)
    if site.is_weight:
        return _static(site, _weight_range(site, scaling, x), x.ndim, bits)
    if scaling.has_range() is False:
        raise ValueError(
            f"{site.name}: its statistics were never collected, so there is no range to convert it with.\n"
            "  cure: train the model, or run jqinject.calibrate(model, batches), before it is converted"
        )
    marker = _static(site, scaling.averaged_range(x.ndim), x.ndim, bits)
    if bits == 16 and marker.zero_point is not None:
        raise ValueError(
            f"{site.name}: devices have 16-bit activations without a zero point, and {site.quantizer.__name__} has "
            "one.\n  cure: Int16Act of jqinject.odml, or calibration_impl = AbsMaxRange"
        )
    return marker


def _weight_range(site: Site, scaling: RangeScaling, x: jax.Array) -> ClippingRange:
    if not is_concrete(x):
        raise ValueError(
            f"{site.name}: the weight {'.'.join(map(str, site.weight_path))} is not known before the program runs: it "
            "is abstract, or sliced in a loop.\n  cure: convert a model with weights; unroll the loop over layers"
        )
    # The axes at this site: a flattened weight has other axes than in training.
    axes = tuple(i for i in range(x.ndim) if i not in site.overrides.get("channelwise_axes", ()))
    return scaling.calibration_impl(x.astype(np.float32), axes)


def _static(site: Site, measured: ClippingRange, ndim: int, bits: int) -> FakeQuantMarker:
    scale, zero = scale_and_zero_point(measured, bits)
    values = np.asarray(scale)
    if not (np.isfinite(values).all() and (values != 0).all()):
        raise ValueError(
            f"{site.name}: invalid scale {values.ravel()[:8]}: it must be finite and not 0.\n"
            "  cure: look for nan or inf in the weight, or in the batches that were calibrated with"
        )
    long = [axis for axis, length in enumerate(values.shape) if length > 1]
    if len(long) > 1:
        raise ValueError(
            f"{site.name}: devices know one axis of scales, and this one has shape {values.shape}.\n"
            "  cure: disable_per_channel_weights=True, or reshape the weight to two axes in the model"
        )
    shape = values.shape or (1,) * ndim
    return FakeQuantMarker(
        scale=tuple(values.ravel().tolist()),
        zero_point=None if zero is None else tuple(int(z) for z in np.asarray(zero).ravel()),
        shape=shape,
        dimension=long[0] if long else None,
        is_weight=site.is_weight,
        bit_width=bits,
        least=1 - 2 ** (bits - 1) if site.is_weight else None,  # the range of weights is narrow
    )
