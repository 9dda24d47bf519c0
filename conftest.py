"""What holds for every test and doctest: eight CPU devices, strict dtypes, quick compilation without a cache.

The environment is set before JAX is imported, and only where it is not set already, so that
`JAX_PLATFORMS=cuda python -m pytest` runs the suite on another backend. This file lies beside `tests/` and
`jqinject/` because it serves both: the tests and the examples in the docstrings.
"""

import gc
import os

# What is compiled stays: looking through it for garbage takes time and finds nothing.
gc.set_threshold(100_000, 50, 100)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
if _DEVICE_COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICE_COUNT}=8".strip()
os.environ.setdefault("MPLBACKEND", "agg")

import jax
from hypothesis import settings

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_compilation_cache", False)
# Tests run a program once: optimizing it takes longer than it does.
jax.config.update("jax_disable_most_optimizations", True)

# A first example compiles, so time limits say nothing; in CI every run draws the same examples.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
