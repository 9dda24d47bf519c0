"""What `load_state` and `reassemble` refuse, in words; nothing is changed then."""

import copy

import jax
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import ExtendedInjector, value
from jqinject.core import BinaryQuant, ParameterScaling
from jqinject.nn import QuantLinear
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat


class Act(Int8ActPerTensorFloat):
    collect_stats_steps = 2


class Model(nnx.Module):
    def __init__(self, seed=0, **given):
        self.one, self.two = (
            QuantLinear(
                2,
                2,
                weight_quant=Int8WeightPerChannelFloat,
                input_quant=Act,
                rngs=nnx.Rngs(seed + i),
                **given,
            )
            for i in range(2)
        )


def good():
    return jax.tree.map(lambda a: np.array(a) + 1, nnx.to_pure_dict(nnx.state(Model())))


def _changed(**changes):
    """A good state with entries of `one` changed."""
    state = good()
    state["one"] = {**state["one"], **changes}
    return state


def _deep(name, entry):
    state = good()
    state["two"]["input_quant"]["tensor_quant"]["scaling_impl"][name] = entry
    return state


ZEROS = np.zeros((2, 2), np.float32)
WRONG = {
    "shape": (_changed(kernel=ZEROS[:1]), r"one\.kernel: has shape \(1, 2\), the model needs \(2, 2\)"),
    "rank": (_changed(bias=np.float32(0)), r"one\.bias: has shape \(\), the model needs \(2,\)"),
    "integers": (
        _changed(kernel=ZEROS.astype(np.int32)),
        r"one\.kernel: has dtype int32, the model needs float32",
    ),
    "booleans": (_changed(kernel=ZEROS.astype(bool)), r"has dtype bool, the model needs float32"),
    "complex": (_changed(kernel=ZEROS.astype(np.complex64)), r"has dtype complex64, the model needs float32"),
    "text": (_changed(bias="zeros"), r"one\.bias: is not an array: got str"),
    "nothing": (_changed(bias=None), r"one\.bias: is missing from the state"),
    "misspelt": (
        _changed(kernle=ZEROS),
        r"one\.kernle: the model has no such variable; did you mean 'one\.kernel'\?",
    ),
    "too deep": (
        _changed(kernel={"mu": ZEROS}),
        r"one\.kernel: is a mapping with 'mu', the model needs one array",
    ),
    "too shallow": ({"one": ZEROS, "two": good()["two"]}, r"one: the model has no such variable"),
    "absent layer": ({"one": good()["one"]}, r"two\.kernel: is missing"),
    "statistic of another shape": (_deep("value", np.zeros(2, np.float32)), r"value: has shape \(2,\)"),
    "a flag for a counter": (
        _deep("counter", np.bool_(True)),
        r"counter: has dtype bool, the model needs float32",
    ),
}


def numbers(model):
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_a_state_that_does_not_fit(case):
    state, message = case
    model = Model()
    before = numbers(model)
    with pytest.raises(ValueError, match=f"nothing was changed(?s:.)*{message}"):
        jqinject.load_state(model, state)
    jax.tree.map(np.testing.assert_array_equal, numbers(model), before)


def test_tracers_in_the_state_are_refused():
    model = Model()
    before = numbers(model)

    @jax.jit
    def outside(kernel):  # the model is real, the state is not
        jqinject.load_state(model, {"one": {"kernel": kernel}}, missing=...)

    with pytest.raises(ValueError, match=r"one\.kernel: is a tracer: load it outside of jit"):
        outside(ZEROS)
    jax.tree.map(np.testing.assert_array_equal, numbers(model), before)


def test_abstract_arrays_in_the_state_are_refused():
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), good())
    with pytest.raises(ValueError, match="is not an array: got ShapeDtypeStruct"):
        jqinject.load_state(Model(), state)


def test_neither_is_the_state_that_is_handed_in_changed():
    state = good()
    kept = copy.deepcopy(state)
    jqinject.load_state(Model(), state)
    jax.tree.map(np.testing.assert_array_equal, state, kept)


class Moody(ExtendedInjector):
    """Grows with the weights: its parameter has as many elements as the largest weight says, up to 3."""

    tensor_quant = BinaryQuant
    scaling_impl = ParameterScaling
    signed = True

    @value
    def scaling_init(module):
        size = int(np.max(np.abs(module.kernel[...])))
        if size > 3:
            raise ArithmeticError("the weights are too large")
        return np.ones(size, np.float32)


def moody(seed, size):
    kernel_init = nnx.initializers.constant(size)
    return QuantLinear(2, 2, weight_quant=Moody, kernel_init=kernel_init, rngs=nnx.Rngs(seed))


def _moody_pair():
    return nnx.List([moody(0, 2.0), moody(1, 2.0)])


def _kernels(*sizes):
    return {
        str(i): {"kernel": np.full((2, 2), s, np.float32), "bias": np.ones(2, np.float32)}
        for i, s in enumerate(sizes)
    }


def test_where_the_second_assembly_raises_the_first_is_taken_back_too():
    layers = _moody_pair()
    before = numbers(layers)
    quantizers = [layer.weight_quant.tensor_quant for layer in layers]
    with pytest.warns(UserWarning), pytest.raises(ArithmeticError, match="too large") as caught:
        jqinject.load_state(layers, _kernels(1.0, 4.0))  # the first is replaced, then the second fails
    assert "while re-assembling 1.weight_quant" in "".join(caught.value.__notes__)
    jax.tree.map(np.testing.assert_array_equal, numbers(layers), before)
    assert [layer.weight_quant.tensor_quant for layer in layers] == quantizers


def test_stored_quantizer_variables_that_fit_no_more_after_re_assembly_are_refused():
    layers = _moody_pair()
    before = numbers(layers)
    state = _kernels(1.0, 2.0)
    state["0"]["weight_quant"] = {"tensor_quant": {"scaling_impl": {"value": np.ones(2, np.float32)}}}
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match=r"after re-assembly(?s:.)*has shape \(2,\)"),
    ):
        jqinject.load_state(layers, state)
    jax.tree.map(np.testing.assert_array_equal, numbers(layers), before)


def test_a_replaced_quantizer_is_reported():
    layers = _moody_pair()
    with pytest.warns(UserWarning, match="Make the optimizer again"):
        report = jqinject.load_state(layers, _kernels(1.0, 2.0))
    assert report.replaced == ("0.weight_quant",)
    assert set(report.reassembled) == {"0.weight_quant", "1.weight_quant"}
    assert "replaced 1 quantizer" in str(report) and "make optimizers" in str(report)
    assert layers[0].weight_quant.scale().shape == (1,)


def test_the_report_in_words():
    layer = QuantLinear(2, 2, input_quant=Act, rngs=nnx.Rngs(0))
    state = {"kernel": np.zeros((2, 2), np.float16)}
    report = jqinject.load_state(layer, state, missing=nnx.PathContains("bias"))
    assert str(report).splitlines() == [
        "loaded 1 variable",
        "not in the state: bias",
        "cast: kernel (float16 -> float32)",
        "re-assembled 1 quantizer",
        "kept 1 quantizer that no weight decides: input_quant",
    ]
    assert str(jqinject.reassemble(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))) == "re-assembled 0 quantizers"


def test_an_abstract_model_is_filled_as_a_whole_or_not_at_all():
    abstract, model = nnx.eval_shape(lambda: Model()), Model()
    with pytest.raises(ValueError, match=r"two\.kernel: is missing(?s:.)*build it without nnx\.eval_shape"):
        jqinject.load_state(abstract, {"one": good()["one"]}, missing=...)
    leaves = jax.tree.leaves(nnx.as_pure(nnx.state(abstract)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    for target in (abstract, model):
        jqinject.load_state(target, good())
    jax.tree.map(np.testing.assert_array_equal, numbers(abstract), numbers(model))
