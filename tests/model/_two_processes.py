"""Whole-model functions on a mesh over all processes: `python _two_processes.py RANK PROCESSES PORT RESULTS`.

Every process computes all of it; the first writes what came out. One process alone has a mesh over two devices of its
own.
"""

import sys

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqinject as jq
from jqinject import Rule
from jqinject import quant as q

STATIC = Rule(weight_quant=q.Int8WeightPerChannelFloat, input_quant=q.Int8ActPerTensorFloat)
SPLITS = ("rows", "columns")


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.second = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.norm(self.first(x))))


def spread(x, spec):
    """An array over both devices, of which each process holds its part."""
    x, mesh = np.asarray(x), jax.make_mesh((2,), ("spread",), axis_types=(AxisType.Auto,))
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def batches(split):
    draws = [np.random.default_rng(i).normal(size=(8, 8)).astype(np.float32) * (i + 1) for i in range(2)]
    return [spread(draw, P("spread") if split == "rows" else P()) for draw in draws]


def calibrated(split):
    model = jq.quantize(Net(), STATIC)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        column = split == "columns" and path[-1] == "kernel"
        variable.set_value(spread(variable.get_value(), P(None, "spread") if column else P()))
    jq.calibrate(model, batches(split), progress=False)
    return model


def calibrate(split):
    model = calibrated(split)
    return nnx.state(model), model(batches(split)[0])


def calibrate_batch_norm(split):
    model = calibrated(split)
    jq.calibrate_batch_norm(model, batches(split), progress=False)
    return nnx.state(model)


def freeze(split):
    frozen = jq.freeze(calibrated(split))
    return frozen(batches(split)[0]), nnx.state(frozen)


def main(rank, processes, port, results):
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    assert jax.process_count() == processes and jax.device_count() == 2
    found = {}
    for case in (calibrate, calibrate_batch_norm, freeze):
        for split in SPLITS:
            for i, x in enumerate(jax.tree.leaves(case(split))):
                whole = x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)
                found[f"{case.__name__}/{split}/{i}"] = np.asarray(whole)
    if rank == 0:
        np.savez(results, **found)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
