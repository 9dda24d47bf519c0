"""What an injector says of the numbers that it makes, beside making them."""

from typing import Any, NamedTuple

from jqinject.inject import Binding


class QuantFacts(NamedTuple):
    """What an injector says of its integers, read when the quantizer is assembled.

    Attributes:
        signed: whether they have a sign; None where the injector does not say.
        narrow_range: whether one of them is left out.
        rounding_mode: the name of the rounding.
        group_size: elements that share a scale; None where there are no groups.
        group_dim: the axis that is cut into groups.
    """

    signed: bool | None
    narrow_range: bool | None
    rounding_mode: str | None
    group_size: int | None = None
    group_dim: int | None = None


def facts_of(binding: Binding, layers: tuple[Any, ...]) -> QuantFacts:
    """What an injector says of its integers, for the layers that it serves; None for what it does not say."""

    def fact(name: str) -> Any:
        if not binding.declares(name):
            return None
        return binding.resolve(name, module=layers[0] if len(layers) == 1 else layers)

    signed, narrow_range, rounding = fact("signed"), fact("narrow_range"), fact("float_to_int_impl_type")
    return QuantFacts(
        signed=None if signed is None else bool(signed),
        narrow_range=None if narrow_range is None else bool(narrow_range),
        rounding_mode=None if rounding is None else str(rounding).upper(),
    )
