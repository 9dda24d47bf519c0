"""`freeze` and `unfreeze`: what is served is what was evaluated, in a fraction of the bytes."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jqinject
import jqinject.quant as q
from jqinject import native
from jqinject.core import Frozen
from jqinject.dot import FrozenParam, LocalAqt, QConvGeneralDilated, QDotGeneral, QEinsum, QuantMode, Scheme
from jqinject.nn import QuantConv, QuantConvTranspose, QuantEinsum, QuantLinear, QuantLinearGeneral, QuantReLU
from jqinject.quant.aqt import config_v4

X = jax.random.normal(jax.random.key(0), (6, 16))
IMAGES = jax.random.normal(jax.random.key(1), (2, 9, 9, 4))
call = nnx.jit(lambda model, x: model(x))


class Dense(nnx.Module):
    def __init__(self, *, contraction="auto", weight=q.Int8WeightPerChannelFloat, rngs, **overrides):
        common = {
            "weight_quant": weight,
            "input_quant": q.Int8ActPerTensorFloat,
            "contraction": contraction,
            "rngs": rngs,
            **overrides,
        }
        self.first = QuantLinear(16, 24, **common)
        self.act = QuantReLU()
        self.second = QuantLinear(24, 5, **{**common, "bias_quant": q.Int32Bias})

    def __call__(self, x):
        return self.second(self.act(self.first(x)))


class Images(nnx.Module):
    def __init__(self, *, contraction="auto", input_quant=q.Int8ActPerTensorFloat, rngs):
        common = {"input_quant": input_quant, "contraction": contraction, "rngs": rngs}
        self.first = QuantConv(4, 8, (3, 3), weight_quant=q.Int8WeightPerChannelFloat, **common)
        self.second = QuantConv(8, 6, (3, 3), strides=2, padding="VALID", **common)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def trained(make, x, **given):
    """A model whose statistics have seen something, in evaluation mode."""
    model = make(rngs=nnx.Rngs(0), **given)
    for scale in (1.0, 0.5):
        model(x * scale)
    model.eval()
    return model


def size(model):
    return sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))


@pytest.mark.heavy
@pytest.mark.parametrize(("make", "x"), [(Dense, X), (Images, IMAGES)], ids=["linear", "conv"])
@pytest.mark.parametrize("how", ["eager", "jit"])
def test_frozen_is_integer_evaluation_to_the_bit(make, x, how):
    run = call if how == "jit" else lambda model, x: model(x)
    integers = trained(make, x, contraction="int")
    expected = run(integers, x)
    np.testing.assert_array_equal(run(jqinject.freeze(nnx.clone(integers)), x), expected)
    # The same model, trained and evaluated with floats: up to their rounding until it is frozen.
    integers.set_attributes(contraction="auto")
    np.testing.assert_allclose(run(integers, x), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(run(jqinject.freeze(integers), x), expected)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "weight",
    [
        q.Int8WeightPerTensorFloat,
        q.Int8WeightPerChannelFixedPoint,
        q.Int8WeightPerChannelFloat.let(bit_width=4),
        q.Int8WeightPerChannelFloat.let(bit_width=3),
        q.Int8WeightPerChannelFloat.let(bit_width=2),
        q.Int8WeightPerTensorFloat.let(bit_width=12),
        q.ShiftedUint8WeightPerTensorFloat,
        q.ShiftedUint8WeightPerChannelFloat.let(bit_width=4),
        q.SignedBinaryWeightPerTensorConst,
        q.SignedTernaryWeightPerTensorConst,
        q.Fp8e4m3WeightPerTensorCurrent,
        q.Fp8e4m3WeightPerChannelCurrent,
    ],
    ids=repr,
)
def test_every_kind_of_weight(weight):
    layer = QuantLinear(16, 7, weight_quant=weight, input_quant=q.Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
    layer(X)
    layer.eval()
    expected, numbers = layer(X), layer.quant_weight()
    frozen = jqinject.freeze(layer)
    np.testing.assert_allclose(frozen(X), expected, rtol=1e-5, atol=1e-5)
    again = frozen.quant_weight()
    assert (type(again), again.bit_width) == (type(numbers), numbers.bit_width)
    np.testing.assert_allclose(again.value, numbers.value, rtol=1e-6)
    assert isinstance(frozen.kernel, FrozenParam)
    np.testing.assert_allclose(frozen.kernel[...], numbers.value, rtol=1e-6)
    assert frozen.weight_quant is None


def test_bytes_of_the_weights():
    def weight_bytes(bits):
        layer = QuantLinear(256, 128, weight_bit_width=bits, use_bias=False, rngs=nnx.Rngs(0))
        frozen = jqinject.freeze(layer)
        return frozen.frozen.numbers["value"].nbytes, size(frozen)

    full = 256 * 128 * 4
    for bits in (8, 4, 3, 2):
        payload, everything = weight_bytes(bits)
        assert payload == full * bits // 32
        assert everything <= payload + 4 * (128 + 1) + 64


@pytest.mark.heavy
def test_unfreeze_brings_the_masters_back():
    model = trained(Dense, X)
    graph, before = nnx.graphdef(model), nnx.state(model)
    jqinject.freeze(model, keep_masters=True)
    assert model.first.frozen is not None
    jqinject.unfreeze(model)
    model.eval()
    assert nnx.graphdef(model) == graph
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
    nnx.grad(lambda m: m(X).sum())(model)


def test_unfreeze_without_masters_changes_nothing():
    model = trained(Dense, X)
    jqinject.freeze(model.first)
    jqinject.freeze(model.second, keep_masters=True)
    with pytest.raises(
        ValueError, match=r"the float numbers of first\.kernel are gone.*\n.*keep_masters=True"
    ):
        jqinject.unfreeze(model)
    assert model.second.frozen is not None


def test_freezing_twice_is_freezing_once():
    model = jqinject.freeze(trained(Dense, X))
    expected = call(model, X)
    np.testing.assert_array_equal(call(jqinject.freeze(model), X), expected)


def test_not_a_module():
    with pytest.raises(TypeError, match="freeze takes an NNX module, got dict"):
        jqinject.freeze({})


def test_shared_weight_quantizers():
    first = QuantLinear(16, 16, rngs=nnx.Rngs(0))
    second = QuantLinear(16, 16, weight_quant=first.weight_quant, rngs=nnx.Rngs(1))
    model = nnx.List([first, second])
    model.eval()
    expected = second(first(X))
    jqinject.freeze(nnx.Sequential(first, second))
    np.testing.assert_allclose(second(first(X)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.heavy
def test_orbax_into_an_abstract_model(tmp_path):
    frozen = jqinject.freeze(trained(Dense, X, weight=q.Int8WeightPerChannelFloat.let(bit_width=4)))
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "frozen", nnx.to_pure_dict(nnx.state(frozen)))
    checkpointer.wait_until_finished()

    def make():
        model = Dense(weight=q.Int8WeightPerChannelFloat.let(bit_width=4), rngs=nnx.Rngs(3))
        return jqinject.freeze(model, allow_uncalibrated=True)  # the ranges are in the checkpoint

    abstract = nnx.eval_shape(make)
    assert nnx.graphdef(abstract) == nnx.graphdef(frozen)
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.to_pure_dict(nnx.state(abstract))
    )
    restored = checkpointer.restore(tmp_path / "frozen", template)
    other = make()
    jqinject.load_state(other, restored)
    np.testing.assert_array_equal(call(other, X), call(frozen, X))
    checkpointer.close()


def test_a_frozen_checkpoint_of_another_shape_is_refused():
    small, large = (jqinject.freeze(QuantLinear(n, 4, rngs=nnx.Rngs(0))) for n in (8, 16))
    before = nnx.state(large)
    with pytest.raises(ValueError, match=r"kernel.*shape"):
        jqinject.load_state(large, nnx.state(small))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(large), before)


@pytest.mark.heavy
def test_stacked_layers_under_scan():
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return QuantLinear(
            16,
            16,
            weight_quant=q.Int8WeightPerChannelFloat,
            input_quant=q.Int8ActPerTensorFloat,
            contraction="int",
            rngs=nnx.Rngs(key),
        )

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return jnp.tanh(layer(x))

    stack = make(jax.random.split(jax.random.key(0), 3))
    run(stack, X)
    stack.eval()
    expected = run(stack, X)
    jqinject.freeze(stack)
    assert stack.frozen.numbers["value"].shape == (3, 16, 16)
    np.testing.assert_array_equal(run(stack, X), expected)


@pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")
def test_sharding_is_kept():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    layer = QuantLinear(16, 32, weight_quant=q.Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
    expected = nnx.clone(jqinject.freeze(nnx.clone(layer)))(X)
    layer.kernel.set_value(jax.device_put(layer.kernel[...], jax.NamedSharding(mesh, spec(None, "model"))))
    frozen = jqinject.freeze(layer)
    shards = {shard.data.shape for shard in frozen.frozen.numbers["value"].addressable_shards}
    assert shards == {(4, 16)}  # stored (out, in), split over out
    np.testing.assert_allclose(call(frozen, X), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("make", "x"), [(Dense, X), (Images, IMAGES)], ids=["linear", "conv"])
def test_inputs_are_still_differentiable(make, x):
    model = trained(make, x, contraction="int")
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(model(x))))(x)
    frozen = jqinject.freeze(nnx.clone(model))
    np.testing.assert_allclose(
        jax.grad(lambda x: jnp.sum(jnp.sin(frozen(x))))(x), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.heavy
def test_stored_8_bit_floats_are_contracted_as_they_are():
    given = {"input_quant": q.Fp8e4m3ActPerTensorCurrent, "weight_quant": q.Fp8e4m3WeightPerChannelCurrent}
    layer = QuantLinear(16, 5, **given, rngs=nnx.Rngs(0))
    layer.eval()
    expected, gradient = layer(X), jax.grad(lambda x: jnp.sum(jnp.sin(layer(x))))(X)
    frozen = jqinject.freeze(layer)
    np.testing.assert_array_equal(frozen(X), expected)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(jnp.sin(frozen(x))))(X), gradient)
    graphdef, state = nnx.split(frozen)
    program = str(jax.make_jaxpr(lambda state: nnx.merge(graphdef, state)(X))(state))
    assert "f8_e4m3fn[5,16]" in program
    assert "f32[5,16]" not in program and "f32[16,5]" not in program


@pytest.mark.parametrize("inputs", [None, X], ids=["layer", "parameter"])
def test_a_symmetric_range_stores_no_zero_point(inputs):
    rule = jqinject.Rule(weight_quant=q.Int8WeightPerChannelAbsMax)

    class Own(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (16, 6)))

        def __call__(self, x):
            return x @ self.kernel[...]

    def frozen(seed):
        rngs = nnx.Rngs(seed)
        made = nnx.Linear(16, 6, rngs=rngs) if inputs is None else Own(rngs)
        return jqinject.freeze(jqinject.quantize(made, rule, inputs=inputs))

    model, other = frozen(0), frozen(1)
    state = nnx.as_pure(nnx.state(model))
    assert "zero_point" not in state["kernel"]
    jqinject.load_state(other, state)
    np.testing.assert_array_equal(other(X), model(X))
    state["kernel"]["zero_point"] = jnp.ones((1, 1))
    with pytest.raises(ValueError, match=r"kernel\.zero_point"):
        jqinject.load_state(other, state)


@pytest.mark.heavy
@pytest.mark.parametrize("act", [q.Int8ActPerTensorMinMax, q.Int8ActPerTensorAbsMax])
def test_averaged_ranges_become_constants(act):
    layer = trained(lambda **given: QuantLinear(16, 5, input_quant=act, **given), X, contraction="int")
    loss = jax.value_and_grad(lambda x, layer: jnp.sum(jnp.sin(layer(x))))
    expected = loss(4 * X, layer)
    restored = jqinject.unfreeze(jqinject.freeze(nnx.clone(layer), keep_masters=True))
    frozen = jqinject.freeze(nnx.clone(layer))
    np.testing.assert_array_equal(loss(4 * X, frozen)[0], expected[0])
    np.testing.assert_allclose(loss(4 * X, frozen)[1], expected[1], rtol=1e-5, atol=1e-6)
    before = jax.tree.leaves(nnx.state(frozen.input_quant))
    frozen.train()
    frozen(9 * X)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(nnx.state(frozen.input_quant)), before)
    # Another calibration makes other constants, those of a model that was frozen after it.
    first = np.asarray(frozen.input_quant.scale())
    for model in (frozen, layer):
        jqinject.calibrate(model, [9 * X], progress=False)
    scales = [np.asarray(model.input_quant.scale()) for model in (frozen, jqinject.freeze(nnx.clone(layer)))]
    np.testing.assert_array_equal(*scales)
    assert scales[0] > 2 * first
    # Where float weights were kept, training goes on with the average.
    ours = trained(lambda **given: QuantLinear(16, 5, input_quant=act, **given), X, contraction="int")
    ours.train()
    for one in (ours, restored):
        one(2 * X)
    states = (jax.tree.leaves(nnx.state(one.input_quant)) for one in (ours, restored))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_static_scales_leave_no_reduction():
    frozen = jqinject.freeze(trained(Dense, X))
    text = nnx.jit(lambda m, x: m(x)).lower(frozen, X).as_text()
    assert "stablehlo.reduce" not in text
    assert text.count("tensor<6x16xi8>") >= 1


@pytest.mark.parametrize("make", [Dense, lambda **given: Images(**given)], ids=["dense", "images"])
def test_stored_weights_are_contracted_as_they_lie(make):
    x = X if make is Dense else IMAGES
    frozen = jqinject.freeze(trained(make, x))
    graphdef, state = nnx.split(frozen)
    # XLA's own contractions: a product of patches turns the kernel of a convolution, which is small.
    with native.use(make is Dense):
        program = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).lower(state, x).compile().as_text()
    assert not [line for line in program.splitlines() if " transpose(" in line and "s8[" in line]


LAYERS = {
    "linear": (lambda **given: QuantLinear(16, 24, **given), X),
    "general": (
        lambda **given: QuantLinearGeneral((4, 4), (3, 8), axis=(-2, -1), **given),
        X.reshape(6, 4, 4),
    ),
    "einsum": (lambda **given: QuantEinsum("bd,dnh->bnh", (16, 3, 8), (3, 8), **given), X),
    "conv": (lambda **given: QuantConv(4, 24, (3, 3), **given), IMAGES),
    "transpose": (lambda **given: QuantConvTranspose(4, 24, (3, 3), **given), IMAGES),
}


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("make", "x"), LAYERS.values(), ids=LAYERS)
def test_no_float_array_of_the_weights_shape_is_made(make, x, param_dtype):
    quantizers = {"weight_quant": q.Int8WeightPerChannelFloat, "input_quant": q.Int8ActPerTensorFloat}
    layer = make(**quantizers, dtype=jnp.float32, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    layer(x)
    layer.eval()
    expected, shape = layer(x), ",".join(map(str, layer.kernel.shape))
    assert re.search(
        rf"(bf16|f32)\[{shape}\]", str(jax.make_jaxpr(lambda x: layer(x))(x))
    )  # before it is frozen
    jqinject.freeze(layer)
    np.testing.assert_array_equal(layer(x), expected)
    # Eagerly, every operation of the program is an array.
    assert not re.search(rf"(bf16|f32)\[{shape}\]", str(jax.make_jaxpr(lambda x: layer(x))(x)))


# --- Flax's own layers

OPS = {
    "linear": lambda op, rngs: nnx.Linear(16, 8, dot_general=op(QDotGeneral), rngs=rngs),
    "general": lambda op, rngs: nnx.LinearGeneral(16, (2, 4), dot_general=op(QDotGeneral), rngs=rngs),
    "einsum": lambda op, rngs: nnx.Einsum(
        "bd,dnh->bnh", (16, 2, 4), (2, 4), einsum_op=op(QEinsum), rngs=rngs
    ),
    "conv": lambda op, rngs: nnx.Conv(4, 8, (3, 3), conv_general_dilated=op(QConvGeneralDilated), rngs=rngs),
}


def with_op(kind, bits=8):
    config = config_v4(fwd_bits=bits, rng_type=None)
    return OPS[kind](lambda cls: cls(config), nnx.Rngs(0)), IMAGES if kind == "conv" else X


@pytest.mark.heavy
@pytest.mark.parametrize("bits", [8, 4, "e4m3"])
@pytest.mark.parametrize("kind", OPS)
def test_flax_layers_serve_what_they_trained(kind, bits):
    layer, x = with_op(kind, bits)
    expected, kernel = call(layer, x), layer.kernel[...]
    jqinject.freeze(layer)
    assert isinstance(layer.kernel, FrozenParam) and layer.kernel.shape == kernel.shape
    np.testing.assert_allclose(layer.kernel[...], kernel, atol=0.1)
    np.testing.assert_array_equal(call(layer, x), expected)
    frozen = nnx.state(layer, Frozen)
    assert (
        sum(v.nbytes for v in jax.tree.leaves(frozen))
        < 1.3 * (0.125 if bits == 4 else 0.25) * (4 * np.prod({"conv": (3, 3, 4, 8)}.get(kind, (16, 8))))
        + 4 * 8
    )


@pytest.mark.heavy
def test_attention_projections_share_an_op():
    attention = nnx.MultiHeadAttention(
        num_heads=2,
        in_features=16,
        qkv_dot_general=QDotGeneral(config_v4(rng_type=None)),
        out_dot_general=QDotGeneral(config_v4(rng_type=None)),
        decode=False,
        rngs=nnx.Rngs(0),
    )
    x = X.reshape(2, 3, 16)
    expected = call(attention, x)
    jqinject.freeze(attention)
    np.testing.assert_array_equal(call(attention, x), expected)
    assert attention.query.dot_general is attention.key.dot_general


@pytest.mark.heavy
def test_frozen_kernels_are_copied_and_differentiated():
    layer, _ = with_op("linear")
    layer.eval()
    expected, slope = call(layer, X), jax.grad(lambda x: jnp.sin(layer(x)).sum())(X)
    frozen = jqinject.freeze(layer)
    for copy in (frozen, nnx.clone(frozen), pickle.loads(pickle.dumps(frozen))):
        assert type(copy).__name__ == "Linear" and isinstance(copy, nnx.Linear)
        np.testing.assert_array_equal(call(copy, X), expected)
    # Backward, the scheme rounds the dequantized kernel in the place of the kernel.
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sin(frozen(x)).sum())(X), slope, atol=0.05)
    paths = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(frozen))}
    assert paths == {"bias", "kernel"}


def test_a_masked_convolution_serves_the_masked_kernel():
    config, mask = config_v4(rng_type=None), jnp.arange(9.0).reshape(3, 3, 1, 1) % 2 * jnp.ones((3, 3, 4, 8))
    op = QConvGeneralDilated(config)
    layer = nnx.Conv(4, 8, (3, 3), mask=mask, conv_general_dilated=op, rngs=nnx.Rngs(0))
    expected = call(layer, IMAGES)
    np.testing.assert_array_equal(call(jqinject.freeze(layer), IMAGES), expected)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "weights", [q.NVFP4Weight, q.NF4WeightPerGroupFloat, q.ShiftedUint8WeightPerTensorFloat]
)
def test_schemes_serve_every_format(weights):
    op = QDotGeneral(Scheme.let(fprop_lhs=q.Int8DynamicActPerRowAbsMax, fprop_rhs=weights))
    layer = nnx.Linear(16, 8, dot_general=op, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer.eval()
    expected = call(layer, X)
    frozen = jqinject.freeze(layer)
    assert frozen.kernel.get_raw_value()["value"].dtype.itemsize == 1 and expected.dtype == jnp.bfloat16
    np.testing.assert_allclose(*(np.float32(y) for y in (call(frozen, X), expected)), rtol=0.02, atol=0.02)


def test_unfreeze_of_flax_layers():
    layer, x = with_op("linear")
    expected = call(layer, x)
    jqinject.unfreeze(jqinject.freeze(layer, keep_masters=True))
    assert layer.dot_general.rhs_quant_mode is QuantMode.TRAIN
    np.testing.assert_array_equal(call(layer, x), expected)
    jqinject.freeze(layer)
    with pytest.raises(ValueError, match="the float numbers of kernel are gone"):
        jqinject.unfreeze(layer)


@pytest.mark.heavy
@pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")
def test_annotations_of_sharding_are_carried_over():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def make():
        return nnx.List(
            [
                QuantLinear(
                    16,
                    32,
                    weight_quant=q.Int8WeightPerChannelFloat,
                    kernel_metadata={"out_sharding": (None, "model")},
                    rngs=nnx.Rngs(0),
                ),
                nnx.Linear(
                    32,
                    16,
                    dot_general=QDotGeneral(config_v4(rng_type=None)),
                    kernel_metadata={"out_sharding": ("model", None)},
                    rngs=nnx.Rngs(0),
                ),
            ]
        )

    with jax.set_mesh(mesh):
        model = make()
        abstract = nnx.eval_shape(lambda: jqinject.freeze(make()))
    frozen = jqinject.freeze(model)  # without a mesh around it
    for layers in (frozen, abstract):
        specs = [nnx.get_partition_spec(nnx.state(layers))[i]["kernel"].get_raw_value() for i in (0, 1)]
        # Stored (out, in), and unsplit where there is one scale for all.
        assert specs[0]["value"] == PartitionSpec("model", None)
        assert specs[0]["scale"] == PartitionSpec(None, "model")
        assert specs[1] == {"value": PartitionSpec(None, "model"), "scale": PartitionSpec(None, None)}
    assert {s.data.shape for s in frozen[0].frozen.numbers["value"].addressable_shards} == {(4, 16)}
    payload = frozen[1].kernel.get_raw_value()["value"]
    assert {s.data.shape for s in payload.addressable_shards} == {(16, 4)}


def test_a_layer_of_ours_around_an_op_is_frozen_as_ours():
    op = QDotGeneral(config_v4(rng_type=None))
    layer = QuantLinear(16, 8, dot_general=op, rngs=nnx.Rngs(0))
    expected = layer(X)
    jqinject.freeze(layer)
    np.testing.assert_allclose(layer(X), expected, rtol=1e-5, atol=1e-6)
    assert op.rhs_quant_mode is QuantMode.TRAIN


@pytest.mark.parametrize("annotated", [False, True])
@pytest.mark.parametrize("kind", ["linear", "general"])
def test_stacks_of_flax_layers_under_scan(kind, annotated):
    metadata = {"out_sharding": (None, "model"), "eager_sharding": False} if annotated else {}
    layer = {"linear": nnx.Linear, "general": nnx.LinearGeneral}[kind]

    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(key):
        op = QDotGeneral(config_v4(rng_type=None))
        return layer(16, 16, dot_general=op, kernel_metadata=metadata, rngs=nnx.Rngs(key))

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return jnp.tanh(layer(x))

    stack = make(jax.random.split(jax.random.key(0), 3))
    expected = run(stack, X)
    jqinject.freeze(stack)
    stored = stack.kernel.get_raw_value()
    assert (stored["value"].shape, stored["scale"].shape) == ((3, 16, 16), (3, 1, 16))
    assert stack.kernel.shape == (3, 16, 16)
    np.testing.assert_array_equal(run(stack, X), expected)
    if annotated:
        assert stack.kernel.get_metadata()["out_sharding"] == ("layers", None, "model")


@pytest.mark.heavy
def test_training_goes_on_after_a_shared_op_was_split():
    op = QDotGeneral(config_v4(), rngs=nnx.Rngs(0))
    model = nnx.Sequential(*(nnx.Linear(16, 16, dot_general=op, rngs=nnx.Rngs(n)) for n in range(2)))
    jqinject.unfreeze(jqinject.freeze(model, keep_masters=True))
    step = nnx.jit(nnx.grad(lambda m, x: jnp.sin(m(x)).sum(), argnums=1))
    assert not np.array_equal(step(model, X), step(model, X))  # rounded by other random numbers


def test_pieces_of_a_forward_contraction_are_not_frozen():
    config = config_v4(rng_type=None).let(tile_size=LocalAqt(2))
    model = nnx.Sequential(
        QuantLinear(16, 16, rngs=nnx.Rngs(0)),
        nnx.Linear(16, 8, dot_general=QDotGeneral(config), rngs=nnx.Rngs(1)),
    )
    with pytest.raises(ValueError, match=r"cut into pieces.*can't be stored for serving.*\n.*cure"):
        jqinject.freeze(model)
    assert model.layers[0].frozen is None
    model.layers[1].dot_general.rhs_quant_mode = QuantMode.CONVERT
    with pytest.raises(ValueError, match="cut into pieces"):
        model(X)


def test_weights_that_are_not_finite_are_refused_before_any_is_replaced():
    model = nnx.Sequential(*(QuantLinear(4, 4, rngs=nnx.Rngs(seed)) for seed in range(3)))
    model.layers[2].kernel[0, 1] = jnp.inf
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match=r"the weights of layers\.2 have nan or inf"):
        jqinject.freeze(model)
    assert nnx.graphdef(model) == before and model.layers[0].frozen is None


@pytest.mark.heavy
def test_one_bit_of_one_sign():
    weight = q.SignedBinaryWeightPerTensorConst
    ones = nnx.initializers.ones_init()
    layer = QuantLinear(4, 3, weight_quant=weight, use_bias=False, kernel_init=ones, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 4))
    layer.eval()
    expected = layer(x)
    assert (layer.quant_weight().int() == 1).all()
    np.testing.assert_allclose(jqinject.freeze(layer)(x), expected, rtol=1e-6)
