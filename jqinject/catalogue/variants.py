"""Variants of a quantizer: its choices turned one by one, and for each combination the class to write and its numbers.

A choice is a name that the quantizer declares and its wiring reads. `VALUES` has what is compared under each name; what
the names mean is in `jqinject.quant.override_names`. A variant is a class that inherits from the quantizer and declares
the chosen values, in a layer: of weights a `QuantLinear`, of activations a `QuantIdentity`. Its numbers are what that
layer computes. `explorer` shows them as a page.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

import jqinject.quant
from jqinject import core
from jqinject.catalogue.entries import entry_of_example
from jqinject.catalogue.examples import BEYOND, example_of, kind_of, left_to_users
from jqinject.inject import DependencyError, ExtendedInjector, explain, reach_of
from jqinject.model.inspect.measured_report import sqnr_db
from jqinject.quant import enums, float_base
from jqinject.quant.override_names import NAMES
from jqinject.quant_tensor import as_array

#: Numbers of a curve, and how far they lie from 0. They fill groups of 16, 32 and 64.
POINTS, EXTENT = 256, 4.0
#: Output channels of a weight; rows of an activation.
ROWS = 16
#: The inputs of a curve.
INPUTS = np.linspace(-EXTENT, EXTENT, POINTS, dtype=np.float32)
#: The numbers of a curve in the shape of a weight: every channel has them all, the first one in order.
GRID = np.stack([np.roll(INPUTS, ROWS * row) for row in range(ROWS)], axis=1)
#: Of the data with outliers: one number of so many is so many times as large.
OUTLIER_EVERY, OUTLIER_FACTOR = 512, 16.0
#: The class to write, by the kind of what is quantized.
TITLES = {"weight": "MyWeights", "act": "MyActivations"}
#: The name of a minifloat's choice: exponent and mantissa are chosen together, with the bits that they add up to.
FORMAT = "exponent_bit_width"
FORMATS = (
    float_base.Fp8e4m3Mixin,
    float_base.Fp8e5m2Mixin,
    float_base.Fp6e3m2Mixin,
    float_base.Fp6e2m3Mixin,
    float_base.Fp4e2m1Mixin,
)
#: Name -> the values to compare, beside the quantizer's own.
VALUES: Mapping[str, Sequence[object]] = {
    "bit_width": range(2, 9),
    "scaling_per_output_type": tuple(enums.ScalingPerOutputType),
    "restrict_scaling_type": (enums.RestrictValueType.FP, enums.RestrictValueType.POWER_OF_TWO),
    "scale_rounding": tuple(enums.ScaleRounding),
    "scaling_stats_op": (enums.StatsOp.MAX, enums.StatsOp.PERCENTILE),
    "calibration_impl": (core.AbsMaxRange, core.AbsPercentileRange, core.RMSRange, core.MSERange),
    "float_to_int_impl_type": (
        enums.FloatToIntImplType.ROUND,
        enums.FloatToIntImplType.FLOOR,
        enums.FloatToIntImplType.STOCHASTIC_ROUND,
    ),
}
#: Value -> names that it asks for, declared with it where the quantizer does not.
FURTHER: Mapping[object, Mapping[str, object]] = {
    enums.ScalingPerOutputType.GROUP: {"group_size": 32},
    enums.StatsOp.PERCENTILE: {"high_percentile_q": 99.9},
}
#: Activations are shown in evaluation mode, in which chance rounds to nearest.
NOT_OF_ACTIVATIONS = (enums.FloatToIntImplType.STOCHASTIC_ROUND,)
REFUSALS = (ValueError, TypeError, DependencyError)

Injector = type[ExtendedInjector]


@dataclass(frozen=True)
class OfferedValue:
    """One value of a choice.

    Attributes:
        label: the value as text.
        names: what is declared for it; nothing for the quantizer's own value.
    """

    label: str
    names: Mapping[str, object]


@dataclass(frozen=True)
class QuantizerChoice:
    """A name of a quantizer, and the values to compare.

    Attributes:
        name: the name.
        meaning: what it says.
        options: the values, the quantizer's own among them.
        refused: values that the quantizer cannot be assembled with, and why.
    """

    name: str
    meaning: str
    options: tuple[OfferedValue, ...]
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def own(self) -> int:
        """The place of the quantizer's own value among the options."""
        return next(place for place, option in enumerate(self.options) if not option.names)


@dataclass(frozen=True)
class Variant:
    """A quantizer with chosen values.

    Attributes:
        code: the class to write, as Python.
        fault: why it cannot be assembled; empty if it can. It then has no numbers.
        facts: format, granularity and scaling.
        wiring: the tree of its components.
        curve: the outputs for `INPUTS`.
        errors: of each of `data_sets()`, the signal-to-noise ratio in decibels and the mean squared error.
    """

    code: str
    fault: str = ""
    facts: str = ""
    wiring: str = ""
    curve: np.ndarray | None = None
    errors: tuple[tuple[float, float], ...] = ()


@cache
def data_sets() -> Mapping[str, np.ndarray]:
    """Numbers of mean 0 and variance 1 (without the outliers), in the shape of a weight.

    Example:
        >>> {name: (x.shape, str(x.dtype)) for name, x in data_sets().items()}["Laplace"]
        ((256, 16), 'float32')
    """
    random = np.random.default_rng(0)
    shape = (POINTS, ROWS)
    with_outliers = random.standard_normal(shape)
    places = random.choice(with_outliers.size, with_outliers.size // OUTLIER_EVERY, replace=False)
    with_outliers.flat[places] *= OUTLIER_FACTOR
    data = {
        "Gaussian": random.standard_normal(shape),
        "Laplace": random.laplace(scale=0.5**0.5, size=shape),
        "Gaussian with outliers": with_outliers,
    }
    return {name: x.astype(np.float32) for name, x in data.items()}


def choices_of(quantizer: Injector) -> tuple[QuantizerChoice, ...]:
    """The choices of a quantizer: of `VALUES`, the names that it declares and its wiring reads.

    Args:
        quantizer: of weights or activations.

    Raises:
        ValueError: it quantizes something else.
        DependencyError, TypeError, ValueError: it cannot be assembled.

    Example:
        >>> from jqinject.quant import NF4WeightPerGroupFloat
        >>> for choice in choices_of(NF4WeightPerGroupFloat):
        ...     print(choice.name, [option.label for option in choice.options])
        scaling_per_output_type ['tensor', 'channel', 'group']
        restrict_scaling_type ['fp', 'power_of_two']
        scaling_stats_op ['max', 'percentile']
    """
    kind = shown_kind(quantizer)
    declared, _ = _declared(quantizer, {})
    layer = example_of(declared, {}).layer
    tracked = [layer.weight] if kind == "weight" else []
    read = reach_of(declared, module=layer, tracked_parameter_list=tracked).names
    choices: list[QuantizerChoice] = []
    for name in (FORMAT, *VALUES):
        # A minifloat has the bits of its format.
        if name not in read or name not in declared or (name == "bit_width" and FORMAT in read):
            continue
        if name == FORMAT:
            options = _formats(declared)
        else:
            own = explain(declared, name=name, module=layer).value
            options = _options(declared, name, own, kind)
        choices.append(QuantizerChoice(name, NAMES[name][1], options))
    return tuple(choices)


def shown_kind(quantizer: Injector) -> str:
    """Return what a quantizer quantizes, "weight" or "act".

    Raises:
        ValueError: it quantizes something else.
    """
    kind = kind_of(quantizer)
    if kind not in TITLES:
        raise ValueError(
            f"{quantizer.__name__}: a quantizer of kind {kind!r}; expected one of weights or activations, which has a "
            "curve by itself.\n"
            f"  cure: python -m jqinject explain {quantizer.__name__}"
        )
    return kind


def _options(quantizer: Injector, name: str, own: object, kind: str) -> tuple[OfferedValue, ...]:
    """The values of a name, in the order of `VALUES`; the quantizer's own comes first if it is none of these."""
    values = [value for value in VALUES[name] if kind != "act" or value not in NOT_OF_ACTIVATIONS]
    if isinstance(values[0], enum.Enum) and isinstance(own, str):
        own = enums.as_enum(type(values[0]), own, name=name)
    options: list[OfferedValue] = []
    for value in values if own in values else (own, *values):
        further = {more: example for more, example in FURTHER.get(value, {}).items() if more not in quantizer}
        plain = str(value.value) if isinstance(value, enum.Enum) else value
        options.append(
            OfferedValue(_shown(plain).strip('"'), {} if value == own else {name: plain, **further})
        )
    return tuple(options)


def _formats(quantizer: Injector) -> tuple[OfferedValue, ...]:
    """The formats of minifloats; the quantizer's own comes first if it is none of these."""
    names = ("bit_width", FORMAT, "mantissa_bit_width")

    def option(source: Injector) -> OfferedValue:
        bits, exponent, mantissa = (explain(source, name=name).value for name in names)
        return OfferedValue(
            f"e{exponent}m{mantissa}", dict(zip(names, (bits, exponent, mantissa), strict=True))
        )

    own, options = option(quantizer), [option(source) for source in FORMATS]
    listed = options if own in options else [own, *options]
    return tuple(OfferedValue(own.label, {}) if candidate == own else candidate for candidate in listed)


def variants_of(quantizer: Injector) -> tuple[tuple[QuantizerChoice, ...], list[Variant]]:
    """Return the choices of a quantizer, and a variant for each combination of their options.

    Args:
        quantizer: of weights or activations.

    Returns:
        The choices, from whose options are removed what the quantizer refuses by itself; the variants in the order of
        `itertools.product` of their options.

    Raises:
        ValueError: it quantizes something else.
        DependencyError, TypeError, ValueError: it cannot be assembled.
    """
    measured: dict[str, Variant] = {}
    choices: list[QuantizerChoice] = []
    for choice in choices_of(quantizer):
        faults = {option.label: variant_of(quantizer, [option], measured).fault for option in choice.options}
        options = tuple(option for option in choice.options if not (option.names and faults[option.label]))
        refused = tuple(
            (option.label, faults[option.label]) for option in choice.options if option not in options
        )
        choices.append(QuantizerChoice(choice.name, choice.meaning, options, refused))
    combined = product(*(choice.options for choice in choices))
    return tuple(choices), [variant_of(quantizer, options, measured) for options in combined]


def variant_of(
    quantizer: Injector, options: Sequence[OfferedValue], measured: dict[str, Variant] | None = None
) -> Variant:
    """Return a quantizer with chosen values, and its numbers.

    Args:
        quantizer: of weights or activations.
        options: the values.
        measured: variants that need not be measured again, by their code; a new one is added.
    """
    names = {name: value for option in options for name, value in option.names.items()}
    variant, declared = _declared(quantizer, names)
    code = _code(quantizer, declared)
    measured = {} if measured is None else measured
    if code not in measured:
        try:
            measured[code] = _measured(variant, code)
        except REFUSALS as error:
            measured[code] = Variant(code, fault=str(error))
    return measured[code]


def _declared(quantizer: Injector, names: Mapping[str, object]) -> tuple[Injector, dict[str, object]]:
    """The class that declares some names and those that are left to the user; and the names with their values."""
    title = TITLES[shown_kind(quantizer)]
    left = left_to_users(_class(title, quantizer, names), channels=POINTS)
    return _class(title, quantizer, {**left, **names}), {**left, **names}


def _class(title: str, quantizer: Injector, names: Mapping[str, object]) -> Injector:
    return cast("Injector", type(title, (quantizer,), dict(names)))


def _code(quantizer: Injector, names: Mapping[str, object]) -> str:
    """The class that declares some names, as Python."""
    offered = vars(jqinject.quant).get(quantizer.__name__) is quantizer
    lines = [
        f"from {'jqinject.quant' if offered else quantizer.__module__} import {quantizer.__name__}",
        "",
        "",
    ]
    if any(isinstance(value, type) for value in names.values()):
        lines.insert(0, "from jqinject import core")
    lines.append(f"class {TITLES[shown_kind(quantizer)]}({quantizer.__name__}):")
    body = [f"    {name} = {_shown(value, 'core.')}" for name, value in names.items()]
    return "\n".join([*lines, *(body or ["    pass"]), ""])


def _shown(value: object, module: str = "") -> str:
    """A value as Python: a component by its name, a text in double quotes."""
    if isinstance(value, type):
        return f"{module}{value.__name__}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _measured(variant: Injector, code: str) -> Variant:
    """A variant with its numbers."""
    outputs = _outputs_of(variant)
    curve = np.asarray(outputs(GRID, GRID / BEYOND))
    entry = entry_of_example(variant.__name__, variant, example_of(variant, {}, weight=GRID))
    errors: list[tuple[float, float]] = []
    for numbers in data_sets().values():
        x, y = (array.astype(np.float64) for array in (numbers, np.asarray(outputs(numbers, numbers))))
        errors.append((sqnr_db([x], [y]), float(np.mean(np.square(x - y)))))
    facts = ", ".join((entry.format, entry.granularity, entry.scaling))
    return Variant(code, facts=facts, wiring=entry.wiring, curve=curve[:, 0], errors=tuple(errors))


def _outputs_of(variant: Injector) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """Return the function from numbers to what a layer with a quantizer makes of them.

    Args:
        variant: the quantizer.

    Returns:
        A function of numbers, (POINTS, ROWS): a weight, or activations with their features first; and of what static
        ranges of activations are collected from, in the same shape. It returns the dequantized numbers, in that shape.
    """

    def weight(x: np.ndarray, batch: np.ndarray) -> jax.Array:
        layer = example_of(variant, {}, weight=x).layer
        if "delayed" in variant:
            layer.quant_weight()  # the scale is that of the step before
        return as_array(layer.quant_weight())

    def activation(x: np.ndarray, batch: np.ndarray) -> jax.Array:
        permutation: Sequence[int] = explain(variant, name="scaling_stats_permute_dims").value or (1, 0)
        shape = (ROWS, *(1,) * (len(permutation) - 2), POINTS)
        example = example_of(variant, {})
        y = example.after(*(jnp.asarray(array.T.reshape(shape)) for array in (batch, x)))
        return y.reshape(ROWS, POINTS).T

    function = weight if shown_kind(variant) == "weight" else activation
    # Searches for a range are loops, which would be compiled anew at every call.
    return jax.jit(function) if "calibration_impl" in variant else function
