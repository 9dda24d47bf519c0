"""Drives recurrent layers: sequences of batches through a layer that lives through all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.nn import QuantLSTM, QuantRNN
from jqinject.quant_tensor import as_array
from tests.brevitas_defaults import RECURRENT
from tests.golden._config import reading
from tests.golden.adapters.layer_classes import arguments_of
from tests.golden.adapters.layouts import dotted, facts_of, fields_of, once, our_path, quantizer
from tests.golden.adapters.torch_order import ties_as_torch
from tests.golden.adapters.torch_random import TorchRandom

Case = dict[str, Any]

KINDS = {"QuantLSTM": QuantLSTM, "QuantRNN": QuantRNN}
POSITIONAL = {
    "QuantLSTM": ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional"),
    "QuantRNN": (
        "input_size",
        "hidden_size",
        "num_layers",
        "nonlinearity",
        "bias",
        "batch_first",
        "bidirectional",
    ),
}
# The reference's name of a gate's parameters -> our layers of the input and of the hidden state.
GATES = {
    "gate_params": ("dense_i", "dense_h"),
    "input_gate_params": ("ii", "hi"),
    "forget_gate_params": ("if_", "hf"),
    "cell_gate_params": ("ig", "hg"),
    "output_gate_params": ("io", "ho"),
}


def build(case: Case, inputs: dict[str, np.ndarray]) -> Any:
    """The layer of the case, with its weights."""
    kind = case["layer"]["kind"]
    with reading(case["config"], kind) as config:
        given = arguments_of(config, kind, POSITIONAL[kind])
    arguments = {
        name: quantizer(value) if name.endswith("_quant") and isinstance(value, str) else value
        for name, value in given.items()
    }
    layer = KINDS[kind](rngs=nnx.Rngs(0), **RECURRENT[kind] | arguments)
    with reading(inputs, f"the arrays of {kind}") as arrays:
        arrays.take("x")
        for name in inputs:
            if name.startswith(("param.", "cotangent")):
                arrays.take(name)
    _fill(layer, inputs)
    return layer


def _gates(cell: Any) -> Iterator[tuple[str, Any, Any]]:
    """The reference's name of every gate of a cell, in its order, with our layers of input and hidden state."""
    for name, (of_input, of_hidden) in GATES.items():
        if of_input in vars(cell):
            yield name, getattr(cell, of_input), getattr(cell, of_hidden)


def _parameter(layer: Any, name: str) -> tuple[nnx.Variable[Any], bool]:
    """The Variable that the reference calls so, and whether it is a kernel, which is transposed."""
    _, number, direction, owner, *rest = name.split(".")
    cell = layer.layers[int(number)][int(direction)]
    if owner == "cell":
        proxy = getattr(cell, "io_quant" if rest[0] == "output_quant" else rest[0])
        return _inside(proxy, name), False
    if owner == "io_quant":
        return _inside(cell.io_quant, name), False
    of_input, of_hidden = (getattr(cell, ours) for ours in GATES[owner])
    if rest == ["bias"]:
        return of_hidden.bias, False
    if rest[0] == "bias_quant":
        return _inside(of_hidden.bias_quant, name), False
    found = of_input if rest[0] == "input_weight" else of_hidden
    if rest[1:] == ["weight"]:
        return found.kernel, True
    if "extra_tracked_params_list" in rest:
        place = int(rest[rest.index("extra_tracked_params_list") + 1]) + 1
        return found.weight_quant.tracked_modules[place].kernel, True
    return _inside(found.weight_quant, name), False


def _inside(proxy: Any, name: str) -> nnx.Variable[Any]:
    node = proxy
    for step in our_path(name):
        node = getattr(node, step)
    return node


def _fill(layer: Any, inputs: dict[str, np.ndarray]) -> None:
    """Give the layer the weights of the case.

    The reference set does not hold the weights of hidden states: they are those that the peer's layer draws when it is
    made after `torch.manual_seed(0)`, and are drawn here in the same way.
    """
    random = TorchRandom(0)
    drawn: dict[int, tuple[nnx.Variable[Any], np.ndarray]] = {}
    known: set[int] = set()
    for cells in layer.layers:
        for cell in cells:
            _draw(cell, random, drawn, known)
    for variable, array in drawn.values():
        variable.set_value(jnp.asarray(array))
    for name, array in inputs.items():
        if name.startswith("param."):
            variable, is_kernel = _parameter(layer, name.removeprefix("param."))
            variable.set_value(jnp.asarray(array.T if is_kernel else array))
    _assemble(layer)


def _draw(cell: Any, random: TorchRandom, drawn: dict[int, Any], known: set[int]) -> None:
    """What a layer of the reference draws: normal numbers for every new parameter, which uniform ones then replace."""
    bound = 1.0 / np.sqrt(cell.hidden_features)
    for _, of_input, of_hidden in _gates(cell):
        if of_hidden.bias is not None:
            random.skip_normal(of_hidden.bias.size)
        if id(of_input.kernel) not in known:
            random.skip_normal(of_input.kernel.size)
            known.add(id(of_input.kernel))
        random.skip_normal(of_hidden.kernel.size)
        known.add(id(of_hidden.kernel))
    seen: set[int] = set()
    if "gate_acc_quant" in vars(cell) and cell.gate_acc_quant.tensor_quant is not None:
        learned = nnx.state(cell.gate_acc_quant, nnx.Param)
        for variable in (leaf for _, leaf in nnx.to_flat_state(learned)):
            random.uniform(variable.get_value().shape, bound)
    for _, of_input, of_hidden in _gates(cell):
        proxy = of_input.weight_quant
        # A statistic of the weights holds all of them, and they are found there first.
        tracked = [layer.kernel for layer in proxy.tracked_modules] if _tracks(proxy) else []
        tracked = [kernel for kernel in tracked if id(kernel) in known]
        for variable in (of_hidden.bias, of_input.kernel, *tracked, of_hidden.kernel):
            if variable is not None and id(variable) not in seen:
                seen.add(id(variable))
                drawn[id(variable)] = variable, random.uniform(variable.shape[::-1], bound).T


def _tracks(proxy: Any) -> bool:
    scaling = None if proxy is None else getattr(proxy.tensor_quant, "scaling_impl", None)
    return scaling is not None and "Stats" in type(scaling).__name__


def _assemble(layer: Any) -> None:
    done: set[int] = set()
    for _, node in nnx.iter_modules(layer, graph=True):
        for name in ("weight_quant", "bias_quant"):
            proxy = vars(node).get(name)
            if proxy is not None and id(proxy) not in done:
                done.add(id(proxy))
                proxy.init_tensor_quant()


def _flat(outputs: Any, name: str = "out") -> Iterator[tuple[str, Any]]:
    """`out0`, `out1_0`, ... as the reference names what a call returns."""
    for index, output in enumerate(outputs):
        called = f"{name}{index}"
        if isinstance(output, tuple | list):
            yield from _flat(output, f"{called}_")
        else:
            yield called, output


@once
def _sequence(case: Case, inputs: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    layer = build(case, inputs)
    cotangents = {
        name.removeprefix("cotangent"): jnp.asarray(array)
        for name, array in inputs.items()
        if name.startswith("cotangent")
    }
    found = []
    with ties_as_torch():
        for step, mode in enumerate(case["schedule"]):
            layer.train() if mode == "train" else layer.eval()
            found.append(_step(case, layer, jnp.asarray(inputs["x"][step]), cotangents))
    return found


def _gradients(layer: Any, x: Any, cotangents: dict[str, Any]) -> Any:
    def loss(layer: Any, x: Any) -> tuple[Any, Any]:
        out = layer(x)
        named = {name.removeprefix("out"): as_array(output) for name, output in _flat(out)}
        return sum(jnp.sum(named[name] * cotangent) for name, cotangent in cotangents.items()), out

    return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)


def _step(case: Case, layer: Any, x: Any, cotangents: dict[str, Any]) -> dict[str, Any]:
    (gradients, along_x), out = nnx.jit(_gradients)(layer, x, cotangents)
    outputs = dict(_flat(out))
    found: dict[str, Any] = {"tensor": next(iter(outputs.values())), "grad.x": np.asarray(along_x)}
    for name, output in outputs.items():
        found |= {f"{name}.{field}": array for field, array in fields_of(output).items()}
    by_path = {dotted(path): leaf.get_value() for path, leaf in nnx.to_flat_state(gradients)}
    state = nnx.to_flat_state(nnx.state(layer, nnx.Param, graph=True))
    of_variable = {id(variable): by_path[dotted(path)] for path, variable in state}
    for name in case["outputs"]:
        if name.startswith("grad.") and name != "grad.x":
            variable, is_kernel = _parameter(layer, name.removeprefix("grad."))
            gradient = np.asarray(of_variable[id(variable)])
            found[name] = gradient.T if is_kernel else gradient
    return found


def run(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output that the case names, stacked over its steps."""
    steps = _sequence(case, inputs)
    return {
        name: np.stack([steps[step][name].reshape(spec["shape"][1:]) for step in spec["steps"]])
        for name, spec in case["outputs"].items()
    }


def facts(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """The facts of the first output after every step."""
    return {"steps": [facts_of(outputs["tensor"]) for outputs in _sequence(case, inputs)]}
