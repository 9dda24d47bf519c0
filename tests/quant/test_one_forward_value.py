"""A quantized tensor is the same to the bit however the program around it is compiled, with all optimizations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.catalogue.entries import ready_made
from jqinject.catalogue.examples import kind_of, left_to_users
from jqinject.inject import Binding
from jqinject.nn import QuantIdentity, QuantLinear
from jqinject.quant import Int8ActPerTensorFloat
from jqinject.quant.aqt import OperandInjector
from jqinject.quant.integer.decoupled_int import AccumulatorAwareWeightQuant
from jqinject.quant_tensor import as_array

# One of each formula of scales and grids; the others are in the exhaustive table.
FIRSTS = (
    "Fp8e4m3ActPerTensorCurrent",
    "Fp8e4m3OCPWeightPerChannelFloat",
    "Int4WeightPerGroupAbsMax",
    "Int8DynamicActPerRowAbsMax",
    "Int8ActPerTensorMinMax",
    "Int8WeightPerChannelAbsMax",
    "MXFloat4e2m1Act",
    "NVFP4Act",
    "ShiftedUint8DynamicActPerRowFloat",
    "ShiftedUint8WeightPerChannelFloat",
)
NAMES = [
    name
    for name, quantizer in ready_made().items()
    if not name.startswith("None") and kind_of(quantizer) in ("act", "weight")
]
LONG_TAILS = jax.random.normal(jax.random.key(0), (8, 4, 32, 4)) * jnp.exp(
    jax.random.normal(jax.random.key(1), (8, 4, 32, 4))
)


@pytest.fixture(scope="module", autouse=True)
def optimized():
    """Codes move where a compiler rewrites arithmetic, which tests do without."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def proxy_and_tensors(name):
    quantizer = ready_made()[name]
    given = left_to_users(quantizer)
    if kind_of(quantizer) == "act":
        if name.endswith("BatchQuant1d"):
            given["scaling_stats_permute_dims"] = (3, 0, 1, 2)
        return QuantIdentity(quantizer, rngs=nnx.Rngs(0), **given).act_quant, (LONG_TAILS,)
    reads_input = issubclass(quantizer, AccumulatorAwareWeightQuant)
    layer = QuantLinear(
        64,
        48,
        weight_quant=quantizer,
        input_quant=Int8ActPerTensorFloat if reads_input else None,
        rngs=nnx.Rngs(0),
        **{f"weight_{key}": value for key, value in given.items()},
    )
    inputs = (layer.input_quant(LONG_TAILS.reshape(-1, 64)),) if reads_input else ()
    inputs = (layer.input_quant(LONG_TAILS.reshape(-1, 64)),) if reads_input else ()
    return layer.weight_quant, (layer.kernel[...], *inputs)


def values_of(found):
    return as_array(found), jax.lax.stop_gradient(jnp.asarray(found.scale))


def programs(quantize):
    """The forward value, taken in five ways."""

    def pulled(run, x):
        (y, scale), pull = jax.vjp(run, x)
        return y, scale, pull((jnp.ones_like(y), jnp.zeros_like(scale)))

    return {
        "eager": quantize,
        "jit": jax.jit(quantize),
        "vjp": jax.jit(partial(pulled, quantize)),
        "remat": jax.jit(partial(pulled, jax.checkpoint(quantize))),
        "jvp": jax.jit(lambda x: jax.jvp(quantize, (x,), (jnp.ones_like(x),))[0]),
    }


def check(quantize, x):
    found = {name: [np.asarray(a) for a in run(x)[:2]] for name, run in programs(quantize).items()}
    value, scale = found.pop("eager")
    for name, (other, its_scale) in found.items():
        if np.array_equal(scale, its_scale):
            np.testing.assert_array_equal(other, value, name)
        else:  # a sum, a norm or a search, whose order is the compiler's
            np.testing.assert_array_max_ulp(its_scale, scale, 1)
            steps = np.abs(other - value) / np.abs(np.broadcast_to(scale, value.shape))
            np.testing.assert_allclose(steps, 0, atol=1e-3, err_msg=name)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FIRSTS else pytest.mark.exhaustive) for n in NAMES]
)
def test_the_forward_value_does_not_depend_on_the_program(name):
    proxy, (x, *others) = proxy_and_tensors(name)
    graph, state = nnx.split(proxy)

    def quantize(x):
        copied = jax.tree.map(lambda leaf: leaf, state)
        return values_of(nnx.merge(graph, copied)(x, *others))

    check(quantize, x)


@pytest.mark.heavy
@pytest.mark.parametrize("bits", [8, 4, "e4m3"])
def test_the_operands_of_a_contraction_do_not_either(bits):
    operand = OperandInjector.let(bits=bits, shared_axes=(1,))

    def quantize(x):
        found = Binding(operand).resolve("tensor_quant")(x)
        return found.value, found.scale

    check(quantize, LONG_TAILS.reshape(64, -1))
