"""Every case of the reference set made with Flax's Linen FP8 ops: six steps each, outputs, gradients, histories."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
import jqinject.quant as q
from jqinject.nn import QuantLinear
from tests.golden import _driver
from tests.golden._config import CannotDrive, reading

OPS = {
    # op: (weights, inputs, gradients, contraction)
    "Fp8DirectDotGeneralOp": (
        q.Fp8e4m3WeightPerTensorDelayed,
        q.Fp8e4m3ActPerTensorDelayed,
        q.Fp8e5m2GradPerTensorDelayed,
        "fp8",
    ),
    "Fp8DotGeneralOp": (
        q.Fp8e4m3WeightPerTensorDelayed,
        q.Fp8e4m3ActPerTensorDelayed,
        q.Fp8e5m2GradPerTensorDelayed,
        "float",
    ),
    "NANOOFp8DotGeneralOp": (
        q.Fp8e4m3FNUZWeightPerTensorDelayed,
        q.Fp8e4m3FNUZActPerTensorDelayed,
        q.Fp8e5m2FNUZGradPerTensorDelayed,
        "float",
    ),
}
OPS["Fp8Einsum"] = OPS["Fp8DirectDotGeneralOp"]


def load_cases() -> list[dict[str, Any]]:
    cases = []
    for path in sorted(_driver.folder().rglob("manifest.json")):
        manifest = json.loads(path.read_text())
        entries = manifest if isinstance(manifest, list) else []
        cases += [case | {"_folder": path.parent} for case in entries if "op" in case and "history" in case]
    return cases


class Fp8Case(NamedTuple):
    """What a case says."""

    weight: type
    act: type
    grad: type
    contraction: str
    dtype: Any
    history: int
    sizes: tuple[int, int]
    steps: int


def case_of(case: Mapping[str, Any]) -> Fp8Case:
    with reading(case, "a case of Flax's FP8 ops") as given:
        for name in (
            "id",
            "_folder",
            "wild",
            "b",
        ):  # what inputs there are, and how many rows, the arrays say
            given.take(name, None)
        return Fp8Case(
            *given.choose("op", OPS),
            dtype=jnp.dtype(given.choose("dtype", {name: name for name in ("float32", "bfloat16")})),
            history=given.take("history"),
            sizes=(given.take("k"), given.take("n")),
            steps=given.take("steps"),
        )


CASES = load_cases()


def test_a_reference_set_was_found() -> None:
    assert CASES, f"no manifest of Flax's FP8 ops under {_driver.folder()} (JQINJECT_GOLDEN names the folder)"


def make_layer(case: Fp8Case, kernel: np.ndarray) -> QuantLinear:
    length = {f"{prefix}_amax_history_length": case.history for prefix in ("weight", "input", "grad")}
    return QuantLinear(
        *case.sizes,
        use_bias=False,
        dtype=case.dtype,
        param_dtype=case.dtype,
        weight_quant=case.weight,
        input_quant=case.act,
        grad_quant=case.grad,
        contraction=case.contraction,
        rngs=nnx.Rngs(0),
        kernel_init=lambda *_: jnp.asarray(kernel, case.dtype),
        **length,
    )


@nnx.jit
def step(layer: QuantLinear, x: Any, g: Any) -> Any:
    def inner_product(layer: QuantLinear, x: Any) -> Any:
        y = layer(x)
        return jnp.sum(y * g), y

    return jqinject.value_and_grad(inner_product, argnums=(0, 1), has_aux=True)(layer, x)


def statistics(layer: QuantLinear) -> dict[str, Any]:
    proxies = {"input": layer.input_quant, "kernel": layer.weight_quant, "output_grad": layer.grad_quant}
    found = {}
    for name, proxy in proxies.items():
        scaling = proxy.tensor_quant.scaling_impl
        found[f"{name}_scale"] = scaling.scale.get_value().reshape(1)
        found[f"{name}_amax_history"] = scaling.amax_history.get_value()
    return found


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    with np.load(case["_folder"] / "steps.npz") as archive:
        arrays = {key: archive[key] for key in archive.files if key.startswith(f"{case['id']}/")}
    found = case_of(case)
    dtype = found.dtype
    # The manifest's tolerances; what a scale multiplies is as large as the largest number beside it.
    rtol = 1e-5 if dtype == jnp.float32 else 2e-2
    layer = make_layer(found, arrays[f"{case['id']}/kernel0"])
    for number in range(found.steps):

        def expected(name: str, number: int = number) -> np.ndarray:
            return arrays[f"{case['id']}/step{number}/{name}"]

        x, g = (jnp.asarray(expected(name), dtype) for name in ("x", "g"))
        (_, y), (of_layer, dx) = step(layer, x, g)
        got = {"y": y, "dx": dx, "dw": of_layer["kernel"].get_value()}
        for name, value in got.items():
            wanted = expected(name)
            np.testing.assert_allclose(
                np.asarray(value, np.float32),
                wanted,
                rtol=rtol,
                atol=rtol * np.abs(wanted).max(),
                err_msg=f"{name} at step {number}",
            )
        for name, value in statistics(layer).items():
            np.testing.assert_allclose(value, expected(name), rtol=1e-6, err_msg=f"{name} at step {number}")
        layer.kernel[...] = jnp.asarray(expected("kernel_after"), dtype)


def test_a_case_with_another_key_is_refused() -> None:
    case = {"op": "Fp8DotGeneralOp", "dtype": "float32", "history": 1, "k": 2, "n": 2, "steps": 1}
    case_of(case)
    for more in ({"margin": 1}, {"op": "Fp4DotGeneralOp"}, {"dtype": "float64"}):
        with pytest.raises(CannotDrive):
            case_of(case | more)
