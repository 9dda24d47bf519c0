"""Low-bit floats that are kept for a backward pass: nothing rounds them on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject.ops.packing import as_bits

DTYPES = (
    jnp.float4_e2m1fn,
    jnp.float8_e3m4,
    jnp.float8_e4m3,
    jnp.float8_e4m3b11fnuz,
    jnp.float8_e4m3fn,
    jnp.float8_e4m3fnuz,
    jnp.float8_e5m2,
    jnp.float8_e5m2fnuz,
    jnp.float8_e8m0fnu,
)


def every_number(dtype):
    bits = jnp.finfo(dtype).bits
    codes = jnp.arange(2**bits).astype(f"uint{bits}")
    numbers = jax.lax.bitcast_convert_type(codes, dtype)
    wide = np.asarray(numbers.astype(jnp.float32))
    subnormal = (wide != 0) & (np.abs(wide) < np.finfo(np.float32).tiny)  # XLA may take them for 0
    return numbers[np.isfinite(wide) & ~subnormal]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_number_survives_a_policy_that_saves(dtype):
    numbers = every_number(dtype)

    @jax.custom_vjp
    def scaled(x, payload):
        return x * payload.astype(jnp.float32)

    scaled.defvjp(
        lambda x, payload: (scaled(x, payload), as_bits(payload)),
        lambda kept, g: (g * kept.floats().astype(jnp.float32), None),
    )
    step = jax.checkpoint(
        lambda x: scaled(x, jnp.flip(numbers)), policy=jax.checkpoint_policies.everything_saveable
    )
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(step(x))))(jnp.zeros(numbers.shape))
    np.testing.assert_array_equal(gradient, jnp.flip(numbers).astype(jnp.float32))


def test_other_leaves_stay_as_they_are():
    tree = {
        "integers": jnp.arange(3),
        "half": jnp.ones(2, jnp.bfloat16),
        "key": jax.random.key(0),
        "none": None,
    }
    kept = as_bits(tree)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, kept.tree, tree))
    assert kept.floats()["none"] is None
