"""Layers whose weights are minifloats or indices into a table: frozen, contracted, kept for the backward pass."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import quant
from jqinject.dot import FrozenParam
from jqinject.nn import QuantCheckpoint, QuantConv, QuantEmbed, QuantLinear
from jqinject.ops import NF4, TableGrid
from jqinject.quant_tensor import CodebookQuantTensor, FloatQuantTensor, GroupwiseCodebookQuantTensor

X = jax.random.normal(jax.random.key(0), (3, 8))
# name -> dtype and bytes of the payload of 8 x 6 weights
FROZEN = {
    "Fp8e4m3OCPWeightPerChannelFloat": ("float8_e4m3fn", 48),
    "Fp8e5m2FNUZWeightPerTensorFloat": ("float8_e5m2fnuz", 48),
    "Fp8e4m3Weight": ("uint8", 48),
    "Fp6e2m3OCPWeightPerChannelFloat": ("uint8", 48),
    "Fp4e2m1OCPWeightPerChannelFloat": ("uint8", 24),
    "NF4WeightPerChannelFloat": ("uint8", 24),
}
frozen_kinds = pytest.mark.parametrize("name", FROZEN)


def linear(name, dtype=jnp.float32, **given):
    return QuantLinear(
        8, 6, weight_quant=getattr(quant, name), dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0), **given
    )


@pytest.mark.heavy
@frozen_kinds
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_frozen_it_computes_what_it_computed(name, dtype):
    layer = linear(name, dtype)
    layer.eval()
    x = X.astype(dtype)
    weight, y = layer.quant_weight(), layer(x)
    frozen = jqinject.freeze(nnx.clone(layer))
    stored = frozen.frozen.numbers["value"]
    assert (stored.dtype.name, stored.nbytes) == FROZEN[name]
    assert isinstance(frozen.kernel, FrozenParam)
    again = frozen.quant_weight()
    assert type(again) is type(weight) and again.is_valid
    np.testing.assert_array_equal(again.value, weight.value)
    # Compiled kernels add in another order than XLA, by which contraction="float" is contracted.
    # In bfloat16 they do not round the dequantized weights, XLA does: a unit in the output's last place.
    near = 1e-6 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(frozen(x), np.float32), np.asarray(y, np.float32), rtol=near, atol=1e-6
    )
    frozen.contraction = "float"
    np.testing.assert_array_equal(frozen(x), y)
    for other in (nnx.clone(frozen), pickle.loads(pickle.dumps(frozen))):
        np.testing.assert_array_equal(other(x), y)


@frozen_kinds
def test_an_abstract_model_freezes_to_the_same_state(name):
    abstract = nnx.eval_shape(lambda: jqinject.freeze(linear(name)))
    concrete = jqinject.freeze(linear(name))
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), nnx.to_pure_dict(nnx.state(concrete)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), nnx.to_pure_dict(nnx.state(abstract))) == shapes
    assert nnx.graphdef(abstract) == nnx.graphdef(concrete)


@pytest.mark.heavy
@frozen_kinds
def test_a_stack_of_layers_freezes_layer_by_layer(name):
    def make(key):
        return QuantLinear(8, 6, weight_quant=getattr(quant, name), rngs=nnx.Rngs(key))

    stack = nnx.vmap(make)(jax.random.split(jax.random.key(1), 3))
    forward = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
    y = forward(stack, X)
    jqinject.freeze(stack)
    np.testing.assert_allclose(forward(stack, X), y, rtol=1e-6, atol=1e-6)
    stack.contraction = "float"
    np.testing.assert_array_equal(forward(stack, X), y)


@pytest.mark.heavy
def test_a_convolution_and_a_table_of_rows():
    conv = QuantConv(2, 3, (3,), weight_quant=quant.Fp6e3m2OCPWeightPerChannelFloat, rngs=nnx.Rngs(0))
    embed = QuantEmbed(
        5, 4, weight_quant=quant.NF4WeightPerTensorFloat, rngs=nnx.Rngs(0), return_quant_tensor=True
    )
    x, rows = jnp.ones((1, 6, 2)), jnp.array([0, 3])
    y, found = conv(x), embed(rows)
    assert isinstance(found, CodebookQuantTensor) and found.is_valid
    np.testing.assert_array_equal(jqinject.freeze(conv)(x), y)
    np.testing.assert_array_equal(jqinject.freeze(embed)(rows).value, found.value)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("weight", "act", "note"),
    [
        (
            "Fp8e4m3OCPWeightPerChannelFloat",
            "Fp8e4m3OCPActPerTensorFloat",
            "this backend has no such product",
        ),
        ("Fp8e4m3Weight", "Fp8e4m3Act", "no backend contracts this weight (e4m3 up to 480)"),
        ("Fp4e2m1OCPWeight", "Fp4e2m1OCPAct", "no backend contracts this weight (float4_e2m1fn)"),
        (
            "NF4WeightPerTensorFloat",
            "Int8DynamicActPerTensorAbsMax",
            "no backend contracts this weight (4-bit table)",
        ),
    ],
)
def test_the_report_says_what_runs_dequantized(weight, act, note):
    layer = linear(weight, input_quant=getattr(quant, act))
    layer(X)
    for model in (layer, jqinject.freeze(nnx.clone(layer))):
        entry = jqinject.report(model, X).layers[0]
        if "no such product" in note and "f8" in entry.program:
            continue  # a backend that has them
        assert entry.contraction == "float" and note in entry.note
    measured = jqinject.report(layer, X, numbers=True).layers[0].numbers
    assert measured.saturation.weight == 0.0


@pytest.mark.heavy
def test_hardware_formats_are_contracted_as_they_are_and_others_are_refused():
    ours = linear(
        "Fp8e4m3OCPWeightPerChannelFloat", input_quant=quant.Fp8e5m2OCPActPerTensorFloat, contraction="fp8"
    )
    plain = linear(
        "Fp8e4m3OCPWeightPerChannelFloat", input_quant=quant.Fp8e5m2OCPActPerTensorFloat, contraction="float"
    )
    np.testing.assert_allclose(ours(X), plain(X), rtol=1e-6, atol=1e-6)
    of_ours, of_plain = (nnx.grad(lambda layer: jnp.sum(layer(X) ** 2))(layer) for layer in (ours, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), of_ours, of_plain)
    other = linear("Fp6e3m2OCPWeight", input_quant=quant.Fp6e3m2OCPAct, contraction="fp8")
    with pytest.raises(ValueError, match=r"got float6_e3m2fn with scales of shape \(\) and float6_e3m2fn"):
        other(X)


def test_a_learned_width_can_not_be_kept():
    keep = QuantCheckpoint(quant.Fp8e4m3Act, mantissa_bit_width_impl_type="parameter")
    with pytest.raises(ValueError, match="learned number of bits"):
        keep(X)


def test_nf4_is_its_table_times_the_channels_largest():
    layer = linear("NF4WeightPerChannelFloat")
    weight, kernel = layer.quant_weight(), np.asarray(layer.kernel[...])
    largest = np.abs(kernel).max(0, keepdims=True)
    nearest = np.abs(kernel / largest - NF4.table[:, None, None]).argmin(0)
    np.testing.assert_array_equal(weight.codes(), nearest)
    np.testing.assert_allclose(weight.value, NF4.table[nearest] * largest, rtol=1e-6)
    assert (weight.bit_width, weight.scale.shape, weight.is_valid) == (4, (1, 6), True)


@pytest.mark.heavy
def test_nf4_in_groups_is_its_table_times_the_largest_of_each_group():
    layer = linear("NF4WeightPerGroupFloat", weight_group_size=3)
    layer.eval()
    weight, kernel = layer.quant_weight(), np.asarray(layer.kernel[...])
    assert isinstance(weight, GroupwiseCodebookQuantTensor)
    for start, stop in ((0, 3), (3, 6), (6, 8)):  # the last group has two
        rows = kernel[start:stop]
        largest = np.abs(rows).max(0, keepdims=True)
        nearest = np.abs(rows / largest - NF4.table[:, None, None]).argmin(0)
        np.testing.assert_array_equal(weight.codes()[start:stop], nearest)
        np.testing.assert_allclose(weight.value[start:stop], NF4.table[nearest] * largest, rtol=1e-6)
    assert (weight.bit_width, weight.scale_.shape, weight.is_valid) == (4, (3, 1, 6), True)
    y = layer(X)
    frozen = jqinject.freeze(nnx.clone(layer))
    again = frozen.quant_weight()
    assert type(again) is type(weight)
    np.testing.assert_array_equal(again.codes(), weight.codes())
    np.testing.assert_array_equal(frozen(X), y)


@pytest.mark.heavy
def test_codes_in_groups_cross_transformations():
    weight = linear("NF4WeightPerGroupFloat", weight_group_size=4).quant_weight()
    table = TableGrid((-1.0, 0.0, 0.5, 2.0))
    values = jnp.array([[1.0, -2.0], [1.0, 0.0]])
    x = GroupwiseCodebookQuantTensor(values, jnp.array([[2.0], [0.5]]), 2, 0, table, dequant_shape=(3,))
    for tensor in (x, weight):
        again = pickle.loads(pickle.dumps(tensor))
        through = jax.jit(lambda tensor: tensor)(tensor)
        for other in (again, through):
            assert type(other) is type(tensor) and other.codebook == tensor.codebook
            np.testing.assert_array_equal(other.codes(), tensor.codes())
    assert x.codes().tolist() == [2, 0, 3] and x.is_valid and x.signed and not x.training
    np.testing.assert_array_equal(weight.T.codes(), weight.codes().T)
    np.testing.assert_array_equal(weight[:, 1].codes(), weight.codes()[:, 1])


@pytest.mark.parametrize("name", ["MXFloat4e2m1Weight", "NF4WeightPerGroupFloat", "MXInt8Weight"])
def test_a_prefix_of_a_tensor_in_groups(name):
    layers = [linear(name, weight_group_size=4), linear(name, weight_group_size=4)]
    both = jax.tree.map(lambda *x: jnp.stack(x), *(layer.quant_weight() for layer in layers))
    prefix = jax.tree.map(lambda leaf: 0 if leaf.ndim else None, both)
    found = jax.vmap(lambda weight: weight.value, in_axes=(prefix,))(both)
    np.testing.assert_array_equal(found[1], layers[1].quant_weight().value)


@pytest.mark.heavy
def test_rows_of_a_table_in_groups():
    embed = QuantEmbed(
        5,
        8,
        weight_quant=quant.NF4WeightPerGroupFloat,
        weight_group_size=4,
        return_quant_tensor=True,
        rngs=nnx.Rngs(0),
    )
    rows = jnp.array([0, 3])
    found = embed(rows)
    assert isinstance(found, GroupwiseCodebookQuantTensor) and found.is_valid
    np.testing.assert_array_equal(found.value, embed.quant_weight().value[rows])


def test_another_table_and_its_gradients():
    table = TableGrid((-1.0, -0.5, 0.0, 2.0))
    layer = linear("NF4WeightPerTensorFloat", weight_codebook=table)
    layer.weight = nnx.Param(jnp.full((8, 6), 0.4).at[0, 0].set(-4.0).at[0, 1].set(jnp.nan))
    # 4.0 is brought to the largest magnitude, 2.0: what is below -1.0 is clamped to it.
    layer.weight = nnx.Param(jnp.full((8, 6), 0.9).at[0, 0].set(-4.0))
    weight = layer.quant_weight()
    np.testing.assert_array_equal(weight.value, jnp.zeros((8, 6)).at[0, 0].set(-2.0))
    gradient = nnx.grad(lambda layer: layer.quant_weight().value[1].sum())(layer)["kernel"].get_value()
    np.testing.assert_array_equal(gradient[1], jnp.ones(6))


@pytest.mark.parametrize("values", [(1.0,), (0.0, 0.0), (1.0, 0.0), (0.0, np.inf), tuple(range(257))])
def test_a_table_is_ascending_and_finite(values):
    with pytest.raises(ValueError, match="a codebook has 2 to 256 finite numbers in ascending order"):
        TableGrid(values)


def test_a_sign_can_be_turned():
    x = FloatQuantTensor(jnp.array([0.5, -3.0]), 0.5, quant_format())
    np.testing.assert_array_equal((-x).minifloat(), [-1.0, 6.0])
    np.testing.assert_array_equal(abs(x).minifloat(), [1.0, 6.0])


@pytest.mark.heavy
def test_tensors_are_pytrees_and_stay_what_they_are():
    for tensor in (
        FloatQuantTensor(jnp.array([0.5, -3.0]), 0.5, quant_format()),
        CodebookQuantTensor.from_codes(jnp.array([0, 15], jnp.uint8), 2.0, NF4),
    ):
        for again in (
            jax.jit(lambda t: t)(tensor),
            pickle.loads(pickle.dumps(tensor)),
            tensor.set(training=True),
        ):
            np.testing.assert_array_equal(again.payload(), tensor.payload())
            assert type(again) is type(tensor)
        assert not tensor.set(value=tensor.value * 1.1).is_valid
        with pytest.raises(TypeError, match="has no field 'zero_point'"):
            tensor.set(zero_point=1)
    with pytest.raises(ValueError, match="not on the grid of float4_e2m1fn"):
        FloatQuantTensor(jnp.array([0.7]), 1.0, quant_format()).minifloat()


def quant_format():
    return jnp.float4_e2m1fn
