"""Models as people publish them, quantized to int8 and frozen: jqinject against Qwix, in one process.

    python benchmarks/real_models.py
    python benchmarks/real_models.py --model decoder --rounds 50

The models are those of `tests/model/_real_models.py`: language models with parameters and equations of their own,
experts, scanned blocks, state spaces, encoder and decoder, vision transformer, U-Net. int8 weights with a scale for
each output channel; int8 inputs whose range is that of the tensor at hand, of each of its rows with Qwix's
`PtqProvider`.

For each model: decibels between the float model's output and the quantized one's; seconds to quantize (and freeze), to
trace the result; milliseconds to run it, compiled, interleaved. `-` where a library cannot.
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


def by_jqinject(model: Any, methods: Mapping[str, Any]) -> Any:
    """Return the frozen model."""
    from jqinject import Rule, freeze, quantize
    from jqinject.quant import Int8ActDynamicPerTensor, Int8WeightPerChannelFloat

    rule = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActDynamicPerTensor)
    return freeze(quantize(model, rule, methods=methods))


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


def measured(make: Callable[[], Any], methods: Mapping[str, Any], rounds: int) -> list[tuple[str, ...]]:
    """Return a row for each library."""
    import jax
    from flax import nnx

    wanted = called(make(), methods)
    rows, runs = {}, {}
    for name, quantized in (("jqinject", by_jqinject), ("Qwix", by_qwix)):
        try:
            quantized(make(), methods)  # what is compiled once
            model = make()
            start = time.perf_counter()
            made = quantized(model, methods)
            jax.block_until_ready(jax.tree.leaves(nnx.state(made)))
            to_quantize = time.perf_counter() - start
            graphdef, state = nnx.split(made)

            def run(state: Any, graphdef: Any = graphdef) -> Any:
                return called(nnx.merge(graphdef, state), methods)

            start = time.perf_counter()
            program = jax.jit(run).trace(state)
            to_trace = time.perf_counter() - start
            compiled = program.lower().compile()
            found = compiled(state)
        except Exception as error:
            rows[name] = ("-", "-", "-", type(error).__name__)
            continue
        rows[name] = (f"{decibels(wanted, found):.1f}", f"{to_quantize:.2f}", f"{to_trace:.2f}")
        runs[name] = lambda compiled=compiled, state=state: jax.block_until_ready(compiled(state))
    times = interleaved(runs, rounds=rounds) if runs else {}
    return [(name, *row, *([times[name].show()] if name in times else [])) for name, row in rows.items()]


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
            table += [(name, *row) for row in measured(case.make, case.methods, options.rounds)]
    columns = ["model", "library", "decibels", "quantize, s", "trace, s", "run, ms [quartiles]"]
    print_table("int8 weights and inputs", columns, table)


if __name__ == "__main__":
    main()
