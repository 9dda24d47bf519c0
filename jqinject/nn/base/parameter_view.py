"""`ParameterView`: what the forward of a Flax layer is run on, in the place of the layer."""

from collections.abc import Mapping
from typing import Any


class ParameterView:
    """A layer with other parameters: what the parent's forward reads instead of the layer.

    Args:
        layer: the layer; whatever is not in `parameters` is its own.
        parameters: attribute -> what is read instead.
    """

    def __init__(self, layer: Any, parameters: Mapping[str, Any]) -> None:
        self.__dict__.update(vars(layer), _layer=layer, **parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
