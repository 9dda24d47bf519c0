"""What an injector says of the numbers that it makes, beside making them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jqinject.inject import Binding


class QuantFacts(NamedTuple):
    """What an injector says of its integers, read when the quantizer is assembled.

    Attributes:
        signed: whether they have a sign; None where the injector does not say.
        narrow_range: whether one of them is left out.
        rounding_mode: the name of the rounding.
        group_size: elements that share a scale; None where there are no groups.
        group_dim: the axis that is cut into groups.
        has_zero_point: whether their zero point may be another than 0, as the quantizer says.
        requires_input_scale: of a bias: whether its scale comes in with the input.
        whole_zero_points: whether zero points are integers.
    """

    signed: bool | None
    narrow_range: bool | None
    rounding_mode: str | None
    group_size: int | None = None
    group_dim: int | None = None
    has_zero_point: bool = True
    requires_input_scale: bool = False
    whole_zero_points: bool = True


def facts_of(binding: Binding, layers: tuple[Any, ...]) -> QuantFacts:
    """What an injector says of its integers, for the layers that it serves; None for what it does not say."""

    def fact(name: str) -> Any:
        if not binding.declares(name):
            return None
        return binding.resolve(name, module=layers[0] if len(layers) == 1 else layers)

    signed, narrow_range, rounding = fact("signed"), fact("narrow_range"), fact("float_to_int_impl_type")
    return QuantFacts(
        signed=None if signed is None else _truth(binding, "signed", signed),
        narrow_range=_truth(binding, "narrow_range", narrow_range)
        if binding.declares("narrow_range")
        else None,
        rounding_mode=None if rounding is None else str(rounding).upper(),
        requires_input_scale=bool(fact("requires_input_scale")),
        whole_zero_points=_whole_zero_points(binding, fact),
    )


def _whole_zero_points(binding: Binding, fact: Callable[[str], Any]) -> bool:
    """Whether zero points are integers; those of a `scale_shift_zero_point_impl` are what it makes of a distance."""
    if binding.declares("scale_shift_zero_point_impl"):
        return False
    return not binding.declares("quantize_zero_point") or bool(fact("quantize_zero_point"))


def _truth(binding: Binding, name: str, given: Any) -> bool:
    if not isinstance(given, bool | np.bool_):  # 'False' would count as true, and None as false
        raise TypeError(
            f"{binding.base.__name__}: {name} must be True or False, got {given!r} of type {type(given).__name__}.\n"
            f"  cure: {name} = True or {name} = False"
        )
    return bool(given)
