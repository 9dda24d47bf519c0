"""What `load_state` says of states of another form and of impossible numbers; components without a proxy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.core import (
    AbsMax,
    BitWidthParameter,
    OverTensorView,
    ParameterFromStatsFromParameterScaling,
    RemoveBitwidthParameter,
    RuntimeStatsScaling,
)
from jqinject.nn import QuantBatchNorm, QuantLinear
from jqinject.quant import (
    Fp8e4m3ActPerTensorDelayed,
    Int8ActPerTensorAbsMax,
    Int8ActPerTensorFixedPoint,
    Int8ActPerTensorFloat,
)

KERNEL, BIAS = np.ones((2, 3), np.float32), np.ones(3, np.float32)
SCALING = ("layer", "input_quant", "tensor_quant", "scaling_impl")


class Model(nnx.Module):
    def __init__(self, input_quant=Int8ActPerTensorFloat):
        self.layer = QuantLinear(2, 3, input_quant=input_quant, rngs=nnx.Rngs(0))


def _refused(model, state):
    """The error text of a load that changes nothing."""
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
    with pytest.raises(ValueError, match=r"load_state: the state does not fit") as caught:
        jqinject.load_state(model, state)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model)))
    return str(caught.value)


def _state(model, path, value):
    state = nnx.to_pure_dict(nnx.state(model))
    node = state
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    return state


FLAT = {
    "dots": ({"layer.kernel": KERNEL, "layer.bias": BIAS}, "got 'layer.kernel'"),
    "slashes": ({"layer/kernel": KERNEL, "layer/bias": BIAS}, "got 'layer/kernel'"),
    "tuples": ({("layer", "kernel"): KERNEL, ("layer", "bias"): BIAS}, "got 'layer.kernel'"),
    "flat within": ({"layer": {"kernel": KERNEL, "bias": BIAS, "input_quant.tensor_quant": {}}}, None),
}


@pytest.mark.parametrize("case", FLAT.values(), ids=FLAT)
def test_flat_keys(case):
    state, shown = case
    if shown is None:
        assert jqinject.load_state(Model(), state).loaded == ("layer.kernel", "layer.bias")
        return
    text = _refused(Model(), state)
    assert "(2 problems)" in text
    assert "keys have to be nested: {'layer': {'kernel': ...}}" in text and shown in text
    assert "did you mean" not in text
    assert "cure: flax.traverse_util.unflatten_dict" in text


PIECES = {
    "lists of lists": (KERNEL.tolist(), "is a list of numbers, the model needs one array of shape (2, 3)"),
    "a list of arrays": ([BIAS, BIAS], "is a list of numbers"),
    "one level too deep": ({"weight": KERNEL}, "is a mapping with 'weight'"),
    "bytes": (KERNEL.tobytes(), "is not an array: got bytes"),
    "text": ("kernel.npy", "is not an array: got str"),
    "objects": (np.full((2, 3), None), "has dtype object"),
    "words": (np.full((2, 3), "a"), "has dtype <U1"),
}


@pytest.mark.parametrize("case", PIECES.values(), ids=PIECES)
def test_an_array_of_another_form(case):
    value, said = case
    text = _refused(Model(), {"layer": {"kernel": value, "bias": BIAS}})
    assert "(1 problem)" in text and f"layer.kernel: {said}" in text


def test_many_problems_are_counted_and_some_are_shown():
    text = _refused(Model(), {"layer": {f"other{index}": BIAS for index in range(200)}})
    assert "(202 problems)" in text and "... and 152 more" in text


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_told(number):
    report = jqinject.load_state(Model(), {"layer": {"kernel": KERNEL * number, "bias": BIAS}})
    assert report.not_finite == ("layer.kernel",)
    assert "nan or inf in: layer.kernel" in str(report)
    assert jqinject.load_state(Model(), Model()).not_finite == ()


NEVER = {
    "nan": ("value", np.float32(np.nan), "value: holds nan or inf"),
    "inf": ("value", np.float32(np.inf), "value: holds nan or inf"),
    "nan in a buffer": ("record.buffer", np.float32(np.nan), "record.buffer: holds nan or inf"),
    "negative buffer": (
        "record.buffer",
        np.float32(-2),
        "record.buffer: is a scale, and no scale is below 0",
    ),
    "a buffer of zero": ("record.buffer", np.float32(0), "record.buffer: is a scale, and no scale is 0"),
    "a learned scale of zero": ("value", np.float32(0), "value: is a scale, and no scale is 0"),
    "nan in a counter": ("record.counter", np.float32(np.nan), "record.counter: holds nan or inf"),
    "counter": ("record.counter", np.float32(-3), "record.counter: is a counter, and counts from 0: got -3"),
}


@pytest.mark.parametrize("case", NEVER.values(), ids=NEVER)
def test_a_quantizer_refuses_what_can_not_be_right(case):
    name, value, said = case
    model = Model()
    assert f"layer.input_quant.tensor_quant.scaling_impl.{said}" in _refused(
        model, _state(model, (*SCALING, *name.split(".")), value)
    )


@pytest.mark.parametrize("kind", (nnx.BatchNorm, QuantBatchNorm))
def test_a_variance_below_zero_is_refused(kind):
    model = nnx.Dict(norm=kind(3, rngs=nnx.Rngs(0)))
    state = nnx.to_pure_dict(nnx.state(model))
    state["norm"]["var"] = np.array([1.0, -1.0, 0.0], np.float32)
    assert "norm.var: is a variance, and no variance is below 0: got -1" in _refused(model, state)
    state["norm"]["var"] = np.array([1.0, 1e-9, 0.0], np.float32)
    jqinject.load_state(model, state)


def test_committed_scales_of_zero_are_refused():
    model = Model()
    model.layer.weight_quant.commit()
    state = nnx.to_pure_dict(nnx.state(model))
    state["layer"]["weight_quant"]["record"]["scale"] *= 0
    assert "layer.weight_quant.record.scale: is a scale, and no scale is 0" in _refused(model, state)


def test_the_range_of_zeros_is_loaded():
    """A layer whose input was 0 in all batches stores what its quantizer made of that."""
    for quant in (
        Int8ActPerTensorFloat,
        Int8ActPerTensorAbsMax,
        Int8ActPerTensorFloat.let(scaling_impl_type="stats"),
    ):
        model = Model(quant)
        jqinject.calibrate(model.layer, [jnp.zeros((4, 2))], progress=False)
        jqinject.load_state(Model(quant), nnx.state(model))


def test_a_learned_scale_below_zero_counts_by_its_magnitude():
    model, other = Model(), Model()
    x = jnp.linspace(-2.0, 2.0, 8).reshape(4, 2)
    for learned, sign in ((model, -1), (other, 1)):
        report = jqinject.load_state(learned, _state(learned, SCALING, {"value": np.float32(sign * 0.5)}))
        where = (".".join(("layer", "input_quant", "tensor_quant", "scaling_impl", "value")),)
        assert report.below_zero == (where if sign < 0 else ())
        learned.eval()
    assert model.layer.input_quant.tensor_quant.scaling_impl.value[...] == -0.5
    np.testing.assert_array_equal(model.layer(x), other.layer(x))
    assert "scales below 0, read by their magnitude: layer.input_quant" in str(
        jqinject.load_state(model, model)
    )


def test_a_logarithm_may_be_negative_and_a_record_of_magnitudes_may_not():
    model = Model(Int8ActPerTensorFixedPoint)
    jqinject.load_state(model, _state(model, (*SCALING, "value"), np.float32(-3)))
    assert model.layer.input_quant.tensor_quant.scaling_impl.value[...] == -3
    model = Model(Fp8e4m3ActPerTensorDelayed)
    path = (*SCALING, "record", "amax_history")
    shape = model.layer.input_quant.amax_history.amax_history[...].shape
    assert "is a record of magnitudes" in _refused(
        model, _state(model, path, np.full(shape, -1.0, np.float32))
    )


# --- components that no proxy holds


class ByHand(nnx.Module):
    def __init__(self, override=True):
        self.kernel = nnx.Param(jnp.ones((2, 3)))
        self.scale = ParameterFromStatsFromParameterScaling(
            AbsMax(), OverTensorView(), 0, [self.kernel, self.kernel], ()
        )
        self.bits = BitWidthParameter(8, override_pretrained_bit_width=override)
        self.running = RuntimeStatsScaling(AbsMax(), OverTensorView(), (), None)


def test_a_module_of_components_loads_as_a_layer_does():
    model = ByHand()
    report = jqinject.load_state(model, {"kernel": 2 * KERNEL})
    assert set(report.missing) == {
        "scale.value", "scale.record.counter", "bits.bit_width_offset", "running.record.running_stats",
        "running.record.counter"
    }  # fmt: skip
    state = {"scale": {"value": np.float32(4)}, "running": {"running_stats": np.float32(3)}}
    jqinject.load_state(model, {"kernel": KERNEL, "bits": {"bit_width_offset": np.float32(1)}, **state})
    assert (model.scale.counter[...], model.scale.value[...]) == (1, 4)
    assert (model.running.counter[...], model.running.running_stats[...]) == (1, 3)
    assert model.bits() == 8  # as it was built: a loaded width is overridden


def test_a_bit_width_by_itself():
    for build, entry in (
        (BitWidthParameter, "bit_width_offset"),
        (RemoveBitwidthParameter, "bit_width_coeff"),
    ):
        kept, loaded = build(4, override_pretrained_bit_width=True), build(4)
        before = kept()
        for component in (kept, loaded):
            jqinject.load_state(component, {entry: np.float32(1)})
            jqinject.load_state(component, {})
        assert kept() == before != loaded()
    width = BitWidthParameter(8)
    jqinject.load_state(width, {"bit_width": np.float32(5)})  # of a constant width
    assert width() == 5


def test_a_scale_by_itself_needs_no_weights():
    scale = ByHand().scale
    jqinject.load_state(scale, {"value": np.float32(4)})
    assert (scale.counter[...], scale(jnp.ones(3))) == (1, 4)
    report = jqinject.load_state(scale, {"value": np.float32(-4)})
    assert (report.below_zero, scale(jnp.ones(3))) == (("value",), 4)
