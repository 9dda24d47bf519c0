"""`AllocateBits`: a bit width for each weight, so that the error is least under a budget."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any, Literal

import numpy as np
from flax import nnx

from jqinject.inject.errors import did_you_mean
from jqinject.model.calibration import with_progress
from jqinject.model.quantizing.rules import Rule
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import Call
from jqinject.recipes.allocation import (
    Budget,
    Seconds,
    cheapest_errors,
    float_bits,
    multiply_adds,
    seconds_of,
)
from jqinject.recipes.quantized_parameter import QuantizedParameter, quantized_parameters
from jqinject.recipes.sensitivities import (
    BY_LOSS,
    NEEDS_LOSS,
    WHOLE_MODEL,
    Loss,
    ModelSensitivity,
    of_model,
    of_output,
)
from jqinject.recipes.stream.site import ContractionSite
from jqinject.recipes.stream.stream import Stream
from jqinject.recipes.work import InputQuantizers, Work, site_path

BUDGETS = ("mean_bits", "max_bytes", "max_bit_operations", "max_seconds")


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


@dataclass(frozen=True)
class Allocatable:
    """A weight that `AllocateBits` would give a width.

    Attributes:
        path: the parameter's.
        costs: width -> what it costs, in the unit of the budget.
        unit: of the budget.
    """

    path: str
    costs: dict[int, float]
    unit: str

    def __str__(self) -> str:
        costs = ", ".join(f"{bits} bits: {cost:g}" for bits, cost in self.costs.items())
        return f"{self.path}: {costs} {self.unit}"


Sensitivity = Literal["output", "gradient", "fisher", "hessian", "kl"]


@dataclass(frozen=True)
class AllocateBits:
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

    bits: tuple[int, ...] = (2, 4, 8)
    mean_bits: float | None = None
    max_bytes: float | None = None
    max_bit_operations: float | None = None
    max_seconds: float | None = None
    seconds: Seconds | None = field(default=None, hash=False)
    sensitivity: Sensitivity = "output"
    loss: Loss | None = None

    def __repr__(self) -> str:
        given = (f"{one.name}={getattr(self, one.name)!r:.60}" for one in fields(self) if self._says(one))
        return f"AllocateBits({', '.join(given)})"

    def _says(self, one: Field[Any]) -> bool:
        return one.name == "bits" or getattr(self, one.name) != one.default

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in BUDGETS if getattr(self, name) is not None}
        if len(given) != 1:
            said = " and ".join(f"{name}={value!r}" for name, value in given.items()) or "none"
            raise TypeError(
                f"AllocateBits takes one budget, got {said}.\n"
                "  cure: AllocateBits(mean_bits=4.0), or AllocateBits(max_bytes=2**30)"
            )
        if (self.max_seconds is None) != (self.seconds is None):
            raise TypeError(
                "AllocateBits: max_seconds and seconds belong together.\n"
                "  cure: AllocateBits(max_seconds=0.1, seconds={'layers.0.kernel': (0.01, 0.02, 0.04), ...})"
            )
        if not self.bits:
            raise ValueError("AllocateBits: there are no widths to choose from.\n  cure: bits=(2, 4, 8)")
        kinds = ("output", *WHOLE_MODEL)
        if self.sensitivity not in kinds:
            hint = did_you_mean(self.sensitivity, kinds)
            raise ValueError(
                f"AllocateBits: sensitivity must be one of {', '.join(kinds)}, got {self.sensitivity!r}"
                f"{'; ' + hint if hint else ''}"
            )
        if self.sensitivity in NEEDS_LOSS and self.loss is None:
            raise TypeError(
                f"AllocateBits: sensitivity={self.sensitivity!r} is that of a loss, and none is given.\n"
                "  cure: loss=lambda model, batch: ...; or sensitivity='hessian', which does without"
            )
        if self.loss is not None and self.sensitivity not in BY_LOSS:
            raise TypeError(f"AllocateBits: sensitivity={self.sensitivity!r} does not use a loss")

    def __call__(self, work: Work) -> list[Allocated]:
        """See `Pass`."""
        models, stream = self._models(work), work.float_stream()
        budget, modules = self._budget(models, stream, work.calls[0])
        budget.check()
        errors = self._errors(work, models, stream)
        parameters = quantized_parameters(models[self.bits[0]])
        table = np.array([[errors[name][bits] for bits in self.bits] for name in modules])
        places = cheapest_errors(table, budget.costs, budget.most) if modules else []
        chosen = {name: self.bits[place] for name, place in zip(modules, places, strict=True)}
        made = []
        for name, parameter in parameters.items():
            bits = chosen.get(name)
            rule = None if bits is None else _rule_for(name, parameter, modules[name], work.rules, bits)
            made.append(Allocated(name, bits, errors.get(name, {}), rule))
        work.rules = (*(one.rule for one in made if one.rule is not None), *work.rules)
        work.allow_idle = True  # these rules took something before
        return made

    def explain(self, work: Work) -> list[Allocatable]:
        """See `Pass`."""
        budget, modules = self._budget(self._models(work), work.float_stream(), work.calls[0])
        budget.check()
        costs = zip(modules, budget.costs / budget.shown, strict=True)
        return [
            Allocatable(name, dict(zip(self.bits, map(float, row), strict=True)), budget.unit)
            for name, row in costs
        ]

    def _models(self, work: Work) -> dict[int, nnx.Module]:
        """The model quantized with each width."""
        if work.is_quantized:
            raise ValueError(
                "AllocateBits changes rules, and an earlier pass has already quantized the model by them.\n"
                "  cure: Recipe(AllocateBits(...), Solve(...)), in this order"
            )
        return {
            bits: work.quantized_by([_with_width(rule, bits) for rule in work.rules]) for bits in self.bits
        }

    def _budget(
        self, models: dict[int, nnx.Module], stream: Stream, call: Call
    ) -> tuple[Budget, dict[str, str]]:
        """The budget of the parameters that sites contract, and for each the module of its first site."""
        parameters = quantized_parameters(models[self.bits[0]])
        sites: dict[str, list[ContractionSite]] = {}
        for site in stream.sites:
            if site_path(site) in parameters:
                sites.setdefault(site_path(site), []).append(site)
        modules = {name: found[0].name.rpartition(".")[0] for name, found in sites.items()}
        sizes = np.array([parameters[name].value.size for name in sites], np.float64)
        bits = np.array(self.bits, np.float64)
        if self.max_seconds is not None and self.seconds is not None:
            times = seconds_of(self.seconds, list(sites), self.bits)
            return Budget("max_seconds", "seconds", times, self.max_seconds), modules
        if self.max_bit_operations is not None:
            flat, inputs = stream.traced.flat, InputQuantizers(models[self.bits[0]], call)
            each = [
                sum(
                    multiply_adds(flat, site) * (inputs.bits(site) or float_bits(flat, site))
                    for site in found
                )
                for found in sites.values()
            ]
            costs = np.array(each, np.float64)[:, None] * bits
            return Budget("max_bit_operations", "bit operations", costs, self.max_bit_operations), modules
        costs = sizes[:, None] * bits
        if self.max_bytes is not None:
            return Budget("max_bytes", "bytes", costs, 8 * self.max_bytes, 8.0), modules
        total = float(sizes.sum()) or 1.0
        return Budget("mean_bits", "bits on average", costs, total * (self.mean_bits or 0), total), modules

    def _errors(
        self, work: Work, models: dict[int, nnx.Module], stream: Stream
    ) -> dict[str, dict[int, float]]:
        """The error of each parameter that sites contract, with each width."""
        choices = {bits: quantized_parameters(made) for bits, made in models.items()}
        found: dict[str, dict[int, float]] = {}
        known = choices[self.bits[0]]
        if self.sensitivity == "output":
            for visit in with_progress(stream, "sensitivity", shown=work.progress):
                name = site_path(visit.site)
                if name in known:
                    before = found.setdefault(name, dict.fromkeys(self.bits, 0.0))
                    more = self._kept(work, visit.site.name, partial(of_output, visit, choices))
                    found[name] = {bits: before[bits] + error for bits, error in more.items()}
            return found
        paths = list(dict.fromkeys(site_path(site) for site in stream.sites if site_path(site) in known))
        measured = ModelSensitivity(work.model, work.calls, work.batches, paths, self.sensitivity, self.loss)
        for path in with_progress(paths, "sensitivity", shown=work.progress):
            found[path] = self._kept(work, path, partial(of_model, measured, path, choices))
        return found

    def _kept(self, work: Work, name: str, compute: Callable[[], dict[int, float]]) -> dict[int, float]:
        """Errors at each width, which the recipe's journal remembers."""
        made = work.journal.once(name, lambda: {"errors": np.array(list(compute().values()), np.float64)})
        errors = np.asarray(made["errors"])
        if not np.isfinite(errors).all():
            raise ValueError(
                f"AllocateBits: the {self.sensitivity} error of {name} is not finite: {errors.tolist()}.\n"
                "  cure: look for nan or inf in the loss or in the model's outputs with the calibration data"
            )
        return dict(zip(self.bits, map(float, errors), strict=True))


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
