"""Frozen parameters that a model contracts by itself, and layers that sum over heads: floats times what is stored."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
import jqinject.quant as q
from jqinject import Rule
from jqinject.nn import QuantLinearGeneral

WIDE = 128


class Contracts(nnx.Module):
    """Contracts a parameter whose summed axis is last, behind moves."""

    def __init__(self, contract, *shape):
        self.weight = nnx.Param(jax.random.normal(jax.random.key(0), shape) * WIDE**-0.5)
        self.contract = contract

    def __call__(self, x):
        return self.contract(x, self.weight)


def tied(x, table):
    """Logits, and the embeddings of the largest."""
    logits = x @ table[...].T
    return jnp.concatenate([logits, table[jnp.argmax(logits, axis=-1)]], axis=-1)


def scanned(x, stack):
    """A matrix after the other."""
    return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, stack[...])[0]


def turned(x, stack):
    """The same, each matrix turned."""
    return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w.T), None), x, stack[...])[0]


def indexed(x, stack):
    """A matrix after the other, by number: before it is dequantized, after that, and in a loop."""
    y = jnp.tanh(jnp.tanh(x @ stack[1]) @ stack[...][-1])
    return jax.lax.fori_loop(0, 2, lambda at, y: jnp.tanh(y @ stack[at]), y)


PLACES = {
    "rows": (lambda x, w: jnp.einsum("bd,od->bo", x, w[...]), (9, WIDE)),
    "heads": (lambda x, w: jnp.einsum("bd,nhd->bhn", x, w[...]), (3, 5, WIDE)),
    "on the left": (lambda x, w: jnp.einsum("nhd,bd->nbh", w[...], x), (3, 5, WIDE)),
    "turned": (lambda x, w: jnp.tensordot(x, w[...].transpose(2, 1, 0), 1), (3, 5, WIDE)),
    "cast": (lambda x, w: x.astype(jnp.bfloat16) @ w[...].astype(jnp.bfloat16).T, (9, WIDE)),
    "tied": (tied, (9, WIDE)),
    "stack": (turned, (3, WIDE, WIDE)),
}
WEIGHTS = {
    "int8": {"weight_quant": q.Int8WeightPerChannelFloat},
    "NF4": {"weight_quant": q.NF4WeightPerGroupFloat, "weight_group_size": 64},
    "zero points": {"weight_quant": q.ShiftedUint8WeightGroupQuantFloat, "weight_group_size": 64},
}


def frozen(model, rule, x):
    model = jqinject.freeze(jqinject.quantize(model, [rule], inputs=x))
    model.eval()
    return model


def compare(both, model, x, near):
    """Output and gradient of the input, by the kernels and without; how many kernels there are."""

    def call(x):
        y, pull = jax.vjp(model, x)
        return y, pull(jnp.cos(y))[0]

    calls, with_kernel, without = both(call, x)
    for got, wanted in zip(with_kernel, without, strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(wanted, np.float32), **near)
    return calls


@pytest.mark.heavy
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_parameters_are_contracted_as_they_are_stored(both, place, weight):
    contract, shape = PLACES[place]
    x = jax.random.normal(jax.random.key(1), (2, WIDE))
    model = frozen(Contracts(contract, *shape), Rule(**WEIGHTS[weight]), x)
    error = 2.0**-6 if place == "cast" else 1e-5
    assert compare(both, model, x, {"rtol": error, "atol": error}) >= 1


SUMMED_FIRST = {
    "columns": (lambda x, w: x @ w[...], (WIDE, 9)),
    "square": (lambda x, w: x @ w[...], (WIDE, WIDE)),
    "cube": (lambda x, w: jnp.einsum("bd,dnh->bhn", x[:, :64], w[...]), (64, 64, 64)),
    "stack": (scanned, (3, WIDE, WIDE)),
    "layers": (indexed, (3, WIDE, WIDE)),
    "heads": (lambda x, w: jnp.einsum("bd,dnh->bhn", x, w[...]), (WIDE, 3, 5)),
    "both": (lambda x, w: jnp.einsum("bnh,nhd->bd", x.reshape(2, 2, -1), w[...]), (2, WIDE // 2, 9)),
}


@pytest.mark.parametrize("place", SUMMED_FIRST)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_axes_that_are_summed_are_stored_last(both, place, weight):
    contract, shape = SUMMED_FIRST[place]
    x = jax.random.normal(jax.random.key(1), (2, WIDE))
    model = frozen(Contracts(contract, *shape), Rule(**WEIGHTS[weight]), x)
    assert model.weight.shape == shape
    order = model.weight.form.stored.order
    assert order != tuple(range(len(order))) and {"value", "scale"} <= model.weight.numbers.keys()
    assert compare(both, model, x, {"rtol": 1e-5, "atol": 1e-5}) >= 1


COPIES = {
    "clone": nnx.clone,
    "merge": lambda model: nnx.merge(*nnx.split(model)),
    "pickle": lambda model: nnx.merge(nnx.graphdef(model), pickle.loads(pickle.dumps(nnx.state(model)))),
    "shapes": lambda model: nnx.merge(
        nnx.graphdef(nnx.eval_shape(lambda: nnx.clone(model))), nnx.state(model)
    ),
}


@pytest.mark.parametrize("copy", COPIES)
def test_copies_are_stored_alike(copy):
    contract, shape = SUMMED_FIRST["square"]
    x = jax.random.normal(jax.random.key(1), (2, WIDE))
    model = frozen(Contracts(contract, *shape), Rule(**WEIGHTS["int8"]), x)
    found = COPIES[copy](model)
    assert found.weight.form == model.weight.form
    np.testing.assert_array_equal(found(x), model(x))


def test_a_rule_may_ask_for_floats(both):
    contract, shape = PLACES["rows"]
    x = jax.random.normal(jax.random.key(1), (2, WIDE))
    rule = Rule(**WEIGHTS["int8"], contraction="float")
    assert compare(both, frozen(Contracts(contract, *shape), rule, x), x, {"rtol": 0, "atol": 0}) == 0


def test_another_value_has_no_stored_numbers(both):
    """Half of the columns are contracted as the floats that they are."""

    def parts(x, w):
        return x @ w[...].T + jnp.tile(x[:, ::2] @ w[...][:, ::2].T, 1)

    x = jax.random.normal(jax.random.key(1), (2, WIDE))
    model = frozen(Contracts(parts, 9, WIDE), Rule(**WEIGHTS["int8"]), x)
    assert compare(both, model, x, {"rtol": 1e-5, "atol": 1e-5}) == 1


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("weight", "given"),
    [
        ("int4", None),
        ("int4", q.Int8DynamicActPerRowFloat),
        ("int8", q.MXInt8Act),
    ],
    ids=["floats", "int8 rows", "groups of both"],
)
def test_groups_within_heads_that_are_summed(both, weight, given):
    """The output projection of an attention layer: heads and their numbers are summed, groups lie in a head."""
    group = 32
    layer = QuantLinearGeneral(
        (3, 64),
        9,
        axis=(-2, -1),
        weight_quant=q.IntWeightSymmetricGroupQuant,
        weight_bit_width=int(weight[3:]),
        weight_group_size=group,
        weight_group_dim=-2,
        input_quant=given,
        contraction="auto" if given is None else "int",
        rngs=nnx.Rngs(0),
    )
    x = jax.random.normal(jax.random.key(1), (2, 3, 64))
    layer(x)
    layer.eval()
    evaluated = layer(x)
    model = jqinject.freeze(layer)
    assert compare(both, model, x, {"rtol": 1e-5, "atol": 1e-5}) >= 1
    np.testing.assert_allclose(model(x), evaluated, rtol=1e-5, atol=1e-5)
