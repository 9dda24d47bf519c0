"""What serving costs: a model of dense layers, float against frozen against Qwix and torch.

    python benchmarks/serve.py
    python benchmarks/serve.py --torch-python path/to/python
    python benchmarks/serve.py --conv

Every model is jitted, compiled before, and timed interleaved in one process; torch, where an interpreter that has it is
given, in a second process on the same machine. int8 weights, one scale for each output channel, and int8 inputs.

jqinject: `static` has input scales that were averaged in training, so that nothing is reduced; `dynamic` is Flax's
layer with `QDotGeneral(config_v4())`, a scale for every row of the batch. Both are frozen. Qwix: a model quantized
after training, weights stored as integers. torch: dynamic int8. `products` is the integer products alone, of bytes
that nobody rounds or scales: what is left to win. The ratio is float's median in JAX over this one's: above 1 is
faster.

--conv: one 3 x 3 convolution on 28 x 28 pixels, of 64, 128 and 256 channels.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _timing import Timing, interleaved, print_table

BATCHES = (1, 4, 16, 64, 256, 1024)
CHANNELS = (64, 128, 256)
PIXELS = 28
Call = Callable[[Any], object]


def jax_models(width: int, depth: int) -> dict[str, Call]:
    """Return the models that run in JAX, by name; each waits for its result."""
    import jax
    from flax import nnx

    import jqinject
    from jqinject.dot import QDotGeneral, config_v4
    from jqinject.nn import QuantLinear
    from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat

    class Averaged(Int8ActPerTensorFloat):
        """The input scale is a running average of the batches' maxima."""

        scaling_impl_type = "stats"
        scaling_stats_op = "max"

    class MLP(nnx.Module):
        """Layers of one width with ReLU between."""

        def __init__(self, make_layer: Callable[[nnx.Rngs], nnx.Module]) -> None:
            self.layers = nnx.List([make_layer(nnx.Rngs(n)) for n in range(depth)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers[:-1]:
                x = nnx.relu(layer(x))
            return self.layers[-1](x)

    def static(rngs: nnx.Rngs) -> nnx.Module:
        return QuantLinear(
            width, width, weight_quant=Int8WeightPerChannelFloat, input_quant=Averaged, rngs=rngs
        )

    def dynamic(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(width, width, dot_general=QDotGeneral(config_v4()), rngs=rngs)

    x = jax.random.normal(jax.random.key(0), (64, width))
    averaged = MLP(static)
    averaged(x)
    models: dict[str, Any] = {
        "float": MLP(lambda rngs: nnx.Linear(width, width, rngs=rngs)),
        "static": jqinject.freeze(averaged),
        "dynamic": jqinject.freeze(MLP(dynamic)),
    }
    if importlib.util.find_spec("qwix") is not None:
        import qwix

        rule = qwix.QuantizationRule(weight_qtype="int8", act_qtype="int8")
        models["Qwix"] = qwix.quantize_model(
            MLP(lambda rngs: nnx.Linear(width, width, rngs=rngs)), qwix.PtqProvider([rule]), x
        )
    return {name: jitted(model) for name, model in models.items()} | {"products": products(width, depth)}


def products(width: int, depth: int) -> Call:
    """Return the products of as many integer weights, stored as frozen ones are, with a batch of bytes."""
    import jax
    import jax.numpy as jnp

    from jqinject.dot.kernels.kernel_table import MATRICES, integer_contraction

    keys = jax.random.split(jax.random.key(0), depth)
    weights = [jax.random.randint(key, (width, width), -128, 128, jnp.int8) for key in keys]

    def run(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        payload = x.astype(jnp.int8)
        return [integer_contraction(payload, w, MATRICES, jnp.dtype(jnp.int32)) for w in weights]

    compiled = jax.jit(run)
    return lambda x: jax.block_until_ready(compiled(weights, x))


def jitted(model: Any) -> Call:
    """Return a compiled call of a model that waits for its result."""
    import jax
    from flax import nnx

    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    return lambda x: jax.block_until_ready(run(state, x))


def convolutions(channels: int) -> dict[str, Call]:
    """Return a float and a frozen convolution."""
    import jax
    from flax import nnx

    import jqinject
    from jqinject.nn import QuantConv
    from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat

    layer = QuantConv(
        channels,
        channels,
        (3, 3),
        weight_quant=Int8WeightPerChannelFloat,
        input_quant=Int8ActPerTensorFloat,
        rngs=nnx.Rngs(0),
    )
    layer(jax.random.normal(jax.random.key(0), (2, PIXELS, PIXELS, channels)))
    plain = nnx.Conv(channels, channels, (3, 3), rngs=nnx.Rngs(0))
    return {"float": jitted(plain), "static": jitted(jqinject.freeze(layer))}


def torch_models(width: int, depth: int) -> dict[str, Call]:
    """Return the models that run in torch, by name."""
    import warnings

    import torch

    warnings.simplefilter("ignore")
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1]).eval()
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    def call(model: torch.nn.Module) -> Call:
        def run(x: Any) -> object:
            with torch.inference_mode():
                return model(x)

        return run

    return {"torch": call(model), "torch int8": call(quantized)}


def timings_of(models: dict[str, Call], x: Any, rounds: int) -> dict[str, Timing]:
    """Time all the models on one batch, interleaved."""
    return interleaved({name: lambda call=call: call(x) for name, call in models.items()}, rounds=rounds)


def torch_timings(options: argparse.Namespace) -> dict[str, dict[str, Timing]]:
    """Measure torch in the other interpreter: batch -> name -> timing."""
    if options.torch_python is None:
        return {}
    same = [f"--{name}={getattr(options, name)}" for name in ("width", "depth", "rounds")]
    batches = [str(batch) for batch in options.batches]
    command = [
        options.torch_python,
        str(Path(__file__).resolve()),
        "--only-torch",
        *same,
        "--batches",
        *batches,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, stdin=subprocess.DEVNULL)
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        batch: {name: Timing(tuple(seconds)) for name, seconds in timings.items()}
        for batch, timings in found.items()
    }


def measure_torch(options: argparse.Namespace) -> None:
    """Print torch's timings for the process that asked for them."""
    import torch

    models = torch_models(options.width, options.depth)
    found = {}
    for batch in options.batches:
        x = torch.randn(batch, options.width)
        timings = timings_of(models, x, options.rounds)
        found[str(batch)] = {name: timing.seconds for name, timing in timings.items()}
    print(json.dumps(found))


def print_ratios(title: str, first: str, rows: list[tuple[str, dict[str, Timing]]]) -> None:
    """Print milliseconds, and how many times faster than float."""
    names = list(rows[0][1])
    table = []
    for label, timings in rows:
        base = timings["float"].median
        cells = [f"{t.median * 1e3:.2f} ({base / t.median:.2f})" for t in timings.values()]
        table.append([label, *cells])
    print_table(title, [first, *names], table)


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--width", type=int, default=2048, help="of every layer (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="layers (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="(default: %(default)s)")
    parser.add_argument("--channels", type=int, nargs="+", default=CHANNELS, help="(default: %(default)s)")
    parser.add_argument("--conv", action="store_true", help="measure convolutions")
    parser.add_argument("--torch-python", help="an interpreter that has torch")
    parser.add_argument("--only-torch", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """Read the options and measure."""
    options = options_of(sys.argv[1:])
    if options.only_torch:
        measure_torch(options)
        return
    import jax

    from jqinject import native

    print(f"compiled kernel: {native.status()}")
    if options.conv:
        rows = []
        for channels in options.channels:
            models = convolutions(channels)
            for batch in (1, 16):
                x = jax.random.normal(jax.random.key(1), (batch, PIXELS, PIXELS, channels))
                rows.append((f"{channels} x {batch}", timings_of(models, x, options.rounds)))
        print_ratios("ms (float / this), jqinject static, 3 x 3 convolution, NHWC", "channels x batch", rows)
        return
    models = jax_models(options.width, options.depth)
    others = torch_timings(options)
    rows = []
    for batch in options.batches:
        x = jax.random.normal(jax.random.key(1), (batch, options.width))
        timings = timings_of(models, x, options.rounds)
        rows.append((str(batch), timings | others.get(str(batch), {})))
    model = f"{options.depth} layers of {options.width}, {jax.default_backend()}"
    title = f"ms (float / this), jqinject static and dynamic, {model}"
    print_ratios(title, "batch", rows)
    if "Qwix" not in models:
        print('Qwix is not installed here: pip install ".[bench]"')


if __name__ == "__main__":
    main()
