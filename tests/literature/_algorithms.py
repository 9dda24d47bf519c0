"""Rows about algorithms: solvers, accumulators, learned steps, smoothing, unbiased gradients, and bytes."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jqinject
from jqinject import Rule, ops, quant
from jqinject.nn import QuantIdentity, QuantLinear, QuantReLU
from jqinject.recipes import GPTQ, RTN, MatrixGrid, Problem, Recipe, SmoothQuant, Solver, Statistics
from tests.literature import _reference as theory
from tests.literature._reference import Array
from tests.literature._rows import Row

QUIP = "Chee et al. 2023 (QuIP): GPTQ is LDLQ"
WEIGHTS = "4096 rows of 64 uniform weights"


@cache
def hessian() -> Array:
    """A symmetric matrix whose numbers float32 holds."""
    a = np.random.default_rng(0).standard_normal((64, 64)) / 8
    return (a @ a.T + 0.02 * np.eye(64)).astype(np.float32).astype(np.float64)


@cache
def proxy_losses(solver: Solver) -> Array:
    """`d H d^T` of each row of the errors that a solver leaves at scale 1."""
    h, w = hessian(), np.random.default_rng(1).uniform(-100, 100, (4096, 64)).astype(np.float32)
    sums = {"hessian": jnp.asarray(h, jnp.float32)[None]}
    grid = MatrixGrid(jnp.ones((1, 1, 1)), jnp.zeros((1, 1, 1)), ops.IntGrid(16))
    problem = Problem(
        jnp.asarray(w)[None], jnp.asarray(w)[None], Statistics(jnp.ones(1), sums), lambda _: grid
    )
    d = np.asarray(solver(problem).values[0], np.float64) - w
    return np.sum((d @ h) * d, 1)


def proxy_loss(solver: Solver) -> float:
    """Their mean."""
    return float(proxy_losses(solver).mean())


def beyond_worst_case() -> float:
    """How far the largest loss of a row by GPTQ is beyond that of half a step for every number."""
    worst = theory.ldl_diagonal(hessian()).sum() / 4
    return float(max(proxy_losses(GPTQ(damping=0.0)).max() - worst, 0))


def solvers() -> list[Row]:
    """The losses of GPTQ and of rounding to nearest."""
    h = hessian()
    order = np.argsort(-np.diag(h), kind="stable")
    nearest, ldl = np.trace(h) / 12, theory.ldl_diagonal(h).sum() / 12
    ordered = theory.ldl_diagonal(h[np.ix_(order, order)]).sum() / 12
    why = f"sampling error of {WEIGHTS}"
    return [
        Row(
            "proxy loss of `RTN`, a row",
            nearest,
            lambda: proxy_loss(RTN()),
            0.01 * nearest,
            why,
            f"{QUIP}: tr(H) / 12",
        ),
        Row(
            "proxy loss of `GPTQ`, a row",
            ldl,
            lambda: proxy_loss(GPTQ(damping=0.0)),
            0.01 * ldl,
            why,
            f"{QUIP}: tr(D) / 12",
        ),
        Row(
            "largest proxy loss of a row by `GPTQ`, beyond its bound",
            0.0,
            beyond_worst_case,
            0.0,
            "exact",
            "Chen, Hoefler and Alistarh 2025: tr(D) / 4",
        ),
        Row(
            "proxy loss of `GPTQ(act_order=True)`, a row",
            ordered,
            lambda: proxy_loss(GPTQ(damping=0.0, act_order=True)),
            0.01 * ordered,
            why,
            f"{QUIP}: tr(D) / 12 of the ordered H",
        ),
    ]


def beyond(quantizer: type, act: type, bits: int) -> float:
    """How far the largest sum of products of a layer's integer weights lies beyond what an accumulator holds."""
    layer = QuantLinear(
        32,
        16,
        weight_quant=quantizer.let(accumulator_bit_width=bits),
        input_quant=act,
        use_bias=False,
        rngs=nnx.Rngs(0),
    )
    layer(jnp.abs(jax.random.normal(jax.random.key(0), (8, 32))))
    codes = np.asarray(layer.quant_weight().int(), np.int64)
    assert np.abs(codes).max() > 1
    low, high = (-128, 127) if act is quant.Int8ActPerTensorFloat else (0, 255)
    top = np.where(codes > 0, codes * high, codes * low).sum(0)
    bottom = np.where(codes > 0, codes * low, codes * high).sum(0)
    return float(max(top.max() - (2 ** (bits - 1) - 1), -(2 ** (bits - 1)) - bottom.min(), 0))


def accumulators() -> list[Row]:
    """A2Q's and A2Q+'s bounds."""
    rows = []
    for p, n, signed in ((16, 8, False), (16, 8, True), (20, 8, False), (16, 4, False)):
        sign = "signed" if signed else "unsigned"
        rows.append(
            Row(
                f"bound of the l1-norm, {p}-bit accumulator, {n}-bit {sign} inputs",
                (2 ** (p - 1) - 1) * 2.0 ** (int(signed) - n),
                lambda p=p, n=n, signed=signed: float(ops.get_upper_bound_on_l1_norm(p, n, signed)),
                1e-4,
                "float32",
                "Colbert et al. 2023 (A2Q): (2^(P-1) - 1) 2^(s - N)",
            )
        )
    rows.append(
        Row(
            "bound of the zero-centred l1-norm, 16-bit accumulator, 8-bit inputs",
            (2**16 - 2) / (2**8 - 1),
            lambda: float(ops.get_upper_bound_on_zero_centered_l1_norm(16, 8)),
            1e-4,
            "float32",
            "Colbert et al. 2024 (A2Q+): (2^P - 2) / (2^N - 1)",
        )
    )
    ratio = 2 * 2**8 / (2**8 - 1)
    rows.append(
        Row(
            "how much larger A2Q+'s bound is, unsigned 8-bit inputs",
            ratio,
            lambda: float(
                ops.get_upper_bound_on_zero_centered_l1_norm(16, 8)
                / ops.get_upper_bound_on_l1_norm(16, 8, False)
            ),
            1e-4,
            "float32",
            "Colbert et al. 2024: 2^(N+1) / (2^N - 1)",
        )
    )
    for name, quantizer, act, sign, bits in (
        ("A2Q", quant.Int8AccumulatorAwareWeightQuant, quant.Int8ActPerTensorFloat, "signed", 15),
        (
            "A2Q+",
            quant.Int8AccumulatorAwareZeroCenterWeightQuant,
            quant.Uint8ActPerTensorFloat,
            "unsigned",
            15,
        ),
    ):
        rows.append(
            Row(
                f"sums of a layer by {name} beyond a {bits}-bit accumulator, {sign} 8-bit inputs",
                0.0,
                lambda q=quantizer, act=act, bits=bits: beyond(q, act, bits),
                0.0,
                "exact",
                "Colbert et al.: no overflow",
            )
        )
    return rows


@cache
def lsq() -> tuple[Array, float, float]:
    """The weight, the step and its gradient of a layer whose step is learned, for a loss that sums the weight."""
    quantizer = quant.Int4WeightPerChannelLearned.let(scaling_per_output_type="tensor")
    layer = QuantLinear(32, 16, weight_quant=quantizer, use_bias=False, rngs=nnx.Rngs(0))
    layer(jnp.ones((1, 32)))  # fills the step
    gradients = nnx.grad(lambda layer: layer.quant_weight().value.sum())(layer)
    step, gradient = (
        next(x for path, x in nnx.to_flat_state(state) if path[-1] == "value")
        for state in (nnx.state(layer, nnx.Param), gradients)
    )
    kernel = np.asarray(layer.kernel.get_value(), np.float64)
    return kernel, float(step.get_value().reshape(())), float(gradient.get_value().reshape(()))


def lsq_gradient() -> float:
    """LSQ's gradient of the step, times its factor, by the paper's equations."""
    w, step, _ = lsq()
    u = w / step
    inside = np.clip(np.rint(u), -8, 7) - u
    slope = np.where(u <= -8, -8, np.where(u >= 7, 7, inside))
    return float(slope.sum() / math.sqrt(w.size * 7))


def smoothed() -> float:
    """How far SmoothQuant's factors are from its formula, at most, relatively."""
    rng = np.random.default_rng(0)
    model = nnx.Sequential(nnx.RMSNorm(16, rngs=nnx.Rngs(0)), nnx.Linear(16, 32, rngs=nnx.Rngs(1)))
    x = jnp.asarray(rng.standard_normal((64, 16)) * np.exp(rng.standard_normal(16)), jnp.float32)
    norm, linear = model.layers
    before = np.asarray(linear.kernel.get_value())  # pyright: ignore
    rule = Rule(weight_quant=quant.Int8WeightPerChannelFloat)
    result = Recipe(SmoothQuant(alpha=0.5)).apply(model, rule, [x], progress=False)
    after = np.asarray(result.float_model.layers[1].kernel.get_value())
    inputs = np.abs(np.asarray(norm(x))).max(0)  # pyright: ignore
    formula = np.sqrt(inputs / np.abs(before).max(1))
    return float(np.abs((after / before)[:, 0] / formula - 1).max())


def mean_of_stochastic_blocks() -> float:
    """The slope of the mean of stochastically rounded NVFP4 blocks over the numbers that were rounded."""
    x = np.clip(np.random.default_rng(8).standard_normal((1, 64)), -2, 2)
    layer = QuantIdentity(act_quant=StochasticNVFP4, rngs=nnx.Rngs(0))
    y = np.asarray(layer(jnp.asarray(np.repeat(x, 4096, 0), jnp.float32)), np.float64).mean(0)
    return float((x[0] * y).sum() / (x[0] ** 2).sum())


class StochasticNVFP4(quant.NVFP4TrainingAct):
    """NVFP4 whose numbers are rounded stochastically."""

    float_to_int_impl_type = "stochastic_round"


def pact() -> float:
    """The gradient of a learned range, of the sum of six numbers of which three are beyond it."""
    layer = QuantReLU(act_quant=quant.Uint8ActPerTensorFloatMaxInit, max_val=6.0)
    x = jnp.array([-1.0, 0.5, 3.0, 7.0, 8.0, 100.0])
    (gradient,) = jax.tree.leaves(nnx.grad(lambda layer: layer(x).sum())(layer))
    return float(gradient)


def training() -> list[Row]:
    """Learned steps, smoothing and unbiased rounding."""
    w, _, _ = lsq()
    start = 2 * np.abs(w).mean() / math.sqrt(7)
    esser = "Esser et al. 2020 (LSQ)"
    gradient = lsq_gradient()
    return [
        Row(
            "first step of a 4-bit learned step",
            start,
            lambda: lsq()[1],
            1e-6,
            "float32",
            f"{esser}: 2 E|w| / sqrt(Q)",
        ),
        Row(
            "gradient of a 4-bit learned step",
            gradient,
            lambda: lsq()[2],
            1e-5,
            "float32",
            f"{esser}: equation 3 over sqrt(N Q)",
        ),
        Row(
            "gradient of a range, three numbers beyond it",
            "3",
            pact,
            2 * 0.5 / 255,
            "PACT leaves out how two numbers inside are rounded",
            "Choi et al. 2018 (PACT): 1 for each number beyond",
        ),
        Row(
            "factors of `SmoothQuant(0.5)` from their formula, relatively",
            0.0,
            smoothed,
            1e-5,
            "float32",
            "Xiao et al. 2023: max|x|^a / max|w|^(1 - a)",
        ),
        Row(
            "mean of stochastically rounded NVFP4 over the numbers",
            1.0,
            mean_of_stochastic_blocks,
            5e-3,
            "sampling error of 4096 draws",
            "unbiased, where no number is clipped",
        ),
    ]


def stored_bits(quantizer: type) -> float:
    """Bits of a weight of a frozen layer, scales included."""
    layer = QuantLinear(512, 256, weight_quant=quantizer, use_bias=False, rngs=nnx.Rngs(0))
    leaves = jax.tree.leaves(nnx.state(jqinject.freeze(layer)))
    return 8 * sum(leaf.nbytes for leaf in leaves) / (512 * 256)


def storage() -> list[Row]:
    """Bits of a frozen weight."""
    table = {
        "MXFloat4e2m1Weight": ("4.25", "OCP MX 1.0: 4 + 8 / 32"),
        "MXInt8Weight": ("8.25", "OCP MX 1.0: 8 + 8 / 32"),
        "NVFP4Weight": ("4.5", "NVIDIA's NVFP4: 4 + 8 / 16"),
        "NF4WeightPerGroupFloat": ("4.5", "Dettmers et al. 2023 (QLoRA): 4 + 32 / 64"),
        "NF4WeightPerGroupFp8Scale": ("4.127", "Dettmers et al. 2023: 4 + 8 / 64 + 32 / (64 256)"),
    }
    return [
        Row(
            f"bits of a weight, `{name}`",
            bits,
            lambda name=name: stored_bits(getattr(quant, name)),
            3e-3,
            "one float32 for all scales",
            source,
        )
        for name, (bits, source) in table.items()
    ]


SECTIONS = {
    "Solvers": solvers,
    "Accumulators": accumulators,
    "Training": training,
    "Storage": storage,
}
