"""A slot that nobody names stays empty in attention and recurrent layers; a weight layer says what its default is."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject.nn
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Int8WeightPerTensorFloat
from tests.brevitas_defaults import ATTENTION, RECURRENT

EMPTY = {
    "QuantScaledDotProductAttention": (),
    "QuantMultiHeadAttention": (2, 8),
    **{name: (3, 4) for name in RECURRENT},
}
FILLED = (
    "QuantConv",
    "QuantConvTranspose",
    "QuantEinsum",
    "QuantEmbed",
    "QuantLinear",
    "QuantLinearGeneral",
    "QuantLoRALinear",
    "QuantScaleBias",
)


def _quantizers(layer):
    """Attribute -> proxy, of all layers within."""
    return {
        name: value
        for _, node in nnx.iter_modules(layer)
        for name, value in vars(node).items()
        if isinstance(value, QuantProxyFromInjector)
    }


@pytest.mark.parametrize("name", EMPTY)
def test_no_slot_is_filled_by_itself(name):
    kind = getattr(jqinject.nn, name)
    arguments = inspect.signature(kind).parameters
    defaults = {n: p.default for n, p in arguments.items() if n.endswith("_quant") and "shared_" not in n}
    assert len(defaults) > 3
    assert set(defaults.values()) == {None}
    assert _quantizers(kind(*EMPTY[name], rngs=nnx.Rngs(0))) == {}


@pytest.mark.parametrize("name", FILLED)
def test_the_default_of_a_weight_is_in_signature_and_docstring(name):
    kind = getattr(jqinject.nn, name)
    default = inspect.signature(kind).parameters["weight_quant"].default
    assert getattr(default, "base", default) is Int8WeightPerTensorFloat
    said = " ".join(kind.__doc__.split()).partition("weight_quant: ")[2].partition("_quant: ")[0]
    assert "y default `Int8WeightPerTensorFloat`" in said
    assert "None keeps" in said


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["QuantMultiHeadAttention", "QuantLSTM"])
def test_weights_alone(name):
    """No quantizer of a bias asks for a scale of an input that nobody wants quantized."""
    prefixes = ("in_proj_", "out_proj_") if "Attention" in name else ("",)
    given = dict.fromkeys((f"{p}weight_quant" for p in prefixes), Int8WeightPerChannelFloat)
    kind, sizes = getattr(jqinject.nn, name), {"QuantMultiHeadAttention": (2, 3, 4)}.get(name, (3, 4))
    more = {"decode": False} if "Attention" in name else {}
    quantized, bare = (kind(*sizes, rngs=nnx.Rngs(0), **more, **g) for g in (given, {}))
    assert set(_quantizers(quantized)) == {"weight_quant"}
    x = jax.random.normal(jax.random.key(0), (2, 5, 3))
    y, expected = (jax.tree.leaves(layer(x))[0] for layer in (quantized, bare))
    signal, noise = (float(jnp.mean(a**2)) for a in (expected, y - expected))
    assert 30 < 10 * np.log10(signal / noise) < 70


@pytest.mark.parametrize("name", [*RECURRENT, "QuantMultiHeadAttention"])
def test_an_override_of_an_empty_slot_is_refused(name):
    prefixes = {n.removesuffix("quant") for n in RECURRENT.get(name, ATTENTION)}
    for prefix in prefixes:
        with pytest.raises(
            TypeError, match=r"bit_width' would have no effect: there is no quantizer.*\n.*cure"
        ):
            getattr(jqinject.nn, name)(*EMPTY[name], rngs=nnx.Rngs(0), **{f"{prefix}bit_width": 4})


def test_one_slot_that_is_named():
    layer = jqinject.nn.QuantMultiHeadAttention(
        2, 8, out_proj_input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0)
    )
    assert set(_quantizers(layer)) == {"input_quant"}
