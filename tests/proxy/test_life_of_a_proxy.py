"""A proxy from construction over sharing, copying and switching off to its end."""

import copy
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import ExtendedInjector, value
from jqinject.core import BinaryQuant, ParameterScaling, components_in
from jqinject.nn import QuantIdentity, QuantLinear
from jqinject.proxy import QuantizerReplacedWarning
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    Int32Bias,
    ShiftedUint8WeightPerTensorFloat,
)


class FromMax(ExtendedInjector):
    """A learned scale that starts at the largest weight."""

    tensor_quant = BinaryQuant
    scaling_impl = ParameterScaling
    signed = True

    @value
    def scaling_init(module):
        layers = module if isinstance(module, tuple) else (module,)
        return max(float(jnp.max(jnp.abs(layer.weight[...]))) for layer in layers)


def linear(seed=0, quant=Int8WeightPerTensorFloat, shape=(4, 3), **overrides):
    return QuantLinear(*shape, weight_quant=quant, rngs=nnx.Rngs(seed), **overrides)


def largest(*layers):
    return max(float(jnp.max(jnp.abs(layer.kernel[...]))) for layer in layers)


class Pair(nnx.Module):
    def __init__(self, quant=FromMax, seed=0, **overrides):
        self.a = linear(seed, quant, (4, 4), **overrides)
        self.b = linear(seed + 1, self.a.weight_quant, (4, 4))

    def __call__(self, x):
        return self.b(self.a(x))


def test_it_says_what_its_quantizer_is():
    layer = linear()
    proxy = layer.weight_quant
    assert (proxy.is_signed, proxy.is_narrow_range, proxy.rounding_mode) == (True, True, "ROUND")
    assert proxy.bit_width() == 8 and float(proxy.zero_point()) == 0
    shifted = linear(
        quant=ShiftedUint8WeightPerTensorFloat, weight_float_to_int_impl_type="floor"
    ).weight_quant
    assert (shifted.is_signed, shifted.rounding_mode) == (False, "FLOOR")
    assert linear(quant=jqinject.quant.NoneWeightQuant).weight_quant.is_quant_enabled is False


def test_switched_off_it_lets_the_tensor_through():
    layer = linear()
    layer.weight_quant.disable_quant = True
    assert layer.quant_weight() is not None and layer.weight_quant.scale() is None
    np.testing.assert_array_equal(layer.quant_weight(), layer.kernel[...])
    layer.weight_quant.disable_quant = False
    assert layer.quant_weight().is_valid


def test_sharing_is_holding_one_object_assembled_for_both():
    pair = Pair()
    assert pair.a.weight_quant is pair.b.weight_quant
    assert pair.a.weight_quant.tracked_modules == (pair.a, pair.b)
    assert float(pair.a.weight_quant.scale()) == largest(pair.a, pair.b)


def test_layers_that_do_not_fit_are_refused_and_nothing_changes():
    first = linear(0, Int8WeightPerChannelFloat, (4, 3))
    before, scale = nnx.graphdef(first), first.weight_quant.scale()
    with pytest.raises(ValueError, match="need the same out_channels, got QuantLinear: 3, QuantLinear: 5"):
        linear(1, first.weight_quant, (4, 5))
    assert nnx.graphdef(first) == before and first.weight_quant.tracked_modules == (first,)
    np.testing.assert_array_equal(first.weight_quant.scale(), scale)


def test_sharing_is_refused_in_tree_mode_and_unshared_layers_work_there():
    first = linear()
    with nnx.set_graph_mode(False):
        with pytest.raises(ValueError, match=r"tree mode.*(?s:.)*cure: leave tree mode"):
            linear(1, first.weight_quant)
        layer = linear(2, Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat, bias_quant=Int32Bias)
        x = jnp.ones((2, 4))
        eager = layer(x)
        np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(layer, x), eager, rtol=1e-5, atol=1e-6)
        assert len(jax.tree.leaves(nnx.state(layer))) == 5


@pytest.mark.parametrize(
    "duplicate",
    [
        nnx.clone,
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: nnx.merge(*nnx.split(m), copy=True),
    ],
)
def test_copies_assemble_from_their_own_weights(duplicate):
    original = linear(0, FromMax)
    scale = float(original.weight_quant.scale())
    twin = duplicate(original)
    twin.kernel.set_value(jnp.full((4, 3), 3.5))
    twin.weight_quant.init_tensor_quant()
    assert float(twin.weight_quant.scale()) == 3.5 and float(original.weight_quant.scale()) == scale


@pytest.mark.parametrize("duplicate", [nnx.clone, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_shared_quantizer_need_the_model_and_say_so(duplicate):
    pair = duplicate(Pair())
    with pytest.raises(ValueError, match=r"serves 2 layer\(s\), and 1 of them are known"):
        pair.a.weight_quant.init_tensor_quant()
    assert pair.a.weight_quant is pair.b.weight_quant
    pair.b.kernel.set_value(jnp.full((4, 4), 7.0))
    assert jqinject.reassemble(pair).reassembled == ("a.weight_quant",)
    assert float(pair.b.weight_quant.scale()) == 7.0
    assert set(pair.a.weight_quant.tracked_modules) == {pair.a, pair.b}


def test_a_new_parameter_assembles_again_and_an_in_place_write_does_not():
    layer = linear(0, FromMax)
    layer.kernel = nnx.Param(jnp.full((4, 3), 2.0))
    assert float(layer.weight_quant.scale()) == 2.0
    layer.weight = nnx.Param(jnp.full((4, 3), 3.0))
    assert float(layer.weight_quant.scale()) == 3.0 and float(layer.kernel[0, 0]) == 3.0
    layer.kernel[...] = jnp.full((4, 3), 4.0)
    assert float(layer.weight_quant.scale()) == 3.0
    layer.weight_quant.init_tensor_quant()
    assert float(layer.weight_quant.scale()) == 4.0


@pytest.mark.heavy
def test_a_new_parameter_in_one_of_two_sharing_layers_reaches_the_common_statistics():
    pair = Pair(Int8WeightPerTensorFloat)
    pair.b.kernel = nnx.Param(jnp.full((4, 4), 12.7))
    assert float(pair.a.weight_quant.scale()) == pytest.approx(0.1)
    gradients = nnx.grad(lambda m: m.a.quant_weight().value.sum())(pair)
    paths = {v is pair.b.kernel: p for p, v in nnx.to_flat_state(nnx.state(pair))}
    along_b = dict(nnx.to_flat_state(gradients))[paths[True]].get_value()
    assert float(jnp.abs(along_b).sum()) > 0  # the scale of a's weight depends on b's


@pytest.mark.heavy
def test_other_learned_parameters_are_announced():
    layer = linear(0, Int8WeightPerChannelFloat, weight_scaling_impl_type="parameter_from_stats")
    layer.quant_weight()
    with pytest.warns(QuantizerReplacedWarning, match="Make the optimizer again"):
        layer.kernel = nnx.Param(jnp.ones((4, 6)))
    assert layer.weight_quant.scale().shape == (1, 6)


def test_assembling_again_equals_a_fresh_build_and_keeps_the_variables():
    layer = linear(0, Int8WeightPerChannelFloat, weight_scaling_impl_type="parameter_from_stats")
    layer.quant_weight()
    variable = layer.weight_quant.tensor_quant.scaling_impl.value
    weight = jnp.linspace(-2, 2, 12).reshape(4, 3)
    layer.kernel = nnx.Param(weight)
    fresh = linear(5, Int8WeightPerChannelFloat, weight_scaling_impl_type="parameter_from_stats")
    fresh.kernel.set_value(weight)
    assert layer.weight_quant.tensor_quant.scaling_impl.value is variable
    np.testing.assert_array_equal(layer.quant_weight().value, fresh.quant_weight().value)


def test_the_scale_can_be_read_inside_a_transform_and_of_the_weights_there():
    layer = linear(0, Int8WeightPerTensorFloat)

    @nnx.jit
    def doubled(layer):
        layer.kernel.set_value(2 * layer.kernel[...])
        return layer.weight_quant.scale()

    before = float(layer.weight_quant.scale())
    assert float(doubled(layer)) == pytest.approx(2 * before)
    assert float(layer.weight_quant.scale()) == pytest.approx(2 * before)


def test_looking_at_a_quantizer_moves_nothing():
    layer = QuantIdentity(Int8ActPerTensorFloat, collect_stats_steps=2)
    layer(jnp.ones(4))
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer)))
    layer.act_quant.scale(), layer.act_quant.scale(force_eval=False), layer.act_quant.zero_point()
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(layer)), before)


def test_random_rounding_draws_anew_in_training_and_rests_in_evaluation():
    def build():
        return QuantIdentity(
            Int8ActPerTensorFloat,
            float_to_int_impl_type="stochastic_round",
            scaling_impl_type="const",
            min_val=-1.0,
            max_val=1.0,
            rngs=nnx.Rngs(3),
        )

    layer, same = build(), build()
    x = jnp.linspace(-0.9, 0.9, 200)
    first, second = layer(x), layer(x)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, same(x))
    layer.act_quant.init_tensor_quant()  # the stream goes on: the third draw, not the first again
    third = layer(x)
    assert not np.array_equal(third, first)
    same(x)
    np.testing.assert_array_equal(third, same(x))
    layer.eval()
    np.testing.assert_array_equal(layer(x), layer(x))


@pytest.mark.heavy
def test_a_model_is_freed_with_its_quantizers():
    pair = Pair()
    pair(jnp.ones((1, 4)))
    seen = [weakref.ref(pair.a), weakref.ref(pair.a.weight_quant)]
    del pair
    gc.collect()
    assert [reference() for reference in seen] == [None, None]


def test_quantizers_are_children_and_layers_are_not():
    layer = linear(0, Int8WeightPerChannelFloat, bias_quant=Int32Bias, input_quant=Int8ActPerTensorFloat)
    for component in components_in(layer.weight_quant):
        assert not any(child is layer for child in vars(component).values())
    paths = {path[0] for path, _ in nnx.to_flat_state(nnx.state(layer))}
    assert paths == {"kernel", "bias", "input_quant"}
