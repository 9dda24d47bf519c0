"""A transform before the quantizer of an input: in layers and between operations, in float, quantized and frozen."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, freeze, load_state, quantize
from jqinject.core.transforms import Chain, ChannelScale, Hadamard, Sized
from jqinject.dot import QDotGeneral, Scheme
from jqinject.quant import (
    Int8ActPerTensorMinMax,
    Int8DynamicActPerRowAbsMax,
    Int8WeightPerChannelFloat,
    NoneActQuant,
)

ALL = Hadamard()
SIGNED = Hadamard(8, signs=(1, -1) * 4)
BOTH = Chain((Sized(ChannelScale, 16, "both"), Hadamard(4)))


class Mixed(nnx.Module):
    """A layer, one of several axes, a convolution, and contractions of the model's own."""

    def __init__(self, key: int = 0) -> None:
        rngs = nnx.Rngs(key)
        self.query = nnx.Param(0.3 * jax.random.normal(rngs(), (16, 2, 8)))
        self.value = nnx.Param(0.3 * jax.random.normal(rngs(), (16, 2, 8)))
        self.back = nnx.Param(0.3 * jax.random.normal(rngs(), (2, 8, 16)))
        self.general = nnx.LinearGeneral((2, 8), 16, axis=(-2, -1), rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.convolution = nnx.Conv(8, 4, (3,), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, value = (jnp.einsum("btd,dnh->btnh", x, w[...]) for w in (self.query, self.value))
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, value))
        mixed = jnp.einsum("bnts,bsnh->btnh", weights, value)
        y = jnp.einsum("btnh,nhd->btd", mixed, self.back[...]) + self.general(mixed)
        return self.convolution(self.down(y))


def _dual(transform: Any, w: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """A weight stored for a transform, by the matrix of the transform and NumPy's inverse."""
    count = int(np.prod([w.shape[axis] for axis in axes]))
    matrix = np.asarray(transform(jnp.eye(count)), np.float64)
    rows = np.moveaxis(np.asarray(w, np.float64), axes, range(len(axes)))
    made = np.linalg.inv(matrix) @ rows.reshape(count, -1)
    return jnp.asarray(np.moveaxis(made.reshape(rows.shape), range(len(axes)), axes), jnp.float32)


def _rules(act: Any, weight: Any = Int8WeightPerChannelFloat) -> list[Rule]:
    def rule(path: str, transform: Any) -> Rule:
        given: dict[str, Any] = {} if weight is None else {"weight_quant": weight}
        return Rule(path, input_quant=act.let(pre_transform=transform), **given)

    return [rule("query|value|back|general", ALL), rule("down", BOTH), rule("convolution", SIGNED)]


def _stored(model: Mixed) -> Mixed:
    """The model with weights for the transforms of `_rules`."""
    made = nnx.clone(model)
    for parameter, axes in ((made.query, (0,)), (made.value, (0,)), (made.back, (0, 1))):
        parameter[...] = _dual(ALL, parameter[...], axes)
    made.general.kernel[...] = _dual(ALL, made.general.kernel[...], (0, 1))
    both: Any = BOTH.made()
    both.parts[0].put(jnp.linspace(0.5, 2.0, 16))
    made.down.kernel[...] = _dual(both, made.down.kernel[...], (0,))
    made.convolution.kernel[...] = _dual(SIGNED, made.convolution.kernel[...], (1,))
    return made


def _quantized(model: Mixed, act: Any, x: jax.Array, weight: Any = Int8WeightPerChannelFloat) -> Any:
    made = quantize(_stored(model), _rules(act, weight), inputs=x)
    made.eval()
    made.down.input_quant.pre_transform.parts[0].put(jnp.linspace(0.5, 2.0, 16))
    return made


X = jax.random.normal(jax.random.key(9), (2, 5, 16))


@pytest.fixture(scope="module")
def model() -> Mixed:
    return Mixed()


@pytest.fixture(scope="module")
def dynamic(model: Mixed) -> Any:
    return _quantized(model, Int8DynamicActPerRowAbsMax, X)


@pytest.mark.heavy
def test_without_quantizers_function_and_gradient_are_those_of_the_float_model(model: Mixed) -> None:
    online = _quantized(model, NoneActQuant, X, None)

    @nnx.jit
    def value_and_gradient(m: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, back = jax.vjp(lambda x: m(x), x)
        return y, back(y)[0]

    for found, wanted in zip(value_and_gradient(online, X), value_and_gradient(model, X), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_inputs_that_go_through_one_transform_share_its_quantizer(dynamic: Any) -> None:
    assert sorted(dynamic.op_quant.held) == ["einsum0_lhs", "einsum4_lhs"]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "act", [NoneActQuant, pytest.param(Int8ActPerTensorMinMax, marks=pytest.mark.lengthy)]
)
def test_copies_and_frozen_models_give_the_bits_of_the_model(model: Mixed, act: Any) -> None:
    found = _quantized(model, act, X)
    if act is Int8ActPerTensorMinMax:
        jqinject.calibrate(found, [X], progress=False)
    y = found(X)
    np.testing.assert_allclose(y, model(X), atol=0.06 * float(jnp.abs(y).max()))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(nnx.clone(found)))(X), y)
    frozen = freeze(nnx.clone(found))
    np.testing.assert_allclose(frozen(X), y, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(frozen, X), y, rtol=1e-5, atol=1e-5)


@pytest.mark.lengthy
def test_a_checkpoint_fills_a_model_of_the_same_rules(dynamic: Any, tmp_path: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.to_pure_dict(nnx.state(dynamic)))
        checkpointer.wait_until_finished()
        fresh = quantize(Mixed(1), _rules(Int8DynamicActPerRowAbsMax), inputs=X)
        fresh.eval()
        load_state(fresh, checkpointer.restore(tmp_path / "model"))
    np.testing.assert_array_equal(fresh(X), dynamic(X))


@pytest.mark.heavy
def test_reports_compare_with_the_float_function(dynamic: Any) -> None:
    found = jqinject.report(dynamic, X, numbers=True)
    notes = {entry.path: entry.note for entry in found}
    assert f"the input goes through {Hadamard()!r}" in notes["query"]
    assert f"the input goes through ChannelScale, {Hadamard(4)!r}" in notes["down"]
    ratios = [entry.numbers.isolated_sqnr_db for entry in found if entry.numbers is not None]
    assert len(ratios) == 6 and min(r for r in ratios if r is not None) > 30
    assert jqinject.explain(dynamic.down.input_quant)["pre_transform"].value == BOTH


@pytest.mark.heavy
def test_a_stack_of_layers_has_transforms_of_its_own() -> None:
    @nnx.vmap
    def make(key: jax.Array) -> nnx.Linear:
        return nnx.Linear(16, 16, rngs=nnx.Rngs(key))

    stack = make(jax.random.split(jax.random.key(0), 3))
    kernels = stack.kernel[...]
    rule = Rule(
        weight_quant=Int8WeightPerChannelFloat,
        input_quant=NoneActQuant.let(pre_transform=Sized(ChannelScale, 16)),
    )
    found = quantize(stack, rule)
    found.eval()
    factors = jnp.exp(jax.random.normal(jax.random.key(1), (3, 16)))
    held = found.input_quant.pre_transform.factors
    assert held[...].shape == (3, 16)
    held[...] = factors
    found.kernel[...] = kernels / factors[:, :, None]
    jqinject.reassemble(found)
    x = jax.random.normal(jax.random.key(2), (2, 16))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def through(layer: Any, x: jax.Array) -> jax.Array:
        return layer(x)

    wanted = x
    for kernel in kernels:
        wanted = wanted @ kernel
    np.testing.assert_allclose(through(found, x), wanted, rtol=0.05, atol=0.05 * float(jnp.abs(wanted).max()))


def test_what_is_no_transform_is_refused() -> None:
    layer = nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
    rule = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=NoneActQuant.let(pre_transform=3))
    with pytest.raises(TypeError, match="pre_transform = 3 is no transform"):
        quantize(layer, rule)


def test_a_weight_quantizer_takes_none() -> None:
    rule = Rule(weight_quant=Int8WeightPerChannelFloat.let(pre_transform=ALL))
    with pytest.raises(TypeError, match="'pre_transform' would have no effect"):
        quantize(nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0))), rule)


@pytest.mark.heavy
def test_a_scheme_takes_none_that_does_not_cancel() -> None:
    scheme = Scheme.let(fprop_lhs=Int8DynamicActPerRowAbsMax.let(pre_transform=ALL))
    with pytest.raises(TypeError, match=r"fprop_lhs declares Hadamard.*fprop_rhs has no pre_transform"):
        QDotGeneral(scheme)(jnp.ones((2, 16)), jnp.ones((16, 2)), (((1,), (0,)), ((), ())))
