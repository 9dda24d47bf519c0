"""Low-bit numbers of a parameter that someone else chose, on their way into a frozen model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jqinject.dot import FrozenParam
from jqinject.dot.frozen.frozen_form import FrozenForm
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

    def frozen(self, layer: Any) -> FrozenParam:
        """What is stored in the weight's place of a layer or a site."""
        numbers, form = self.make(layer, len(stack_of((layer,))))
        return FrozenParam.holding(numbers, form, layer.weight.get_metadata())
