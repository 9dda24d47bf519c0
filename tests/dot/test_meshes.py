"""Programs over several devices gather no weight that the float layer's program does not gather."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqinject as jq
import jqinject.quant as q
from jqinject.core import (
    AbsMeanRange,
    AbsPercentileRange,
    GradStat,
    MinMaxRange,
    MSERange,
    QuantStat,
    RMSRange,
)
from jqinject.nn import QuantConv, QuantLinear
from tests.ranges import in_range

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")

ROWS, COLUMNS = 256, 192
X = jax.random.normal(jax.random.key(0), (16, ROWS))
SHARDINGS = {
    "columns": P(None, "model"),
    "rows": P("model", None),
    "both": P("data", "model"),
    "whole": P(),
}
GATHER = re.compile(r"= \(?\w+\[([\d,]+)\]\S* (?:all-gather|all-to-all)(?:-start)?\(")


class CrossingInt8(q.MXInt8Weight):
    group_size = 48  # of shards of 64


class CrossingHQO(q.ShiftedUint8WeightPerGroupFloatHQO):
    group_size = 48


class CrossingZeroPoints(q.ShiftedUint8WeightGroupQuantFloat):
    group_size = 48


class CrossingFloats(q.MXFloat6e3m2Weight):
    group_size = 48


class CrossingRanges(q.Int4WeightPerGroupAbsMax):
    group_size = 48
    group_padding = True


class CrossingErrors(CrossingRanges):
    calibration_impl = MSERange


WEIGHTS = [
    q.Int8WeightPerTensorFloat,  # the largest of the whole
    q.Int8WeightPerChannelFloat,
    q.Int8WeightPerTensorFloatMSE,  # a search
    q.Int8WeightPerTensorFloatHQO,  # one whose errors are added in a stated order
    q.Int8WeightPerChannelFloatHQO,  # with medians
    q.ShiftedUint8WeightPerGroupFloatHQO,  # of zero points of groups
    CrossingHQO,
    q.Fp8e4m3WeightPerChannelDelayed,  # a history
    q.NF4WeightPerChannelFloat,  # a table
    CrossingInt8,  # groups
    CrossingRanges,  # of calibrated ranges
    CrossingErrors,  # that are searched
    q.ShiftedUint8WeightPerTensorFloat,  # a zero point
]


call = nnx.jit(lambda layer, x, **kwargs: layer(x, **kwargs), static_argnames="out_sharding")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


class Sum(nnx.Module):
    """Two layers side by side."""

    def __init__(self, *layers):
        self.layers = nnx.List(layers)

    def __call__(self, x):
        return sum(layer(x) for layer in self.layers)


def placed(module, mesh, spec):
    """The state of a layer on a mesh: what has the shape of the weight, or of the weight transposed, is divided."""
    specs = {(ROWS, COLUMNS): spec, (COLUMNS, ROWS): P(*tuple(spec)[::-1])}
    graphdef, state = nnx.split(module, graph=True)

    def put(array):
        return jax.device_put(array, NamedSharding(mesh, specs.get(array.shape, P())))

    return graphdef, jax.tree.map(put, state)


def gathers(module, mesh, spec, *, gradient, of_x=("data",), **kwargs):
    """The sizes of everything of a device's share of the weight or more that the program gathers."""
    graphdef, state = placed(module, mesh, spec)

    def run(state, x):
        module = nnx.merge(graphdef, state)
        if gradient:
            return nnx.grad(lambda m, x: jnp.mean(m(x, **kwargs) ** 2), argnums=(0, 1))(module, x), nnx.state(
                module
            )
        return module(x, **kwargs), nnx.state(module)

    x = jax.device_put(X, NamedSharding(mesh, P(*of_x)))
    program = jax.jit(run).lower(state, x).compile().as_text()
    found = [int(np.prod([int(n) for n in shape.split(",")])) for shape in GATHER.findall(program)]
    return {size for size in found if size >= ROWS * COLUMNS // 8}


@pytest.mark.parametrize("spec", SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda weight: weight.__name__)
def test_training_gathers_no_weight(weight, spec, mesh):
    floating = gathers(nnx.Linear(ROWS, COLUMNS, rngs=nnx.Rngs(0)), mesh, spec, gradient=True)
    layer = QuantLinear(ROWS, COLUMNS, weight_quant=weight, rngs=nnx.Rngs(0))
    assert gathers(layer, mesh, spec, gradient=True) <= floating


class LongerThanShards(q.MXInt8Weight):
    group_size = 128


@pytest.mark.heavy
@pytest.mark.parametrize("spec", [("model", None), ("data", "model")], ids=str)
@pytest.mark.parametrize(
    "weight",
    [CrossingInt8, CrossingZeroPoints, CrossingHQO, CrossingFloats, CrossingRanges, LongerThanShards],
    ids=lambda weight: weight.__name__,
)
def test_training_gathers_no_weight_along_explicit_axes(weight, spec):
    batch = None if "data" in spec else "data"
    explicit = {"gradient": True, "of_x": (batch, spec[0]), "out_sharding": P(batch, spec[1])}
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        metadata = {"out_sharding": spec}
        floating = nnx.Linear(ROWS, COLUMNS, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        layer = QuantLinear(ROWS, COLUMNS, weight_quant=weight, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        assert gathers(layer, mesh, P(*spec), **explicit) <= gathers(floating, mesh, P(*spec), **explicit)
        layer.eval()
        explicit["gradient"] = False
        frozen = jq.freeze(layer)
        assert gathers(frozen, mesh, P(*spec), **explicit) <= gathers(floating, mesh, P(*spec), **explicit)


def of_integers(weight, **metadata):
    return QuantLinear(
        ROWS, COLUMNS, weight_quant=weight, input_quant=q.ShiftedUint8DynamicActPerTensorFloat, contraction="int",
        kernel_metadata=metadata, rngs=nnx.Rngs(0))  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("spec", SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize(
    "weight", [CrossingZeroPoints, CrossingRanges, LongerThanShards], ids=lambda weight: weight.__name__
)
def test_integers_of_a_layer_that_is_not_frozen_are_contracted_where_they_lie(weight, spec, gradient, mesh):
    layer = of_integers(weight)
    expected = call(layer, X)
    floating = gathers(nnx.Linear(ROWS, COLUMNS, rngs=nnx.Rngs(0)), mesh, spec, gradient=gradient)
    assert gathers(layer, mesh, spec, gradient=gradient) <= floating
    graphdef, state = placed(layer, mesh, spec)
    found = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, X)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.heavy
@pytest.mark.parametrize("spec", [("model", None), ("data", "model")], ids=str)
@pytest.mark.parametrize(
    "weight", [CrossingZeroPoints, CrossingRanges, LongerThanShards], ids=lambda weight: weight.__name__
)
def test_integers_of_a_layer_that_is_not_frozen_lie_along_explicit_axes(weight, spec):
    expected = call(of_integers(weight), X)
    batch = None if "data" in spec else "data"
    explicit = {"gradient": True, "of_x": (batch, spec[0]), "out_sharding": P(batch, spec[1])}
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        floating = nnx.Linear(ROWS, COLUMNS, kernel_metadata={"out_sharding": spec}, rngs=nnx.Rngs(0))
        layer = of_integers(weight, out_sharding=spec)
        assert gathers(layer, mesh, P(*spec), **explicit) <= gathers(floating, mesh, P(*spec), **explicit)
        found = call(layer, jax.device_put(X, P(batch, spec[0])), out_sharding=explicit["out_sharding"])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.heavy
def test_an_input_in_groups_meets_a_weight_in_pieces(mesh):
    layer = QuantLinear(
        ROWS, COLUMNS, weight_quant=CrossingRanges, input_quant=q.Int8DynamicActPerGroupFloat, input_group_size=48,
        contraction="int", rngs=nnx.Rngs(0))  # fmt: skip
    expected = layer(X)
    graphdef, state = placed(layer, mesh, P("model", None))
    found = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, X)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


IN, OUT = 96, 32
IMAGES = jax.random.normal(jax.random.key(1), (8, 4, 4, IN))
KERNEL = jnp.round(jax.random.normal(jax.random.key(2), (3, 3, IN, OUT)) * 16) / 16  # whose sums are exact
WINDOWS = {
    "inputs": P(None, None, "model", None),
    "outputs": P(None, None, None, "model"),
    "both": P(None, None, "data", "model"),
}
RANGES = [
    MinMaxRange(),
    RMSRange(),
    AbsMeanRange(),
    AbsMeanRange(count_zeros=True),
    AbsPercentileRange(90.0),
    MSERange(),
]


def groups_of_windows(method, size=40):
    """Groups of input channels of shards of 24, which share a range over the window; the last is filled up."""
    return in_range(
        method, bit_width=8, channelwise_axes=(3,), group_size=size, group_dim=2, group_padding=True
    )


def values_and_gradients(quantizer):
    """Of the kernel: the numbers without groups and the scales; and the gradient of a sum of the numbers."""

    def values(kernel):
        result = quantizer(kernel)
        value = result.value.reshape(3, 3, -1, OUT)[:, :, :IN] if result.value.ndim == 5 else result.value
        return value, result.scale

    return lambda kernel: (*values(kernel), jax.grad(lambda w: jnp.sum(values(w)[0] * KERNEL[::-1]))(kernel))


@pytest.mark.heavy
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("method", RANGES, ids=str)
def test_groups_that_share_a_range_over_a_window_are_reduced_where_they_lie(method, spec, axes):
    run = values_and_gradients(groups_of_windows(method))
    expected = run(KERNEL)  # of one device, in groups of two axes
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axes,) * 2)
    kernel = jax.device_put(KERNEL, NamedSharding(mesh, spec))
    program = jax.jit(run).lower(kernel).compile()
    gathered = [
        int(np.prod([int(n) for n in shape.split(",")])) for shape in GATHER.findall(program.as_text())
    ]
    assert not [size for size in gathered if size >= KERNEL.size // 8]
    value, scale, gradient = program(kernel)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, expected[2], rtol=1e-4, atol=1e-4)
    if scale.ndim == 5:  # along explicit axes there is one for each element
        np.testing.assert_allclose(scale, expected[1], rtol=1e-5)


@pytest.mark.parametrize("spec", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_a_convolution_gathers_no_weight_in_groups(gradient, spec, mesh):
    def program(layer):
        graphdef, state = nnx.split(layer, graph=True)

        def run(state, x):
            layer = nnx.merge(graphdef, state)
            return nnx.grad(lambda m, x: jnp.mean(m(x) ** 2))(layer, x) if gradient else layer(x)

        places = jax.tree.map(lambda x: NamedSharding(mesh, spec if x.ndim == 4 else P()), state)
        x = jax.device_put(IMAGES, NamedSharding(mesh, P("data")))
        return jax.jit(run).lower(jax.device_put(state, places), x).compile().as_text()

    def gathered(layer):
        shapes = GATHER.findall(program(layer))
        sizes = {int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes}
        return {size for size in sizes if size >= KERNEL.size // 8}

    layer = QuantConv(IN, OUT, (3, 3), weight_quant=q.Int4WeightPerGroupAbsMax, rngs=nnx.Rngs(0))
    assert gathered(layer) <= gathered(nnx.Conv(IN, OUT, (3, 3), rngs=nnx.Rngs(0)))


class Percentile(q.Int8WeightPerTensorFloat):
    scaling_stats_op = "percentile"
    high_percentile_q = 99.0


@pytest.mark.parametrize("spec", SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize(
    "weight",
    [
        q.Int8WeightPerTensorFloat,
        q.Int8WeightPerChannelFloat,
        q.Int8WeightPerTensorFloatHQO,
        q.ShiftedUint8WeightPerChannelFloat,
        CrossingInt8,
        Percentile,
    ],
    ids=lambda weight: weight.__name__,
)
def test_layers_that_share_a_quantizer_are_not_joined(weight, spec, mesh):
    def floats(seed):
        return nnx.Linear(ROWS, COLUMNS, rngs=nnx.Rngs(seed))

    first = QuantLinear(ROWS, COLUMNS, weight_quant=weight, rngs=nnx.Rngs(0))
    second = QuantLinear(ROWS, COLUMNS, weight_quant=first.weight_quant, rngs=nnx.Rngs(1))
    floating = gathers(Sum(floats(0), floats(1)), mesh, spec, gradient=True)
    assert gathers(Sum(first, second), mesh, spec, gradient=True) <= floating


FROZEN = {
    "integers": (q.Int8WeightPerChannelFloat, q.Int8ActPerTensorFloat),
    "zero points": (q.Int8WeightPerChannelFloat, q.ShiftedUint8ActPerTensorFloat),
    "groups": (CrossingZeroPoints, q.ShiftedUint8ActPerTensorFloat),
    "groups of minifloats": (CrossingFloats, None),
    "groups of calibrated ranges": (CrossingRanges, None),
}


@pytest.mark.parametrize("spec", SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize("quantizers", FROZEN.values(), ids=FROZEN)
def test_a_frozen_layer_gathers_no_weight(quantizers, spec, mesh):
    weight, act = quantizers

    def frozen(place):
        layer = QuantLinear(
            ROWS, COLUMNS, weight_quant=weight, input_quant=act, contraction="int" if act else "auto",
            rngs=nnx.Rngs(0))  # fmt: skip
        layer.kernel.set_value(jax.device_put(layer.kernel[...], place))
        call(layer, X)
        layer.eval()
        return jq.freeze(layer)

    expected = call(frozen(None), X)
    found = frozen(NamedSharding(mesh, spec))
    np.testing.assert_allclose(call(found, X), expected, rtol=1e-5, atol=2e-6)
    floating = gathers(nnx.Linear(ROWS, COLUMNS, rngs=nnx.Rngs(0)), mesh, spec, gradient=False)
    assert gathers(found, mesh, spec, gradient=False) <= floating


@pytest.mark.heavy
def test_a_frozen_layer_is_exported_by_jax():
    layer = QuantLinear(
        16, 8, weight_quant=q.Int8WeightPerChannelFloat, input_quant=q.Int8ActPerTensorFloat, rngs=nnx.Rngs(0)
    )
    x = X[:, :16]
    layer(x)
    layer.eval()
    frozen = jq.freeze(layer)
    found = jax.export.export(jax.jit(lambda x: frozen(x)))(x)
    assert "tensor<16x8xi32>" in found.mlir_module()
    np.testing.assert_array_equal(found.call(x), jax.jit(lambda x: frozen(x))(x))


@pytest.mark.lengthy
@pytest.mark.parametrize("spec", [("tp", "fsdp"), ("fsdp", "tp"), (None, "tp")], ids=str)
@pytest.mark.parametrize("act", [q.ShiftedUint8ActPerTensorFloat, q.Int8DynamicActPerRowFloat], ids=str)
@pytest.mark.parametrize(
    "weight", [q.Int8WeightPerChannelFloat, q.ShiftedUint8WeightPerChannelFloat], ids=str
)
def test_frozen_on_explicit_axes(weight, act, spec):
    x = X[:8, :32]

    def frozen(**metadata):
        kwargs = {"out_sharding": P("fsdp", "tp")} if metadata else {}
        layer = QuantLinear(
            32, 64, weight_quant=weight, input_quant=act, kernel_metadata=metadata, rngs=nnx.Rngs(0)
        )
        call(layer, x, **kwargs)
        layer.eval()
        return jq.freeze(layer)

    expected = call(frozen(), x)
    with jax.set_mesh(jax.make_mesh((2, 4), ("fsdp", "tp"))):
        y = call(frozen(out_sharding=spec), jax.device_put(x, P("fsdp", None)), out_sharding=P("fsdp", "tp"))
        assert y.sharding.spec == P("fsdp", "tp")
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("size", [48, 64, 128])
def test_a_report_names_groups_that_cross_shards(size, mesh):
    layer = QuantLinear(ROWS, COLUMNS, weight_quant=q.MXInt8Weight, weight_group_size=size, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jax.device_put(layer.kernel[...], NamedSharding(mesh, P("model", None))))
    said = "groups of 48 cross its shards of 64 along axis 0: integers are contracted in pieces of 16"
    assert (said in jq.report(layer, X).layers[0].note) == (size == 48)


TRAINING = [
    q.NVFP4Training,
    q.MXFP8Training,
    q.Fp8CurrentTraining,
    q.Fp8BlockTraining,
    q.Fp8DelayedTraining,
]


def unlike(key, rows, columns):
    """Numbers whose magnitudes differ from shard to shard, so that each has another amax."""
    powers = [jnp.exp2((jnp.arange(size) * 8 // size).astype(jnp.float32)) for size in (rows, columns)]
    return jax.random.normal(jax.random.key(key), (rows, columns)) * jnp.outer(*powers)


@pytest.mark.lengthy
@pytest.mark.parametrize("scheme", TRAINING, ids=lambda scheme: scheme.__name__)
def test_a_training_step_is_the_same_over_several_devices(scheme, mesh):
    """Rows of the batch and both axes of the weight are divided; blocks and tensors cross the shards."""
    x, g = unlike(0, 32, ROWS), unlike(1, 32, COLUMNS)
    layer = QuantLinear(ROWS, COLUMNS, scheme=scheme, rngs=nnx.Rngs(0))
    layer.kernel[...] = unlike(2, ROWS, COLUMNS)
    call(layer, x)

    graphdef, state = nnx.split(layer, graph=True)

    @jax.jit
    def step(state, x, g):
        model = nnx.merge(graphdef, state)

        def loss(model, x):
            y = model(x)
            return jnp.sum(y * g), y

        (_, y), (of_model, dx) = jq.value_and_grad(loss, argnums=(0, 1), has_aux=True)(model, x)
        return (y, dx, of_model.kernel[...]), jax.tree.leaves(nnx.state(model, nnx.Any(QuantStat, GradStat)))

    expected, statistics = step(state, x, g)
    batch = NamedSharding(mesh, P("data"))
    _, shards = placed(layer, mesh, SHARDINGS["both"])
    found, of_shards = step(shards, jax.device_put(x, batch), jax.device_put(g, batch))
    # Numbers of 8 and 4 bits are the same to the bit; the sums of their products come in another order.
    for ours, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=0, atol=1e-6 * float(jnp.abs(whole).max()))
    assert len(statistics) >= (3 if scheme is q.Fp8DelayedTraining else 0)
    for ours, whole in zip(of_shards, statistics, strict=True):
        np.testing.assert_array_equal(ours, whole)
