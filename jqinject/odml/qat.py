"""`OdmlQat`: fake-quantizes every operation of a model, as a device will run it."""

import abc
from collections.abc import Iterable, Sequence
from typing import TypeVar

from flax import nnx

from jqinject.model import Rule
from jqinject.model.quantizing.rules import checked_rules
from jqinject.odml.device_policy import Int8Act, Int8Weight, OdmlPolicy, Range, overrides_of
from jqinject.program import (
    HELD,
    Call,
    OpQuantizers,
    QuantizedProgram,
    Site,
    change_class,
    find_sites,
    quantized_class,
)
from jqinject.proxy import ActQuantProxyFromInjector, QuantProxyFromInjector

Model = TypeVar("Model", bound=nnx.Module)
EVERYTHING = Rule(weight_quant=Int8Weight, output_quant=Int8Act)


class OdmlProvider(abc.ABC):
    """Abstract: makes models for device compilers by a policy.

    Args:
        rules, disable_per_channel_weights, fixed_range_for_inputs, fixed_range_for_outputs, strict: see `OdmlQat`.
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
            rules=_checked(rules),
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

    @abc.abstractmethod
    def _of_calls(self, model: Model, calls: Sequence[Call]) -> Model:
        """The model, of checked calls."""


class OdmlQat(OdmlProvider):
    """Quantization-aware training for device compilers: every operation of a model is fake-quantized.

    Outputs are quantized late, by the operation that takes them, so a contraction, its bias, a batch normalization and
    a ReLU count as one. A weight is recognized by its origin: it is an `nnx.Param`, at most reshaped or cast.
    Statistics of activations advance in training mode; batch `s` is quantized with the average that includes it.

    Args:
        rules: `weight_quant` is the quantizer of weights, `output_quant` that of the *outputs* of matching operations;
            None quantizes everything to 8 bits.
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
    where = (f"the quantizer of {site.name}", "")
    return ActQuantProxyFromInjector(
        site.quantizer, site, overrides=overrides_of(site), where=where, stack=site.stack
    )


def _refuse_quantized(model: nnx.Module) -> None:
    for path, node in nnx.iter_modules(model, graph=True):
        if isinstance(node, QuantProxyFromInjector | QuantizedProgram):
            where = ".".join(map(str, path)) or "the model itself"
            raise ValueError(
                f"OdmlQat puts quantizers into float models, and {type(model).__name__} has some already, in {where}.\n"
                "  cure: quantize the float model; float weights go into the result by jqinject.load_state"
            )


def _checked(rules: Rule | Iterable[Rule] | None) -> tuple[Rule, ...]:
    if rules is None:
        return (EVERYTHING,)
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
