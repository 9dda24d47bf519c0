"""What `jqinject.core.flax_internals` assumes of Flax, one test for each assumption."""

import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.core.flax_internals import (
    PYTREE_ATTRIBUTES,
    READER_OF_LINEN,
    READERS_OF_PURE_DICTS,
    ParameterView,
    canonicalize_dtype,
    change_class,
    flax_layer,
    flax_parameters,
    init_flax,
    initialized_by_metaclass,
    metadata_of,
    note_child,
    promote_dtype,
)


class Stored:
    """A descriptor that stores what is assigned, and notes it."""

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, module, owner=None):
        return self if module is None else vars(module).get(self.name)

    def __set__(self, module, value):
        vars(module)[self.name] = value
        note_child(module, self.name, value)


class Holder(nnx.Module):
    child = Stored()

    def __init__(self):
        self.child = nnx.Linear(2, 3, rngs=nnx.Rngs(0))


class Doubled(nnx.Linear):
    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs)


def test_an_attribute_of_a_descriptor_is_a_child_once_it_is_noted():
    holder = Holder()
    assert nnx.to_pure_dict(nnx.state(holder))["child"]["kernel"].shape == (2, 3)
    assert nnx.clone(holder).child is not holder.child
    assert [node for _, node in nnx.iter_modules(holder, graph=True)] == [holder.child, holder]


def test_notes_of_nnx_on_attributes_have_one_prefix():
    attributes = vars(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    notes = {name for name in attributes if name.startswith(PYTREE_ATTRIBUTES)}
    assert "_pytree__nodes" in notes
    assert {"kernel", "bias"} <= attributes.keys() - notes


def test_a_class_is_changed_in_place_and_carried_through_transformations():
    layer, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
    y, structure = layer(x), nnx.graphdef(layer)
    change_class(layer, Doubled)
    assert "__class__" not in vars(layer)
    assert nnx.graphdef(layer) != structure
    np.testing.assert_array_equal(nnx.jit(lambda layer, x: layer(x))(layer, x), 2 * y)
    np.testing.assert_array_equal(nnx.clone(layer)(x), 2 * y)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), (1, 2)),
        (nnx.LinearGeneral(2, (3, 1), rngs=nnx.Rngs(0)), (1, 2)),
        (nnx.Einsum("bi,io->bo", (2, 3), (3,), rngs=nnx.Rngs(0)), (1, 2)),
        (nnx.Conv(2, 3, (1,), rngs=nnx.Rngs(0)), (1, 4, 2)),
        (nnx.ConvTranspose(2, 3, (1,), rngs=nnx.Rngs(0)), (1, 4, 2)),
    ],
    ids=lambda case: type(case).__name__,
)
def test_a_forward_runs_on_a_view_with_plain_arrays_for_parameters(layer, x):
    x = jnp.ones(x)
    kernel, bias = 2 * layer.kernel[...], layer.bias[...] + 1
    y = type(layer).__call__(ParameterView(layer, {"kernel": kernel, "bias": bias}), x)
    layer.kernel[...], layer.bias[...] = kernel, bias
    np.testing.assert_array_equal(y, layer(x))


def test_layers_of_flax_are_known_by_their_module():
    assert flax_layer(Doubled) is nnx.Linear
    assert flax_layer(Holder) is None


def test_a_constructor_takes_the_keywords_of_the_bases_it_hands_them_to():
    assert {"in_features", "lora_rank", "kernel_init", "rngs"} <= flax_parameters(nnx.LoRALinear).keys()


def test_what_a_constructor_does_not_take_is_returned():
    layer = object.__new__(Doubled)
    vars(layer).update(vars(nnx.Linear(1, 1, rngs=nnx.Rngs(0))))
    arguments = {"in_features": 2, "out_features": 3, "rngs": nnx.Rngs(0), "own": 1}
    assert init_flax(layer, arguments, {"use_bias": False, "weight_bit_width": 4}) == {"weight_bit_width": 4}
    assert layer.kernel.shape == (2, 3) and layer.bias is None


def test_private_defaults_promote_like_the_layers():
    x, kernel = jnp.ones(1, jnp.bfloat16), jnp.ones(1)
    with jax.numpy_dtype_promotion("standard"):
        assert [x.dtype for x in promote_dtype((x, kernel), dtype=None)] == [jnp.float32] * 2
        assert canonicalize_dtype(x, kernel, dtype=None) == jnp.float32
    assert [x.dtype for x in promote_dtype((x, kernel), dtype=jnp.float16)] == [jnp.float16] * 2
    assert nnx.Linear(1, 1, rngs=nnx.Rngs(0)).promote_dtype is promote_dtype


class Watched(nnx.Param):
    """Notes the code that reads it."""

    readers: list = []

    def get_value(self, *, index=...):
        self.readers.append(sys._getframe(1).f_code)
        return super().get_value(index=index)


def test_states_that_are_stored_are_read_by_code_that_is_known():
    state = nnx.State({"kernel": Watched(jnp.ones(2))})
    Watched.readers.clear()
    nnx.to_pure_dict(state)
    assert Watched.readers and {*Watched.readers} <= {*filter(inspect.iscode, READERS_OF_PURE_DICTS)}


def test_linen_reads_a_variable_by_code_that_is_known():
    Watched.readers.clear()
    nnx.bridge.variables.to_linen_var(Watched(jnp.ones(2)))
    assert READER_OF_LINEN in Watched.readers


@initialized_by_metaclass
class Named(type(nnx.Module)):
    def _construct(cls, self, *arguments):
        self.__init__(*arguments)
        vars(self)["constructed"] = cls.__name__


def test_a_metaclass_initializes_modules():
    class Sized(nnx.Module, metaclass=Named):
        def __init__(self, size):
            self.size = size

    assert (Sized(2).size, Sized(2).constructed) == (2, "Sized")


def test_metadata_is_read_without_getattr():
    assert metadata_of(nnx.Param(jnp.ones(2), sharding_hint="rows"))["sharding_hint"] == "rows"
