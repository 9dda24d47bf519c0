"""`quantize` makes a quantized model from a float one, by rules; `initialize` completes schemes written by hand."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import jax
from flax import nnx

from jqinject import program
from jqinject.dot.schemes import quant_operand, scheme, scheme_fits
from jqinject.dot.schemes.contraction import Contraction
from jqinject.model.caches import check_cache_quantizer
from jqinject.model.frozen_weights import geometry_of, op_slot
from jqinject.model.quantizing import check_rules, parameter_sites, rule_policy
from jqinject.model.quantizing.rule_policy import QuantizationPlan
from jqinject.model.quantizing.rules import COUNTERPARTS, LayerRule, Rule, checked_rules
from jqinject.model.walk import ModelIndex, check_module
from jqinject.nn.base.layer_schemes import scheme_op
from jqinject.program import OpQuantizers, kept_state
from jqinject.program.tracked_value import Path

Model = TypeVar("Model", bound=nnx.Module)


@runtime_checkable
class Provider(Protocol):
    """Rules that quantize a model themselves: `jqinject.odml.OdmlQat`."""

    def quantize_calls(self, model: nnx.Module, calls: Sequence[program.Call]) -> Any: ...


def quantize(
    model: Model,
    rules: Rule | Iterable[Rule] | Provider,
    *,
    inputs: Iterable[object] | Mapping[str, object] | None = None,
    methods: rule_policy.Methods | None = None,
    allow_idle: bool = False,
    rngs: nnx.Rngs | None = None,
) -> Model:
    """Make a quantized model from a float one: Flax layers that a rule matches become jqinject layers.

    A layer must be of Flax's own class (`Linear`, `LinearGeneral`, `Einsum`, `Conv`, `ConvTranspose`, `Embed`,
    `LoRALinear`, `BatchNorm`, `LayerNorm`, `RMSNorm`, `GroupNorm`); attention and recurrent cells hold such layers.
    Weights, their paths, metadata and sharding, random streams and shared layers stay as they are; arrays are not
    copied. An embedding takes the quantizers of weight, output and gradient; a normalization those of output and
    gradient, and of the input if a rule names its class. For a shared layer the first path counts. Stacked layers
    (built under `nnx.vmap`) get stacked quantizers.

    Rules with the name of an operation (`op="add"`) quantize operations outside layers: the model's call is traced and
    run as a program, with the quantizers in `model.op_quant`. So are the layers of Linen models
    (`nnx.bridge.ToNNX`), and the other methods that `methods` names: their quantizers are named `encode:...`. A method
    that calls another one runs it as a part of its own program; a place that several methods run has one quantizer. A
    model whose layers are all of Flax's classes is run as a program too if its call, traced with `inputs`, splits
    blocks and throws copies of them away (in `jax.checkpoint`, `jax.lax.scan`): so what the quantizers of these blocks
    record is kept.

    The quantizers are in training mode. The result loads a float checkpoint with `jqinject.load_state`.

    Args:
        model: a float NNX module, concrete or abstract (`nnx.eval_shape`); it is not changed.
        rules: the first that matches a layer wins; or `jqinject.odml.OdmlQat(...)`.
        inputs: the model's arguments, arrays or `jax.ShapeDtypeStruct`s (a dict: keywords); needed for rules about
            operations.
        methods: the arguments of other methods to quantize, a tuple or a dict of keywords for each:
            `{"encode": (ids,), "decode": {"x": x, "scale": 2.0}}`. A method that is not named here runs as it was
            written, and quantized methods that it calls run quantized.
        allow_idle: allow rules that match nothing.
        rngs: for quantizers that draw random numbers.

    Returns:
        A new model, of the class of `model` or a subclass.

    Warns:
        LowCoverageWarning: less than half of the weight bytes that the rules ask for are reached.
        OwnDerivativeWarning: a rule quantizes the backward pass of a contraction in a function with a derivative of
            its own.

    Raises:
        TypeError: `model` is not an NNX module; `rules` are not rules; a quantizer does not fit its slot; `inputs` are
            not arguments.
        ValueError: the model has no such method; a scheme that draws random numbers without `rngs`, or does not
            fit; no layer can be quantized, or none is; a rule matches nothing; no inputs for rules about
            operations; the model is already quantized.

    Source: Qwix's `quantize_model`. Differs from Qwix: layers change their class instead of functions being patched.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat
        >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
        >>> everywhere = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat)
        >>> quantized = quantize(model, everywhere)
        >>> type(quantized.layers[0]).__name__, quantized(jnp.ones((3, 4))).shape
        ('QuantLinear', (3, 2))
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"quantize takes an NNX module, got {type(model).__name__}.\n"
            "  cure: quantize_function(f, params, rules, inputs=(x,)), for f(params, x) of any library: "
            "lambda params, x: linen_module.apply(params, x); lambda params, x: params(x) of an Equinox module"
        )
    calls = rule_policy.traced_calls(model, rule_policy.call_with(inputs), methods, "quantize")
    if isinstance(rules, Provider) and not isinstance(rules, type):
        return rules.quantize_calls(model, calls)
    checked = checked_rules(cast("Rule | Iterable[Rule]", rules))
    for rule in checked:
        if rule.configures:
            scheme_fits.check_random_numbers(
                scheme.SchemeSpec.of(rule.scheme), rngs, str(rule), "quantize(..., rngs=nnx.Rngs(0))"
            )
    model = nnx.clone(model, graph=True)
    index = ModelIndex(model)
    check_rules.check_model(index, model, checked, calls)
    plan = QuantizationPlan.of(model, index, rule_policy.RulePolicy(checked), calls)
    if not allow_idle:
        check_rules.check_plan(index, model, plan)
    abstract = index.is_abstract
    quantized = planned_model(model, plan, rngs) if abstract else _quantized(model, index, plan, rngs)
    check_rules.warn_of_low_coverage(index, quantized, plan)
    check_rules.warn_of_own_derivatives(plan)
    return quantized


def quantize_function(
    function: program.Function,
    params: object,
    rules: Rule | Iterable[Rule] | Provider,
    *,
    inputs: Iterable[object] | Mapping[str, object],
    allow_idle: bool = False,
    rngs: nnx.Rngs | None = None,
) -> program.FunctionModel:
    """Quantize a function of parameters: Equinox modules, Linen's and Haiku's `apply`, plain JAX.

    The function is traced, and every contraction with a parameter, and every look-up in one, is quantized by the first
    rule that matches the path of the parameter in `params` (`layers.0.weight`), of what holds it, or of the Linen
    module that contracts it. The result is an NNX module, for calibration, recipes, freezing, LoRA, reports and export
    like any other; as a pure function it is `model.apply(model.state, *inputs)`, which returns outputs and state. A
    recipe takes the float model, `FunctionModel(function, params)`.

    Args:
        function: f(params, *inputs), pure.
        params: a pytree; its floating-point arrays are the parameters.
        rules: the first that matches wins.
        inputs: further arguments of the function, arrays or `jax.ShapeDtypeStruct`s: a tuple, or a dict of keywords.
        allow_idle: allow rules that match nothing.
        rngs: for quantizers that draw random numbers.

    Returns:
        A model in training mode; `model.eval()` and `model.train()` switch, and choose what `model.apply` does.

    Raises:
        TypeError, ValueError: see `FunctionModel` and `quantize`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> rule = Rule(weight_quant=Int8WeightPerChannelFloat)
        >>> params = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
        >>> model = quantize_function(lambda p, x: x @ p["w"] + p["b"], params, rule, inputs=(jnp.ones((3, 4)),))
        >>> y, state = jax.jit(model.apply)(model.state, jnp.ones((3, 4)))
        >>> y.shape, state.params["w"].shape
        ((3, 2), (4, 2))
    """
    model = program.FunctionModel(function, params)
    return quantize(model, rules, inputs=inputs, allow_idle=allow_idle, rngs=rngs)


def planned_model(model: Model, plan: QuantizationPlan, rngs: nnx.Rngs | None = None) -> Model:
    """Return the abstract quantized model, of shapes alone.

    Args:
        model: a float NNX module, concrete or abstract.
        plan: of it.
        rngs: see `quantize`.
    """
    return nnx.eval_shape(lambda model: _quantized(model, ModelIndex(model), plan, rngs), model)


def _quantized(model: Model, index: ModelIndex, plan: QuantizationPlan, rngs: nnx.Rngs | None) -> Model:
    """A model whose layers and program have the quantizers of the rules; changed in place."""
    for path, entry in plan.layers.items():
        if entry.rule is not None and entry.slots:
            try:
                _quantize_layer(index.nodes[path], plan.rules[entry.rule], entry, rngs)
            except Exception as error:
                error.add_note(f"while quantizing {entry.path}")
                raise
    has_sites = plan.outside.sites or any(use.quantizer is not None for use in plan.outside.uses)
    calls = plan.calls if rule_policy.has_arguments(plan.calls) else ()
    if has_sites or program.throws_away(model, plan.policy, calls):
        quantize_program(model, plan, rngs)
    return model


def quantize_program(model: nnx.Module, plan: QuantizationPlan, rngs: nnx.Rngs | None) -> OpQuantizers:
    """Let a model's methods run as programs, with the quantizers that were planned for them; return these."""
    index, sites = ModelIndex(model), plan.outside.sites
    tied = parameter_sites.tied_to_layers(index, plan.parameters)
    quantizers = {name: rule_policy.quantizer_at(site, rngs) for name, site in sites.items()}
    weights = {
        name: parameter_sites.parameter_site(index, parameter, rngs)
        for name, parameter in plan.parameters.items()
        if parameter.path not in tied
    }
    kind = program.quantized_class(type(model), methods=[call.name for call in plan.calls])
    program.change_class(model, kind)
    caches = tuple(site for site in sites.values() if site.cache_ndim)
    for site in caches:
        check_cache_quantizer(site, quantizers[site.name])
    between, parameters = nnx.Dict(quantizers), nnx.Dict(weights) if weights else None
    facts = tied, caches, plan.outside.same_names, plan.unstored, plan.outside.stacks
    modules = OpQuantizers(plan.policy, between, parameters, *facts)
    setattr(model, program.HELD, modules)
    return modules


def _quantize_layer(layer: Any, rule: Rule, entry: LayerRule, rngs: nnx.Rngs | None) -> None:
    """Turn a Flax layer into a jqinject layer, in place, with the quantizers of a rule."""
    if rule.configures:
        name = op_slot(layer)
        assert name is not None, "planned because it has one"
        # The function there is static; the module that replaces it is data.
        setattr(layer, name, nnx.data(scheme_op(layer, name, geometry_of(layer), rule.scheme, rngs)))
        return
    prefixes = tuple(slot.removesuffix("quant") for slot in entry.slots)
    overrides = {name: value for name, value in rule.overrides if name.startswith(prefixes)}
    quantizers: dict[str, object] = {slot: rule.quantizer(slot) for slot in entry.slots}
    if rule.contraction != "auto":
        quantizers["contraction"] = rule.contraction
    program.change_class(layer, COUNTERPARTS[type(layer)])
    layer._init_quantizers(quantizers, overrides, rngs)


def initialize(model: nnx.Module, *args: object, **kwargs: object) -> None:
    """Make the state of every `QDotGeneral`, `QEinsum` and `QConvGeneralDilated` of a model, in place.

    Such a module that was written by hand, `nnx.Linear(..., dot_general=QDotGeneral(scheme))`, does not know the shapes
    of its operands. If its scheme keeps state (learned scales, running ranges, amax histories), this is called once,
    before an optimizer is made or a checkpoint loaded. The model's call is traced for shapes, and nothing is computed.
    Layers of `jqinject.nn` and models that `quantize` returns are complete, and a second call changes nothing.

    Args:
        model: an NNX module.
        args, kwargs: of its call: arrays, or `jax.ShapeDtypeStruct`s.

    Raises:
        TypeError: `model` is not an NNX module.
        ValueError: a stack of layers (built under `nnx.vmap`), which is completed under `nnx.vmap` too.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.dot import QDotGeneral
        >>> from jqinject.quant import Fp8DelayedTraining
        >>> model = nnx.Linear(8, 4, dot_general=QDotGeneral(Fp8DelayedTraining), rngs=nnx.Rngs(0))
        >>> initialize(model, jnp.ones((1, 8)))
        >>> model.dot_general.fprop_lhs.quant.scale()
        Array(1., dtype=float32)
    """
    check_module(model, "initialize")
    graphdef, state = nnx.split(model, graph=True)
    recorded: dict[Path, dict[str, quant_operand.OperandAxes]] = {}

    def call(state: object, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        copy = nnx.merge(graphdef, state)
        for path, contraction in _contractions(copy).items():
            # Static, so that copies of the copy, in transformations, have it too.
            contraction.record = recorded.setdefault(path, {}).__setitem__
        copy(*args, **kwargs)

    jax.eval_shape(call, state, args, kwargs)
    contractions = _contractions(model)
    holders = {path: kept_state.node_at(model, path[:-1]) for path, axes in recorded.items() if axes}
    layers = ((path, layer) for path, layer in holders.items() if op_slot(layer) is not None)
    stacked = [path for path, layer in layers if layer.kernel.ndim > geometry_of(layer).ndim]
    if stacked:
        raise ValueError(
            f"initialize: {'.'.join(map(str, stacked[0]))} belongs to a stack of layers, each of which has a state of "
            "its own.\n  cure: nnx.vmap(lambda layers, x: jqinject.initialize(layers, x), in_axes=(0, None))(layers, x)"
        )
    for path, axes in recorded.items():
        contractions[path].complete(axes)


def _contractions(model: nnx.Module) -> dict[Path, Contraction]:
    nodes = nnx.iter_modules(model, graph=True)
    return {tuple(path): node for path, node in nodes if isinstance(node, Contraction)}
