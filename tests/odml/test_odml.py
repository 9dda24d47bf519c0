"""Fake quantization as devices do it, and programs with the markers that their compilers read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jqinject import Rule, quantize
from jqinject.odml import (
    COMPOSITE_NAME,
    Int4Weight,
    Int8Act,
    Int8DynamicAct,
    Int8Weight,
    Int16Act,
    OdmlConversion,
    OdmlQat,
)
from jqinject.quant import Int8WeightPerChannelFloat
from tests.golden.adapters.qwix_odml import composites

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32))


class Mlp(nnx.Module):
    def __init__(self, act: object = nnx.relu) -> None:
        rngs = nnx.Rngs(0)
        self.fc1, self.fc2 = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.act = act

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(self.act(self.fc1(x)))  # pyright: ignore[reportCallIssue]


def off_ties(model: nnx.Module) -> nnx.Module:
    """The model, whose weights of largest magnitude are positive: -max would be -127.5 steps, a tie."""
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx.Linear):
            kernel = layer.kernel[...]
            largest = jnp.take_along_axis(kernel, jnp.abs(kernel).argmax(0)[None], 0)
            layer.kernel.set_value(kernel * jnp.sign(largest))
    return model


def trained(model: nnx.Module | None = None, qat: OdmlQat | None = None) -> nnx.Module:
    found = (qat or OdmlQat()).quantize(model or Mlp(), X)
    found(X)
    return found


def markers(model: nnx.Module, x: jax.Array = X) -> list[dict[str, object]]:
    graphdef, state = nnx.split(model)
    return composites(jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s)(x))(state, x).jaxpr)  # pyright: ignore


@pytest.mark.heavy
def test_a_contraction_its_bias_and_a_relu_are_one() -> None:
    model = trained()
    names = [name for name in model.op_quant if not name.endswith("_rhs")]  # pyright: ignore
    assert names == ["fc1.dot_general0_lhs", "fc2.dot_general0_lhs", "final_output0"]


@pytest.mark.heavy
def test_conversion_agrees_with_training_and_knows_every_scale() -> None:
    model = trained(off_ties(Mlp()))
    model.eval()
    converted = OdmlConversion().quantize(model, X)
    np.testing.assert_allclose(converted(X), model(X), atol=1e-6)
    found = markers(converted)
    assert [m["name"] for m in found] == [COMPOSITE_NAME] * 5
    weights = [m["attributes"] for m in found if m["attributes"]["narrow_range"]]  # pyright: ignore
    assert [len(w["scale"]) for w in weights] == [8, 3]
    np.testing.assert_allclose(weights[0]["scale"], np.abs(model.fc1.kernel[...]).max(0) / 127.5, rtol=1e-6)  # pyright: ignore


def test_the_provider_goes_through_quantize() -> None:
    model = quantize(Mlp(), OdmlQat(), inputs=X)
    assert "final_output0" in list(model.op_quant)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_constant_is_part_of_a_contraction_where_it_is_added_alone() -> None:
    class Shifted(nnx.Module):
        def __init__(self, shift: object) -> None:
            self.fc = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
            self.shift = shift

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.shift(self.fc(x))  # pyright: ignore[reportCallIssue]

    own = {
        "add": lambda y: y + 0.25,
        "subtract": lambda y: y - 0.25,
        "multiply": lambda y: y * 2.0,
        "truediv": lambda y: y / 2.0,
    }
    for name, shift in own.items():
        sites = [site for site in trained(Shifted(shift)).op_quant if site.startswith(name)]  # pyright: ignore
        assert sites == ([] if name == "add" else [f"{name}0_lhs"])


@pytest.mark.heavy
def test_a_norm_in_linen_is_named_by_its_path() -> None:
    class Normed(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.LayerNorm(name="norm")(linen.Dense(4, name="fc")(x) * x[:, :4])

    def wrapped() -> nnx.Module:
        return nnx.bridge.ToNNX(Normed(), rngs=nnx.Rngs(0)).lazy_init(X)

    assert "norm.norm_op0" in trained(wrapped()).op_quant  # pyright: ignore
    only = OdmlQat(Rule("norm", weight_quant=Int8Weight, output_quant=Int8Act))
    assert "norm.norm_op0" in trained(wrapped(), only).op_quant  # pyright: ignore


@pytest.mark.heavy
def test_dynamic_ranges_have_empty_scales() -> None:
    rule = Rule(weight_quant=Int8Weight, output_quant=Int8DynamicAct)
    model = trained(off_ties(Mlp()), OdmlQat(rule))
    converted = OdmlConversion().quantize(model, X)
    attributes = [m["attributes"] for m in markers(converted)]
    assert [len(a["scale"]) for a in attributes] == [0, 8, 0, 3]  # pyright: ignore
    assert [a["narrow_range"] for a in attributes] == [False, True, False, True]
    np.testing.assert_allclose(converted(X), model(X), atol=1e-6)


def test_fixed_ranges_of_inputs_and_outputs() -> None:
    qat = OdmlQat(fixed_range_for_inputs=(0.0, 1.0), fixed_range_for_outputs=(-3.0, 3.0))
    model = trained(qat=qat)
    model(2 * X)
    average = model.op_quant["fc1.dot_general0_lhs"].tensor_quant.scaling_impl.averaging_impl  # pyright: ignore
    assert (int(average.counter[...]), float(average.sum_of_max[...])) == (1, 1.0)
    found = markers(OdmlConversion().quantize(model, X))
    assert found[0]["attributes"]["scale"] == [pytest.approx(1 / 255)]  # pyright: ignore
    assert "zero_point" not in found[-1]["attributes"]  # pyright: ignore


def test_softmax_and_tanh_have_the_ranges_of_devices() -> None:
    for act, scale, zero in ((nnx.softmax, 1 / 256, -128), (jnp.tanh, 1 / 128, 0)):
        attributes = [m["attributes"] for m in markers(OdmlConversion().quantize(trained(Mlp(act)), X))]
        into_second = attributes[3]
        assert into_second["scale"] == [pytest.approx(scale)]  # pyright: ignore
        assert into_second["zero_point"] == [zero]  # pyright: ignore


@pytest.mark.heavy
@pytest.mark.parametrize(("weight", "bits"), [(Int8Weight, 8), (Int4Weight, 4)])
def test_activations_in_16_bits_have_no_zero_point_and_device_ranges(weight: object, bits: int) -> None:
    rule = Rule(weight_quant=weight, output_quant=Int16Act)
    for act in (nnx.relu, nnx.softmax, jnp.tanh):
        model = trained(off_ties(Mlp(act)), OdmlQat(rule, fixed_range_for_inputs=(0.0, 3.0)))
        model.eval()
        converted = OdmlConversion().quantize(model, X)
        np.testing.assert_allclose(converted(X), model(X), atol=1e-6)
        attributes = [m["attributes"] for m in markers(converted)]
        for own in attributes:
            narrow = own["narrow_range"]  # pyright: ignore
            assert own["dtype"] == (f"i{bits}" if narrow else "i16")  # pyright: ignore
            assert not any(own.get("zero_point", [0]))  # pyright: ignore
        kernel = np.abs(model.fc1.kernel[...]).max(0) / (2 ** (bits - 1) - 0.5)  # pyright: ignore
        np.testing.assert_allclose(attributes[1]["scale"], kernel, rtol=1e-6)  # pyright: ignore
        assert attributes[0]["scale"] == [pytest.approx(3 / 32767.5)]  # pyright: ignore
        if act is not nnx.relu:
            assert attributes[3]["scale"] == [pytest.approx(2.0**-15, rel=1e-6)]  # pyright: ignore


def test_a_weight_of_4_bits_is_clipped_to_7_steps_as_its_mark_says() -> None:
    converted = OdmlConversion().quantize(_ruled(weight_quant=Int4Weight), X)
    (weight, *_) = [marker for marker in converted.op_quant.held.values() if marker.is_weight]
    steps = weight.decomposed(100 * X[:1].repeat(6, 0)[:, :1].repeat(8, 1) * jnp.ones(8)) / np.asarray(
        weight.scale
    )
    assert float(jnp.abs(steps).max()) == pytest.approx(7)


def test_a_factor_has_the_width_of_the_activations() -> None:
    class Halved(Mlp):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x * 0.5)

    model = trained(Halved(), OdmlQat(Rule(weight_quant=Int8Weight, output_quant=Int16Act)))
    marks = [m["attributes"] for m in markers(OdmlConversion().quantize(model, X))]
    (factor,) = [m for m in marks if m["scale"] == [np.float32(0.5 / 32767)]]  # pyright: ignore
    assert factor["dtype"] == "i16"  # pyright: ignore


def test_an_unknown_operation_is_an_error_with_its_path_unless_allowed() -> None:
    with pytest.raises(
        ValueError, match=r"'exp' in the model itself has no quantized form[\s\S]*strict=False"
    ):
        OdmlQat().quantize(Mlp(jnp.exp), X)
    lenient = trained(Mlp(jnp.exp), OdmlQat(strict=False))
    assert "fc2.dot_general0_lhs" in lenient.op_quant  # pyright: ignore


def test_a_rule_by_path_keeps_the_rest_float() -> None:
    model = trained(qat=OdmlQat(Rule("fc1", weight_quant=Int8Weight, output_quant=Int8Act)))
    assert list(model.op_quant) == ["fc1.dot_general0_lhs", "fc1.dot_general0_rhs"]  # pyright: ignore


@pytest.mark.heavy
def test_weights_with_several_axes_of_outputs_are_flattened() -> None:
    layer = nnx.LinearGeneral(6, (2, 4), rngs=nnx.Rngs(0))
    model = trained(layer)
    converted = OdmlConversion().quantize(model, X)
    weight = markers(converted)[1]
    assert (weight["result_shape"], weight["attributes"]["quantization_dimension"]) == ([6, 8], 1)  # pyright: ignore
    np.testing.assert_allclose(converted(X), model(X), atol=1e-6)


def test_several_outputs_and_a_pytree() -> None:
    class Two(nnx.Module):
        def __init__(self) -> None:
            self.fc = nnx.Linear(6, 2, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
            y = self.fc(x)
            return {"a": y, "b": nnx.relu(y)}

    model = OdmlQat().quantize(Two(), X)
    assert set(model(X)) == {"a", "b"}
    assert {"final_output0", "final_output1"} <= set(model.op_quant)


@pytest.mark.heavy
def test_a_converted_model_under_jit_grad_and_vmap() -> None:
    converted = OdmlConversion().quantize(trained(), X)
    expected = converted(X)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(converted, X), expected, atol=1e-6)
    rows = nnx.vmap(lambda m, x: m(x[None])[0], in_axes=(None, 0))(converted, X)
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    gradient = jax.grad(lambda x: converted(x).sum())(X)
    assert float(jnp.abs(gradient).sum()) > 0


def test_markers_survive_lowering() -> None:
    converted = OdmlConversion().quantize(trained(), X)
    graphdef, state = nnx.split(converted)
    text = jax.jit(lambda s, x: nnx.merge(graphdef, s)(x)).lower(state, X).as_text()
    assert text.count(f'stablehlo.composite "{COMPOSITE_NAME}"') == 5


def _nan_weight() -> nnx.Module:
    model = trained()
    model.fc2.kernel[...] = jnp.full((8, 3), jnp.nan)  # pyright: ignore
    return model


EIGHT = Rule(weight_quant=Int8Weight, output_quant=Int8Act)


def _ruled(weight_quant: object = Int8Weight, output_quant: object = Int8Act) -> nnx.Module:
    return trained(qat=OdmlQat(Rule(weight_quant=weight_quant, output_quant=output_quant)))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Mlp, r"was not quantized by OdmlQat[\s\S]*cure: model = OdmlQat"),
        (lambda: OdmlQat().quantize(Mlp(), X), r"fc1.dot_general0_lhs: its statistics were never collected"),
        (_nan_weight, r"fc2.dot_general0_rhs: invalid scale"),
        (
            lambda: _ruled(output_quant=Int8Act.let(bit_width=4)),
            r"fc1.dot_general0_lhs: devices have activations in signed integers of 8 or 16 bits, and the quantizer is "
            r"Int8Act[\s\S]*cure: Int8Weight, Int4Weight, Int8Act, Int16Act or Int8DynamicAct",
        ),
        (
            lambda: _ruled(weight_quant=Int8Weight.let(bit_width=16)),
            r"fc1.dot_general0_rhs: devices have weights in signed integers of 4 or 8 bits, and the quantizer is",
        ),
        (
            lambda: _ruled(output_quant=Int8DynamicAct.let(bit_width=16)),
            r"devices have dynamic activations in signed integers of 8 bits",
        ),
        (
            lambda: _ruled(output_quant=Int8Act.let(bit_width=16)),
            r"fc1.dot_general0_lhs: devices have 16-bit activations without a zero point[\s\S]*cure: Int16Act",
        ),
        (
            lambda: trained(
                qat=OdmlQat([Rule("fc1", weight_quant=Int8Weight, output_quant=Int16Act), EIGHT])
            ),
            r"activations .* of 8 bits and .* of 16 bits; devices have operations on activations of one width",
        ),
    ],
)
def test_what_can_not_be_converted(make: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OdmlConversion().quantize(make(), X)  # pyright: ignore[reportCallIssue]


@pytest.mark.heavy
def test_a_weight_with_two_axes_of_scales_can_not_be_converted() -> None:
    x = X.reshape(4, 2, 3)
    model = OdmlQat().quantize(nnx.LinearGeneral((2, 3), (2, 2), axis=(-2, -1), rngs=nnx.Rngs(0)), x)
    model(x)
    with pytest.raises(ValueError, match=r"one axis of scales[\s\S]*cure: disable_per_channel_weights=True"):
        OdmlConversion().quantize(model, x)


def test_an_einsum_s_weight_with_several_axes_of_outputs_is_flattened_too() -> None:
    model = trained(nnx.Einsum("bi,ijk->bjk", (6, 2, 4), rngs=nnx.Rngs(0)))
    converted = OdmlConversion().quantize(model, X)
    assert markers(converted)[1]["result_shape"] == [6, 8]
    np.testing.assert_allclose(converted(X), model(X), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: OdmlQat(fixed_range_for_inputs=(1.0, 2.0)), ValueError, r"must contain 0"),
        (lambda: OdmlQat(Rule(input_quant=Int8Act)), TypeError, r"not input_quant"),
        (lambda: OdmlQat([]), ValueError, r"no rule was given"),
        (lambda: OdmlQat().quantize(Mlp()), ValueError, r"needs inputs"),
        (lambda: OdmlQat().quantize(lambda x: x, X), TypeError, r"takes an NNX module"),
    ],
)
def test_what_is_refused(make: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()  # pyright: ignore[reportCallIssue]


def test_a_weight_on_a_tie_is_clipped_as_its_mark_says() -> None:
    kernel = jnp.asarray([[-1.0, 1.0], [0.25, -0.25]])
    layer = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel.set_value(kernel)
    x = jnp.eye(2)
    model = OdmlQat(fixed_range_for_inputs=(-1.0, 1.0), fixed_range_for_outputs=(-1.0, 1.0)).quantize(
        layer, x
    )
    converted = OdmlConversion().quantize(model, x)
    (weight,) = [marker for marker in converted.op_quant.held.values() if marker.is_weight]
    # The quotient 1 / 127.5 in float32 lies below the exact one, so that -1 is -127.5 steps or a little more.
    assert weight.decomposed(kernel).min() == np.float32(-127 * np.float32(weight.scale[0]))
    assert weight.decomposed(kernel).max() == np.float32(127 * np.float32(weight.scale[1]))


def test_a_factor_is_marked_and_division_is_by_its_reciprocal() -> None:
    class Scaled(Mlp):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x * 0.5) / jnp.sqrt(16.0)

    model = trained(Scaled())
    converted = OdmlConversion().quantize(model, X)
    scales = [m["attributes"]["scale"] for m in markers(converted)]  # pyright: ignore
    for factor in (0.5, 0.25):
        assert [np.float32(factor / 127)] in [list(np.float32(scale)) for scale in scales]
    model.eval()
    step = max(float(scale[0]) for scale in scales if len(scale) == 1)
    np.testing.assert_allclose(converted(X), model(X), atol=2 * step)


def test_a_constant_over_an_activation_is_no_scaling_of_it() -> None:
    class Divided(Mlp):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x) / 2.0

    class Reciprocal(Mlp):
        def __call__(self, x: jax.Array) -> jax.Array:
            return 2.0 / (super().__call__(x) + 10.0)

    contractions = OdmlQat(Rule(op="dot_general", weight_quant=Int8Weight, output_quant=Int8Act))
    # What a contraction's output is quantized with goes on through a scaling, and through nothing else.
    assert "final_output0" in trained(Divided(), contractions).op_quant  # pyright: ignore
    assert "final_output0" not in trained(Reciprocal(), contractions).op_quant  # pyright: ignore
    model = trained(off_ties(Reciprocal()))
    model.eval()
    np.testing.assert_allclose(OdmlConversion().quantize(model, X)(X), model(X), atol=1e-6)


def test_a_quantizer_of_layers_is_refused_with_the_device_s() -> None:
    with pytest.raises(
        TypeError, match=r"Int8WeightPerChannelFloat quantizes the weights of layers.*\n.*odml.Int8Weight"
    ):
        OdmlQat(Rule(weight_quant=Int8WeightPerChannelFloat, output_quant=Int8Act))
