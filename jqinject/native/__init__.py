"""Compiled kernels for CPUs, for products where XLA's own are far below the processor's speed.

Products of int8 or float rows with stored weights, in bytes or in 4 bits, with AVX-512 VNNI or AVX2, and of a few rows
with NEON (`kernels/`, a file for each), called by XLA, with helping threads that stay awake between the layers of a
model. `jqinject.compiled` also fuses elementwise operations with products of int8. They are compiled when the package
is installed if there is a C compiler, or later by `python -m jqinject.native.build`; without them everything works,
and XLA contracts. Sums of integers are the same.

`status()` says whether they are used, `with use(False): ...` or `JQINJECT_NATIVE=0` switches them off, and
`JQINJECT_NATIVE=path` names another library. Programs that XLA partitions over devices, and those of `jax.export`, do
not contain them: this is decided when they are lowered.
"""

from jqinject.native.library import use as use
from jqinject.native.matmul import int8_matmul as int8_matmul
from jqinject.native.matmul import status as status
from jqinject.native.matmul import takes as takes
