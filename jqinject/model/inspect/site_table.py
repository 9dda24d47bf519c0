"""The site table: a row for each contraction, look-up and cache write of a model.

`coverage`, `report`, `rules_report`, HTML pages and recipes show these rows. Next: `coverage`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jqinject.model.frozen_weights import quantized_op
from jqinject.model.inspect.layer_numbers import LayerNumbers
from jqinject.model.inspect.model_weights import ModelWeight, ModelWeights, OperandGrid, note_of_shards
from jqinject.model.inspect.running_program import RunningProgram
from jqinject.model.inspect.weight_flow import Flow, TracedContraction, WeightFlow
from jqinject.model.quantizing.rule_policy import OURS, RulePolicy
from jqinject.model.quantizing.rules import COUNTERPARTS, Rule
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import (
    Call,
    Policy,
    WeightUse,
    dotted,
    names_of,
    operation_of,
    program_of_call,
    sites_of_program,
)

LEGEND = (
    (
        "weight, input",
        "Their grids; int4 in groups of 32: with a scale for each 32; int8 per row: for each row.",
    ),
    (
        "contracts",
        "In which numbers the program contracts them now; float: quantized ones are dequantized first.",
    ),
    (
        "quantized, in low bits",
        "A matrix in all its uses; multiply-adds whose operands have at most 8 bits each.",
    ),
)
"""What the columns of a coverage mean."""
MEASURED = ("alone dB", "here dB", "weight dB", "clipped w/in/out", "only quantized", "only float")
"""The columns of a report with numbers."""
TOTAL = "all layers"
"""The first cell of the line of totals in a report."""
RIGHT = frozenset({"bytes", "operations", "multiply-adds", *MEASURED})
"""The columns of numbers."""
BIG = 1024
CACHE = "cache"
"""The operation of a row for what a model writes into a cache."""
UNKNOWN = "no inputs were given, so the program was not looked at"
UNREAD = "no traced call reads it; other methods are traced if they are named: methods={...}"
NO_ARRAY = "it is not one of the arrays of the model: hold it in an nnx.Param"
CUSTOM = "a function with a derivative of its own"
PARTS = {
    "cond": "a branch (cond)",
    "while": "a loop of unknown length (while)",
    "pallas_call": "a kernel (pallas_call)",
    "ffi_call": "a foreign function (ffi_call)",
    "pure_callback": "a function outside of the program (pure_callback)",
    "custom_jvp_call": f"{CUSTOM} (custom_jvp)",
    "custom_vjp_call": f"{CUSTOM} (custom_vjp)",
}


@dataclass(frozen=True)
class SiteRow:
    """One contraction, look-up or cache write of a model; a matrix that no call reads; in a report, those of a layer.

    A grid is the numbers that a quantizer makes: "int8" has one scale, or one for each channel of a weight; "int8 per
    row" and "int4 in groups of 32" have one for each row of the input, and for each 32 numbers.

    Attributes:
        path: what a report lists it under: the layer, the parameter, the cache, or the operation on two activations.
        operation: "dot_general", "einsum", "conv_general_dilated", "ragged_dot", "take" for a look-up, "cache" for a
            cache write; "" for a matrix that no traced call reads, and for a layer without a contraction.
        name: of the operation; the layer's path in a layer.
        parameter: path of the weight; "" for two activations, and for a cache.
        layer: the class of the layer; elsewhere what the model does with the parameter.
        weight: the grid of the weight; of two activations, of the right one; of a cache, its own. "" if it is float.
        input: the grid of the other operand; of two activations, of the left one.
        formats: both, as in "int8 x int4 in groups of 32"; "" for two floats.
        contraction: "int", "fp8", "fp4" or "float", as the program contracts now; in a report, as the compiled program
            does. "none" for anything else.
        program: dtypes of operands and output in the compiled program, in XLA's notation; "" outside of reports.
        why: the weight is not quantized here; "" if it is.
        rule: that would quantize it; "" if no rule would.
        note: why quantized operands are contracted as floats, what an operand goes through before it is quantized,
            whether the steps of a loop share its range, and whether groups cross shards.
        shape: of the weight; None if it is no array of the model.
        float_bytes: of the weight in floats.
        weight_bytes: of the weight as it is stored, with scales and zero points.
        bits: of one number of a quantized weight; None if they are learned, and for floats.
        operations: multiply-adds, those in a loop as often as it runs (once if the trip count is unknown); of several
            branches, those of the one with the most; 0 for a look-up.
        is_low_bit: whether both operands have at most 8 bits; of a look-up, whether the weight has.
        numbers: the measured quantization error; None in a report without numbers, or if nothing is quantized.
    """

    path: str
    operation: str = ""
    name: str = ""
    parameter: str = ""
    layer: str = ""
    weight: str = ""
    input: str = ""
    formats: str = ""
    contraction: str = "none"
    program: str = ""
    why: str = ""
    rule: str = ""
    note: str = ""
    shape: tuple[int, ...] | None = None
    float_bytes: int = 0
    weight_bytes: int = 0
    bits: float | None = None
    operations: int = 0
    is_low_bit: bool = False
    numbers: LayerNumbers | None = None

    @property
    def size(self) -> int:
        """The number of elements of the weight; more than `BIG` if it is no array of the model."""
        return BIG + 1 if self.shape is None else math.prod(self.shape)


class TracedCall:
    """One call of a model: as it was written, with what quantizers reach in it, and as it runs.

    Args:
        model: in evaluation mode.
        call: of it.
        policy: of the quantizers between its operations.
        weights: of the model.

    Attributes:
        flow: of the program as the model was written.
        uses: where the interpreter reaches weights: (equation, path of the parameter) -> use.
        products: equation -> contraction of activations.
        caches: the names of the caches that are written in low bits.
        running: the program as it runs.
        kinds: weight -> kinds of its contractions in that program.
    """

    def __init__(self, model: nnx.Module, call: Call, policy: Policy, weights: ModelWeights) -> None:
        program = program_of_call(model, policy, call)
        sites = sites_of_program(program, policy, names_of(model, call))
        weights.note_sites(sites.sites.values())
        flows = [weights.flow_of(path) for path in program.paths]
        self.program = program  # whose equations are compared by identity
        self.flow = WeightFlow(program.body, flows, _constant)
        self.uses = {(use.equation, dotted(use.weight_path)): use for use in sites.uses}
        self.products = {product.equation: product for product in sites.products}
        written = (name for name, site in sites.sites.items() if site.cache_ndim)
        self.caches = [name for name in written if name in weights.between]
        self.running = RunningProgram(model, call)
        self.kinds = self.running.kinds(flows)


def _constant(value: ArrayLike) -> Flow:
    """The flow of a constant of a program: a large one is listed as a weight that the model does not have."""
    if np.size(value) <= BIG or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        return Flow()
    name = f"a constant of the program, {jnp.result_type(value)}{list(np.shape(value))}"
    return Flow(sources=frozenset({name}))


class SiteTable:
    """The site table of a model, from all its calls.

    Args:
        model: an NNX module; a copy of it is traced in evaluation mode.
        calls: of it, of several methods; none for a look at its structure alone.
        rules: that it was quantized by, if it does not keep them itself.

    Attributes:
        weights: of the copy.
        calls: traced.
        rows: the contractions, look-ups and cache writes in the order of the calls' programs, then the matrices that no
            call reads.
    """

    def __init__(self, model: nnx.Module, calls: Sequence[Call], rules: Sequence[Rule] | None = None) -> None:
        copy = nnx.clone(model, graph=True)
        copy.eval()
        self.weights = ModelWeights(copy)
        quantizers = self.weights.quantizers
        policy = RulePolicy(()) if quantizers is None else quantizers.policy
        self.calls = [TracedCall(copy, call, policy, self.weights) for call in calls]
        self._reasons = Reasons(self.weights, rules)
        self._look_ups: Counter[str] = Counter()
        rows = [row for call in self.calls for row in self._rows_of(call)]
        self.rows = (*_without_twins(rows), *self._unread({row.parameter for row in rows}))

    def _rows_of(self, call: TracedCall) -> Iterator[SiteRow]:
        for contraction in call.flow.contractions:
            if not contraction.sources:
                yield self._product(contraction, call)
            for number, name in enumerate(sorted(_matrices(contraction.sources, self.weights.all))):
                # The multiply-adds of an operation that takes several weights count once.
                yield self._use(replace(contraction, times=0) if number else contraction, name, call)
        for name in call.caches:
            grid = self.weights.grid_at(name)
            yield SiteRow(name, CACHE, name, layer="cache write", weight=_text(grid), formats=_text(grid))

    def _use(self, contraction: TracedContraction, name: str, call: TracedCall) -> SiteRow:
        """The row of a contraction with a weight, or of a look-up."""
        weights, use = self.weights, call.uses.get((contraction.equation, name))
        grid = weights.grid_of(name) if self._is_reached(contraction, name, use) else None
        operation = contraction.operation if use is None else use.operation
        low = grid is not None and grid.is_low
        operand, kind, note = None, "none", ""
        if contraction.operation != "take":
            operand = self._other_grid(name, use)
            kinds = call.kinds.get(name, frozenset())
            kind = " and ".join(sorted(kinds)) or "float"
            low = low and (
                (kinds <= {"int", "fp8"} and bool(kinds)) or (operand is not None and operand.is_low)
            )
            site = "" if use is None else use.beside
            note = joined(
                weights.transform_of_input(name, site),
                weights.range_of_loop(site, contraction.steps),
                note_of_shards(weights.layer_of(name)),
            )
        weight = weights.all.get(name)
        why = ""
        if grid is None:
            why = NO_ARRAY if weight is None else self._reasons.of_contracted(weight, contraction, use)
        return replace(
            self._row(name, grid, why, operation),
            name=self._name(contraction, name) if use is None else use.name,
            operation=operation,
            input=_text(operand),
            formats=formats_of(operation, _text(operand), _text(grid)),
            contraction=kind,
            note=note,
            operations=contraction.operations,
            is_low_bit=low,
        )

    def _name(self, contraction: TracedContraction, name: str) -> str:
        """The name of an operation that the interpreter does not reach: of a look-up in a frozen table, as before."""
        path, operation = contraction.path, contraction.operation
        if operation != "take" or not self.weights.is_frozen(name) or self.weights.entry_of(name) != name:
            return path or operation
        self._look_ups[path] += 1
        return dotted((*filter(None, (path,)), f"take{self._look_ups[path] - 1}"))

    def _row(self, name: str, grid: OperandGrid | None, why: str, operation: str = "") -> SiteRow:
        """What a row says of a weight, however it is read."""
        weights, weight, entry = self.weights, self.weights.all.get(name), self.weights.entry_of(name)
        return SiteRow(
            entry,
            parameter=name,
            layer=operation if entry == name else type(weights.layer_of(name)).__name__,
            weight=_text(grid),
            why=why,
            rule=rule_for(name) if weight is not None and why and _is_rule_of_use(why) else "",
            shape=None if weight is None else weight.shape,
            float_bytes=0 if weight is None else weight.nbytes,
            weight_bytes=weights.stored_bytes(name),
            bits=None if grid is None else grid.bits,
        )

    def _other_grid(self, name: str, use: WeightUse | None) -> OperandGrid | None:
        """The grid of the operand that a weight is contracted with."""
        if use is not None:
            return self.weights.grid_at(use.beside)
        at = self.weights.at_sites.get(name)
        if at is None:
            return self.weights.input_grid(name)
        operation, _, side = at.rpartition("_")
        return self.weights.grid_at(f"{operation}_{'lhs' if side == 'rhs' else 'rhs'}")

    def _is_reached(self, contraction: TracedContraction, name: str, use: WeightUse | None) -> bool:
        """Whether a quantized weight is so in this place: by its layer, by the program, or because it is frozen."""
        if use is not None or self.weights.is_frozen(name) or name in self.weights.at_sites:
            return True
        layer = name.rpartition(".")[0]
        return name not in self.weights.sites and f"{contraction.path}.".startswith(
            f"{layer}." if layer else ""
        )

    def _product(self, contraction: TracedContraction, call: TracedCall) -> SiteRow:
        """The row of a contraction of two activations."""
        product = call.products.get(contraction.equation)
        operation = contraction.operation if product is None else product.operation
        name = contraction.path or operation if product is None else product.name
        lhs, rhs = ("", "") if product is None else (product.lhs, product.rhs)
        left, right = self.weights.grid_at(lhs, 0), self.weights.grid_at(rhs, 1)
        notes = (self.weights.transform_of_input("", site) for site in (lhs, rhs) if site)
        return SiteRow(
            name,
            operation,
            name,
            layer=f"{operation} of activations",
            weight=_text(right),
            input=_text(left),
            formats=formats_of(operation, _text(left), _text(right)),
            note=joined(*notes),
            operations=contraction.operations,
            is_low_bit=left is not None and right is not None and left.is_low and right.is_low,
        )

    def _unread(self, used: set[str]) -> Iterator[SiteRow]:
        """The matrices that no call reads."""
        read = used.union(*(call.flow.read for call in self.calls))
        for name, weight in self.weights.all.items():
            if weight.is_parameter and len(weight.shape) > 1 and name not in read:
                grid = self.weights.grid_of(name)
                why = "" if grid is not None else self._reasons.of_unread(weight, traced=bool(self.calls))
                yield self._row(name, grid, why)


def formats_of(operation: str, input: str, weight: str) -> str:
    """Both grids as text; "" for two floats."""
    if not (input or weight):
        return ""
    return weight if operation == "take" else f"{input or 'float'} x {weight or 'float'}"


def joined(*notes: str) -> str:
    """Several notes as one."""
    return "; ".join(dict.fromkeys(filter(None, notes)))


def _text(grid: OperandGrid | None) -> str:
    return "" if grid is None else grid.text


def _without_twins(rows: Sequence[SiteRow]) -> Iterator[SiteRow]:
    """The rows without those of branches that do the same as the branch that counts."""
    counted = {replace(row, operations=0) for row in rows if row.operations}
    return (row for row in rows if row.operations or row not in counted)


def _matrices(sources: frozenset[str], weights: Mapping[str, ModelWeight]) -> frozenset[str]:
    """The weights that an operand is made of, without the vectors that scale them."""
    if len(sources) < 2:
        return sources
    matrices = frozenset(name for name in sources if name not in weights or len(weights[name].shape) > 1)
    return matrices or sources


def rule_for(name: str) -> str:
    """The rule that takes a parameter, as text.

    Example:
        >>> rule_for("blocks.0.w"), rule_for("head[1]")
        ("Rule('blocks.0.w', ...)", "Rule('head\\\\\\\\[1\\\\\\\\]', ...)")
    """
    plain = re.fullmatch(r"[\w.]*", name)
    return f"Rule({(name if plain else re.escape(name))!r}, ...)"


def _is_rule_of_use(why: str) -> bool:
    """Whether a rule for the path would take the weight, given why it is not quantized."""
    return not why.startswith(("it is not a float", "it is contracted inside", "it is not followed"))


class Reasons:
    """Says why a weight is not quantized.

    Args:
        weights: of the model.
        rules: that it was quantized by; None for those that it keeps, if it keeps them.
    """

    def __init__(self, weights: ModelWeights, rules: Sequence[Rule] | None) -> None:
        self._weights = weights
        quantizers = weights.quantizers
        policy = None if quantizers is None else quantizers.policy
        own = policy.rules if isinstance(policy, RulePolicy) else None
        self._rules = own if rules is None else tuple(rules)
        self._traced = quantizers is not None
        self._is_float = quantizers is None and not any(
            isinstance(node, OURS) or quantized_op(node) is not None for node in weights.nodes.values()
        )

    def of_unread(self, weight: ModelWeight, *, traced: bool) -> str:
        """Return why a weight is not quantized that no traced call reads, or that may be read: no call was traced."""
        own = self._of_itself(weight)
        if own or traced:
            return own or UNREAD
        named = type(weight.layer) in COUNTERPARTS
        return self._of_rules(weight, "", "dot_general") if named else UNKNOWN

    def of_contracted(
        self, weight: ModelWeight, contraction: TracedContraction, use: WeightUse | None
    ) -> str:
        """Return why a weight is not quantized that is contracted or looked up."""
        path, operation = contraction.path, contraction.operation
        own = self._of_itself(weight)
        if own:
            return own
        if use is not None:
            return self._of_rules(weight, path, use.operation)
        if type(weight.layer) in COUNTERPARTS and path == ".".join(weight.path[:-1]):
            return self._of_rules(weight, path, operation)
        if contraction.inside:
            part = PARTS.get(contraction.inside, contraction.inside)
            return f"it is contracted inside {part}, which runs as it was written"
        if contraction.through:
            return (
                f"it is not followed because of {contraction.through} between the parameter and its "
                f"{'look-up' if operation == 'take' else 'contraction'}"
            )
        return f"its {operation} in {path or 'the model itself'} runs as it was written"

    def _of_itself(self, weight: ModelWeight) -> str:
        """What in the weight itself, or in its layer, keeps it float; "" if nothing does."""
        layer, kind = weight.layer, weight.kind
        if not weight.is_parameter:
            named = f"{'an' if kind[:1] in 'aeiouAEIOU' else 'a'} {kind}"
            what = f"numbers of {weight.dtype}" if kind in ("Param", "FrozenParam") else named
            return f"it is not a float nnx.Param, but {what}"
        if isinstance(layer, QuantWeightLayer):
            if weight.path[-1] != layer.weight_name:
                return f"its {type(layer).__name__} quantizes the {layer.weight_name} alone"
            if layer.weight_quant is None:
                return "its layer has no weight quantizer"
        holder = (
            layer if isinstance(layer, QuantWeightLayer) else self._weights.sites.get(".".join(weight.path))
        )
        proxy = None if holder is None else holder.weight_quant
        return "its quantizer is switched off" if proxy is not None and not proxy.is_quant_enabled else ""

    def _of_rules(self, weight: ModelWeight, path: str, operation: str) -> str:
        name, layer = ".".join(weight.path), weight.layer
        if self._rules is None:
            if self._is_float:
                return "the model is not quantized"
            looked_at = self._traced or type(layer) in COUNTERPARTS
            return "no rule took it" if looked_at else f"{UNKNOWN} when the model was quantized"
        places = (path, name, name.rpartition(".")[0])
        for number, rule in enumerate(self._rules):
            by_class = rule.op is not None and type(layer).__name__ in rule.op
            takes = rule.op is None or by_class or operation_of(operation).name in rule.op
            if takes and rule.matches(*places):
                if rule.keeps_float:
                    return f"rule {number} keeps it float: {rule}"
                if rule.quantizer("weight_quant") is None and not rule.configures:
                    return f"rule {number} has no weight_quant: {rule}"
                return (
                    "no rule took it" if self._traced else "no inputs were given when the model was quantized"
                )
        return "no rule matches its path"


def decibels(ratio: float | None) -> str:
    """A ratio as a cell's text."""
    if ratio is None:
        return "-"
    return f"{ratio:.1f}" if math.isfinite(ratio) else str(ratio)
