"""Low-bit numbers of a parameter that someone else chose, on their way into a frozen model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.model.site_freezing import put_in_place
from jqinject.model.walk import ModelIndex
from jqinject.nn.base.parameter_site import ParameterSite
from jqinject.nn.frozen.freeze_layer import drop_master
from jqinject.nn.frozen.frozen_weight import FrozenWeight
from jqinject.proxy import stack_of


@dataclass(frozen=True)
class LowBits:
    """Numbers that `load_frozen` stores as they are, in the place of a float array.

    Attributes:
        shape: of the parameter.
        make: from the layer or the site that holds the parameter, and the number of axes in front along which it is a
            stack, to what is stored and its form.
    """

    shape: tuple[int, ...]
    make: Callable[[Any, int], tuple[Mapping[str, Any], FrozenForm]]

    def freeze(self, layer: Any) -> nnx.Variable[Any] | None:
        """Put the numbers into a layer; return them for a site, to be put into the parameter's places."""
        depth = len(stack_of((layer,)))
        numbers, form = self.make(layer, depth)
        if isinstance(layer, ParameterSite):
            return FrozenParam.holding(numbers, form, layer.weight.get_metadata())
        layer.frozen = FrozenWeight(numbers, form, layer.weight.get_metadata())
        drop_master(layer)
        return None


def put_low_bits(index: ModelIndex, layer: Any, low: LowBits) -> Any:
    """Put numbers into a layer, or into the places of a site's parameter.

    Args:
        index: of the model.
        layer: the layer or the site.
        low: the numbers.

    Returns:
        The arrays, so that one can wait for them.
    """
    variable = layer.weight
    frozen = low.freeze(layer)
    if frozen is None:
        return layer.frozen.numbers
    put_in_place(index, variable, frozen)
    return frozen.get_raw_value()
