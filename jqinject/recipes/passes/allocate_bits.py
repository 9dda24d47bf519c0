"""`AllocateBits`: a bit width for each weight, so that the error is least under a budget."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from jqinject.model import quantize
from jqinject.model.quantizing.rules import Rule
from jqinject.model.running.progress import with_progress
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.quant_tensor import as_array
from jqinject.recipes.allocation import cheapest_errors
from jqinject.recipes.quantized_parameter import QuantizedParameter, quantized_parameters
from jqinject.recipes.solving import check_finite, output_error
from jqinject.recipes.stream.stream import Visit
from jqinject.recipes.work import Work, site_path


@dataclass(frozen=True)
class Allocated:
    """The bit width that a weight got.

    Attributes:
        path: the parameter's.
        bits: the width; None if no site was found that contracts it: the rules given hold.
        errors: width -> mean squared error of the outputs with rounding to nearest, relative to the outputs.
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
        return f"{self.path}: {self.bits} bits (relative error with {errors})"


@dataclass(frozen=True)
class AllocateBits:
    """Gives each weight one of several bit widths, so that the sum of their errors is least under a budget.

    A weight's error is that of its site's output with rounding to nearest at each width, relative to the output, by the
    inputs of the float model. The assignment is exact. It becomes plain rules, one for each weight, which come before
    the rules given: the `rule` of a record in the report can be read, edited and given to `quantize`.

    Args:
        bits: the widths.
        mean_bits: the budget, as the mean width of all weights that rules quantize.
        max_bytes: the budget, as the bytes of their codes; scales are not counted.

    Raises:
        TypeError: not exactly one of `mean_bits` and `max_bytes` is given.
        ValueError: no widths; (when called) no assignment fits the budget, or an earlier pass has asked for the
            quantized model.

    Example:
        >>> AllocateBits(bits=(4, 8), mean_bits=5.0)
        AllocateBits(bits=(4, 8), mean_bits=5.0, max_bytes=None)
    """

    bits: tuple[int, ...] = (2, 4, 8)
    mean_bits: float | None = None
    max_bytes: float | None = None

    def __post_init__(self) -> None:
        if (self.mean_bits is None) == (self.max_bytes is None):
            raise TypeError(
                f"AllocateBits takes one budget, got mean_bits={self.mean_bits!r} and max_bytes={self.max_bytes!r}.\n"
                "  cure: AllocateBits(mean_bits=4.0), or AllocateBits(max_bytes=2**30)"
            )
        if not self.bits:
            raise ValueError("AllocateBits: there are no widths to choose from.\n  cure: bits=(2, 4, 8)")

    def __call__(self, work: Work) -> list[Allocated]:
        """See `Pass`."""
        if work.is_quantized:
            raise ValueError(
                "AllocateBits changes rules, and an earlier pass has already quantized the model by them.\n"
                "  cure: Recipe(AllocateBits(...), Solve(...)), in this order"
            )
        rules = {bits: tuple(_with_width(rule, bits) for rule in work.rules) for bits in self.bits}
        models = {
            bits: quantized_parameters(quantize(work.model, made, inputs=work.inputs, methods=work.methods))
            for bits, made in rules.items()
        }
        errors: dict[str, dict[int, float]] = {}
        modules: dict[str, str] = {}
        for visit in with_progress(work.float_stream(), "sensitivity", shown=work.progress):
            name = site_path(visit.site)
            if name in models[self.bits[0]]:
                modules.setdefault(name, visit.site.name.rpartition(".")[0])
                found = _errors(visit, {bits: made[name] for bits, made in models.items()})
                before = errors.setdefault(name, dict.fromkeys(self.bits, 0.0))
                errors[name] = {bits: before[bits] + error for bits, error in found.items()}
        parameters = models[self.bits[0]]
        chosen = self._chosen({name: parameters[name] for name in errors}, errors)
        made = []
        for name, parameter in parameters.items():
            bits = chosen.get(name)
            rule = None if bits is None else _rule_for(name, parameter, modules[name], work.rules, bits)
            made.append(Allocated(name, bits, errors.get(name, {}), rule))
        work.rules = (*(one.rule for one in made if one.rule is not None), *work.rules)
        work.allow_idle = True  # these rules took something before
        return made

    def _chosen(
        self, parameters: dict[str, QuantizedParameter], errors: dict[str, dict[int, float]]
    ) -> dict[str, int]:
        """The width of each parameter."""
        if not parameters:
            return {}
        sizes = np.array([parameter.value.size for parameter in parameters.values()], np.float64)
        costs = sizes[:, None] * np.array(self.bits)
        budget = sizes.sum() * self.mean_bits if self.mean_bits is not None else 8 * (self.max_bytes or 0)
        table = np.array([[errors[name][bits] for bits in self.bits] for name in parameters])
        places = cheapest_errors(table, costs, budget)
        return {name: self.bits[place] for name, place in zip(parameters, places, strict=True)}


def _errors(visit: Visit, choices: dict[int, QuantizedParameter]) -> dict[int, float]:
    """The relative error of a site's output at each width."""
    statistics = visit.statistics("hessian")
    try:
        check_finite(statistics)
    except ValueError as problem:
        raise ValueError(f"{visit.site.name} ({site_path(visit.site)}): {problem}") from problem
    original = jnp.asarray(visit.original, jnp.float32)
    weights = visit.site.weights(original)

    def error(parameter: QuantizedParameter) -> float:
        rounded = jnp.asarray(as_array(parameter.quantized(original)), jnp.float32)
        return output_error(visit.site.weights(rounded) - weights, weights, statistics)

    return {bits: error(parameter) for bits, parameter in choices.items()}


def _with_width(rule: Rule, bits: int, path: str | None = None) -> Rule:
    """A rule with another width of its weights; one that quantizes no weights as it is."""
    if rule.quantizer("weight_quant") is None:
        return rule
    overrides: dict[str, Any] = {**dict(rule.overrides), "weight_bit_width": bits}
    return Rule(
        rule.path if path is None else path,
        op=rule.op,
        contraction=rule.contraction,
        **dict(rule.quantizers),
        **overrides,
    )


def _rule_for(
    name: str, parameter: QuantizedParameter, module: str, rules: Sequence[Rule], bits: int
) -> Rule:
    """A rule for one parameter: that which took it, with a path of its own."""
    holder = name.rpartition(".")[0]
    layer = isinstance(parameter.holder, QuantWeightLayer)
    paths = [holder] if layer else [name, holder, module]
    took = next(rule for rule in rules if rule.takes_weights and any(map(rule.matches, paths)))
    return _with_width(took, bits, re.escape(paths[0]))
