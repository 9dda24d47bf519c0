"""Whole-model functions on a mesh over all processes: `python _two_processes.py RANK PROCESSES PORT RESULTS`.

Every process computes all of it; the first writes what came out. One process alone has a mesh over two devices of its
own.
"""

import re
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqinject as jq
from jqinject import Rule
from jqinject import quant as q
from jqinject.core.state import flat_parts
from jqinject.ops.processes import on_host
from jqinject.recipes import GPTQ, AllocateBits, Qronos, Recipe, SmoothQuant, Solve

STATIC = Rule(weight_quant=q.Int8WeightPerChannelFloat, input_quant=q.Int8ActPerTensorFloat)
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "checkpoints.md"
SPLITS = ("rows", "columns")


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.second = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.norm(self.first(x))))


class Own(nnx.Module):
    """Contracts a parameter of its own."""

    def __init__(self):
        rngs = nnx.Rngs(1)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 16)))
        self.out = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(x @ self.kernel[...]))


def spread(x, spec):
    """An array over both devices, of which each process holds its part."""
    x, mesh = np.asarray(x), jax.make_mesh((2,), ("spread",), axis_types=(AxisType.Auto,))
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def batches(split):
    draws = [np.random.default_rng(i).normal(size=(8, 8)).astype(np.float32) * (i + 1) for i in range(2)]
    return [spread(draw, P("spread") if split == "rows" else P()) for draw in draws]


def spread_all(model, split):
    for path, variable in flat_parts(nnx.state(model)):
        column = split == "columns" and path[-1] == "kernel"
        variable.set_value(spread(variable.get_value(), P(None, "spread") if column else P()))
    return model


@cache
def _calibrated(split):
    model = spread_all(jq.quantize(Net(), STATIC), split)
    jq.calibrate(model, batches(split), progress=False)
    return model


def calibrated(split):
    return nnx.clone(_calibrated(split))


def calibrate(split):
    model = calibrated(split)
    apart = split == "columns" and jax.process_count() > 1
    assert ("value=spread over processes" in repr(model.first.quant_weight())) == apart
    return nnx.state(model), model(batches(split)[0])


def calibrate_batch_norm(split):
    model = calibrated(split)
    jq.calibrate_batch_norm(model, batches(split), progress=False)
    return nnx.state(model)


def freeze(split):
    frozen = jq.freeze(calibrated(split))
    return frozen(batches(split)[0]), nnx.state(frozen)


def orbax(split):
    """What docs/guides/checkpoints.md prints of frozen models."""
    folder = Path(sys.argv[4]).with_suffix(f".{jax.process_count()}.{split}")
    (block,) = re.findall(r"```python\n(def make_served.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names = {"jax": jax, "jnp": jnp, "nnx": nnx, "ocp": ocp, "jqinject": jq, "folder": folder}
    names |= {"make": lambda: jq.quantize(Own(), STATIC, inputs=batches(split)[0])}
    names |= {"model": spread_all(names["make"](), split), "x": batches(split)[0]}
    jq.calibrate(names["model"], batches(split), progress=False)
    exec(block, names)
    return nnx.as_pure(nnx.state(names["served"])), names["served"](names["x"])


def unfreeze(split):
    model = jq.unfreeze(jq.freeze(calibrated(split), keep_masters=True))
    return model(batches(split)[0]), nnx.state(model)


def load_state(split):
    """From arrays laid out in another way, from NumPy's, and onto one device of each process."""
    other = SPLITS[1 - SPLITS.index(split)]
    spread_out = nnx.to_pure_dict(nnx.state(calibrated(other)))
    whole, x = jax.tree.map(on_host, spread_out), on_host(batches(split)[0])
    loaded = []
    for saved, onto in ((spread_out, split), (whole, split), (spread_out, None)):
        model = jq.quantize(Net(), STATIC)
        model = model if onto is None else spread_all(model, onto)
        before = jax.tree.map(lambda held: held.sharding, nnx.state(model))
        jq.load_state(model, saved)
        assert jax.tree.map(lambda held: held.sharding, nnx.state(model)) == before
        model.eval()
        loaded.append((model(x), nnx.state(model)))
    return loaded


def reassemble(split):
    model = calibrated(split)
    jq.reassemble(model)
    return nnx.state(model)


def correct_biases(split):
    model = calibrated(split)
    assert jq.correct_biases(model, batches(split), progress=False) == ("first", "second")
    return nnx.state(model)


def learn_rounding(split):
    model = calibrated(split)
    sites = jq.learn_rounding(model, batches(split), steps=3, progress=False).sites
    return nnx.state(model), [(site.nearest, site.solved) for site in sites]


def post_training_quantize(split):
    model, data = spread_all(Net(), split), batches(split)
    served, report = jq.post_training_quantize(
        model, "static", batches=data, bias_correction=True, report=True, progress=False
    )
    numbers = [leaf for leaf in jax.tree.leaves(report.as_dict()) if isinstance(leaf, float)]
    assert len(numbers) > 20
    return served(data[0]), nnx.state(served), numbers


def value_and_grad(split):
    rule = Rule(
        weight_quant=q.Fp8e4m3WeightPerTensorDelayed,
        input_quant=q.Fp8e4m3ActPerTensorDelayed,
        grad_quant=q.Fp8e5m2GradPerTensorDelayed,
    )
    model = jq.quantize(spread_all(Net(), split), rule)
    step = nnx.jit(jq.value_and_grad(lambda model, x: jnp.mean(jnp.square(model(x)))))
    return [step(model, x) for x in batches(split)], nnx.state(model)


def value_and_grad_of_schemes(split):
    """Scales of whole tensors, blocks, rotations and random numbers."""
    rules = [Rule("first", scheme=q.NVFP4Training), Rule("second", scheme=q.Fp8CurrentTraining)]
    model = jq.quantize(spread_all(Net(), split), rules, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    step = nnx.jit(jq.value_and_grad(lambda model, x: jnp.mean(jnp.square(model(x)))))
    return step(model, spread(x, P("spread") if split == "rows" else P()))


def stablehlo(split):
    model, x = jq.freeze(calibrated(split)), batches(split)[0]
    program = jq.export.stablehlo(model, x)
    return program.call(np.asarray(jax.random.normal(jax.random.key(0), (8, 8)))), program.text.count(
        "xi8>"
    ) > 0


def recipe(split):
    model = spread_all(Net(), split)
    passes = (SmoothQuant(), Solve(Qronos()))
    result = Recipe(*passes).apply(model, STATIC, batches(split), progress=False)
    solved = [(site.nearest, site.solved) for site in result.report.steps[1].sites]
    assert len(solved) == 2
    return nnx.state(result.model), result.model(batches(split)[0]), solved


def recipe_with_allocated_bits(split):
    model, recipe = spread_all(Net(), split), Recipe(AllocateBits(bits=(4, 8), mean_bits=6.0), Solve(GPTQ()))
    result = recipe.apply(model, STATIC, batches(split), progress=False)
    bits = [site.bits for site in result.report.steps[0].sites]
    assert sorted(bits) == [4, 8]
    return nnx.state(result.model), bits


CASES = (
    calibrate,
    calibrate_batch_norm,
    freeze,
    orbax,
    unfreeze,
    load_state,
    reassemble,
    correct_biases,
    learn_rounding,
    post_training_quantize,
    value_and_grad,
    value_and_grad_of_schemes,
    stablehlo,
)
# These compile most of all. Statistics are summed over both processes, or weights lie on both.
OF_ONE_SPLIT = ((recipe, "rows"), (recipe_with_allocated_bits, "columns"))


def main(rank, processes, port, results):
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    assert jax.process_count() == processes and jax.device_count() == 2
    found = {}
    for case, split in (*((case, split) for case in CASES for split in SPLITS), *OF_ONE_SPLIT):
        for i, x in enumerate(jax.tree.leaves(case(split))):
            found[f"{case.__name__}/{split}/{i}"] = on_host(x)
    if rank == 0:
        np.savez(results, **found)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
