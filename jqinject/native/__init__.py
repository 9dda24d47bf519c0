"""Compiled kernels for CPUs, for products where XLA's own are far below the processor's speed.

There is one kernel: a product of int8 matrices with the dot product instruction of AVX-512 VNNI (`int8_matmul.c`),
called by XLA on its own threads. It is compiled when the package is installed if there is a C compiler, or by
`python -m jqinject.native.build`; without it everything works, and XLA contracts. The sums are the same integers either
way.

`status()` says whether it is used, `with use(False): ...` or `JQINJECT_NATIVE=0` switches it off, and
`JQINJECT_NATIVE=path` names another library. Programs that XLA partitions over devices, and those of `jax.export`, do
not contain the kernel: this is decided when they are lowered.
"""

from jqinject.native.library import use as use
from jqinject.native.matmul import int8_matmul as int8_matmul
from jqinject.native.matmul import status as status
from jqinject.native.matmul import takes as takes
