"""An elementwise function as one operation: the numbers, derivatives and layouts of the function itself."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jqinject.ops.processes import elementwise, one_operation


def softened(x, scale):
    return jnp.tanh(x / scale) * x


X, SCALE = jnp.linspace(-2.0, 2.0, 24).reshape(8, 3), jnp.array([[0.5, 1.0, 2.0]])


def one(x, scale):
    return one_operation(softened, x, scale)


def with_slopes(x, scale):
    return elementwise(softened, x, scale)


def second_derivative(function):
    return jax.hessian(lambda x: function(x, SCALE[0]).sum())(X[3])


USES = {
    "eager": lambda function: function(X, SCALE),
    "jit": lambda function: jax.jit(function)(X, SCALE),
    "mapped rows": lambda function: jax.vmap(function, (0, None))(X, SCALE[0]),
    "mapped scales": lambda function: jax.vmap(function, (None, 0))(X, jnp.ones((2, 1, 3))),
    "gradients": lambda function: jax.grad(lambda *given: function(*given).sum(), argnums=(0, 1))(X, SCALE),
    "rematerialized": lambda function: jax.grad(jax.checkpoint(lambda x: function(x, SCALE).sum()))(X),
    "second derivative": second_derivative,
}


@pytest.mark.parametrize("function", [one, with_slopes])
@pytest.mark.parametrize("use", USES)
def test_it_is_the_function(use, function):
    for ours, expected in zip(*map(jax.tree.leaves, (USES[use](function), USES[use](softened))), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)


def test_derivatives_by_several_arguments_are_an_operation_each():
    program = str(jax.make_jaxpr(jax.grad(lambda x, scale: with_slopes(x, scale).sum(), (0, 1)))(X, SCALE))
    assert program.count("one_operation[") == 2
    by_one = str(jax.make_jaxpr(jax.grad(lambda x: with_slopes(x, SCALE).sum()))(X))
    assert by_one.count("one_operation[") == 1


@pytest.mark.parametrize("explicit", [False, True])
def test_a_result_lies_as_its_operand(explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.sharding.NamedSharding(mesh, P("data")))
        y = jax.jit(one)(x, SCALE)
        per_shard = jax.shard_map(one, in_specs=(P("data"), P()), out_specs=P("data"))(x, SCALE)
    assert y.sharding.is_equivalent_to(x.sharding, 2)
    np.testing.assert_array_equal(y, per_shard)
    np.testing.assert_allclose(y, softened(X, SCALE), rtol=1e-6)


def test_an_exported_program_has_the_operations_of_the_function():
    exported = jax.export.export(jax.jit(one))(X, SCALE)
    assert "stablehlo.tanh" in exported.mlir_module()
    np.testing.assert_allclose(exported.call(X, SCALE), softened(X, SCALE), rtol=1e-6)
