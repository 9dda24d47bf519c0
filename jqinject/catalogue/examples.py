"""An example layer for every quantizer, from which its wiring is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jqinject.inject import Binding, ExtendedInjector, explain
from jqinject.nn import QuantIdentity, QuantLinear, TruncAvgPool
from jqinject.quant import Int8ActPerTensorFloat, IntBias, float_base, fragments
from jqinject.quant.integer.decoupled_int import AccumulatorAwareWeightQuant
from jqinject.quant.solver import (
    ActQuantSolver,
    BiasQuantSolver,
    GradQuantSolver,
    TruncQuantSolver,
    WeightQuantSolver,
)
from jqinject.quant_tensor import as_array

IN_FEATURES, OUT_FEATURES = 64, 4
# A weight from -1 to 1 in every output channel. By NumPy: there is nothing to compile.
RAMP = np.broadcast_to(np.linspace(-1.0, 1.0, IN_FEATURES)[:, None], (IN_FEATURES, OUT_FEATURES))
CHANNELS = 4
BEYOND = 1.25  # curves of activations extend past the collected range, by this factor
KINDS: Mapping[type[ExtendedInjector], str] = {
    WeightQuantSolver: "weight",
    BiasQuantSolver: "bias",
    GradQuantSolver: "grad",
    ActQuantSolver: "act",
    TruncQuantSolver: "trunc",
}
# Names that a quantizer leaves to its user, with an example of each.
ASKS: Mapping[type[ExtendedInjector], tuple[str, ...]] = {
    fragments.ParamMinMaxInitScaling: ("min_val", "max_val"),
    IntBias: ("bit_width",),
    float_base.FloatBase: ("bit_width", "exponent_bit_width", "mantissa_bit_width"),
}
LEFT_TO_USERS = {
    "min_val": -1.0,
    "max_val": 1.0,
    "bit_width": 8,
    "exponent_bit_width": 4,
    "mantissa_bit_width": 3,
    "group_size": 16,
}
# Per-channel statistics of activations: the permutations for channels-last data.
CHANNELS_LAST = {3: (2, 0, 1), 4: (3, 0, 1, 2)}


@dataclass(frozen=True)
class Example:
    """A layer that holds a quantizer.

    Attributes:
        layer: the layer.
        slot: the attribute that holds the quantizer's proxy.
        overrides: the names that the quantizer leaves to its user, with example values.
    """

    layer: Any
    slot: str
    overrides: Mapping[str, object]

    @property
    def proxy(self) -> Any:
        """The quantizer's proxy."""
        return getattr(self.layer, self.slot)

    def after(self, batch: object, x: object) -> jax.Array:
        """Return what the layer makes of `x` in evaluation mode, after a training step with `batch`."""
        self.layer(batch)
        self.layer.eval()
        return as_array(self.layer(x))


def kind_of(quantizer: type[ExtendedInjector]) -> str:
    """The role of a quantizer: "weight", "bias", "act", "grad" or "trunc".

    Raises:
        ValueError: neither a solver nor a proxy determines it.
    """
    for solver, kind in KINDS.items():
        if issubclass(quantizer, solver):
            return kind
    declared = Binding(quantizer)
    if declared.declares("proxy_class"):
        proxy = declared.resolve("proxy_class").__name__
        for kind in KINDS.values():
            if kind.capitalize() in proxy:
                return kind
    raise ValueError(
        f"{quantizer.__name__} does not say what it quantizes.\n"
        "  cure: derive it from WeightQuantSolver, ActQuantSolver, BiasQuantSolver or GradQuantSolver"
    )


def example_of(
    quantizer: type[ExtendedInjector], overrides: Mapping[str, object], weight: np.ndarray = RAMP
) -> Example:
    """A layer with a quantizer: `QuantLinear`, by default of 64 inputs and 4 outputs; of activations `QuantIdentity`.

    Args:
        quantizer: the injector.
        overrides: redeclared names; those that the quantizer leaves to its user are added.
        weight: the weight of the `QuantLinear`, of shape (inputs, outputs).

    Raises:
        DependencyError, TypeError, ValueError: the quantizer cannot be assembled like this.
    """
    kind = kind_of(quantizer)
    names: dict[str, Any] = {**left_to_users(quantizer), **overrides}
    slot = f"{kind}_quant"
    if kind == "act":
        return Example(QuantIdentity(quantizer, rngs=nnx.Rngs(0), **names), slot, names)
    if kind == "trunc":
        return Example(TruncAvgPool((1,), trunc_quant=quantizer, **names), slot, names)
    needs_input = kind == "bias" or issubclass(quantizer, AccumulatorAwareWeightQuant)
    more = {"input_quant": Int8ActPerTensorFloat} if needs_input else {}
    layer = QuantLinear(
        *weight.shape,
        kernel_init=_weight_of(weight),
        bias_init=_spread,
        rngs=nnx.Rngs(0),
        **{slot: quantizer},
        **more,
        **{f"{kind}_{name}": value for name, value in names.items()},
    )
    return Example(layer, slot, names)


def _weight_of(weight: np.ndarray) -> Callable[..., jax.Array]:
    def initial(
        key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, out_sharding: object = None
    ) -> jax.Array:
        return jnp.asarray(weight, dtype)

    return initial


def _spread(
    key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, out_sharding: object = None
) -> jax.Array:
    """Evenly spaced numbers from -0.5 to 0.5."""
    return jnp.asarray(np.linspace(-0.5, 0.5, shape[0]), dtype)


def left_to_users(quantizer: type[ExtendedInjector], channels: int = CHANNELS) -> dict[str, object]:
    """An example of each name that a quantizer leaves to its user; permutations are those of channels-last data.

    Args:
        quantizer: the injector.
        channels: of activations with a scale for each channel.
    """
    declared = Binding(quantizer)
    examples: dict[str, object] = {
        name: LEFT_TO_USERS[name]
        for fragment, names in ASKS.items()
        if issubclass(quantizer, fragment)
        for name in names
        if not declared.declares(name)
    }
    kind = (
        declared.resolve("scaling_per_output_type") if declared.declares("scaling_per_output_type") else None
    )
    if kind == "group" and not declared.declares("group_size"):
        examples["group_size"] = LEFT_TO_USERS["group_size"]
    if declared.declares("scaling_stats_permute_dims"):
        permutation = declared.resolve("scaling_stats_permute_dims")
        if permutation is not None and permutation != CHANNELS_LAST[len(permutation)]:
            examples["scaling_stats_permute_dims"] = CHANNELS_LAST[len(permutation)]
    per_channel = kind == "channel" and kind_of(quantizer) == "act"
    if per_channel and explain(quantizer, name="per_channel_broadcastable_shape").error:
        examples["per_channel_broadcastable_shape"] = (channels,)
    return examples
