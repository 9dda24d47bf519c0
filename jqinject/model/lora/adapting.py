"""`lora`: freezes a model's weights in low bits, with trainable low-rank updates beside them."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import jax.numpy as jnp
from flax import nnx

from jqinject.dot import READS_WHOLE, FrozenParam
from jqinject.model import freezing, frozen_weights, walk
from jqinject.model.lora import adapter_plan
from jqinject.model.lora.adapter_plan import PlannedAdapter
from jqinject.model.quantizing import check_rules, quantize_model, rule_policy
from jqinject.model.quantizing.rule_policy import QuantizationPlan
from jqinject.model.quantizing.rules import Rule, checked_rules
from jqinject.nn.freeze_layer import frozen_param
from jqinject.program import HELD, OpQuantizers, find_sites, tracked_value
from jqinject.quant_tensor import as_array

Model = TypeVar("Model", bound=nnx.Module)


def lora(
    model: Model,
    rules: Rule | Iterable[Rule],
    *,
    rank: adapter_plan.Rank,
    alpha: float | None = None,
    dropout: float = 0.0,
    start: adapter_plan.Start = "zeros",
    update: adapter_plan.Update = "beside",
    inputs: Iterable[object] | Mapping[str, object] | None = None,
    methods: rule_policy.Methods | None = None,
    rngs: nnx.Rngs,
) -> Model:
    """Make a model whose weights are frozen, and whose contractions get trainable low-rank updates (LoRA, QLoRA).

    Every parameter that a rule takes and that the model contracts, in Flax's layers and by itself, gets an adapter: a
    contraction of x with w becomes `x w + (alpha / rank) (x A) B`. The parameter is stored in the low bits of the
    rule's `weight_quant`; a rule without one leaves it float. By default B begins as zeros, so the model computes at
    first what its quantized base does; A begins as He's uniform numbers, as in Qwix. Adapters see the float input,
    whatever quantizer the base's input has.

    With the axes K of w that the contraction sums over, its free axes N, and any batch axes E (experts, layers of a
    stack), A has the shape (*E, *K, rank), B (*E, rank, *N), both w's dtype and sharding. They are `nnx.LoRAParam`s at
    the state paths `op_quant/adapters/<path of w>/a` and `.../b`: `nnx.state(model, nnx.LoRAParam)` is all there is to
    train and to save, and `jqinject.value_and_grad(loss)(model)` differentiates nothing else. Look-ups (embeddings)
    read w without the update.

    With `update="inside"` a contraction is `x Q(w + (alpha / rank) A B)`, Q the rule's fake quantizer, with a
    straight-through gradient to A and B: quantization-aware training of the adapters. The parameter stays float, is not
    trained, and is read so by look-ups too. `merge_lora` and `freeze` then make the very weights that were trained, bit
    for bit. Memory and time are those of quantization-aware training, without a gradient of w.

    All layers are run as parts of the model's program, as `quantize` runs a model that
    contracts parameters by itself; a method that is not in `methods` runs as it was written, without updates.

    Args:
        model: a float NNX module, concrete or abstract; it is not changed. Load its checkpoint first.
        rules: the first that matches a weight wins. Input quantizers with statistics are live: `calibrate`.
        rank: of all adapters; or of those whose parameter or module path matches a regular expression,
            `{".*attn.*": 16}`: the first that matches wins, and other weights are quantized without an adapter.
        alpha: the factor of an update is alpha / rank; None for the rank, a factor of 1.
        dropout: the share of an adapter's input that is set to 0 in training.
        start: "zeros" for a B of zeros; "error" for the A and B whose update is nearest to the rounding error of the
            base, `w` less what is stored of it (LoftQ, one step), where it is stored in low bits.
        update: "beside" a weight that is frozen in low bits, or "inside" its quantizer.
        inputs: the model's arguments, as for `quantize`.
        methods: the arguments of other methods, as for `quantize`.
        rngs: for A and for dropout.

    Returns:
        A new model, of the class of `model` or a subclass.

    Raises:
        TypeError: arguments of another kind; a proxy as quantizer.
        ValueError: `update="inside"` with dropout, or with `start="error"`; a rule with bias_quant: biases of an
            adapted model stay float; a rank below 1, or a pattern that matches nothing; a rule that takes nothing; a
            model that has adapters or is quantized already, named by path; no inputs; weights that are not finite; a
            weight whose contraction cannot be followed. Nothing is changed then.

    Source: Hu et al., 2021, "LoRA"; Dettmers et al., 2023, "QLoRA"; Li et al., 2023, "LoftQ"; for updates inside
    quantizers Bondarenko et al., 2024, "LR-QAT", and Jeon et al., 2024, "L4Q"; Qwix's `apply_lora_to_model`. Differs
    from Qwix: an `einsum` over experts has a B for each, and A keeps the axes of w.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jqinject.quant import NF4WeightPerGroupFloat
        >>> x = jnp.ones((3, 64))
        >>> base = nnx.Linear(64, 4, rngs=nnx.Rngs(0))
        >>> model = lora(base, Rule(weight_quant=NF4WeightPerGroupFloat), rank=2, inputs=x, rngs=nnx.Rngs(1))
        >>> jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam)))
        {'op_quant': {'adapters': {'kernel': {'a': (64, 2), 'b': (2, 4)}}}}
    """
    walk.check_module(model, "lora")
    adapter_plan.check_arguments(alpha, dropout, rngs, start, update)
    model, plan, adapters = _planned(model, rules, rank, inputs, methods, "lora")

    def adapted(model: Model, rngs: nnx.Rngs) -> Model:
        """The model with adapters, its base frozen unless they are inside its quantizers."""
        quantizers = quantize_model.quantize_program(model, plan, rngs)
        _add_adapters(model, quantizers, plan, adapters, (alpha, dropout), rngs, start, update == "inside")
        index = walk.ModelIndex(model)
        weights = frozen_weights.quantized_weights(index)
        freezing.check_finite(index, weights, "lora")
        if update == "beside":  # inside, whatever follows from the parameter has the update
            for holder in weights:
                frozen_weights.freeze_weight(index, holder, frozen_param(holder))
            _check_followed(model, plan, adapters)
        return model

    if walk.ModelIndex(model).is_abstract:
        return nnx.eval_shape(lambda model: adapted(model, nnx.clone(rngs)), model)
    return adapted(model, rngs)


def _planned(
    model: Model,
    rules: Rule | Iterable[Rule],
    rank: adapter_plan.Rank,
    inputs: object,
    methods: rule_policy.Methods | None,
    caller: str,
    *,
    allow_idle: bool = False,
) -> tuple[Model, QuantizationPlan, tuple[PlannedAdapter, ...]]:
    """A copy of a float model, what rules quantize in it, and the adapters of it.

    Raises:
        ValueError: see `lora`.
    """
    calls = rule_policy.traced_calls(model, rule_policy.call_with(inputs), methods, caller)
    if not rule_policy.has_arguments(calls):
        raise ValueError(
            f"{caller} finds the contractions of a model by tracing a method of it, with arrays or "
            "jax.ShapeDtypeStructs.\n  cure: inputs=(x,), or methods={'encode': (x,)}; Recipe.apply(..., "
            "method='encode') in the place of call=..."
        )
    ranks, checked = adapter_plan.checked_ranks(rank), checked_rules(rules)
    adapter_plan.refuse_bias_quantizers(checked, caller)
    model = nnx.clone(model, graph=True)
    index = walk.ModelIndex(model)
    adapter_plan.refuse_adapted(index)
    plan = QuantizationPlan.of(model, index, rule_policy.RulePolicy(checked, into_layers=True), calls)
    if not allow_idle:
        check_rules.refuse_idle(index, model, plan)
        adapter_plan.check_bases(plan)
    return model, plan, adapter_plan.plan_adapters(plan, ranks)


def _add_adapters(
    model: nnx.Module,
    quantizers: OpQuantizers,
    plan: QuantizationPlan,
    planned: tuple[PlannedAdapter, ...],
    numbers: tuple[float | None, float],
    rngs: nnx.Rngs,
    start: adapter_plan.Start,
    inside: bool = False,
) -> None:
    """Give a quantized model adapters: beside its weights, or inside their quantizers."""
    index, sites = walk.ModelIndex(model), quantizers.weight_sites()
    adapters = {}
    for entry in planned:
        name = walk.place_name(entry.path)
        factors = None
        if start == "error" and name in plan.parameters:
            site = sites[name]
            stored = jnp.asarray(as_array(frozen_weights.through_quantizer(site)), jnp.float32)
            wrong = site.weight.get_value().astype(jnp.float32) - stored
            factors = adapter_plan.nearest_factors(wrong, entry, entry.factor(numbers[0]))
        base = plan.parameters.get(name)
        adapters[name] = adapter_plan.new_adapter(entry, index.by_name[name], *numbers, base, rngs, factors)
        adapters[name].inside = inside
    quantizers.adapters = nnx.Dict(adapters)


def with_low_rank(
    model: Model,
    rules: Iterable[Rule],
    *,
    rank: adapter_plan.Rank,
    methods: rule_policy.Methods,
    allow_idle: bool = False,
) -> tuple[Model, dict[str, PlannedAdapter]]:
    """A quantized model in which each weight that a rule quantizes has a low-rank product beside it, 0 as yet.

    As `lora`, with a base that is not frozen. A rank above that of a weight is that of the weight.

    Args:
        model: a float NNX module; it is not changed.
        rules, methods, allow_idle: as for `quantize`.
        rank: as for `lora`.

    Returns:
        The model, and the plans of its adapters by path.

    Raises:
        ValueError: see `lora`.
    """
    model, plan, wide = _planned(model, rules, rank, None, methods, "LowRank", allow_idle=allow_idle)
    by_name, entries = walk.ModelIndex(model).by_name, {walk.place_name(entry.path): entry for entry in wide}
    quantized = [name for name in entries if name in plan.parameters]
    planned = {name: entries[name].within(by_name[name].shape) for name in quantized}
    adapters, quantizers = tuple(planned.values()), quantize_model.quantize_program(model, plan, None)
    _add_adapters(model, quantizers, plan, adapters, (None, 0.0), nnx.Rngs(0), "zeros")
    _check_followed(model, plan, adapters)
    return model, planned


def _check_followed(model: nnx.Module, plan: QuantizationPlan, planned: tuple[PlannedAdapter, ...]) -> None:
    """See that every contraction has its update, and note look-ups whose rows are not contracted.

    A parameter that is indexed before it is contracted is from then on dequantized first, so that the update follows.

    Raises:
        ValueError: a contraction has none.
    """
    nodes = walk.ModelIndex(model).nodes

    def without_update() -> tuple[set[tuple[tracked_value.Path, str]], list[PlannedAdapter]]:
        """What is adapted, and the plans of which a contraction is not."""
        adapted = find_sites(model, plan.policy, plan.calls).adapted
        return adapted, [e for e in planned if any((e.path, use.name) not in adapted for use in e.uses)]

    adapted, missing = without_update()
    for entry in missing:
        variable = nodes[tuple(map(str, entry.path))]
        if isinstance(variable, FrozenParam):
            variable.set_metadata(**{READS_WHOLE: True})
    if missing:
        adapted, missing = without_update()
    if missing:
        shown = "\n".join(f"    {walk.place_name(entry.path)}: {entry.uses[0].name}" for entry in missing)
        raise ValueError(
            f"lora: these weights change on their way to a contraction, so that an update cannot follow:\n{shown}\n"
            "  cure: rank={pattern: rank} that leaves them out"
        )
    for entry in planned:
        alone = tuple(name for name in entry.lookups if (entry.path, name) not in adapted)
        nodes[HELD, "adapters", walk.place_name(entry.path)].lookups = alone
