"""GPTQ of many equal layers: seconds and peak memory, by `jqinject.recipes` and by Brevitas's `gptq_mode`.

    python benchmarks/recipes_gptq.py
    python benchmarks/recipes_gptq.py --sites 10

A chain of linear layers, weights of 4 bits with a scale for each output channel, blocks of 128 columns. Both see the
same calibration rows, layer by layer, each with the inputs that the quantized layers before it leave. Each library runs
in a process of its own, as its peak memory is that of the process; the peer is left out where torch or Brevitas is
missing. `--python` names another interpreter that has them. The times include what is compiled.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time

BITS = 4
SEED = 0


def by_jqinject(sites: int, width: int, rows: int, batches: int, block: int) -> float:
    """Return the seconds."""
    import jax
    from flax import nnx

    from jqinject import Rule
    from jqinject.quant import Int8WeightPerChannelFloat
    from jqinject.recipes import GPTQ, Recipe, Solve

    layers = [nnx.Linear(width, width, use_bias=False, rngs=nnx.Rngs(SEED + place)) for place in range(sites)]
    keys = jax.random.split(jax.random.key(SEED), batches)
    data = [jax.block_until_ready(jax.random.normal(key, (rows // batches, width))) for key in keys]
    rule = Rule(weight_quant=Int8WeightPerChannelFloat.let(bit_width=BITS))
    model = nnx.Sequential(*layers)
    start = time.perf_counter()
    result = Recipe(Solve(GPTQ(block_size=block))).apply(model, rule, data, progress=False)
    jax.block_until_ready(nnx.state(result.model))
    return time.perf_counter() - start


def by_brevitas(sites: int, width: int, rows: int, batches: int, block: int) -> float:
    """Return the seconds."""
    import torch
    from brevitas.graph.gptq import gptq_mode
    from brevitas.nn import QuantLinear
    from brevitas.quant import Int8WeightPerChannelFloat

    torch.manual_seed(SEED)
    given = {"bias": False, "weight_quant": Int8WeightPerChannelFloat, "weight_bit_width": BITS}
    model = torch.nn.Sequential(*(QuantLinear(width, width, **given) for _ in range(sites))).eval()
    data = [torch.randn(rows // batches, width) for _ in range(batches)]
    start = time.perf_counter()
    blocks = -(-width // block)
    with torch.no_grad(), gptq_mode(model, use_quant_activations=False, num_blocks=blocks) as gptq:
        for _ in range(gptq.num_layers):
            for x in data:
                gptq.model(x)
            gptq.update()
    return time.perf_counter() - start


LIBRARIES = {"jqinject": by_jqinject, "Brevitas": by_brevitas}


def has_brevitas(python: str) -> bool:
    """Return whether an interpreter has torch and Brevitas."""
    if python == sys.executable:
        return all(importlib.util.find_spec(name) is not None for name in ("torch", "brevitas"))
    return (
        subprocess.run([python, "-c", "import torch, brevitas"], capture_output=True, check=False).returncode
        == 0
    )


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, default=100)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4096, help="of calibration data")
    parser.add_argument("--batches", type=int, default=4, help="that they come in")
    parser.add_argument("--block", type=int, default=128, help="columns of a block")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has Brevitas")
    parser.add_argument("--only", choices=LIBRARIES, help="run one library, here, and print JSON")
    given = parser.parse_args()
    sizes = (given.sites, given.width, given.rows, given.batches, given.block)
    if given.only:
        seconds = LIBRARIES[given.only](*sizes)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": seconds, "peak": peak}))
        return
    load = os.getloadavg()[0]
    print(f"{given.sites} sites of {given.width} x {given.width}, {given.rows} rows; load before {load:.1f}")
    for name in LIBRARIES:
        python = given.python if name == "Brevitas" else sys.executable
        if name == "Brevitas" and not has_brevitas(python):
            print(
                "Brevitas is not installed here: it is left out (--python names an interpreter that has it)"
            )
            continue
        arguments = [
            f"--{key}={value}"
            for key, value in zip(("sites", "width", "rows", "batches", "block"), sizes, strict=True)
        ]
        command = [python, __file__, f"--only={name}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        each = found["seconds"] / given.sites
        print(f"{name:9} {found['seconds']:8.1f} s   {each:6.2f} s a site   peak {found['peak']:,.0f} MiB")


if __name__ == "__main__":
    main()
