"""`OdmlQat`: fake-quantizes every operation of a model, as a device will run it.

Which operations a device compiler expects to be quantized, in which order, is its policy; `Int8Weight`, `Int4Weight`,
`Int8Act`, `Int16Act` and `Int8DynamicAct` are the quantizers that devices have. Next: `conversion`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from flax import nnx

from jqinject.core import AbsMaxRange, FixedRange, MinMaxRange
from jqinject.model import Rule
from jqinject.model.quantizing.rules import checked_rules
from jqinject.program import (
    HELD,
    Call,
    Choice,
    Operation,
    OpQuantizers,
    Policy,
    QuantizedProgram,
    Site,
    Tracked,
    change_class,
    find_sites,
    other_axes,
    quantized_class,
)
from jqinject.program.operations import LOGISTIC_RANGE, TANH_RANGE
from jqinject.proxy import ActQuantProxyFromInjector, QuantProxyFromInjector
from jqinject.quant.integer.calibrated_int import CalibratedAct

Model = TypeVar("Model", bound=nnx.Module)
Range = tuple[float, float]


class UnknownOperationError(ValueError):
    """A model runs an operation for which devices have no quantized form."""


@dataclass(frozen=True)
class OdmlPolicy(Policy):
    """Quantizes every operation; outputs late, so that operations that a device fuses stay together.

    Attributes:
        rules: `weight_quant` is for weights, `output_quant` for the outputs of matching operations.
        per_channel_weights: whether weights have a scale for each output channel.
        input_range: of the model's inputs, if fixed.
        output_range: of the model's outputs, if fixed.
        strict: whether an unknown operation is an error.
    """

    rules: tuple[Rule, ...]
    per_channel_weights: bool = True
    input_range: Range | None = None
    output_range: Range | None = None
    strict: bool = True

    delayed = True

    def choose(
        self, path: str, operation: Operation, weight_path: tuple[str | int, ...] = (), name: str = ""
    ) -> Choice | None:
        """See `Policy`."""
        for rule in self.rules:
            if rule.matches(path) and (rule.op is None or operation.name in rule.op):
                weight, act = rule.quantizer("weight_quant"), rule.quantizer("output_quant")
                if weight is None and act is None:
                    return None
                return Choice(weight, act, act, dynamic=act is not None and is_dynamic(act))
        return None

    def unknown(self, path: str, name: str) -> None:
        """See `Policy`."""
        if self.strict:
            raise UnknownOperationError(
                f"the operation {name!r} in {path or 'the model itself'} has no quantized form, so its output is float."
                "\n  cure: strict=False lets it pass as it is; or write it with operations that have one: "
                "jqinject.program.known_operations()"
            )

    def not_an_activation(self, path: str, what: str) -> None:
        """See `Policy`."""
        if self.strict:
            raise UnknownOperationError(
                f"{what} in {path or 'the model itself'} does not depend on the model's inputs and is no weight, so it "
                "has no range that could be calibrated.\n  cure: make it an nnx.Param, or strict=False"
            )

    def channel_axes(self, summed: tuple[int, ...], ndim: int, is_weight: bool) -> tuple[int, ...]:
        """See `Policy`."""
        return other_axes(summed, ndim) if self.per_channel_weights or not is_weight else ()

    def model_input(self, x: Tracked) -> Tracked:
        """See `Policy`."""
        return replace(x, fixed_range=self.input_range, twins={})

    def final_output(self, run: Any, x: Tracked, index: int) -> Tracked:
        """See `Policy`."""
        if not x.is_float:
            return x
        if not x.is_activation:
            self.not_an_activation("", f"output {index}")
        if x.pending is None or x.quantized:
            return x
        if self.output_range is not None:
            x = replace(x, fixed_range=self.output_range, twins={})
        return run.quantized(x, Site(f"final_output{index}", x.pending))


def is_dynamic(quantizer: object) -> bool:
    """Return whether a quantizer, or an injector of one, takes its range from the tensor itself."""
    scaling = getattr(quantizer, "scaling_impl", None)
    return getattr(scaling, "averaging_impl", None) is None


class _OfDevices(CalibratedAct):
    batch_axes = (0,)  # every sample of a batch counts alike


class Int8Weight(_OfDevices):
    """Symmetric, a scale for each output channel (or for the tensor): `scale = max |w| / 127.5`.

    Source: Qwix's ODML provider.
    """

    calibration_impl = AbsMaxRange
    averaging_impl = None


class Int4Weight(Int8Weight):
    """As `Int8Weight` in 4 bits: `scale = max |w| / 7.5`, for weights that are contracted."""

    bit_width = 4


class Int8Act(_OfDevices):
    """With a zero point; the range is the mean over all batches of each batch's range, from means over the batch axis.

    Override `calibration_impl` for another range: `AbsMaxRange` for no zero point, `FixedRange(low, high)`.

    Source: Qwix's ODML provider (`minmax`).
    """

    calibration_impl = MinMaxRange


class Int16Act(Int8Act):
    """16 bits without a zero point: `scale = max |x| / 32767.5`, the largest magnitude averaged as of `Int8Act`.

    With 8-bit weights this is the scheme "16x8" of devices, for models whose activations 8 bits do not hold. The
    outputs of a softmax, a sigmoid and a tanh have the scale `2^-15`.
    """

    calibration_impl = AbsMaxRange
    bit_width = 16


class Int8DynamicAct(_OfDevices):
    """With a zero point, from the tensor itself: only for inputs of contractions with a weight, one range per row."""

    calibration_impl = MinMaxRange
    averaging_impl = None


EVERYTHING = Rule(weight_quant=Int8Weight, output_quant=Int8Act)


class OdmlQat:
    """Quantization-aware training for device compilers: every operation of a model is fake-quantized.

    Outputs are quantized late, by the operation that takes them, so a contraction, its bias, a batch normalization and
    a ReLU count as one. A weight is recognized by its origin: it is an `nnx.Param`, at most reshaped or cast.
    Statistics of activations advance in training mode; batch `s` is quantized with the average that includes it.

    Args:
        rules: `weight_quant` is the quantizer of weights, `output_quant` that of the *outputs* of matching operations;
            None quantizes everything to 8 bits (`Int8Weight`, `Int8Act`).
        disable_per_channel_weights: one scale for a whole weight.
        fixed_range_for_inputs: `(low, high)` of the model's inputs.
        fixed_range_for_outputs: `(low, high)` of the model's outputs.
        strict: an operation without a quantized form is an error; otherwise it runs in float.

    Raises:
        TypeError: `rules` are not rules; a rule has quantizers that are not used here; a quantizer of
                layers' weights.
        ValueError: a fixed range is empty, or does not contain 0.

    Source: Qwix's `OdmlQatProvider`. Differs from Qwix 0.1.8: an unknown operation is an error in strict mode, as its
    earlier versions had it; a weight may be either operand of a contraction; a tensor that two operations take is
    quantized once, with the statistics of the first.

    Example:
        >>> import jax.numpy as jnp
        >>> model = OdmlQat().quantize(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jnp.ones((3, 4)))
        >>> model(jnp.ones((3, 4))).shape, sorted(model.op_quant)
        ((3, 2), ['dot_general0_lhs', 'dot_general0_rhs', 'final_output0'])
    """

    def __init__(
        self,
        rules: Rule | Iterable[Rule] | None = None,
        *,
        disable_per_channel_weights: bool = False,
        fixed_range_for_inputs: Range | None = None,
        fixed_range_for_outputs: Range | None = None,
        strict: bool = True,
    ) -> None:
        self.policy = OdmlPolicy(
            rules=_checked(EVERYTHING if rules is None else rules),
            per_channel_weights=not disable_per_channel_weights,
            input_range=_range(fixed_range_for_inputs, "fixed_range_for_inputs"),
            output_range=_range(fixed_range_for_outputs, "fixed_range_for_outputs"),
            strict=strict,
        )

    def quantize(self, model: Model, *inputs: object, **kwargs: object) -> Model:
        """The model that `quantize_calls` makes for a single call.

        Args:
            model: an NNX module; it is not changed.
            inputs: its arguments: arrays or `jax.ShapeDtypeStruct`s; the model is traced, not run.
            kwargs: its keyword arguments.

        Returns:
            A model of a subclass of the model's own class, with the same paths.

        Raises:
            TypeError: `model` is not an NNX module.
            ValueError: no inputs; see `quantize_calls`.
        """
        return self.quantize_calls(model, [Call(inputs, kwargs)])

    def quantize_calls(self, model: Model, calls: Sequence[Call]) -> Model:
        """The model that is made for calls of several methods, of which each is traced.

        `jqinject.quantize(model, OdmlQat(), inputs=..., methods=...)` calls it.

        Args:
            model: as for `quantize`.
            calls: of different methods.

        Returns:
            As `quantize`.

        Raises:
            TypeError, ValueError: as `quantize`.
        """
        for call in calls or [Call((), {})]:
            what = f"{type(self).__name__}.quantize (of {call.name})"
            if not isinstance(model, nnx.Module):
                raise TypeError(
                    f"{what} takes an NNX module, got {type(model).__name__}; a Linen one: nnx.bridge.ToNNX"
                )
            if not call.args and not call.kwargs:
                raise ValueError(
                    f"{what} needs inputs of the shapes that the model is called with: it is traced with them"
                )
        return self._of_calls(model, calls)

    def _of_calls(self, model: Model, calls: Sequence[Call]) -> Model:
        """The model with quantizers in `op_quant`. A place that several methods run has one quantizer.

        Raises:
            ValueError: an unknown operation in strict mode; the model is already quantized.
        """
        _refuse_quantized(model)
        model = nnx.clone(model, graph=True)
        traced = find_sites(model, self.policy, calls)
        proxies = {name: _proxy(site) for name, site in traced.sites.items()}
        change_class(model, quantized_class(type(model), methods=[call.name for call in calls]))
        facts = {"same": traced.same_names, "stacks": traced.stacks}
        setattr(model, HELD, OpQuantizers(self.policy, nnx.Dict(proxies), **facts))
        return model


def _proxy(site: Site) -> ActQuantProxyFromInjector:
    """The quantizer of a site, which redeclares the axes of its scale, and its range if that is known."""
    overrides = {name: axes for name, axes in site.overrides.items() if name == "channelwise_axes" and axes}
    if not site.overrides.get("static", True):
        overrides["averaging_impl"] = None
    elif "fixed_range" in site.overrides:
        overrides |= {"calibration_impl": _fixed(site), "restart": True}
    where = (f"the quantizer of {site.name}", "")
    return ActQuantProxyFromInjector(site.quantizer, site, overrides=overrides, where=where, stack=site.stack)


def _fixed(site: Site) -> FixedRange:
    """Return the range that is known of a site: of a quantizer in 16 bits, which has no zero point, symmetric."""
    low, high = site.overrides["fixed_range"]
    if not ("bit_width" in site.quantizer and site.quantizer.bit_width == 16):
        return FixedRange(low, high)
    # Of functions whose outputs are below 1, devices expect the step 2^-15.
    end = 1 - 2.0**-16 if (low, high) in (LOGISTIC_RANGE, TANH_RANGE) else max(-low, high)
    return FixedRange(-end, end)


def _refuse_quantized(model: nnx.Module) -> None:
    for path, node in nnx.iter_modules(model, graph=True):
        if isinstance(node, QuantProxyFromInjector | QuantizedProgram):
            where = ".".join(map(str, path)) or "the model itself"
            raise ValueError(
                f"OdmlQat puts quantizers into float models, and {type(model).__name__} has some already, in {where}.\n"
                "  cure: quantize the float model; float weights go into the result by jqinject.load_state"
            )


def _checked(rules: Rule | Iterable[Rule]) -> tuple[Rule, ...]:
    checked = checked_rules(rules)
    for rule in checked:
        unused = [slot for slot, _ in rule.quantizers if slot not in ("weight_quant", "output_quant")]
        if unused or rule.overrides:
            raise TypeError(
                f"{rule}: a device quantizes weights and the outputs of operations, not "
                f"{', '.join(unused) or 'overrides'}.\n"
                "  cure: weight_quant=..., output_quant=...; subclass a quantizer to change it"
            )
        quantizer = rule.quantizer("weight_quant")
        # A quantizer of a layer's weights asks its layer for axes, and an operation is no layer.
        if quantizer is not None and not issubclass(quantizer.proxy_class, ActQuantProxyFromInjector):
            raise TypeError(
                f"{rule}: {quantizer.__name__} quantizes the weights of layers, and OdmlQat those of operations.\n"
                "  cure: jqinject.odml.Int8Weight, or a class derived from it"
            )
    return checked


def _range(ends: Range | None, name: str) -> Range | None:
    if ends is None:
        return None
    low, high = map(float, ends)
    if not (low <= 0 <= high and low < high):
        raise ValueError(f"OdmlQat: {name} must contain 0 and must not be empty, got ({low}, {high})")
    return low, high
