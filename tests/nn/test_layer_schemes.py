"""`scheme=` of layers: as a rule does to Flax's; what is refused at construction; schemes that begin later."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule
from jqinject.dot import Kept, QDotGeneral, Scheme, dot_general
from jqinject.nn import QuantConv, QuantEinsum, QuantLinear, QuantLinearGeneral
from jqinject.quant import (
    Fp8DelayedTraining,
    Int8DynamicActPerRowAbsMax,
    Int8WeightPerChannelAbsMax,
    Int8WeightPerTensorFloat,
    MXFP4Training,
    MXFP4TrainingAct,
    MXFP8Training,
    MXFP8TrainingAct,
    NVFP4Training,
    Quartet,
)
from jqinject.quant.aqt import config_v4

X = jax.random.normal(jax.random.key(0), (4, 32, 64))
W8A8 = Scheme.let(fprop_lhs=Int8DynamicActPerRowAbsMax, fprop_rhs=Int8WeightPerChannelAbsMax)
NEAREST = MXFP4Training.let(dgrad_grad=MXFP4TrainingAct, wgrad_grad=MXFP4TrainingAct)
LAYERS = {
    "linear": (QuantLinear, nnx.Linear, (64, 32)),
    "general": (QuantLinearGeneral, nnx.LinearGeneral, (64, (2, 16))),
    "einsum": (QuantEinsum, nnx.Einsum, ("bti,io->bto", (64, 32))),
    "conv": (QuantConv, nnx.Conv, (64, 32, (3,))),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_contracts_as_flax_does_by_a_rule_and_is_frozen_alike(name):
    ours, of_flax, arguments = LAYERS[name]
    layer = nnx.Sequential(ours(*arguments, scheme=W8A8, rngs=nnx.Rngs(0)))
    twin = jqinject.quantize(nnx.Sequential(of_flax(*arguments, rngs=nnx.Rngs(0))), Rule(scheme=W8A8))
    y = layer(X)
    np.testing.assert_array_equal(y, twin(X))
    frozen = jqinject.freeze(layer)
    assert frozen.layers[0].kernel.get_raw_value()["value"].dtype == jnp.int8
    np.testing.assert_allclose(frozen(X), y, rtol=1e-5, atol=1e-5)


def linear(features, scheme, outputs=32):
    return lambda: QuantLinear(features, outputs, scheme=scheme, rngs=nnx.Rngs(0))


def by_rule(scheme, rngs=None, outputs=32):
    model = nnx.Sequential(nnx.Linear(64, outputs, rngs=nnx.Rngs(0)))
    return lambda: jqinject.quantize(model, Rule(scheme=scheme), rngs=rngs)


UNPADDED = MXFP8Training.let(fprop_lhs=MXFP8TrainingAct.let(group_padding=False))
LATE = MXFP4Training.let(quant_delay_steps=2, before=MXFP8Training)
REFUSED = {
    "inputs": (linear(20, Quartet), ValueError, r"Quartet.fprop_lhs: .*blocks of 32, .* the 20 inputs"),
    "outputs": (
        linear(64, Quartet, 20),
        ValueError,
        r"Quartet.dgrad_grad: .*blocks of 32, .* the 20 outputs",
    ),
    "by rule": (
        by_rule(Quartet, nnx.Rngs(0), 20),
        ValueError,
        r"Linear: Quartet.dgrad_grad: .* the 20 outputs",
    ),
    "padding": (
        linear(48, UNPADDED),
        ValueError,
        "groups of 32 without group_padding do not fill the 48 inputs",
    ),
    "payload": (
        linear(64, MXFP8Training.let(wgrad_lhs=Kept.PAYLOAD)),
        ValueError,
        "wgrad_lhs asks for the payload",
    ),
    "rounding": (
        by_rule(NVFP4Training),
        ValueError,
        r"NVFP4Training.wgrad_grad draws random .* there are no rngs",
    ),
    "rounding later": (
        by_rule(LATE),
        ValueError,
        r"MXFP4Training.wgrad_grad draws random .* there are no rngs",
    ),
    "int8": (by_rule(config_v4()), ValueError, r"dgrad_grad draws random numbers"),
    "conv": (
        lambda: QuantConv(32, 32, (3,), scheme=Quartet, rngs=nnx.Rngs(0)),
        TypeError,
        "a convolution sums over windows",
    ),
    "rows": (
        lambda: linear(64, Quartet)()(X[0, :5]),
        ValueError,
        "fill the 5 numbers that the product sums over",
    ),
    "before": (
        linear(64, LATE.let(quant_delay_steps=0)),
        ValueError,
        "before = MXFP8Training would make no call",
    ),
    "no scheme": (linear(64, LATE.let(before=MXFP4TrainingAct)), TypeError, "before takes a Scheme"),
    "twice": (linear(64, LATE.let(before=LATE)), TypeError, "a scheme is switched once"),
    "state": (
        lambda: linear(64, Fp8DelayedTraining.let(quant_delay_steps=3))()(X[0]),
        TypeError,
        "keeps state, which a scheme that is switched does not",
    ),
    "function": (
        lambda: dot_general(X[0], X[0].T, (((1,), (0,)), ((), ())), config=LATE),
        TypeError,
        "counts calls .quant_delay_steps., which a function cannot",
    ),
    "frozen": (
        lambda: jqinject.freeze(linear(64, LATE)()),
        ValueError,
        "begins in 2 calls in training .* trained for another scheme",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name_with_a_cure(name):
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message) as caught:
        make()
    assert "cure:" in str(caught.value)


@pytest.mark.lengthy
@pytest.mark.parametrize("before", [MXFP8Training, None], ids=["8 bits", "float"])
def test_a_switched_scheme_has_the_bits_of_each_alone_in_one_program(before):
    x, traces = X[0], []
    schemes = [Scheme if before is None else before, NEAREST, NEAREST.let(quant_delay_steps=2, before=before)]
    first, then, both = (QuantLinear(64, 32, scheme=scheme, rngs=nnx.Rngs(0)) for scheme in schemes)

    @nnx.jit
    def step(layer, x):
        traces.append(1)
        loss = nnx.remat(lambda layer, x: (layer(x) ** 2).sum())
        return nnx.value_and_grad(loss, argnums=(0, 1))(layer, x)

    alone = [jax.tree.leaves(step(layer, x)) for layer in (first, then)]
    both.eval()
    both(x)  # counts nothing
    both.train()
    for call in range(4):
        for found, wanted in zip(jax.tree.leaves(step(both, x)), alone[call > 1], strict=True):
            np.testing.assert_array_equal(found, wanted)
    assert len(traces) == 3 and int(both.dot_general.countdown[...]) == 0


@pytest.mark.heavy
def test_a_switched_scheme_says_so():
    assert "the first 2 calls in training are made by MXFP8Training" in str(jqinject.explain(LATE))
    late = Scheme.let(quant_delay_steps=7)
    assert "the first 7 calls in training are made in float" in str(jqinject.explain(late))
    op = QDotGeneral(LATE, rngs=nnx.Rngs(0))
    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 64), (64, 32)))
    found = op.explain(*shapes, (((1,), (0,)), ((), ())))
    assert "e4m3" in str(found.first) and "e2m1" in found[0].operands[0]
    assert str(found).startswith("the first 2 calls in training:\nfprop: float8_e4m3fn")
    report = jqinject.report(nnx.Sequential(linear(64, LATE)()), X[0])
    assert "by MXFP8Training in its first 2 calls in training, then by MXFP4Training" in " ".join(
        str(report).split()
    )


@pytest.mark.parametrize("name", LAYERS)
def test_the_default_quantizer_of_a_weight_is_refused_where_it_was_asked_for(name):
    layer, _, arguments = LAYERS[name]
    with pytest.raises(
        ValueError, match="quantizes weights, inputs and gradients by itself, got weight_quant too"
    ):
        layer(*arguments, weight_quant=Int8WeightPerTensorFloat, scheme=W8A8, rngs=nnx.Rngs(0))
    assert layer(*arguments, rngs=nnx.Rngs(0)).weight_quant.binding.base is Int8WeightPerTensorFloat
