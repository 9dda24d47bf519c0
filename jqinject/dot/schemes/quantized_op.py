"""What `QDotGeneral`, `QEinsum` and `QConvGeneralDilated` share: a scheme or configuration, modes, stored operands."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from jqinject.core import CalibratedQuant, warn_if_uncalibrated
from jqinject.dot.geometry.labels import Labels
from jqinject.dot.schemes.contraction import Operand
from jqinject.dot.schemes.operand import QuantizedOperand
from jqinject.dot.schemes.scheme import SchemeSpec, is_scheme
from jqinject.dot.schemes.scheme_quantizers import SchemeQuantizers, served
from jqinject.dot.schemes.static_range import checked_range, range_of, scaled
from jqinject.dot.tensors.freezer import Freezer, QuantMode
from jqinject.dot.tensors.jax_functions import assembled
from jqinject.dot.tensors.labelled_tensor import LabelledTensor

Axes = tuple[int, ...]
Quantize = Callable[[Any, Any], tuple[QuantizedOperand, QuantizedOperand]]


class QuantizedOp(nnx.Module):
    """What the three have in common: a scheme or configuration, modes, stored operands, random numbers."""

    general: Any
    scheme: Any
    lhs_quant_mode: QuantMode
    rhs_quant_mode: QuantMode

    def __init__(
        self,
        config: Any,
        *,
        lhs_quant_mode: QuantMode = QuantMode.TRAIN,
        rhs_quant_mode: QuantMode = QuantMode.TRAIN,
        lhs_freezer: Mapping[str, Any] | Freezer | None = None,
        rhs_freezer: Mapping[str, Any] | Freezer | None = None,
        lhs_range: CalibratedQuant | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        name = type(self).__name__
        general = None if is_scheme(config) else assembled(config)
        self.general = general
        self.scheme = nnx.data(None)
        if general is None:
            _check_scheme_takes(name, lhs_quant_mode, lhs_range)
            self.scheme = nnx.data(SchemeQuantizers(SchemeSpec.of(config), rngs, name))
            self.lhs_range = nnx.data(None)
        else:
            found = range_of(config) if lhs_range is None else lhs_range
            self.lhs_range = nnx.data(checked_range(found, general, name))
        self.lhs_quant_mode = _checked(lhs_quant_mode, "lhs_quant_mode")
        self.rhs_quant_mode = _checked(rhs_quant_mode, "rhs_quant_mode")
        self.lhs_freezer = _freezer(lhs_freezer)
        self.rhs_freezer = _freezer(rhs_freezer)
        if general is not None and general.needs_key and rngs is not None:
            # A fork, but named alike wherever it comes from: names are part of the graph.
            self.stream = nnx.RngStream(rngs["stochastic_rounding"](), tag="stochastic_rounding")
        else:
            self.stream = nnx.data(None)

    def _operands(
        self, lhs: Operand, rhs: Operand, quantize: Quantize, summed: tuple[Axes, Axes] = ((), ())
    ) -> tuple[Operand, Operand]:
        """The operands that are contracted: stored ones, ones to be stored, or as they came."""
        if self.lhs_quant_mode is QuantMode.SERVE:
            lhs = self.lhs_freezer.get()
        elif self.lhs_range is not None:
            if self.lhs_range.use_running_average:
                warn_if_uncalibrated(self, lambda: f"{type(self).__name__}.lhs_range", lhs)
            lhs = scaled(lhs, self.lhs_range, self.general)
        if self.rhs_quant_mode is QuantMode.SERVE:
            rhs = self.rhs_freezer.get()
        converts = (self.lhs_quant_mode is QuantMode.CONVERT, self.rhs_quant_mode is QuantMode.CONVERT)
        if any(converts):
            left, right = quantize(lhs, rhs)
            if converts[0]:
                self.lhs_freezer.set(left, summed[0])
                lhs = left
            if converts[1]:
                self.rhs_freezer.set(right, summed[1])
                rhs = right
        return lhs, rhs

    @property
    def quantizes(self) -> tuple[bool, bool]:
        """Whether the left and the right operand have a quantizer in the forward product."""
        if self.scheme is not None:
            return self.scheme.quantizes
        fwd = self.general.fwd
        return fwd.lhs_quantizer.numerics is not None, fwd.rhs_quantizer.numerics is not None

    def check_freezes(self) -> None:
        """Raise where the right operand cannot be stored for serving.

        Raises:
            ValueError: the forward contraction is cut into pieces.
        """
        if self.general is not None:
            self.general.check_freezes()

    def quantized_rhs(self, rhs: jax.Array, summed: Axes) -> QuantizedOperand:
        """The right operand as it is stored for serving.

        Args:
            rhs: the operand.
            summed: the axes that the contraction sums over.

        Raises:
            ValueError: a scheme quantizes it in a form that is not stored here.
        """
        if self.scheme is not None:
            labels = tuple(("rhs", axis) for axis in range(rhs.ndim))
            return self.scheme.stored(LabelledTensor(rhs, labels), tuple(labels[axis] for axis in summed))
        quantizer = self.general.fwd.rhs_quantizer
        every = tuple(range(rhs.ndim))
        others = tuple(axis for axis in every if axis not in summed)
        named = {"contracting": summed, "remaining": others, "tensor": every}
        given = quantizer.calibration_axes
        return quantizer.quantize(rhs, named[given] if isinstance(given, str) else given)

    def has_range(self) -> bool | None:
        """Whether the static range of the left operand saw data; None without one. See `core.StaticRange`."""
        if self.scheme is not None:
            return self.scheme.has_range()
        if self.lhs_range is None or self.lhs_quant_mode is QuantMode.SERVE:
            return None
        return self.lhs_range.has_range()

    def begin_calibration(self) -> None:
        """From now on collect the range of the left operand anew."""
        if self.scheme is not None:
            self.scheme.begin_calibration()
        if self.lhs_range is not None:
            self.lhs_range.begin_calibration()

    def end_calibration(self) -> None:
        """Take what was collected as the range; of a configuration the range is the average."""
        if self.scheme is not None:
            self.scheme.end_calibration()

    def fresh(self) -> QuantizedOp:
        """Another one like it, with nothing stored and random numbers of its own."""
        if self.scheme is not None:
            return self._fresh_scheme()
        other = type(self)(
            self.general,
            lhs_quant_mode=self.lhs_quant_mode,
            rhs_quant_mode=self.rhs_quant_mode,
            lhs_range=None if self.lhs_range is None else nnx.clone(self.lhs_range),
        )
        if self.stream is not None:
            other.stream = nnx.RngStream(self.stream(), tag="stochastic_rounding")
        return other

    def _fresh_scheme(self) -> QuantizedOp:
        other = nnx.clone(self)
        other.rhs_freezer = Freezer()
        return other

    def _served(self, rhs: LabelledTensor, summed: Labels) -> Any:
        """The right operand of a scheme: as it came, or what is stored; it is stored where it is to be."""
        if self.rhs_quant_mode is QuantMode.TRAIN:
            return rhs.tensor
        if self.rhs_quant_mode is QuantMode.CONVERT:
            self.rhs_freezer.set(self.scheme.stored(rhs, summed), tuple(rhs.axis(label) for label in summed))
        return served(self.rhs_freezer.get())

    def _seen(self, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The operands as the op sees them: what is ignored, as it is served from store, has the stored shape."""
        if self.lhs_quant_mode is QuantMode.SERVE:
            lhs = self.lhs_freezer.placeholder(lhs.dtype)
        if self.rhs_quant_mode is QuantMode.SERVE:
            rhs = self.rhs_freezer.placeholder(rhs.dtype)
        return lhs, rhs

    def _key(self) -> jax.Array | None:
        both = (self.lhs_quant_mode, self.rhs_quant_mode)
        return self.stream() if self.stream is not None and both == (QuantMode.TRAIN,) * 2 else None

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """As the function whose place it takes."""


def _checked(mode: Any, name: str) -> QuantMode:
    if isinstance(mode, QuantMode):
        return mode
    raise TypeError(f"{name} must be QuantMode.TRAIN, QuantMode.CONVERT or QuantMode.SERVE, got {mode!r}")


def _freezer(given: Mapping[str, Any] | Freezer | None) -> Freezer:
    return given if isinstance(given, Freezer) else Freezer(**(given or {}))


def _check_scheme_takes(name: str, lhs_quant_mode: Any, lhs_range: Any) -> None:
    """Refuse what a scheme says in another way."""
    if lhs_range is not None:
        raise TypeError(
            f"{name}: a scheme has no lhs_range.\n  cure: fprop_lhs = jqinject.quant.Int8ActPerTensorAbsMax, or "
            "another quantizer of activations with a collected range"
        )
    if lhs_quant_mode is not QuantMode.TRAIN:
        raise ValueError(
            f"{name}: the left operand of a scheme is not stored.\n  cure: lhs_quant_mode=QuantMode.TRAIN"
        )
