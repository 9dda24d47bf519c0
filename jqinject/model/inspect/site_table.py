"""The site table: a row for each contraction, look-up and cache write of a model.

`coverage`, `report`, `rules_report`, HTML pages and recipes show these rows. Next: `coverage`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import program
from jqinject.dot import FrozenParam
from jqinject.model.caches import bytes_in_low_bits
from jqinject.model.inspect import layer_numbers
from jqinject.model.inspect.model_weights import FLOAT, ModelArray, ModelWeights, OperandGrid, note_of_shards
from jqinject.model.inspect.traced_call import BIG, TracedCall
from jqinject.model.inspect.weight_flow import TracedContraction
from jqinject.model.quantizing.rule_policy import RulePolicy
from jqinject.model.quantizing.rules import COUNTERPARTS, Rule
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import Call, WeightUse
from jqinject.proxy import ActQuantProxyFromInjector

LOW_BITS = "quantized, in low bits"
#: What the columns of a coverage mean.
LEGEND = {
    "weight, input": "Their grids; int4 in groups of 32: with a scale for each 32; int8 per row: for each row.",
    "contracts": "In which numbers the program contracts them now; float: quantized ones are dequantized first.",
    LOW_BITS: "A matrix in all its uses; multiply-adds whose operands have at most 8 bits each.",
}
#: The columns of a report with numbers.
MEASURED = ("alone dB", "here dB", "weight dB", "clipped w/in/out", "only quantized", "only float")
#: The columns of numbers.
RIGHT = frozenset({"bytes", "operations", "multiply-adds", *MEASURED})
#: The operation of a row for what a model writes into a cache.
CACHE = "cache"
UNKNOWN = "no inputs were given, so the program was not looked at"
UNREAD = "no traced call reads it; other methods are traced if they are named: methods={...}"
NO_QUANTIZER = "it has no quantizer"
PARTS = {
    "while": "a loop of unknown length (while)",
    "pallas_call": "a kernel (pallas_call)",
    "ffi_call": "a foreign function (ffi_call)",
    "pure_callback": "a function outside of the program (pure_callback)",
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
        float_bytes: of the weight in floats; of the cache in its dtype.
        weight_bytes: of the weight as it is stored, with scales and zero points; of the cache in low bits, likewise.
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
    numbers: layer_numbers.LayerNumbers | None = None

    @property
    def site(self) -> str:
        """What the program contracts there: the path of the weight; the name of a contraction of two activations."""
        return self.parameter or self.name

    @property
    def size(self) -> int:
        """The number of elements of the weight; more than `BIG` if it is no array of the model."""
        return BIG + 1 if self.shape is None else math.prod(self.shape)


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
        own = policy.rules if isinstance(policy, RulePolicy) and quantizers is not None else None
        self._rules = own if rules is None else tuple(rules)
        rows = [row for call in self.calls for row in self._rows_of(call)]
        self.rows = (*_without_twins(rows), *self._unread({row.parameter for row in rows}))

    def _rows_of(self, call: TracedCall) -> Iterator[SiteRow]:
        for contraction in call.flow.contractions:
            if not contraction.sources:
                yield self._product(contraction, call)
            for number, name in enumerate(sorted(_matrices(contraction.sources, self.weights.all))):
                # The multiply-adds of an operation that takes several weights count once.
                yield self._use(replace(contraction, times=0) if number else contraction, name, call)
        for name, (site, array) in call.caches.items():
            grid, proxy = self.weights.grid_at(name), self.weights.between[name]
            row = SiteRow(name, CACHE, name, layer="cache write", weight=grid.text, formats=grid.text)
            if isinstance(proxy, ActQuantProxyFromInjector) and proxy.is_quant_enabled:
                floats = math.prod(array.shape) * np.dtype(array.dtype).itemsize
                low = bytes_in_low_bits(proxy, site, tuple(array.shape))
                row = replace(row, float_bytes=floats, weight_bytes=low, bits=grid.bits)
            yield row

    def _use(self, contraction: TracedContraction, name: str, call: TracedCall) -> SiteRow:
        """The row of a contraction with a weight, or of a look-up."""
        weights, use = self.weights, call.uses.get((contraction.equation, name))
        grid = weights.grid_of(name) if self._is_reached(contraction, name, use) else FLOAT
        path, operation = contraction.path, contraction.operation if use is None else use.operation
        low, operand, kind, note = grid.is_low, FLOAT, "none", ""
        if contraction.operation != "take":
            operand = self._other_grid(name, use)
            kinds = call.kinds.get(name, frozenset())
            kind = " and ".join(sorted(kinds)) or "float"
            low = low and (operand.is_low or kind in ("int", "fp8", "fp8 and int"))
            site = "" if use is None else use.beside
            note = joined(
                weights.transform_of_input(name, site),
                weights.range_of_loop(site, contraction.steps),
                note_of_shards(weights.layer_of(name)),
            )
        reason = ("", "") if grid.text else self._why(name, contraction, use)
        return replace(
            self._row(name, grid, reason, operation),
            name=path or operation if use is None or operation == "take" else use.name,
            operation=operation,
            input=operand.text,
            formats=formats_of(operation, operand.text, grid.text),
            contraction=kind,
            note=note,
            operations=contraction.operations,
            is_low_bit=low,
        )

    def _row(self, name: str, grid: OperandGrid, reason: tuple[str, str], operation: str = "") -> SiteRow:
        """What a row says of a weight, however it is read."""
        weights, weight, entry = self.weights, self.weights.all.get(name), self.weights.entry_of(name)
        return SiteRow(
            entry,
            parameter=name,
            layer=operation if entry == name else type(weights.layer_of(name)).__name__,
            weight=grid.text,
            why=reason[0],
            rule=reason[1],
            shape=None if weight is None else weight.shape,
            float_bytes=0 if weight is None else math.prod(weight.shape) * np.dtype(weight.dtype).itemsize,
            weight_bytes=weights.stored_bytes(name),
            bits=grid.bits if grid.text else None,
        )

    def _other_grid(self, name: str, use: WeightUse | None) -> OperandGrid:
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
        layer, is_frozen = name.rpartition(".")[0], isinstance(self.weights.all.get(name), FrozenParam)
        is_inside = f"{contraction.path}.".startswith(f"{layer}." if layer else "")
        by_layer = is_inside and name not in self.weights.sites
        return use is not None or is_frozen or name in self.weights.at_sites or by_layer

    def _product(self, contraction: TracedContraction, call: TracedCall) -> SiteRow:
        """The row of a contraction of two activations."""
        unreached = contraction.path or contraction.operation, contraction.operation, "", ""
        product = call.products.get(contraction.equation, program.ActivationProduct(*unreached))
        left, right = self.weights.grid_at(product.lhs, 0), self.weights.grid_at(product.rhs, 1)
        notes = (self.weights.transform_of_input("", site) for site in (product.lhs, product.rhs) if site)
        return SiteRow(
            product.name,
            product.operation,
            product.name,
            layer=f"{product.operation} of activations",
            weight=right.text,
            input=left.text,
            formats=formats_of(product.operation, left.text, right.text),
            note=joined(*notes),
            operations=contraction.operations,
            is_low_bit=left.is_low and right.is_low,
        )

    def _unread(self, used: set[str]) -> Iterator[SiteRow]:
        """The matrices that no call reads."""
        read = used.union(*(call.flow.read for call in self.calls))
        for name, weight in self.weights.all.items():
            if is_parameter(weight) and len(weight.shape) > 1 and name not in read:
                grid = self.weights.grid_of(name)
                yield self._row(name, grid, ("", "") if grid.text else self._why(name))

    # --- why a weight is not quantized

    def _why(
        self, name: str, contraction: TracedContraction | None = None, use: WeightUse | None = None
    ) -> tuple[str, str]:
        """Return why a weight is not quantized, and the rule for its path that would take it.

        Args:
            name: of the weight.
            contraction: of it, or its look-up; None if no traced call reads it.
            use: the same where the interpreter reaches it.
        """
        own, rule = self._of_itself(name), rule_for(name)
        is_named = type(self.weights.layer_of(name)) in COUNTERPARTS
        if own:
            return own, ""
        if contraction is None:
            untraced = self._of_rules(name, "", "dot_general") if is_named else UNKNOWN
            return UNREAD if self.calls else untraced, rule
        path, operation = contraction.path, contraction.operation
        if use is not None or (is_named and path == name.rpartition(".")[0]):
            return self._of_rules(name, path, operation if use is None else use.operation), rule
        if contraction.inside:
            part = PARTS.get(contraction.inside, contraction.inside)
            return f"it is contracted inside {part}, which runs as it was written", ""
        if contraction.through:
            reader = "look-up" if operation == "take" else "contraction"
            way = f"{contraction.through} between the parameter and its {reader}"
            return f"it is not followed because of {way}", ""
        return f"its {operation} in {path or 'the model itself'} runs as it was written", rule

    def _of_itself(self, name: str) -> str:
        """What in the weight itself, or in its layer, keeps it float; "" if nothing does."""
        weight = self.weights.all.get(name)
        if weight is None:
            return "it is not one of the arrays of the model: hold it in an nnx.Param"
        if not is_parameter(weight):
            kind = type(weight).__name__ if isinstance(weight, nnx.Variable) else "array"
            article = "an" if kind[0] in "aeiouAEIOU" else "a"
            what = f"numbers of {weight.dtype}" if isinstance(weight, nnx.Param) else f"{article} {kind}"
            return f"it is not a float nnx.Param, but {what}"
        holder, layer = self.weights.holder_of(name), self.weights.layer_of(name)
        if holder is None:
            own = isinstance(layer, QuantWeightLayer)
            return f"its {type(layer).__name__} quantizes the {layer.weight_name} alone" if own else ""
        if holder.weight_quant is None:
            return "its layer has no weight quantizer"
        return "" if holder.weight_quant.is_quant_enabled else "its quantizer is switched off"

    def _of_rules(self, name: str, path: str, operation: str) -> str:
        names = type(self.weights.layer_of(name)).__name__, program.operation_of(operation).name
        for number, rule in enumerate(self._rules or ()):
            if rule.takes(*names) and rule.matches(path, name, name.rpartition(".")[0]):
                if rule.keeps_float:
                    return f"rule {number} keeps it float: {rule}"
                if rule.quantizer("weight_quant") is None and not rule.configures:
                    return f"rule {number} has no weight_quant: {rule}"
                traced = self.weights.quantizers is not None
                return NO_QUANTIZER if traced else "no inputs were given when the model was quantized"
        return NO_QUANTIZER if self._rules is None else "no rule matches its path"


def shared_inputs(model: nnx.Module, calls: Sequence[Call]) -> list[dict[str, str]]:
    """Return the weights that contract one activation, such as those of queries, keys and values.

    Args:
        model: an NNX module, quantized, frozen or neither; quantizers of activations do not count.
        calls: of it.

    Returns:
        For each group of at least two weights, path of the weight -> path of the module that contracts it.

    Example:
        >>> import jax
        >>> class Gated(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.gate, self.up, self.down = (nnx.Linear(4, 4, rngs=rngs) for _ in range(3))
        ...
        ...     def __call__(self, x):
        ...         return self.down(nnx.silu(self.gate(x)) * self.up(x))
        >>> shared_inputs(Gated(nnx.Rngs(0)), [Call((jax.ShapeDtypeStruct((1, 4), "float32"),), {})])
        [{'gate.kernel': 'gate', 'up.kernel': 'up'}]
    """
    copy = nnx.clone(model, graph=True)
    for _, node in nnx.iter_modules(copy, graph=True):
        if isinstance(node, ActQuantProxyFromInjector):
            node.observing = True
    table = SiteTable(copy, calls)
    readers: dict[object, dict[str, str]] = {}
    for number, call in enumerate(table.calls):
        for contraction in call.flow.contractions:
            own = dict.fromkeys(sorted(_matrices(contraction.sources, table.weights.all)), contraction.path)
            if contraction.reads:
                readers[number, contraction.reads] = readers.get((number, contraction.reads), {}) | own
    groups: list[dict[str, str]] = []
    for group in readers.values():
        for linked in [linked for linked in groups if linked.keys() & group.keys()]:
            groups.remove(linked)
            group = linked | group
        groups.append(group)
    return [group for group in groups if len(group) > 1]


def formats_of(operation: str, input: str, weight: str) -> str:
    """Both grids as text; "" for two floats."""
    if not (input or weight):
        return ""
    return weight if operation == "take" else f"{input or 'float'} x {weight or 'float'}"


def joined(*notes: str) -> str:
    """Several notes as one."""
    return "; ".join(dict.fromkeys(filter(None, notes)))


def _without_twins(rows: Sequence[SiteRow]) -> Iterator[SiteRow]:
    """The rows without those of branches that do the same as the branch that counts."""
    counted = {replace(row, operations=0) for row in rows if row.operations}
    return (row for row in rows if row.operations or row not in counted)


def _matrices(sources: frozenset[str], weights: Mapping[str, ModelArray]) -> frozenset[str]:
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


def is_parameter(weight: ModelArray) -> bool:
    """Whether an array of a model is a float `nnx.Param`, or one that is frozen."""
    return isinstance(weight, FrozenParam | nnx.Param) and jnp.issubdtype(weight.dtype, jnp.floating)
