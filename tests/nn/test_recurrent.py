"""Recurrent cells and layers: against Flax's and torch's arithmetic, step by step, and under transformations."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.core import QuantStat
from jqinject.core.state import flat_parts
from jqinject.dot import FrozenParam
from jqinject.formats import recurrent_state_from_torch
from jqinject.nn import (
    QuantGRUCell,
    QuantLSTM,
    QuantLSTMCell,
    QuantOptimizedLSTMCell,
    QuantRNN,
    QuantSimpleCell,
)
from jqinject.nn.base.slots import slots_of
from jqinject.quant import Int8WeightPerChannelFloat, Int32Bias
from jqinject.quant_tensor import as_array
from tests.brevitas_defaults import RECURRENT

CELLS = [
    (QuantLSTMCell, nnx.LSTMCell),
    (QuantOptimizedLSTMCell, nnx.OptimizedLSTMCell),
    (QuantGRUCell, nnx.GRUCell),
    (QuantSimpleCell, nnx.SimpleCell),
]
X = jax.random.normal(jax.random.key(0), (2, 5, 3))
call = nnx.jit(lambda model, x: model(x))
step = nnx.jit(lambda cell, carry, x: cell(carry, x))


def _full(layer):
    """The layer with a quantizer in each of its slots."""
    return functools.partial(layer, **RECURRENT[layer.__name__])


def _settled(make, batches=2):
    """A layer in evaluation mode, after some batches of training."""
    layer = make()
    for _ in range(batches):
        call(layer, X)
    layer.eval()
    return layer


cells = pytest.mark.parametrize(("ours", "flax"), CELLS, ids=[ours.__name__ for ours, _ in CELLS])


@pytest.mark.heavy
@cells
def test_without_quantizers_it_is_flax_to_the_bit(ours, flax):
    quantized = nnx.RNN(ours(3, 4, rngs=nnx.Rngs(0)))
    plain = nnx.RNN(flax(3, 4, rngs=nnx.Rngs(0)))
    paths = [[path for path, _ in nnx.to_flat_state(nnx.state(one))] for one in (quantized, plain)]
    assert paths[0] == paths[1]
    np.testing.assert_array_equal(call(quantized, X), call(plain, X))


@cells
def test_a_float_checkpoint_goes_in(ours, flax):
    cell = _full(ours)(3, 4, rngs=nnx.Rngs(0))
    plain = flax(3, 4, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(1))
    jqinject.load_state(cell, plain)
    for path, held in nnx.to_flat_state(nnx.state(plain, nnx.Param)):
        layer, name = path
        np.testing.assert_array_equal(getattr(getattr(cell, layer), name)[...], held.get_value())
    layer = cell.hi if ours is QuantLSTMCell else cell.dense_h
    inputs = cell.ii if ours is QuantLSTMCell else cell.dense_i
    top = max(float(jnp.abs(one.kernel[...]).max()) for one in (layer, inputs))
    np.testing.assert_allclose(layer.quant_weight().scale, top / 127, rtol=1e-6)


@pytest.mark.heavy
@cells
def test_it_stays_near_the_float_cell(ours, flax):
    # In training: each step has the scales of its own numbers.
    quantized = nnx.RNN(_full(ours)(3, 4, rngs=nnx.Rngs(0)))
    plain = nnx.RNN(flax(3, 4, rngs=nnx.Rngs(0)))
    error = jnp.abs(call(quantized, X) - call(plain, X)).max()
    assert 0 < error < 0.05


@pytest.mark.heavy
@cells
def test_a_sequence_is_its_steps(ours, flax):
    """Statistics within `nnx.RNN`'s scan are those of as many calls."""
    scanned, stepped = (_full(ours)(3, 4, io_collect_stats_steps=4, rngs=nnx.Rngs(0)) for _ in range(2))
    outputs = nnx.RNN(scanned)(X)
    carry = stepped.initialize_carry((2, 3), nnx.Rngs(0))
    for t in range(X.shape[1]):
        carry, y = step(stepped, carry, X[:, t])
        np.testing.assert_allclose(outputs[:, t], y, atol=1e-6)
    one, other = (dict(flat_parts(nnx.state(c, QuantStat))) for c in (scanned, stepped))
    for path, held in one.items():
        np.testing.assert_allclose(held.get_value(), other[path].get_value(), rtol=1e-5, err_msg=str(path))
    assert scanned.io_quant.tensor_quant.scaling_impl.counter[...] == 5  # four collected, then it is learned


@pytest.mark.heavy
def test_both_directions_of_flax():
    forward, backward = (nnx.RNN(_full(QuantGRUCell)(3, 4, rngs=nnx.Rngs(seed))) for seed in (0, 1))
    assert call(nnx.Bidirectional(forward, backward), X).shape == (2, 5, 8)
    assert forward.cell.io_quant.tensor_quant.scaling_impl.counter[...] == 10


@cells
def test_overrides_reach_their_quantizers(ours, flax):
    prefixes = [name.removesuffix("quant") for name in RECURRENT[ours.__name__]]
    widths = {f"{prefix}bit_width": 3 + index for index, prefix in enumerate(prefixes)}
    cell = _full(ours)(3, 4, **widths, rngs=nnx.Rngs(0))
    first, second = next(iter(cell.gates.items()))
    assert getattr(cell, first).weight_quant is getattr(cell, second).weight_quant
    assert getattr(cell, first).weight_quant.bit_width() == widths["weight_bit_width"]
    holder = next(one for one in (getattr(cell, first), getattr(cell, second)) if one.bias is not None)
    assert holder.bias_quant.bit_width() == widths["bias_bit_width"]
    for slot in slots_of(type(cell)):
        assert getattr(cell, slot.name).bit_width() == widths[f"{slot.prefix}bit_width"], slot.name


def test_a_misspelt_override_is_an_error():
    with pytest.raises(TypeError, match=r"gate_acc_bitwidth"):
        QuantLSTMCell(3, 4, gate_acc_bitwidth=3, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"takes no argument 'sigmoid_bit_width'"):
        QuantSimpleCell(3, 4, sigmoid_bit_width=3, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"bias_bit_width would have no effect: there is no bias"):
        QuantLSTM(3, 4, bias=False, bias_bit_width=8, rngs=nnx.Rngs(0))


def test_a_bias_in_steps_of_the_input_needs_a_quantized_input():
    lstm = QuantLSTM(3, 4, bias_quant=Int32Bias, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"Int32Bias takes its scale from input and weight.*\n.*io_quant"):
        lstm(X)


LAYERS = {
    "lstm": lambda **given: _full(QuantLSTM)(3, 4, batch_first=True, **given, rngs=nnx.Rngs(0)),
    "both ways": lambda **given: _full(QuantRNN)(
        3, 4, 2, batch_first=True, bidirectional=True, **given, rngs=nnx.Rngs(0)
    ),
    "coupled": lambda **given: _full(QuantLSTM)(
        3, 4, batch_first=True, coupled_input_forget_gates=True, **given, rngs=nnx.Rngs(0)
    ),
    "rnn": lambda **given: _full(QuantRNN)(3, 4, 2, batch_first=True, **given, rngs=nnx.Rngs(0)),
}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


@pytest.mark.heavy
@layers
def test_frozen_it_serves_what_evaluation_gives(make):
    layer = _settled(lambda: make(weight_quant=Int8WeightPerChannelFloat))
    before = call(layer, X)
    frozen = jqinject.freeze(layer)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), before, call(frozen, X))
    kernels = [v for path, v in nnx.to_flat_state(nnx.state(frozen)) if path[-1] == "kernel"]
    assert kernels and all(isinstance(kernel, FrozenParam) for kernel in kernels)


@pytest.mark.heavy
@layers
def test_copies_and_pickles_go_on_alike(make):
    layer = make()
    call(layer, X)
    copies = nnx.clone(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    expected, after = call(layer, X), flat_parts(nnx.state(layer, QuantStat))
    for other in copies:
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), expected, call(other, X))
        for (path, mine), (_, its) in zip(after, flat_parts(nnx.state(other, QuantStat)), strict=True):
            np.testing.assert_array_equal(mine.get_value(), its.get_value(), err_msg=str(path))


@pytest.mark.slow
def test_it_trains_by_rematerialization_too():
    layer, twin = LAYERS["rnn"](), LAYERS["rnn"]()

    def loss(model, x):
        return (model(x)[0] ** 2).sum()

    grads = nnx.jit(nnx.grad(loss))(layer, X)
    again = nnx.jit(nnx.grad(nnx.remat(loss)))(twin, X)
    for (path, one), (_, other) in zip(nnx.to_flat_state(grads), nnx.to_flat_state(again), strict=True):
        np.testing.assert_allclose(one.get_value(), other.get_value(), atol=1e-6, err_msg=str(path))
    moved = nnx.state(layer, QuantStat), nnx.state(twin, QuantStat)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *moved)


def test_an_abstract_layer_has_the_state_of_a_real_one():
    made, abstract = (nnx.state(one) for one in (LAYERS["both ways"](), nnx.eval_shape(LAYERS["both ways"])))
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), nnx.to_pure_dict(one)) for one in (made, abstract)]
    assert shapes[0] == shapes[1]


@pytest.mark.heavy
def test_a_stack_of_cells_is_its_cells():
    @nnx.vmap(in_axes=0)
    def make(key):
        return _full(QuantSimpleCell)(4, 4, rngs=nnx.Rngs(key))

    @nnx.vmap(in_axes=(0, 0, 0))
    def run(cell, carry, x):
        return cell(carry, x)[1]

    keys = jax.random.split(jax.random.key(0), 2)
    stacked = make(keys)
    carry, x = jax.random.normal(jax.random.key(1), (2, 2, 3, 4))
    outputs = nnx.jit(run)(stacked, carry, x)
    for index, key in enumerate(keys):
        single = _full(QuantSimpleCell)(4, 4, rngs=nnx.Rngs(key))
        np.testing.assert_allclose(outputs[index], step(single, carry[index], x[index])[1], atol=1e-6)


@pytest.mark.heavy
def test_bfloat16_stays_bfloat16():
    # The default, an orthogonal matrix, is not made in bfloat16.
    cell = {
        "dtype": jnp.bfloat16,
        "param_dtype": jnp.bfloat16,
        "recurrent_kernel_init": nnx.initializers.normal(0.1),
    }
    for layer in (
        nnx.RNN(_full(QuantGRUCell)(3, 4, **cell, rngs=nnx.Rngs(0))),
        _full(QuantRNN)(3, 4, batch_first=True, **cell, rngs=nnx.Rngs(0)),
    ):
        outputs = call(layer, X.astype(jnp.bfloat16))
        assert {leaf.dtype for leaf in jax.tree.leaves(outputs)} == {jnp.dtype(jnp.bfloat16)}
        scales = flat_parts(nnx.state(layer, QuantStat))
        assert {leaf.dtype for path, leaf in scales if path[-1] == "buffer"} == {jnp.dtype(jnp.float32)}


@pytest.mark.heavy
def test_calibration_settles_every_quantizer():
    layer = LAYERS["lstm"]()
    report = jqinject.calibrate(layer, [X, 2 * X], progress=False)
    assert len(report.quantizers) == len(slots_of(type(layer.layers[0][0])))
    layer.train()
    settled = layer.layers[0][0].io_quant.scale()
    nnx.jit(lambda layer, x: layer(x))(layer, 100 * X)
    np.testing.assert_array_equal(layer.layers[0][0].io_quant.scale(), settled)


@pytest.mark.heavy
@layers
def test_another_layers_state_goes_in(make):
    one, other = make(), make()
    other.layers[0][0].io_quant.tensor_quant.scaling_impl.buffer[...] = 9.0
    call(one, X)
    report = jqinject.load_state(other, nnx.state(one))
    assert not report.replaced
    one.eval(), other.eval()
    jax.tree.map(np.testing.assert_array_equal, call(one, X), call(other, X))


def test_rules_still_quantize_the_layers_within_flax_cells():
    quantized = jqinject.quantize(
        nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0))), jqinject.Rule(weight_quant=Int8WeightPerChannelFloat)
    )
    assert type(quantized.cell) is nnx.LSTMCell
    assert quantized.cell.hi.weight_quant is not None
    assert quantized(X).shape == (2, 5, 4)


# --- whole sequences


GATES = {"i": ("i", "f_", "g", "o"), "h": ("i", "f", "g", "o")}


def _torch_lstm(state, x, reverse=False):
    """torch's formula of one LSTM layer, in NumPy: gates i, f, g, o stacked along rows."""

    def sigmoid(a):
        return 1 / (1 + np.exp(-a))

    suffix = "_reverse" if reverse else ""
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    w, u, b1, b2 = (state[name + suffix].astype(np.float64) for name in names)
    h = c = np.zeros((x.shape[0], u.shape[1]))
    outputs = []
    steps = range(x.shape[1])
    for t in reversed(steps) if reverse else steps:
        i, f, g, o = np.split(x[:, t] @ w.T + b1 + h @ u.T + b2, 4, axis=-1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs[::-1] if reverse else outputs, 1), h, c


def test_a_torch_checkpoint_gives_torch_numbers():
    rng = np.random.default_rng(0)
    shapes = {"weight_ih_l0": (16, 3), "weight_hh_l0": (16, 4), "bias_ih_l0": (16,), "bias_hh_l0": (16,)}
    state = {
        name + suffix: rng.standard_normal(shape).astype(np.float32)
        for suffix in ("", "_reverse")
        for name, shape in shapes.items()
    }
    lstm = QuantLSTM(3, 4, batch_first=True, bidirectional=True, rngs=nnx.Rngs(0))
    jqinject.load_state(lstm, recurrent_state_from_torch(state))
    out, (h, c) = lstm(X)
    x = np.asarray(X, np.float64)
    expected = [_torch_lstm(state, x, reverse) for reverse in (False, True)]
    np.testing.assert_allclose(out, np.concatenate([e[0] for e in expected], -1), atol=1e-6)
    np.testing.assert_allclose(h, np.stack([e[1] for e in expected]), atol=1e-6)
    np.testing.assert_allclose(c, np.stack([e[2] for e in expected]), atol=1e-6)


def _torch_state(lstm):
    """The state of one layer in both directions as torch's, read gate by gate."""
    state = {}
    for cell, suffix in zip(lstm.layers[0], ("", "_reverse"), strict=True):
        of_input, of_hidden = ([getattr(cell, a + b) for b in GATES[a]] for a in GATES)
        state[f"weight_ih_l0{suffix}"] = np.concatenate([layer.kernel[...].T for layer in of_input])
        state[f"weight_hh_l0{suffix}"] = np.concatenate([layer.kernel[...].T for layer in of_hidden])
        state[f"bias_hh_l0{suffix}"] = np.concatenate([layer.bias[...] for layer in of_hidden])
        state[f"bias_ih_l0{suffix}"] = np.zeros_like(state[f"bias_hh_l0{suffix}"])
    return state


def test_the_directions_share_kernels_of_the_input_with_two_gates_crossed():
    lstm = QuantLSTM(
        3, 4, batch_first=True, bidirectional=True, shared_input_hidden_weights=True, rngs=nnx.Rngs(0)
    )
    there, back = lstm.layers[0]
    state = _torch_state(lstm)
    i, f, g, o = np.split(state["weight_ih_l0"], 4)
    np.testing.assert_array_equal(state["weight_ih_l0_reverse"], np.concatenate([f, i, g, o]))
    assert not any(np.array_equal(a, b) for a, b in ((i, f), (f, g), (g, o)))
    expected = [_torch_lstm(state, np.asarray(X, np.float64), reverse) for reverse in (False, True)]
    np.testing.assert_allclose(lstm(X)[0], np.concatenate([e[0] for e in expected], -1), atol=1e-6)
    assert back.hi.kernel is not there.hi.kernel and back.hi.bias is not there.hi.bias
    coupled = QuantLSTM(
        3,
        4,
        bidirectional=True,
        shared_input_hidden_weights=True,
        coupled_input_forget_gates=True,
        rngs=nnx.Rngs(0),
    )
    there, back = coupled.layers[0]
    assert back.ig is there.ig and back.io is there.io and back.ii is not there.ii


@pytest.mark.parametrize("gate", ["ii", "if_", "ig", "io", "hi", "hf", "hg", "ho"])
def test_each_gate_of_each_direction_has_its_place(gate):
    """A number that is added to one gate of one direction changes what torch's formula says it does."""
    lstm = QuantLSTM(3, 4, batch_first=True, bidirectional=True, rngs=nnx.Rngs(0))
    before = np.asarray(lstm(X)[0])
    for direction, cell in enumerate(lstm.layers[0]):
        layer = getattr(cell, gate)
        layer.kernel.set_value(layer.kernel[...] + 0.5)
        after = np.asarray(lstm(X)[0])
        assert np.all((after != before).any((0, 1)) == (np.arange(8) // 4 == direction))
        expected = [
            _torch_lstm(_torch_state(lstm), np.asarray(X, np.float64), reverse)[0]
            for reverse in (False, True)
        ]
        np.testing.assert_allclose(after, np.concatenate(expected, -1), atol=1e-6)
        before = after


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weight_hr_l0": (2, 4)}, r"'weight_hr_l0' is no parameter"),
        ({"weight_ih_l0": (12, 3), "weight_hh_l0": (12, 4)}, r"not those of an LSTM \(four gates\)"),
        ({"weight_ih_l0": (16, 3)}, r"weight_hh missing"),
    ],
)
def test_what_is_no_such_checkpoint_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        recurrent_state_from_torch({name: np.zeros(shape) for name, shape in given.items()})


@pytest.mark.heavy
def test_a_layer_is_its_cell_under_flax():
    """The whole sequence at once gives what `nnx.RNN` gives step by step, once scales are settled."""
    layer = _settled(LAYERS["lstm"])
    outputs, (hidden, memory) = call(layer, X)
    cell = layer.layers[0][0]
    carry = tuple(jnp.zeros((2, 4)) for _ in range(2))
    (c, h), expected = nnx.RNN(cell, return_carry=True)(X, initial_carry=carry)
    np.testing.assert_allclose(outputs, expected, atol=1e-6)
    np.testing.assert_allclose(hidden[0], h, atol=1e-6)
    np.testing.assert_allclose(memory[0], c, atol=1e-6)


@pytest.mark.heavy
def test_time_may_come_first():
    first, second = LAYERS["lstm"](), _full(QuantLSTM)(3, 4, rngs=nnx.Rngs(0))
    one, other = call(first, X), call(second, jnp.swapaxes(X, 0, 1))
    np.testing.assert_allclose(one[0], jnp.swapaxes(other[0], 0, 1), atol=1e-6)


@pytest.mark.heavy
def test_a_sequence_in_two_parts():
    """The states of the first part begin the second."""
    layer = _settled(LAYERS["rnn"])
    whole, last = layer(X)
    first, between = layer(X[:, :3])
    second, end = layer(X[:, 3:], between)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, atol=1e-6)
    np.testing.assert_allclose(end, last, atol=1e-6)


@pytest.mark.slow
def test_quant_tensors_come_out():
    layer = _settled(lambda: LAYERS["lstm"](return_quant_tensor=True, io_bit_width=6, bidirectional=True))
    out, (hidden, memory) = call(layer, X)
    assert out.bit_width == 6 and out.is_valid and hidden.is_valid and memory.is_valid
    np.testing.assert_array_equal(as_array(out)[:, -1, :4], hidden.value[0])
    np.testing.assert_array_equal(as_array(out)[:, 0, 4:], hidden.value[1])
    np.testing.assert_array_equal(out.scale, layer.layers[0][0].io_quant.scale())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"shared_input_hidden_weights": True}, r"cure: bidirectional=True"),
        ({"shared_cell_state_quant": False}, r"cure: cat_output_cell_states=False"),
        ({"return_quant_tensor": True, "cell_state_quant": None}, r"needs cell_state_quant"),
        ({"num_layers": 0}, r"num_layers has to be at least 1, got 0"),
    ],
)
def test_what_does_not_go_together_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        _full(QuantLSTM)(3, 4, **given, rngs=nnx.Rngs(0))


def test_wrong_shapes_are_refused():
    rnn = QuantRNN(3, 4, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"takes \(time, batch, features\), got shape \(5, 3\)"):
        rnn(jnp.ones((5, 3)))
    with pytest.raises(
        ValueError, match=r"one row for each layer and direction, here 2, got shape \(1, 2, 4\)"
    ):
        rnn(jnp.ones((5, 2, 3)), jnp.zeros((1, 2, 4)))
    with pytest.raises(ValueError, match=r"at least one time step"):
        rnn(jnp.ones((0, 2, 3)))
