"""`QDotGeneral`, `QEinsum`, `QConvGeneralDilated` and `Freezer` in Flax's layers."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jqinject
from jqinject.core import SimpleMovingAverage
from jqinject.dot import Freezer, FrozenParam, QConvGeneralDilated, QDotGeneral, QEinsum, QuantMode
from jqinject.dot.schemes.quantized_op import QuantizedOp
from jqinject.inject import Binding
from jqinject.quant import Fp8CurrentTraining, MXFP4Training
from jqinject.quant.aqt import ConfigV4, config_v4

STILL = config_v4(rng_type=None)
X = jax.random.normal(jax.random.key(0), (6, 8))
IMAGES = jax.random.normal(jax.random.key(1), (2, 6, 6, 4))
call = nnx.jit(lambda model, x: model(x))
LAYERS = {
    "linear": lambda op, rngs: nnx.Linear(8, 5, dot_general=op(QDotGeneral), rngs=rngs),
    "general": lambda op, rngs: nnx.LinearGeneral(8, (2, 3), dot_general=op(QDotGeneral), rngs=rngs),
    "einsum": lambda op, rngs: nnx.Einsum("bd,df->bf", (8, 5), einsum_op=op(QEinsum), rngs=rngs),
    "swapped": lambda op, rngs: nnx.Einsum("bd,fd->fb", (5, 8), einsum_op=op(QEinsum), rngs=rngs),
    "conv": lambda op, rngs: nnx.Conv(4, 5, (3, 3), conv_general_dilated=op(QConvGeneralDilated), rngs=rngs),
}


def layer_of(kind, **given):
    given.setdefault("config", STILL)
    layer = LAYERS[kind](lambda cls: cls(given.pop("config"), **given), nnx.Rngs(0))
    return layer, IMAGES if kind == "conv" else X


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("run", [call, lambda model, x: model(x)], ids=["jit", "eager"])
def test_train_convert_and_serve_are_one(kind, run):
    layer, x = layer_of(kind)
    expected = run(layer, x)
    layer.set_attributes(rhs_quant_mode=QuantMode.CONVERT)
    np.testing.assert_array_equal(run(layer, x), expected)
    layer.set_attributes(rhs_quant_mode=QuantMode.SERVE)
    layer.kernel.set_value(jnp.zeros_like(layer.kernel[...]))
    np.testing.assert_array_equal(run(layer, x), expected)


def test_both_sides_can_be_stored():
    op = QDotGeneral(STILL, lhs_quant_mode=QuantMode.CONVERT, rhs_quant_mode=QuantMode.CONVERT)
    numbers = (((1,), (0,)), ((), ()))
    w = jax.random.normal(jax.random.key(3), (8, 5))
    expected = op(X, w, numbers)
    op.lhs_quant_mode = op.rhs_quant_mode = QuantMode.SERVE
    np.testing.assert_array_equal(op(jnp.zeros_like(X), jnp.zeros_like(w), numbers), expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_serve_before_convert(kind):
    layer, x = layer_of(kind, rhs_quant_mode=QuantMode.SERVE)
    with pytest.raises(ValueError, match=r"SERVE before CONVERT.*\n.*jqinject.freeze\(model\)"):
        layer(x)


def test_nothing_to_store():
    layer, x = layer_of("linear", config=config_v4(fwd_bits=None), rhs_quant_mode=QuantMode.CONVERT)
    with pytest.raises(ValueError, match="there is nothing to freeze, as the operand is not quantized"):
        layer(x)


def test_one_module_can_not_store_two_weights():
    op = QDotGeneral(STILL, rhs_quant_mode=QuantMode.CONVERT)
    op(X, jnp.ones((8, 5)), (((1,), (0,)), ((), ())))
    held = op.rhs_freezer.get()
    with pytest.raises(ValueError, match=r"holds int8 numbers of shape \(8, 5\).*given .* \(8, 4\)"):
        op(X, jnp.ones((8, 4)), (((1,), (0,)), ((), ())))
    assert op.rhs_freezer.get() is held


@pytest.mark.parametrize("mode", ["serve", None, 2])
def test_no_mode(mode):
    with pytest.raises(TypeError, match=r"rhs_quant_mode must be QuantMode.TRAIN"):
        QDotGeneral(STILL, rhs_quant_mode=mode)


@pytest.mark.heavy
def test_training_draws_keys_from_its_stream():
    op = QDotGeneral(config_v4(), rngs=nnx.Rngs(0))
    layer = nnx.Linear(8, 5, dot_general=op, rngs=nnx.Rngs(1))
    step = nnx.jit(nnx.grad(lambda m, x: jnp.sin(m(x)).sum(), argnums=1))
    first, second = step(layer, X), step(layer, X)
    assert not np.array_equal(first, second)
    again = nnx.Linear(8, 5, dot_general=QDotGeneral(config_v4(), rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(step(again, X), first)
    bare, x = layer_of("linear", config=config_v4())
    with pytest.raises(ValueError, match=r"rngs=nnx.Rngs"):
        nnx.grad(lambda m: m(x).sum())(bare)


def test_copies():
    layer, x = layer_of("linear", rhs_quant_mode=QuantMode.CONVERT)
    expected = layer(x)
    for other in (nnx.clone(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        other.set_attributes(rhs_quant_mode=QuantMode.SERVE)
        np.testing.assert_array_equal(other(x), expected)


def test_layers_built_alike_share_a_trace():
    count = 0

    @nnx.jit
    def run(model, x):
        nonlocal count
        count += 1
        return model(x)

    for _ in range(3):
        run(layer_of("linear", config=config_v4(rng_type=None))[0], X)
    assert count == 1


@pytest.mark.heavy
def test_stacked_layers_under_scan():
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return nnx.Linear(8, 8, dot_general=QDotGeneral(STILL), rngs=nnx.Rngs(key))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return jnp.tanh(layer(x))

    stack = make(jax.random.split(jax.random.key(0), 3))
    x = X
    for n in range(3):
        single = nnx.Linear(8, 8, dot_general=QDotGeneral(STILL), rngs=nnx.Rngs(0))
        nnx.update(single, jax.tree.map(lambda v, n=n: v[n], nnx.state(stack, nnx.Param)))
        x = jnp.tanh(single(x))
    np.testing.assert_allclose(run(stack, X), x, rtol=1e-6, atol=1e-6)
    gradient = nnx.grad(lambda m: nnx.remat(run)(m, X).sum())(stack)
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(gradient))


# --- Freezer


def test_variables_are_there_from_the_start():
    def make():
        return QDotGeneral(
            STILL,
            rhs_quant_mode=QuantMode.SERVE,
            rhs_freezer={
                "shape": (8, 5),
                "scale_shape": (1, 5),
                "summed": (0,),
                "metadata": {"out_sharding": ("in", "model"), "eager_sharding": False},
            },
        )

    for op in (make(), nnx.eval_shape(make)):
        held = op.rhs_freezer.get()
        value, scale = held.numbers["value"], held.numbers["scale"]
        assert (value.shape, value.dtype) == ((5, 8), jnp.int8)  # what is summed over is stored last
        assert (scale.shape, scale.dtype) == ((1, 5), jnp.float32)
        specs = nnx.get_partition_spec(nnx.state(op))["rhs_freezer"]["value"].get_raw_value()
        assert specs["value"] == jax.sharding.PartitionSpec("model", "in")
        assert specs["scale"] == jax.sharding.PartitionSpec(None, "model")
    converted = QDotGeneral(STILL, rhs_quant_mode=QuantMode.CONVERT)
    expected = converted(X, jnp.ones((8, 5)), (((1,), (0,)), ((), ())))
    op = make()
    nnx.update(op, nnx.state(converted))
    np.testing.assert_array_equal(op(X, jnp.zeros((8, 5)), (((1,), (0,)), ((), ()))), expected)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4, jnp.uint4, jnp.int2, jnp.float8_e4m3fn, jnp.int16])
@pytest.mark.parametrize("summed", [(), (0,), (1, 2)])
def test_what_is_stored_comes_back(dtype, summed):
    payload = (jnp.arange(3 * 4 * 5).reshape(3, 4, 5) % 4 - (0 if dtype == jnp.uint4 else 2)).astype(dtype)
    scale = jnp.full((1, 4, 1), 0.5)
    freezer = Freezer((3, 4, 5), dtype, (1, 4, 1), summed)
    form = freezer.get().form
    freezer.set(FrozenParam.holding({"value": form.stored.stored(payload), "scale": scale}, form))
    np.testing.assert_array_equal(freezer.get()[...], payload.astype(jnp.float32) * 0.5)
    bits = {"int4": 4, "uint4": 4, "int2": 2, "int16": 16}.get(jnp.dtype(dtype).name, 8)
    assert freezer.get().numbers["value"].nbytes <= -(-3 * 4 * 5 * bits // 8) + 12


def test_layers_with_a_freezer_share_a_trace():
    count = 0

    @nnx.jit
    def run(model, x):
        nonlocal count
        count += 1
        return model(x)

    freezer = {"shape": (8, 5), "scale_shape": (1, 5), "summed": (0,), "metadata": {"note": "kernel"}}
    for _ in range(2):
        op = QDotGeneral(STILL, rhs_quant_mode=QuantMode.SERVE, rhs_freezer=freezer)
        run(nnx.Linear(8, 5, dot_general=op, rngs=nnx.Rngs(0)), X)
    assert count == 1


# --- Linen


class Net(linen.Module):
    @linen.compact
    def __call__(self, x, mode=QuantMode.TRAIN):
        freezer = linen.FrozenDict({"shape": (8, 5), "scale_shape": (1, 5), "summed": (0,)})
        op = nnx.bridge.to_linen(
            QDotGeneral, STILL, rhs_quant_mode=mode, rhs_freezer=freezer, skip_rng=True, name="op"
        )
        return linen.Dense(5, dot_general_cls=lambda: op)(x)


def test_linen_models_through_the_bridge():
    variables = Net().init(jax.random.key(0), X)
    expected = Net().apply(variables, X)
    kernel = variables["params"]["Dense_0"]["kernel"]
    numbers = (((1,), (0,)), ((), ()))
    np.testing.assert_allclose(expected, QDotGeneral(STILL)(X, kernel, numbers), rtol=1e-6, atol=1e-6)
    y, stored = Net().apply(variables, X, QuantMode.CONVERT, mutable=True)
    np.testing.assert_array_equal(y, expected)
    gone = {**stored, "params": jax.tree.map(jnp.zeros_like, stored["params"])}
    gone["params"]["Dense_0"]["bias"] = stored["params"]["Dense_0"]["bias"]
    np.testing.assert_array_equal(Net().apply(gone, X, QuantMode.SERVE), expected)


def ranged(kind, **names):
    """A layer whose left operand has a static range, and its input."""
    operand = ConfigV4.fwd_lhs.let(averaging_impl=SimpleMovingAverage)
    layer, x = layer_of(kind, config=STILL.let(fwd_lhs=operand, **names))
    jqinject.initialize(layer, x)
    return layer, x


@pytest.mark.parametrize("kind", LAYERS)
def test_a_static_range_is_averaged_in_training_and_constant_in_evaluation(kind):
    layer, x = ranged(kind)
    twin, _ = layer_of(kind)
    y = call(layer, x)
    np.testing.assert_allclose(y, call(twin, x), atol=0.05)
    op = next(node for _, node in nnx.iter_modules(layer) if isinstance(node, QuantizedOp))
    scaling = op.fprop_lhs.quant.tensor_quant.scaling_impl
    assert float(scaling.averaged_range().high) == pytest.approx(float(jnp.abs(x).max()), rel=1e-6)
    layer.eval()
    clipped = call(layer, 4 * x)
    assert float(jnp.abs(clipped).max()) < float(jnp.abs(4 * y).max())
    assert int(scaling.averaging_impl.counter[...]) == 1


def test_the_gradient_beside_a_static_range_is_that_of_the_float_operands():
    layer, x = ranged("linear", dlhs_bits=None)
    gradient = nnx.jit(nnx.grad(lambda layer, x: layer(x).sum()))(layer, x)
    np.testing.assert_allclose(
        gradient["kernel"][...], jnp.broadcast_to(x.sum(0)[:, None], (8, 5)), rtol=1e-5
    )


RESOLVED = {"aqt": config_v4(), "catalogue": Fp8CurrentTraining, "drawing": MXFP4Training}


@pytest.mark.parametrize("name", RESOLVED)
def test_an_injector_is_resolved_once_for_all_calls_and_traces(name, monkeypatch):
    resolved, own = [], Binding.resolve

    def counted(self, *arguments, **handed):
        resolved.append(arguments)
        return own(self, *arguments, **handed)

    monkeypatch.setattr(Binding, "resolve", counted)
    x, layer = jnp.ones((32, 96)), nnx.Linear(96, 32, rngs=nnx.Rngs(0))
    layer.dot_general = nnx.data(QDotGeneral(RESOLVED[name], rngs=nnx.Rngs(1)))
    layer(x)
    before = len(resolved)
    assert before > 0
    layer(x)
    nnx.jit(nnx.grad(lambda layer, x: layer(x).sum()))(layer, x)
    assert len(resolved) == before
