"""What one product of square matrices costs: bfloat16 against int8 and 8-bit floats.

    python benchmarks/matmul.py
    python benchmarks/matmul.py --sizes 4096 8192

`payloads`: the operands are in low bits already, and the output is scaled. `quantized`: they come in bfloat16, are
scaled by their largest magnitudes and rounded first, as jqinject's `dot_general(config=...)` does it. A ratio above 1
is faster than bfloat16. GPUs with 8-bit units are what this is for; a CPU has none for 8-bit floats.
"""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp

from _timing import interleaved, print_table
from jqinject.dot import Affine, FrozenParam, QDotGeneral, QuantMode, affine_dot_general, dot_general
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.quant.aqt import config_fwd_fp8, config_v4

MATMUL = (((1,), (0,)), ((), ()))
SIZES = (512, 1024, 2048)


def products(size: int) -> dict[str, Callable[[], object]]:
    """Return every product, by name; each waits for its result."""
    keys = jax.random.split(jax.random.key(0))
    x, w = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)

    def payloads(bits: object) -> tuple[FrozenParam, FrozenParam]:
        op = QDotGeneral(
            config_v4(fwd_bits=bits), lhs_quant_mode=QuantMode.CONVERT, rhs_quant_mode=QuantMode.CONVERT
        )
        op(x, w, MATMUL)
        return op.lhs_freezer.get(), op.rhs_freezer.get()

    def contract(a: FrozenParam, b: FrozenParam) -> jax.Array:
        (x, x_scale), (w, w_scale) = (
            (p.form.stored.payload(p.numbers["value"]), p.numbers["scale"]) for p in (a, b)
        )
        if not jnp.issubdtype(x.dtype, jnp.integer):
            y = jax.lax.dot_general(x, w, MATMUL, preferred_element_type=jnp.float32)
            return (y * x_scale * w_scale).astype(jnp.bfloat16)
        left, right = Affine(x, x_scale), Affine(w, w_scale)
        return affine_dot_general(left, right, Dimensions.of(2, 2, MATMUL), jnp.bfloat16)

    def call(function: Callable[..., jax.Array], *operands: object) -> Callable[[], object]:
        run = jax.jit(function)
        return lambda: jax.block_until_ready(run(*operands))

    def quantized(config: object) -> Callable[..., jax.Array]:
        return lambda a, b: dot_general(a, b, MATMUL, config=config)

    return {
        "bfloat16": call(lambda a, b: a @ b, x, w),
        "int8, payloads": call(contract, *payloads(8)),
        "int8, quantized": call(quantized(config_v4()), x, w),
        "fp8, payloads": call(contract, *payloads("e4m3")),
        "fp8, quantized": call(quantized(config_fwd_fp8()), x, w),
    }


def main() -> None:
    """Read the options and measure."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds (default: %(default)s)")
    options = parser.parse_args()
    rows = []
    for size in options.sizes:
        timings = interleaved(products(size), rounds=options.rounds)
        base = timings["bfloat16"].median
        rows.append([str(size), *(f"{t.median * 1e3:.2f} ({base / t.median:.2f})" for t in timings.values())])
    print_table(f"ms (bfloat16 / this), jqinject on {jax.default_backend()}", ["size", *timings], rows)


if __name__ == "__main__":
    main()
