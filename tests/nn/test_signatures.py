"""A layer's signature has every argument: Flax's, as the installed Flax has them, and those of its quantizers."""

import inspect
import re
import typing

import pytest
from flax import nnx

import jqinject.nn
from jqinject.nn.base.quant_layer import QuantLayer

LAYERS = {
    name: layer
    for name, layer in vars(jqinject.nn).items()
    if inspect.isclass(layer) and issubclass(layer, QuantLayer) and layer.__name__ == name
}
FLAX = {
    name: getattr(nnx, name.removeprefix("Quant"))
    for name in LAYERS
    if hasattr(nnx, name.removeprefix("Quant"))
}
FLAX.pop("QuantRNN")  # `torch.nn.RNN`'s arguments: Flax's RNN takes a cell


def _parameters(layer):
    """The arguments of a constructor, those that it hands to its base among them."""
    found = {}
    for cls in layer.__mro__:
        if "__init__" in vars(cls):
            own = list(inspect.signature(cls.__init__).parameters.values())[1:]
            found = {p.name: p for p in own if p.kind is not p.VAR_KEYWORD} | found
            if all(p.kind is not p.VAR_KEYWORD for p in own):
                break
    return found


def _same_default(ours, flax):
    if callable(flax) and callable(ours):
        return ours is flax or ours.__qualname__ == flax.__qualname__
    return dict(ours) == dict(flax) if isinstance(ours, dict) else ours == flax


@pytest.mark.parametrize("name", FLAX)
def test_flax_arguments(name):
    ours = inspect.signature(LAYERS[name]).parameters
    for parameter in _parameters(FLAX[name]).values():
        own = ours[parameter.name]
        assert own.kind is parameter.kind, parameter.name
        assert _same_default(own.default, parameter.default), parameter.name
    positional = [p.name for p in _parameters(FLAX[name]).values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [*ours][: len(positional)] == positional


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_says_what_each_argument_is(name):
    signature = inspect.signature(LAYERS[name])
    assert signature.return_annotation in (None, "None")
    names = [p.name for p in signature.parameters.values()]
    assert "args" not in names and "kwargs" not in names
    documented = re.findall(
        r"\w+", inspect.getdoc(LAYERS[name]).partition("Args:")[2].partition("Raises:")[0]
    )
    assert [n for n in names if n not in documented] == []


@pytest.mark.parametrize("name", LAYERS)
def test_annotations_can_be_read(name):
    assert "return" in typing.get_type_hints(LAYERS[name].__init__)


def test_the_signature_of_an_instance_is_that_of_its_call():
    layer = jqinject.nn.QuantLinear(2, 3, rngs=nnx.Rngs(0))
    assert [*inspect.signature(layer).parameters] == ["inputs", "out_sharding"]
