"""One rule on models in the styles in which people publish them: covered, trained, frozen, served in integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqinject
from jqinject import Rule
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat
from tests.model._real_models import Case, cases

W8A8 = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat)
CASES = cases()
FEW = ("decoder",)


def called(model: Any, method: str, given: Any) -> jax.Array:
    args, kwargs = ((), given) if isinstance(given, Mapping) else (given, {})
    out = getattr(model, method)(*args, **kwargs)
    return out["logits"] if isinstance(out, dict) else out


def compiled(model: nnx.Module, case: Case) -> list[jax.Array]:
    run = nnx.jit(lambda model: [called(model, name, given) for name, given in case.methods.items()])
    return run(model)


def decibels(wanted: list[jax.Array], found: list[jax.Array]) -> float:
    pairs = list(zip(wanted, found, strict=True))
    noise = max(float(((a - b) ** 2).sum() / (a**2).sum()) for a, b in pairs)
    return float("inf") if noise == 0 else float(-10 * jnp.log10(noise))


def gradients(model: nnx.Module, case: Case) -> dict[tuple[Any, ...], float]:
    def loss(model: Any) -> jax.Array:
        outputs = [called(model, name, given) for name, given in case.methods.items()]
        return sum((jnp.mean(y**2) for y in outputs), start=jnp.zeros(()))

    found = nnx.jit(nnx.grad(loss))(model)
    return {tuple(path): float(jnp.abs(leaf[...]).max()) for path, leaf in nnx.to_flat_state(found)}


def contractions(jaxpr: Any) -> Iterator[tuple[str, ...]]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general"):
            yield tuple(x.aval.dtype.name for x in eqn.invars[:2])
        for inner in eqn.params.values():
            for part in inner if isinstance(inner, tuple) else (inner,):
                program = getattr(part, "jaxpr", part)
                yield from contractions(program) if hasattr(program, "eqns") else ()


def frozen_contractions(model: nnx.Module, case: Case) -> list[tuple[str, ...]]:
    graphdef, state = nnx.split(model, graph=True)

    def run(state: Any) -> Any:
        model = nnx.merge(graphdef, state)
        return [called(model, name, given) for name, given in case.methods.items()]

    return list(contractions(jax.make_jaxpr(run)(state).jaxpr))


def stored_bytes(model: nnx.Module) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)) if hasattr(x, "nbytes"))


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.lengthy) for name in CASES]
)
def test_one_rule_holds_for_the_whole_model(name: str) -> None:
    case = CASES[name]
    plain = case.make()
    wanted = compiled(plain, case)
    model: Any = jqinject.quantize(plain, W8A8, methods=case.methods)

    trained = gradients(model, case)
    for path, size in gradients(plain, case).items():
        assert trained[path] > 0 or size == 0, path

    for method, given in case.methods.items():
        report = jqinject.calibrate(model, [given, given], method=method, progress=False)
        assert report.batches == 2
    model.eval()
    evaluated = compiled(model, case)
    assert 20 <= decibels(wanted, evaluated) < 80

    before = stored_bytes(plain)
    matrices = sum(x.size for x in jax.tree.leaves(nnx.state(plain, nnx.Param)))
    frozen = jqinject.freeze(model)
    floats = sum(x.size for x in jax.tree.leaves(nnx.state(frozen, nnx.Param)))
    assert floats <= 0.06 * matrices  # norms and biases, which are many in models as small as these
    assert stored_bytes(frozen) <= 0.4 * before
    assert decibels(evaluated, compiled(frozen, case)) > 60

    kinds = frozen_contractions(frozen, case)
    assert kinds.count(("int8", "int8")) >= len(kinds) - ACTIVATIONS[name]


# Contractions of two activations, which this rule leaves alone: two for each attention; `jnp.einsum` of three operands
# has one more.
ACTIVATIONS = {
    "decoder": 4,
    "blocks that split themselves": 4,
    "experts by einsum": 6,
    "experts by ragged_dot": 4,
    "scanned blocks": 2,
    "state space": 0,
    "encoder and decoder": 6,
    "vision transformer": 2,
    "u-net": 0,
}
