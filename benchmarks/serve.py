"""What serving costs: a model of dense layers, float against frozen in 8 and 4 bits against Qwix and torch.

    python benchmarks/serve.py
    python benchmarks/serve.py --python path/to/python
    python benchmarks/serve.py --models float static int4 --batches 1 4
    python benchmarks/serve.py --conv
    python benchmarks/serve.py --quick

Two tables. Cold: the models take turns, so that weights come from memory. Warm: in its turn a model runs five times in
a row, as a server runs, so that weights come from the processor's caches as far as they fit. Every model in JAX is one
compiled function that holds its state (`jqinject.compiled`), all in one process; torch, where an interpreter that has
it is given, in a second process on the same machine.

jqinject, all frozen: `static` has int8 weights, a scale for each output channel, and int8 inputs whose scale was
averaged in training, so that nothing is reduced; `dynamic` is Flax's layer with `QDotGeneral(config_v4())`, a scale for
every row of the batch; `int4` has weights in groups of 128 and inputs with a scale for every row; `int8 weights`, `int4
weights` and `int3 weights` (in groups of 128), `NF4`, `MXFP4`, `NVFP4` have float inputs. `onnxruntime` and
`onnxruntime int8` run the model `int4 weights` as exported with `block=128`, with float inputs and with inputs that
onnxruntime rounds to 8 bits (`accuracy_level=4`). Qwix: a model quantized after
training, int8 weights stored as integers, int8 inputs. torch: float, and dynamic int8. `products` is the integer
products alone, of bytes that nobody rounds or scales: what is left to win. The ratio is float's median in JAX over this
one's: above 1 is faster.

--conv: one 3 x 3 convolution on 28 x 28 pixels, of 64, 128 and 256 channels.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from _other_interpreter import Timings, answer, timed_elsewhere
from _timing import Timing, interleaved, print_table, processor

WEIGHTS = ("int8 weights", "int4 weights", "int3 weights", "NF4", "MXFP4", "NVFP4")
#: Name -> the accuracy level of the exported model.
EXPORTED = {"onnxruntime": 0, "onnxruntime int8": 4}
MODELS = ("float", "static", "dynamic", "int4", *WEIGHTS, *EXPORTED, "Qwix", "products")
BATCHES = (1, 4, 16, 64, 256, 1024)
SIZES = {"width": 2048, "depth": 4, "rounds": 20}
QUICK = {"width": 64, "depth": 2, "rounds": 2}
CHANNELS = (64, 128, 256)
PIXELS = 28
Call = Callable[[Any], object]


def jax_models(width: int, depth: int, chosen: Collection[str]) -> dict[str, Call]:
    """Return the models that run in JAX, by name; each waits for its result."""
    import jax
    from flax import nnx

    import jqinject

    class MLP(nnx.Module):
        """Layers of one width with ReLU between."""

        def __init__(self, make_layer: Callable[[nnx.Rngs], nnx.Module]) -> None:
            self.layers = nnx.List([make_layer(nnx.Rngs(n)) for n in range(depth)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers[:-1]:
                x = nnx.relu(layer(x))
            return self.layers[-1](x)

    x = jax.random.normal(jax.random.key(0), (64, width))

    def frozen(make_layer: Callable[[nnx.Rngs], nnx.Module]) -> nnx.Module:
        model = MLP(make_layer)
        model(x)  # averages see a batch
        return jqinject.freeze(model)

    def plain() -> nnx.Module:
        return MLP(lambda rngs: nnx.Linear(width, width, rngs=rngs))

    models: dict[str, Callable[[], Any]] = {"float": plain}
    models |= {name: partial(frozen, make) for name, make in layers(width).items()}
    if importlib.util.find_spec("qwix") is not None:
        import qwix

        rule = qwix.QuantizationRule(weight_qtype="int8", act_qtype="int8")
        models["Qwix"] = lambda: qwix.quantize_model(plain(), qwix.PtqProvider([rule]), x)
    calls = {name: compiled(models[name](), x) for name in chosen if name in models}
    if importlib.util.find_spec("onnxruntime") is not None:
        levels = {name: EXPORTED[name] for name in chosen if name in EXPORTED}
        calls |= {name: exported(models["int4 weights"](), width, level) for name, level in levels.items()}
    return calls | ({"products": products(width, depth)} if "products" in chosen else {})


def layers(width: int) -> dict[str, Callable[[Any], Any]]:
    """Return what makes the layers that are frozen, by name."""
    from flax import nnx

    from jqinject.dot import QDotGeneral
    from jqinject.nn import QuantLinear
    from jqinject.quant import (
        Int8ActPerTensorFloat,
        Int8DynamicActPerRowFloat,
        Int8WeightPerChannelFloat,
        IntWeightSymmetricGroupQuant,
        MXFloat4e2m1Weight,
        NF4WeightPerGroupFloat,
        NVFP4Weight,
    )
    from jqinject.quant.aqt import config_v4

    class Averaged(Int8ActPerTensorFloat):
        """The input scale is a running average of the batches' maxima."""

        scaling_impl_type = "stats"
        scaling_stats_op = "max"

    def dense(weight: Any, given: Any, rngs: nnx.Rngs) -> nnx.Module:
        return QuantLinear(width, width, weight_quant=weight, input_quant=given, rngs=rngs)

    def dynamic(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(width, width, dot_general=QDotGeneral(config_v4()), rngs=rngs)

    int4 = IntWeightSymmetricGroupQuant.let(bit_width=4, group_size=min(128, width))
    return {
        "static": partial(dense, Int8WeightPerChannelFloat, Averaged),
        "dynamic": dynamic,
        "int4": partial(dense, int4, Int8DynamicActPerRowFloat),
        "int8 weights": partial(dense, Int8WeightPerChannelFloat, None),
        "int4 weights": partial(dense, int4, None),
        "int3 weights": partial(dense, int4.let(bit_width=3), None),
        "NF4": partial(dense, NF4WeightPerGroupFloat, None),
        "MXFP4": partial(dense, MXFloat4e2m1Weight, None),
        "NVFP4": partial(dense, NVFP4Weight, None),
    }


def products(width: int, depth: int) -> Call:
    """Return the products of as many integer weights, stored as frozen ones are, with a batch of bytes."""
    import jax
    import jax.numpy as jnp

    from jqinject.dot.kernels.integer import integer_contraction
    from jqinject.dot.kernels.kernel_table import MATRICES

    keys = jax.random.split(jax.random.key(0), depth)
    weights = [jax.random.randint(key, (width, width), -128, 128, jnp.int8) for key in keys]

    def run(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        payload = x.astype(jnp.int8)
        return [integer_contraction(payload, w, MATRICES, jnp.dtype(jnp.int32)) for w in weights]

    compiled = jax.jit(run)
    return lambda x: jax.block_until_ready(compiled(weights, x))


def compiled(model: Any, x: Any) -> Call:
    """Return a compiled call of a model that waits for its result."""
    import jax

    import jqinject

    model.eval()
    run = jqinject.compiled(model, x)
    return lambda x: jax.block_until_ready(run(x))


def exported(model: Any, width: int, accuracy_level: int) -> Call:
    """Return a call of a frozen model by onnxruntime, with its 4-bit weights as `MatMulNBits`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import onnxruntime

    import jqinject

    x = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("batch"), width), jnp.float32)
    file = jqinject.export.onnx(model, x, block=min(128, width), accuracy_level=accuracy_level)
    session = onnxruntime.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"in_0": np.asarray(x)})


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
    x = jax.random.normal(jax.random.key(0), (2, PIXELS, PIXELS, channels))
    layer(x)
    plain = nnx.Conv(channels, channels, (3, 3), rngs=nnx.Rngs(0))
    return {"float": compiled(plain, x), "static": compiled(jqinject.freeze(layer), x)}


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


TABLES = {"cold": interleaved, "warm": partial(interleaved, in_a_row=5)}


def timings_of(models: dict[str, Call], x: Any, rounds: int) -> Timings:
    """Time all the models on one batch: table -> name -> timing."""
    calls = {name: lambda call=call: call(x) for name, call in models.items()}
    return {table: measure(calls, rounds=rounds) for table, measure in TABLES.items()}


def measure_torch(options: argparse.Namespace) -> None:
    """Print torch's timings for the process that asked for them."""
    import torch

    models = torch_models(options.width, options.depth)
    found: Timings = {}
    for batch in options.batches:
        x = torch.randn(batch, options.width)
        timings = timings_of(models, x, options.rounds)
        found |= {f"{table} {batch}": timing for table, timing in timings.items()}
    answer(found)


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
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=f"(default: {size}; {QUICK[name]} with --quick)")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="(default: %(default)s)")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, help="(default: all)")
    parser.add_argument("--channels", type=int, nargs="+", default=CHANNELS, help="(default: %(default)s)")
    parser.add_argument("--conv", action="store_true", help="measure convolutions")
    parser.add_argument("--quick", action="store_true", help="sizes too small to mean anything")
    parser.add_argument("--python", help="an interpreter that has torch")
    parser.add_argument("--only-torch", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    for name, size in (QUICK if given.quick else SIZES).items():
        if getattr(given, name) is None:
            setattr(given, name, size)
    return given


def measure_convolutions(options: argparse.Namespace) -> None:
    """Print the tables of convolutions."""
    import jax

    rows: dict[str, list[tuple[str, dict[str, Timing]]]] = {table: [] for table in TABLES}
    for channels in options.channels:
        models = convolutions(channels)
        for batch in (1, 16):
            x = jax.random.normal(jax.random.key(1), (batch, PIXELS, PIXELS, channels))
            for table, timings in timings_of(models, x, options.rounds).items():
                rows[table].append((f"{channels} x {batch}", timings))
    for table, found in rows.items():
        print_ratios(f"{table}: ms (float / this), 3 x 3 convolution, NHWC", "channels x batch", found)


def measure_layers(options: argparse.Namespace) -> None:
    """Print the tables of dense layers."""
    import jax

    models = jax_models(options.width, options.depth, ("float", *(n for n in options.models if n != "float")))
    same = [f"--{name}={getattr(options, name)}" for name in SIZES]
    others = timed_elsewhere(__file__, options.python, [*same, "--batches", *map(str, options.batches)])
    rows: dict[str, list[tuple[str, dict[str, Timing]]]] = {table: [] for table in TABLES}
    for batch in options.batches:
        x = jax.random.normal(jax.random.key(1), (batch, options.width))
        for table, timings in timings_of(models, x, options.rounds).items():
            rows[table].append((str(batch), timings | others.get(f"{table} {batch}", {})))
    for table, found in rows.items():
        print_ratios(f"{table}: ms (float / this), {options.depth} layers of {options.width}", "batch", found)
    if "Qwix" in options.models and "Qwix" not in models:
        print('Qwix is not installed here: pip install ".[bench]"')


def main() -> None:
    """Read the options and measure."""
    options = options_of(sys.argv[1:])
    if options.only_torch:
        measure_torch(options)
        return
    import jax

    from jqinject import native

    where = processor() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    print(f"jqinject on {where}, jax {jax.__version__}; compiled kernel: {native.status()}")
    (measure_convolutions if options.conv else measure_layers)(options)


if __name__ == "__main__":
    main()
