"""What `jqinject.program.jaxpr` takes for granted about JAX: one test for each assumption."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec

from jqinject.program.jaxpr import Body, settled

X = np.arange(3, dtype=np.float32)


@jax.custom_jvp
def with_tangent(x):
    return 2 * x


with_tangent.defjvp(lambda primals, tangents: (with_tangent(*primals), 5 * tangents[0]))


@jax.custom_vjp
def with_cotangent(x):
    return 2 * x


with_cotangent.defvjp(lambda x: (with_cotangent(x), None), lambda _, g: (7 * g,))


def double(x):
    return 2 * x


@jax.custom_batching.custom_vmap
def with_batching(x):
    return 2 * x


@with_batching.def_vmap
def batched(size, in_batched, x):
    return 2 * x, in_batched[0]


def looped(x):
    return jax.lax.scan(lambda carry, part: (carry + part, part + x.sum()), jnp.float32(0), x)


CALLS: dict[str, Any] = {
    "jit": jax.jit(double),
    "remat2": jax.checkpoint(double),
    "custom_jvp_call": with_tangent,
    "custom_vjp_call": with_cotangent,
    "custom_vmap_call": with_batching,
    "composite": jax.lax.composite(double, "test.double"),
}


def body_of(function, *arrays) -> Body:
    return Body.of(jax.make_jaxpr(function)(*(arrays or (X,))))


def rebound(body: Body, *arrays) -> list[Any]:
    return body.run(arrays, lambda equation, values: equation.bind(values), lambda value: value)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_one_body_on_its_operands(name):
    (equation,) = body_of(CALLS[name]).equations
    call = equation.call
    assert equation.name == name
    assert call is not None and equation.body is not None
    np.testing.assert_array_equal(rebound(call, X), [2 * X])
    assert [one.name for one in call.equations] == ["mul"]


@pytest.mark.parametrize("function", [*CALLS.values(), looped], ids=[*CALLS, "scan"])
def test_a_bound_equation_computes_the_same(function):
    body = body_of(function)
    for run in (lambda x: rebound(body, x), jax.jit(lambda x: rebound(body, x))):
        np.testing.assert_array_equal(jnp.stack(run(X)[-1:])[0], jax.tree.leaves(function(X))[-1])


@pytest.mark.parametrize(("function", "slope"), [(with_tangent, 5), (with_cotangent, 7)])
def test_a_bound_equation_keeps_its_derivative(function, slope):
    body = body_of(function)
    np.testing.assert_array_equal(jax.grad(lambda x: rebound(body, x)[0].sum())(X), slope * np.ones(3))


def test_a_compiled_function_has_a_name():
    equations = body_of(lambda x: jax.nn.relu(double(jax.jit(jnp.tanh)(x)))).equations
    assert [one.function for one in equations] == ["tanh", None, "relu"]  # relu: under a custom derivative
    assert [one.name for one in equations] == ["jit", "mul", "custom_jvp_call"]


def test_a_scan_has_constants_carried_values_and_slices():
    scan = next(one.scan for one in body_of(looped).equations if one.scan)
    assert (scan.constants, scan.carries, scan.options["length"], scan.options["reverse"]) == (1, 1, 3, False)
    assert scan.split(["x", "carry", "slices"]) == (["x"], ["carry"], ["slices"])
    assert [x.shape for x in scan.body.inputs] == [(3,), (), ()]
    np.testing.assert_array_equal(rebound(scan.body, X, np.float32(1), np.float32(2)), [3, 5])


def test_a_scan_with_other_options():
    scan = next(one for one in body_of(looped).equations if one.scan)
    forward, backward = scan.bind([X, np.float32(0), X]), scan.replaced(reverse=True)
    np.testing.assert_array_equal(forward[1], X + 3)
    assert backward.scan is not None and backward.scan.options["reverse"]


def test_a_while_loop_has_constants_of_its_condition_and_of_its_body():
    def function(x, limit, step):
        return jax.lax.while_loop(lambda y: y < limit, lambda y: y + step, x)

    loop = next(one.loop for one in body_of(function, 0.0, 5.0, 2.0).equations if one.loop)
    assert loop.split(["limit", "step", "x"]) == (["limit"], ["step"], ["x"])
    assert rebound(loop.body, 2.0, 1.0) == [3.0]
    assert rebound(loop.condition, 5.0, 1.0) == [True]


def test_a_while_loop_that_counts_from_a_literal_is_a_scan():
    def counts(x, limit=6):
        def step(carry):
            number, y = carry
            return number + 2, jnp.tanh(y) * number

        return jax.lax.while_loop(lambda carry: carry[0] < limit, step, (0, x))

    def converges(x):
        return jax.lax.while_loop(
            lambda c: (c[0] < 6) & (c[1].sum() > 0), lambda c: (c[0] + 1, c[1] / 2), (0, x)
        )

    loop = next(one for one in body_of(counts, X).equations if one.loop)
    assert loop.scan is not None and loop.times == loop.scan.options["length"] == 3
    constants, carry, slices = loop.scan.split([np.int32(0), X])
    assert (constants, len(carry), slices) == ([], 2, [])
    for _ in range(3):
        carry = rebound(loop.scan.body, *constants, *carry)
    np.testing.assert_allclose(carry[1], counts(X)[1], rtol=1e-6)
    for function, arguments in (
        (converges, (X,)),
        (partial(counts, limit=5000), (X,)),  # more steps than are counted
        (lambda n, x: jax.lax.fori_loop(0, n, lambda i, x: x + i, x), (3, X)),
    ):
        unknown = next(one for one in body_of(function, *arguments).equations if one.loop)
        assert unknown.scan is None and unknown.times == 1


def test_the_first_operand_of_a_branch_is_its_number():
    def function(number, x):
        return jax.lax.switch(number, [lambda x: x + 1, lambda x: x * 3, lambda x: -x], x)

    *_, branch = body_of(function, 1, 2.0).equations
    assert branch.inputs[0].dtype == np.int32
    assert [float(rebound(body, 2.0)[0]) for body in branch.branches] == [3, 6, -2]


def test_bodies_of_loops_and_branches_are_traced_anew():
    *_, branch = body_of(lambda x: jax.lax.cond(x > 0, lambda x: x + 1, lambda x: x * 3, x), 2.0).equations
    other = branch.with_bodies(lambda body, values: [10 * y for y in rebound(body, *values)])
    assert [float(other.bind([number, 2.0])[0]) for number in (0, 1)] == [60, 30]
    call = body_of(jax.jit(double)).equations[0]
    np.testing.assert_array_equal(call.with_bodies(lambda body, values: []).bind([X]), [2 * X])


def test_all_bodies_are_found():
    def function(x):
        x = jax.lax.while_loop(lambda x: jnp.sin(x[0]) > 0, jnp.cos, x)
        x = jax.lax.cond(x[0] > 0, jnp.tan, jax.jit(jnp.exp), x)
        return jax.lax.reduce(x, np.float32(0), lambda a, b: jnp.maximum(jnp.log(a), b), (0,))

    names = {one.name for one in body_of(function).everywhere()}
    assert names >= {"sin", "cos", "tan", "exp", "log", "while", "cond", "reduce"}


def test_literals_and_constants_are_arrays():
    table = jnp.arange(3.0)
    body = body_of(lambda x: x + table + 2, X)
    found: list[Any] = []
    body.run(
        [X], lambda equation, inputs: equation.bind(inputs), lambda value: (found.append(value), value)[1]
    )
    assert all(one.dtype == np.float32 for one in found)
    assert sorted(np.sum(one) for one in found) == [2, 3]


def test_open_jaxprs_are_bodies_too():
    closed = jax.make_jaxpr(double)(X)
    for jaxpr in (closed, closed.jaxpr):
        np.testing.assert_array_equal(rebound(Body.of(jaxpr), X), [2 * X])


def test_types_of_inputs_and_outputs():
    (equation,) = body_of(lambda x: x.astype(np.int32).reshape(3, 1), X).equations[1:]
    assert [(x.shape, x.dtype) for x in equation.inputs] == [((3,), np.int32)]
    assert [x.shape for x in equation.outputs] == [(3, 1)]
    assert equation.params["new_sizes"] == (3, 1)


def test_a_name_stack_has_the_scopes_around_an_equation_in_its_body():
    def function(x):
        with jax.named_scope("outer"):
            y = jax.jit(lambda x: jnp.sin(x))(x)
            with jax.named_scope("inner"):
                return jnp.cos(y)

    call, cosine = body_of(function).equations
    assert (call.scopes, cosine.scopes) == (["outer"], ["outer", "inner"])
    assert call.call is not None and call.call.equations[0].scopes == []
    again = body_of(lambda x: rebound(body_of(function), x))
    assert [one.scopes for one in again.equations] == [["outer"], ["outer", "inner"]]


def test_a_name_stack_tells_transformations_from_scopes():
    def function(x):
        with jax.named_scope("vmap"):
            return jnp.sin(x)

    mapped = jax.vmap(jax.vmap(function))
    for traced in (mapped, lambda x: rebound(body_of(mapped, x), x)):
        (sine,) = body_of(traced, np.ones((2, 2), np.float32)).equations
        assert (sine.scopes, sine.is_mapped) == (["vmap"], True)
    (sine,) = body_of(function).equations
    assert (sine.scopes, sine.is_mapped) == (["vmap"], False)


def test_an_einsum_has_its_specification_as_a_scope():
    x = np.ones((2, 2), np.float32)
    named = jax.named_scope("encoder->decoder")(jnp.matmul)  # a scope of the user's is no specification
    functions = (
        partial(jnp.einsum, "ab,bc->ac"),
        jax.vmap(partial(jnp.einsum, "a,ab->b")),
        jnp.matmul,
        named,
    )
    products = [
        [one.is_einsum for one in body_of(function, x, x if n != 1 else np.ones((2, 2, 2))).everywhere()]
        for n, function in enumerate(functions)
    ]
    assert [any(found) for found in products] == [True, True, False, False]


def test_a_name_of_a_checkpoint_is_a_label():
    named, doubled = body_of(lambda x: 2 * checkpoint_name(x, "kept")).equations
    assert (named.label, doubled.label) == ("kept", "")


def test_how_often_bodies_run():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    blocks = pl.BlockSpec((1,), lambda i: (i,))
    copied = pl.pallas_call(
        kernel, jax.ShapeDtypeStruct((3,), X.dtype), grid=(3,), in_specs=[blocks], out_specs=blocks
    )
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    split = jax.shard_map(double, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))
    times = {one.name: one.times for f in (looped, copied, split, double) for one in body_of(f).everywhere()}
    assert (times["scan"], times["pallas_call"], times["shard_map"], times["mul"]) == (3, 3, 1, 1)


def test_outputs_that_nothing_reads():
    def function(x):
        checkpoint_name(x, "unread")
        return checkpoint_name(x, "returned") + checkpoint_name(x, "read")

    equations = body_of(function).equations
    assert {one.label: one.is_read for one in equations if one.label} == {
        "unread": (False,),
        "returned": (True,),
        "read": (True,),
    }
    assert [one.label for one in body_of(function).used().equations] == ["returned", "read", ""]


def test_outputs_that_are_inputs():
    assert body_of(lambda x, y: (y, x + y, 3.0, x), X, X).returned_inputs == [1, None, None, 0]


def test_views_of_one_equation_are_equal():
    closed = jax.make_jaxpr(lambda x: double(double(x)))(X)
    first, second = (Body.of(closed).equations for _ in range(2))
    assert first == second and set(first) == set(second)
    assert first[0] != first[1]


def test_equations_are_a_known_function():
    pattern = body_of(jax.nn.softmax).skeleton()
    body = body_of(lambda x: jax.nn.softmax(x + 1) * 2)
    function = body.matched(1, 0, "softmax", pattern)
    assert function is not None and function.name == "softmax"
    np.testing.assert_array_equal(function.bind([X])[0], jax.nn.softmax(X))
    joined = body.with_equations([body.equations[0], function, *body.equations[1 + function.length :]])
    assert [one.name for one in joined.equations] == ["add", "softmax", "mul"]
    np.testing.assert_array_equal(rebound(joined, X), rebound(body, X))
    assert body_of(lambda x: jnp.exp(x) / jnp.exp(x).sum()).matched(0, 0, "softmax", pattern) is None


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_function_is_known_in_any_layout(axis):
    pattern = body_of(jax.nn.softmax).skeleton()
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for softmax in (partial(jax.nn.softmax, axis=axis), jax.vmap(jax.nn.softmax, axis, axis)):
        function = body_of(softmax, x).matched(0, 0, "softmax", pattern)
        assert function is not None and function.name == "softmax"
    halves = np.zeros(3, np.float16)
    assert body_of(jax.nn.softmax, halves).matched(0, 0, "softmax", pattern) is None  # sums in float32


def test_equations_whose_inner_values_are_read_are_no_function():
    def function(x):
        y = jnp.exp(x)
        return jnp.sin(y), y + 1

    pattern = body_of(lambda x: jnp.sin(jnp.exp(x))).skeleton()
    assert body_of(function).matched(0, 0, "f", pattern) is None
    assert body_of(lambda x: jnp.sin(jnp.exp(x)) + 1).matched(0, 0, "f", pattern) is not None


def test_facts_of_a_loop_settle():
    step = {"a": "b", "b": "c", "c": "c"}.__getitem__
    assert settled(lambda carry: [step(carry[0])], ["a"], max) == ["c"]
