"""Proxies of what flows through a model: activations, gradients, and accumulators that are truncated."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import jax
import jax.numpy as jnp

from jqinject.core import _protocols, check
from jqinject.dot.tensors.backward_quantizer import (
    GradientFormat,
    quantize_gradient_by,
    reporting,
    why_not_backward,
)
from jqinject.ops import FloatGrid
from jqinject.proxy import answers, base, metadata
from jqinject.quant_tensor import CONTRACTED, IntQuantTensor, Operand, QuantTensor, as_array

DEQUANT_MODES = check.among(("output", "this_input", "other_input"))


class FlowProxy(base.QuantProxyFromInjector):
    """Abstract: quantizes what flows, not a parameter, after the `pre_transform` that its injector may declare."""

    reads = base.QuantProxyFromInjector.reads | {answers.PRE_TRANSFORM}

    def trial(self, x: jax.Array, force_eval: bool = True) -> Any:
        """Quantize an array that is no tensor of the model, without a transform; no state changes.

        Args:
            x: float array.
            force_eval: as eval mode would, also in training mode.

        Returns:
            A QuantTensor, with its groups as axes; None if quantization is off.
        """
        return self._pack(self._copy(force_eval)(x)) if self.is_quant_enabled else None


class ActQuantProxyFromInjector(FlowProxy):
    """Quantizes what flows: inputs, outputs, results of activation functions.

    Statistics move in training mode only. Several layers may share one proxy: they then share its statistics.

    An injector may declare a `pre_transform` (`jqinject.core.transforms`), which comes before the quantizer, also while
    that is off or None: the weight that the tensor meets is stored for it. With `undo_transform = True` a call
    transforms the quantized tensor back, so that it returns an array, whose numbers lie on no grid; a quantizer that is
    off then leaves the tensor as it is.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import Fp8e5m2FNUZActPerTensorFloat, Int8ActPerTensorFloat, MXInt8Act
        >>> identity = QuantIdentity(act_quant=Int8ActPerTensorFloat, return_quant_tensor=True)
        >>> identity(jnp.array([-1.28, 0.64])).int()
        Array([-128,   64], dtype=int8)
        >>> mx = QuantIdentity(act_quant=MXInt8Act, group_size=2, return_quant_tensor=True)
        >>> mx(jnp.array([0.5, 1.0, 100.0, 3.0])).scale
        Array([0.015625, 0.015625, 1.      , 1.      ], dtype=float32)
        >>> proxy = QuantIdentity(Fp8e5m2FNUZActPerTensorFloat).act_quant
        >>> proxy.exponent_bit_width(), proxy.mantissa_bit_width(), proxy.exponent_bias(), proxy.is_fnuz
        (5, 2, 16, True)
    """

    reads = FlowProxy.reads | {answers.UNDO_TRANSFORM}
    role = "activation"
    quantizes_activations = True

    __call__ = base.QuantProxyFromInjector._activation_quantized

    def quantize_transformed(self, x: jax.Array) -> Any:
        """Quantize an activation that has been through the `pre_transform`; the caller checks its range.

        Args:
            x: float array.
        """
        return self._quantized(x) if self.is_quant_enabled else x

    def quantize_for_cache(self, x: Operand) -> Operand:
        """Quantize rows as a cache in low bits stores them: after the `pre_transform`, which stays.

        Args:
            x: float array, or a QuantTensor, whose value is then quantized anew.

        Returns:
            A QuantTensor of the shape and dtype of `x`; the transformed array if quantization is off.

        Example:
            >>> import jax.numpy as jnp
            >>> from jqinject.nn import QuantIdentity
            >>> from jqinject.quant import TurboQuant2Act
            >>> rows = QuantIdentity(TurboQuant2Act).act_quant.quantize_for_cache(jnp.ones((3, 64)))
            >>> rows.codes().shape, rows.scale.shape
            ((3, 64), (3, 1))
        """
        return self.quantize_transformed(answers.transformed(self, as_array(x)))

    def _undone(self, x: Operand) -> Operand:
        """What a call returns if the transform is undone."""
        if not self.is_quant_enabled:
            return x
        answers.check_range(self, as_array(x))
        return answers.restored(self, self.quantize_for_cache(x))

    def sample(self, force_eval: bool = True) -> QuantTensor:
        """Quantize one 0, or one group of them: they have the scale, zero point and bit width of any.

        None if quantization is off.

        Args:
            force_eval: as eval mode would, also in training mode.
        """
        size, dim = self.group_size, self.group_dim
        shape: tuple[int, ...] = (1,) * self.is_dynamic  # a statistic of rows needs an axis
        if size is not None and dim is not None:  # and groups need one of them along the axis that is cut
            shape = (*(1,) * dim, size) if dim >= 0 else (size, *(1,) * (-dim - 1))
        return self.trial(jnp.zeros(shape, jnp.float32), force_eval)

    def _measured(self) -> tuple[str, str, str] | None:
        return ("input", "the given tensor", "proxy(x)") if self.is_dynamic else None


class OperandQuantProxyFromInjector(base.QuantProxyFromInjector):
    """Quantizes one operand of a contraction by a `Scheme`, whose axes the quantizer asks `module.axes` for.

    Training contracts the payload too. An injector's `dequant_mode` says whether a payload is contracted ("output"), or
    the dequantized value ("this_input", "other_input").

    Raises:
        ValueError: another `dequant_mode`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.dot import QDotGeneral, Scheme
        >>> from jqinject.quant.aqt import OperandInjector
        >>> in_value = OperandInjector.let(dequant_mode="this_input")
        >>> op = QDotGeneral(Scheme.let(fprop_lhs=OperandInjector, fprop_rhs=in_value))
        >>> print(op.explain(jnp.ones((2, 8)), jnp.ones((8, 4)), (((1,), (0,)), ((), ())))[0])
        fprop: integers of 8 bits x an array of float32 -> float  (the other operand is float)
    """

    role = "operand"
    quantizes_activations = True
    reads = base.QuantProxyFromInjector.reads | {"dequant_mode", "calibration_axes", "narrow_range"}

    def __init__(
        self, injector: Any, layer: _protocols.ServedLayer, *, where: tuple[str, str] = ("", ""), **how: Any
    ) -> None:
        super().__init__(injector, layer, where=where, **how)
        mode = self.binding.resolve("dequant_mode", module=layer)
        self.keeps_payload = DEQUANT_MODES(mode, where[0], "dequant_mode") == "output"

    def __call__(self, x: jax.Array) -> Any:
        """Quantize an operand: a QuantTensor, or an array if its value is contracted.

        Args:
            x: float array.
        """
        if not self.is_quant_enabled:
            return x
        answers.check_range(self, x)
        tensor = self._quantized(x)
        return tensor if self.keeps_payload else tensor.value


class GradQuantProxyFromInjector(FlowProxy):
    """Quantizes the gradient that flows back into what it is given; forward it changes nothing.

    Any format will do whose scale is made from the given gradient, is constant, or follows recorded amaxes. These
    are moved by `jqinject.value_and_grad` and `jqinject.grad`, once per step, and by nothing else: under plain
    `nnx.grad` the gradient is quantized with the scale there is, the statistics stay, and in training mode a
    `jqinject.LostStateWarning` reports that.

    Example:
        >>> import jax.numpy as jnp
        >>> import jqinject
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import Fp8e5m2GradPerTensorCurrent
        >>> identity = QuantIdentity(None, grad_quant=Fp8e5m2GradPerTensorCurrent)
        >>> weights = jnp.array([1.0, 0.3])
        >>> jqinject.grad(lambda x, m: (m(x) * weights).sum())(jnp.ones(2), identity).round(3)
        Array([1.   , 0.286], dtype=float32)
        >>> float(identity.grad_quant.amax_history.newest)
        1.0
        >>> import jax
        >>> from jqinject.quant import MXFloat4e2m1Grad
        >>> mx = QuantIdentity(None, grad_quant=MXFloat4e2m1Grad)
        >>> jax.grad(lambda x: (mx(x) * weights).sum())(jnp.ones(2))
        Array([1.  , 0.25], dtype=float32)
    """

    role = "gradient"

    def __call__(self, y: jax.Array, token: jax.Array | None = None) -> jax.Array:
        """`y` as it is, with a quantized gradient.

        Args:
            y: float array.
            token: its cotangent becomes the scale, for a contraction that takes the payload.

        Raises:
            TypeError: `y` is not a float array, so it has no gradient.
        """
        if not self.is_quant_enabled:
            return y
        y = check.float_input(y, "a gradient quantizer")
        return quantize_gradient_by(y, self, _gradient_quantized, token)

    def quantize_gradient(self, g: Any) -> Any:
        """A gradient on its way back, after the `pre_transform`, as a QuantTensor; no more if quantization is off."""
        g = answers.transformed(self, g)
        return self._quantized(g) if self.is_quant_enabled else g

    def on(self, y: jax.Array | QuantTensor) -> Any:
        """As a call, for a QuantTensor too, which stays one."""
        return y.set(value=self(y.value)) if isinstance(y, QuantTensor) else self(y)

    def quantize(self, x: jax.Array, /, *more: object) -> Any:
        """Quantize a given gradient as this step would; nothing is recorded, and rounding is to nearest.

        Args:
            x: float array.
            more: nothing.

        Returns:
            A QuantTensor, or `x` itself if quantization is off.
        """
        return self._seen(self.trial(x), x) if self.is_quant_enabled else x

    def sample(self, force_eval: bool = True) -> Any:
        """Quantize one 0 as `quantize` does; None if quantization is off."""
        return self.trial(jnp.zeros((), jnp.float32))

    def _measured(self) -> tuple[str, str, str] | None:
        return ("gradient", "the given one", "proxy.quantize(g)") if reporting(self) is None else None

    @property
    def makes_integers(self) -> bool:
        """Whether gradients become integers, as far as the quantizer states it."""
        return self.is_quant_enabled and _protocols.number_format(self.tensor_quant) is None

    def gradient_format(self, y: jax.Array | jax.ShapeDtypeStruct) -> GradientFormat | None:
        """Return the numbers of the gradient of an output, for a contraction that takes them backward.

        Args:
            y: the output, or its abstract value.

        Returns:
            None where the dequantized gradient is contracted: of other formats than integers of at most 8 bits and
            8-bit floats scaled by amaxes, and if quantization is off.
        """
        if self.makes_integers:
            return GradientFormat.of_integers(
                jax.eval_shape(self.quantize, jax.ShapeDtypeStruct(y.shape, y.dtype))
            )
        form = _protocols.number_format(self.tensor_quant) if self.is_quant_enabled else None
        if form is None or form.dtype not in CONTRACTED or reporting(self) is None:
            return None
        return GradientFormat(FloatGrid.of_dtype(form.dtype))

    def _read_metadata(
        self, said: metadata.QuantMetadata, handed: Mapping[str, object], quantizer: object
    ) -> metadata.QuantMetadata:
        why = why_not_backward(quantizer)
        if not why and _protocols.amax_history(quantizer) is not None and reporting(quantizer) is None:
            why = "its amaxes are recorded by forward passes (amax_of_gradient is False)"
        if why:
            raise TypeError(
                f"{self.binding.base.__name__} cannot quantize a gradient: {why}.\n  cure: one of the ...Grad... "
                "quantizers of jqinject.quant, such as Int8DynamicGradPerTensorFloat or Fp8e5m2GradPerTensorDelayed"
            )
        return super()._read_metadata(said, handed, quantizer)


def _gradient_quantized(proxy: GradQuantProxyFromInjector, g: jax.Array) -> QuantTensor | jax.Array:
    return proxy.quantize_gradient(g)


@final
class TruncQuantProxyFromInjector(base.QuantProxyFromInjector):
    """Requantizes integers to fewer bits; scale, zero point and sign come with them.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import TruncAvgPool2d
        >>> from jqinject.quant import TruncTo8bit
        >>> x = IntQuantTensor(jnp.full((1, 2, 2, 1), 1.0), 0.5, 0.0, 8, signed=False, training=False)
        >>> y = TruncAvgPool2d((2, 2), trunc_quant=TruncTo8bit)(x)
        >>> y.int().tolist(), float(y.scale), y.bit_width  # (2 + 2 + 2 + 2) >> 2
        ([[[[2]]]], 0.5, 8)
    """

    role = "accumulator"

    quantizes_activations = True

    def __call__(self, x: IntQuantTensor) -> IntQuantTensor:
        """Requantize.

        Args:
            x: integers of any bit width.

        Returns:
            Integers of the quantizer's bit width, of the shape, dtype and sign of `x`; `x` itself where quantization is
            off.

        Raises:
            TypeError: `x` is not an `IntQuantTensor`.
        """
        if not self.is_quant_enabled:
            return x
        answers.check_range(self, as_array(x))
        return self._seen(self._truncated(self.tensor_quant, x), x)

    def scale(self, x: IntQuantTensor) -> jax.Array | None:  # type: ignore[override]
        """Float per integer step of the result for `x`, float32; None if quantization is off."""
        return self._asked("scale", x)

    def zero_point(self, x: IntQuantTensor) -> jax.Array | None:  # type: ignore[override]
        """The integer that represents 0 in the result for `x`; None if quantization is off."""
        return self._asked("zero_point", x)

    def bit_width(self, force_eval: bool = True) -> int | jax.Array | None:
        """Bits of an integer of the result; None if quantization is off."""
        return self.tensor_quant.bit_width_impl() if self.is_quant_enabled else None

    def sample(self, x: IntQuantTensor) -> Any:  # type: ignore[override]
        """Requantize `x` without changing state."""
        return self._truncated(self._copy(), x)

    def _truncated(self, quantizer: Any, x: Operand) -> IntQuantTensor:
        if not isinstance(x, IntQuantTensor):
            raise TypeError(
                f"{self.binding.base.__name__} takes bits off integers, expected an IntQuantTensor, got "
                f"{type(x).__name__}.\n  cure: quantize it first, by a layer with return_quant_tensor=True"
            )
        result = quantizer(x.value, x.scale, x.zero_point, x.bit_width, x.signed)
        return result.quant_tensor(training=self.training)

    def _read_metadata(
        self, said: metadata.QuantMetadata, handed: Mapping[str, object], quantizer: object
    ) -> metadata.QuantMetadata:
        return replace(said, narrow_range=bool(said.narrow_range))  # the sign is that of what comes in
