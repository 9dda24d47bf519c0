"""IntQuantTensor through JAX's and NNX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.ops import NF4, FloatGrid, IntGrid
from jqinject.quant_tensor import IntQuantTensor, QuantTensor, in_groups


def tensor(shape=(3, 2), scale=0.5, bit_width=8, training=False):
    value = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) * 0.5
    return IntQuantTensor(value, scale, 0.0, bit_width, True, training)


@pytest.mark.heavy
def test_leaves_and_their_names():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tensor())[0]]
    assert paths == [".value", ".scale", ".zero_point"]
    learned = tensor(bit_width=jnp.float32(5.5))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(learned)[0]]
    assert paths == [".value", ".scale", ".zero_point", ".grid.bit_width"]


def test_static_fields_are_part_of_the_structure():
    assert jax.tree.structure(tensor()) == jax.tree.structure(tensor())
    assert jax.tree.structure(tensor()) != jax.tree.structure(tensor(bit_width=4))
    assert jax.tree.structure(tensor()) != jax.tree.structure(tensor(training=True))


def test_jit_keeps_everything_and_traces_once():
    traces = []

    @jax.jit
    def double(x):
        traces.append(x)
        return x + x

    for _ in range(2):
        y = double(tensor())
    assert len(traces) == 1
    assert (y.bit_width, y.signed, y.training, y.is_valid) == (9, True, False, True)
    np.testing.assert_array_equal(y.int(), (tensor() + tensor()).int())


@pytest.mark.parametrize("bit_width", [8, jnp.float32(8.0)])
def test_is_valid_and_int_under_jit(bit_width):
    x = tensor(bit_width=bit_width)
    valid, integers = jax.jit(lambda y: (y.is_valid, y.int()))(x)
    assert bool(valid)
    # A learned bit width is not known while tracing and chooses no dtype.
    assert integers.dtype == (jnp.int8 if isinstance(bit_width, int) else jnp.int32)
    np.testing.assert_array_equal(integers, x.int())


@pytest.mark.heavy
def test_gradients_reach_value_scale_and_learned_bit_width():
    def loss(x):
        y = x + x
        return jnp.sum(y.value) + y.scale + y.bit_width

    grads = jax.grad(loss)(tensor(bit_width=jnp.float32(8.0)))
    np.testing.assert_allclose(grads.value, np.full((3, 2), 2.0))
    np.testing.assert_allclose(grads.scale, 1.0)
    assert grads.bit_width > 0
    assert jax.grad(lambda x: jnp.sum(x.value))(tensor()).bit_width == 8


def axes_of(x):
    """What is mapped over the first axis: everything but scalars."""
    return jax.tree.map(lambda leaf: 0 if leaf.ndim else None, x)


def test_vmap_over_the_value_alone():
    x = tensor()
    rows = jax.vmap(lambda row: row.int().sum(), in_axes=(axes_of(x),))(x)
    np.testing.assert_array_equal(rows, x.int().sum(1))
    prefix = IntQuantTensor(0, None, None, 8, True, False)
    np.testing.assert_array_equal(jax.vmap(lambda row: row.int().sum(), in_axes=(prefix,))(x), rows)
    out = jax.vmap(lambda row: row + row, in_axes=(prefix,), out_axes=axes_of(x.set(bit_width=9)))(x)
    assert out.scale.shape == ()


def test_vmap_over_a_per_channel_scale():
    x = IntQuantTensor(jnp.ones((3, 2)), jnp.array([[0.5], [1.0], [0.25]]), 0.0, 8, True, False)
    integers = jax.vmap(lambda row: row.int(), in_axes=(axes_of(x),))(x)
    np.testing.assert_array_equal(integers, x.int())


def test_scan_carry():
    def step(carry, _):
        return carry.set(value=carry.value + carry.scale), carry.int()

    last, history = jax.lax.scan(step, tensor(), None, length=3)
    np.testing.assert_array_equal(last.int(), tensor().int() + 3)
    assert history.shape == (3, 3, 2)


def test_tree_map_and_eval_shape():
    x = jax.tree.map(lambda leaf: leaf * 2, tensor())
    assert float(x.scale) == 1.0
    abstract = jax.eval_shape(lambda y: y + y, tensor())
    assert isinstance(abstract, IntQuantTensor)
    assert abstract.shape == (3, 2)


def test_nnx_attribute_jit_grad_and_state():
    class Holder(nnx.Module):
        def __init__(self):
            self.x = nnx.data(tensor())
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self):
            return (self.x * self.w[...]).sum()

    holder = Holder()
    np.testing.assert_allclose(nnx.jit(lambda m: m())(holder), holder())
    grads = nnx.grad(lambda m: m())(holder)
    np.testing.assert_allclose(grads["w"][...], tensor().value.sum(0))
    copied = nnx.clone(holder)
    np.testing.assert_array_equal(copied.x.int(), holder.x.int())


STORED = {
    "integers": (IntGrid(4), jnp.array([[1, -8]], jnp.int8)),
    "codes of minifloats": (FloatGrid(2, 1), jnp.array([[2, 15]], jnp.uint8)),
    "8-bit floats": (FloatGrid.of_dtype(jnp.float8_e4m3fn), jnp.array([[2, 448]], jnp.float8_e4m3fn)),
    "codes of a table": (NF4, jnp.array([[0, 15]], jnp.uint8)),
}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("grid, payload", STORED.values(), ids=STORED)
def test_a_stored_tensor_is_a_pytree_of_its_payload(grid, payload, grouped):
    x = QuantTensor.stored(payload, jnp.array([[0.5]]), None, grid, jnp.bfloat16)
    x = in_groups(x, 2, 0) if grouped else x
    assert jax.tree.leaves(x)[0] is payload
    y = jax.jit(lambda x: x)(x)
    assert type(y) is type(x) and y.is_stored and y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y.value, x.value)
    np.testing.assert_array_equal(
        y.int(), payload.reshape(y.shape) if grid.dtype != payload.dtype else x.int()
    )
    plain = x.set(value=x.value)
    assert not plain.is_stored and plain.without_value().is_stored == (grid.dtype == payload.dtype)
    np.testing.assert_array_equal(plain.int(), y.int())
