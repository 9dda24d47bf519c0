"""A frozen parameter answers as the float one did, with the dequantized numbers."""

import math
import pickle
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jqinject
from jqinject.dot import (
    DEQUANTIZE,
    FrozenParam,
    ScaleForms,
    frozen_numbers,
    numbers_of_leaves,
    quant_tensor_of,
)
from jqinject.nn import (
    QuantConv,
    QuantEinsum,
    QuantEmbed,
    QuantGRUCell,
    QuantLinear,
    QuantLinearGeneral,
    QuantMultiHeadAttention,
    QuantScaleBias,
)
from jqinject.ops import NF4
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    MXFloat4e2m1Weight,
)
from jqinject.quant_tensor import CodebookQuantTensor, FloatQuantTensor, IntQuantTensor, in_groups

ROWS, COLUMNS = 6, 8
SCALE = jnp.linspace(0.5, 2.0, ROWS)[:, None]
INTEGERS = jax.random.randint(jax.random.key(0), (ROWS, COLUMNS), -8, 8).astype(jnp.int8)
IDS = jnp.array([[5, -1], [0, 2]])


def integers(bits=8, zero=0.0, dtype=jnp.float32):
    return IntQuantTensor.from_int(INTEGERS, SCALE, zero, bits, dtype=dtype)


def grouped():
    return in_groups(
        IntQuantTensor.from_int(INTEGERS.reshape(ROWS, 2, 4), jnp.linspace(0.5, 2, 12).reshape(ROWS, 2, 1)),
        4,
        -1,
    )


def in_groups_of(size, dim, bits=8):
    """Integers in groups along an axis, each with a scale of its own."""
    shape = (*INTEGERS.shape[:dim], INTEGERS.shape[dim] // size, size, *INTEGERS.shape[dim + 1 :])
    scales = (*shape[: dim + 1], 1, *shape[dim + 2 :])
    scale = jnp.linspace(0.5, 2, np.prod(scales)).reshape(scales)
    return in_groups(IntQuantTensor.from_int(INTEGERS.reshape(shape), scale, 0.0, bits), size, dim - 2)


def minifloats(dtype):
    return FloatQuantTensor.from_payload(INTEGERS.astype(jnp.float32).astype(dtype), SCALE)


# name: (the quantized weight, its summed axes, zero point?)
WEIGHTS = {
    "int8": (integers, (), False),
    "int8_summed_rows": (integers, (0,), False),
    "zero_points": (lambda: integers(zero=3.0), (1,), True),
    "int4": (lambda: integers(4), (1,), False),
    "int4_packed_rows": (lambda: integers(4), (0,), False),
    "int3_packed_rows": (lambda: IntQuantTensor.from_int(INTEGERS >> 1, SCALE, 0.0, 3), (0,), False),
    "bfloat16": (lambda: integers(dtype=jnp.bfloat16), (1,), False),
    "groups": (grouped, (1,), False),
    "fp8": (lambda: minifloats(jnp.float8_e4m3fn), (1,), False),
    "fp4": (lambda: minifloats(jnp.float4_e2m1fn), (1,), False),
    "nf4": (
        lambda: CodebookQuantTensor.from_codes((INTEGERS + 8).astype(jnp.uint8), SCALE, NF4),
        (1,),
        False,
    ),
}
# More of those in groups, for sharding.
GROUPED = {
    "groups_of_rows": (lambda: in_groups_of(3, 0), (0,), False),
    "groups_of_rows_not_summed": (lambda: in_groups_of(3, 0), (1,), False),
    "groups_of_4_bits": (lambda: in_groups_of(4, 1, bits=4), (1,), False),
}
INDICES = [
    0,
    -1,
    jnp.int32(3),
    (2, 5),
    ...,
    (..., 1),
    slice(1, 4),
    (slice(None), slice(2, 6)),
    (slice(None, None, -2), 3),
    IDS,
    np.array([1, 1]),
    (IDS, slice(1, 3)),
    (slice(None), IDS),
    (1, IDS),
    (IDS, IDS),
    None,
    INTEGERS[:, 0] > 0,
]


def made(name, metadata=None):
    make, summed, has_zero_point = {**WEIGHTS, **GROUPED}[name]
    weight = make()
    param = FrozenParam.of(weight, summed, metadata, has_zero_point, summed or None, ScaleForms(None, True))
    return weight, param


class Holder(nnx.Module):
    def __init__(self, table):
        self.table = table

    def __call__(self, x):
        return x @ self.table


@pytest.mark.heavy
@pytest.mark.parametrize("name", WEIGHTS)
def test_it_reads_as_the_parameter(name):
    weight, param = made(name)
    value = np.asarray(weight.value)
    assert (param.shape, param.dtype, param.ndim, param.size) == (value.shape, value.dtype, 2, value.size)
    assert (len(param), param.nbytes) == (ROWS, value.nbytes)
    assert not isinstance(param, nnx.Param)
    x = jnp.ones((2, ROWS), value.dtype)
    read = {
        "value": (param.get_value(), value),
        "array": (jnp.asarray(param), value),
        "numpy": (np.asarray(param), value),
        "T": (param.T, value.T),
        "times": (2 * param, 2 * value),
        "reshape": (param.reshape(-1), value.reshape(-1)),
        "astype": (param.astype(jnp.float16), value.astype(np.float16)),
        "tensor": (param.quant_tensor().value, value),
        "matmul": (x @ param, x @ jnp.asarray(value)),
        "einsum": (jnp.einsum("bi,io->bo", x, param), jnp.einsum("bi,io->bo", x, jnp.asarray(value))),
    }
    for found, expected in read.values():
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    for index in INDICES:
        np.testing.assert_array_equal(param[index], jnp.asarray(value)[index], err_msg=str(index))


def equations(jaxpr):
    return [e for e in jaxpr.eqns if e.params.get("name") == DEQUANTIZE]


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_lookup_dequantizes_the_rows_it_reads(name):
    _, param = made(name)
    (equation,) = equations(jax.make_jaxpr(lambda param, ids: param[ids])(param, IDS))
    packed_rows = name.endswith("_packed_rows")
    assert equation.outvars[0].aval.shape == (ROWS if packed_rows else IDS.size, COLUMNS)
    # The inputs of the equation, named, are the numbers that the rows have.
    leaves = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in equation.invars]
    numbers = numbers_of_leaves(leaves, param.form)
    assert {name: leaf.dtype for name, leaf in numbers.items()}.items() <= {
        name: leaf.dtype for name, leaf in param.get_raw_value().items()
    }.items()
    assert quant_tensor_of(numbers, param.form).shape == equation.outvars[0].aval.shape
    assert type(quant_tensor_of(numbers, param.form)) is type(param.quant_tensor())


def test_one_equation_with_sorted_inputs():
    _, param = made("zero_points")
    (equation,) = equations(jax.make_jaxpr(lambda param: param[...])(param))
    shapes = [tuple(var.aval.shape) for var in equation.invars]
    assert param.form.names == ("scale", "sums", "value", "zero_point")
    assert shapes == [tuple(param.get_raw_value()[name].shape) for name in param.form.names]
    with pytest.raises(ValueError, match="are needed, got 1 arrays"):
        numbers_of_leaves([1], param.form)


def test_what_is_no_quant_tensor_is_not_frozen():
    with pytest.raises(TypeError, match="must be a QuantTensor, got ArrayImpl"):
        frozen_numbers(jnp.ones((2, 2)), (), False, None, ScaleForms())


def stacked(count=3):
    """A stack of tables, and their dequantized numbers."""

    def one(shift):
        return frozen_numbers(
            integers().set(value=integers(4).value + shift, scale=SCALE), (1,), False, (1,), ScaleForms()
        )

    made_of = [one(SCALE * 0), one(SCALE), one(-SCALE)]
    numbers = jax.tree.map(lambda *parts: jnp.stack(parts), *(numbers for numbers, _ in made_of))
    form = made_of[0][1]
    value = jnp.stack([quant_tensor_of(numbers, form).value for numbers, _ in made_of])
    return FrozenParam.holding(numbers, form, {"out_sharding": (None, None, "model")}), value


@pytest.mark.heavy
def test_stacks():
    param, value = stacked()
    assert param.shape == value.shape
    np.testing.assert_array_equal(param[...], value)
    np.testing.assert_array_equal(param[1, IDS], value[1, IDS])
    np.testing.assert_array_equal(param[jnp.array([2, 0]), 1:3], value[jnp.array([2, 0]), 1:3])
    assert quant_tensor_of(param.get_raw_value(), param.form).shape == value.shape
    model, ids = Holder(param), jnp.array([1, 4])

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def scanned(layer, x):
        return x + layer.table[ids].sum() + (jnp.ones(ROWS) @ layer.table)

    @nnx.jit
    @nnx.vmap(in_axes=(0, None))
    def mapped(layer, x):
        return nnx.remat(lambda layer, x: x @ layer.table)(layer, x)

    expected = jnp.zeros(COLUMNS)
    for one in value:
        expected = expected + one[ids].sum() + jnp.ones(ROWS) @ one
    np.testing.assert_allclose(scanned(model, jnp.zeros(COLUMNS)), expected, rtol=1e-6)
    x = jnp.arange(float(ROWS))
    np.testing.assert_allclose(mapped(model, x), jnp.einsum("i,lio->lo", x, value), rtol=1e-6)
    assert isinstance(model.table, FrozenParam) and model.table.shape == value.shape


def test_axes_in_front_may_be_taken_away():
    value = IntQuantTensor.from_int(
        jnp.arange(24, dtype=jnp.int8).reshape(2, 3, 4), jnp.array([0.5, 2.0])[:, None, None]
    )
    param = FrozenParam.of(value, (1,), has_zero_point=False)  # stored (2, 4, 3)
    one = {name: leaf[1] for name, leaf in param.get_raw_value().items()}
    np.testing.assert_array_equal(quant_tensor_of(one, param.form).value, value.value[1])
    param = FrozenParam.of(value, (0,), has_zero_point=False)  # stored (3, 4, 2)
    with pytest.raises(ValueError, match=r"1 axes were taken away .* stored as axes"):
        param.form.fitted((4, 2))


def test_nothing_of_it_is_lost(tmp_path):
    weight, param = made("int4", {"out_sharding": ("model", None), "note": "kept"})
    model = Holder(param)
    graphdef, state = nnx.split(model, graph=True)
    copies = {
        "merge": nnx.merge(graphdef, state),
        "clone": nnx.clone(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "eval_shape": nnx.eval_shape(lambda: model),
    }
    for name, copy in copies.items():
        assert isinstance(copy.table, FrozenParam), name
        assert copy.table.form == param.form and copy.table.note == "kept"
        assert copy.table.get_metadata("out_sharding") == ("model", None)
        assert (copy.table.shape, copy.table.dtype) == (param.shape, param.dtype)
        if name != "eval_shape":
            np.testing.assert_array_equal(copy.table[...], weight.value)
    abstract = copies["eval_shape"]
    assert abstract.table[...].shape == abstract.table.get_value().shape == (ROWS, COLUMNS)
    assert abstract.table[IDS].shape == (2, 2, COLUMNS)
    assert list(nnx.as_pure(state)["table"]) == ["scale", "sums", "value"]

    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "one", state)
    checkpointer.wait_until_finished()
    nnx.update(abstract, checkpointer.restore(tmp_path / "one", nnx.state(abstract)))
    np.testing.assert_array_equal(abstract.table[...], weight.value)

    # load_state, from Orbax without a target, into other numbers.
    other = Holder(FrozenParam.holding(jax.tree.map(jnp.zeros_like, param.get_raw_value()), param.form))
    jqinject.load_state(other, checkpointer.restore(tmp_path / "one"))
    np.testing.assert_array_equal(other.table[...], weight.value)


def test_a_layer_refuses_an_array_in_the_place_of_its_frozen_weight():
    layer = jqinject.freeze(QuantLinear(4, 2, rngs=nnx.Rngs(0)))
    numbers = layer.kernel.get_raw_value()
    for name in ("kernel", "weight"):
        with pytest.raises(
            TypeError, match=r"frozen parameter of shape \(4, 2\) .* cannot be assigned, got float32"
        ):
            setattr(layer, name, jnp.ones((4, 2)))
    assert layer.kernel.get_raw_value() is numbers


def test_assigning_is_refused():
    weight, param = made("int4")
    before, floats = nnx.clone(param), Holder(nnx.Param(weight.value))

    def assign_value():
        with pytest.warns(DeprecationWarning):
            param.value = weight.value

    def assign_item():
        param[0] = 1.0

    attempts = [
        assign_value,
        assign_item,
        lambda: param.set_value(weight.value),
        lambda: param.set_value({"value": weight.value}),
        lambda: param.replace(weight.value),
        lambda: nnx.update(Holder(param), nnx.state(floats)),
        lambda: nnx.update(Holder(param), {"table": weight.value}),
    ]
    for attempt in attempts:
        with pytest.raises(
            TypeError, match=r"frozen parameter of shape \(6, 8\) holds int4 .*\n  cure: load float"
        ):
            attempt()
    np.testing.assert_array_equal(param[...], before[...])
    with pytest.raises(AttributeError, match="no attribute 'keys'"):
        _ = param.keys
    assert "int4" not in repr(param) and "uint8" in repr(param)


def test_a_zero_point_is_kept_unless_there_is_none():
    weight = integers(zero=3.0)
    np.testing.assert_array_equal(FrozenParam.of(weight)[...], weight.value)


def test_an_abstract_array_has_the_shape_and_a_sharding():
    param = FrozenParam.of(integers())
    mesh = jax.sharding.NamedSharding(jax.make_mesh((2,), ("data",)), jax.sharding.PartitionSpec("data"))
    for shape, sharding in ((param.shape, None), (param.shape[::-1], mesh)):
        with pytest.raises(TypeError, match="float32 numbers of shape"):
            param.copy(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))
    assert {"scale", "value"} <= param.copy(
        jax.ShapeDtypeStruct(param.shape, jnp.float32, sharding=mesh)
    ).get_raw_value().keys()


def test_gradients_pass_it():
    weight, param = made("int8")

    @nnx.jit
    def slope(model, x):
        return nnx.grad(lambda x: jnp.sum(jnp.sin(model(x))))(x)

    x = jnp.ones((2, ROWS))
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(x @ weight.value)))(x)
    np.testing.assert_allclose(slope(Holder(param), x), expected, rtol=1e-6)
    assert not jax.tree.leaves(nnx.state(Holder(param), nnx.Param))


P = jax.sharding.PartitionSpec


@pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")
@pytest.mark.parametrize("name", ["int8", "int8_summed_rows", "int4", "groups"])
def test_sharding(name):
    mesh = jax.make_mesh((2, 4), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    weight, param = made(name, {"out_sharding": ("rows", None)})
    model = Holder(param)
    specs = nnx.get_partition_spec(nnx.state(model))["table"].get_raw_value()
    shardings = {n: jax.NamedSharding(mesh, spec) for n, spec in specs.items()}
    placed = FrozenParam.holding(jax.device_put(param.get_raw_value(), shardings), param.form)
    assert placed.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("rows")), 2)
    assert placed.get_value().sharding.is_equivalent_to(placed.sharding, 2)
    np.testing.assert_array_equal(placed[IDS], weight.value[IDS])
    with jax.set_mesh(mesh):
        abstract = nnx.as_abstract(nnx.eval_shape(lambda: model))
    held = abstract.table.get_raw_value()
    assert {n: leaf.sharding.spec for n, leaf in held.items()} == specs
    assert abstract.table.sharding.spec == P("rows", None)
    assert abstract.table.shape == (ROWS, COLUMNS)


SPECS = [P(None, None), P("x", None), P(None, "x"), P("y", "x"), P("x", "y"), P(("x", "y"), None)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", [*WEIGHTS, *GROUPED])
def test_the_sharding_of_a_weight_is_that_of_its_numbers(name, spec):
    _, param = made(name)
    payload, stack = "value", {n: jnp.stack([held, held]) for n, held in param.numbers.items()}
    for numbers, of_weight in ((param.numbers, spec), (stack, P("layers", *spec)), (stack, P(None, *spec))):
        specs = param.form.partition_specs(of_weight, numbers)
        assert param.form.partition_spec(specs[payload], numbers[payload].shape) == of_weight


@pytest.mark.skipif(jax.device_count() < 2, reason="the mesh has 2 devices")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["int8", "int4", "groups", *GROUPED])
def test_each_device_has_the_numbers_of_its_part_of_the_weight(name, axis):
    """Sharded along a grouped axis, a device holds whole groups, and their scales."""
    weight, param = made(name)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = P(*(("x", None) if axis == 0 else (None, "x")))
    specs = param.form.partition_specs(spec, param.numbers)
    placed = jax.device_put(param.numbers, {n: jax.NamedSharding(mesh, s) for n, s in specs.items()})
    expected = jax.device_put(weight.value, jax.NamedSharding(mesh, spec)).addressable_shards
    for device, part in enumerate(expected):
        own = {n: held.addressable_shards[device].data for n, held in placed.items()}
        groups, length = param.form.groups, part.data.shape[axis]
        if groups is not None and axis == groups.dim % 2:
            groups = replace(groups, length=length)
        form = replace(param.form, groups=groups).fitted(own["value"].shape)
        np.testing.assert_array_equal(quant_tensor_of(own, form).value, part.data)


X = jax.random.normal(jax.random.key(2), (2, 16))
INT4 = {"weight_quant": Int8WeightPerChannelFloat, "weight_bit_width": 4}
INT8 = {"weight_quant": Int8WeightPerChannelFloat}
INT8_INPUT = {"input_quant": Int8ActPerTensorFloat}
PROJECTED = {"in_proj_weight_quant": Int8WeightPerTensorFloat}
PER_TENSOR = {"weight_quant": Int8WeightPerTensorFloat}
GROUPS = {"weight_quant": MXFloat4e2m1Weight}


class Shared(nnx.Module):
    """A table that is also the output head, and reads its shape."""

    def __init__(self, rngs):
        self.embed = QuantEmbed(32, 16, **INT4, rngs=rngs)

    def __call__(self, ids):
        table = self.embed.embedding
        x = table[ids] * table.shape[-1] ** 0.5
        return jnp.einsum("bd,vd->bv", x, table) + jnp.dot(x, table[...].T)


# name: (the layer, the name of its weight)
LAYERS = {
    "linear": (lambda rngs: QuantLinear(16, 8, **INT8, rngs=rngs), "kernel"),
    "int4": (lambda rngs: QuantLinear(16, 8, **INT4, rngs=rngs), "kernel"),
    "groups": (lambda rngs: QuantLinear(64, 8, **GROUPS, rngs=rngs), "kernel"),
    "general": (lambda rngs: QuantLinearGeneral((2, 8), (4, 3), axis=(-2, -1), **INT8, rngs=rngs), "kernel"),
    "conv": (lambda rngs: QuantConv(3, 4, (3, 3), **INT8, rngs=rngs), "kernel"),
    "embed": (lambda rngs: QuantEmbed(10, 6, **INT8, rngs=rngs), "embedding"),
    "attention": (lambda rngs: QuantMultiHeadAttention(2, 8, **PROJECTED, rngs=rngs).query, "kernel"),
    "cell": (
        lambda rngs: QuantGRUCell(4, 6, weight_quant=Int8WeightPerTensorFloat, rngs=rngs).dense_h,
        "kernel",
    ),
    "scale": (lambda rngs: QuantScaleBias(5), "scale"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_weight_of_a_frozen_layer_answers(name):
    make, weight_name = LAYERS[name]
    layer = make(nnx.Rngs(0))
    before, value = getattr(layer, weight_name), layer.quant_weight().value
    shape, dtype, sharding = before.shape, before.dtype, before.sharding
    jqinject.freeze(layer)
    weight = getattr(layer, weight_name)
    assert (weight.shape, weight.dtype, weight.ndim, weight.sharding) == (shape, dtype, len(shape), sharding)
    for found, expected in (
        (weight[...], value),
        (jnp.asarray(weight), value),
        (weight.T, value.T),
        (weight[1:3], value[1:3]),
        (layer.weight[...], value),
    ):
        np.testing.assert_array_equal(found, expected)
    # It is stored in the parameter's place, and no floats can be written there.
    flat = nnx.to_flat_state(nnx.state(layer))
    assert {path[0] for path, _ in flat} <= {weight_name, "bias"}
    for attempt in (
        lambda: weight.set_value(value),
        lambda: nnx.update(layer, {weight_name: nnx.Param(value)}),
    ):
        with pytest.raises(TypeError, match="cannot be assigned"):
            attempt()
    with pytest.raises(AttributeError, match="has no attribute 'kernels'"):
        _ = layer.kernels
    assert nnx.eval_shape(lambda: layer).weight.shape == shape


@pytest.mark.heavy
def test_a_frozen_table_is_looked_up_and_contracted():
    model, ids = Shared(nnx.Rngs(0)), jnp.array([3, 31])
    table = model.embed.quant_weight().value
    jqinject.freeze(model)
    rows = table[ids] * 4.0
    expected = 2 * rows @ table.T
    np.testing.assert_allclose(nnx.jit(lambda m, ids: m(ids))(model, ids), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(nnx.clone(model)(ids), expected, rtol=1e-5, atol=1e-6)
    (first, *_) = equations(jax.make_jaxpr(lambda ids: model.embed.embedding[ids])(ids))
    assert first.outvars[0].aval.shape == (2, 16)


@pytest.mark.heavy
def test_a_stack_of_frozen_layers_answers():
    @nnx.vmap
    def make(key):
        return QuantLinear(16, 16, **INT4, rngs=nnx.Rngs(key))

    stack = make(jax.random.split(jax.random.key(0), 3))
    values = nnx.vmap(lambda layer: layer.quant_weight().value)(stack)
    jqinject.freeze(stack)
    assert stack.kernel.shape == (3, 16, 16)
    np.testing.assert_array_equal(stack.kernel[...], values)

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return jnp.tanh(x @ layer.kernel) + layer.kernel.shape[0]

    expected = X
    for value in values:
        expected = jnp.tanh(expected @ value) + 16
    np.testing.assert_allclose(run(stack, X), expected, rtol=1e-5, atol=1e-6)


def test_masters_that_were_kept_answer_themselves():
    layer = QuantLinear(16, 8, **INT8, rngs=nnx.Rngs(0))
    value = layer.kernel[...]
    jqinject.freeze(layer, keep_masters=True)
    for copy in (layer, nnx.clone(layer)):
        assert isinstance(copy.kernel, FrozenParam) and isinstance(copy.master, nnx.Param)
        np.testing.assert_array_equal(copy.master[...], value)
        np.testing.assert_array_equal(jqinject.unfreeze(copy).kernel[...], value)


@pytest.mark.heavy
@pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")
def test_groups_that_cross_shards():
    mesh = jax.make_mesh((8,), ("model",))
    metadata = {"out_sharding": ("model", None)}
    with jax.set_mesh(mesh):
        layer = QuantLinear(64, 8, **GROUPS, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        sharding, value = layer.kernel.sharding, np.asarray(layer.quant_weight().value)
        kernel = jqinject.freeze(layer).kernel
        assert layer.frozen.form.cut is not None
        assert kernel.sharding.is_equivalent_to(sharding, 2)
        assert kernel.get_metadata("out_sharding") == ("model", None)
        assert jax.typeof(kernel[...]).sharding.spec == P("model", None)
        np.testing.assert_array_equal(kernel[:, 2:5], value[:, 2:5])
        stack = {name: np.stack([leaf, leaf]) for name, leaf in kernel.get_raw_value().items()}
    stacked_kernel = FrozenParam.holding(stack, kernel.form)
    np.testing.assert_array_equal(stacked_kernel[...], np.stack([value, value]))
    np.testing.assert_array_equal(stacked_kernel[1, :, 3], value[:, 3])


# name: (the layer, the shape of an input)
CALLED = {
    "linear": (lambda rngs: QuantLinear(16, 9, **INT8, **INT8_INPUT, rngs=rngs), (2, 16)),
    "general": (
        lambda rngs: QuantLinearGeneral((2, 8), (4, 3), axis=(-2, -1), **INT8, **INT8_INPUT, rngs=rngs),
        (3, 2, 8),
    ),
    "einsum": (
        lambda rngs: QuantEinsum("bd,dnh->nbh", (16, 3, 5), (3, 5), **INT8, **INT8_INPUT, rngs=rngs),
        (2, 16),
    ),
    "conv": (lambda rngs: QuantConv(3, 4, (3, 3), **INT8, **INT8_INPUT, rngs=rngs), (1, 5, 5, 3)),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", CALLED)
def test_a_frozen_call_makes_no_array_of_the_weights_size(name):
    make, shape = CALLED[name]
    layer, x = make(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), shape)
    layer(x)
    layer.eval()
    expected, size = layer(x), layer.kernel.size
    jqinject.freeze(layer)
    np.testing.assert_array_equal(layer(x), expected)
    made = []
    for line in str(jax.make_jaxpr(layer)(x)).splitlines():
        results, assigned, _ = line.partition(" = ")
        if assigned:
            made += re.findall(r":(\w+)\[([\d,]+)\]", results)
    assert made
    assert [each for each in made if math.prod(map(int, each[1].split(","))) == size] == []
