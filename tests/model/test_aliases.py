"""Shared layers, kernels and quantizers: one Variable under several paths."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.core.state import flat_parts
from jqinject.nn import QuantLinear
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat


def linear(seed, **given):
    return QuantLinear(3, 3, use_bias=False, rngs=nnx.Rngs(seed), **given)


class SharedLayer(nnx.Module):
    def __init__(self, seed):
        self.first = linear(seed)
        self.again = nnx.List([self.first])


class SharedKernel(nnx.Module):
    def __init__(self, seed):
        self.first = linear(seed)
        self.again = linear(seed + 1)
        self.again.kernel = self.first.kernel


class SharedQuantizer(nnx.Module):
    """As the kernels are quantized together, the first layer's quantizer holds the other's kernel too."""

    def __init__(self, seed, names=("first", "second")):
        a, b = names
        setattr(self, a, linear(seed))
        setattr(self, b, linear(seed + 1, weight_quant=getattr(self, a).weight_quant))


class SharedActivation(nnx.Module):
    def __init__(self, seed):
        self.first = linear(seed, input_quant=Int8ActPerTensorFloat, input_collect_stats_steps=1)
        self.second = linear(seed + 1, input_quant=self.first.input_quant)


@pytest.mark.parametrize("path", ["first", "again"])
@pytest.mark.parametrize("model", [SharedLayer, SharedKernel])
def test_any_path_will_do(model, path):
    target = model(0)
    below = (
        {"0": {"kernel": np.full((3, 3), 12.7, np.float32)}}
        if (model, path) == (SharedLayer, "again")
        else {"kernel": np.full((3, 3), 12.7, np.float32)}
    )
    report = jqinject.load_state(target, {path: below})
    assert len(report.loaded) == 1
    holder = target.again[0] if model is SharedLayer else target.again
    assert holder.kernel is target.first.kernel
    for layer in (target.first, holder):
        assert float(layer.weight_quant.scale()) == pytest.approx(0.1)


@pytest.mark.parametrize("model", [SharedLayer, SharedKernel, SharedActivation, SharedQuantizer])
def test_a_state_comes_back(model):
    source, target = model(0), model(5)
    x = jnp.linspace(-2, 2, 6).reshape(2, 3)
    for m in (source, target):
        m.first(x)
    for kind in (nnx.state(source), nnx.to_pure_dict(nnx.state(source)), source):
        jqinject.load_state(target, kind)
        for a, b in zip(flat_parts(nnx.state(source)), flat_parts(nnx.state(target)), strict=True):
            np.testing.assert_array_equal(a[1][...], b[1][...], err_msg=str(a[0]))
    source.eval(), target.eval()
    for name in set(vars(source)) & {"first", "second"}:
        np.testing.assert_array_equal(getattr(target, name)(x), getattr(source, name)(x))


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")], ids=["holder first", "holder last"])
def test_the_scale_of_a_shared_quantizer_is_of_both_whichever_is_loaded(names):
    model = SharedQuantizer(0, names)
    for loaded in names:
        kernel = np.full((3, 3), 12.7, np.float32)
        jqinject.load_state(model, {loaded: {"kernel": kernel}}, missing=...)
        for layer in (model.a, model.b):
            assert float(layer.quant_weight().scale) == pytest.approx(0.1)
        jqinject.load_state(model, {name: {"kernel": kernel / 100} for name in names})
        assert float(model.a.quant_weight().scale) == pytest.approx(0.001)


def test_a_shared_quantizers_gradient_reaches_the_widest_weight_of_both():
    model = SharedQuantizer(0)
    wide = np.zeros((3, 3), np.float32)
    wide[1, 2] = 5.0
    jqinject.load_state(
        model, {"first": {"kernel": np.full((3, 3), 0.3, np.float32)}, "second": {"kernel": wide}}
    )
    model = nnx.clone(model)
    grads = nnx.grad(lambda m: m.first.quant_weight().value.sum())(model)
    found = {
        id(v): g
        for (_, v), (_, g) in zip(nnx.to_flat_state(nnx.state(model)), nnx.to_flat_state(grads), strict=True)
    }
    other = np.asarray(found[id(model.second.kernel)][...])
    assert np.count_nonzero(other) == 1 and other[1, 2] != 0


def test_a_different_number_of_sharing_layers_is_told_by_path():
    target = SharedQuantizer(0)
    with pytest.raises(ValueError, match=r"second\.kernel: is missing"):
        jqinject.load_state(target, {"first": {"kernel": np.zeros((3, 3), np.float32)}})
    with pytest.raises(ValueError, match=r"second\.bias: the model has no such variable"):
        jqinject.load_state(
            target,
            {
                "first": {"kernel": np.zeros((3, 3))},
                "second": {"kernel": np.zeros((3, 3)), "bias": np.zeros(3)},
            },
        )


def test_the_same_variable_given_twice_with_other_numbers_is_refused():
    target = SharedKernel(0)
    before = np.array(target.first.kernel[...])
    state = {
        name: {"kernel": np.full((3, 3), float(i), np.float32)} for i, name in enumerate(("first", "again"))
    }
    with pytest.raises(ValueError, match=r"again\.kernel.*first\.kernel"):
        jqinject.load_state(target, state)
    np.testing.assert_array_equal(target.first.kernel[...], before)
    state["again"] = state["first"]
    jqinject.load_state(target, state)
    np.testing.assert_array_equal(target.first.kernel[...], np.zeros((3, 3)))


def test_reassemble_finds_each_shared_quantizer_once_with_all_its_layers():
    model = nnx.clone(SharedQuantizer(0))
    model.second.kernel[...] = jnp.full((3, 3), 12.7)
    report = jqinject.reassemble(model)
    assert report.reassembled == ("first.weight_quant",)
    assert set(model.first.weight_quant.tracked_modules) == {model.first, model.second}
    assert float(model.first.weight_quant.scale()) == pytest.approx(0.1)


def test_a_quantizer_shared_beyond_the_model_that_is_loaded():
    first = linear(0, weight_quant=Int8WeightPerTensorFloat)
    second = linear(1, weight_quant=first.weight_quant)
    jqinject.load_state(second, {"kernel": np.full((3, 3), 12.7, np.float32)})
    assert float(second.quant_weight().scale) == pytest.approx(0.1)
    assert float(first.quant_weight().scale) == pytest.approx(0.1)
