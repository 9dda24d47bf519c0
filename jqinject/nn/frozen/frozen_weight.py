"""`FrozenWeight`: the low-bit numbers of a layer's weight, replacing the weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jqinject.core import Frozen
from jqinject.dot import FrozenParam
from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.stored_array import StoredArray
from jqinject.dot.frozen.stored_weight import StoredWeight


class WeightView(FrozenParam):
    """A frozen layer's weight, under the name that the float weight had: a `FrozenParam` that cannot be written.

    It is made each time it is read, so it is not part of the layer's state.
    """

    def set_value(self, value: Any, *, index: Any = None) -> None:
        """Raise.

        Raises:
            TypeError: always.
        """
        raise self._refusal(value)

    def set_raw_value(self, value: Any, **options: Any) -> None:
        """Raise.

        Raises:
            TypeError: always.
        """
        raise self._refusal(value)

    def update_from_state(self, variable_state: nnx.Variable[Any]) -> None:
        """Raise.

        Raises:
            TypeError: always.
        """
        raise self._refusal(variable_state.get_raw_value())


class FrozenWeight(StoredArray, StoredWeight):
    """Payload, scale and zero point of a quantized weight, and what else a QuantTensor knows.

    State: `value`, the payload in its `StoredForm`; `scale`, float32, or a byte each for groups; and if
    there are any, `zero_point`, `sums` of the payload, and the `scale_factor` of scales in bytes.

    Args:
        numbers: of the weight, from `frozen_numbers`.
        form: their form.
        metadata: of the weight's Variable, for the sharding of the payload.
    """

    value: Frozen
    scale: Frozen
    zero_point: Frozen | None = None
    sums: Frozen | None = None
    scale_factor: Frozen | None = None

    def __init__(
        self, numbers: Mapping[str, jax.Array], form: FrozenForm, metadata: Mapping[str, Any]
    ) -> None:
        self._form = form
        # The payload has its sharding from the weight, with or without a mesh.
        known = {**metadata, "eager_sharding": False}
        of_value, of_scale = form.metadata(known, numbers["scale"].shape)
        of_each = {"value": of_value, "scale": of_scale}
        for name, array in numbers.items():
            setattr(self, name, Frozen(array, **of_each.get(name, {})))

    @property
    def form(self) -> FrozenForm:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What is static in the numbers."""
        return self._form

    @property
    def numbers(self) -> dict[str, jax.Array]:
        """The arrays by name, as stored; their shapes in an abstract model."""
        found = {}
        for name in self.form.names:
            found[name] = getattr(self, name).get_raw_value()
        return found

    def view(self) -> WeightView:
        """The weight as the float parameter answered, dequantized when it is read."""
        metadata = self.value.get_metadata()
        names = metadata.get("out_sharding")
        if names:
            spec = self.form.partition_spec(jax.sharding.PartitionSpec(*names), self.value.shape)
            metadata["out_sharding"] = tuple(spec)
        return WeightView.holding(self.numbers, self.form, metadata)
