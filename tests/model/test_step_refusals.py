"""Wrong use of steps and of gradient quantizers: a clear error, and nothing has changed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.core import GradSlot, GradStat, QuantStat
from jqinject.nn import QuantIdentity, QuantLinear
from jqinject.quant import (
    Fp8e4m3ActPerTensorDelayed,
    Fp8e5m2GradPerTensorDelayed,
    Int8ActPerTensorFloat,
)
from tests.model._fp8 import X, assert_same, histories, linear, loss, run, statistics, step


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        (
            {"q_dtype": jnp.float16},
            TypeError,
            "q_dtype must be an 8-bit float dtype, one of jnp.float8_e4m3fn",
        ),
        ({"dq_dtype": jnp.int8}, TypeError, "dq_dtype must be a float dtype"),
        ({"amax_history_length": 0}, ValueError, "must be at least 1, got 0. .*delayed = False"),
        ({"amax_history_length": 2.5}, TypeError, "must be an int, got 2.5"),
        ({"amax_compute_algo": "mean"}, ValueError, "one of 'max', 'most_recent', got 'mean'"),
        ({"amax_history_lenght": 3}, TypeError, "did you mean 'amax_history_length'"),
        ({"margin": float("nan")}, ValueError, "margin must be a number, got nan"),
        ({"scaling_init": 0.0}, ValueError, "scaling_init must be positive"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else None,
)
def test_what_a_quantizer_refuses(keywords: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        QuantIdentity(Fp8e4m3ActPerTensorDelayed, **keywords)


def test_gradients_have_quantizers_of_their_own() -> None:
    for wrong in (Fp8e4m3ActPerTensorDelayed, Int8ActPerTensorFloat):
        with pytest.raises(TypeError, match=r"quantizes gradients, and .* is not for these"):
            linear(grad_quant=wrong)
    with pytest.raises(TypeError, match="quantizes activations, and Fp8e5m2GradPerTensorDelayed is not"):
        QuantIdentity(Fp8e5m2GradPerTensorDelayed)


def test_integers_have_no_gradient() -> None:
    with pytest.raises(TypeError, match="a gradient quantizer got an array of dtype int32"):
        QuantIdentity(None, grad_quant=Fp8e5m2GradPerTensorDelayed)(jnp.arange(3))
    with pytest.raises(TypeError, match="FloatQuant got an array of dtype int32"):
        QuantIdentity(Fp8e4m3ActPerTensorDelayed)(jnp.arange(3))


def test_a_contraction_that_is_not_possible() -> None:
    with pytest.raises(ValueError, match="one of 'auto', 'float', 'int', 'fp8', got 'int8'"):
        linear(contraction="int8")
    layer = linear(contraction="fp8", input_quant=Int8ActPerTensorFloat)
    with pytest.raises(ValueError, match=r"needs an input and a weight in 8-bit floats.*got 8-bit integers"):
        layer(X)


@pytest.mark.parametrize("kind", [QuantStat, GradStat, GradSlot])
def test_statistics_that_were_filtered_away(kind: Any) -> None:
    layer = linear()
    nnx.pop(layer, kind)
    with pytest.raises(ValueError, match=r"statistics of .* were filtered away: .* missing"):
        step(layer, X)


@pytest.mark.heavy
def test_a_model_that_is_not_differentiated_as_a_whole() -> None:
    layer = run(linear(), step)
    before = statistics(layer)
    with pytest.raises(TypeError, match="model has gradient quantizers and is a keyword argument"):
        jqinject.grad(lambda x, model: loss(model, x))(X, model=layer)
    assert_same(statistics(layer), before, rtol=0)
    graphdef, state = nnx.split(layer)
    recorded = histories(layer)["grad"]
    with pytest.warns(jqinject.LostStateWarning, match=r"is lost.*\n  cure: pass the whole model"):
        jqinject.grad(lambda state: loss(nnx.merge(graphdef, state), X))(state)
    np.testing.assert_array_equal(histories(layer)["grad"], recorded)


def test_steps_open_once_and_end_once() -> None:
    layer = linear()
    with pytest.raises(ValueError, match="no step is open"):
        jqinject.end_step(layer)
    jqinject.begin_step(layer)
    with pytest.raises(ValueError, match="a step is open already"):
        jqinject.begin_step(layer)
    jqinject.end_step(layer)
    assert histories(layer)["input"].tolist() == [0, 0, 0, 0]  # nothing was seen


def test_gradients_without_slots_are_refused() -> None:
    layer = linear()
    jqinject.begin_step(layer)
    with pytest.raises(ValueError, match=r"slots .* have to be differentiated too"):
        jqinject.end_step(layer, gradients=nnx.state(layer, nnx.Param))


def test_a_function_that_fails_changes_nothing() -> None:
    layer = run(linear(), step)
    before = statistics(layer)

    def fails(model: Any, x: Any) -> Any:
        model(x)
        raise RuntimeError("on purpose")

    for jit in (False, True):
        call = jqinject.grad(fails)
        with pytest.raises(RuntimeError, match="on purpose"):
            (nnx.jit(call) if jit else call)(layer, X)
    assert_same(statistics(layer), before, rtol=0)
    step(layer, X)  # and the next step is a step


# --- the signature is nnx's


def test_a_call_without_arguments_has_nothing_to_differentiate() -> None:
    with pytest.raises(TypeError, match="requires at least 1 positional arguments"):
        jqinject.value_and_grad(lambda: jnp.float32(1))()


@pytest.mark.heavy
def test_arguments_as_for_nnx() -> None:
    layer = linear()
    with_aux = jqinject.value_and_grad(lambda m, x: (loss(m, x), x), has_aux=True)
    (_value, aux), gradients = with_aux(layer, X)
    assert aux.shape == X.shape and sorted(gradients) == ["bias", "kernel"]
    of_x = jqinject.grad(loss, argnums=1)(layer, X)
    of_both = jqinject.grad(loss, argnums=(0, 1))(layer, X)
    assert of_x.shape == X.shape and sorted(of_both[0]) == ["bias", "kernel"]
    biases = jqinject.grad(loss, argnums=nnx.DiffState(0, nnx.PathContains("bias")))(layer, X)
    assert list(biases) == ["bias"]
    decorated = jqinject.grad(has_aux=False)(loss)(layer, X)
    assert sorted(decorated) == ["bias", "kernel"]
    contained = jqinject.grad(lambda models, x: loss(models["a"], x))({"a": layer}, X)
    assert sorted(contained["a"]) == ["bias", "kernel"]
    # Six calls, and each was one step.
    assert np.count_nonzero(histories(linear())["grad"]) == 0
    assert np.count_nonzero(histories(layer)["grad"]) == 4


def test_a_model_without_statistics_gets_nnx_gradients() -> None:
    layer = nnx.Linear(6, 2, rngs=nnx.Rngs(0))
    ours, theirs = jqinject.value_and_grad(loss)(layer, X), nnx.value_and_grad(loss)(layer, X)
    np.testing.assert_array_equal(ours[0], theirs[0])
    jax.tree.map(np.testing.assert_array_equal, ours[1], theirs[1])


@pytest.mark.heavy
def test_a_backward_pass_by_hand() -> None:
    by_hand, by_call = linear(), linear()
    for number in range(3):
        x = X * (number + 1)
        jqinject.begin_step(by_hand)
        value, pull_back = nnx.vjp(loss, by_hand, x, graph=False)
        of_layer, _ = pull_back(jnp.ones_like(value))
        gradients = jqinject.end_step(by_hand, gradients=of_layer)
        _, expected = step(by_call, x)
    assert_same(statistics(by_hand), statistics(by_call))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), gradients, expected)


@pytest.mark.heavy
def test_frozen_parts_in_evaluation_mode_stay() -> None:
    class Pair(nnx.Module):
        def __init__(self) -> None:
            self.body: QuantLinear = linear()
            self.head: QuantLinear = linear(1)

        def __call__(self, x: Any) -> Any:
            return self.head(self.body(x))

    pair = Pair()
    pair.body(X)
    pair.body.eval()
    run(pair, step)
    assert np.count_nonzero(histories(pair.body)["grad"]) == 0
    assert np.count_nonzero(histories(pair.head)["grad"]) == 3
