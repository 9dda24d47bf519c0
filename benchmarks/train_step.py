"""What fake-quantized training costs: one SGD step of an MLP, float against jqinject against Qwix.

    python benchmarks/train_step.py
    python benchmarks/train_step.py --fp8
    python benchmarks/train_step.py --schemes
    python benchmarks/train_step.py --int8 --width 2048 --batch 1024
    python benchmarks/train_step.py --statistics

All models have the same widths and the same jitted step, are compiled and calibrated before, and run
interleaved in one process. int8 weights per channel and int8 inputs everywhere. The last column is the time
over the float step's, round by round.

jqinject: fake quantization, all contractions in float. `learned` has a learned input scale in every layer,
after its statistics are collected. The gradient of the first layer's scale needs the gradient of the model's
input, a contraction that the float step does not make (11 of them become 12); the row `float, input gradient`
makes it too. `running` has input scales from a running maximum. Qwix (left out where it is not installed)
contracts real integers forward; `dynamic` takes each batch's own range, `static` a running average.

With --int8 the others contract real integers: Flax's layer with `QDotGeneral(config_v4(...))`, int8 in the forward
pass, in the gradient of the left operand too, and in all three contractions. Gradients are rounded to nearest, with
8 random bits a number (`bits-8`), 16 (`custom-1`) or 32 (`jax.uniform`, the default of `config_v4`). A second table has
one product alone, the limit of what integers can win.

With --fp8 the float step is bfloat16, and the others are 8-bit float training: weights, inputs and gradients
quantized, statistics through `jqinject.value_and_grad`. `payloads` contracts 8-bit floats in all three places,
`floats` the dequantized numbers; `no quantization` is the bfloat16 model with the same loop. A GPU with 8-bit
float units gains from payloads; a CPU has none, and pays for quantization only.

With --schemes the float step is bfloat16 too, and the others train by a scheme for all six operands: in 8 bits, in
NVFP4, and in NVFP4 without one of its ingredients.

With --statistics no model is trained: the statistics of a layer's input, over one pass of memory that finds the
largest number.
"""

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jqinject
import jqinject.quant as q
from _timing import Timing, interleaved, print_table
from jqinject import core, native
from jqinject.dot import QDotGeneral, Scheme
from jqinject.dot.kernels.integer import integer_contraction
from jqinject.dot.kernels.kernel_table import MATRICES
from jqinject.nn import QuantLinear
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat
from jqinject.quant.aqt import config_v4

CALIBRATION_STEPS = 4
INPUT_GRADIENT = "float, input gradient"

MakeLayer = Callable[[int, nnx.Rngs], nnx.Module]


class LearnedAct(Int8ActPerTensorFloat):
    """The stock input quantizer, with its statistics collected in a few steps instead of hundreds."""

    collect_stats_steps = CALIBRATION_STEPS


class RunningAct(Int8ActPerTensorFloat):
    """The scale follows a running average of the batches' maxima."""

    scaling_impl_type = "stats"
    scaling_stats_op = "max"


class MLP(nnx.Module):
    """Layers of one width with ReLU between."""

    def __init__(self, make_layer: MakeLayer, width: int, depth: int) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([make_layer(width, rngs) for _ in range(depth)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the last layer's output."""
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


def float_layer(width: int, rngs: nnx.Rngs) -> nnx.Module:
    """Return Flax's own layer."""
    return nnx.Linear(width, width, rngs=rngs)


def quantized_layer(width: int, rngs: nnx.Rngs, act: type[Int8ActPerTensorFloat]) -> nnx.Module:
    """Return a layer with quantized weights and inputs."""
    return QuantLinear(width, width, weight_quant=Int8WeightPerChannelFloat, input_quant=act, rngs=rngs)


def make_models(width: int, depth: int, x: jax.Array) -> dict[str, nnx.Module]:
    """Return every model that can be built here, by name."""
    models: dict[str, nnx.Module] = {
        "float": MLP(float_layer, width, depth),
        INPUT_GRADIENT: MLP(float_layer, width, depth),
        "jqinject, learned": MLP(partial(quantized_layer, act=LearnedAct), width, depth),
        "jqinject, running": MLP(partial(quantized_layer, act=RunningAct), width, depth),
    }
    return models | qwix_models(width, depth, x)


def float8_layer(width: int, rngs: nnx.Rngs, scaling: str, contraction: str) -> nnx.Module:
    """Return a layer with weights, inputs and gradients in 8-bit floats."""
    return QuantLinear(
        width,
        width,
        dtype=jnp.bfloat16,
        weight_quant=getattr(q, f"Fp8e4m3WeightPerTensor{scaling}"),
        input_quant=getattr(q, f"Fp8e4m3ActPerTensor{scaling}"),
        grad_quant=getattr(q, f"Fp8e5m2GradPerTensor{scaling}"),
        contraction=contraction,
        rngs=rngs,
    )


def bfloat16_layer(width: int, rngs: nnx.Rngs) -> nnx.Module:
    """Return Flax's own layer, computing in bfloat16."""
    return nnx.Linear(width, width, dtype=jnp.bfloat16, rngs=rngs)


def make_float8_models(width: int, depth: int) -> dict[str, nnx.Module]:
    """Return the bfloat16 model and its 8-bit float kin, by name."""
    models: dict[str, nnx.Module] = {"float": MLP(bfloat16_layer, width, depth)}
    for scaling in ("Delayed", "Current"):
        for contraction in ("auto", "float"):
            name = f"fp8, {scaling.lower()}, {'payloads' if contraction == 'auto' else 'floats'}"
            make_layer = partial(float8_layer, scaling=scaling, contraction=contraction)
            models[name] = MLP(make_layer, width, depth)
    models["no quantization"] = MLP(bfloat16_layer, width, depth)
    return models


def make_scheme_models(width: int, depth: int) -> dict[str, nnx.Module]:
    """Return the bfloat16 model and those that train by a scheme, by name."""

    def layer(width: int, rngs: nnx.Rngs, scheme: type[Scheme]) -> nnx.Module:
        return QuantLinear(width, width, dtype=jnp.bfloat16, scheme=scheme, rngs=rngs)

    schemes = {
        "Fp8CurrentTraining": q.Fp8CurrentTraining,
        "MXFP8Training": q.MXFP8Training,
        "NVFP4Training": q.NVFP4Training,
        "NVFP4Training, nearest": q.NVFP4Training.let(gradient_rounding="round"),
        "NVFP4Training, not rotated": q.NVFP4Training.let(hadamard=None),
    }
    models: dict[str, nnx.Module] = {"float": MLP(bfloat16_layer, width, depth)}
    return models | {
        name: MLP(partial(layer, scheme=scheme), width, depth) for name, scheme in schemes.items()
    }


def int8_layer(width: int, rngs: nnx.Rngs, **bits: object) -> nnx.Module:
    """Return Flax's layer with an integer contraction."""
    return nnx.Linear(width, width, dot_general=QDotGeneral(config_v4(**bits), rngs=rngs), rngs=rngs)


INTEGERS = {
    "forward": {"dlhs_bits": None},
    "forward and left": {"dlhs_bits": 8},
    "all three": {"dlhs_bits": 8, "drhs_bits": 8},
}


def make_int8_models(width: int, depth: int, x: jax.Array) -> dict[str, nnx.Module]:
    """Return the float model and those that contract integers, by name."""
    models: dict[str, nnx.Module] = {"float": MLP(float_layer, width, depth)}
    for name, bits in INTEGERS.items():
        for noise in (None,) if name == "forward" else (None, "bits-8", "custom-1", "jax.uniform"):
            make_layer = partial(int8_layer, rng_type=noise, **bits)
            models[f"jqinject, {name}{'' if noise is None else ', ' + noise}"] = MLP(make_layer, width, depth)
    return models | qwix_models(width, depth, x)


def qwix_models(width: int, depth: int, x: jax.Array) -> dict[str, nnx.Module]:
    """Return Qwix's models, which contract integers forward, where it is installed."""
    if importlib.util.find_spec("qwix") is None:
        return {}
    import qwix

    models = {}
    for name, static in (("Qwix QAT, dynamic", False), ("Qwix QAT, static", True)):
        rule = qwix.QtRule(weight_qtype=jnp.int8, act_qtype=jnp.int8, act_static_scale=static)
        models[name] = qwix.quantize_model(MLP(float_layer, width, depth), qwix.QtProvider([rule]), x)
    return models


def loss_of(model: nnx.Module, x: jax.Array, target: jax.Array) -> jax.Array:
    """Return the mean squared error."""
    return jnp.mean((model(x) - target) ** 2)  # type: ignore[operator]


@nnx.jit
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array, target: jax.Array) -> object:
    """Take one step and return the loss."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, x, target)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def train_step_with_input_gradient(
    model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array, target: jax.Array
) -> object:
    """Take one step and return the loss and the gradient with respect to `x`."""
    loss, (gradients, of_x) = nnx.value_and_grad(loss_of, argnums=(0, 1))(model, x, target)
    optimizer.update(model, gradients)
    return loss, of_x


@nnx.jit
def reporting_train_step(
    model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array, target: jax.Array
) -> object:
    """Take one step whose statistics of gradients move, and return the loss."""
    loss, gradients = jqinject.value_and_grad(loss_of)(model, x, target)
    optimizer.update(model, gradients)
    return loss


def step_for(name: str, in_bfloat16: bool) -> Callable[..., object]:
    """Return the step that the model of this name takes."""
    if name == INPUT_GRADIENT:
        return train_step_with_input_gradient
    return reporting_train_step if in_bfloat16 and name != "float" else train_step


def stepper(
    model: nnx.Module, step: Callable[..., object], x: jax.Array, target: jax.Array
) -> Callable[[], object]:
    """Return a callable that takes one step and waits for it."""
    model.train()
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)
    return lambda: jax.block_until_ready(step(model, optimizer, x, target))


def statistics_of(x: jax.Array) -> dict[str, Callable[[], object]]:
    """Return the statistics that input quantizers take, and one pass over the input."""
    functions = {
        "one pass": jnp.max,
        "largest magnitude": core.AbsMax(),
        "minimum and maximum": core.MinMax(),
        "99.999th percentile of magnitudes": core.AbsPercentile(99.999),
        "0.001st and 99.999th percentile": core.PercentileInterval(0.001, 99.999),
    }
    compiled = {name: jax.jit(partial(lambda f, x: f(x), f)) for name, f in functions.items()}
    return {name: partial(lambda f: jax.block_until_ready(f(x)), f) for name, f in compiled.items()}


def products_of(x: jax.Array) -> dict[str, Callable[[], object]]:
    """Return one product of floats, and one of as many bytes that nobody rounds or scales."""
    left, right = x, jax.random.normal(jax.random.key(2), (x.shape[1], x.shape[1]))
    of_bytes = partial(integer_contraction, dims=MATRICES, accumulator=jnp.dtype(jnp.int32))
    integers = [jnp.clip(jnp.round(32 * numbers), -127, 127).astype(jnp.int8) for numbers in (left, right)]
    floats, contract = jax.jit(jnp.matmul), jax.jit(of_bytes)
    return {
        "float": lambda: jax.block_until_ready(floats(left, right)),
        "int8": lambda: jax.block_until_ready(contract(*integers)),
    }


def print_over(title: str, timings: dict[str, Timing], base: str) -> None:
    """Print a table of medians and of ratios to one of them."""
    rows = [
        [name, t.show(digits=2), t.over(timings[base]).show(factor=1, digits=2)]
        for name, t in timings.items()
    ]
    print_table(title, ["ms: median [quartiles]", title.partition(":")[0].lower(), f"/ {base}"], rows)


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--width", type=int, default=1024, help="features of every layer (default: %(default)s)"
    )
    parser.add_argument("--depth", type=int, default=4, help="layers (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=512, help="rows of a batch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds (default: %(default)s)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--fp8", action="store_true", help="8-bit float training against bfloat16")
    kind.add_argument(
        "--schemes", action="store_true", help="training by schemes, down to 4 bits, against bfloat16"
    )
    kind.add_argument("--int8", action="store_true", help="training with integer contractions")
    kind.add_argument("--statistics", action="store_true", help="the statistics of an input alone")
    options = parser.parse_args()

    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (options.batch, options.width))
    if options.statistics:
        timings = interleaved(statistics_of(x), rounds=options.rounds, in_a_row=5)
        print_over(f"Statistic: of {options.batch} x {options.width} numbers", timings, "one pass")
        return
    target = jax.random.normal(keys[1], (options.batch, options.width))
    in_bfloat16 = options.fp8 or options.schemes
    if in_bfloat16:
        x, target = x.astype(jnp.bfloat16), target.astype(jnp.bfloat16)
        make = make_float8_models if options.fp8 else make_scheme_models
        models = make(options.width, options.depth)
    elif options.int8:
        models = make_int8_models(options.width, options.depth, x)
    else:
        models = make_models(options.width, options.depth, x)
    steps = {name: stepper(model, step_for(name, in_bfloat16), x, target) for name, model in models.items()}
    timings = interleaved(steps, rounds=options.rounds, warmup=CALIBRATION_STEPS + 4)

    sizes = f"{options.depth} layers of {options.width}, batch {options.batch}, {jax.default_backend()}"
    print_over(f"Step: {sizes}", timings, "float")
    if options.int8:
        timings = interleaved(products_of(x), rounds=options.rounds, in_a_row=5)
        print_over(f"Product: alone, {options.batch} x {options.width} x {options.width}", timings, "float")
        print(f"compiled kernel: {native.status()}")
    if not in_bfloat16 and importlib.util.find_spec("qwix") is None:
        print('Qwix is not installed here: pip install ".[bench]"')


if __name__ == "__main__":
    main()
