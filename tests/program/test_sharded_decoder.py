"""A decoder as in MaxText, quantized by one rule: stacked layers in a rematerialized loop, on a mesh of eight devices.

Attention runs in `jax.shard_map`, the activation and the output have derivative rules of their own, and layers differ
by a branch.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqinject
from jqinject import Rule, coverage, freeze, quantize
from jqinject.quant import Int8ActPerTensorMinMax, Int8WeightPerChannelFloat

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices"),
]

LAYERS, WIDTH, HEADS, HEAD, HIDDEN, TOKENS = 3, 32, 8, 8, 64, 48
IDS = jax.random.randint(jax.random.key(9), (4, 6), 0, TOKENS)
RULE = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorMinMax)
HEADS_SPEC = P(None, "model", None)
SPECS = {
    "query": HEADS_SPEC,
    "key": HEADS_SPEC,
    "value": HEADS_SPEC,
    "out": P("model", None, None),
    "gate": P(None, "model"),
    "up": P(None, "model"),
    "down": P("model", None),
}


@jax.custom_vjp
def swish_gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The activation of SwiGLU; its rule computes the sigmoid again."""
    return gate * jax.nn.sigmoid(gate) * up


def _swish_backward(residuals: Any, gradient: jax.Array) -> Any:
    gate, up = residuals
    sigmoid = jax.nn.sigmoid(gate)
    return gradient * up * sigmoid * (1 + gate * (1 - sigmoid)), gradient * gate * sigmoid


swish_gated.defvjp(lambda gate, up: (swish_gated(gate, up), (gate, up)), _swish_backward)


@jax.custom_vjp
def logits(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product that clips the gradients that come into it."""
    return x @ w


def _logits_backward(residuals: Any, gradient: jax.Array) -> Any:
    x, w = residuals
    gradient = jnp.clip(gradient, -1, 1)
    return gradient @ w.T, jnp.einsum("btd,btv->dv", x, gradient)


logits.defvjp(lambda x, w: (x @ w, (x, w)), _logits_backward)


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def attention(x: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array) -> jax.Array:
    """Causal attention of the heads of one device."""
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w) for w in (query, key, value))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / HEAD**0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    return jax.lax.psum(jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", weights, v), out), "model")


class Decoder(nnx.Module):
    """Parameters of all layers, each stacked, on a mesh."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        kinds = AxisType.Auto, AxisType.Auto
        self.mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)
        heads, mlp = (WIDTH, HEADS, HEAD), (WIDTH, HIDDEN)
        shapes = dict.fromkeys(("query", "key", "value"), heads) | {"out": (HEADS, HEAD, WIDTH)}
        shapes |= {"gate": mlp, "up": mlp, "down": mlp[::-1]}
        self.layers = nnx.Dict()
        for name, shape in shapes.items():
            fan_in = HIDDEN if name in ("out", "down") else WIDTH
            values = rngs.params.normal((LAYERS, *shape)) / fan_in**0.5
            sharding = NamedSharding(self.mesh, P(None, *SPECS[name]))
            self.layers[name] = nnx.Param(jax.device_put(values, sharding))
        self.scales = nnx.Param(jnp.ones((LAYERS, 2, WIDTH)))
        self.table = nnx.Param(rngs.params.normal((TOKENS, WIDTH)))
        self.head = nnx.Param(rngs.params.normal((WIDTH, TOKENS)) / WIDTH**0.5)

    def __call__(self, ids: jax.Array) -> jax.Array:
        names = ("query", "key", "value", "out")
        specs = (P("data"), *(SPECS[name] for name in names))
        attend = jax.shard_map(attention, mesh=self.mesh, in_specs=specs, out_specs=P("data"))

        @partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
        def layer(x: jax.Array, slices: Any) -> tuple[jax.Array, None]:
            number, scales, w = slices
            x = x + attend(normalized(x, scales[0]), *(w[name] for name in names))
            h = normalized(x, scales[1])
            x = x + jax.lax.cond(
                number % 2 == 0,
                lambda h: swish_gated(h @ w["gate"], h @ w["up"]) @ w["down"],
                lambda h: jax.nn.relu(h @ w["up"]) @ w["down"],
                h,
            )
            return x, None

        stacks = {name: parameter[...] for name, parameter in self.layers.items()}
        slices = jnp.arange(LAYERS), self.scales[...], stacks
        x, _ = jax.lax.scan(layer, self.table[...][ids], slices)
        return logits(x, self.head[...])


def loss(model: Any, ids: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(model(ids[:, :-1])), ids[:, 1:, None], axis=-1)
    return -jnp.mean(picked)


def sqnr(y: jax.Array, expected: jax.Array) -> float:
    return float(10 * jnp.log10(jnp.sum(expected**2) / jnp.sum((y - expected) ** 2)))


def test_one_rule_quantizes_the_decoder() -> None:
    plain = Decoder(nnx.Rngs(0))
    model: Any = quantize(plain, RULE, inputs=IDS)
    covered = coverage(model, IDS)
    assert covered.share_of_bytes >= 0.97, str(covered)
    call = nnx.jit(lambda m, ids: m(ids))
    assert sqnr(call(model, IDS), call(plain, IDS)) > 25
    attention, gates = "shard_map0.einsum0_lhs", "cond0.branch1.dot_general0_lhs"
    counts = {
        name: np.asarray(model.op_quant[name].tensor_quant.scaling_impl.averaging_impl.counter[...]).tolist()
        for name in (attention, gates, gates.replace("branch1", "branch0"))
    }
    assert [*counts.values()] == [[1, 1, 1], [1, 0, 1], [0, 1, 0]]
    of_loss = nnx.jit(nnx.value_and_grad(loss))
    (value, gradient), (expected, floats) = of_loss(model, IDS), of_loss(plain, IDS)
    np.testing.assert_allclose(value, expected, 0.02)
    paths = ("table", "head", *(("layers", name) for name in plain.layers))
    for path in paths:
        keys = path if isinstance(path, tuple) else (path,)
        own, other = gradient, floats
        for key in keys:
            own, other = own[key], other[key]
        assert np.isfinite(own[...]).all() and sqnr(own[...], other[...]) > 10, path


def test_the_frozen_decoder_computes_what_the_quantized_one_does() -> None:
    model = quantize(Decoder(nnx.Rngs(0)), RULE, inputs=IDS)
    jqinject.calibrate(model, [IDS], progress=False)
    # Each layer has seen the branch that it takes alone.
    frozen = freeze(nnx.clone(model), allow_uncalibrated=True)
    model.eval()
    assert sqnr(nnx.jit(lambda m, x: m(x))(frozen, IDS), nnx.jit(lambda m, x: m(x))(model, IDS)) > 60
    assert coverage(frozen, IDS).share_of_bytes >= 0.97
