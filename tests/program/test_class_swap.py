"""Modules that get another class: one subclass for each class, and code around a method."""

import pickle

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.program import QuantizedProgram, change_class, intercept, quantized_class
from jqinject.program.class_swap import derived_class, original_class


class Doubled:
    def __call__(self, layer, call, *args, **kwargs):
        return 2 * call(*args, **kwargs)


class Shifted:
    def __call__(self, layer, call, *args, **kwargs):
        return call(*args, **kwargs) + layer.bias[...]


class OtherMeta(type(nnx.Module)):
    pass


class Own(nnx.Module, metaclass=OtherMeta):
    def __call__(self, x):
        return x


def layer():
    return nnx.Linear(2, 2, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(0))


X = jnp.array([[1.0, -2.0]])


def test_one_class_for_all_modules_of_a_class():
    first, second = layer(), layer()
    intercept(first, Doubled())
    intercept(second, Shifted())
    assert type(first) is type(second) and issubclass(type(first), nnx.Linear)
    assert type(first).__name__ == "Linear" and original_class(type(first)) is nnx.Linear
    before = len(nnx.Linear.__subclasses__())
    for _ in range(20):
        intercept(layer(), Doubled())
    assert len(nnx.Linear.__subclasses__()) == before


def test_the_last_one_that_was_added_is_called_first():
    module = layer()
    expected = module(X)
    intercept(module, Shifted())
    intercept(module, Doubled())
    np.testing.assert_allclose(module(X), 2 * (expected + 1))
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(module, X), 2 * (expected + 1), rtol=1e-6)


def test_classes_are_pickled_by_what_they_were_made_from():
    for kind in (nnx.Linear, Own):
        program = quantized_class(kind)
        assert pickle.loads(pickle.dumps(program)) is program
        assert quantized_class(program) is program and derived_class(kind, QuantizedProgram) is program
        assert issubclass(program, kind) and program.__qualname__ == kind.__qualname__
    module = layer()
    change_class(module, quantized_class(nnx.Linear))
    assert isinstance(module, QuantizedProgram)
    intercept(module, Doubled())
    assert type(pickle.loads(pickle.dumps(module))) is type(module)
