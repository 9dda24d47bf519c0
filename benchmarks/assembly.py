"""What building a quantized layer, and calling it eagerly, costs on top of the float one, and why.

    python benchmarks/assembly.py
    python benchmarks/assembly.py --brevitas-python path/to/other/bin/python

Per framework: QuantLinear (8-bit weights per channel, 8-bit input, 32-bit bias) minus the framework's own
Linear, round by round, interleaved in one process. Brevitas is measured in this process where it can be
imported, else by this same file in the interpreter that `--brevitas-python` names, else left out.
The calls are eager ones in training, of a layer without a quantized bias.
"""

import argparse
import cProfile
import importlib.util
import json
import pstats
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _timing import Timing, interleaved, print_table

Builders = dict[str, Callable[[], object]]

WIRING = "wiring (jqinject.inject)"
ROOMS = {
    WIRING: "/jqinject/inject/",
    "components (jqinject.core, ops)": ("/jqinject/core/", "/jqinject/ops/"),
    "proxies and layers (jqinject)": "/jqinject/",
    "Flax (modules, Variables)": "/flax/",
    "JAX (arrays)": ("/jax/", "/jaxlib/"),
}


def jqinject_builders(inputs: int, outputs: int) -> Builders:
    """Return builders of the float and the quantized layer; each waits for the arrays it made."""
    from flax import nnx

    from jqinject.nn import QuantLinear
    from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Int32Bias

    rngs = nnx.Rngs(0)

    def linear() -> object:
        return nnx.Linear(inputs, outputs, rngs=rngs).kernel.get_value().block_until_ready()

    def quantized() -> object:
        layer = QuantLinear(
            inputs,
            outputs,
            weight_quant=Int8WeightPerChannelFloat,
            input_quant=Int8ActPerTensorFloat,
            bias_quant=Int32Bias,
            rngs=rngs,
        )
        return layer.kernel.get_value().block_until_ready()

    return {"Linear": linear, "QuantLinear": quantized}


def eager_calls(inputs: int, outputs: int, batch: int = 32) -> Builders:
    """Return eager calls of the float and the quantized layer in training; each waits for its output."""
    import jax.numpy as jnp
    from flax import nnx

    from jqinject.nn import QuantLinear
    from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat

    int8: Any = {"weight_quant": Int8WeightPerChannelFloat, "input_quant": Int8ActPerTensorFloat}
    linear = nnx.Linear(inputs, outputs, rngs=nnx.Rngs(0))
    quantized = QuantLinear(inputs, outputs, **int8, rngs=nnx.Rngs(0))
    x = jnp.ones((batch, inputs))
    return {
        "Linear": lambda: linear(x).block_until_ready(),
        "QuantLinear": lambda: quantized(x).block_until_ready(),
    }


def brevitas_builders(inputs: int, outputs: int) -> Builders:
    """Return the same two builders for torch and Brevitas."""
    import brevitas.nn as qnn
    import brevitas.quant as quant
    import torch

    def quantized() -> object:
        return qnn.QuantLinear(
            inputs,
            outputs,
            bias=True,
            weight_quant=quant.Int8WeightPerChannelFloat,
            input_quant=quant.Int8ActPerTensorFloat,
            bias_quant=quant.Int32Bias,
        )

    return {"Linear": lambda: torch.nn.Linear(inputs, outputs), "QuantLinear": quantized}


def resolvers(inputs: int, outputs: int) -> Builders:
    """Return, for each quantizer alone, what builds its `tensor_quant`."""
    from flax import nnx

    from jqinject.inject import resolve
    from jqinject.nn import QuantLinear
    from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Int32Bias

    layer = QuantLinear(inputs, outputs, rngs=nnx.Rngs(0))

    def resolver(injector: Any) -> Callable[[], object]:
        return lambda: resolve(injector, "tensor_quant", module=layer)

    return {q.__name__: resolver(q) for q in (Int8WeightPerChannelFloat, Int8ActPerTensorFloat, Int32Bias)}


def brevitas_timings(options: argparse.Namespace) -> dict[str, Timing] | None:
    """Measure Brevitas here or in the other interpreter; None where there is neither."""
    if options.brevitas_python is None:
        if importlib.util.find_spec("brevitas") is None:
            return None
        return interleaved(brevitas_builders(options.inputs, options.outputs), rounds=options.rounds)
    size = ["--in", str(options.inputs), "--out", str(options.outputs), "--rounds", str(options.rounds)]
    command = [options.brevitas_python, str(Path(__file__).resolve()), "--only-brevitas", *size]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, stdin=subprocess.DEVNULL)
    return {
        name: Timing(tuple(seconds)) for name, seconds in json.loads(done.stdout.splitlines()[-1]).items()
    }


def own_time_by_room(build: Callable[[], object], repeat: int) -> Counter[str]:
    """Profile a builder and sum each function's own time by package; a builtin counts for its caller."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(repeat):
        build()
    profiler.disable()
    spent: Counter[str] = Counter()
    for (path, _, _), (_, _, own, _, callers) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        if path != "~":
            spent[room_of(path)] += own
            continue
        for (caller, _, _), (_, _, own_there, _) in callers.items():
            spent[room_of(caller)] += own_there
    return spent


def wiring_share(resolve: Callable[[], object], median: float) -> str:
    """What of a resolution's time is wiring, by the profiler's shares: the rest builds modules and arrays."""
    spent = own_time_by_room(resolve, 50)
    return f"{1e3 * median * spent[WIRING] / spent.total():.3f}"


def room_of(path: str) -> str:
    """Name the package that a source file belongs to."""
    folder = Path(path).as_posix()
    for name, parts in ROOMS.items():
        if any(part in folder for part in ([parts] if isinstance(parts, str) else parts)):
            return name
    return "other (Python, numpy, ...)"


def report(options: argparse.Namespace) -> None:
    """Measure and print the tables."""
    builders = jqinject_builders(options.inputs, options.outputs)
    timings = {"jqinject": interleaved(builders, rounds=options.rounds)}
    other = brevitas_timings(options)
    if other is not None:
        timings["Brevitas"] = other
    rows = []
    for name, found in timings.items():
        extra = found["QuantLinear"].minus(found["Linear"])
        ratio = extra.median / timings["jqinject"]["QuantLinear"].minus(timings["jqinject"]["Linear"]).median
        rows.append([name, found["Linear"].show(), found["QuantLinear"].show(), extra.show(), f"{ratio:.2f}"])
    columns = ["ms: median [quartiles]", "Linear", "QuantLinear", "the difference", "/ jqinject"]
    print_table(f"Building a {options.inputs} x {options.outputs} layer", columns, rows)
    if other is None:
        print("Brevitas is not installed here; name an interpreter that has it with --brevitas-python.")

    calls = interleaved(eager_calls(options.inputs, options.outputs), rounds=options.rounds)
    float_call, call = calls["Linear"], calls["QuantLinear"]
    row = [float_call.show(), call.show(), f"{call.median / float_call.median:.1f}"]
    print_table("Calling it eagerly, in training", ["Linear", "QuantLinear", "/ Linear"], [row])

    resolve = resolvers(options.inputs, options.outputs)
    alone = interleaved(resolve, rounds=options.rounds)
    rows = [[name, t.show(), wiring_share(resolve[name], t.median)] for name, t in alone.items()]
    print_table(
        "Resolving one quantizer", ["quantizer", "ms, its modules and arrays built", "wiring alone"], rows
    )

    spent = own_time_by_room(builders["QuantLinear"], max(2, options.rounds // 5))
    total = spent.total()
    shares = [[name, f"{100 * own / total:.0f} %"] for name, own in spent.most_common()]
    print_table("QuantLinear: own time by package, under the profiler", ["package", "share"], shares)


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--in", dest="inputs", type=int, default=256, help="in_features (default: %(default)s)"
    )
    parser.add_argument(
        "--out", dest="outputs", type=int, default=256, help="out_features (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds (default: %(default)s)")
    parser.add_argument(
        "--brevitas-python", metavar="PATH", help="an interpreter that has torch and Brevitas"
    )
    parser.add_argument(
        "--only-brevitas", action="store_true", help="print Brevitas's seconds as JSON and stop"
    )
    options = parser.parse_args()
    if options.only_brevitas:
        timings = interleaved(brevitas_builders(options.inputs, options.outputs), rounds=options.rounds)
        json.dump({name: timing.seconds for name, timing in timings.items()}, sys.stdout)
    else:
        report(options)


if __name__ == "__main__":
    main()
