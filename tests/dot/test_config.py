"""`config_v4` and its kin: the seed's keywords, and every part open to overriding."""

import inspect
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.core import AbsMaxRange, AbsMeanRange, FixedRange
from jqinject.dot import (
    Kept,
    LocalAqt,
    QConvGeneralDilated,
    QDotGeneral,
    QRaggedDot,
    Scheme,
    conv_general_dilated,
    dot_general,
)
from jqinject.inject import Binding
from jqinject.quant import (
    Int8DynamicActPerTensorFloat,
    Int8DynamicGradPerTensorFloat,
    Int8WeightPerTensorFloat,
)
from jqinject.quant.aqt import ConfigV4, OperandInjector, config_v4, fully_quantized
from tests.golden import _driver

MATMUL = (((1,), (0,)), ((), ()))


def assembled(operand, *, axes=None, **given):
    """The quantizer of an operand; `axes` share a scale."""
    overrides = {} if axes is None else {"shared_axes": axes}
    return Binding(operand, overrides).resolve("tensor_quant", **given)


@partial(jax.jit, static_argnames=("config", "numbers"))
def contract(config, *operands, numbers=MATMUL, **given):
    """In one program: operation by operation a contraction compiles some forty."""
    return dot_general(*operands, numbers, config=config, **given)


def test_the_seeds_keywords_and_defaults():
    found = {name: p.default for name, p in inspect.signature(config_v4).parameters.items()}
    assert found == {
        "fwd_bits": 8,
        "dlhs_bits": 8,
        "drhs_bits": None,
        "use_dummy_static_bound": False,
        "rng_type": "jax.uniform",
        "dlhs_local_aqt": None,
        "drhs_local_aqt": None,
        "fwd_accumulator_dtype": jnp.int32,
        "dlhs_accumulator_dtype": jnp.int32,
        "drhs_accumulator_dtype": None,
    }


def test_they_are_those_of_the_reference():
    manifest = json.loads((_driver.HERE / "aqt" / "manifest.json").read_text())
    (case,) = (case for case in manifest["cases"] if case["id"] == "config/signatures")
    ours = {name: str(p.default) for name, p in inspect.signature(config_v4).parameters.items()}
    assert ours == case["json_outputs"]["seed_page_config_v4"]


@pytest.mark.parametrize("bits", [1, 0, -3, 23])
def test_fewer_than_two_bits(bits):
    with pytest.raises(ValueError, match=rf"bits must be from 2 to 22, got {bits}"):
        QDotGeneral(config_v4(fwd_bits=bits))


def test_bits_that_are_none():
    with pytest.raises(TypeError, match=r"q_dtype must be an 8-bit float dtype.*got 'e9m9'"):
        QDotGeneral(config_v4(fwd_bits="e9m9"))
    with pytest.raises(
        ValueError, match=r"rng_type must be one of 'jax.uniform', 'custom-1', 'bits-8' or None, got 'x'"
    ):
        QDotGeneral(config_v4(rng_type="x"))


def test_a_flat_name_reaches_its_operand():
    class Mine(ConfigV4):
        fwd_rhs_bits = 4
        drhs_bits = 6
        vjp_lhs_rng_type = None

    operands = (
        Mine.fprop_lhs,
        Mine.fprop_rhs,
        Mine.dgrad_grad,
        Mine.dgrad_rhs,
        Mine.wgrad_grad,
        Mine.wgrad_lhs,
    )
    assert [operand.bits for operand in operands] == [8, 4, 8, 8, 6, 6]
    assert [operand.rng_type for operand in operands] == [None] * 6
    assert config_v4().dgrad_grad.rng_type == "jax.uniform"


@pytest.mark.heavy
def test_an_operand_can_be_another():
    class Weights(OperandInjector):
        bits = 4
        calibration = AbsMeanRange
        clipping_scale = 3.0

    x, w = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(((3, 8), (8, 5))))
    y = contract(config_v4().let(fprop_rhs=Weights), x, w)
    scale = jnp.maximum(3.0 * jnp.abs(w).mean(0), 0) / 7.5
    rounded = jnp.clip(jnp.round(w / scale), -7, 7) * scale
    np.testing.assert_allclose(
        y, contract(config_v4(fwd_bits=None).let(fwd_lhs_bits=8), x, rounded), atol=1e-5
    )


@pytest.mark.heavy
def test_bits_of_an_operand_of_its_own_count():
    x, w = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(((3, 8), (8, 5))))
    config = config_v4(rng_type=None)

    def weight_gradient(config):
        return jax.grad(lambda w: jnp.sum(contract(config, x, w) ** 2))(w)

    eight = {name: getattr(config, name).let(bits=8) for name in ("drhs_lhs", "drhs_rhs")}
    expected = weight_gradient(config.let(drhs_bits=8))
    np.testing.assert_array_equal(weight_gradient(config.let(**eight)), expected)
    assert jnp.any(expected != weight_gradient(config))
    np.testing.assert_array_equal(
        contract(config.let(fwd_lhs=config.fwd_lhs.let(bits=None)), x, w),
        contract(config.let(fwd_lhs_bits=None), x, w),
    )


@pytest.mark.heavy
def test_overrides_of_an_operand_wait_until_it_has_bits():
    x, w = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(((3, 8), (8, 5))))
    halves = {
        name: getattr(ConfigV4, name).let(preserve_zero=False) for name in ("fwd_lhs", "drhs_lhs", "drhs_rhs")
    }
    for bits in (None, 4):
        config = config_v4(drhs_bits=bits, rng_type=None)
        grads = [
            jax.grad(lambda w, config=config: jnp.sum(contract(config, x, w) ** 2))(w)
            for config in (config.let(**halves), config.let(fwd_lhs=halves["fwd_lhs"]))
        ]
        assert bool(jnp.array_equal(*grads)) == (bits is None)


def test_it_is_explained():
    text = str(jqinject.explain(config_v4(fwd_bits=4).fwd_lhs, name="tensor_quant"))
    assert "RangeScaling" in text
    assert "bit_width" in text


def test_what_is_declared_is_static():
    first, second = (QDotGeneral(config_v4(drhs_bits=4)).scheme for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != QDotGeneral(config_v4()).scheme


def test_a_static_bound_reduces_nothing():
    config = config_v4(use_dummy_static_bound=True, dlhs_bits=None)
    x = jnp.linspace(-2, 2, 12).reshape(3, 4)
    jaxpr = str(jax.make_jaxpr(lambda x: dot_general(x, x.T, MATMUL, config=config))(x))
    assert "reduce_max" not in jaxpr
    assert config.fwd_lhs.calibration == FixedRange(-1.0, 1.0)


def test_a_static_bound_rounds_its_scale_up_to_a_power_of_two():
    x = jnp.ones((2, 3))
    for bound, scale in ((2.5, 2**-5), (127.5 / 4, 2**-2)):
        operand = OperandInjector.let(calibration=FixedRange(-bound, bound), po2_scale=True)
        assert float(assembled(operand, axes=(1,))(x).scale[0, 0]) == scale


def test_float_configurations_are_float():
    x, w = jax.random.normal(jax.random.key(0), (3, 4)), jax.random.normal(jax.random.key(1), (4, 5))
    config = config_v4(fwd_bits=None, dlhs_bits=None)
    for argument in (0, 1):
        ours, theirs = (
            jax.grad(lambda a, b, f=f: jnp.sin(f(a, b)).sum(), argument)(x, w)
            for f in (lambda a, b: dot_general(a, b, MATMUL, config=config), lambda a, b: a @ b)
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_a_mean_that_counts_zeros():
    """Root mean squares of 4 numbers, 2 of them 0, reach to the bound of 2 bits, 1.5."""
    x = jnp.array([[3.0, 0.0, -3.0, 0.0]])
    of_all, of_others = (
        assembled(OperandInjector.let(bits=2, calibration=AbsMeanRange(p=2.0, count_zeros=c)), axes=(1,))(x)
        for c in (True, False)
    )
    np.testing.assert_allclose(of_all.scale, [[np.sqrt(4.5) / 1.5]], rtol=1e-6)
    np.testing.assert_allclose(of_others.scale, [[2.0]], rtol=1e-6)


@pytest.mark.heavy
def test_local_pieces():
    local = config_v4(drhs_bits=8, drhs_local_aqt=LocalAqt(2), rng_type=None)
    x, w = jax.random.normal(jax.random.key(0), (8, 4)), jax.random.normal(jax.random.key(1), (4, 5))
    g = jax.random.normal(jax.random.key(2), (8, 5))
    _, pull = jax.vjp(lambda w: contract(local, x, w), w)
    whole = config_v4(drhs_bits=8, rng_type=None)
    halves = []
    for part in (slice(0, 4), slice(4, 8)):
        _, pull_part = jax.vjp(lambda w, part=part: contract(whole, x[part], w), w)
        halves.append(pull_part(g[part])[0])
    np.testing.assert_allclose(pull(g)[0], halves[0] + halves[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("which", "axis"), [("first", 1), ("last", 2), ("largest", 2)])
def test_which_of_several_axes_is_cut(which, axis):
    x, w = jax.random.normal(jax.random.key(0), (5, 2, 8)), jax.random.normal(jax.random.key(1), (2, 8, 3))
    numbers = (((1, 2), (0, 1)), ((), ()))
    cut = LocalAqt(2, contraction_axis=which)
    tiled, whole = ConfigV4.let(tile_size=cut), config_v4()
    halves = [
        contract(whole, a, b, numbers=numbers)
        for a, b in zip(jnp.split(x, 2, axis), jnp.split(w, 2, axis - 1), strict=True)
    ]
    np.testing.assert_allclose(
        contract(tiled, x, w, numbers=numbers), halves[0] + halves[1], rtol=1e-5, atol=1e-6
    )


def test_an_axis_that_is_not_known():
    with pytest.raises(ValueError, match=r"contraction_axis must be 'first', 'last' or 'largest', got 0"):
        LocalAqt(2, contraction_axis=0)  # pyright: ignore[reportArgumentType]


@pytest.mark.heavy
def test_the_clipped_numbers_of_a_piece_have_no_gradient():
    half = OperandInjector.let(calibration=AbsMaxRange(0.5), clip_gradient=True)
    original = dict(dgrad_rhs=None, wgrad_lhs=None)
    config = Scheme.let(fprop_lhs=half, fprop_rhs=half, tile_size=LocalAqt(2), **original)
    x = jnp.array([[1.0, 0.4, 0.2, -0.05]])  # a piece reaches to 0.5, the other to 0.1
    w = jnp.array([[2.0], [-0.5], [0.25], [1.0]])  # to 1 and to 0.5
    dx, dw = jax.grad(lambda x, w: dot_general(x, w, MATMUL, config=config).sum(), (0, 1))(x, w)
    np.testing.assert_array_equal(dx, [[0.0, -0.5, 0.0, 1.0]])
    np.testing.assert_array_equal(dw, np.float32([[0.0], [0.4], [0.2], [0.0]]))


@pytest.mark.heavy
def test_the_saturated_8_bit_floats_have_no_gradient():
    config = config_v4(fwd_bits="e4m3", dlhs_bits=None).let(clipping_scale=0.5, clip_gradient=True)
    x = jnp.array([[1.0, -0.5, 0.25]])
    dx = jax.grad(lambda x: dot_general(x, jnp.ones((3, 1)), MATMUL, config=config, key=None).sum())(x)
    np.testing.assert_array_equal(dx, [[0.0, 1.0, 1.0]])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"contraction_axis_shard_count": 2, "contraction_axis_shard_size": 2},
        {"contraction_axis_shard_count": 0},
    ],
)
def test_local_pieces_of_nothing(arguments):
    with pytest.raises(ValueError, match=r"LocalAqt takes contraction_axis_shard_count or"):
        LocalAqt(**arguments)


def test_pieces_that_do_not_come_out_even():
    with pytest.raises(ValueError, match=r"length 9 cannot be cut into equal pieces: 2 pieces asked for"):
        LocalAqt(2).count(9)


@pytest.mark.heavy
def test_fully_quantized_reuses_the_forward_pass():
    """The gradient of `x` is that of the payload of `w` and of `g` times its scale, each quantized again."""
    x, w, g = (
        jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(((6, 8), (8, 5), (6, 5)))
    )
    config = fully_quantized(use_stochastic_rounding=False)
    assert (config.dgrad_use_fwd_quant, config.wgrad_use_fwd_quant) == (True, True)
    dx = jax.vjp(lambda x: contract(config, x, w), x)[1](g)[0]
    again = assembled(OperandInjector, axes=(1,))
    made = assembled(OperandInjector, axes=(0,))(w)
    left, right = again(g * made.scale).value, again(jnp.round(made.value / made.scale)).value
    np.testing.assert_allclose(dx, left @ right.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [None, 3, jqinject.ExtendedInjector, dict])
def test_no_configuration(config):
    with pytest.raises(TypeError, match=r"config must be a Scheme, such as config_v4\(\)"):
        QDotGeneral(config)


@pytest.mark.heavy
@pytest.mark.parametrize("rng_type", ["jax.uniform", "custom-1", "bits-8"])
def test_noise_that_is_shared(rng_type):
    shared = OperandInjector.let(rng_type=rng_type, noise_sharing_axes=(1,))
    x = jnp.full((500, 6), 0.3).at[:, 0].set(127.5)  # a scale of 1
    drawn = assembled(shared, axes=(1,), rngs=nnx.Rngs(0))(x).value[:, 1:]
    assert {int(number) for number in drawn.ravel()} == {0, 1}
    assert bool(jnp.all(drawn == drawn[:, :1]))
    assert abs(float(drawn.mean()) - 0.3) < 0.1


@pytest.mark.heavy
def test_axes_of_ones_own():
    """A scale that varies along what is summed over is multiplied in before."""
    config = Scheme.let(fprop_lhs=OperandInjector.let(calibration_axes=(0,)), fprop_rhs=OperandInjector)
    x, w = jax.random.normal(jax.random.key(0), (2, 3, 4)), jnp.eye(4)
    numbers = (((2,), (0,)), ((), ()))
    fprop, *_ = QDotGeneral(config).explain(x, w, numbers)
    assert (fprop.kind, "scales of shape (1, 3, 4) vary along what is summed over" in fprop.why) == (
        "float",
        True,
    )
    rounded = assembled(OperandInjector, axes=(0,))(x).value
    np.testing.assert_allclose(contract(config, x, w, numbers=numbers), rounded * (127 / 127.5), rtol=1e-5)


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        (lambda: config_v4().let(fwd_bit=4), "'fwd_bit' would have no effect.*\n  did you mean 'fwd_bits'"),
        (lambda: config_v4().let(axis_name="b"), "nothing in 'ConfigV4' declares or asks for 'axis_name'"),
        (
            lambda: config_v4(use_dummy_static_bound=True).let(clipping_scale=0.5),
            "'clipping_scale' is read when use_dummy_static_bound = False",
        ),
        (
            lambda: config_v4().let(preserve_zero=False),
            "it is a name of dlhs_lhs and dlhs_rhs|of fwd_lhs and fwd_rhs",
        ),
        (lambda: ConfigV4.let(fwd_bits=4, fwd_lhs_bits=8, fwd_rhs_bits=8), "never reads 'fwd_bits'"),
    ],
)
def test_a_name_that_nothing_reads(declared, told):
    x = jnp.ones((2, 2))
    for use in (lambda: QDotGeneral(declared()), lambda: contract(declared(), x, x)):
        with pytest.raises(TypeError, match=told):
            use()


def test_a_name_of_one_operand_that_nothing_reads():
    x = jnp.ones((2, 2))
    told = {
        r"fwd_lhs.*'bitz'.*\n  did you mean 'bits'|'bitz'.*\n  did you mean 'bits'": {"bitz": 4},
        "'preserve_zeros' would have no effect.*\n  did you mean 'preserve_zero'": {"preserve_zeros": 1},
        "'clip_gradient' is asked for by RangeScaling": {"bits": None, "clip_gradient": True},
    }
    for text, names in told.items():
        with pytest.raises(TypeError, match=text):
            contract(Scheme.let(fprop_lhs=OperandInjector.let(**names)), x, x)
    with pytest.raises(ValueError, match="dequant_mode must be one of 'output', 'this_input', 'other_input'"):
        contract(Scheme.let(fprop_lhs=OperandInjector.let(dequant_mode="never")), x, x)


def test_a_later_name_may_take_the_place_of_an_earlier_one():
    narrow = config_v4(fwd_bits=4, rng_type=None).let(
        fwd_lhs_bits=8, fwd_rhs_bits=8, vjp_lhs_rng_type="custom-1"
    )
    assert narrow.fprop_rhs.bits == 8
    finer = config_v4().let(fwd_lhs=ConfigV4.fwd_lhs.let(preserve_zero=False))
    assert not finer.fprop_lhs.preserve_zero
    QDotGeneral(narrow), QDotGeneral(finer)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint8, "int99", bool])
def test_an_accumulator_that_sums_no_integers(dtype):
    x = jnp.ones((2, 2))
    told = "accumulator_dtype(: integers are summed in a signed integer dtype| must be a dtype of integers)"
    for build in (
        lambda: QDotGeneral(config_v4(fwd_accumulator_dtype=dtype)),
        lambda: QDotGeneral(config_v4(drhs_accumulator_dtype=dtype)),
        lambda: dot_general(x, x, MATMUL, accumulator_dtype=dtype),
    ):
        with pytest.raises(TypeError, match=told):
            build()


def test_arguments_of_another_kind():
    for declared in (config_v4(fwd_bits=4.0), config_v4(drhs_bits=[8])):
        with pytest.raises(TypeError, match="bits must be an int, one of 'e4m3', 'e5m2'"):
            QDotGeneral(declared)
    with pytest.raises(TypeError, match="use_dummy_static_bound must be True or False, got 'no'"):
        contract(config_v4(use_dummy_static_bound="no"), jnp.ones((2, 2)), jnp.ones((2, 2)))
    with pytest.raises(TypeError, match="tile_size must be an int, a LocalAqt or None, got '4'"):
        QDotGeneral(config_v4(dlhs_local_aqt="4"))
    x = jnp.ones((2, 2))
    with pytest.raises(TypeError, match="accumulator_dtype= would have no effect beside config="):
        dot_general(x, x, MATMUL, config=config_v4(), accumulator_dtype=jnp.int32)
    image = x[None, ..., None]
    with pytest.raises(TypeError, match="contraction='int' would have no effect beside config="):
        conv_general_dilated(image, image, (1, 1), "SAME", config=config_v4(), contraction="int")


def test_convolutions_ignore_tiles():
    """So their weights can be frozen."""
    scheme = config_v4(rng_type=None, dlhs_local_aqt=LocalAqt(2)).let(tile_size=2)
    op = QConvGeneralDilated(scheme)
    op.check_freezes()
    with pytest.raises(ValueError, match="cut into pieces"):
        QDotGeneral(scheme).check_freezes()


def _convolution(scheme):
    x, w = (
        jax.random.normal(jax.random.key(0), (2, 5, 5, 3)),
        jax.random.normal(jax.random.key(1), (3, 3, 3, 4)),
    )
    op, numbers = QConvGeneralDilated(scheme), ("NHWC", "HWIO", "NHWC")

    def loss(x, w):
        return jnp.sum(jnp.sin(op(x, w, (1, 1), "SAME", dimension_numbers=numbers)))

    return jax.grad(loss, (0, 1))(x, w)


def _ragged(scheme):
    x, w = jax.random.normal(jax.random.key(0), (6, 8)), jax.random.normal(jax.random.key(1), (2, 8, 4))
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    op, sizes = QRaggedDot(scheme), jnp.array([2, 4])
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(op(x, w, sizes, numbers))), (0, 1))(x, w)


@pytest.mark.heavy
@pytest.mark.parametrize("of", [_convolution, _ragged])
def test_forward_payloads_in_backward_products(of):
    """A payload whose scale goes into the gradient gives the gradients of the dequantized operands."""
    operands = {
        "fprop_lhs": Int8DynamicActPerTensorFloat,
        "fprop_rhs": Int8WeightPerTensorFloat,
        "dgrad_grad": Int8DynamicGradPerTensorFloat,
        "wgrad_grad": Int8DynamicGradPerTensorFloat,
    }
    scheme = Scheme.let(**operands)
    expected = of(scheme)
    folded = {"dgrad_rhs": None, "wgrad_lhs": None, "dgrad_use_fwd_quant": True, "wgrad_use_fwd_quant": True}
    for more in ({"dgrad_rhs": Kept.PAYLOAD, "wgrad_lhs": Kept.PAYLOAD}, folded):
        for found, gradient in zip(of(scheme.let(**more)), expected, strict=True):
            np.testing.assert_allclose(found, gradient, rtol=1e-5, atol=1e-5)
