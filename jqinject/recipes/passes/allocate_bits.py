"""`AllocateBits`: a bit width for each weight, so that the error is least under a budget."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jqinject.inject.errors import did_you_mean
from jqinject.model.quantizing.rules import Rule
from jqinject.model.walk import ModelIndex
from jqinject.program import Call
from jqinject.recipes.online import InputQuantizers, rule_of
from jqinject.recipes.passes.descent import Outputs, Values, outputs_of, relative_squares
from jqinject.recipes.quantized_parameter import QuantizedParameter, quantized_parameters
from jqinject.recipes.solvers.solver import Checked, Expected, output_error
from jqinject.recipes.stream.flat_program import ContractionSite, Note
from jqinject.recipes.stream.stream import Stream, Visit
from jqinject.recipes.work import Work


def cheapest_errors(errors: np.ndarray, costs: np.ndarray, budget: float) -> list[int]:
    """One choice for each item, so that the sum of errors is least and the sum of costs fits: exact.

    Dynamic programming over the items: of all assignments of the first `n`, those are kept that no other one beats in
    both error and cost.

    Args:
        errors: of every choice of every item, `(items, choices)`.
        costs: likewise, not negative.
        budget: the largest sum of costs.

    Returns:
        The index of the choice of each item; of equally good assignments, one with the least cost.

    Raises:
        ValueError: no assignment fits; or something is not finite.

    Example:
        >>> cheapest_errors(np.array([[9.0, 1.0], [4.0, 3.0]]), np.array([[1, 2], [1, 2]]), 3)
        [1, 0]
    """
    errors, costs = np.asarray(errors, np.float64), np.asarray(costs, np.float64)
    if not (np.isfinite(errors).all() and np.isfinite(costs).all() and (costs >= 0).all()):
        raise ValueError("errors and costs must be finite, and costs not negative")
    least = costs.min(axis=1)
    if least.sum() > budget:
        raise ValueError(
            f"no assignment fits the budget: the cheapest choices cost {least.sum():g}, the budget is {budget:g}.\n"
            "  cure: a larger budget, or smaller bit widths among the choices"
        )
    # What the items that are still to come cost at least.
    rest = np.append(np.cumsum(least[::-1])[::-1][1:], 0.0)
    spent, lost, choices = np.zeros(1), np.zeros(1), np.zeros((1, 0), np.int16)
    for error, cost, later in zip(errors, costs, rest, strict=True):
        # Every assignment with every choice of one more item, without those that another one beats.
        spent, lost = (spent[:, None] + cost).ravel(), (lost[:, None] + error).ravel()
        order = np.lexsort((lost, spent))
        order = order[spent[order] <= budget - later]
        best_before = np.concatenate([[np.inf], np.minimum.accumulate(lost[order])[:-1]])
        unbeaten = order[lost[order] < best_before]
        before, choice = np.divmod(unbeaten, len(cost))
        spent, lost = spent[unbeaten], lost[unbeaten]
        choices = np.column_stack([choices[before], choice.astype(np.int16)])
    return choices[np.argmin(lost)].tolist()


#: Measured times: path of a parameter -> seconds with each width, in their order; or a function of both.
Seconds = Mapping[str, Sequence[float]] | Callable[[str, int], float]


#: What the budgets are counted in.
UNITS = {
    "mean_bits": "bits on average",
    "max_bytes": "bytes",
    "max_bit_operations": "bit operations",
    "max_seconds": "seconds",
}


Sites = dict[str, list[ContractionSite]]


def operations_of(site: ContractionSite, inputs: InputQuantizers) -> int:
    """The multiply-adds of a site in one call, times the bits of a number of its input.

    Args:
        site: of the float model's program.
        inputs: the quantizers of inputs.
    """
    contraction = site.step.equation
    products = math.prod(contraction.outputs[0].shape) * site.matrices.weight.sizes[-1]
    float_bits = 8 * np.dtype(contraction.inputs[1 - site.place].dtype).itemsize
    return products * (inputs.bits(site) or float_bits)


def seconds_of(seconds: Seconds, paths: Sequence[str], bits: Sequence[int]) -> np.ndarray:
    """Measured times as a table, `(parameters, widths)`.

    Args:
        seconds: a table or a function.
        paths: of the parameters.
        bits: the widths.

    Raises:
        ValueError: a parameter has no times, or not one for each width; a time is negative or not finite.
    """
    rows = []
    for path in paths:
        if not callable(seconds) and path not in seconds:
            hint = did_you_mean(path, list(seconds))
            raise ValueError(
                f"AllocateBits: seconds has no times for {path}{'; ' + hint if hint else '.'}\n"
                f"  cure: seconds={{{path!r}: ({', '.join(f'<with {width} bits>' for width in bits)}), ...}}"
            )
        times = [seconds(path, width) for width in bits] if callable(seconds) else seconds[path]
        if len(times) != len(bits) or not all(0 <= time < math.inf for time in times):
            raise ValueError(
                f"AllocateBits: the seconds of {path} must be {len(bits)} numbers of at least 0, one for each of bits="
                f"{tuple(bits)}, got {tuple(times)}"
            )
        rows.append(times)
    return np.array(rows, np.float64).reshape(len(paths), len(bits))


@dataclass(frozen=True)
class Allocated:
    """The bit width that a weight got.

    Attributes:
        path: the parameter's.
        bits: the width; None if no site was found that contracts it: the rules given hold.
        errors: width -> error, by the sensitivity asked for.
        rule: the rule that was made; None likewise.
    """

    path: str
    bits: int | None
    errors: dict[int, float]
    rule: Rule | None = field(repr=False)

    def __str__(self) -> str:
        if self.bits is None:
            return f"{self.path}: as the rules say: no site that contracts it was found, so its error is not known"
        errors = ", ".join(f"{bits}: {error:.2e}" for bits, error in self.errors.items())
        return f"{self.path}: {self.bits} bits (error with {errors})"


Sensitivity = Literal["output", "gradient", "fisher", "hessian", "kl"]
NEEDS_LOSS = ("gradient", "fisher")
Choices = Sequence[Mapping[str, QuantizedParameter]]
Loss = Callable[[Any, Any], jax.Array]
LossOf = Callable[[Values], jax.Array]


@dataclass(frozen=True)
class AllocateBits(Checked):
    """Gives each weight one of several bit widths, so that the sum of their errors is least under a budget.

    The assignment is exact for errors that add up. It becomes plain rules, one for each weight, which come before the
    rules given and so win over them: the `rule` of a record in the report can be read, edited and given to `quantize`.

    The error of a weight `w` at a width, with `d` what rounding to nearest adds to it:

    | `sensitivity` | error |
    |---|---|
    | "output" | mean squared error of its site's output, relative to the output: the inverse of the SQNR |
    | "hessian" | `norm(J d)^2 / norm(y)^2`, how far the outputs move to first order; of a `loss`, `abs(d^T H d) / 2` |
    | "gradient" | how far the loss moves to first order: `abs(g d)` |
    | "fisher" | `sum g^2 d^2 / 2`, by the diagonal of the empirical Fisher information of batches |
    | "kl" | Kullback-Leibler divergence of the softmax of the model's outputs, with this weight alone rounded |

    All but "output" run the whole model for each weight, width and batch.

    Args:
        bits: the widths.
        mean_bits: the budget, as the mean width of all weights that rules quantize.
        max_bytes: the budget, as the bytes of their codes; scales are not counted.
        max_bit_operations: the budget, as multiply-adds of one call with the first batch, times the bits of the weight,
            times those of the input.
        max_seconds: the budget, as the sum of `seconds`.
        seconds: measured times: path of a parameter -> seconds at each width, in the order of `bits`; or a function of
            both.
        sensitivity: which error.
        loss: a function of a model and a batch, for "gradient", "fisher" and "hessian". `model(batch)` is up to it.

    Raises:
        TypeError: not exactly one budget is given; a `loss` is missing or is not used.
        ValueError: no widths; an unknown sensitivity; (when called) no assignment fits the budget, and which budget
            would do; or an earlier pass has asked for the quantized model.

    Source: Dong et al., "HAWQ-V2: Hessian Aware trace-Weighted Quantization of Neural Networks", 2020. Differs from it:
    the Hessian is taken in the direction of the rounding error itself, not by its trace.

    Example:
        >>> AllocateBits(bits=(4, 8), mean_bits=5.0).sensitivity
        'output'
    """

    bits: Annotated[tuple[int, ...], Expected("widths to choose from", bool)] = (2, 4, 8)
    mean_bits: float | None = None
    max_bytes: float | None = None
    max_bit_operations: float | None = None
    max_seconds: float | None = None
    seconds: Seconds | None = field(default=None, hash=False, repr=False)
    sensitivity: Sensitivity = "output"
    loss: Loss | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        budgets = [f"{name}={vars(self)[name]!r}" for name in UNITS if vars(self)[name] is not None]
        if len(budgets) != 1:
            raise TypeError(
                f"AllocateBits takes one budget, got {' and '.join(budgets) or 'none'}.\n"
                "  cure: AllocateBits(mean_bits=4.0), or AllocateBits(max_bytes=2**30)"
            )
        if (self.max_seconds is None) != (self.seconds is None):
            raise TypeError(
                "AllocateBits: max_seconds and seconds belong together.\n"
                "  cure: AllocateBits(max_seconds=0.1, seconds={'layers.0.kernel': (0.01, 0.02, 0.04), ...})"
            )
        if self.sensitivity in NEEDS_LOSS and self.loss is None:
            raise TypeError(
                f"AllocateBits: sensitivity={self.sensitivity!r} is that of a loss, and none is given.\n"
                "  cure: loss=lambda model, batch: ...; or sensitivity='hessian', which does without"
            )
        if self.loss is not None and self.sensitivity not in BY_LOSS:
            raise TypeError(f"AllocateBits: sensitivity={self.sensitivity!r} does not use a loss")

    @property
    def _budget(self) -> tuple[str, float]:
        """The argument that is set, and its value."""
        return next((name, vars(self)[name]) for name in UNITS if vars(self)[name] is not None)

    def __call__(self, work: Work) -> list[Allocated | Note]:
        """See `Pass`."""
        work.refuse_quantized("AllocateBits changes rules", "AllocateBits(...), Solve(...)")
        models = [work.quantized_by([_with_width(rule, bits) for rule in work.rules]) for bits in self.bits]
        choices, stream = [quantized_parameters(model) for model in models], work.stream()
        sites: Sites = {}
        for site in stream.flat.sites:
            if site.path in choices[0]:
                sites.setdefault(site.path, []).append(site)
        costs, unit = self._costs(work, models[0], sites)
        if work.explaining:
            return [*self._explained(sites, costs / unit)]
        errors = self._errors(work, choices, stream, sites)
        places = cheapest_errors(np.array([*errors.values()]), costs, unit * self._budget[1]) if sites else []
        widths = {path: self.bits[place] for path, place in zip(sites, places, strict=True)}
        index = ModelIndex(work.model)
        allocated = []
        for path in choices[0]:
            rule, at_widths = None, dict[int, float]()
            if path in widths:
                took, pattern, _ = rule_of(path, sites[path][0].step.path, index, work.rules)
                rule = _with_width(took, widths[path], re.escape(pattern))
                at_widths = dict(zip(self.bits, map(float, errors[path]), strict=True))
            allocated.append(Allocated(path, widths.get(path), at_widths, rule))
        work.rules = (*(x.rule for x in allocated if x.rule is not None), *work.rules)
        work.allow_idle = True  # these rules took something before
        return allocated

    def _explained(self, sites: Sites, costs: np.ndarray) -> Iterator[Note]:
        for path, row in zip(sites, costs, strict=True):
            shown = ", ".join(f"{bits} bits: {cost:g}" for bits, cost in zip(self.bits, row, strict=True))
            yield Note(path, "", f"{shown} {UNITS[self._budget[0]]}")

    def _costs(self, work: Work, model: nnx.Module, sites: Sites) -> tuple[np.ndarray, float]:
        """Return what each parameter costs with each width, `(parameters, widths)`, and the cost of a budget of 1.

        Raises:
            ValueError: nothing fits; the text has the smallest budget that something fits.
        """
        name, most = self._budget
        parameters = quantized_parameters(model)
        sizes = np.array([parameters[path].value.size for path in sites], np.float64)
        unit = {"mean_bits": float(sizes.sum()) or 1.0, "max_bytes": 8.0}.get(name, 1.0)
        if self.max_bit_operations is not None:
            inputs = InputQuantizers(model, work.calls[0])
            operations = (sum(operations_of(site, inputs) for site in own) for own in sites.values())
            sizes = np.array([*operations], np.float64)
        costs = sizes[:, None] * np.array(self.bits, np.float64)
        if self.seconds is not None:
            costs = seconds_of(self.seconds, list(sites), self.bits)
        least = float(costs.min(axis=1).sum())
        if least > unit * most:
            least = least / unit
            # As text it is no smaller when it is read.
            enough = math.ceil(least) if least > 1000 else least
            raise ValueError(
                f"AllocateBits: no assignment fits the budget {name}={most:g}: the cheapest widths take {least:g} "
                f"{UNITS[name]}.\n  cure: {name}={enough!r}, or smaller widths among bits="
            )
        return costs, unit

    def _errors(self, work: Work, choices: Choices, stream: Stream, sites: Sites) -> dict[str, np.ndarray]:
        """The errors of each parameter that sites contract, with each width, which the journal remembers."""
        if self.sensitivity == "output":
            visits = (visit for visit in work.bar(stream, "sensitivity") if visit.site.path in sites)
            parts = ((x.site.path, x.site.name, partial(errors_of_output, x, choices)) for x in visits)
        else:
            of_model = errors_of_model(work, choices, list(sites), self.sensitivity, self.loss)
            paths = work.bar(list(sites), "sensitivity")
            parts = ((path, path, partial(of_model, path)) for path in paths)
        total = {path: np.zeros(len(self.bits)) for path in sites}
        for path, name, compute in parts:
            part = work.journal.once(
                name, lambda compute=compute: {"errors": np.array(compute(), np.float64)}
            )
            errors = np.asarray(part["errors"])
            if not np.isfinite(errors).all():
                raise ValueError(
                    f"AllocateBits: the {self.sensitivity} error of {name} is not finite: {errors.tolist()}.\n"
                    "  cure: look for nan or inf in the loss or in the model's outputs with the calibration data"
                )
            total[path] += errors
        return total


def _with_width(rule: Rule, bits: int, path: str | None = None) -> Rule:
    """A rule with another width of its weights; one that quantizes no weights as it is."""
    if rule.quantizer("weight_quant") is None:
        return rule
    slots: dict[str, Any] = {**dict(rule.quantizers), **dict(rule.overrides), "weight_bit_width": bits}
    return Rule(path or rule.path, op=rule.op, contraction=rule.contraction, **slots)


def errors_of_model(
    work: Work, choices: Choices, paths: Sequence[str], kind: str, loss: Loss | None
) -> Callable[[str], list[float]]:
    """From the path of a parameter to the measure with it alone rounded, at each width: the mean over all batches.

    Args:
        work: with the float model and the data.
        choices: for each width, the quantized parameters.
        paths: of the parameters that are measured.
        kind: which measure, see `AllocateBits`.
        loss: of a model and a batch, or None.
    """
    variables = ModelIndex(work.model).by_name
    values: Values = {path: variables[path].get_value() for path in paths}

    def measure(call: Call, batch: object) -> Callable[[Values, Values], jax.Array]:
        if loss is not None:
            of_loss = outputs_of(work.model, Call((batch,), {}, loss))
            return partial(BY_LOSS[kind], lambda values: of_loss(values)[0])
        return partial(_divergence if kind == "kl" else _distance, outputs_of(work.model, call))

    # Compiled once for all parameters.
    measures = [jax.jit(measure(*pair)) for pair in zip(work.calls, work.batches, strict=True)]

    def error(parameter: QuantizedParameter) -> float:
        path = parameter.name
        rounded = parameter.nearest(parameter.value.astype(jnp.float32)).astype(values[path].dtype)
        errors = [float(measure(values, {**values, path: rounded})) for measure in measures]
        return sum(errors) / len(errors)

    return lambda path: [error(parameters[path]) for parameters in choices]


def _divergence(outputs: Outputs, values: Values, changed: Values) -> jax.Array:
    """Kullback-Leibler divergence of the softmax of the outputs' last axis, mean over all others."""
    total = jnp.float32(0)
    for before, after in zip(outputs(values), outputs(changed), strict=True):
        log_p, log_q = jax.nn.log_softmax(before), jax.nn.log_softmax(after)
        total = total + (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean()
    return total


def _distance(outputs: Outputs, values: Values, changed: Values) -> jax.Array:
    """`|J d|^2 / |y|^2`: how far the outputs move, to first order."""
    before, moved = jax.jvp(outputs, (values,), (optax.tree.sub(changed, values),))
    return relative_squares(moved, before)


def _gradient(loss: LossOf, values: Values, changed: Values) -> jax.Array:
    """`|g d|`: how far the loss moves, to first order."""
    return jnp.abs(optax.tree.vdot(jax.grad(loss)(values), optax.tree.sub(changed, values)))


def _fisher(loss: LossOf, values: Values, changed: Values) -> jax.Array:
    """`g^2 d^2 / 2`, summed: by the diagonal of the empirical Fisher information."""
    gradient, moved = jax.grad(loss)(values), optax.tree.sub(changed, values)
    squares = (jax.tree.map(jnp.square, x) for x in (gradient, moved))
    return jnp.asarray(optax.tree.vdot(*squares)) / 2


def _curvature(loss: LossOf, values: Values, changed: Values) -> jax.Array:
    """`|d H d| / 2`: how far the loss moves to second order."""
    moved = optax.tree.sub(changed, values)
    return jnp.abs(optax.tree.vdot(moved, jax.jvp(jax.grad(loss), (values,), (moved,))[1])) / 2


BY_LOSS = {"gradient": _gradient, "fisher": _fisher, "hessian": _curvature}


def errors_of_output(visit: Visit, choices: Choices) -> list[float]:
    """The relative error of a site's output at each width.

    Args:
        visit: of the site.
        choices: for each width, the quantized parameters.
    """
    statistics, original = visit.statistics("hessian"), jnp.asarray(visit.original, jnp.float32)
    weights = visit.site.weights(original)
    rounded = (visit.site.weights(parameters[visit.site.path].nearest(original)) for parameters in choices)
    return [float(output_error(matrices - weights, weights, statistics)) for matrices in rounded]
