"""`config_v4` and its kin: the seed's keywords, and every part open to overriding."""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqinject
from jqinject.dot import (
    AbsMaxCalibration,
    AbsMeanCalibration,
    ConfigV4,
    ConstantCalibration,
    ContractionInjector,
    DotGeneralInjector,
    IntNumerics,
    LocalAqt,
    OperandInjector,
    QuantizedDotGeneral,
    config_v4,
    dot_general,
    fully_quantized,
)
from tests.golden import _driver

MATMUL = (((1,), (0,)), ((), ()))


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
        _ = config_v4(fwd_bits=bits).dot_general


def test_bits_that_are_none():
    with pytest.raises(TypeError, match=r"q_dtype must be an 8-bit float dtype.*got 'e9m9'"):
        _ = config_v4(fwd_bits="e9m9").dot_general
    with pytest.raises(
        ValueError, match=r"rng_type must be one of 'jax.uniform', 'custom-1' or None, got 'x'"
    ):
        _ = config_v4(rng_type="x").dot_general


def test_a_flat_name_reaches_its_operand():
    class Mine(ConfigV4):
        fwd_rhs_bits = 4
        drhs_bits = 6
        vjp_lhs_rng_type = None

    general = Mine.dot_general
    found = [
        quantizer.numerics and quantizer.numerics.bits
        for part in (general.fwd, general.dlhs, general.drhs)
        for quantizer in (part.lhs_quantizer, part.rhs_quantizer)
    ]
    assert found == [8, 4, 8, 8, 6, 6]
    assert not general.needs_key
    assert config_v4().dot_general.needs_key


def test_a_whole_part_can_be_another():
    class Weights(OperandInjector):
        bits = 4
        calibration = AbsMeanCalibration
        clipping_scale = 3.0

    class Forward(ContractionInjector):
        rhs = Weights
        accumulator_dtype = jnp.int32

    fwd = config_v4().let(forward=Forward).dot_general.fwd
    assert fwd.rhs_quantizer.numerics == IntNumerics(4)
    assert fwd.rhs_quantizer.calibration == AbsMeanCalibration(clipping_scale=3.0)
    assert fwd.lhs_quantizer.numerics == IntNumerics(8)


def test_it_is_explained():
    text = str(jqinject.explain(config_v4(fwd_bits=4), name="dot_general"))
    assert "AbsMaxCalibration" in text
    assert "IntNumerics" in text


def test_what_is_assembled_is_static():
    first, second = config_v4(drhs_bits=4).dot_general, config_v4(drhs_bits=4).dot_general
    assert first == second
    assert hash(first) == hash(second)
    assert first != config_v4().dot_general


def test_a_static_bound_reduces_nothing():
    config = config_v4(use_dummy_static_bound=True, dlhs_bits=None)
    x = jnp.linspace(-2, 2, 12).reshape(3, 4)
    jaxpr = str(jax.make_jaxpr(lambda x: dot_general(x, x.T, MATMUL, config=config))(x))
    assert "reduce_max" not in jaxpr
    assert config.dot_general.fwd.lhs_quantizer.calibration == ConstantCalibration(1.0)


def test_a_static_bound_rounds_its_scale_up_to_a_power_of_two():
    x = jnp.ones((2, 3))
    for bound, scale in ((2.5, 2**-5), (127.5 / 4, 2**-2)):
        calibration = ConstantCalibration(bound, po2_scale=True)
        assert float(calibration.scale(x, (1,), IntNumerics(8))[0, 0]) == scale


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
    of_all, of_others = (AbsMeanCalibration(p=2.0, count_zeros=c) for c in (True, False))
    np.testing.assert_allclose(of_all.scale(x, (1,), IntNumerics(2)), [[np.sqrt(4.5) / 1.5]], rtol=1e-6)
    np.testing.assert_allclose(of_others.scale(x, (1,), IntNumerics(2)), [[2.0]], rtol=1e-6)


def test_local_pieces():
    general = config_v4(drhs_bits=8, drhs_local_aqt=LocalAqt(2), rng_type=None).dot_general
    x, w = jax.random.normal(jax.random.key(0), (8, 4)), jax.random.normal(jax.random.key(1), (4, 5))
    g = jax.random.normal(jax.random.key(2), (8, 5))
    _, pull = jax.vjp(lambda w: general(x, w, MATMUL), w)
    whole = config_v4(drhs_bits=8, rng_type=None).dot_general
    halves = []
    for part in (slice(0, 4), slice(4, 8)):
        _, pull_part = jax.vjp(lambda w, part=part: whole(x[part], w, MATMUL), w)
        halves.append(pull_part(g[part])[0])
    np.testing.assert_allclose(pull(g)[0], halves[0] + halves[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("which", "axis"), [("first", 1), ("last", 2), ("largest", 2)])
def test_which_of_several_axes_is_cut(which, axis):
    x, w = jax.random.normal(jax.random.key(0), (5, 2, 8)), jax.random.normal(jax.random.key(1), (2, 8, 3))
    numbers = (((1, 2), (0, 1)), ((), ()))
    cut = LocalAqt(2, contraction_axis=which)
    tiled = ConfigV4.let(forward=ContractionInjector.let(local_aqt=cut)).dot_general
    whole = config_v4().dot_general
    halves = [
        whole(a, b, numbers) for a, b in zip(jnp.split(x, 2, axis), jnp.split(w, 2, axis - 1), strict=True)
    ]
    np.testing.assert_allclose(tiled(x, w, numbers), halves[0] + halves[1], rtol=1e-5, atol=1e-6)


def test_an_axis_that_is_not_known():
    with pytest.raises(ValueError, match=r"contraction_axis must be 'first', 'last' or 'largest', got 0"):
        LocalAqt(2, contraction_axis=0)  # pyright: ignore[reportArgumentType]


def test_the_clipped_numbers_of_a_piece_have_no_gradient():
    half = OperandInjector.let(calibration=AbsMaxCalibration(0.5), clip_gradient=True)
    forward = ContractionInjector.let(lhs=half, rhs=half, local_aqt=LocalAqt(2))
    plain = ContractionInjector.let(lhs=OperandInjector.let(bits=None), rhs=OperandInjector.let(bits=None))
    config = DotGeneralInjector.let(forward=forward, backward_lhs=plain, backward_rhs=plain)
    x = jnp.array([[1.0, 0.4, 0.2, -0.05]])  # a piece reaches to 0.5, the other to 0.1
    w = jnp.array([[2.0], [-0.5], [0.25], [1.0]])  # to 1 and to 0.5
    dx, dw = jax.grad(lambda x, w: dot_general(x, w, MATMUL, config=config).sum(), (0, 1))(x, w)
    np.testing.assert_array_equal(dx, [[0.0, -0.5, 0.0, 1.0]])
    np.testing.assert_array_equal(dw, np.float32([[0.0], [0.4], [0.2], [0.0]]))


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
    with pytest.raises(ValueError, match=r"length 9 can't be cut into equal pieces: 2 pieces asked for"):
        LocalAqt(2).count(9)


def test_fully_quantized_reuses_the_forward_pass():
    general = fully_quantized(use_stochastic_rounding=False).dot_general
    assert isinstance(general, QuantizedDotGeneral)
    assert general.dlhs.rhs_quantizer.use_fwd_quant
    assert not general.needs_key


@pytest.mark.parametrize("config", [None, 3, jqinject.ExtendedInjector, dict])
def test_no_configuration(config):
    from jqinject.dot.tensors.jax_functions import assembled

    with pytest.raises(TypeError, match="config must be an injector that assembles a `dot_general`"):
        assembled(config)


@pytest.mark.parametrize("rng_type", ["jax.uniform", "custom-1"])
def test_noise_that_is_shared(rng_type):
    shared = OperandInjector.let(rng_type=rng_type, noise_sharing_axes=(1,)).quantizer
    x = jnp.full((500, 6), 0.3).at[:, 0].set(127.5)  # a scale of 1
    drawn = shared.quantize(x, (1,), jax.random.key(0)).payload[:, 1:]
    assert {int(number) for number in drawn.ravel()} == {0, 1}
    assert bool(jnp.all(drawn == drawn[:, :1]))
    assert abs(float(drawn.mean()) - 0.3) < 0.1


def test_axes_of_ones_own():
    quantizer = OperandInjector.let(calibration_axes=(0,)).quantizer
    config = ConfigV4.let(rng_type=None)
    general = config.dot_general
    x = jax.random.normal(jax.random.key(0), (2, 3, 4))
    fwd = general.fwd
    mine = QuantizedDotGeneral(fwd=type(fwd)(quantizer, fwd.rhs_quantizer))
    numbers = (((2,), (0,)), ((), ()))
    left, _ = mine.forward_operands(x, jnp.ones((4, 5)), numbers)
    assert left.scale.shape == (1, 3, 4)
    with pytest.raises(ValueError, match="varies along an axis that is summed over"):
        mine(x, jnp.ones((4, 5)), numbers)


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        (lambda: config_v4().let(fwd_bit=4), "'fwd_bit' would have no effect.*\n  did you mean 'fwd_bits'"),
        (lambda: config_v4().let(axis_name="b"), "nothing in 'ConfigV4' declares or asks for 'axis_name'"),
        (
            lambda: config_v4(use_dummy_static_bound=True).let(clipping_scale=0.5),
            "'clipping_scale' is read when use_dummy_static_bound = False",
        ),
        (lambda: config_v4().let(preserve_zero=False), "it is a name of forward.lhs and forward.rhs"),
        (
            lambda: ConfigV4.let(forward=ConfigV4.forward.let(tile=4)),
            r"ConfigV4.forward.let\(...\): 'tile' would have no effect",
        ),
        (
            lambda: ConfigV4.let(
                forward=ConfigV4.forward.let(lhs=ConfigV4.forward.lhs.let(preserve_zeros=1))
            ),
            r"ConfigV4.forward.lhs.let\(...\): 'preserve_zeros' would have no effect.*\n  did you mean 'preserve_zero'",
        ),
        (lambda: ConfigV4.let(fwd_bits=4, fwd_lhs_bits=8, fwd_rhs_bits=8), "never reads 'fwd_bits'"),
    ],
)
def test_a_name_that_nothing_reads(declared, told):
    from jqinject.dot import QDotGeneral

    x = jnp.ones((2, 2))
    for use in (
        lambda: declared().dot_general,
        lambda: QDotGeneral(declared()),
        lambda: dot_general(x, x, MATMUL, config=declared()),
    ):
        with pytest.raises(TypeError, match=told):
            use()


def test_a_name_of_one_contraction_or_operand_that_nothing_reads():
    with pytest.raises(TypeError, match=r"OperandInjector.let\(...\): 'bitz'.*\n  did you mean 'bits'"):
        _ = OperandInjector.let(bitz=4).quantizer
    with pytest.raises(TypeError, match="'clip_gradient' is asked for by Float8Numerics or IntNumerics"):
        _ = OperandInjector.let(bits=None, clip_gradient=True).quantizer
    with pytest.raises(TypeError, match=r"ContractionInjector.let\(...\): 'accumulator'.*\n  did you mean"):
        _ = ContractionInjector.let(accumulator=jnp.int32).contraction


def test_a_later_name_may_take_the_place_of_an_earlier_one():
    narrow = config_v4(fwd_bits=4, rng_type=None).let(
        fwd_lhs_bits=8, fwd_rhs_bits=8, vjp_lhs_rng_type="custom-1"
    )
    assert narrow.dot_general.fwd.rhs_quantizer.numerics.bits == 8
    lhs = ConfigV4.forward.lhs.let(preserve_zero=False)
    finer = config_v4().let(forward=ConfigV4.forward.let(lhs=lhs))
    assert not finer.dot_general.fwd.lhs_quantizer.numerics.preserve_zero


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint8, "int99", bool])
def test_an_accumulator_that_sums_no_integers(dtype):
    x = jnp.ones((2, 2))
    told = "accumulator_dtype: integers are summed in a signed integer dtype"
    for build in (
        lambda: config_v4(fwd_accumulator_dtype=dtype).dot_general,
        lambda: config_v4(drhs_accumulator_dtype=dtype).dot_general,
        lambda: ContractionInjector.let(accumulator_dtype=dtype).contraction,
        lambda: dot_general(x, x, MATMUL, accumulator_dtype=dtype),
    ):
        with pytest.raises(TypeError, match=told):
            build()


def test_arguments_of_another_kind():
    for declared in (config_v4(fwd_bits=4.0), config_v4(drhs_bits=[8])):
        with pytest.raises(TypeError, match="bits must be an int, one of 'e4m3', 'e5m2'"):
            _ = declared.dot_general
    with pytest.raises(TypeError, match="use_dummy_static_bound must be True or False, got 'no'"):
        _ = config_v4(use_dummy_static_bound="no").dot_general
    with pytest.raises(TypeError, match="local_aqt must be of type LocalAqt, got 4"):
        _ = config_v4(dlhs_local_aqt=4).dot_general
    with pytest.raises(TypeError, match="fwd must be a Contraction, got 4"):
        QuantizedDotGeneral(fwd=4)  # pyright: ignore[reportArgumentType]
    x = jnp.ones((2, 2))
    with pytest.raises(TypeError, match="accumulator_dtype= would have no effect beside config="):
        dot_general(x, x, MATMUL, config=config_v4(), accumulator_dtype=jnp.int32)
