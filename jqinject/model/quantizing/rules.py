"""`Rule`: which layers and operations of a model are quantized, and by what; the plan of `quantize` for layers."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from flax import nnx

from jqinject import nn
from jqinject.core.flax_internals import flax_layer
from jqinject.dot.schemes.scheme import SchemeLike
from jqinject.inject import Binding, errors
from jqinject.model import frozen_weights, walk
from jqinject.nn import norms
from jqinject.nn.base.keywords import RuleKeywords
from jqinject.nn.base.slots import BIAS, GRAD, INPUT, OUTPUT, WEIGHT, act_slot, slots_of
from jqinject.program import known_operations
from jqinject.quant import QuantizerLike

LAYERS = (
    nn.QuantLinear,
    nn.QuantLinearGeneral,
    nn.QuantEinsum,
    nn.QuantConv,
    nn.QuantConvTranspose,
    nn.QuantLoRALinear,
    nn.QuantEmbed,
    nn.QuantBatchNorm,
    nn.QuantLayerNorm,
    nn.QuantRMSNorm,
    nn.QuantGroupNorm,
)
# Flax's layer -> the class that replaces it. Flax's subclasses are not here, as their forward may differ.
COUNTERPARTS: dict[type | None, type[nnx.Module]] = {flax_layer(layer): layer for layer in LAYERS}
LAYER_NAMES = tuple(kind.__name__ for kind in COUNTERPARTS if kind is not None)
# Keywords of a rule; the operands of a contraction and caches are activations.
RULE_SLOTS = (WEIGHT, BIAS, INPUT, OUTPUT, GRAD, *map(act_slot, ("lhs_", "rhs_", "cache_")))
SLOTS = tuple(slot.name for slot in RULE_SLOTS)
PREFIXES = tuple(slot.prefix for slot in RULE_SLOTS)
KEYWORDS = (*SLOTS, "op", "contraction", "scheme", "share")
#: Operations whose two operands may share a scale.
SHARING = ("add", "subtract")


def slots_for(module: object, *, named: bool = False) -> tuple[str, ...]:
    """Return the names of the quantizers of a rule that a layer takes.

    The input of a normalization comes from a contraction, and devices fuse the two: it has a quantizer only by a rule
    that names its class.

    Args:
        module: a layer of Flax.
        named: whether the rule names the layer's class.
    """
    layer = COUNTERPARTS[type(module)]
    left_out = [] if named or not issubclass(layer, norms.QuantNormLayer) else ["input_quant"]
    left_out += ["bias_quant"] if vars(module).get("bias", ...) is None else []
    return tuple(slot.name for slot in slots_of(layer) if slot.name not in left_out)


@dataclass(frozen=True, init=False)
class Rule:
    """Quantizers for the weights, or the operations, whose path matches.

    A rule without `op` is for weights: Flax's layers, and every parameter that the model contracts or looks rows up in
    by itself (`quantize` finds these in the model's program, if it is given `inputs`). The path is the layer's, the
    parameter's, that of the module that holds it, or that of the module that contracts it. With `op` a rule is for
    operations (adding, concatenating, a softmax, `dot_general`) in modules whose path matches, or whose own name does
    (`blocks.0.einsum1`, the module's second einsum, as `coverage` says), or only for layers of the named classes. A
    slot that is None stays float; a rule with only a path keeps what it matches float. Of several rules, the first that
    matches wins.

    Args:
        path: regular expression that must match a whole path, written with dots (`encoder.layers.0.fc`) or slashes.
        op: name or names of operations (`add`, `concatenate`, `dot_general`, `softmax`, ...) or of Flax's layer classes
            (`Conv`); None for all layers.
        weight_quant, bias_quant, input_quant, output_quant, grad_quant: injectors, or None. For an operation,
            `input_quant` is for its inputs that are not quantized yet, `output_quant` for its output.
        lhs_quant, rhs_quant: of the left and of the right operand of a contraction of two activations, instead of
            `input_quant`; only with `op`.
        cache_quant: of what the model writes into caches of keys and values: a quantizer of activations whose scales
            do not vary along the last axis, such as `Int8DynamicActPerRowFloat` or `TurboQuant4Act`. The path is the
            module's that writes, the cache's (`cache.layer_0.k` in the argument `cache`) or that of what holds it; of
            the rules with `cache_quant`, or with only a path, the first that matches wins. A rule with `cache_quant`
            alone leaves weights to the others.
        contraction: "auto", "int", "fp8" or "float", as for `QuantLinear`.
        scheme: a scheme of contractions such as `jqinject.quant.aqt.config_v4()`, by which Flax's own layers contract,
            forward and backward. It quantizes all operands, so no quantizer may be given with it.
        share: of `op="add"` or `"subtract"`, whether the two operands go through one quantizer, `input_quant`, whose
            range covers both: they have one scale.
        overrides: names that a quantizer redeclares, with the prefix of its slot: `weight_bit_width=4`.

    Raises:
        TypeError: `path` is not a string; an unknown keyword; an override of a quantizer that is not given.
        ValueError: `path` is not a regular expression; quantizers or a contraction along with a scheme; `share` for
            another operation, or without `input_quant`.

    Source: Qwix's `QuantizationRule`. Differs from Qwix: quantizers are injectors, and `input_quant` and `output_quant`
    are separate.

    Example:
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> rule = Rule(r"blocks\\..*", weight_quant=Int8WeightPerChannelFloat, weight_bit_width=4)
        >>> rule.matches("blocks.0.fc"), rule.matches("head")
        (True, False)
    """

    path: str
    op: tuple[str, ...] | None
    quantizers: tuple[tuple[str, object], ...]
    contraction: nn.ContractionKind
    scheme: SchemeLike | None
    share: bool
    overrides: tuple[tuple[str, object], ...]

    def __init__(
        self,
        path: str = ".*",
        *,
        op: str | Iterable[str] | None = None,
        weight_quant: QuantizerLike = None,
        bias_quant: QuantizerLike = None,
        input_quant: QuantizerLike = None,
        output_quant: QuantizerLike = None,
        grad_quant: QuantizerLike = None,
        lhs_quant: QuantizerLike = None,
        rhs_quant: QuantizerLike = None,
        cache_quant: QuantizerLike = None,
        contraction: nn.ContractionKind = "auto",
        scheme: SchemeLike | None = None,
        share: bool = False,
        **overrides: Unpack[RuleKeywords],
    ) -> None:
        arguments = locals()
        quantizers = {slot: arguments[slot] for slot in SLOTS if arguments[slot] is not None}
        names = (op,) if isinstance(op, str) else op
        if scheme is not None and (contraction != "auto" or quantizers):
            raise ValueError(
                "Rule: a scheme quantizes weights, inputs and gradients by itself, and says how they are contracted.\n"
                "  cure: a rule with scheme=... alone, or with quantizers and a contraction alone"
            )
        if cache_quant is not None and op is not None:
            raise ValueError(
                "Rule: cache_quant is for what modules write into caches, whatever the operation, and a rule with "
                "op=... is for operations.\n  cure: a rule with cache_quant=... of its own"
            )
        if share and (names is None or not {*names} <= {*SHARING} or input_quant is None):
            raise ValueError(
                f"Rule: share=True gives the two operands of {' or '.join(SHARING)} one scale, by input_quant; got "
                f"op={op!r}, input_quant={input_quant!r:.80}.\n"
                "  cure: Rule(op='add', input_quant=Int8ActPerTensorMinMax, share=True)"
            )
        vars(self).update(
            path=path,
            op=None if names is None else tuple(names),
            quantizers=tuple(quantizers.items()),
            contraction=contraction,
            scheme=scheme,
            share=share,
            overrides=tuple(_checked_overrides(overrides, quantizers).items()),
        )
        _check_pattern(path)

    def matches(self, *paths: str) -> bool:
        """Whether any of some paths, written with dots, matches as a whole."""
        return any(matches_path(self.path, path) for path in paths)

    def quantizer(self, slot: str) -> Any:
        """The injector of a slot, or None."""
        return dict(self.quantizers).get(slot)

    def declared(self, slot: str) -> Any:
        """The injector of a slot with the overrides for it, or None; compared by value: each trace chooses the same."""
        quantizer, prefix = self.quantizer(slot), slot.removesuffix("quant")
        own = {n.removeprefix(prefix): v for n, v in self.overrides if n.startswith(prefix)}
        return Binding(quantizer, own) if quantizer is not None and own else quantizer

    @property
    def keeps_float(self) -> bool:
        """Whether matching layers stay float."""
        return not self.quantizers and not self.configures

    def takes(self, *names: str) -> bool:
        """Whether it is for weights, and not for caches alone; one with `op`, whether it is for one of these names.

        Args:
            names: of what contracts the weight: the operation, the class of the layer.
        """
        if self.op is None:
            return self.configures or [s for s, _ in self.quantizers] != ["cache_quant"]
        return not {*self.op}.isdisjoint(names)

    @property
    def configures(self) -> bool:
        """Whether the rule gives Flax's own layers a scheme."""
        return self.scheme is not None

    def __str__(self) -> str:
        named = [f"{slot}={getattr(q, '__name__', q)}" for slot, q in self.quantizers]
        named += [f"{name}={value}" for name, value in self.overrides]
        named += ["scheme=..."] if self.configures else []
        named += ["share=True"] if self.share else []
        ops = [] if self.op is None else [f"op={', '.join(self.op)}"]
        return f"Rule({', '.join([repr(self.path), *ops, *named])})"


def checked_rules(rules: object) -> tuple[Rule, ...]:
    """Rules as a tuple.

    Raises:
        TypeError: an argument that is not a rule.
        ValueError: no rule; the name of neither an operation nor a layer, with the nearest ones.
    """
    if isinstance(rules, Rule) or not isinstance(rules, Iterable) or isinstance(rules, Mapping | str | type):
        checked: tuple[Any, ...] = (rules,)
    else:
        checked = tuple(rules)
    for rule in checked:
        if not isinstance(rule, Rule):
            raise TypeError(
                f"rules are jqinject.Rule objects, got {type(rule).__name__} {rule!r:.80}.\n"
                "  cure: jqinject.Rule(weight_quant=...), a list of such, or jqinject.odml.OdmlQat()"
            )
        for name in rule.op or ():
            if name not in (names := (*known_operations(), *LAYER_NAMES)):
                hint = errors.did_you_mean(name, names)
                raise ValueError(
                    f"{rule}: {name!r} is neither an operation nor a layer{': ' + hint if hint else '.'}\n"
                    f"  operations: {', '.join(known_operations())}\n  layers: {', '.join(LAYER_NAMES)}"
                )
    if not checked:
        raise ValueError(
            "no rule was given.\n  cure: [jqinject.Rule(weight_quant=...)], which matches every layer"
        )
    return checked


def matches_path(pattern: str, path: str) -> bool:
    """Whether a regular expression matches a whole path, written with dots or with slashes."""
    return bool(re.fullmatch(pattern, path) or re.fullmatch(pattern, path.replace(".", "/")))


def _check_pattern(path: object) -> None:
    if not isinstance(path, str):
        raise TypeError(
            f"Rule: path is a regular expression in a string, got {type(path).__name__} {path!r:.80}"
        )
    try:
        re.compile(path)
    except re.error as error:
        raise ValueError(
            f"Rule: {path!r} is not a regular expression: {error}.\n  cure: '.*' is anything, r'\\.' a dot"
        ) from None


def _checked_overrides(
    overrides: Mapping[str, object], quantizers: Mapping[str, object]
) -> Mapping[str, object]:
    for name in overrides:
        if not name.startswith(PREFIXES):
            start = name.partition("_")[0]
            hint = errors.did_you_mean(name, KEYWORDS) or errors.did_you_mean(f"{start}_", PREFIXES)
            raise TypeError(
                f"Rule got an unexpected keyword {name!r}{': ' + hint if hint else '.'}\n  It knows "
                f"{', '.join(KEYWORDS)}, and what quantizers declare, with the prefix of their slot: weight_bit_width=4"
            )
        slot = next(s for s, prefix in zip(SLOTS, PREFIXES, strict=True) if name.startswith(prefix))
        if slot not in quantizers:
            raise TypeError(
                f"Rule: {name!r} changes a quantizer that is not there, as {slot} is None.\n"
                f"  cure: {slot}=... in the same rule"
            )
    return overrides


@dataclass(frozen=True)
class LayerRule:
    """The rule of one layer.

    Attributes:
        path: the layer's path.
        layer: its class.
        rule: index of the rule; None if none matches.
        slots: the quantizers that it gets; empty if it stays float.
    """

    path: str
    layer: str
    rule: int | None
    slots: tuple[str, ...]


def plan_layers(index: walk.ModelIndex, rules: tuple[Rule, ...]) -> dict[walk.Path, LayerRule]:
    """Return the rule of every layer that could be quantized, by path; of a shared one under its first path."""
    plan: dict[walk.Path, LayerRule] = {}
    for path, module in index.outermost(lambda node: type(node) in COUNTERPARTS):
        matching = (i for i, rule in enumerate(rules) if takes_layer(rule, module, ".".join(path)))
        number = next(matching, None)
        slots: tuple[str, ...] = ()
        if number is not None:
            takes = slots_for(module, named=rules[number].op is not None)
            slots = tuple(slot for slot, _ in rules[number].quantizers if slot in takes)
            if rules[number].configures and frozen_weights.op_slot(module) is not None:
                slots = ("contraction",)
        plan[path] = LayerRule(walk.place_name(path), type(module).__name__, number, slots)
    return plan


def weight_rule(rules: Iterable[Rule], *paths: str) -> Rule | None:
    """Return the first rule for weights that matches any of some paths; None without one."""
    return next((rule for rule in rules if rule.takes() and rule.matches(*paths)), None)


def takes_layer(rule: Rule, module: object, path: str) -> bool:
    """Whether a rule is for a layer: by the layer's path or, without `op`, by that of its weight."""
    names = (name for name in ("kernel", "embedding") if name in vars(module) and rule.op is None)
    weights = (f"{path}.{name}".lstrip(".") for name in names)
    return rule.takes(type(module).__name__) and rule.matches(path, *weights)


def nearest_pattern(rule: Rule, paths: Iterable[str]) -> str:
    """A hint for a rule whose path matches only part of a layer's path: the nearest pattern that matches all of it.

    Example:
        >>> print(nearest_pattern(Rule("up"), ["layers.0.up", "layers.0.down"]))
        : its path must match the whole of a layer's path, and 'up' only matches a part of 'layers.0.up'; write '.*up'
    """
    candidates = [] if rule.op is not None else list(paths)
    if rule.matches(*candidates):
        return ""
    written = rule.path
    explanation = ": its path must match the whole of a layer's path, and "
    for pattern in (f".*{written}", f"{written}.*", f".*{written}.*"):
        match = next((path for path in candidates if matches_path(pattern, path)), None)
        if match is not None:
            return f"{explanation}{written!r} only matches a part of {match!r}; write {pattern!r}"
    slashes = "/" in written
    hint = errors.did_you_mean(written, [path.replace(".", "/") if slashes else path for path in candidates])
    return f"{explanation}{written!r} matches none{'; ' + hint if hint else ''}" if candidates else ""
