"""`load_state`: everything is checked first, weights come first, quantizer variables that are there win."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jqinject
from jqinject.core.state import flat_parts
from jqinject.nn import QuantConv, QuantIdentity, QuantLinear, QuantReLU
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Int32Bias


class Act(Int8ActPerTensorFloat):
    collect_stats_steps = 3


class Net(nnx.Module):
    def __init__(self, seed, quantized=True):
        rngs = nnx.Rngs(seed)
        if quantized:
            quants = {"weight_quant": Int8WeightPerChannelFloat, "bias_quant": Int32Bias, "input_quant": Act}
            learned = {**quants, "weight_scaling_impl_type": "parameter_from_stats"}
            self.first = QuantLinear(6, 5, rngs=rngs, **quants)
            self.second = QuantLinear(5, 3, rngs=rngs, **learned)
            self.relu = QuantReLU(collect_stats_steps=3)
        else:
            self.first, self.second, self.relu = (
                nnx.Linear(6, 5, rngs=rngs),
                nnx.Linear(5, 3, rngs=rngs),
                nnx.relu,
            )

    def __call__(self, x):
        return self.second(self.relu(self.first(x)))


def batch(seed):
    return jax.random.normal(jax.random.key(seed), (7, 6))


def everything(model):
    return {path: np.asarray(v.get_value()) for path, v in flat_parts(nnx.state(model))}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=str(path))


@pytest.mark.heavy
def test_a_float_checkpoint_fits_with_no_flag_and_equals_a_model_built_from_it():
    floats, model = Net(0, quantized=False), Net(1)
    model(batch(0))
    report = jqinject.load_state(model, nnx.state(floats))
    assert set(report.loaded) == {"first.bias", "first.kernel", "second.bias", "second.kernel"}
    assert "first.weight_quant" in report.reassembled and not report.replaced
    fresh = Net(2)
    jqinject.load_state(fresh, floats)
    np.testing.assert_array_equal(model.first(batch(5)), fresh.first(batch(5)))
    np.testing.assert_array_equal(model.second.weight_quant.scale(), fresh.second.weight_quant.scale())


@pytest.mark.heavy
@pytest.mark.parametrize("steps", [0, 1, 3, 4, 6])
def test_a_quantized_checkpoint_goes_on_as_if_nothing_had_happened(steps, tmp_path):
    original = Net(0)
    for step in range(steps):
        original(batch(step))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", nnx.to_pure_dict(nnx.state(original)))
        checkpointer.wait_until_finished()
        restored_state = checkpointer.restore(tmp_path / "saved")
    restored = Net(3)
    jqinject.load_state(restored, restored_state)
    assert_same(everything(restored), everything(original))
    for step in range(steps, steps + 4):
        np.testing.assert_array_equal(restored(batch(step)), original(batch(step)))
    assert_same(everything(restored), everything(original))


def test_every_problem_is_listed_and_nothing_changes():
    model = Net(0)
    model(batch(0))
    before = everything(model)
    state = nnx.to_pure_dict(nnx.state(model))
    state["first"]["kernel"] = np.zeros((6, 4), np.float32)
    state["second"]["bias"] = np.zeros(3, np.int32)
    state["second"]["kernal"] = state["second"].pop("kernel")
    state["first"]["bias"] = "no array"
    with pytest.raises(ValueError) as caught:
        jqinject.load_state(model, state)
    text = str(caught.value)
    for line in (
        "nothing was changed (5 problems)",
        "first.kernel: has shape (6, 4), the model needs (6, 5)",
        "second.bias: has dtype int32, the model needs float32",
        "second.kernal: the model has no such variable; did you mean 'second.kernel'?",
        "second.kernel: is missing from the state",
        "first.bias: is not an array: got str",
    ):
        assert line in text
    assert_same(everything(model), before)


def test_a_failing_reassembly_takes_the_weights_back():
    from jqinject import ExtendedInjector, value
    from jqinject.core import BinaryQuant, ParameterScaling

    class Picky(ExtendedInjector):
        tensor_quant = BinaryQuant
        scaling_impl = ParameterScaling
        signed = True

        @value
        def scaling_init(module):
            largest = float(jnp.max(module.weight[...]))
            if largest > 5:
                raise RuntimeError("too large")
            return 1.0

    layer = QuantLinear(3, 2, weight_quant=Picky, rngs=nnx.Rngs(0))
    before = everything(layer)
    with pytest.raises(RuntimeError, match="too large"):
        jqinject.load_state(
            layer, {"kernel": np.full((3, 2), 9.0, np.float32), "bias": np.zeros(2, np.float32)}
        )
    assert_same(everything(layer), before)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, jnp.bfloat16])
def test_floats_of_another_width_are_cast_and_reported(dtype):
    layer = QuantLinear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    report = jqinject.load_state(layer, {"kernel": np.array([[0.5, -1.0], [2.0, 0.25]], dtype)})
    assert layer.kernel.dtype == jnp.float32 and float(layer.kernel[1, 0]) == 2.0
    assert report.cast == {"kernel": f"{np.dtype(dtype).name} -> float32"}
    assert "cast: kernel" in str(report)


def test_orbax_wrappers_and_other_kinds_of_variables():
    class Mixed(nnx.Module):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.blocks = nnx.List([QuantLinear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])
            self.norm = nnx.BatchNorm(4, rngs=rngs)

    source, target = Mixed(0), Mixed(1)
    wrapped = {
        "blocks": {
            "0": {
                name: {"value": v[...]}
                for name, v in vars(source.blocks[0]).items()
                if name in ("kernel", "bias")
            }
        },
        "norm": {"scale": {"value": source.norm.scale[...]}, "bias": source.norm.bias[...]},
    }
    with pytest.raises(ValueError, match=r"norm\.mean: is missing"):
        jqinject.load_state(target, wrapped, missing=nnx.RngState)
    jqinject.load_state(target, wrapped, missing=(nnx.RngState, nnx.BatchStat))
    np.testing.assert_array_equal(target.blocks[0].kernel[...], source.blocks[0].kernel[...])


@pytest.mark.heavy
def test_a_stack_of_layers_is_loaded_and_assembled_layer_by_layer():
    def build(rngs):
        return QuantLinear(
            4,
            4,
            weight_quant=Int8WeightPerChannelFloat,
            input_quant=Act,
            rngs=rngs,
            weight_scaling_impl_type="parameter_from_stats",
        )

    stack = nnx.vmap(build)(nnx.Rngs(0).split(3))
    other = nnx.vmap(build)(nnx.Rngs(1).split(3))
    before = nnx.graphdef(stack)
    jqinject.load_state(stack, {"kernel": other.kernel[...], "bias": other.bias[...]})
    assert nnx.graphdef(stack) == before

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
        return layer(x)

    x = jax.random.normal(jax.random.key(0), (2, 4))
    expected = x
    for index in range(3):
        single = QuantLinear(
            4,
            4,
            weight_quant=Int8WeightPerChannelFloat,
            input_quant=Act,
            rngs=nnx.Rngs(0),
            weight_scaling_impl_type="parameter_from_stats",
        )
        jqinject.load_state(single, {"kernel": other.kernel[index], "bias": other.bias[index]})
        expected = single(expected)
    np.testing.assert_allclose(forward(stack, x), expected, rtol=1e-5, atol=1e-6)
    assert stack.input_quant.tensor_quant.scaling_impl.counter[...].tolist() == [1, 1, 1]


def test_a_shared_quantizer_tracks_both_weights_through_loading():
    class Shared(nnx.Module):
        def __init__(self, seed):
            self.a = QuantLinear(3, 3, use_bias=False, rngs=nnx.Rngs(seed))
            self.b = QuantLinear(
                3, 3, use_bias=False, weight_quant=self.a.weight_quant, rngs=nnx.Rngs(seed + 1)
            )

    model = Shared(0)
    jqinject.load_state(
        model, {"a": {"kernel": jnp.full((3, 3), 2.0)}, "b": {"kernel": jnp.full((3, 3), 127.0)}}
    )
    assert float(model.a.weight_quant.scale()) == pytest.approx(1.0)
    saved = nnx.to_pure_dict(nnx.state(model))  # one of the kernels stands under the quantizer's path there
    other = Shared(7)
    jqinject.load_state(other, saved)
    np.testing.assert_array_equal(other.b.kernel[...], model.b.kernel[...])


@pytest.mark.heavy
def test_sharding_and_metadata_survive():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    layer = QuantLinear(4, 16, weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    layer.kernel.set_value(jax.device_put(layer.kernel[...], sharding))
    state = {
        "kernel": np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32),
        "bias": np.zeros(16, np.float32),
    }
    jqinject.load_state(layer, state)
    assert layer.kernel.get_value().sharding == sharding
    x = jnp.ones((2, 4))
    single = QuantLinear(4, 16, weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(1))
    jqinject.load_state(single, state)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(layer, x), single(x), rtol=1e-6)


def test_what_can_not_be_loaded_into_is_refused():
    with pytest.raises(
        TypeError, match=r"load_state takes an nnx.State, a nested dict of arrays or a module, got list"
    ):
        jqinject.load_state(QuantIdentity(), [1, 2])
    with pytest.raises(TypeError, match=r"got str\.\n  cure: jqinject\.formats\.load\(model, path\)"):
        jqinject.load_state(QuantIdentity(), "model.safetensors")
    abstract = nnx.eval_shape(lambda: QuantLinear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(
        ValueError, match=r"bias: is missing from the state .*build it without nnx\.eval_shape"
    ):
        jqinject.load_state(abstract, {"kernel": np.zeros((2, 2))}, missing=...)

    @nnx.jit
    def inside(model, kernel):
        jqinject.load_state(model, {"kernel": kernel})

    with pytest.raises(ValueError, match="call it outside of jit"):
        inside(QuantLinear(2, 2, use_bias=False, rngs=nnx.Rngs(0)), jnp.ones((2, 2)))


@pytest.mark.heavy
def test_an_optimizer_made_before_loading_keeps_working():
    import optax

    model = Net(0)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    jqinject.load_state(model, nnx.state(Net(5, quantized=False)))
    before = everything(model)
    gradients = nnx.grad(lambda m: jnp.sum(m(batch(0)) ** 2))(model)
    optimizer.update(model, gradients)
    assert not np.array_equal(before[("first", "kernel")], model.first.kernel[...])


def test_a_convolution_of_one_dimension_too():
    conv = QuantConv(2, 3, 3, weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
    jqinject.load_state(conv, nnx.state(nnx.Conv(2, 3, 3, rngs=nnx.Rngs(1))))
    assert conv.weight_quant.scale().shape == (1, 1, 3)
