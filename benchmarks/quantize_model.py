"""What quantizing a whole model costs, in time and memory: jqinject against Qwix.

    python benchmarks/quantize_model.py
    python benchmarks/quantize_model.py --blocks --depth 12

int8 weights, a scale for each output channel, and int8 inputs whose range is that of the tensor at hand. Two models: a
stack of dense layers, and with --blocks one of transformer blocks (attention, normalization, two dense layers). Two
pairs, by what comes out: float weights with quantizers (`jqinject.quantize`, Qwix's `QtProvider`), and integers
(`jqinject.freeze` of it, Qwix's `PtqProvider`).

Time: interleaved in one process, everything compiled before. Memory: a process for each quantizes a model of one layer,
so that compilers and their code do not count (the first call: its time), then the whole one. `growth` is the largest
resident size during this call over that before it, with the float model; the ratio is that of float weights plus growth
to what has to be there: float weights, and integers where there are such.

Loading (`jqinject.load_frozen`): a float checkpoint is read one array after the other, and each is frozen before the
next. No float model is there; the ratios are those of `growth`, and of JAX's own arrays at most (`live`), to the
frozen model and the largest array that is read. `objects` is the growth before the first array is read: the
abstract model's Python objects, and programs, some 60 KiB a layer. What else `growth` has beyond `live`: the copy of an
array of NumPy's that is not aligned, while both are there, and the compiled quantizer's temporaries, little for large
arrays, which it takes in slices.
"""

import argparse
import ctypes
import gc
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _timing import interleaved, print_table

MiB = 2**20
STATUS, PEAK_RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
INTEGERS = ("quantize and freeze", "PtqProvider")
PAIRS = (("quantize", "QtProvider"), INTEGERS)
LOADING = ("load_frozen", "load_state and freeze")


def make_model(options: argparse.Namespace, depth: int) -> Any:
    """Return a float model, its arrays there, and what it is called with."""
    import jax
    from flax import nnx

    width, rngs = options.width, nnx.Rngs(0)

    class Block(nnx.Module):
        """A transformer's block."""

        def __init__(self) -> None:
            self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(8, width, decode=False, rngs=rngs)
            self.up, self.down = (
                nnx.Linear(width, 4 * width, rngs=rngs),
                nnx.Linear(4 * width, width, rngs=rngs),
            )

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attention(self.norm1(x))
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    make_layer = Block if options.blocks else lambda: nnx.Linear(width, width, rngs=rngs)
    model = nnx.Sequential(*[make_layer() for _ in range(depth)])
    jax.block_until_ready(jax.live_arrays())
    x = jax.numpy.ones((1, 8, width) if options.blocks else (1, width))
    return model, x


def quantizers() -> dict[str, Callable[[Any, Any], Any]]:
    """Return what makes a quantized model of `(model, x)`, by name."""
    import jqinject
    from jqinject.quant import Int8DynamicActPerRowAbsMax, Int8WeightPerChannelFloat

    rule = jqinject.Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8DynamicActPerRowAbsMax)
    found: dict[str, Callable[[Any, Any], Any]] = {
        "quantize": lambda model, x: jqinject.quantize(model, rule),
        "quantize and freeze": lambda model, x: jqinject.freeze(jqinject.quantize(model, rule)),
    }
    if importlib.util.find_spec("qwix") is not None:
        import qwix

        rules = [qwix.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
        found["QtProvider"] = lambda model, x: qwix.quantize_model(model, qwix.QtProvider(rules), x)
        found["PtqProvider"] = lambda model, x: qwix.quantize_model(model, qwix.PtqProvider(rules), x)
    return found


def finished(model: Any) -> Any:
    """Return a model whose arrays are there."""
    import jax

    jax.block_until_ready(jax.live_arrays())
    return model


def bytes_of(model: Any) -> int:
    """Count the bytes of a model's arrays."""
    import jax
    from flax import nnx

    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def resident(name: str) -> int:
    """Bytes of memory of this process: `VmRSS` now, `VmHWM` at most."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def peak_growth(run: Callable[[], Any]) -> tuple[Any, int, int]:
    """Return what `run` returns, by how many bytes this process grew meanwhile, at most, and its size before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not to be taken again unseen
    PEAK_RESET.write_text("5")
    before = resident("VmRSS")
    result = finished(run())
    return result, resident("VmHWM") - before, before


def measure_loading(options: argparse.Namespace) -> None:
    """Print the peak of loading a float checkpoint into a frozen model, for the process that asked for it."""
    import jax
    import numpy as np
    from flax import nnx

    import jqinject
    from jqinject.quant import Int8DynamicActPerRowAbsMax, Int8WeightPerChannelFloat

    rule = jqinject.Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8DynamicActPerRowAbsMax)

    def load(depth: int) -> Any:
        def make() -> Any:
            return jqinject.quantize(make_model(options, depth)[0], rule)

        floats = nnx.eval_shape(lambda: make_model(options, depth)[0])
        shapes = [(path, x.get_value()) for path, x in nnx.to_flat_state(nnx.state(floats, nnx.Param))]
        arrays = (read(path, x) for path, x in shapes)
        if options.only == LOADING[0]:
            return jqinject.load_frozen(make, arrays)
        model = make()
        jqinject.load_state(model, nnx.from_flat_state(list(arrays)), missing=...)
        return jqinject.freeze(model)

    live: list[int] = []
    objects: list[int] = []

    def read(path: Any, x: Any) -> tuple[Any, Any]:
        if not objects:
            objects.append(resident("VmRSS"))
        array = np.ones(x.shape, x.dtype)
        live.append(sum(one.nbytes for one in jax.live_arrays()) + array.nbytes)
        return path, array

    load(1)
    live.clear()
    objects.clear()
    before = sum(one.nbytes for one in jax.live_arrays())
    model, growth, size = peak_growth(lambda: load(options.depth))
    largest = 4 * options.width**2 * (4 if options.blocks else 1)
    jax.block_until_ready(jax.live_arrays())
    found = {"frozen": bytes_of(model), "largest": largest, "growth": growth, "objects": objects[0] - size}
    print(json.dumps(found | {"live": max(live, default=0) - before}))


def measure_memory(options: argparse.Namespace) -> None:
    """Print the peak of one call, for the process that asked for it."""
    if options.only in LOADING:
        measure_loading(options)
        return
    quantized = quantizers()[options.only]
    start = time.perf_counter()
    finished(quantized(*make_model(options, 1)))
    first = time.perf_counter() - start
    model, x = make_model(options, options.depth)
    result, growth, _ = peak_growth(lambda: quantized(model, x))
    found = {"float": bytes_of(model), "quantized": bytes_of(result), "growth": growth, "first": first}
    print(json.dumps(found))


def memory_of(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure one call in a process of its own."""
    sizes = ["--width", str(options.width), "--depth", str(options.depth)] + ["--blocks"] * options.blocks
    command = [sys.executable, str(Path(__file__).resolve()), "--only", name, *sizes]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, stdin=subprocess.DEVNULL)
    return json.loads(done.stdout.splitlines()[-1])


def print_times(options: argparse.Namespace, names: list[str], title: str) -> None:
    """Time all of them, and print them with the ratio to Qwix's."""
    model, x = make_model(options, options.depth)
    calls = quantizers()
    timings = interleaved(
        {name: lambda call=calls[name]: finished(call(model, x)) for name in names},
        rounds=options.rounds,
        warmup=1,
    )
    rows = []
    for ours, theirs in PAIRS:
        ratio = timings[ours].over(timings[theirs]).show(factor=1, digits=2) if theirs in timings else "-"
        rows.append([f"jqinject, {ours}", timings[ours].show(digits=0), ratio])
        if theirs in timings:
            rows.append([f"Qwix, {theirs}", timings[theirs].show(digits=0), "1"])
    print_table(title, ["", "ms: median [quartiles]", "/ Qwix's"], rows)


def print_memory(options: argparse.Namespace, names: list[str]) -> None:
    """Measure the memory of each, and print it."""
    rows = []
    for name in names:
        found = memory_of(name, options)
        peak = found["float"] + found["growth"]
        cells = [found["float"], found["quantized"], found["growth"]]
        needed = found["float"] + (found["quantized"] if name in INTEGERS else 0)
        ratio = peak / needed
        rows.append(
            [label(name), *(f"{n / MiB:.1f}" for n in cells), f"{ratio:.2f}", f"{found['first']:.2f}"]
        )
    columns = ["MiB", "float", "quantized", "growth", "ratio", "first call, s"]
    print_table("Memory: ratio of the peak to the weights that have to be there", columns, rows)


def print_loading(options: argparse.Namespace) -> None:
    """Measure the memory of loading, and print it."""
    rows = []
    for name in LOADING:
        found = memory_of(name, options)
        bound = found["frozen"] + found["largest"]
        cells = [f"{found[part] / MiB:.1f}" for part in ("frozen", "largest", "live", "growth", "objects")]
        data = found["growth"] - found["objects"]
        ratios = [f"{part / bound:.2f}" for part in (found["live"], found["growth"], data)]
        rows.append([f"jqinject, {name}", *cells, *ratios])
    sizes = ["MiB", "frozen", "largest array", "live", "growth", "objects"]
    columns = [*sizes, "live: ratio", "growth: ratio", "without objects"]
    print_table("Loading: ratio of the peak to the frozen model and the largest array", columns, rows)


def label(name: str) -> str:
    """Whose it is."""
    return f"{'jqinject' if name in dict(PAIRS) else 'Qwix'}, {name}"


def main() -> None:
    """Read the options and measure."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--width", type=int, default=512, help="of every layer (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=100, help="layers or blocks (default: %(default)s)")
    parser.add_argument("--blocks", action="store_true", help="transformer blocks, not dense layers")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds (default: %(default)s)")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        measure_memory(options)
        return
    names = [name for pair in PAIRS for name in pair if name in quantizers()]
    kind = "transformer blocks" if options.blocks else "dense layers"
    print_times(options, names, f"Quantizing {options.depth} {kind} of {options.width}")
    if STATUS.exists():
        print_memory(options, names)
        print_loading(options)
    else:
        print("The memory of a process is read from /proc, which is not here.")
    if len(names) == len(PAIRS):
        print('Qwix is not installed here: pip install ".[bench]"')


if __name__ == "__main__":
    main()
