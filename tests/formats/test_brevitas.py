"""State dicts of Brevitas in our layers: the outputs are Brevitas's."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.core import PowerOfTwoIntScaling
from jqinject.formats import CheckpointError, load_brevitas
from jqinject.nn import QuantConv, QuantLinear
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int8WeightPerChannelFloatMSE,
    Int8WeightPerTensorFloat,
    MXInt8Weight,
    ShiftedUint8ActPerTensorFloat,
    ShiftedUint8WeightPerChannelFloatMSE,
)

# State dicts and outputs in evaluation of layers of Brevitas 0.13.4, after one batch in training.
ARRAYS = Path(__file__).parent / "data" / "brevitas.npz"
LEARNED = {"weight_quant": Int8WeightPerChannelFloat, "weight_scaling_impl_type": "parameter_from_stats"}
CASES: dict[str, dict[str, Any]] = {
    "fromstats": LEARNED,
    "log": LEARNED | {"weight_restrict_scaling_type": "log_fp"},
    "bw": {
        "weight_quant": Int8WeightPerTensorFloat,
        "weight_bit_width_impl_type": "parameter",
        "weight_bit_width": 5,
    },
    "smse": {"weight_quant": ShiftedUint8WeightPerChannelFloatMSE},
    "input": {
        "weight_quant": Int8WeightPerChannelFloat,
        "input_quant": Int8ActPerTensorFloat,
        "output_quant": ShiftedUint8ActPerTensorFloat,
    },
    "stats": {
        "weight_quant": Int8WeightPerChannelFloat,
        "input_quant": Int8ActPerTensorFloat,
        "input_scaling_impl_type": "stats",
        "input_scaling_stats_op": "max",
    },
    # Brevitas takes 128 for the largest integer, so that the largest numbers of each block are clamped.
    "mx": {"weight_quant": MXInt8Weight.let(int_scaling_impl=PowerOfTwoIntScaling)},
    "conv": {"weight_quant": Int8WeightPerChannelFloatMSE},
}


def arrays_of(case: str) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    with np.load(ARRAYS) as held:
        start = f"{case}|state|"
        state = {name.removeprefix(start): held[name] for name in held.files if name.startswith(start)}
        return state, held[f"{case}|x"], held[f"{case}|y"]


def linear(**settings: Any) -> QuantLinear:
    return QuantLinear(32, 8, **settings, rngs=nnx.Rngs(0))


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
def test_a_state_dict_gives_brevitas_outputs(case: str) -> None:
    state, x, y = arrays_of(case)
    layer: Any = linear(**CASES[case]) if case != "conv" else None
    if layer is None:
        layer = QuantConv(3, 4, (3, 3), padding="VALID", **CASES[case], rngs=nnx.Rngs(0))
        x, y = np.moveaxis(x, 1, -1), np.moveaxis(y, 1, -1)
    load_brevitas(layer, state)
    layer.eval()
    np.testing.assert_allclose(np.asarray(layer(jnp.asarray(x))), y, rtol=1e-6, atol=5e-7)


def test_modules_may_be_called_otherwise(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy", reason="of the extra jqinject[formats]")
    state, x, y = arrays_of("fromstats")
    file = tmp_path / "model.safetensors"
    safetensors.save_file({f"features.0.{name}": array for name, array in state.items()}, file)
    net = nnx.Sequential(linear(**CASES["fromstats"]))
    with pytest.raises(CheckpointError, match=r"features\.0\.(bias|weight).*which the model has not"):
        load_brevitas(net, file)
    load_brevitas(net, file, names={"features.{i}": "layers.{i}"})
    net.eval()
    np.testing.assert_allclose(net(jnp.asarray(x)), y, rtol=1e-6, atol=5e-7)


def test_a_model_with_other_quantizers_is_refused_and_unchanged() -> None:
    state, _, _ = arrays_of("fromstats")
    layer = linear(weight_quant=Int8WeightPerChannelFloat)
    before = np.asarray(layer.kernel[...])
    with pytest.raises(CheckpointError, match=r"scaling_impl\.value, which the model has not"):
        load_brevitas(layer, state)
    with pytest.raises(CheckpointError, match="may hold code"):
        load_brevitas(layer, ARRAYS)
    np.testing.assert_array_equal(layer.kernel[...], before)
