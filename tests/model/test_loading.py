"""`load_state`, case by case: what it takes, what becomes of partial states, what it leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import UncalibratedWarning, load_state
from jqinject.core import QuantStat
from jqinject.core.state import flat_parts
from jqinject.inject import value
from jqinject.nn import QuantConv, QuantIdentity, QuantLinear
from jqinject.quant import (
    Fp8e5m2GradPerTensorDelayed,
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int32Bias,
)

X = jax.random.normal(jax.random.key(3), (5, 4))


class Act(Int8ActPerTensorFloat):
    collect_stats_steps = 2


def linear(seed=0, **given):
    given = {"weight_quant": Int8WeightPerChannelFloat, "input_quant": Act, "bias_quant": Int32Bias, **given}
    return QuantLinear(4, 3, rngs=nnx.Rngs(seed), **given)


def floats(seed=7):
    return nnx.Linear(4, 3, rngs=nnx.Rngs(seed), bias_init=nnx.initializers.normal(1.0))


def numbers(module):
    """Every number of a module now; random keys as the integers they are."""
    return {
        path: np.array(
            jax.random.key_data(v[...]) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v[...]
        )
        for path, v in flat_parts(nnx.state(module))
    }


def assert_same(a, b):
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=str(path))


KINDS = {
    "state": nnx.state,
    "pure dict": lambda m: nnx.to_pure_dict(nnx.state(m)),
    "numpy": lambda m: jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(m))),
    "module": lambda m: m,
    "wrapped": lambda m: jax.tree.map(lambda a: {"value": a}, nnx.to_pure_dict(nnx.state(m))),
    "split": lambda m: nnx.split(m)[1],
}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_of_state(kind):
    layer, source = linear(), floats()
    report = load_state(layer, kind(source))
    assert (set(report.loaded), report.missing, report.replaced) == ({"kernel", "bias"}, (), ())
    assert set(report.reassembled) == {"weight_quant", "bias_quant"}
    assert report.kept == ("input_quant",)
    np.testing.assert_array_equal(layer.kernel[...], source.kernel[...])
    np.testing.assert_array_equal(layer.bias[...], source.bias[...])
    widest = np.abs(np.asarray(source.kernel[...])).max(axis=0, keepdims=True)
    np.testing.assert_allclose(layer.weight_quant.scale(), widest / 127, rtol=1e-6)
    np.testing.assert_allclose(layer(X), source(X), atol=0.1)

    layer.input_quant.eval()
    copied = linear(1)
    assert load_state(copied, kind(layer)).missing == ()
    assert_same(numbers(copied), numbers(layer))


def test_a_learned_weight_scale_comes_back_and_a_float_checkpoint_starts_it_afresh():
    given = {"weight_scaling_impl_type": "parameter_from_stats"}
    layer, other = linear(0, **given), linear(1, **given)
    layer(X)
    scale = layer.weight_quant.tensor_quant.scaling_impl
    scale.value[...] = 3 * scale.value[...]
    load_state(other, nnx.state(layer))
    assert_same(numbers(other), numbers(layer))
    np.testing.assert_array_equal(other(X), layer(X))
    load_state(other, floats())
    widest = np.abs(np.asarray(floats().kernel[...])).max(axis=0, keepdims=True)
    np.testing.assert_allclose(other.weight_quant.scale(), widest / 127, rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: {"value": a}])
def test_a_scale_without_a_counter_means_that_collection_is_over(wrap):
    layer = linear()
    state = nnx.to_pure_dict(nnx.state(floats()))
    state["input_quant"] = {"tensor_quant": {"scaling_impl": {"value": wrap(np.float32(1.28))}}}
    load_state(layer, state)
    for _ in range(4):
        layer(100 * X)
    assert float(layer.input_quant.scale()) == pytest.approx(0.01)


def test_a_float_checkpoint_keeps_the_ranges_of_activations():
    layer = QuantLinear(
        4, 3, weight_quant=Int8WeightPerChannelFloat, input_quant=Act, output_quant=Act,
        grad_quant=Fp8e5m2GradPerTensorDelayed, rngs=nnx.Rngs(0),
    )  # fmt: skip
    jqinject.calibrate(layer, [X, 3 * X])
    before = numbers(layer)
    report = load_state(layer, floats())
    after = numbers(layer)
    kept = [path for path in before if path[0] in ("input_quant", "output_quant", "grad_quant")]
    assert any("scaling_impl" in path for path in kept)
    assert_same({path: before[path] for path in kept}, {path: after[path] for path in kept})
    assert set(report.kept) == {"input_quant", "output_quant", "grad_quant"}
    assert report.reassembled == ("weight_quant",) and report.missing == ()
    assert "kept 3 quantizers that no weight decides" in str(report)
    widest = np.abs(np.asarray(floats().kernel[...])).max(axis=0, keepdims=True)
    np.testing.assert_allclose(layer.weight_quant.scale(), widest / 127, rtol=1e-6)
    assert "input_quant" in jqinject.reassemble(layer).reassembled
    assert not layer.input_quant.has_range()


class FromTheWeight(Int8ActPerTensorFloat):
    """A scale of the input that is made from the weight."""

    scaling_impl_type = "parameter"

    @value
    def scaling_init(module):
        return float(abs(module.kernel[...]).max())


def test_a_quantizer_of_activations_that_asks_for_its_layer_is_made_again():
    layer = QuantLinear(8, 4, input_quant=FromTheWeight, rngs=nnx.Rngs(0))
    report = load_state(layer, {"kernel": jnp.full((8, 4), 12.8), "bias": jnp.zeros(4)})
    assert set(report.reassembled) == {"weight_quant", "input_quant"} and report.kept == ()
    assert float(layer.input_quant.scale()) == pytest.approx(0.1)


def test_statistics_alone():
    layer, other = linear(0), linear(1)
    layer(X)
    kernel = np.array(other.kernel[...])
    report = load_state(other, nnx.state(layer, QuantStat), missing=nnx.Param)
    assert report.reassembled == ()
    np.testing.assert_array_equal(other.kernel[...], kernel)
    assert float(other.input_quant.scale()) == float(layer.input_quant.scale())


def test_running_statistics_become_a_learned_scale():
    running = QuantIdentity(Act, scaling_impl_type="stats", scaling_stats_op="max")
    learned = QuantIdentity(Act)
    running(X), running(2 * X)
    load_state(learned, running)
    running.eval()
    np.testing.assert_allclose(learned(X), running(X), rtol=1e-6)
    np.testing.assert_allclose(learned(9 * X), running(9 * X), rtol=1e-6)  # it collects nothing more


def test_a_learned_bit_width_takes_a_constant_one():
    learned = linear(weight_bit_width_impl_type="parameter")
    constant = linear(weight_bit_width_impl_type="stateful_const", weight_bit_width=5)
    load_state(learned, constant)
    assert float(learned.weight_quant.bit_width()) == 5
    kept = linear(weight_bit_width_impl_type="parameter", weight_override_pretrained_bit_width=True)
    load_state(kept, constant)
    assert float(kept.weight_quant.bit_width()) == 8


def test_missing_names_what_may_be_missing():
    layer = linear()
    before = numbers(layer)
    report = load_state(layer, {"bias": np.ones(3, np.float32)}, missing=nnx.PathContains("kernel"))
    assert (report.loaded, report.missing[:1]) == (("bias",), ("kernel",))
    np.testing.assert_array_equal(layer.kernel[...], before[("kernel",)])
    assert set(load_state(layer, {}, missing=...).missing) >= {"kernel", "bias"}
    with pytest.raises(
        ValueError, match=r"kernel: is missing from the state \(missing=... names what may be\)"
    ):
        load_state(layer, {"bias": np.ones(3, np.float32)})


def test_a_quantized_model_keeps_its_own_dtype():
    layer = linear(param_dtype=jnp.bfloat16)
    report = load_state(layer, floats())
    assert report.cast == {"kernel": "float32 -> bfloat16", "bias": "float32 -> bfloat16"}
    np.testing.assert_array_equal(layer.kernel[...], floats().kernel[...].astype(jnp.bfloat16))
    assert layer.weight_quant.scale().dtype == jnp.float32


def test_python_numbers_fit_scalars():
    layer = QuantIdentity(Act)
    where = {"act_quant": {"tensor_quant": {"scaling_impl": {"value": 1.28, "counter": 3, "buffer": 1.28}}}}
    load_state(layer, where)
    scaling = layer.act_quant.tensor_quant.scaling_impl
    assert (scaling.value.dtype, scaling.counter.dtype) == (jnp.float32, jnp.float32)
    assert float(layer.act_quant.scale()) == pytest.approx(0.01)


def test_objects_and_metadata_stay():
    layer = linear()
    layer.kernel.set_metadata(note="mine")
    kept = [layer.kernel, layer.bias, layer.weight_quant, layer.input_quant.tensor_quant]
    load_state(layer, floats())
    load_state(layer, nnx.to_pure_dict(nnx.state(floats(8))))
    now = [layer.kernel, layer.bias, layer.weight_quant, layer.input_quant.tensor_quant]
    assert all(a is b for a, b in zip(kept, now, strict=True))
    assert layer.kernel.get_metadata("note") == "mine"


def test_arrays_that_the_caller_changes_later_are_not_the_models():
    state = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(floats())))
    layer = linear()
    load_state(layer, state)
    state["kernel"][:] = 0
    np.testing.assert_array_equal(layer.kernel[...], floats().kernel[...])


def test_the_mode_stays():
    layer = linear(
        weight_float_to_int_impl_type="stochastic_round", weight_scaling_impl_type="parameter_from_stats"
    )
    layer.eval()
    layer.weight_quant.disable_quant = True
    load_state(layer, floats())
    assert layer.weight_quant.disable_quant
    layer.weight_quant.disable_quant = False
    before = numbers(layer)
    with pytest.warns(UncalibratedWarning):  # the range of the input starts afresh
        np.testing.assert_array_equal(layer(X), layer(X))
    assert_same(numbers(layer), before)


class WithArrays(nnx.Module):
    """Arrays without Variables around them, wherever NNX allows them."""

    def __init__(self, seed):
        self.conv = QuantConv(2, 4, 3, mask=jnp.full((3, 2, 4), float(seed)), rngs=nnx.Rngs(seed))
        self.alias = self.conv
        self.table = jnp.full((2, 2), seed)
        self.counts = np.arange(3) + seed
        self.parts = nnx.Dict(a=jnp.full(2, float(seed)), b=nnx.List([jnp.full(3, float(seed)), self.conv]))
        self.key = jax.random.key(seed)


@pytest.mark.parametrize("kind", [KINDS[name] for name in ("state", "pure dict", "module")])
def test_arrays_that_are_no_variables_are_loaded_too(kind):
    model, source = WithArrays(0), WithArrays(1)
    report = load_state(model, kind(source))
    assert {"conv.mask", "table", "counts", "parts.a", "parts.b.0", "key"} <= set(report.loaded)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(
            *(np.asarray(jax.random.key_data(x) if x.dtype == model.key.dtype else x) for x in (a, b))
        ),
        nnx.to_pure_dict(nnx.state(model)),
        nnx.to_pure_dict(nnx.state(source)),
    )
    assert model.alias.mask is model.conv.mask
    assert isinstance(model.counts, np.ndarray)


def test_arrays_that_are_no_variables_may_be_missing_and_have_to_fit():
    model, source = WithArrays(0), WithArrays(1)
    report = load_state(model, nnx.state(source, nnx.Param))
    assert "conv.mask" in report.missing
    assert float(model.conv.mask.sum()) == 0
    with pytest.raises(ValueError, match=r"table: has shape \(3,\), the model needs \(2, 2\)"):
        load_state(model, {"table": np.zeros(3, np.int32)}, missing=...)


def test_other_containers():
    class Model(nnx.Module):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.sequence = nnx.Sequential(linear(seed), nnx.relu, nnx.BatchNorm(3, rngs=rngs))
            self.named = nnx.Dict(one=nnx.List([linear(seed + 1), nnx.Dropout(0.5, rngs=rngs)]))
            self.plain = nnx.data([{"deep": linear(seed + 2)}])

        def __call__(self, x):
            return self.sequence(x) + self.named["one"][0](x) + self.plain[0]["deep"](x)

    model, source = Model(0), Model(10)
    source(X), source(2 * X)
    report = load_state(model, nnx.to_pure_dict(nnx.state(source)))
    assert report.missing == ()
    assert "plain.0.deep.weight_quant" in report.reassembled
    assert_same(numbers(model), numbers(source))
    model.eval(), source.eval()
    np.testing.assert_array_equal(model(X), source(X))


def test_a_missing_random_stream_is_named_with_its_cure():
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"rngs\.key: is missing from the state \(missing=nnx\.RngState lets"
    ):
        load_state(model, {})
    assert set(load_state(model, {}, missing=nnx.RngState).missing) == {"rngs.count", "rngs.key"}
