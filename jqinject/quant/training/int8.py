"""Training with int8 products: AQT's configuration, and BitNet's ternary weights."""

from jqinject.core.statistics.ranges import AbsMeanRange
from jqinject.dot import OperandInjector, Scheme
from jqinject.dot.schemes.config import ConfigV4


class Int8Training(ConfigV4):
    """AQT's int8 training: `y = x w` and `dx = g w^T` are products of int8 numbers, `dw` is in float.

    Every operand is quantized for its product, scale = max |x| / 127.5 over what is summed; the gradient is rounded
    stochastically, so it needs random numbers: `rngs=` where it is used. `Int8Training.let(drhs_bits=8)` makes `dw` a
    product of int8 numbers too.

    Source: Google's AQT, `config_v4()`; Abdolrashidi et al., 2021, "Pareto-Optimal Quantized ResNet Is Mostly 4-bit".

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(16, 4, scheme=Int8Training, rngs=nnx.Rngs(0))
    """


class TernaryWeight(OperandInjector):
    """-1, 0 or 1 times the mean magnitude of the weight, to nearest; the gradient passes unchanged."""

    bits = 2
    calibration = AbsMeanRange
    calibration_axes = "tensor"
    preserve_max_val = True


class Int8PerToken(OperandInjector):
    """int8 activations, scale = max |x| / 127 of all numbers that are summed; the gradient passes unchanged."""

    bits = 8
    preserve_max_val = True


class BitNet158(Scheme):
    """BitNet b1.58: ternary weights times int8 activations; gradients of the quantized product in float.

    Source: Ma et al., 2024, "The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits".

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.dot import dot_general
        >>> x, w = jnp.array([[127.0, 2.4]]), jnp.array([[3.0], [-0.1]])
        >>> dot_general(x, w, (((1,), (0,)), ((), ())), config=BitNet158)  # 127 * 1 * mean |w|
        Array([[196.84999]], dtype=float32)
    """

    fprop_lhs = Int8PerToken
    fprop_rhs = TernaryWeight
