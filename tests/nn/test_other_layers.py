"""Every layer with a weight besides the dense one and the convolution, each against its Flax parent."""

import copy
import pickle
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.dot import FrozenParam
from jqinject.nn import QuantConvTranspose, QuantEinsum, QuantEmbed, QuantLinearGeneral, QuantLoRALinear
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    Int32Bias,
    ShiftedUint8WeightPerChannelFloat,
)

call = nnx.jit(lambda model, x: model(x))


@dataclass(frozen=True)
class Case:
    """A layer, its parent, and what it is called with.

    Attributes:
        scale: shape of the weight's scale with one for each channel.
        contracts: whether it contracts integers once it is frozen.
    """

    ours: Any
    parent: Any
    where: tuple[Any, ...]
    shape: tuple[int, ...]
    scale: tuple[int, ...]
    given: dict[str, Any] = field(default_factory=dict)
    contracts: bool = True

    def make(self, seed=0, **quantizers):
        return self.ours(*self.where, **self.given, **quantizers, rngs=nnx.Rngs(seed))

    def float(self, seed=0, **given):
        return self.parent(*self.where, **{**self.given, **given}, rngs=nnx.Rngs(seed))

    def input(self, seed=0, dtype=jnp.float32):
        key = jax.random.key(seed)
        if self.ours is QuantEmbed:
            return jax.random.randint(key, self.shape, -7, 7)
        return jax.random.normal(key, self.shape, dtype)

    @property
    def quantizers(self):
        """Of weight and input, the latter where there is one."""
        chosen = {"weight_quant": Int8WeightPerChannelFloat}
        return chosen if self.ours is QuantEmbed else {**chosen, "input_quant": Int8ActPerTensorFloat}


def noisy(bias=0.5):
    """A bias that is not 0."""
    return {"bias_init": nnx.initializers.normal(bias)}


def general(where, shape, scale, **given):
    return Case(QuantLinearGeneral, nnx.LinearGeneral, where, shape, scale, {**noisy(), **given})


def einsum(where, shape, scale, contracts=True):
    given = {"kernel_init": nnx.initializers.normal(1.0), **noisy()}
    return Case(QuantEinsum, nnx.Einsum, where, shape, scale, given, contracts)


def transposed(where, shape, scale, **given):
    return Case(
        QuantConvTranspose,
        nnx.ConvTranspose,
        where,
        shape,
        scale,
        {**noisy(), **given},
        contracts=not given.get("transpose_kernel"),
    )


CASES = {
    "general": general((6, (2, 4)), (3, 5, 6), (1, 2, 4)),
    "general, two axes": general(((5, 6), 4), (3, 5, 7, 6), (1, 1, 4), axis=(-1, 1)),
    "general, batch": general((6, (2, 4)), (3, 5, 6), (3, 1, 2, 4), batch_axis={0: 3}),
    "general, no bias": general((6, 4), (6,), (1, 4), use_bias=False),
    "einsum": einsum(("btd,dnh->btnh", (6, 2, 4), (2, 4)), (2, 3, 6), (1, 2, 4)),
    "einsum, output moved": einsum(("btnh, nhd -> dbt", (2, 4, 6), (6,)), (2, 3, 2, 4), (1, 1, 6)),
    "einsum, channels moved": einsum(("bd,ndh->hbn", (2, 6, 4), (4, 2)), (3, 6), (2, 1, 4)),
    "einsum, batch": einsum(("bnd,ndf->bnf", (2, 6, 4), (2, 4)), (3, 2, 6), (2, 1, 4)),
    "einsum, ellipsis": einsum(("...d,df->...f", (6, 4), (4,)), (2, 3, 6), (1, 4)),
    "einsum, all summed": einsum(("btd,d->bt", (6,)), (2, 3, 6), (1,)),
    "einsum, nothing summed": einsum(("bd,d->bd", (6,), (6,)), (3, 6), (6,)),
    "einsum, summed alone": einsum(("btd,df->bf", (6, 4), (4,)), (2, 3, 6), (1, 4), contracts=False),
    "transposed": transposed((6, 4, (2, 3)), (2, 3, 5, 6), (1, 1, 1, 4), strides=2),
    "transposed kernel": transposed((6, 4, 3, 2), (2, 5, 6), (1, 4, 1), transpose_kernel=True),
    "transposed, circular": transposed((6, 4, (3,), 2), (5, 6), (1, 1, 4), padding="CIRCULAR"),
    "embed": Case(QuantEmbed, nnx.Embed, (7, 6), (3, 5), (7, 1), contracts=False),
    "lora": Case(
        QuantLoRALinear,
        nnx.LoRALinear,
        (6, 4),
        (3, 6),
        (1, 4),
        {"lora_rank": 2, "b_initializer": nnx.initializers.normal(1.0), **noisy()},
    ),
}
SOME = [
    CASES[name] for name in ("general, batch", "einsum, channels moved", "transposed kernel", "embed", "lora")
]
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
some = pytest.mark.parametrize("case", SOME, ids=lambda case: case.ours.__name__)


def assert_same_state(ours, theirs):
    ours, theirs = nnx.to_flat_state(nnx.state(ours)), nnx.to_flat_state(nnx.state(theirs))
    assert [(path, type(v)) for path, v in ours] == [(path, type(v)) for path, v in theirs]
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a[...], b[...])


def expected_weight(weight, axes):
    """Symmetric 8-bit rounding with one scale for what lies along `axes`, in NumPy."""
    scale = np.abs(weight).max(axes, keepdims=True).astype(np.float32) / np.float32(127)
    return np.clip(np.round(weight / scale), -127, 127), scale


@every
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_without_quantizers_it_is_the_parent(case, dtype):
    given = {} if dtype is None else {"dtype": dtype, "param_dtype": dtype}
    if dtype is not None and case.ours is QuantLoRALinear:
        given |= {"lora_dtype": dtype, "lora_param_dtype": dtype}
    layer, parent = case.make(weight_quant=None, **given), case.float(**given)
    assert_same_state(layer, parent)
    x = case.input()
    for run in (lambda m, x: m(x), call):
        y, expected = run(layer, x), run(parent, x)
        assert y.dtype == expected.dtype
        np.testing.assert_array_equal(y, expected)


@every
def test_every_channel_has_its_scale_and_the_output_is_the_parents_on_those_numbers(case):
    layer, parent = case.make(weight_quant=Int8WeightPerChannelFloat), case.float()
    summed = tuple(axis for axis, size in enumerate(case.scale) if size == 1)
    integers, scale = expected_weight(np.asarray(layer.weight[...]), summed)
    weight = layer.quant_weight()
    assert weight.scale.shape == scale.shape == case.scale
    np.testing.assert_allclose(weight.scale, scale, rtol=1e-6)
    np.testing.assert_array_equal(weight.int(), integers)
    setattr(parent, layer.weight_name, nnx.Param(weight.value))
    np.testing.assert_array_equal(layer(case.input()), parent(case.input()))


@pytest.mark.heavy
@some
def test_training_with_bfloat16_weights(case):
    given = {"lora_dtype": jnp.bfloat16} if case.ours is QuantLoRALinear else {}
    layer = case.make(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, **given, **case.quantizers)
    x = case.input(dtype=jnp.bfloat16)
    assert layer(x).dtype == jnp.bfloat16
    assert layer.quant_weight().scale.dtype == jnp.float32
    gradients = nnx.jit(nnx.grad(lambda m: jnp.sum(m(x).astype(jnp.float32) ** 2)))(layer)
    assert gradients[layer.weight_name].get_value().dtype == jnp.bfloat16


@pytest.mark.heavy
@some
def test_jit_and_copies_do_the_same_and_the_gradient_passes_straight_through(case):
    layer, parent = case.make(**case.quantizers), case.float()
    x = case.input()
    for run in (lambda m, x: m(x), call):
        run(layer, x)
    layer.eval()
    y = layer(x)
    np.testing.assert_allclose(call(layer, x), y, rtol=1e-5, atol=1e-6)
    for duplicate in (nnx.clone, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        np.testing.assert_array_equal(duplicate(layer)(x), y)
    setattr(parent, layer.weight_name, nnx.Param(layer.quant_weight().value))
    if case.ours is not QuantEmbed:
        x = layer.input_quant(x).value
    weights = jax.random.normal(jax.random.key(5), y.shape)
    ours, theirs = (nnx.grad(lambda m: jnp.sum(m(x) * weights))(m) for m in (layer, parent))
    ours, theirs = (gradients[layer.weight_name][...] for gradients in (ours, theirs))
    inside = np.abs(layer.quant_weight().int()) < 127  # the largest of a channel makes the scale too
    np.testing.assert_allclose(ours[inside], theirs[inside], rtol=1e-4, atol=1e-5)


@every
def test_frozen_is_evaluation(case):
    check_frozen(case, Int8WeightPerChannelFloat.let(bit_width=4))


@some
def test_frozen_numbers_with_zero_points_are_evaluation(case):
    check_frozen(case, ShiftedUint8WeightPerChannelFloat)


def check_frozen(case, weight):
    layer = case.make(**{**case.quantizers, "weight_quant": weight})
    x = case.input()
    layer(x)
    layer.eval()
    expected, numbers = layer(x), layer.quant_weight()
    frozen = jqinject.freeze(nnx.clone(layer))
    assert isinstance(getattr(frozen, frozen.weight_name), FrozenParam)
    again = frozen.quant_weight()
    np.testing.assert_array_equal(again.int(), numbers.int())
    np.testing.assert_allclose(again.value, numbers.value, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(call(frozen, x), expected, rtol=1e-5, atol=1e-5)


@every
def test_frozen_contracts_integers_where_it_says_so(case):
    if case.ours is QuantEmbed:
        with pytest.raises(TypeError, match="takes no argument 'contraction'"):
            case.make(contraction="int")
        return
    integers = case.make(**case.quantizers, contraction="int")
    x = case.input()
    if not case.contracts:
        with pytest.raises(ValueError, match=r"an equation that is a plain contraction|no transpose_kernel"):
            integers(x)
        return
    integers(x)
    integers.eval()
    expected = call(integers, x)
    frozen = nnx.clone(integers)
    frozen.set_attributes(contraction="auto")
    jqinject.freeze(frozen)
    np.testing.assert_array_equal(call(frozen, x), expected)
    integers.set_attributes(contraction="float")
    np.testing.assert_allclose(call(integers, x), expected, rtol=1e-5, atol=1e-5)


@every
def test_a_layer_of_flax_becomes_ours_in_place(case):
    made = case.make(**case.quantizers, weight_bit_width=4)
    layer = case.float()
    object.__setattr__(layer, "__class__", case.ours)
    layer._init_quantizers(case.quantizers, {"weight_bit_width": 4}, nnx.Rngs(0))
    assert nnx.graphdef(layer) == nnx.graphdef(made)
    np.testing.assert_array_equal(call(layer, case.input()), call(made, case.input()))


@pytest.mark.heavy
@some
def test_stacks_are_scanned_reassembled_and_frozen(case):
    def ours(rngs):
        return case.ours(*case.where, **case.given, **case.quantizers, rngs=rngs)

    def theirs(rngs):
        return case.parent(*case.where, **case.given, rngs=rngs)

    stack = nnx.vmap(ours)(nnx.Rngs(0).split(3))
    other = nnx.vmap(theirs)(nnx.Rngs(0).split(3))
    object.__setattr__(other, "__class__", case.ours)
    other._init_quantizers(case.quantizers, {}, nnx.Rngs(0))
    assert nnx.graphdef(other) == nnx.graphdef(stack)

    @nnx.jit
    @nnx.vmap(in_axes=(0, None))
    def run(layer, x):
        return layer(x)

    x = case.input()
    np.testing.assert_array_equal(run(stack, x), run(other, x))
    jqinject.reassemble(stack)
    run(stack, x)
    stack.eval()
    graphdef, state = nnx.split(stack)
    singles = [nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], state)) for i in range(3)]
    expected = jnp.stack([single(x) for single in singles])
    np.testing.assert_allclose(run(stack, x), expected, rtol=1e-5, atol=1e-6)
    jqinject.freeze(stack)
    np.testing.assert_allclose(run(stack, x), expected, rtol=1e-5, atol=1e-5)


@some
def test_wrong_keywords_are_named(case):
    with pytest.raises(TypeError, match=r"takes no argument 'param_dtpye'(?s:.)*did you mean 'param_dtype'"):
        case.make(param_dtpye=jnp.bfloat16)
    with pytest.raises(TypeError, match=r"takes no argument 'weigth_bit_width'"):
        case.make(weigth_bit_width=4)
    with pytest.raises(TypeError, match=r"'weight_bitwidth' would have no effect(?s:.)*'weight_bit_width'"):
        case.make(weight_bitwidth=4)
    with pytest.raises(TypeError, match=r"quantizes weights, and Int8ActPerTensorFloat is not for these"):
        case.make(weight_quant=Int8ActPerTensorFloat)


@some
def test_a_quantizer_that_two_layers_share(case):
    first = case.make(weight_quant=Int8WeightPerChannelFloat)
    second = case.make(seed=1, weight_quant=first.weight_quant)
    summed = tuple(axis for axis, size in enumerate(case.scale) if size == 1)
    both = np.maximum(*(np.abs(np.asarray(layer.weight[...])) for layer in (first, second)))
    _, scale = expected_weight(both, summed)
    for layer in (first, second):
        np.testing.assert_allclose(layer.quant_weight().scale, scale, rtol=1e-6)


@some
def test_the_output_has_the_output_quantizers_scale(case):
    layer = case.make(output_quant=Int8ActPerTensorFloat, return_quant_tensor=True)
    y = layer(case.input())
    assert (y.bit_width, y.is_valid, y.scale.size) == (8, True, 1)
    float_output = case.make(weight_quant=Int8WeightPerTensorFloat)(case.input())
    one_step = 1.0001 * float(y.scale.max())  # at the edge of the range, half of it elsewhere
    assert float(jnp.max(jnp.abs(y.value - float_output))) <= one_step


ACCUMULATORS = {name: case for name, case in CASES.items() if case.ours not in (QuantEmbed, QuantLoRALinear)}
OF_ONE_CONTRACTION = {name: case for name, case in ACCUMULATORS.items() if name != "einsum, summed alone"}


@pytest.mark.heavy
@pytest.mark.parametrize("case", OF_ONE_CONTRACTION.values(), ids=OF_ONE_CONTRACTION)
def test_the_integers_of_the_output_are_those_of_an_integer_contraction(case):
    layer = case.make(**case.quantizers, bias_quant=Int32Bias, return_quant_tensor=True)
    x = case.input()
    layer(x)
    layer.eval()
    y = call(layer, x)
    exact = case.float(**({"use_bias": False} if "use_bias" in case.given else {}))
    numbers = layer.input_quant(x)
    exact.kernel = nnx.Param(layer.quant_weight().int().astype(jnp.float32))
    if exact.bias is not None:
        bias = layer.quant_bias(numbers, layer.quant_weight())
        assert bias.shape == layer.bias.shape
        np.testing.assert_allclose(bias.value, layer.bias[...], atol=1.01 * float(bias.scale.max()))
        exact.bias = nnx.Param(bias.int().astype(jnp.float32))
    expected = exact(numbers.int().astype(jnp.float32))  # whole numbers below 2**24: exact in float32
    np.testing.assert_array_equal(jnp.round(y.value / y.scale), expected)
    assert y.scale.ndim == y.ndim
    if layer.bias is None or (case.contracts and case.ours is not QuantConvTranspose):
        np.testing.assert_array_equal(y.int(), expected)
    assert y.is_valid
