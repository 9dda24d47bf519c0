"""Checks of constructor and call arguments; each names the component, the argument, and the cure.

A check takes `(value, where, name)`: the value, the component's name, and the argument's. It returns the value in plain
form (`np.bool_` becomes `bool`), or raises.

Arguments of a `component` or a `frozen_value` are checked by their annotations, before `__post_init__` runs:

    signed: bool
    p: check.Positive = 1.0
    dim: int | None = None
    scaling_impl: Scaling  # what is named `..._impl` is a component

`fields` checks others by hand.
"""

import dataclasses
import functools
import inspect
import math
import operator
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jqinject.ops.groups import block_of
from jqinject.ops.minifloat import flag

Check = Callable[[Any, str, str], Any]


def fields(owner: object, /, **checks: Check) -> None:
    """Check attributes of a component that is under construction, and replace them by their plain form.

    Args:
        owner: the component, frozen or not.
        checks: the check of each attribute, by name.

    Raises:
        TypeError: an attribute is of the wrong kind.
        ValueError: an attribute is out of range.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Twice:
        ...     signed: bool
        ...     def __post_init__(self):
        ...         fields(self, signed=flag)
        >>> Twice(signed=1)
        Traceback (most recent call last):
        TypeError: Twice: signed must be True or False, got 1 of type int. Write signed = True or signed = False.
    """
    where = type(owner).__name__
    for name, check in checks.items():
        vars(owner)[name] = check(getattr(owner, name), where, name)


def optional(check: Check) -> Check:
    """Return a check that also accepts None."""
    return lambda value, where, name: None if value is None else check(value, where, name)


def between(low: float, high: float, kind: Check | None = None, why: str = ".", expected: str = "") -> Check:
    """Return a check of a number between two bounds, inclusive.

    Args:
        low, high: the bounds; infinite ones are open.
        kind: the check before that of the range, such as `integer`; None means `number`.
        why: how the error text ends.
        expected: what the error text says in place of the bounds.

    Example:
        >>> between(0, math.inf)(-1.0, "MeanSigmaStd", "sigma")
        Traceback (most recent call last):
        ValueError: MeanSigmaStd: sigma must be at least 0, got -1.0.
    """
    bounds = f"at least {low}" if math.isinf(high) else f"at most {high}"
    bounds = bounds if math.isinf(low) or math.isinf(high) else f"in {low} .. {high}"
    required = expected or f"must be {bounds}"

    def check(value: object, where: str, name: str) -> Any:
        plain = (kind or number)(value, where, name)
        if not low <= plain <= high:
            raise ValueError(f"{where}: {name} {required}, got {value!r}{why}")
        return plain

    return check


def among(values: Collection[object], expected: str = "", kind: Check | None = None) -> Check:
    """Return a check of a value that is one of some.

    Args:
        values: the allowed ones.
        expected: what the error text says of them; "" names them.
        kind: the check before that, such as `integer`; None means none.

    Example:
        >>> among(("mae", "mse"), "'mae' or 'mse'")("l1", "FourOverSixScales", "error")
        Traceback (most recent call last):
        ValueError: FourOverSixScales: error must be 'mae' or 'mse', got 'l1'
    """

    def check(value: object, where: str, name: str) -> object:
        plain = value if kind is None else kind(value, where, name)
        if plain not in values:
            options = expected or f"one of {', '.join(map(repr, values))}"
            raise ValueError(f"{where}: {name} must be {options}, got {value!r}")
        return plain

    return check


def integer(value: object, where: str, name: str) -> int:
    """An integer as a Python int.

    Raises:
        TypeError: when it is something else, a boolean included.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{where}: {name} must be an int, got {value!r} of type {type(value).__name__}.")
    return int(value)


def bound(value: Any, where: str, name: str) -> Any:
    """A number, which may be infinite.

    Raises:
        TypeError: when it is something else, a boolean included.
        ValueError: when it is nan.
    """
    array = isinstance(value, (np.ndarray, jax.Array)) and value.shape == ()
    if isinstance(value, (bool, np.bool_)) or not (array or isinstance(value, (int, float, np.number))):
        raise TypeError(f"{where}: {name} must be a number, got {value!r} of type {type(value).__name__}.")
    if not isinstance(value, Tracer) and math.isnan(float(value)):
        raise ValueError(f"{where}: {name} must be a number, got {value!r}.")
    return value


def number(value: Any, where: str, name: str) -> Any:
    """A finite number.

    Raises:
        TypeError: when it is something else, a boolean included.
        ValueError: when it is nan or inf.
    """
    bound(value, where, name)
    if not isinstance(value, Tracer) and math.isinf(float(value)):
        raise ValueError(f"{where}: {name} must be a finite number, got {value!r}.")
    return value


def real(value: object, where: str, name: str) -> float:
    """A finite number, as a Python float."""
    return float(number(value, where, name))


def integers(value: object, where: str, name: str) -> tuple[int, ...]:
    """A sequence of integers, as a tuple.

    Raises:
        TypeError: when it is something else.
    """
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        raise TypeError(f"{where}: {name} must be a tuple of ints such as () or (1, 64), got {value!r}.")
    return tuple(integer(item, where, f"each of {name}") for item in value)


def numbers(value: object, where: str, name: str) -> tuple[Any, ...]:
    """A sequence of finite numbers, at least one, as a tuple.

    Raises:
        TypeError: when it is something else.
        ValueError: when it is empty, or one is nan or inf.
    """
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        raise TypeError(f"{where}: {name} must be a tuple of numbers, got {value!r}.")
    if not len(value):
        raise ValueError(f"{where}: {name} must have at least one number, got {value!r}.")
    return tuple(number(item, where, f"each of {name}") for item in value)


def component(value: object, where: str, name: str) -> Any:
    """A component: a callable object.

    Raises:
        TypeError: when it is a class, or cannot be called.
    """
    if isinstance(value, type):
        raise TypeError(
            f"{where}: {name} must be a component, got the class {value.__name__}. Construct it: "
            f"{name}={value.__name__}(...)."
        )
    if not callable(value):
        raise TypeError(
            f"{where}: {name} must be a component, got {value!r} of type {type(value).__name__}.\n"
            f"  cure: declare its class, as in {name} = MyComponent, and its arguments as names of their own"
        )
    return value


def above_zero(value: object, where: str, name: str) -> Any:
    """A positive finite number.

    Raises:
        TypeError: when it is something else.
        ValueError: when one is not positive, or not finite.
    """
    if not number(value, where, name) > 0:
        raise ValueError(f"{where}: {name} must be above 0, got {value!r}.")
    return value


MOST_STEPS = 2**24 - 1  # counters are float32, and go one further


def ordered(low: jax.Array | float, high: jax.Array | float, where: str, names: tuple[str, str]) -> None:
    """Check that two ends are in order.

    Raises:
        ValueError: when the first is above the second.
    """
    if low > high:
        raise ValueError(f"{where}: {names[0]}={low!r} is above {names[1]}={high!r}. Swap them.")


def positive(value: object, where: str, name: str) -> Any:
    """A positive number, or an array of them; traced values are not checked.

    Raises:
        ValueError: when one is 0, negative or not finite.
    """
    if isinstance(value, Tracer):
        return value
    values = np.asarray(value, np.float32)
    if not np.all(np.isfinite(values)):
        raise ValueError(f"{where}: {name} must be finite, got {value!r}.")
    if not np.all(values > 0):
        shown = float(values.min())
        raise ValueError(
            f"{where}: {name} must be positive, got {shown}: it is the size of a step. "
            "For a scale that may be negative use SignedFloatRestrictValue (restrict_scaling_type = 'signed_fp')."
        )
    return value


def float_input(x: jax.Array, where: str) -> jax.Array:
    """`x` as a JAX array of a float dtype.

    Raises:
        TypeError: when it is not floating; names the component `where`.
    """
    array = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{where} got an array of dtype {array.dtype}, expected a float one: it quantizes real numbers. "
            f"Cast it first: x.astype(jnp.float32)."
        )
    return array


def bit_width(value: object, where: str, *, least: int = 1) -> int:
    """A bit width as a Python int.

    Raises:
        TypeError: when it is not an integer.
        ValueError: when it is not in `least` .. 32.
    """
    try:
        return _BITS[least](value, where, "bit_width")
    except TypeError as error:
        cure = "Write bit_width = 8; for a learned bit width use BitWidthParameter."
        raise TypeError(f"{error} {cure}") from None


_BITS = {least: between(least, 32, integer) for least in (1, 2)}
_OF_STEPS = (
    ": the scale is made from the statistics of that many training steps. For a scale without statistics use "
    "ParameterScaling."
)


def momentum(value: Any, where: str, name: str) -> float | None:
    """A momentum in (0, 1], or None for the cumulative mean.

    Raises:
        ValueError: when it is outside.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not 0.0 < float(value) <= 1.0:
        raise ValueError(
            f"{where}: {name} must be in (0, 1], or None for the cumulative mean, got {value!r}."
        )
    return float(value)


def shape(value: object, where: str, name: str) -> tuple[int, ...]:
    """A shape as a tuple of Python ints.

    Raises:
        TypeError: when it is not a sequence of integers.
        ValueError: when a size is negative.
    """
    sizes = integers(value, where, name)
    if min(sizes, default=0) < 0:
        raise ValueError(f"{where}: {name} has a negative size: {sizes}.")
    return sizes


# Annotations that say more than a type: each carries its check.
Bits = Annotated[int, lambda value, where, name: bit_width(value, f"{where} ({name})")]
Bound = Annotated[float, bound]
Count = Annotated[int, between(1, math.inf, integer)]
Minimum = Annotated[float, between(0, math.inf, real, expected="must be None or a finite number >= 0")]
NonNegative = Annotated[float, between(0, math.inf)]
Percentage = Annotated[float, between(0, 100, real, expected="is a percentage, expected 0 .. 100")]
Positive = Annotated[float, above_zero]
Shape = Annotated[tuple[int, ...], shape]
Step = Annotated[float, lambda value, where, name: positive(number(value, where, name), where, name)]
Steps = Annotated[int, between(-math.inf, MOST_STEPS, between(1, math.inf, integer, _OF_STEPS))]
Whole = Annotated[int, between(0, math.inf, integer)]

#: The check of an argument by its type.
OF_TYPE: dict[object, Check] = {
    bool: flag,
    int: integer,
    float: number,
    int | tuple[int, int]: lambda value, where, _: block_of(value, where)[0],
    tuple[int, ...]: integers,
    tuple[float, ...]: numbers,
    tuple[str, ...]: lambda value, *_: tuple(value),
}


def of_fields(cls: type) -> dict[str, Check]:
    """Return the checks of a dataclass's arguments: of components by name, of others by annotation."""
    checks: dict[str, Check | None] = {}
    for argument in (field for field in dataclasses.fields(cls) if field.init):
        if argument.name.endswith("_impl"):
            checks[argument.name] = optional(component) if argument.default is None else component
        else:
            checks[argument.name] = _of_annotation(_annotation(cls, argument))
    return {name: check for name, check in checks.items() if check is not None}


def _annotation(cls: type, argument: dataclasses.Field[object]) -> object:
    """Return the type of an argument, which is text in a module that postpones annotations."""
    if not isinstance(argument.type, str):
        return argument.type
    owner = next(base for base in cls.__mro__ if argument.name in inspect.get_annotations(base))
    try:
        return eval(argument.type, vars(sys.modules[owner.__module__]))
    except NameError:  # of a class defined later or in a function: none that is checked
        return None


def _of_annotation(kind: Any) -> Check | None:
    """Return the check that an annotation asks for; None for one that is neither in `OF_TYPE` nor `Annotated`."""
    parts = tuple(part for part in get_args(kind) if part is not type(None))
    if type(None) in get_args(kind):
        check = _of_annotation(functools.reduce(operator.or_, parts))
        return check and optional(check)
    return kind.__metadata__[0] if get_origin(kind) is Annotated else OF_TYPE.get(kind)


def statistic_shape(
    stat: jax.Array, expected: tuple[int, ...], where: str, name: str = "scaling_shape"
) -> jax.Array:
    """Reshape a statistic to the scale's shape, within `shard_map` to the shape of the device's part of it.

    Raises:
        ValueError: the number of elements differs, and is not that of a part.
    """
    if stat.shape == expected:
        return stat
    if stat.size != math.prod(expected):
        axes = jax.sharding.get_abstract_mesh()
        devices = math.prod(axes.shape[name] for name in axes.manual_axes)
        varying = [axis for axis, size in enumerate(expected) if size != 1]
        if len(varying) == 1 and stat.size and devices % (expected[varying[0]] / stat.size) == 0:
            return stat.reshape([stat.size if axis in varying else 1 for axis in range(len(expected))])
        raise ValueError(
            f"{where}: the statistic has shape {stat.shape}, {name} is {expected}. Over channels use "
            "OverOutputChannelView(permute_dims=...) with the output channel first and stats_reduce_dim=1; over the "
            "whole tensor stats_reduce_dim=None and shape ()."
        )
    return stat.reshape(expected)
