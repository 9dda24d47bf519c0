"""`OdmlConversion`: converts a trained or calibrated model for a device compiler.

The compiler knows a composite operation around quantizing and dequantizing.
"""

from collections.abc import Sequence
from dataclasses import replace

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
        least: the smallest integer.
        batch_axes: how many leading axes `jax.vmap` has added to the tensor.
    """

    scale: tuple[float, ...] | None = None
    zero_point: tuple[int, ...] | None = None
    shape: tuple[int, ...] = ()
    dimension: int | None = None
    is_weight: bool = False
    dynamic: RescalingIntQuant | None = None
    least: int = -128
    batch_axes: int = 0

    def attributes(self) -> dict[str, object]:
        """The compiler's attributes: `scale` (float32, empty if dynamic), `dtype`, `narrow_range` (true for weights),
        and if present `zero_point` (int64) and `quantization_dimension`."""
        attributes: dict[str, object] = {
            "scale": np.asarray(() if self.scale is None else self.scale, np.float32),
            "dtype": "i8",
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
        integers = jnp.clip(jnp.round(x.astype(jnp.float32) / scale + zero), self.least, 127)
        return ((integers - zero) * scale).astype(x.dtype)


class ConvertedPolicy(OdmlPolicy):
    """Marks what `OdmlPolicy` quantizes, around weights too where they are contracted; and factors."""

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
                marker = FakeQuantMarker((float(abs(factor)) / 127,), shape=(1,) * x.ndim)
                return x * marker(jnp.full((1,) * x.ndim, factor, x.dtype))
        return super().arithmetic(name, operands, evaluate)


class OdmlConversion(OdmlQat):
    """Converts a model that was trained or calibrated under `OdmlQat` for a device compiler.

    Every fake quantization becomes a `jax.lax.composite` named `quant.fake_quant`, with `scale` and `zero_point` known
    before the program runs: of weights from their values, of activations from their statistics. Weights with more than
    two axes that are contracted over the first are flattened, because a device supports one axis of scales. A weight is
    clipped to [-127, 127], as its mark `narrow_range` says and LiteRT does. A factor that is one number is marked too:
    devices multiply quantized numbers, and division by it is multiplication by its reciprocal.

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
                or 0, or varies along two axes; a quantizer does not make signed 8-bit integers.
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


def _marker(site: Site, proxy: QuantProxyFromInjector, x: jax.Array) -> FakeQuantMarker:
    quantizer = proxy.tensor_quant
    scaling = vars(quantizer).get("scaling_impl")
    integers = isinstance(quantizer, RescalingIntQuant) and quantizer.bit_width_impl() == 8
    if not (integers and isinstance(scaling, RangeScaling)):
        raise ValueError(
            f"{site.name}: devices have signed 8-bit integers, and the quantizer is {site.quantizer.__name__}.\n"
            "  cure: Int8Weight, Int8Act or Int8DynamicAct of jqinject.odml, or a class derived from them"
        )
    if is_dynamic(quantizer) and not site.is_weight:
        return FakeQuantMarker(dynamic=quantizer)
    if site.is_weight:
        return _static(site, _weight_range(site, scaling, x), x.ndim)
    if scaling.has_range() is False:
        raise ValueError(
            f"{site.name}: its statistics were never collected, so there is no range to convert it with.\n"
            "  cure: train the model, or run jqinject.calibrate(model, batches), before it is converted"
        )
    return _static(site, scaling.averaged_range(x.ndim), x.ndim)


def _weight_range(site: Site, scaling: RangeScaling, x: jax.Array) -> ClippingRange:
    if not is_concrete(x):
        raise ValueError(
            f"{site.name}: the weight {'.'.join(map(str, site.weight_path))} is not known before the program runs: it "
            "is abstract, or sliced in a loop.\n  cure: convert a model with weights; unroll the loop over layers"
        )
    # The axes at this site: a flattened weight has other axes than in training.
    axes = tuple(i for i in range(x.ndim) if i not in site.overrides.get("channelwise_axes", ()))
    return scaling.calibration_impl(x.astype(np.float32), axes)


def _static(site: Site, measured: ClippingRange, ndim: int) -> FakeQuantMarker:
    scale, zero = scale_and_zero_point(measured, 8)
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
        least=-127 if site.is_weight else -128,  # the range of weights is narrow
    )
