"""Quantizers as users write them: an injector around components of their own, read from the layer's weights."""

from typing import final

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import ExtendedInjector, this, value
from jqinject.core import BinaryQuant, Quantized, QuantParam, QuantStat
from jqinject.nn import QuantConv, QuantIdentity, QuantLinear
from jqinject.ops import IntGrid
from jqinject.proxy import QuantProxyFromInjector, WeightQuantProxyFromInjector
from jqinject.quant import Int8WeightPerTensorFloat
from jqinject.quant_tensor import IntQuantTensor


class Step(nnx.Module):
    """Rounds to multiples of a step; it holds the step in every way that NNX knows."""

    def __init__(self, step, bit_width):
        self.array = jnp.asarray(step)
        self.inside = nnx.Dict(param=QuantParam(jnp.asarray(step)), several=nnx.List([jnp.asarray(step)]))
        self.seen = QuantStat(jnp.asarray(0))
        self.numbers = nnx.data({"deep": [jnp.asarray(step)]})
        self.bit_width = bit_width

    def steps(self):
        return [
            self.array,
            self.inside["param"][...],
            self.inside["several"][0],
            self.numbers["deep"][0],
        ]

    def __call__(self, x):
        self.seen[...] += 1
        step = self.array
        return Quantized(jnp.round(x / step) * step, step, None, IntGrid(self.bit_width))


class Mine(ExtendedInjector):
    tensor_quant = Step
    bit_width = 8
    signed = True
    widest = this.step  # an unused link does no harm

    @value
    def step(module, bit_width):
        layers = module if isinstance(module, tuple) else (module,)
        return jnp.stack([jnp.max(jnp.abs(m.weight[...])) for m in layers]).max() / 2 ** (bit_width - 1)


def linear(seed=0, quantizer=Mine, **given):
    return QuantLinear(4, 3, use_bias=False, weight_quant=quantizer, rngs=nnx.Rngs(seed), **given)


def widest(*layers, bits=8):
    return np.float32(max(float(jnp.max(jnp.abs(layer.kernel[...]))) for layer in layers) / 2 ** (bits - 1))


WRITES = {
    "loaded": lambda layer, new: jqinject.load_state(layer, {"kernel": new}),
    "assigned": lambda layer, new: setattr(layer, "kernel", nnx.Param(new)),
    "assigned as weight": lambda layer, new: setattr(layer, "weight", nnx.Param(new)),
    "updated, reassembled": lambda layer, new: (
        nnx.update(layer, {"kernel": new}),
        jqinject.reassemble(layer),
    ),
    "written in place, by hand": lambda layer, new: (
        layer.kernel.set_value(new),
        layer.weight_quant.init_tensor_quant(),
    ),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("copied", [False, True], ids=["original", "clone"])
def test_everything_that_was_made_from_the_weight_is_made_again(write, copied):
    layer = nnx.clone(linear()) if copied else linear()
    layer(jnp.ones((1, 4)))
    quantizer = layer.weight_quant.tensor_quant
    graph = nnx.graphdef(layer)
    write(layer, jnp.full((4, 3), 12.8))
    assert layer.weight_quant.tensor_quant is quantizer
    assert nnx.graphdef(layer) == graph
    np.testing.assert_array_equal(quantizer.steps(), np.full(4, 0.1, np.float32))
    assert int(quantizer.seen[...]) == 0
    assert float(layer.weight_quant.scale()) == np.float32(0.1)


def test_an_in_place_write_alone_leaves_the_quantizer_as_it_was():
    layer = linear()
    before = float(layer.weight_quant.scale())
    layer.kernel[...] = 2 * layer.kernel[...]
    assert float(layer.weight_quant.scale()) == before


def test_shared_it_is_given_all_the_layers():
    first = linear(0)
    second = QuantConv(4, 3, 1, weight_quant=first.weight_quant, rngs=nnx.Rngs(1))
    assert float(first.weight_quant.scale()) == float(second.quant_weight().scale) == widest(first, second)
    third = linear(2, second.weight_quant)
    assert float(first.weight_quant.scale()) == widest(first, second, third)


def test_an_override_reaches_the_users_function():
    layer = linear(weight_bit_width=3)
    assert float(layer.weight_quant.scale()) == widest(layer, bits=3)
    assert layer.quant_weight().bit_width == 3


@pytest.mark.heavy
def test_stacked_layers_get_a_quantizer_each():
    class Learned(nnx.Module):
        def __init__(self, step):
            self.step = QuantParam(step)

        def __call__(self, x):
            step = self.step[...]
            return Quantized(jnp.round(x / step) * step, step, None, IntGrid(8))

    quantizer = Mine.let(tensor_quant=Learned)
    stack = nnx.vmap(lambda rngs: linear_of(rngs, quantizer))(nnx.Rngs(0).split(3))
    variable = stack.weight_quant.tensor_quant.step
    np.testing.assert_allclose(variable[...], np.abs(stack.kernel[...]).max((1, 2)) / 128, rtol=1e-6)
    new = jnp.array([1.28, 2.56, 0.64])[:, None, None] * jnp.ones((3, 4, 3))
    jqinject.load_state(stack, {"kernel": new})
    assert stack.weight_quant.tensor_quant.step is variable
    np.testing.assert_allclose(variable[...], [0.01, 0.02, 0.005], rtol=1e-6)
    outputs = nnx.vmap(lambda layer: layer(jnp.ones((1, 4))))(stack)
    np.testing.assert_allclose(outputs[:, 0, 0], 4 * new[:, 0, 0], rtol=1e-5)


class Everything(ExtendedInjector):
    """Read from whatever the layer says of itself."""

    tensor_quant = Step
    signed = True

    @value
    def bit_width(module):
        return 2 + module.output_channel_dim + module.weight_ndim

    @value
    def step(module):
        return jnp.float32(1 / module.out_channels)


@pytest.mark.parametrize(
    ("layer", "bits"),
    [
        (lambda: QuantLinear(4, 8, weight_quant=Everything, rngs=nnx.Rngs(0)), 2 + 1 + 2),
        (lambda: QuantConv(4, 8, 3, weight_quant=Everything, rngs=nnx.Rngs(0)), 2 + 2 + 3),
        (lambda: QuantConv(4, 8, (3, 3), weight_quant=Everything, rngs=nnx.Rngs(0)), 2 + 3 + 4),
    ],
    ids=["linear", "1-D", "2-D"],
)
def test_what_a_layer_says_of_itself(layer, bits):
    weight = layer().quant_weight()
    assert (weight.bit_width, float(weight.scale)) == (bits, 0.125)


@final
class Counting(QuantProxyFromInjector):
    """A proxy of the user's own: it counts its calls in the state."""

    parameter = "weight"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = QuantStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self._pack(self.tensor_quant(x)) if self.is_quant_enabled else x


def test_a_proxy_class_of_ones_own():
    layer = linear(quantizer=Int8WeightPerTensorFloat, weight_proxy_class=Counting)
    plain = linear(quantizer=Int8WeightPerTensorFloat)
    assert type(layer.weight_quant) is Counting
    x = jnp.ones((2, 4))
    for _ in range(3):
        np.testing.assert_array_equal(nnx.jit(lambda m: m(x))(layer), nnx.jit(lambda m: m(x))(plain))
    assert int(layer.weight_quant.calls[...]) == 3
    jqinject.load_state(layer, {"kernel": np.ones((4, 3), np.float32)})
    assert int(layer.weight_quant.calls[...]) == 3
    twin = linear(1, layer.weight_quant)
    assert twin.weight_quant.tracked_modules == (layer, twin)
    assert isinstance(nnx.clone(layer).weight_quant, Counting)


def test_a_quantizer_that_is_no_module_but_a_function():
    def halves(x):
        return jnp.round(2 * x) / 2, jnp.float32(0.5), jnp.float32(0), 8

    class Halves(ExtendedInjector):
        proxy_class = WeightQuantProxyFromInjector
        signed = True

        @value
        def tensor_quant():
            return halves

    layer = linear(quantizer=Halves)
    weight = layer.quant_weight()
    assert isinstance(weight, IntQuantTensor)
    np.testing.assert_array_equal(weight.value, jnp.round(2 * layer.kernel[...]) / 2)
    np.testing.assert_array_equal(nnx.jit(lambda m: m(jnp.ones((1, 4))))(layer), layer(jnp.ones((1, 4))))
    layer.kernel = nnx.Param(jnp.full((4, 3), 0.8))
    assert float(layer.quant_weight().value[0, 0]) == 1.0


def test_activations_with_a_quantizer_of_ones_own():
    class Sign(ExtendedInjector):
        tensor_quant = BinaryQuant
        signed = True

        @value
        def scaling_impl():
            return lambda x, threshold=None: jnp.float32(0.5)

    identity = QuantIdentity(Sign, return_quant_tensor=True)
    y = identity(jnp.array([-3.0, 0.1]))
    np.testing.assert_array_equal(y.value, [-0.5, 0.5])
    assert float(identity.act_quant.scale()) == 0.5


class Noisy(Int8WeightPerTensorFloat):
    float_to_int_impl_type = "stochastic_round"


@pytest.mark.heavy
def test_random_quantizers_of_a_stack_draw_apart_and_go_on_after_assembly():
    stack = nnx.vmap(lambda rngs: linear_of(rngs))(nnx.Rngs(0, stochastic_round=1).split(3))
    jqinject.load_state(stack, {"kernel": jnp.broadcast_to(jnp.linspace(-1, 1, 12).reshape(4, 3), (3, 4, 3))})
    draw = nnx.vmap(lambda layer: layer.quant_weight().value)
    first, second = draw(stack), draw(stack)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first[0], first[1])
    stack.eval()
    rested = draw(stack)
    np.testing.assert_array_equal(rested[0], rested[1])
    np.testing.assert_array_equal(rested, draw(stack))


def linear_of(rngs, quantizer=Noisy):
    return QuantLinear(4, 3, use_bias=False, weight_quant=quantizer, rngs=rngs)


STREAMS = {"default": nnx.Rngs(3), "its own": nnx.Rngs(0, stochastic_round=3)}


@pytest.mark.parametrize("rngs", STREAMS)
def test_random_streams_go_on_where_they_were_also_in_another_quantizer(rngs):
    layer, twin = (linear_of(nnx.clone(STREAMS[rngs])) for _ in range(2))
    stream = lambda m: m.weight_quant.tensor_quant.int_quant.float_to_int_impl.stream  # noqa: E731
    layer.quant_weight(), twin.quant_weight()
    assert not layer.weight_quant.init_tensor_quant()  # the same structure: the same object
    sharer = QuantLinear(4, 3, weight_quant=layer.weight_quant, rngs=nnx.Rngs(8))  # another structure
    assert int(stream(sharer).count[...]) == 1
    assert stream(sharer)() == stream(twin)()


def test_random_rounding_is_the_seeds_and_the_checkpoints():
    one, other = linear_of(nnx.Rngs(3)), linear_of(nnx.Rngs(3))
    np.testing.assert_array_equal(one.quant_weight().value, other.quant_weight().value)
    late = linear_of(nnx.Rngs(9))
    jqinject.load_state(late, nnx.state(one))
    for _ in range(2):
        np.testing.assert_array_equal(late.quant_weight().value, one.quant_weight().value)


def test_a_parameter_that_can_not_be_quantized_is_not_taken():
    layer = linear(quantizer=Int8WeightPerTensorFloat)
    kernel = layer.kernel
    with pytest.raises(ValueError, match=r"the weight of a QuantLinear has 2 axes .* got shape \(5,\)"):
        layer.kernel = nnx.Param(jnp.ones(5))
    assert layer.kernel is kernel
    layer(jnp.ones((1, 4)))


def test_a_misspelt_attribute_of_a_quantizer_is_refused_by_the_layer():
    class W4(Int8WeightPerTensorFloat):
        bit_widht = 4

    with pytest.raises(
        TypeError, match=r"W4 declares 'bit_widht', which would have no effect.*\n.*'bit_width'"
    ):
        QuantLinear(4, 3, weight_quant=W4, rngs=nnx.Rngs(0))


def test_what_is_no_component_and_what_is_no_truth_value():
    for name, given, message in (
        ("scaling_impl", 3.0, r"RescalingIntQuant: scaling_impl must be a component, got 3\.0 of type float"),
        (
            "signed",
            "False",
            r"Int8WeightPerTensorFloat: signed must be True or False, got 'False' of type str",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            QuantLinear(4, 3, weight_quant=Int8WeightPerTensorFloat.let(**{name: given}), rngs=nnx.Rngs(0))
