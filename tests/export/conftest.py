"""A quantizer whose scale depends on the data that it quantizes."""

from dataclasses import dataclass

import jax.numpy as jnp
import pytest

from jqinject.quant import Int8ActPerTensorFloat


@dataclass(frozen=True)
class LargestNow:
    """scale = max |x| / threshold, of the x at hand."""

    def __call__(self, x, threshold):
        return jnp.max(jnp.abs(x)) / threshold


class Dynamic(Int8ActPerTensorFloat):
    scaling_impl = LargestNow


@pytest.fixture
def dynamic_quantizer():
    return Dynamic
