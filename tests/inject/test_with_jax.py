"""The wiring with what it knows nothing of: jax arrays and dtypes, nnx modules."""

import copy

import pytest

from jqinject.inject import Binding, ExtendedInjector, explain, value

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
nnx = pytest.importorskip("flax.nnx")


class Scale(nnx.Module):
    def __init__(self, scaling_init, *, dtype=jnp.float32):
        self.value = nnx.Param(jnp.asarray(scaling_init, dtype))


class Bare(nnx.Module):
    pass


class Q(ExtendedInjector):
    scale = Scale
    bare = Bare
    scaling_init = 0.5


@pytest.mark.parametrize(
    "dtype", [jnp.int8, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4, jnp.dtype("int8"), jnp.float32]
)
def test_dtypes_are_plain_values(dtype):
    q = Q.let(payload=dtype, computed=value(lambda: dtype))
    assert q.payload is dtype
    assert q.computed is dtype
    assert Binding(q) == Binding(Q.let(payload=dtype, computed=q.__dependencies__["computed"].declared))


def test_modules_are_components_and_instances_are_values():
    assert Q.scale.value[...] == 0.5
    assert Q.let(dtype=jnp.bfloat16).scale.value.dtype == jnp.bfloat16
    assert isinstance(Q.bare, Bare)
    module = Q.scale
    assert Q.let(other=module).other is module
    array = jnp.ones(3)
    assert Q.let(other=array).other is array
    assert str(explain(Q.let(other=array), name="other")).startswith("other = float32[3]")


def test_jax_arrays_compare_by_value():
    assert Binding(Q, {"a": jnp.ones(3)}) == Binding(Q, {"a": jnp.ones(3)})
    assert Binding(Q, {"a": jnp.ones(3)}) != Binding(Q, {"a": jnp.zeros(3)})
    assert Binding(Q, {"a": jnp.ones(3)}) != Binding(Q, {"a": jnp.ones(3, jnp.bfloat16)})
    assert Binding(Q, {"a": jax.random.key(0)}) != Binding(Q, {"a": jax.random.key(1)})


def test_variables_compare_by_identity():
    variable = nnx.Param(jnp.ones(2))
    assert Binding(Q, {"a": variable}) == Binding(Q, {"a": variable})
    assert Binding(Q, {"a": variable}) != Binding(Q, {"a": nnx.Param(jnp.ones(2))})


class Proxy(nnx.Module):
    def __init__(self, binding):
        self.binding = binding
        self.scale = binding.resolve("scale")


def test_a_binding_is_static_metadata_that_shares_one_trace():
    traces = []

    @nnx.jit
    def run(proxy):
        traces.append(1)
        return proxy.scale.value * 2

    make = lambda n: Proxy(Binding(Q, {"scaling_init": n, "shape": [1, 2], "table": jnp.ones(2)}))  # noqa: E731
    one, two, other = make(0.5), make(0.5), make(0.25)
    assert nnx.graphdef(one) == nnx.graphdef(two)
    assert nnx.graphdef(one) != nnx.graphdef(other)
    run(one), run(two), run(nnx.clone(one)), run(copy.deepcopy(one))
    assert len(traces) == 1
    run(other)
    assert len(traces) == 2
    assert explain(one, name="scaling_init").value == 0.5
