"""Drives the scenarios of proxies: loading, assigning, sharing, checkpoints; quantizers declared as users would."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jqinject
from jqinject import ExtendedInjector, this, value
from jqinject.core import (
    AbsAve,
    BinaryQuant,
    ClampedBinaryQuant,
    OverTensorView,
    ParameterScaling,
    QuantParam,
    StatsFromParameterScaling,
)
from jqinject.nn import QuantConv, QuantIdentity
from jqinject.proxy import WeightQuantProxyFromInjector
from jqinject.quant_tensor import as_array
from tests.golden._driver import CannotDrive
from tests.golden.adapters.layouts import (
    back,
    dotted,
    facts_of,
    fields_of,
    kernel_last,
    moved,
    our_path,
    plain,
    quantizer,
)

Case = dict[str, Any]
AXES = kernel_last(4)


class BinaryFromMax(ExtendedInjector):
    """-s or s; s is learned and starts at the largest weight."""

    proxy_class = WeightQuantProxyFromInjector
    tensor_quant = BinaryQuant
    scaling_impl = ParameterScaling
    scaling_shape = (1,)
    signed = True

    @value
    def scaling_init(module):
        return float(jnp.max(jnp.abs(module.weight[...])))


class BinaryFromMean(ExtendedInjector):
    """-s or s; s is the mean magnitude of all the weights that share it."""

    proxy_class = WeightQuantProxyFromInjector
    tensor_quant = BinaryQuant
    scaling_impl = StatsFromParameterScaling
    scaling_stats_impl = AbsAve
    scaling_stats_input_view_shape_impl = OverTensorView
    scaling_stats_input_concat_dim = 0
    scaling_shape = ()
    signed = True


class Advanced(ExtendedInjector):
    """An interface of a user's own: two switches decide which components are used, and in which shape."""

    proxy_class = WeightQuantProxyFromInjector
    scaling_impl = ParameterScaling
    signed = True

    @value
    def tensor_quant(is_clamped):
        return ClampedBinaryQuant if is_clamped else BinaryQuant

    @value
    def scaling_init(module, scaling_per_output_channel):
        magnitude = jnp.abs(module.weight[...])
        axes = tuple(range(module.weight_ndim - 1)) if scaling_per_output_channel else None
        return jnp.max(magnitude, axis=axes, keepdims=scaling_per_output_channel)

    @value
    def scaling_shape(scaling_per_output_channel):
        return this.per_channel_shape if scaling_per_output_channel else ()

    @value
    def per_channel_shape(module):
        shape = [1] * module.weight_ndim
        shape[module.output_channel_dim] = module.out_channels
        return tuple(shape)


def conv(weight: np.ndarray, quant: Any, **overrides: Any) -> QuantConv:
    """A convolution that holds the given weight (of the reference's layout)."""
    ours = moved(weight, AXES)
    layer = QuantConv(
        *ours.shape[-2:], ours.shape[:-2], use_bias=False, rngs=nnx.Rngs(0), weight_quant=quant, **overrides
    )
    layer.weight = nnx.Param(jnp.asarray(ours))
    return layer


def float_state(weight: np.ndarray) -> dict[str, Any]:
    return {"kernel": moved(weight, AXES)}


def theirs(array: Any) -> np.ndarray:
    return back(np.asarray(array), AXES)


def weight_of(layer: Any) -> np.ndarray:
    return theirs(as_array(layer.quant_weight()))


def scale_of(layer: Any) -> np.ndarray:
    return theirs(layer.weight_quant.scale())


def binary_parameter(case: Case, inputs: Any) -> dict[str, Any]:
    return fields_of(
        BinaryQuant(ParameterScaling(case["config"]["s"]))(jnp.asarray(inputs["x"])).quant_tensor(
            signed=True, training=True
        )
    )


def param_from_max_load(case: Case, inputs: Any) -> dict[str, Any]:
    layer = conv(inputs["w0"], BinaryFromMax)
    found = {"scale_before": scale_of(layer), "value_before": weight_of(layer)}
    state: dict[str, Any] = float_state(inputs["w1"])
    if "saved_scale" in inputs:
        scale = np.full((1,), inputs["saved_scale"], np.float32)
        state["weight_quant"] = {"tensor_quant": {"scaling_impl": {"value": scale}}}
    jqinject.load_state(layer, state)
    return found | {"scale_after": scale_of(layer), "value_after": weight_of(layer)}


def param_from_max_assign(case: Case, inputs: Any) -> dict[str, Any]:
    layer = conv(inputs["w0"], BinaryFromMax)
    layer.weight = nnx.Param(jnp.asarray(moved(inputs["w1"], AXES)))
    return {"scale_after": scale_of(layer)}


def param_from_max_inplace(case: Case, inputs: Any) -> dict[str, Any]:
    layer = conv(inputs["w0"], BinaryFromMax)
    layer.kernel[...] = jnp.asarray(moved(inputs["w1"], AXES))
    found = {"scale_stale": scale_of(layer)}
    layer.weight_quant.init_tensor_quant()
    return found | {"scale_after": scale_of(layer)}


def shared(case: Case, inputs: Any) -> dict[str, Any]:
    quant = quantizer(case["quantizer"]) if case.get("quantizer") else BinaryFromMean
    first = conv(inputs["w0"], quant, **plain(case["overrides"], "weight_"))
    found = {"scale_before": scale_of(first)}
    second = conv(inputs["w1"], first.weight_quant)
    found["same_proxy"] = second.weight_quant is first.weight_quant
    found |= {"value0": weight_of(first), "value1": weight_of(second), "scale_after": scale_of(first)}
    found["zero_point_after"] = theirs(first.weight_quant.zero_point())
    if "cotangent" in inputs:
        cotangent = jnp.asarray(moved(inputs["cotangent"], AXES))

        def loss(layers: Any) -> Any:
            return sum(jnp.sum(as_array(layer.quant_weight()) * cotangent) for layer in layers)

        layers = nnx.List([first, second])
        nnx_gradients = nnx.grad(loss)(layers)
        # A weight that a shared quantizer tracks stands under the first of its paths.
        by_shape = {path: v.get_value() for path, v in nnx.to_flat_state(nnx_gradients)}
        found |= {
            f"grad.w{i}": theirs(_gradient_of(layers, layer, by_shape)) for i, layer in enumerate(layers)
        }
    return found


def _gradient_of(layers: Any, layer: Any, gradients: dict[tuple[Any, ...], Any]) -> Any:
    for path, variable in nnx.to_flat_state(nnx.state(layers)):
        if variable is layer.kernel:
            return gradients[path]
    raise CannotDrive("the gradient of a shared weight has no path")


def advanced(case: Case, inputs: Any) -> dict[str, Any]:
    switches = {name: case["config"][name] for name in ("is_clamped", "scaling_per_output_channel")}
    layer = conv(inputs["w0"], Advanced.let(**switches))
    cotangent = jnp.asarray(moved(inputs["cotangent"], AXES))
    gradients = nnx.grad(lambda layer: jnp.sum(layer.quant_weight().value * cotangent))(layer)
    found = {"value": weight_of(layer), "scale": scale_of(layer)}
    found["grad.weight"] = theirs(gradients["kernel"].get_value())
    for path, gradient in nnx.to_flat_state(gradients):
        if isinstance(gradient, QuantParam):
            found[f"grad.{dotted(path[1:])}"] = theirs(gradient.get_value())
    jqinject.load_state(layer, float_state(inputs["w1"]))
    return found | {"value_after": weight_of(layer), "scale_after": scale_of(layer)}


def disable_quant(case: Case, inputs: Any) -> dict[str, Any]:
    layer = conv(inputs["w0"], quantizer(case["quantizer"]))
    layer.weight_quant.disable_quant = True
    return {
        "value": weight_of(layer),
        "is_quant_enabled": layer.weight_quant.is_quant_enabled,
        "scale_is_none": layer.weight_quant.scale() is None,
    }


def checkpoint(layer: Any) -> dict[str, Any]:
    """What the reference saves: weights, and those parameters of quantizers that are filled.

    A scale that is still collected is saved as what was collected so far, and one that was not begun is left out.
    """
    copy = nnx.clone(layer)
    for _, module in nnx.iter_modules(copy):
        if "counter" in vars(module) and int(module.counter.get_value()) > 0:
            for name in ("init_scale", "init_zero_point"):
                getattr(module, name, lambda: None)()
    filled: dict[tuple[str, ...], Any] = {}
    begun = {path[:-1]: int(v.get_value()) for path, v in nnx.to_flat_state(nnx.state(copy)) if _counts(path)}
    for path, variable in nnx.to_flat_state(nnx.state(copy)):
        saved = isinstance(variable, nnx.Param) or path[-1] == "running_stats"
        if saved and begun.get(path[:-1], 1):
            filled[path] = variable.get_value()
    return nnx.to_pure_dict(nnx.from_flat_state(filled)) if filled else {}


def _counts(path: tuple[Any, ...]) -> bool:
    return path[-1] in ("counter", "init_done")


def param_from_stats_checkpoint(case: Case, inputs: Any) -> dict[str, Any]:
    def fresh() -> Any:
        return conv(inputs["w0"], quantizer(case["quantizer"]), **plain(case["overrides"], "weight_"))

    layer = fresh()
    if "after_first_forward" in case["id"]:
        layer.quant_weight()
    restored = fresh()
    jqinject.load_state(restored, checkpoint(layer) | float_state(inputs["w1"]))
    return {"scale_after": scale_of(restored)}


def act_checkpoint(case: Case, inputs: Any) -> dict[str, Any]:
    def fresh() -> Any:
        return QuantIdentity(
            quantizer(case["quantizer"]), return_quant_tensor=True, **plain(case["overrides"])
        )

    original = fresh()
    for x in inputs["x"][: case["config"]["steps"]]:
        original(jnp.asarray(x))
    saved, restored = checkpoint(original), fresh()
    jqinject.load_state(restored, saved)
    found = _saved(saved)
    x = jnp.asarray(inputs["x_eval"])
    for name, layer in (("original", original), ("restored", restored)):
        layer.eval()
        found |= {f"{name}.{field}": array for field, array in fields_of(layer(x)).items()}
    restored.train()
    trained = fields_of(restored(jnp.asarray(inputs["x"][0])))
    return found | {f"restored_train.{field}": array for field, array in trained.items()}


def act_runtime_stats_become_parameter(case: Case, inputs: Any) -> dict[str, Any]:
    quant = quantizer(case["quantizer"])
    running = QuantIdentity(quant, scaling_impl_type="stats", return_quant_tensor=True)
    for x in inputs["x"]:
        running(jnp.asarray(x))
    learned = QuantIdentity(
        quant, scaling_impl_type="parameter", min_val=-1.0, max_val=1.0, return_quant_tensor=True
    )
    saved = checkpoint(running)
    jqinject.load_state(learned, saved)
    learned.eval()
    tensor = learned(jnp.asarray(inputs["x"][0]))
    return {**_saved(saved), **fields_of(tensor), **facts_of(tensor)}


def _saved(state: dict[str, Any]) -> dict[str, Any]:
    flat = nnx.traversals.flatten_mapping(state)
    return {f"saved.{dotted(path[1:])}": np.asarray(array) for path, array in flat.items()}


SCENARIOS = {
    "binary_parameter": binary_parameter,
    "param_from_max_load": param_from_max_load,
    "param_from_max_assign": param_from_max_assign,
    "param_from_max_inplace": param_from_max_inplace,
    "shared": shared,
    "advanced": advanced,
    "disable_quant": disable_quant,
    "param_from_stats_checkpoint": param_from_stats_checkpoint,
    "act_checkpoint": act_checkpoint,
    "act_runtime_stats_become_parameter": act_runtime_stats_become_parameter,
}


def _driven(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    name = case["id"].split("/")[1]
    for prefix, scenario in SCENARIOS.items():
        if name.startswith(prefix):
            return scenario(case, inputs)
    raise CannotDrive(f"no scenario for {case['id']}")


def run(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output that the case names."""
    outputs = _driven(case, inputs)
    found = {}
    for name, spec in case["outputs"].items():
        kind, _, path = name.partition(".")
        ours = name if name in outputs else f"{kind}.{dotted(our_path(path))}"
        if ours in outputs:
            array = np.asarray(outputs[ours])
            # The reference writes a scale that was made without a threshold as a vector of one.
            found[name] = array.reshape(spec["shape"]) if array.size == 1 and spec["shape"] == [1] else array
    return found


def facts(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """The facts that the scenario found."""
    return _driven(case, inputs)
