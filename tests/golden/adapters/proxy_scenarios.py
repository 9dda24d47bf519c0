"""The scenarios of proxies: loading, assigning, sharing, checkpoints."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jqinject
from jqinject.core import BinaryQuant, ParameterScaling, QuantParam
from jqinject.core.memory.memory import Memory
from jqinject.nn import QuantIdentity
from jqinject.quant_tensor import as_array
from tests.golden._config import CannotDrive
from tests.golden.adapters.layouts import (
    LAYOUTS,
    back,
    dotted,
    facts_of,
    fields_of,
    kept_by,
    kernel_last,
    moved,
    quantizer,
)
from tests.golden.adapters.user_quantizers import Advanced, BinaryFromMax, BinaryFromMean

Case = dict[str, Any]
LAYOUT_OF_RANK = {2: "linear", 3: "conv1d", 4: "conv2d", 5: "conv3d"}


def layer_of(weight: np.ndarray, quant: Any) -> Any:
    """A layer that holds the given weight (of the reference's layout)."""
    ours = to_ours(weight)
    make = LAYOUTS[LAYOUT_OF_RANK[weight.ndim]].make
    layer = make(ours.shape, use_bias=False, weight_quant=quant)
    layer.weight = nnx.Param(ours)
    return layer


def to_ours(weight: np.ndarray) -> Any:
    return jnp.asarray(moved(weight, kernel_last(weight.ndim)))


def theirs(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return back(array, kernel_last(array.ndim)) if array.ndim > 1 else array


def float_state(weight: np.ndarray) -> dict[str, Any]:
    return {"kernel": to_ours(weight)}


def weight_of(layer: Any) -> np.ndarray:
    return theirs(as_array(layer.quant_weight()))


def scale_of(layer: Any) -> np.ndarray:
    return theirs(layer.weight_quant.scale())


def quant_of(case: Case, **more: Any) -> Any:
    """The quantizer that a case names, with its overrides and more of them."""
    return quantizer(case["quantizer"], case["overrides"] | more)


def binary_parameter(case: Case, inputs: Any, s: float) -> dict[str, Any]:
    result = BinaryQuant(ParameterScaling(s))(jnp.asarray(inputs["x"]))
    return fields_of(result.quant_tensor(training=True))


def param_from_max_load_quantized(case: Case, inputs: Any) -> dict[str, Any]:
    return param_from_max_load(case, inputs, inputs["saved_scale"])


def param_from_max_load(case: Case, inputs: Any, saved_scale: Any = None) -> dict[str, Any]:
    layer = layer_of(inputs["w0"], BinaryFromMax)
    found = {"scale_before": scale_of(layer), "value_before": weight_of(layer)}
    state: dict[str, Any] = float_state(inputs["w1"])
    if saved_scale is not None:
        scale = np.full((1,), saved_scale, np.float32)
        state["weight_quant"] = {"tensor_quant": {"scaling_impl": {"value": scale}}}
    jqinject.load_state(layer, state)
    return found | {"scale_after": scale_of(layer), "value_after": weight_of(layer)}


def param_from_max_assign(case: Case, inputs: Any) -> dict[str, Any]:
    layer = layer_of(inputs["w0"], BinaryFromMax)
    layer.weight = nnx.Param(to_ours(inputs["w1"]))
    return {"scale_after": scale_of(layer)}


def param_from_max_inplace(case: Case, inputs: Any) -> dict[str, Any]:
    layer = layer_of(inputs["w0"], BinaryFromMax)
    layer.kernel[...] = to_ours(inputs["w1"])
    found = {"scale_stale": scale_of(layer)}
    layer.weight_quant.init_tensor_quant()
    return found | {"scale_after": scale_of(layer)}


def shared_mean(case: Case, inputs: Any) -> dict[str, Any]:
    return _shared(BinaryFromMean, inputs)[0]


def shared_quantizer(case: Case, inputs: Any) -> dict[str, Any]:
    found, layers = _shared(quant_of(case), inputs)
    cotangent = to_ours(inputs["cotangent"])

    def loss(layers: Any) -> Any:
        return sum(jnp.sum(as_array(layer.quant_weight()) * cotangent) for layer in layers)

    gradients = nnx.grad(loss)(layers)
    # A weight that a shared quantizer tracks stands under the first of its paths.
    by_path = {path: v.get_value() for path, v in nnx.to_flat_state(gradients)}
    return found | {
        f"grad.w{i}": theirs(_gradient_of(layers, layer, by_path)) for i, layer in enumerate(layers)
    }


def _shared(quant: Any, inputs: Any) -> tuple[dict[str, Any], Any]:
    """What the scale of a layer is before and after another one shares its quantizer; and both layers."""
    first = layer_of(inputs["w0"], quant)
    found = {"scale_before": scale_of(first)}
    second = layer_of(inputs["w1"], first.weight_quant)
    found["same_proxy"] = second.weight_quant is first.weight_quant
    found |= {"value0": weight_of(first), "value1": weight_of(second), "scale_after": scale_of(first)}
    found["zero_point_after"] = theirs(first.weight_quant.zero_point())
    return found, nnx.List([first, second])


def _gradient_of(layers: Any, layer: Any, gradients: dict[tuple[Any, ...], Any]) -> Any:
    for path, variable in nnx.to_flat_state(nnx.state(layers)):
        if variable is layer.kernel:
            return gradients[path]
    raise CannotDrive("the gradient of a shared weight has no path")


def advanced(case: Case, inputs: Any, is_clamped: bool, scaling_per_output_channel: bool) -> dict[str, Any]:
    switches = {"is_clamped": is_clamped, "scaling_per_output_channel": scaling_per_output_channel}
    layer = layer_of(inputs["w0"], Advanced.let(**switches))
    cotangent = to_ours(inputs["cotangent"])
    gradients = nnx.grad(lambda layer: jnp.sum(layer.quant_weight().value * cotangent))(layer)
    found = {"value": weight_of(layer), "scale": scale_of(layer)}
    found["grad.weight"] = theirs(gradients["kernel"].get_value())
    for path, gradient in nnx.to_flat_state(gradients):
        if isinstance(gradient, QuantParam):
            found[f"grad.{dotted(path[1:])}"] = theirs(gradient.get_value())
    jqinject.load_state(layer, float_state(inputs["w1"]))
    return found | {"value_after": weight_of(layer), "scale_after": scale_of(layer)}


def disable_quant(case: Case, inputs: Any) -> dict[str, Any]:
    layer = layer_of(inputs["w0"], quant_of(case))
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
        if isinstance(module, Memory):
            module.end_calibration()
    filled: dict[tuple[str, ...], Any] = {}
    begun = {path[:-1]: int(v.get_value()) for path, v in kept_by(copy) if path[-1] == "counter"}
    for path, variable in kept_by(copy):
        saved = isinstance(variable, nnx.Param) or path[-1] == "running_stats"
        if saved and begun.get(path[:-1], 1):
            filled[path] = variable.get_value()
    return nnx.to_pure_dict(nnx.from_flat_state(filled)) if filled else {}


def param_from_stats_checkpoint(case: Case, inputs: Any) -> dict[str, Any]:
    layer, restored = (layer_of(inputs["w0"], quant_of(case)) for _ in range(2))
    # Whether the layer was called before it was saved, only the keys that were saved say.
    if any("tensor_quant" in key for key in case["facts"]["saved_keys"]):
        layer.quant_weight()
    jqinject.load_state(restored, checkpoint(layer) | float_state(inputs["w1"]))
    return {"scale_after": scale_of(restored)}


def identity(case: Case, **more: Any) -> QuantIdentity:
    return QuantIdentity(quant_of(case, **more), return_quant_tensor=True)


def act_checkpoint(case: Case, inputs: Any, steps: int) -> dict[str, Any]:
    original, restored = identity(case), identity(case)
    for x in inputs["x"][:steps]:
        original(jnp.asarray(x))
    saved = checkpoint(original)
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
    running = identity(case, scaling_impl_type="stats")
    for x in inputs["x"]:
        running(jnp.asarray(x))
    learned = identity(case, scaling_impl_type="parameter", min_val=-1.0, max_val=1.0)
    saved = checkpoint(running)
    jqinject.load_state(learned, saved)
    learned.eval()
    tensor = learned(jnp.asarray(inputs["x"][0]))
    return {**_saved(saved), **fields_of(tensor), **facts_of(tensor)}


def _saved(state: dict[str, Any]) -> dict[str, Any]:
    flat = nnx.traversals.flatten_mapping(state)
    return {f"saved.{dotted(path[1:])}": np.asarray(array) for path, array in flat.items()}
