"""Loaded models in training: unfrozen, they quantize to the numbers of the file, until something moves."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jqinject import calibrate, freeze, lora, unfreeze, value_and_grad
from jqinject.dot import FrozenParam
from jqinject.formats import load, read_checkpoint, save
from jqinject.model import Rule, quantize
from jqinject.native import use
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    ShiftedUint8WeightGroupQuantFloat,
)
from tests.formats.test_load import FILES, INPUTS, at, net_of

pytest.importorskip("safetensors", reason="of the extra jqinject[formats]")
pytest.importorskip("gguf", reason="of the extra jqinject[formats]")


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "case",
    [
        "compressed_tensors/int4_g32_asym",
        "compressed_tensors/mxfp6",
        "compressed_tensors/fp8_block128",
        "modelopt/nvfp4",
        "bitsandbytes/nf4_double_blocks_cross_rows",
        "hqq/int2_g16_axis1",
    ],
)
def test_an_unfrozen_model_quantizes_to_the_numbers_of_the_file(case: str) -> None:
    found = read_checkpoint(FILES / case)
    net: Any = load(net_of(found), found, ignore=INPUTS)
    names = [name.removesuffix(".weight") for name in found.matrices]
    before = {name: np.asarray(at(net, name).kernel[...]) for name in names}
    unfreeze(net, from_payload=True)
    for name, weight in before.items():
        np.testing.assert_array_equal(at(net, name).quant_weight().value, weight)
        assert isinstance(at(net, name).kernel, nnx.Param)
    freeze(net)
    for name, weight in before.items():
        np.testing.assert_array_equal(at(net, name).kernel[...], weight)


class Own(nnx.Module):
    """A layer, and parameters that the model contracts by itself, one of them in a loop."""

    def __init__(self) -> None:
        self.up = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
        self.own = nnx.Param(jax.random.normal(jax.random.key(3), (16, 2, 8)))
        self.loop = nnx.Param(jax.random.normal(jax.random.key(4), (3, 8, 8)))

    def __call__(self, x: jax.Array) -> Any:
        heads = jnp.einsum("bd,dnh->bnh", self.up(x), self.own[...])
        return jax.lax.scan(lambda y, w: (nnx.tanh(y @ w), None), heads, self.loop[...])[0]


RULES = (
    Rule("up", weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat),
    Rule("own", weight_quant=ShiftedUint8WeightGroupQuantFloat, weight_group_size=8, weight_bit_width=4),
    Rule("loop", weight_quant=Int8WeightPerChannelFloat),
)
X = jax.random.normal(jax.random.key(5), (4, 32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = quantize(Own(), RULES, inputs=(X,))
    model(X)
    return save(freeze(model), tmp_path_factory.mktemp("own") / "saved", method="jqinject")


@pytest.mark.lengthy
def test_parameters_without_a_layer_are_unfrozen_and_trained(folder: Path) -> None:
    net: Any = load(Own(), folder, inputs=(X,))
    codes = np.asarray(net.own.get_raw_value()["value"])
    with use(False):  # kernels sum in another order
        before = net(X)
    unfreeze(net, from_payload=True)
    net.eval()
    np.testing.assert_allclose(net(X), before, rtol=1e-6, atol=1e-6)
    net.train()
    optimizer = nnx.Optimizer(net, optax.sgd(0.02), wrt=nnx.Param)
    (first, grads) = value_and_grad(lambda model: jnp.mean(jnp.square(model(X) - 0.3)))(net)
    optimizer.update(net, grads)
    net.eval()
    assert jnp.mean(jnp.square(net(X) - 0.3)) < first
    freeze(net)
    assert np.asarray(net.own.get_raw_value()["value"]).dtype == codes.dtype
    assert net.loop.get_raw_value()["value"].dtype == jnp.int8


@pytest.mark.lengthy
def test_a_loaded_model_is_calibrated_again(folder: Path) -> None:
    net: Any = unfreeze(load(Own(), folder, inputs=(X,)), from_payload=True)
    narrow = float(net.up.input_quant.scale())
    calibrate(net, [10 * X])
    assert float(net.up.input_quant.scale()) > 2 * narrow
    np.testing.assert_array_equal(net.up.quant_weight().value, net.up.kernel[...])


@pytest.mark.heavy
def test_nothing_is_unfrozen_without_being_asked_for(folder: Path) -> None:
    net: Any = load(Own(), folder, inputs=(X,))
    with pytest.raises(ValueError, match=r"(?s)gone.*cure"):
        unfreeze(net)
    assert isinstance(net.up.kernel, FrozenParam)


@pytest.mark.lengthy
def test_adapters_are_trained_over_the_numbers_of_a_file(folder: Path) -> None:
    rules = Rule(".*", weight_quant=Int8WeightPerChannelFloat)
    adapted = lora(Own(), rules, rank=2, inputs=(X,), rngs=nnx.Rngs(1))
    net: Any = load(adapted, folder)
    found = read_checkpoint(folder)
    for name in ("own", "loop"):
        expected = found.matrices[name].dequantize()
        got = np.asarray(at(net, name)[...])
        axes = {"own": (16, 2, 8), "loop": (3, 8, 8)}[name]
        assert got.shape == axes
        assert np.isclose(np.sort(got.ravel()), np.sort(expected.ravel()), rtol=1e-6).all()
    before = net(X)
    grads = value_and_grad(lambda model: jnp.mean(jnp.square(model(X))))(net)[1]
    assert {path[-1] for path, _ in nnx.to_flat_state(grads)} == {"a", "b"}
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.LoRAParam)
    optimizer.update(net, grads)
    assert not np.array_equal(net(X), before)
