"""What `QDotGeneral`, `QEinsum` and `QConvGeneralDilated` share: a scheme, modes, stored operands."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from jqinject.core import RangeScaling, warn_if_uncalibrated
from jqinject.core.component import InnerModule
from jqinject.core.state import QuantStat, float_array
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_param import FrozenParam
from jqinject.dot.geometry.dimensions import checked_dimensions
from jqinject.dot.geometry.labels import Labelling, Labels, summed_labels
from jqinject.dot.schemes.frozen_operand import frozen_operand
from jqinject.dot.schemes.scheme import SchemeSpec, checked_scheme
from jqinject.dot.schemes.scheme_dot import scheme_dot_general
from jqinject.dot.schemes.scheme_quantizers import SchemeQuantizers, contract_once
from jqinject.dot.schemes.static_range import CollectedRange, checked_range, range_of
from jqinject.dot.tensors.freezer import Freezer, QuantMode, served
from jqinject.dot.tensors.labelled_tensor import LabelledTensor

Axes = tuple[int, ...]


class QuantizedOp(InnerModule):
    """The common base: a scheme, modes, stored operands."""

    scheme: Any
    countdown: QuantStat | None
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
        lhs_range: RangeScaling | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        name = type(self).__name__
        scheme = SchemeSpec.of(checked_scheme(config))
        for each in scheme.both:
            self._check_scheme(each)
        found = range_of(config) if lhs_range is None else lhs_range
        self.lhs_range = nnx.data(checked_range(found, scheme, name))
        self.scheme = nnx.data(SchemeQuantizers(scheme, rngs, name))
        self.countdown = nnx.data(QuantStat(float_array(scheme.delay)) if scheme.delay else None)
        self.lhs_quant_mode = _checked(lhs_quant_mode, "lhs_quant_mode")
        self.rhs_quant_mode = _checked(rhs_quant_mode, "rhs_quant_mode")
        self.lhs_freezer = _freezer(lhs_freezer)
        self.rhs_freezer = _freezer(rhs_freezer)

    @classmethod
    def _check_scheme(cls, scheme: SchemeSpec) -> None:
        """Refuse a scheme that does not fit the operation, whatever its operands."""

    @property
    def quantizes(self) -> tuple[bool, bool]:
        """Whether the left and the right operand have a quantizer in the forward product."""
        return self.scheme.quantizes

    def check_freezes(self) -> None:
        """Raise if the right operand cannot be stored for serving.

        Raises:
            ValueError: the forward contraction is tiled, or the scheme is still to be switched to.
        """
        self.scheme.check_freezes()
        left = None if self.countdown is None else self.countdown.get_value()
        if isinstance(left, jax.Array) and not isinstance(left, Tracer) and int(left.max()) > 0:
            spec = self.scheme.scheme
            raise ValueError(
                f"{self.scheme.where}: {spec.name} begins in {int(left.max())} calls in training "
                "(quant_delay_steps), so the weight was trained for another scheme.\n"
                "  cure: train on, or op.countdown[...] = 0"
            )

    def frozen_rhs(
        self, rhs: jax.Array, summed: Axes, stored_last: Axes
    ) -> tuple[dict[str, jax.Array], FrozenForm]:
        """The low-bit numbers of the right operand, as `frozen_numbers` returns them.

        Args:
            rhs: the operand.
            summed: the summed axes.
            stored_last: those that are stored last.

        Raises:
            ValueError: the scheme quantizes it as the contraction sees it.
        """
        labels = tuple(("rhs", axis) for axis in range(rhs.ndim))
        over = tuple(labels[axis] for axis in summed)
        return frozen_operand(self.scheme, LabelledTensor(rhs, labels), over, stored_last)

    def has_range(self) -> bool | None:
        """Whether every collected range saw data; None if there is none. See `core.StaticRange`."""
        if self.lhs_range is None or self.lhs_quant_mode is QuantMode.SERVE:
            return self.scheme.has_range()
        return self.lhs_range.has_range()

    def begin_calibration(self) -> None:
        """Restart the collection of ranges."""
        self.scheme.begin_calibration()
        if self.lhs_range is not None:
            self.lhs_range.begin_calibration()

    def end_calibration(self) -> None:
        """Use what was collected as the ranges."""
        self.scheme.end_calibration()
        if self.lhs_range is not None:
            self.lhs_range.end_calibration()

    def _contract(
        self,
        lhs: Any,
        rhs: Any,
        numbers: Any,
        preferred_element_type: Any,
        out_sharding: Any,
        unrounded: Any = None,
    ) -> jax.Array:
        """The contraction of two operands, quantized here or stored."""
        dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
        lhs, rhs = self._seen(lhs, rhs)
        dims = checked_dimensions(tuple(lhs.shape), tuple(rhs.shape), numbers)
        labels = Labelling.of(dims)
        summed = summed_labels(labels.lhs, labels.rhs, labels.out)
        left = self._served("lhs", LabelledTensor(lhs, labels.lhs), summed)
        right = self._served("rhs", LabelledTensor(rhs, labels.rhs), summed)
        found_in = None
        if self.lhs_range is not None:
            if self.lhs_range.use_running_average:
                warn_if_uncalibrated(self, lambda: f"{type(self).__name__}.lhs_range", lhs)
            found_in = CollectedRange(self.lhs_range)
        return self._switched(
            lambda scheme: scheme_dot_general(
                scheme, left, right, dims, dtype, out_sharding, found_in, unrounded
            )
        )

    def _switched(self, contract: Callable[[SchemeQuantizers], jax.Array]) -> jax.Array:
        """The contraction by the scheme, or in its first calls in training by the one before it: one program for both.

        Args:
            contract: contracts by a scheme's quantizers.
        """
        if self.countdown is None:
            return contract(self.scheme)
        left = self.countdown.get_value()
        if not self.scheme.use_running_average:
            self.countdown.set_value(jnp.maximum(left - 1, 0))
        key = self.scheme.one_key()
        before, after = (
            lambda spec=spec: contract_once(self.scheme, spec, key, contract) for spec in self._both
        )
        return jax.lax.cond(left > 0, before, after)

    @property
    def _both(self) -> tuple[SchemeSpec, SchemeSpec]:
        """The scheme of the first calls, and that of the others."""
        after = self.scheme.scheme
        assert after.before is not None, "a delay has one"
        return after.before, replace(after, before=None, delay=0)

    def _served(self, side: str, x: LabelledTensor, summed: Labels) -> Any:
        """An operand, or its stored form; stores it if its mode says so."""
        mode = self.lhs_quant_mode if side == "lhs" else self.rhs_quant_mode
        freezer = self.lhs_freezer if side == "lhs" else self.rhs_freezer
        if mode is QuantMode.TRAIN:
            return x.tensor
        if mode is QuantMode.CONVERT:
            over = tuple(axis for axis, label in enumerate(x.labels) if label in summed)
            freezer.set(self.scheme.stored(f"fprop_{side}", x, summed), over)
        return served(freezer.get())

    def _seen(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """The operands as the op sees them: one served from storage has the stored shape."""
        lhs, rhs = (x.operand() if isinstance(x, FrozenParam) else x for x in (lhs, rhs))
        if self.lhs_quant_mode is QuantMode.SERVE:
            lhs = self.lhs_freezer.placeholder(lhs.dtype)
        if self.rhs_quant_mode is QuantMode.SERVE:
            rhs = self.rhs_freezer.placeholder(rhs.dtype)
        return lhs, rhs

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Same arguments as the function it replaces."""


def _checked(mode: Any, name: str) -> QuantMode:
    if isinstance(mode, QuantMode):
        return mode
    raise TypeError(f"{name} must be QuantMode.TRAIN, QuantMode.CONVERT or QuantMode.SERVE, got {mode!r}")


def _freezer(given: Mapping[str, Any] | Freezer | None) -> Freezer:
    return given if isinstance(given, Freezer) else Freezer(**(given or {}))
