"""A parameter that a model contracts by itself has the numbers that the layer of Flax has for the same rule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jqinject
from jqinject import Rule, freeze, quantize
from jqinject import quant as q

D, F = 256, 8
X = jax.random.normal(jax.random.key(1), (6, D))
IMAGE = jax.random.normal(jax.random.key(2), (2, 7, 7, 4))
IDS = jnp.array([[1, 5], [0, 31]])
KEY = jax.random.key(0)
NHWC = ("NHWC", "HWIO", "NHWC")


class Learned(q.Int8WeightPerTensorFloat):
    scaling_impl_type = "parameter_from_stats"


class LearnedRounding(q.Int8WeightPerChannelFloat):
    float_to_int_impl_type = "learned_round"
    learned_round_impl_type = "hard_sigmoid"


class Groups128(q.Int4WeightPerGroupAbsMax):
    group_size = 128


FP8 = {
    "weight_quant": q.Fp8e4m3WeightPerTensorDelayed,
    "input_quant": q.Fp8e4m3ActPerTensorDelayed,
    "grad_quant": q.Fp8e5m2GradPerTensorDelayed,
}
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"weight_quant": q.Int8WeightPerChannelFloat, "input_quant": q.Int8ActPerTensorFloat},
    "int8 weights": {"weight_quant": q.Int8WeightPerChannelFloat},
    "shifted": {
        "weight_quant": q.ShiftedUint8WeightPerChannelFloat,
        "input_quant": q.ShiftedUint8ActPerTensorFloat,
    },
    "rows": {"weight_quant": q.Int8WeightPerChannelFloat, "input_quant": q.Int8DynamicActPerRowAbsMax},
    "learned": {"weight_quant": Learned, "input_quant": q.Int8ActPerTensorFloat},
    "learned rounding": {"weight_quant": LearnedRounding},
    "zero points between integers": {
        "weight_quant": q.ShiftedUint8WeightPerChannelFloatHQO,
        "input_quant": q.Int8ActPerTensorFloat,
    },
    "groups": {"weight_quant": q.Int4WeightPerGroupAbsMax},
    "groups of 128": {"weight_quant": Groups128, "input_quant": q.Int8ActPerTensorFloat},
    "mx": {"weight_quant": q.MXFloat4e2m1Weight, "input_quant": q.MXFloat4e2m1Act},
    "nvfp4": {"weight_quant": q.NVFP4Weight},
    "nf4": {"weight_quant": q.NF4WeightPerGroupFloat},
    "fp8": FP8,
    "fp8 minifloats": {
        "weight_quant": q.Fp8e4m3OCPWeightPerChannelFloat,
        "input_quant": q.Fp8e4m3OCPActPerTensorFloat,
    },
    "in floats": {
        "weight_quant": q.Int8WeightPerChannelFloat,
        "input_quant": q.Int8ActPerTensorFloat,
        "contraction": "float",
    },
    "in integers": {
        "weight_quant": q.Int8WeightPerChannelFloat,
        "input_quant": q.Int8ActPerTensorFloat,
        "contraction": "int",
    },
}


class Layer(nnx.Module):
    """A layer of Flax, quantized by its class."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)

    @property
    def weight(self) -> Any:
        return self.layer.kernel


class Bare(nnx.Module):
    """The same parameter, contracted by the model itself."""

    def __init__(self, w: Any, call: Any) -> None:
        self.w = nnx.Param(w)
        self.call = call

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.call(x, self.w[...])

    @property
    def weight(self) -> Any:
        return self.w


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=NHWC)


def grouped_conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=NHWC, feature_group_count=2)


def pair(kind: str) -> tuple[Layer, Bare, jax.Array]:
    """A layer, the same without it, and an input."""
    rngs = nnx.Rngs(0)
    if kind == "linear":
        layer, call, x = nnx.Linear(D, F, use_bias=False, rngs=rngs), lambda x, w: x @ w, X
    elif kind == "einsum":
        x = X.reshape(3, 2, D)
        equation = "btd,dnh->btnh"
        layer = nnx.Einsum(equation, (D, 2, 4), rngs=rngs)
        call = lambda x, w: jnp.einsum(equation, x, w)  # noqa: E731
    elif kind == "conv":
        layer, call, x = nnx.Conv(4, 6, (3, 3), 2, use_bias=False, rngs=rngs), conv, IMAGE
    else:
        layer = nnx.Conv(4, 6, (3, 3), padding="VALID", feature_group_count=2, use_bias=False, rngs=rngs)
        call, x = grouped_conv, IMAGE
    return Layer(layer), Bare(layer.kernel[...], call), x


def measured(model: Any, x: jax.Array) -> dict[str, Any]:
    """Outputs and gradients of a model, trained, in evaluation and frozen; and what its frozen program contracts."""

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return (model(x) ** 2).sum()

    found: dict[str, Any] = {}
    step = nnx.jit(lambda model, x: model(x))
    gradient = nnx.jit(jqinject.grad(loss))
    found["step 0"], gradients = step(model, x), gradient(model, x)
    found["step 1"], gradients = step(model, x), gradient(model, x)
    found["gradient"] = gradients["layer"]["kernel"][...] if "layer" in gradients else gradients["w"][...]
    model.eval()
    found["evaluation"] = step(model, x)
    freeze(model)
    found["frozen"] = step(model, x)
    weight = model.weight
    found["weight"] = weight[...]
    graphdef, state = nnx.split(model, graph=True)
    program = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)
    found["contracted"] = contracted_dtypes(program.jaxpr)
    return found


def contracted_dtypes(jaxpr: Any) -> list[tuple[str, ...]]:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            found.append(tuple(sorted(x.aval.dtype.name for x in eqn.invars)))
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found += contracted_dtypes(getattr(inner, "jaxpr", inner))
    return found


CASES = [
    *(("linear", form) for form in FORMATS),
    *(("einsum", form) for form in ("int8", "groups of 128", "fp8", "nf4", "shifted")),
    *(("conv", form) for form in ("int8", "nf4", "fp8")),
    ("grouped conv", "int8"),
]


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_numbers_are_those_of_the_layer(kind: str, form: str) -> None:
    layer, bare, x = pair(kind)
    rule = Rule(**FORMATS[form])
    wanted = measured(quantize(layer, rule, inputs=x), x)
    found = measured(quantize(bare, rule, inputs=x), x)
    for name in wanted:
        if isinstance(wanted[name], jax.Array):
            # Frozen, floats are summed in the order that XLA likes for the layout in which they are stored; integers
            # have one sum, which a convolution scales in another order.
            exact = name != "frozen" or (kind != "conv" and set(wanted["contracted"]) == {("int8", "int8")})
            rtol, atol = (0, 0) if exact else (1e-5, 1e-5)
            np.testing.assert_allclose(found[name], wanted[name], rtol=rtol, atol=atol, err_msg=name)
        else:
            assert found[name] == wanted[name], name


@pytest.mark.heavy
def test_a_shifted_kernel_is_convolved_in_integers() -> None:
    _, model, x = pair("conv")
    rule = Rule(**FORMATS["shifted"])
    found = measured(quantize(model, rule, inputs=x), x)
    assert set(found["contracted"]) == {("int8", "int8")}
    np.testing.assert_allclose(found["frozen"], found["evaluation"], rtol=1e-5, atol=1e-5)


class Groups16(q.NF4WeightPerGroupFloat):
    group_size = 16


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", [q.Int8WeightPerChannelFloat, Groups16, q.NVFP4Weight])
def test_a_table_that_is_also_the_head_is_that_of_the_embedding(quantizer: Any) -> None:
    """Rows are looked up, and contracted behind a cast and a transpose."""
    embed = nnx.Embed(32, D, rngs=nnx.Rngs(0))

    def call(ids: jax.Array, w: jax.Array) -> jax.Array:
        x = w[ids].astype(jnp.bfloat16)
        return x @ w.astype(jnp.bfloat16).T

    bare: Any = quantize(Bare(embed.embedding[...], call), Rule(weight_quant=quantizer), inputs=IDS)
    layer: Any = quantize(_Looked(embed), Rule(weight_quant=quantizer), inputs=IDS)
    wanted = layer.embed.quant_weight().value
    np.testing.assert_array_equal(bare.op_quant["w"](bare.w[...]).value, wanted)
    expected = call(IDS, wanted)
    np.testing.assert_array_equal(bare(IDS), expected)
    frozen = freeze(bare)
    np.testing.assert_array_equal(frozen.w[...], wanted)
    np.testing.assert_allclose(
        np.asarray(frozen(IDS), np.float32), np.asarray(expected, np.float32), rtol=1e-2, atol=1e-2
    )


class _Looked(nnx.Module):
    def __init__(self, embed: nnx.Embed) -> None:
        self.embed = embed

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.embed(ids)


@pytest.mark.heavy
@pytest.mark.parametrize("form", ["int8", "groups", "nf4"])
def test_modules_of_linen_are_quantized_through_the_bridge(form: str) -> None:
    linear = nnx.Linear(D, F, use_bias=False, rngs=nnx.Rngs(0))
    model: Any = nnx.bridge.ToNNX(linen.Dense(F, use_bias=False), rngs=nnx.Rngs(0)).lazy_init(X)
    model.kernel.set_value(linear.kernel[...])
    wanted = measured(quantize(Layer(linear), Rule(**FORMATS[form]), inputs=X), X)
    model = quantize(model, Rule(**FORMATS[form]), inputs=X)
    step = nnx.jit(lambda model, x: model(x))
    np.testing.assert_array_equal(step(model, X), wanted["step 0"])
    step(model, X)
    model.eval()
    np.testing.assert_array_equal(step(model, X), wanted["evaluation"])
    np.testing.assert_allclose(step(freeze(model), X), wanted["frozen"], rtol=1e-5, atol=1e-5)


class Heads(nnx.Module):
    """An output projection that the model contracts by itself, over heads and their features."""

    def __init__(self, features: int) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), (4, features, 8)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("bhd,hdo->bo", x, self.w.get_value())


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("features", "size", "said"), [(16, 16, "groups of 16,"), (48, 32, "the last group of each row has 16,")]
)
@pytest.mark.parametrize("is_layer", [True, False])
def test_groups_that_end_with_an_axis_are_told_with_their_size(
    features: int, size: int, said: str, is_layer: bool
) -> None:
    x = jnp.ones((2, 4, features))
    model = (
        nnx.LinearGeneral((4, features), 8, axis=(-2, -1), rngs=nnx.Rngs(0)) if is_layer else Heads(features)
    )
    with pytest.warns(UserWarning, match=f"MXFloat4e2m1Weight declares groups of 32, and axis 1 .* {said}"):
        found = quantize(model, Rule(weight_quant=q.MXFloat4e2m1Weight), inputs=(x,))
    assert f"float4_e2m1fn in groups of {size}" in str(jqinject.coverage(found, x))
    assert f"float4_e2m1fn in groups of {size}" in str(jqinject.coverage(freeze(found), x))
