"""Drives Brevitas's layer-wise algorithms: a chain of linear layers or one convolution, solved by a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import Rule, quant
from jqinject.recipes import GPFQ, GPTQ, Problem, Qronos, Recipe, Solution, Solve, Solver
from tests.golden._config import CannotDrive, reading
from tests.golden.adapters.ptq_cases import check_order, said

QUANTIZERS = {
    "Int8WeightPerTensorFloat": quant.Int8WeightPerTensorFloat,
    "Int8WeightPerChannelFloat": quant.Int8WeightPerChannelFloat,
    "GroupIntWeight": quant.IntWeightSymmetricGroupQuant,
    "AsymFrozen": quant.ShiftedUint8WeightPerChannelFloat,
    "Fp8e4m3WeightPerTensorFloat": quant.Fp8e4m3WeightPerTensorFloat,
    "Fp8e4m3WeightPerChannelFloat": quant.Fp8e4m3WeightPerChannelFloat,
}
# What a quantizer's short name says about its scales.
GRANULARITY = {
    "tensor": "tensor",
    "channel": "channel",
    "asym": "channel",
    "group8": "full",
    "group16": "full",
}
OVERRIDES = ("bit_width", "exponent_bit_width", "mantissa_bit_width", "group_size")
SCALES = {"frozen: ": "original", "live (": "live"}
INPUT_QUANT = {None: False, "int8 per tensor, static scale": True}
HESSIANS = {
    "gptq": "H = (2/n) sum x x^T, n rows (patches) over all batches; damp = 0.01*mean(diag H)",
    "gpfq": "H = sum over batches of (1/rows) xq xq^T; cross G = sum over batches of (1/rows) xq x^T",
    "qronos": "H = mean xq xq^T; cross G = mean x xq^T",
}


@dataclass(frozen=True)
class Layerwise:
    """What a config says."""

    algorithm: str
    sizes: list[int]
    conv: dict[str, int] | None
    weight_quant: Any
    granularity: str
    solver: Callable[[int], Solver]
    quantizes_inputs: bool
    calibrates_quantized: bool
    batches: int


def layerwise_of(config: dict[str, Any]) -> Layerwise:
    """Read a config."""
    with reading(config, "a layer-wise algorithm") as given:
        algorithm = given.choose("algorithm", {name: name for name in HESSIANS})
        given.choose("peer", {"brevitas": None})
        said(given, "hessian", {HESSIANS[algorithm]: None})
        act_order = given.choose("act_order", {True: True, False: False})
        check_order(given, act_order)
        scales = said(given, "scale_rule", SCALES)
        blocks = given.take("num_blocks")
        given.take("seed")
        given.take("dead_inputs")  # they are 0 in the data
        conv = given.take("conv")
        sizes = given.take("layer_sizes")
        name = given.take("quantizer")
        made = given.choose("quantizer_class", QUANTIZERS)
        overrides = weight_overrides(given.nested("overrides"))
        inputs = given.choose("input_quant", INPUT_QUANT)
        calibrates = given.choose("use_quant_activations", {True: True, False: False})
        batches = given.take("batches")
    if conv is not None:
        with reading(conv, "a convolution") as stated:
            conv = {key: stated.take(key) for key in ("dilation", "groups", "kernel", "padding", "stride")}
    granularity = GRANULARITY.get(name.rpartition("_")[2])
    if granularity is None:
        raise CannotDrive(f"quantizer: {name!r} has no meaning")
    make = partial(solver_of, algorithm, act_order, scales, blocks)
    make(1)
    weight_quant = made.let(**overrides) if overrides else made
    return Layerwise(algorithm, sizes, conv, weight_quant, granularity, make, inputs, calibrates, batches)


def weight_overrides(stated: Any) -> dict[str, Any]:
    """What a config redeclares in the weight's quantizer."""
    with reading(stated, "the overrides") as given:
        names = [name for name in OVERRIDES if f"weight_{name}" in given]
        return {name: given.take(f"weight_{name}") for name in names}


def solver_of(algorithm: str, act_order: bool, scales: Any, blocks: int | None, columns: int) -> Solver:
    """The solver for a layer of so many inputs."""
    if algorithm == "gpfq":
        if blocks is not None:
            raise CannotDrive(f"GPFQ has no blocks, got {blocks}")
        return GPFQ(act_order=act_order, scales=scales, dead_inputs="zero")
    size = -(-columns // (blocks or 1))
    if algorithm == "gptq":
        return GPTQ(act_order=act_order, scales=scales, block_size=size, dead_inputs="zero")
    if scales != "original":
        raise CannotDrive(f"Qronos measures scales once, got {scales!r}")
    return Qronos(act_order=act_order, block_size=size, dead_inputs="zero")


class Recorder:
    """A solver that keeps what it was given and what it found."""

    statistics = ("hessian", "cross")

    def __init__(self, make: Callable[[int], Solver]) -> None:
        self.make = make
        self.seen: list[tuple[Problem, Solution]] = []

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        solution = self.make(problem.weights.shape[-1])(problem)
        self.seen.append((problem, solution))
        return solution


class Chain(nnx.Module):
    """Linear layers `fc1 - relu - fc2 ...`, or one convolution `conv`."""

    def __init__(self, case: Layerwise) -> None:
        rngs = nnx.Rngs(0)
        if case.conv is None:
            self.names = [f"fc{place}" for place in range(1, len(case.sizes))]
            layers: list[Any] = [nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(case.sizes)]
        else:
            self.names = ["conv"]
            layers = [convolution(*case.sizes, case.conv)]
        for name, layer in zip(self.names, layers, strict=True):
            setattr(self, name, layer)

    def __call__(self, x: Any) -> Any:
        for name in self.names[:-1]:
            x = nnx.relu(getattr(self, name)(x))
        return getattr(self, self.names[-1])(x)


def convolution(channels: int, outputs: int, conv: dict[str, int]) -> nnx.Conv:
    """A convolution of images."""
    return nnx.Conv(
        channels,
        outputs,
        (conv["kernel"],) * 2,
        strides=conv["stride"],
        padding=[(conv["padding"],) * 2] * 2,
        kernel_dilation=conv["dilation"],
        feature_group_count=conv["groups"],
        rngs=nnx.Rngs(0),
    )


def kernel_of(weight: Any) -> Any:
    """A weight `(outputs, inputs, window...)` as ours, `(window..., inputs, outputs)`; and back."""
    return np.transpose(weight, {2: (1, 0), 4: (2, 3, 1, 0)}[np.ndim(weight)])


def weight_of(kernel: Any) -> np.ndarray:
    """The inverse of `kernel_of`."""
    kernel = np.asarray(kernel)
    return kernel.transpose((1, 0) if kernel.ndim == 2 else (3, 2, 0, 1))


def images(x: Any) -> Any:
    """Channels last."""
    return jnp.asarray(x if np.ndim(x) == 2 else np.moveaxis(x, 1, -1))


def run(case: dict[str, Any], inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """Every output that a case may name."""
    stated = layerwise_of(case["config"])
    model = Chain(stated)
    for name in model.names:
        getattr(model, name).kernel.set_value(jnp.asarray(kernel_of(inputs[f"{name}.weight"])))
        getattr(model, name).bias.set_value(jnp.asarray(inputs[f"{name}.bias"]))
    recorder = Recorder(stated.solver)
    rules = [
        Rule(name, weight_quant=stated.weight_quant, **input_of(stated, inputs, name)) for name in model.names
    ]
    batches = [images(x) for x in np.split(inputs["x"], stated.batches)]
    recipe = Recipe(Solve(recorder, quantize_inputs=stated.calibrates_quantized))
    solved = recipe.apply(model, rules, batches, progress=False).model
    found: dict[str, Any] = {}
    for place, name in enumerate(model.names):
        of_layer = layer_outputs(stated, getattr(solved, name), *recorder.seen[place])
        found |= {f"{name}.{key}": value for key, value in of_layer.items()}
    for key, x in (("y_test", inputs["x_test"]), ("y_calib8", inputs["x"][:8])):
        y = np.asarray(solved(images(x)))
        found[key] = y if y.ndim == 2 else np.moveaxis(y, -1, 1)
    return found


def input_of(stated: Layerwise, inputs: dict[str, np.ndarray], name: str) -> dict[str, Any]:
    """The quantizer of a layer's input, of the given scale."""
    if not stated.quantizes_inputs:
        return {}
    threshold = float(inputs[f"{name}.input_scale"]) * 128
    return {"input_quant": quant.Int8ActPerTensorFloat.let(scaling_impl_type="const", scaling_init=threshold)}


def layer_outputs(stated: Layerwise, layer: Any, problem: Problem, solution: Solution) -> dict[str, Any]:
    """What became of a layer, in the reference's layout."""
    tensor = layer.quant_weight()
    shape = tensor.value.shape
    sums = {name: np.asarray(problem.statistics.mean(name)) for name in ("hessian", "cross")}
    times = {"gptq": 2, "gpfq": stated.batches, "qronos": 1}[stated.algorithm]
    cross = sums["cross"].swapaxes(-1, -2) if stated.algorithm == "gpfq" else sums["cross"]
    assert solution.working is not None
    working = np.asarray(solution.working).reshape(weight_of(tensor.value).shape)
    found = {
        "hessian": sums["hessian"] * times,
        "cross": cross * times,
        "quant": weight_of(tensor.value),
        "weight": working,
        "scale": shared(weight_of(jnp.broadcast_to(tensor.scale, shape)), stated.granularity),
    }
    if hasattr(tensor, "zero_point"):
        zero_point = weight_of(jnp.broadcast_to(tensor.zero_point, shape))
        symmetric = not np.any(zero_point)
        found["zero_point"] = shared(zero_point, "tensor" if symmetric else stated.granularity)
    if hasattr(tensor, "int"):
        found["int"] = weight_of(tensor.int())
    return found


def shared(full: np.ndarray, granularity: str) -> np.ndarray:
    """Scales of each number as the reference writes them."""
    if granularity == "full":
        return full
    cut = (
        full[(slice(None), *(slice(0, 1),) * (full.ndim - 1))]
        if granularity == "channel"
        else full.reshape(-1)[0]
    )
    np.testing.assert_array_equal(np.broadcast_to(cut, full.shape), full)
    return cut
