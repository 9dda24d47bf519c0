"""What a plain array allows, a quantized tensor allows: every kind of tensor with functions of JAX and NumPy."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject.ops import FloatGrid, TableGrid
from jqinject.quant_tensor import (
    CodebookQuantTensor,
    FloatQuantTensor,
    GroupwiseCodebookQuantTensor,
    GroupwiseFloatQuantTensor,
    GroupwiseIntQuantTensor,
    IntQuantTensor,
    QuantTensor,
)

VALUE = jnp.array([[0.5, -2.0, 0.25, 0.0], [1.0, -0.5, 0.0, 2.0]])
GROUPED, ONES = VALUE.reshape(2, 2, 2), jnp.ones((2, 2, 1))
TABLE = TableGrid((-2.0, -0.5, 0.0, 0.25, 0.5, 1.0, 2.0))
KINDS = {
    "int": IntQuantTensor(VALUE, 0.25, 0.0, 8, True, False),
    "int, channels": IntQuantTensor(VALUE, jnp.full((1, 4), 0.25), 3.0, 8, True, False),
    "float": FloatQuantTensor(VALUE, 1.0, jnp.float8_e4m3fn),
    "float, channels": FloatQuantTensor(VALUE, jnp.ones((1, 4)), FloatGrid(3, 2)),
    "codebook": CodebookQuantTensor(VALUE, 1.0, TABLE),
    "int, groups": GroupwiseIntQuantTensor(GROUPED, ONES / 4, 0.0, 2, -1, 8, True, False),
    "float, groups": GroupwiseFloatQuantTensor(GROUPED, ONES, 2, -1, jnp.float8_e4m3fn),
    "codebook, groups": GroupwiseCodebookQuantTensor(GROUPED, ONES, 2, -1, TABLE),
}
PLAIN = np.full((2, 4), 1.5, np.float32)

ONE = "exp abs negative sign sum mean max min any all argmax cumsum ravel transpose squeeze sort square isnan median"
TWO = "add subtract multiply divide maximum power equal less greater_equal matmul"
FUNCTIONS = {
    **{f"jnp.{name}": getattr(jnp, name) for name in ONE.split()},
    **{f"np.{name}": getattr(np, name) for name in ONE.split()},
    **{
        f"nn.{name}": getattr(jax.nn, name)
        for name in ["silu", "relu", "gelu", "softmax", "leaky_relu", "softplus"]
    },
    **{
        f"{where}.{name}": lambda q, name=name, module=module: jnp.stack(
            [
                jnp.asarray(getattr(module, name)(q, other)).astype(jnp.float32)
                for other in (PLAIN, q)
                if name != "matmul"
            ]
            or [getattr(module, name)(q, PLAIN.T), getattr(module, name)(PLAIN, q.T)][:1]
        )
        for where, module in (("jnp", jnp), ("np", np))
        for name in TWO.split()
    },
    **{
        f"{where}.{name}": function
        for where, m in (("jnp", jnp), ("np", np))
        for name, function in {
            "reshape": lambda q, m=m: m.reshape(q, (4, -1)),
            "reshape in another order": lambda q, m=m: m.reshape(q, (4, 2), order="F"),
            "stack": lambda q, m=m: m.stack([q, q]),
            "vstack": lambda q, m=m: m.vstack([q, PLAIN]),
            "concatenate": lambda q, m=m: m.concatenate([q, q], axis=1),
            "split": lambda q, m=m: m.split(q, 2, axis=1),
            "array_split": lambda q, m=m: m.array_split(q, 3, axis=1),
            "where": lambda q, m=m: m.where(q > 0, q, 0.0),
            "clip": lambda q, m=m: m.clip(q, -1, 1),
            "expand_dims": lambda q, m=m: m.expand_dims(q, 1),
            "moveaxis": lambda q, m=m: m.moveaxis(q, 0, 1),
            "swapaxes": lambda q, m=m: m.swapaxes(q, 0, 1),
            "pad": lambda q, m=m: m.pad(q, 1),
            "take": lambda q, m=m: m.take(q, np.array([0, 1]), axis=1, mode="clip"),
            "sum along": lambda q, m=m: m.sum(q, axis=0, keepdims=True),
            "einsum": lambda q, m=m: m.einsum("ij,kj->ik", q, q),
            "dot": lambda q, m=m: m.dot(q, q.T),
            "of a list": lambda q, m=m: m.asarray([q, q]),
        }.items()
    },
}
OPERATORS = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "lt", "ge")
}
METHODS = {
    **{name: operator.methodcaller(name) for name in ("sum", "mean", "min", "ravel", "flatten", "argmax")},
    "tolist": lambda q: (q.tolist(), q.std()),
    "sum along": lambda q: q.sum(axis=0, keepdims=True),
    "reshape": lambda q: q.reshape(4, 2),
    "reshape, one argument": lambda q: q.reshape((2, 2, 2)),
    "transpose": lambda q: q.transpose(1, 0),
    "properties": lambda q: (q.T, q.mT, q.real, q.nbytes, q.itemsize),
    "at": lambda q: q.at[0].set(1.0),
    "astype": lambda q: q.astype(jnp.float16),
    "block_until_ready": lambda q: q.block_until_ready(),
    "indices": lambda q: (q[0], q[:, 1:3], q[..., None], q[np.array([1, 0])], q[1, 3], q[np.asarray(VALUE) > 0]),
    "iteration": list,
    "numbers": lambda q: (float(q[0, 0]), int(q[1, 3]), bool(q[0, 0]), complex(q[0, 0]), f"{q[0, 0]:.2f}"),
    "round": lambda q: (round(q), round(q, 1)),
    "divmod": lambda q: (divmod(q, 2.0), divmod(2.0, q + 3.0)),
    "contains": lambda q: (0.5 in q[0], 0.75 in q[0]),
    "in place": lambda q: operator.iadd(PLAIN.copy(), q),
    "reduction of a ufunc": lambda q: (np.add.reduce(q), np.add.outer(q, q), np.exp(q, out=PLAIN.copy())),
    "tree": lambda q: (jax.tree.map(lambda leaf: leaf, q), jax.jit(lambda q: q.sum() + jnp.sum(q))(q)),
    "testing": lambda q: np.testing.assert_allclose(q, VALUE),
    **{
        f"operator {name}": lambda q, f=function: (
            f(q, 1.5), f(1.5, q), f(q, PLAIN), f(PLAIN, q), f(np.float32(1.5), q), f(jnp.asarray(PLAIN), q)
        )
        for name, function in OPERATORS.items()
    },
    "operator matmul": lambda q: (q @ PLAIN.T, PLAIN.T @ q, q @ q.T),
}  # fmt: skip


def numbers(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, QuantTensor))
    return [leaf.value if isinstance(leaf, QuantTensor) else leaf for leaf in leaves]


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_it_gives_what_the_dequantized_array_gives(name):
    function = FUNCTIONS[name] if name in FUNCTIONS else METHODS[name]
    expected = numbers(function(VALUE))
    for kind, tensor in KINDS.items():
        got = numbers(function(tensor))
        assert len(got) == len(expected)
        for ours, theirs in zip(got, expected, strict=True):
            if isinstance(theirs, str):
                assert ours == theirs
            else:
                np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=kind)


@pytest.mark.heavy
def test_shapes_and_numpys_operators_keep_the_integers():
    x = KINDS["int, channels"]
    for y in (jnp.reshape(x, (2, 2, 2)), np.reshape(x, (4, 2)), np.transpose(x), PLAIN + x, x + PLAIN):
        assert isinstance(y, IntQuantTensor) and y.is_valid
    assert isinstance(np.less(PLAIN, x), jax.Array)
    assert isinstance(jax.jit(lambda x: PLAIN * x - PLAIN < x)(x), jax.Array)


def test_what_goes_straight_to_lax_names_the_cure():
    for tensor in KINDS.values():
        with pytest.raises(ValueError, match=r"jax\.numpy\.array"):
            jax.nn.sigmoid(tensor)
        np.testing.assert_array_equal(jax.nn.sigmoid(tensor.value), jax.nn.sigmoid(VALUE))
        with pytest.raises(TypeError, match=r"is float; use \.int\(\)"):
            tensor.astype(jnp.int32)
        with pytest.raises(TypeError, match=r"cannot be changed"):
            np.exp(PLAIN, out=tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_the_integers_of_every_kind(kind):
    tensor = KINDS[kind]
    integers, traced = tensor.int(), jax.jit(lambda x: x.int())(tensor)
    assert integers.dtype == traced.dtype == (jnp.int8 if kind.startswith("int") else jnp.uint8)
    assert integers.shape == tensor.shape
    np.testing.assert_array_equal(traced, integers)
    np.testing.assert_array_equal(tensor.int(float_datatype=True), integers.astype(jnp.float32))
    if kind.startswith("int"):
        np.testing.assert_array_equal((traced.astype(jnp.float32) - tensor.zero_point) * tensor.scale, VALUE)
    elif kind.startswith("codebook"):
        np.testing.assert_array_equal(np.asarray(TABLE.values, np.float32)[integers], VALUE)
    else:
        again = FloatQuantTensor.from_payload(integers, 1.0, format=tensor.format)
        np.testing.assert_array_equal(again.value, VALUE)


def test_integers_of_what_is_not_on_its_grid():
    for kind in ("float", "codebook", "codebook, groups"):
        with pytest.raises(ValueError, match=r"not valid: value / scale is not .*\n  cure: quantize"):
            KINDS[kind].set(value=VALUE + 0.03).int()
