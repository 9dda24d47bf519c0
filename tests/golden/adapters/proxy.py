"""Drives the scenarios of proxies: loading, assigning, sharing, checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.golden._config import CannotDrive, reading
from tests.golden.adapters.layouts import (
    dotted,
    once,
    our_path,
    shaped,
)
from tests.golden.adapters.proxy_scenarios import (
    act_checkpoint,
    act_runtime_stats_become_parameter,
    advanced,
    binary_parameter,
    disable_quant,
    param_from_max_assign,
    param_from_max_inplace,
    param_from_max_load,
    param_from_max_load_quantized,
    param_from_stats_checkpoint,
    quant_of,
    shared_mean,
    shared_quantizer,
)

Case = dict[str, Any]

# What the reference calls a scenario -> what drives it, its arrays, and its numbers.
SCENARIOS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[str, ...], tuple[str, ...]]] = {
    "BinaryQuant(ParameterScaling(s)) called on x": (binary_parameter, ("x",), ("s",)),
    "binary weight quantizer, scale parameter initialised from max|weight|; weights w0; then a float state dict with "
    "w1 is loaded": (param_from_max_load, ("w0", "w1"), ()),
    "as above but the checkpoint also holds the scale parameter 0.77: it wins": (
        param_from_max_load_quantized,
        ("w0", "w1", "saved_scale"),
        (),
    ),
    "a new Parameter is assigned to layer.weight: re-initialised at once": (
        param_from_max_assign,
        ("w0", "w1"),
        (),
    ),
    "in-place write to the weight: the scale is stale until init_tensor_quant()": (
        param_from_max_inplace,
        ("w0", "w1"),
        (),
    ),
    "scale = mean|w| over the tracked weights; a second layer then shares the proxy": (
        shared_mean,
        ("w0", "w1"),
        (),
    ),
    "two conv layers share one proxy; cotangent applied to both quantized weights": (
        shared_quantizer,
        ("w0", "w1", "cotangent"),
        (),
    ),
    "a @value picks ClampedBinaryQuant or BinaryQuant; scaling_shape follows `this`; scale parameter from max|w|; "
    "then w1 is loaded": (
        advanced,
        ("w0", "w1", "cotangent"),
        ("is_clamped", "scaling_per_output_channel"),
    ),
    "weight_quant.disable_quant = True: the weight comes back as it is": (disable_quant, ("w0",), ()),
    "state dict taken from a layer with w0, weight replaced by w1, loaded in a new layer": (
        param_from_stats_checkpoint,
        ("w0", "w1"),
        (),
    ),
    "`steps` training batches, state dict saved and loaded into a fresh layer; both evaluated on x_eval; then the "
    "restored one takes one training batch x[0]": (act_checkpoint, ("x", "x_eval"), ("steps",)),
    "trained with scaling_impl_type=stats, loaded into scaling_impl_type=parameter": (
        act_runtime_stats_become_parameter,
        ("x",),
        (),
    ),
}


def build(case: Case, inputs: dict[str, np.ndarray]) -> Callable[[], dict[str, Any]]:
    """What drives the scenario of a case, with all that the case states."""
    with reading(case["config"], "a scenario") as config:
        scenario, arrays, numbers = config.choose("scenario", SCENARIOS)
        given = {name: config.take(name) for name in numbers}
    with reading(inputs, f"the arrays of {scenario.__name__}") as found:
        for name in arrays:
            found.take(name)
    if case.get("quantizer"):
        quant_of(case)
    elif case["overrides"]:
        raise CannotDrive(f"{case['id']}: overrides of a quantizer that it does not name")
    return functools.partial(scenario, case, inputs, **given)


@once
def _driven(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    return build(case, inputs)()


def run(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output that the case names."""
    outputs = _driven(case, inputs)
    found = {}
    for name, spec in case["outputs"].items():
        kind, _, path = name.partition(".")
        ours = name if name in outputs else f"{kind}.{dotted(our_path(path))}"
        if ours in outputs:
            found[name] = shaped(outputs[ours], spec["shape"])
    return found


def facts(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """The facts that the scenario found."""
    return _driven(case, inputs)
