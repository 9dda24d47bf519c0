"""Models as people publish them, quantized to int8 and frozen: jqinject against Qwix, in one process.

    python benchmarks/real_models.py
    python benchmarks/real_models.py --model decoder --rounds 50

The models are those of `tests/model/_real_models.py`: language models with parameters and equations of their own,
experts, scanned blocks, state spaces, encoder and decoder, vision transformer, U-Net. Both libraries have int8 weights
with a scale for each output channel, and int8 inputs with one for each row, from the tensor at hand.

Qwix's `PtqProvider` leaves look-ups and some parameters float, and takes products of activations in some models.
`jqinject` quantizes every parameter; `jqinject as Qwix` what Qwix does there, as far as rules can say it: a table that
is looked up and contracted stays float, and layers that convolve have a scale for each pixel.

For each model: decibels between the float model's output and the quantized one's; how many contractions are of int8;
the first time in the process and the median of the others, interleaved, to quantize (and freeze) and to trace the
result; time to run it, compiled, interleaved. `-` where a library cannot.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from _timing import interleaved, print_table

ROOT = Path(__file__).parents[1]


def styles() -> Any:
    """Return the module that holds the models."""
    spec = importlib.util.spec_from_file_location("real_models", ROOT / "tests" / "model" / "_real_models.py")
    assert spec is not None and spec.loader is not None, "the file is there"
    module = importlib.util.module_from_spec(spec)
    sys.modules["real_models"] = module
    spec.loader.exec_module(module)
    return module


def called(model: Any, methods: Mapping[str, Any]) -> list[Any]:
    """Return the outputs of a model's methods."""
    outputs = []
    for name, given in methods.items():
        args, kwargs = ((), given) if isinstance(given, Mapping) else (given, {})
        out = getattr(model, name)(*args, **kwargs)
        outputs.append(out["logits"] if isinstance(out, dict) else out)
    return outputs


def by_jqinject(model: Any, methods: Mapping[str, Any], rules: Any = None) -> Any:
    """Return the frozen model."""
    from jqinject import freeze, quantize

    return freeze(quantize(model, everything() if rules is None else rules, methods=methods))


def everything() -> Any:
    """Return the rule for every parameter."""
    from jqinject import Rule
    from jqinject.quant import Int8DynamicActPerRowAbsMax, Int8WeightPerChannelAbsMax

    return Rule(weight_quant=Int8WeightPerChannelAbsMax, input_quant=Int8DynamicActPerRowAbsMax)


def rules_as_qwix(name: str) -> Any:
    """Return the rules for what Qwix quantizes in a model; None if Qwix cannot quantize it."""
    from jqinject import Rule
    from jqinject.quant import Int8DynamicActPerRowAbsMax

    products = Rule(op=("einsum", "dot_general"), input_quant=Int8DynamicActPerRowAbsMax)
    known: dict[str, Any] = {
        "blocks that split themselves": [
            Rule("embedder"),
            Rule(r"blocks\.\d+\.mlp"),
            everything(),
            products,
        ],
        "state space": [Rule("embedder"), everything()],
        "vision transformer": [everything(), products],
        "u-net": [everything()],
    }
    return known.get(name)


def by_qwix(model: Any, methods: Mapping[str, Any]) -> Any:
    """Return the model with Qwix's integers."""
    import qwix

    rules = [qwix.QuantizationRule(module_path=".*", weight_qtype="int8", act_qtype="int8")]
    (inputs,) = methods.values()
    return qwix.quantize_model(model, qwix.PtqProvider(rules), *inputs)


def decibels(wanted: list[Any], found: list[Any]) -> float:
    """Return the least ratio of signal to noise among the outputs."""
    import jax.numpy as jnp

    noise = [
        ((a - b).astype(jnp.float32) ** 2).sum() / (a.astype(jnp.float32) ** 2).sum()
        for a, b in zip(wanted, found, strict=True)
    ]
    return float(-10 * jnp.log10(jnp.max(jnp.stack(noise))))


def contractions(jaxpr: Any) -> list[bool]:
    """Return whether each contraction of a program is of int8."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general"):
            found.append(all(x.aval.dtype.name == "int8" for x in eqn.invars[:2]))
        for given in eqn.params.values():
            for part in given if isinstance(given, tuple) else (given,):
                inner = getattr(part, "jaxpr", part)
                found += contractions(inner) if hasattr(inner, "eqns") else []
    return found


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call takes, and its result."""
    import jax
    from flax import nnx

    start = time.perf_counter()
    made = call()
    jax.block_until_ready(jax.tree.leaves(nnx.state(made)) if isinstance(made, nnx.Module) else ())
    return time.perf_counter() - start, made


def measured(name: str, case: Any, rounds: int) -> list[tuple[str, ...]]:
    """Return a row for each library."""
    import jax
    from flax import nnx

    methods = case.methods
    wanted = called(case.make(), methods)
    libraries: dict[str, Callable[[Any], Any]] = {
        "float": lambda model: model,
        "jqinject": lambda model: by_jqinject(model, methods),
        "Qwix": lambda model: by_qwix(model, methods),
    }
    if rules_as_qwix(name) is not None:
        libraries["jqinject as Qwix"] = lambda model: by_jqinject(model, methods, rules_as_qwix(name))
    rows: dict[str, tuple[str, ...]] = {}
    makes, traces, runs = {}, {}, {}
    for library, quantized in libraries.items():
        try:
            model = case.make()
            first, made = timed(lambda quantized=quantized, model=model: quantized(model))
            graphdef, state = nnx.split(made)

            def trace(state: Any = state, graphdef: Any = graphdef) -> Any:
                # A new function each time: nothing is found in a cache of JAX.
                return jax.jit(lambda state: called(nnx.merge(graphdef, state), methods)).trace(state)

            first_trace, program = timed(trace)
            compiled = program.lower().compile()
            kinds = contractions(program.jaxpr.jaxpr)
            found = decibels(wanted, compiled(state))
        except Exception as error:
            rows[library] = ("-", "-", "-", "-", type(error).__name__)
            continue
        rows[library] = (
            f"{found:.1f}",
            f"{sum(kinds)} of {len(kinds)}",
            f"{first:.2f}",
            f"{first_trace:.2f}",
        )
        makes[library] = lambda quantized=quantized: timed(lambda: quantized(case.make()))
        traces[library] = trace
        runs[library] = lambda compiled=compiled, state=state: jax.block_until_ready(compiled(state))
    few = max(2, rounds // 4)
    times = [interleaved(makes, rounds=few, warmup=1), interleaved(traces, rounds=few, warmup=1)]
    times.append(interleaved(runs, rounds=rounds))
    return [
        (name, library, *row, *(each[library].show() for each in times if library in each))
        for library, row in rows.items()
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="one of the models; all by default")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    table = []
    for name, case in styles().cases().items():
        if options.model in (None, name):
            table += measured(name, case, options.rounds)
    first = ["decibels", "int8", "first quantize, s", "first trace, s"]
    times = [f"{what}, ms [quartiles]" for what in ("make and quantize", "trace", "run")]
    columns = ["model", "library", *first, *times]
    print_table("int8 weights and inputs", columns, table)


if __name__ == "__main__":
    main()
