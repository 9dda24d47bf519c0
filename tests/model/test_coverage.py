"""Coverage: which weights are quantized, how each is contracted, and why the others are not."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import jqinject
from jqinject import LowCoverageWarning, Rule, coverage, freeze, quantize, report, rules_report
from jqinject.quant import (
    Fp8e4m3OCPWeightPerTensorFloat,
    Int4WeightPerGroupAbsMax,
    Int8ActPerTensorFloat,
    Int8DynamicActPerRowFloat,
    Int8Training,
    Int8WeightPerChannelFloat,
    NF4WeightPerGroupFloat,
    NF4WeightPerTensorFloat,
    NVFP4Training,
)

W8A8 = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat)
X = jnp.linspace(-1, 1, 3 * 40).reshape(3, 40)
BIG = (40, 40)
IDS, ROWS = jnp.arange(3), Int8DynamicActPerRowFloat
GROUPS: Any = {"weight_quant": Int4WeightPerGroupAbsMax.let(group_size=8)}
TABLE = NF4WeightPerGroupFloat.let(group_size=8)


def matrix(seed: int, shape: tuple[int, ...] = BIG) -> nnx.Param[jax.Array]:
    return nnx.Param(jax.random.normal(jax.random.key(seed), shape) * 0.1)


class Mixed(nnx.Module):
    """A layer of Flax, a matrix of its own, a stack in a loop, and scores of two activations."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(40, 40, use_bias=False, rngs=nnx.Rngs(0))
        self.own = matrix(1)
        self.stack = matrix(2, (5, *BIG))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.layer(x) @ self.own
        x = jax.lax.scan(lambda x, w: (jnp.tanh(jnp.einsum("bi,io->bo", x, w)), None), x, self.stack[...])[0]
        return x @ x.T


@jax.custom_vjp
def own_derivative(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


own_derivative.defvjp(lambda x, w: (x @ w, (x, w)), lambda held, g: (g @ held[1].T, held[0].T @ g))


class Hidden(nnx.Module):
    """Weights that quantizers do not reach, each for a reason of its own; and three that they do."""

    def __init__(self) -> None:
        self.reached = matrix(0)
        self.scaled = matrix(1)
        self.branch = matrix(2)
        self.loop = matrix(3)
        self.derivative = matrix(4)
        self.variable = nnx.Variable(matrix(5)[...])
        self.codes = nnx.Param(jnp.ones(BIG, jnp.int8))
        self.added = matrix(6, (3, 400))
        self.unread = matrix(7)
        self.small = matrix(8, (40, 2))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x @ self.reached
        x = x @ (self.scaled[...] * 2.0)
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ self.branch[...], lambda x: x, x)
        x = jax.lax.while_loop(lambda x: x[0, 0] > 1, lambda x: x @ self.loop[...], x)
        x = own_derivative(x, self.derivative[...])
        x = x @ self.variable[...]
        x = x @ self.codes[...].astype(x.dtype)
        return (x.sum() + self.added[...]).sum() + x @ (self.small[...] + 1)


@pytest.mark.heavy
def test_every_contraction_is_listed_with_its_numbers() -> None:
    found = coverage(quantize(Mixed(), W8A8, inputs=(X,)), X)
    rows = {row.parameter: row for row in found.weights}
    assert list(rows) == ["layer.kernel", "own", "stack"]
    once = 3 * 40 * 40
    assert [row.operations for row in found.weights] == [once, once, 5 * once]  # a loop of five
    assert {(row.weight, row.input) for row in found.weights} == {("int8", "int8")}
    assert [row.contraction for row in found.weights][:2] == ["int", "int"]
    assert rows["stack"].operation == "einsum"
    (scores,) = found.activations
    assert (scores.operations, scores.is_low_bit) == (3 * 3 * 40, False)
    assert (found.matrices, found.quantized_matrices, found.missed) == (3, 3, ())
    assert found.weight_bytes == found.quantized_bytes == 4 * 7 * 40 * 40
    assert found.share_of_bytes == found.share_of_operations == 1.0


@pytest.mark.heavy
def test_frozen_abstract_and_float_models_are_covered_alike() -> None:
    quantized = quantize(Mixed(), W8A8, inputs=(X,))
    abstract = nnx.eval_shape(lambda: quantize(Mixed(), W8A8, inputs=(X,)))
    assert coverage(abstract, jax.ShapeDtypeStruct(X.shape, X.dtype)) == coverage(quantized, X)
    before = coverage(quantized, X)
    frozen = coverage(freeze(quantized, allow_uncalibrated=True), X)
    assert [row.contraction for row in frozen.weights][:2] == ["int"] * 2
    assert [row.operations for row in frozen.weights] == [row.operations for row in before.weights]
    assert frozen.line == before.line
    plain = coverage(Mixed(), X)
    assert (plain.quantized_matrices, plain.low_bit_operations, plain.share_of_bytes) == (0, 0, 0.0)
    assert {one.why for one in plain.missed} == {"it has no quantizer"}


def test_weights_alone_are_no_multiply_adds_in_low_bits() -> None:
    rule = Rule(weight_quant=Fp8e4m3OCPWeightPerTensorFloat)
    found = coverage(quantize(Mixed(), rule, inputs=(X,)), X)
    assert {row.weight for row in found.weights} == {found.weights[0].weight} != {""}
    assert {row.input for row in found.weights} == {""}
    assert (found.share_of_bytes, found.share_of_operations) == (1.0, 0.0)


def test_scores_in_low_bits() -> None:
    scores = Rule(op="dot_general", lhs_quant=Int8ActPerTensorFloat, rhs_quant=Int8ActPerTensorFloat)
    found = coverage(quantize(Mixed(), [W8A8, scores], inputs=(X,)), X)
    (row,) = found.activations
    assert (row.input, row.weight, row.is_low_bit) == ("int8", "int8", True)


def test_each_weight_that_is_not_reached_says_why() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LowCoverageWarning)
        model = quantize(Hidden(), W8A8, inputs=(X,))
    found = coverage(model, X)
    whys = {one.parameter: one.why for one in found.missed}
    expected = {
        "scaled": "not followed because of mul between the parameter and its contraction",
        "loop": "inside a loop of unknown length",
        "variable": "not a float nnx.Param, but a Variable",
        "codes": "not a float nnx.Param, but numbers of int8",
        "unread": "no traced call reads it",
        "small": "not followed because of add",
    }
    assert whys.keys() == expected.keys()
    for name, why in expected.items():
        assert why in whys[name], (name, whys[name])
    assert (found.quantized_matrices, found.matrices) == (3, 9)
    text = str(found)
    assert "not quantized: scaled (1,600 numbers): it is not followed because of mul" in text
    assert "not quantized: small" not in text and "1 more, of at most 1,024 numbers" in text
    assert "added" not in text


def test_rules_that_pass_a_weight_by_are_named_with_the_one_that_takes_it() -> None:
    rules = [Rule("own"), Rule("layer", weight_quant=Int8WeightPerChannelFloat)]
    model = quantize(Mixed(), [*rules, Rule("stac.", input_quant=Int8ActPerTensorFloat)], inputs=(X,))
    missed = {one.parameter: one for one in coverage(model, X).missed}
    assert missed["own"].why == "rule 0 keeps it float: Rule('own')"
    assert "rule 2 has no weight_quant" in missed["stack"].why
    (idle,) = [one for one in rules_report(Mixed(), rules, X).coverage.missed if one.parameter == "stack"]
    assert (idle.why, idle.rule) == ("no rule matches its path", "Rule('stack', ...)")
    cured = [*rules, Rule(re.findall(r"'(.*)'", idle.rule)[0], weight_quant=Int8WeightPerChannelFloat)]
    left = [one.parameter for one in coverage(quantize(Mixed(), cured, inputs=(X,)), X).missed]
    assert left == ["own"]


def test_without_inputs_the_program_is_not_looked_at() -> None:
    report = rules_report(Mixed(), W8A8)
    assert {one.parameter for one in report.coverage.missed} == {"own", "stack"}
    assert all("no inputs were given" in one.why for one in report.coverage.missed)
    lines = str(report).splitlines()
    assert "coverage: 1 of 3 matrices quantized, 14.3% of the weight bytes, multiply-adds unknown" in lines
    assert lines[-2].startswith("not quantized: stack (8,000 numbers): no inputs were given")


@pytest.mark.parametrize("rest", [W8A8, Rule(scheme=Int8Training)], ids=["quantizers", "scheme"])
def test_a_layer_that_a_rule_kept_float_is_one_of_a_quantized_model(rest: Rule) -> None:
    model = nnx.Sequential(*(nnx.Linear(40, 40, rngs=nnx.Rngs(seed)) for seed in range(2)))
    quantized = quantize(model, [Rule("layers.0"), rest], rngs=nnx.Rngs(0))
    for stage in (quantized, freeze(nnx.clone(quantized), allow_uncalibrated=True)):
        assert [one.why for one in coverage(stage, X).missed] == ["it has no quantizer"]
        assert [one.why for one in coverage(stage).missed] == ["it has no quantizer"]


def test_rules_report_plans_what_quantize_does() -> None:
    rules = [Rule("own"), W8A8]
    planned = rules_report(Mixed(), rules, X).coverage
    assert planned == coverage(quantize(Mixed(), rules, inputs=(X,)), X)
    assert planned.line in str(rules_report(Mixed(), rules, X))


def test_quantize_warns_if_most_of_what_was_asked_for_is_not_reached() -> None:
    with pytest.warns(LowCoverageWarning, match=r"1 of 3 matrices(.|\n)*stack(.|\n)*cure: .*inputs=\(x,\)"):
        quantize(Mixed(), W8A8)
    with pytest.warns(
        LowCoverageWarning, match=r"loop \(1,600 numbers\): it is contracted inside(.|\n)*coverage"
    ):
        quantize(Hidden(), W8A8, inputs=(X,))
    caches = Rule(cache_quant=Int8DynamicActPerRowFloat)  # which takes no weight from the next rule
    with pytest.warns(LowCoverageWarning, match="loop"):
        quantize(Hidden(), [caches, W8A8], inputs=(X,), allow_idle=True)


@pytest.mark.parametrize("rules", [W8A8, Rule("own", weight_quant=Int8WeightPerChannelFloat)])
def test_quantize_does_not_warn_if_it_reaches_what_was_asked_for(rules: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize(Mixed(), rules, inputs=(X,))


class Halves(nnx.Module):
    """Two methods, each with a weight, called with keywords."""

    def __init__(self) -> None:
        self.a, self.b = matrix(0), matrix(1)

    def encode(self, *, x: jax.Array, scale: float = 1.0) -> jax.Array:
        return scale * (x @ self.a)

    def decode(self, x: jax.Array) -> jax.Array:
        return x @ self.b


def test_a_method_is_covered_by_name_and_what_another_reads_is_told() -> None:
    model = quantize(Halves(), W8A8, methods={"encode": {"x": X, "scale": 2.0}, "decode": (X,)})
    found = coverage(model, method="encode", x=X, scale=2.0)
    assert [(row.parameter, row.name) for row in found.weights] == [("a", "encode:dot_general0")]
    half = quantize(Halves(), W8A8, methods={"encode": {"x": X}})
    (missed,) = coverage(half, method="encode", x=X).missed
    assert missed.parameter == "b" and "no traced call reads it" in missed.why


def test_a_branch_counts_by_its_most_multiply_adds() -> None:
    class Branches(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b = matrix(0), matrix(1)

        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.lax.cond(
                x[0, 0] > 0, lambda x: x @ self.a[...], lambda x: x @ self.b[...] @ self.b[...], x
            )

    assert coverage(Branches(), X).operations == 2 * 3 * 40 * 40


def test_report_lists_layers_and_parameters_alike_and_ends_with_the_coverage() -> None:
    model = freeze(quantize(Mixed(), W8A8, inputs=(X,)), allow_uncalibrated=True)
    found = report(model, X)
    assert [entry.path for entry in found] == ["layer", "own", "stack"]
    assert found["layer.kernel"] is found["layer"]
    assert {entry.program for entry in found} == {"s8 x s8 -> s32"}
    assert {entry.contraction for entry in found} == {"int"}
    assert [entry.operations for entry in found] == [row.operations for row in coverage(model, X).weights]
    assert found["own"].weight_bytes == 40 * 40 + 4 * 40  # integers, and a scale for each column
    assert found.coverage == coverage(model, X)
    lines = str(found).splitlines()
    assert lines[-1] == found.coverage.line
    assert "contraction of activations: dot_general1 (dot_general): float x float, 360 operations" in lines
    assert found.coverage.line in found.html()
    assert found.as_dict()["coverage"]["matrices"] == 3


def test_report_says_why_a_parameter_is_float() -> None:
    model = quantize(Mixed(), [Rule("own"), W8A8], inputs=(X,))
    found = report(model, X)
    assert found["own"].note == "rule 0 keeps it float: Rule('own')"
    assert str(found).splitlines()[-1].startswith("not quantized: own (1,600 numbers): rule 0 keeps it float")
    assert [entry.path for entry in report(Mixed(), X)] == ["layer", "own", "stack"]


class Subclass(nnx.Linear):
    """A layer of the user's, which is quantized through the program."""


@pytest.mark.heavy
def test_a_subclass_of_a_flax_layer_has_the_name_that_the_layer_has() -> None:
    def model(kind: type[nnx.Linear]) -> Any:
        return quantize(nnx.Sequential(kind(40, 40, rngs=nnx.Rngs(0))), W8A8, inputs=(X,))

    ours, through = report(model(nnx.Linear), X), report(model(Subclass), X)
    assert [entry.path for entry in ours] == [entry.path for entry in through] == ["layers.0"]
    assert ours["layers.0"].operations == through["layers.0.kernel"].operations == 3 * 40 * 40
    rows = [coverage(model(kind), X).weights[0] for kind in (nnx.Linear, Subclass)]
    assert rows[0].parameter == rows[1].parameter and rows[0].weight == rows[1].weight == "int8"
    frozen = report(freeze(model(Subclass), allow_uncalibrated=True), X)
    assert frozen["layers.0"].contraction == "int"


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match="coverage takes an NNX module, got int"):
        jqinject.coverage(3)  # pyright: ignore[reportArgumentType]


def test_a_table_that_a_layer_attends_to_is_quantized_there():
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.own = matrix(1)
            self.table = nnx.Embed(16, 40, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.table.attend(x @ self.own)

    model = quantize(Tied(), Rule(weight_quant=Int8WeightPerChannelFloat), inputs=X)
    found = coverage(model, X)
    assert [(one.parameter, one.weight) for one in found.weights] == [
        ("own", "int8"),
        ("table.embedding", "int8"),
    ]
    assert found.weights[1].name == "table"
    assert not found.missed


def kernel(x: jax.Array, *weights: jax.Array) -> jax.Array:
    """The product of matrices in a Pallas kernel, two blocks of rows."""

    def body(x: Any, *refs: Any) -> None:
        product = x[...]
        for weight in refs[:-1]:
            product = product @ weight[...]
        refs[-1][...] = product

    rows, columns = x.shape[0] // 2, weights[-1].shape[-1]
    of_weights = [pl.BlockSpec(weight.shape, lambda i: (0, 0)) for weight in weights]
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype),
        grid=(2,),
        in_specs=[pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0)), *of_weights],
        out_specs=pl.BlockSpec((rows, columns), lambda i: (i, 0)),
        interpret=True,
    )(x, *weights)


class Opaque(nnx.Module):
    """Matrices in kernels and in a function outside of the program."""

    def __init__(self) -> None:
        self.reached, self.first, self.second, self.python = (matrix(i) for i in range(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = kernel(x @ self.reached, self.first[...], self.second[...])
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x, w: x @ w, shape, x, self.python[...])


@pytest.mark.heavy
def test_what_goes_into_a_kernel_is_not_quantized() -> None:
    x = jnp.ones((4, 40))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LowCoverageWarning)
        model = quantize(Opaque(), W8A8, inputs=(x,))
    for stage in (model, freeze(nnx.clone(model), allow_uncalibrated=True)):
        found = coverage(stage, x)
        assert (found.matrices, found.quantized_matrices, found.share_of_bytes) == (4, 1, 0.25)
        assert (found.operations, found.low_bit_operations) == (3 * 4 * 40 * 40, 4 * 40 * 40)
        whys = {one.parameter: one.why for one in found.missed}
        assert set(whys) == {"first", "second", "python"}
        assert "inside a kernel (pallas_call), which runs as it was written" in whys["first"]
        assert "inside a function outside of the program (pure_callback)" in whys["python"]
    assert jqinject.report(model, x)["first"].operations == 2 * 4 * 40 * 40


@pytest.mark.heavy
@pytest.mark.parametrize("freezing", [lambda model: model, freeze])
def test_numbers_of_a_table_are_quantized_live_and_frozen(freezing: Any) -> None:
    class Tables(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(8, 32, rngs=nnx.Rngs(0))
            self.layer = nnx.Linear(32, 4, rngs=nnx.Rngs(1))
            self.own = matrix(0, (4, 32))

        def __call__(self, ids: jax.Array) -> jax.Array:
            return self.layer(self.embed(ids)) @ self.own

    ids = jnp.arange(3)
    for quantizer in (NF4WeightPerGroupFloat.let(group_size=4), NF4WeightPerTensorFloat):
        found = coverage(freezing(quantize(Tables(), Rule(weight_quant=quantizer), inputs=(ids,))), ids)
        assert {row.parameter: row.operations for row in found.weights} == {
            "embed.embedding": 0,
            "layer.kernel": 3 * 32 * 4,
            "own": 3 * 4 * 32,
        }
        assert {row.weight.partition(" in ")[0] for row in found.weights} == {"4-bit table"}
        assert (found.matrices, found.quantized_matrices, found.share_of_bytes) == (3, 3, 1.0)


def test_a_model_without_matrices_has_no_share_of_them() -> None:
    assert (
        coverage(nnx.Dropout(0.5, deterministic=True), X).line
        == "coverage: no matrix is contracted or looked up"
    )


@pytest.mark.parametrize("specs", [(P(None, "x"), P("x", None)), (P("x", None), P()), (P(), P())])
def test_shards_count_as_often_as_there_are(specs: Any) -> None:
    """What every device repeats counts once."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    class Sharded(nnx.Module):
        def __init__(self) -> None:
            self.own = matrix(0)

        def __call__(self, x: jax.Array) -> jax.Array:
            def product(x: jax.Array, w: jax.Array) -> jax.Array:
                return jax.lax.psum(x @ w, "x") if len(specs[1]) else x @ w

            out = P() if len(specs[1]) else specs[0]
            return jax.shard_map(product, mesh=mesh, in_specs=specs, out_specs=out)(x, self.own[...])

    x = jnp.ones((4, 40))
    assert coverage(Sharded(), x).operations == 4 * 40 * 40
    assert jqinject.report(Sharded(), x)["own"].operations == 4 * 40 * 40


class Block(nnx.Module):
    """Attention and a feed-forward layer, with a matrix of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query, self.key, self.out = (nnx.Linear(40, 40, rngs=rngs) for _ in range(3))
        self.up, self.down = matrix(0), nnx.Linear(40, 40, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x)
        x = x + self.out(jax.nn.softmax(self.query(h) @ self.key(h).T) @ h)
        return x + self.down(jax.nn.gelu(x @ self.up))


class Decoder(nnx.Module):
    """Blocks between a table and the same table; counts how often it is traced."""

    traces = 0

    def __init__(self, blocks: int) -> None:
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(16, 40, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(blocks))

    def __call__(self, ids: jax.Array) -> jax.Array:
        type(self).traces += 1
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.table.attend(x)


def traces(kind: type[Decoder], operation: Any) -> int:
    before = kind.traces
    operation()
    return kind.traces - before


@pytest.mark.heavy
def test_a_decoder_is_traced_no_more_than_three_times() -> None:
    class Counted(Decoder):
        traces = 0

    ids, floats = IDS, Counted(12)
    assert traces(Counted, lambda: rules_report(floats, W8A8, ids)) <= 3
    model = quantize(floats, W8A8, inputs=(ids,))
    assert traces(Counted, lambda: coverage(model, ids)) <= 2
    assert traces(Counted, lambda: report(model, ids)) <= 2


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("make", "inputs", "rule", "grid"),
    [
        (lambda: Decoder(1), IDS, Rule(**GROUPS, input_quant=ROWS), "int4 in groups of 8"),
        (lambda: Mixed(), X, Rule(**GROUPS, input_quant=ROWS, contraction="int"), "int4 in groups of 8"),
        (lambda: Decoder(1), IDS, Rule(weight_quant=TABLE), "4-bit table in groups of 8"),
        (lambda: Mixed(), X, Rule(scheme=Int8Training), "int8"),
    ],
    ids=["groups", "groups of integers", "table", "scheme"],
)
@pytest.mark.parametrize("keep_masters", [False, True])
def test_freezing_changes_no_row(make: Any, inputs: Any, rule: Rule, grid: str, keep_masters: bool) -> None:
    model = quantize(make(), rule, inputs=(inputs,), rngs=nnx.Rngs(0))
    before = coverage(model, inputs)
    after = coverage(freeze(model, keep_masters=keep_masters), inputs)

    def rows(covered: Any) -> list[Any]:
        names = ("path", "operation", "parameter", "layer", "weight", "input", "operations", "why")
        return [[getattr(row, name) for name in names] for row in covered.rows]

    assert rows(after) == rows(before) and after.line == before.line
    assert coverage(model).matrices == before.matrices
    assert {row.weight for row in before.weights} == {grid}


def test_a_cache_write_is_a_row() -> None:
    class Memory(nnx.Module):
        def __call__(self, x: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
            cache = jax.lax.dynamic_update_slice(cache, x, (0, 2, 0))
            return cache.sum(1), cache

    inputs = jnp.ones((1, 1, 64)), jnp.zeros((1, 8, 64))
    model = quantize(Memory(), Rule(cache_quant=Int8DynamicActPerRowFloat), inputs=inputs)
    covered = coverage(model, *inputs)
    assert [(row.path, row.weight) for row in covered.caches] == [("cache", "int8 per row")]
    assert "cache: cache: int8 per row" in str(report(model, *inputs))


class Tied(nnx.Module):
    """A table that is looked up and contracted."""

    def __init__(self) -> None:
        self.table = nnx.Param(nnx.Rngs(0).params.normal((64, 32)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return jnp.dot(self.table[...][ids], self.table[...].T)


@pytest.mark.parametrize("rule", [W8A8, Rule(scheme=NVFP4Training)], ids=["int8", "blocks of a scheme"])
def test_rows_are_the_same_before_and_after_freezing(rule: Rule) -> None:
    ids = jnp.arange(4)
    model = quantize(Tied(), rule, inputs=(ids,), rngs=nnx.Rngs(0))
    before = coverage(model, ids)
    after = coverage(freeze(model, allow_uncalibrated=True), ids)
    for old, new in zip(before.rows, after.rows, strict=True):
        changes = {
            "weight_bytes": new.weight_bytes,
            "contraction": new.contraction,
            "is_low_bit": new.is_low_bit,
        }
        assert replace(old, **changes) == new
