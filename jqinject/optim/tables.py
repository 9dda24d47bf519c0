"""The tables of optimizer states: numbers in [-1, 1] or [0, 1], dense where moments are."""

from __future__ import annotations

import numpy as np

from jqinject.ops import TableGrid


def dynamic_table(bit_width: int, signed: bool) -> TableGrid:
    """The dynamic data type: `2^b` numbers of 7 orders of magnitude (of `b - 1`, if fewer), with 0 and 1.

    The first bits count the orders below 1, what is left divides `[0.1, 1]` of that order evenly.

    Args:
        bit_width: b, 4 or 8.
        signed: whether there are negative numbers; else there is twice the precision.

    Source: Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization"; the numbers are bitsandbytes's and
    torchao's.

    Example:
        >>> [round(value, 4) for value in dynamic_table(4, signed=True).values[6:]]
        [-0.0055, 0.0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0]
    """
    orders = bit_width - 1
    numbers = [0.0, 1.0]
    for order in range(orders):
        counts = 2**order if signed else 2 ** (order + 1)
        edges = np.linspace(0.1, 1, counts + 1, dtype=np.float32)
        middles = (edges[1:] + edges[:-1]) / np.float32(2) * np.float32(10.0 ** (order - orders + 1))
        numbers += middles.tolist()
        numbers += (-middles).tolist() if signed else []
    return TableGrid(tuple(sorted(numbers)))


def linear_table(bit_width: int) -> TableGrid:
    """`2^b` evenly spaced numbers up to 1, without 0.

    A second moment must not become 0, as updates are divided by its root.

    Args:
        bit_width: b.

    Source: Li et al., 2023, "Memory Efficient Optimizers with 4-bit States".

    Example:
        >>> linear_table(2).values
        (0.25, 0.5, 0.75, 1.0)
    """
    count = 2**bit_width
    return TableGrid(tuple((k + 1) / count for k in range(count)))
