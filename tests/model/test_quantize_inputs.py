"""`quantize` takes a NumPy array for its inputs as it takes a JAX array: as one argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.model import Rule, quantize
from jqinject.odml import OdmlQat
from jqinject.quant import Int8ActPerTensorMinMax


class Adds(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return x + self.dense(x)


@pytest.mark.parametrize("rules", [Rule(op="add", output_quant=Int8ActPerTensorMinMax), OdmlQat()])
@pytest.mark.parametrize("kind", ["array", "tuple", "dict", "spec"])
def test_numpy_inputs_are_one_argument(rules, kind):
    x = np.ones((3, 4), np.float32)
    given = {"array": x, "tuple": (x,), "dict": {"x": x}, "spec": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    expected = quantize(Adds(), rules, inputs=jnp.asarray(x))
    assert list(quantize(Adds(), rules, inputs=given[kind]).op_quant) == list(expected.op_quant)
    assert len(expected.op_quant) > 0
