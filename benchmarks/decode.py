"""Tokens per second of a small decoder with a cache of keys and values: float, frozen in 8 and 4 bits, Qwix, torch.

    python benchmarks/decode.py
    python benchmarks/decode.py --python path/to/python
    python benchmarks/decode.py --quick

12 blocks, 512 wide, 8 heads, a feed-forward of 2048, a vocabulary of 8192; one sequence, greedy, a token at a time into
a cache of as many places. Every model in JAX is one compiled step that holds its state and writes its caches in place
(`jqinject.compiled`), timed interleaved in one process; torch in a second one, by an interpreter that has it
(`--python`), with its float and its dynamic int8 layers and a float cache written in place.

int8: weights with a scale for each output channel, inputs with one for each row. int4: weights in groups of 128 with a
scale each, the same inputs. Both keep keys and values in int8, with a scale for each position and head. Qwix: int8
weights and inputs, a float cache. The ratio is this over float in JAX: above 1 is faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from _other_interpreter import answer, timed_elsewhere
from _timing import Timing, interleaved, print_table, processor

SIZES = {
    "width": 512,
    "depth": 12,
    "heads": 8,
    "hidden": 2048,
    "vocabulary": 8192,
    "tokens": 128,
    "rounds": 5,
}
QUICK = {"width": 32, "depth": 2, "heads": 2, "hidden": 64, "vocabulary": 64, "tokens": 4, "rounds": 2}
Call = Callable[[], object]


def decoder(sizes: argparse.Namespace) -> Any:
    """Return a decoder in Flax; its caches are Variables of its own."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    head = sizes.width // sizes.heads

    class Attention(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            def dense() -> nnx.Linear:
                return nnx.Linear(sizes.width, sizes.width, use_bias=False, rngs=rngs)

            self.q, self.k, self.v, self.o = dense(), dense(), dense(), dense()
            shape = (1, sizes.heads, sizes.tokens, head)
            self.keys, self.values = nnx.Cache(jnp.zeros(shape)), nnx.Cache(jnp.zeros(shape))

        def __call__(self, x: jax.Array, at: jax.Array) -> jax.Array:
            q, k, v = (layer(x).reshape(1, sizes.heads, 1, head) for layer in (self.q, self.k, self.v))
            keys = jax.lax.dynamic_update_slice(self.keys[...], k, (0, 0, at, 0))
            values = jax.lax.dynamic_update_slice(self.values[...], v, (0, 0, at, 0))
            self.keys[...], self.values[...] = keys, values
            scores = jnp.einsum("bhqd,bhkd->bhqk", q, keys) * head**-0.5
            seen = jnp.arange(sizes.tokens) <= at
            weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
            return self.o(jnp.einsum("bhqk,bhkd->bhqd", weights, values).reshape(x.shape))

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norms = nnx.List([nnx.RMSNorm(sizes.width, rngs=rngs) for _ in range(2)])
            self.attention = Attention(rngs)
            self.up = nnx.Linear(sizes.width, sizes.hidden, rngs=rngs)
            self.down = nnx.Linear(sizes.hidden, sizes.width, rngs=rngs)

        def __call__(self, x: jax.Array, at: jax.Array) -> jax.Array:
            x = x + self.attention(self.norms[0](x), at)
            return x + self.down(nnx.relu(self.up(self.norms[1](x))))

    class Decoder(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.table = nnx.Embed(sizes.vocabulary, sizes.width, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(sizes.depth)])
            self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)
            self.head = nnx.Linear(sizes.width, sizes.vocabulary, use_bias=False, rngs=rngs)
            self.at = nnx.Cache(jnp.zeros((), jnp.int32))

        def __call__(self, ids: jax.Array) -> jax.Array:
            x = self.table(ids)
            for block in self.blocks:
                x = block(x, self.at[...])
            self.at[...] = self.at[...] + 1
            return jnp.argmax(self.head(self.norm(x)), axis=-1)

    return Decoder()


def jax_models(sizes: argparse.Namespace) -> dict[str, Call]:
    """Return what generates all tokens, by name."""
    import jax.numpy as jnp

    import jqinject
    from jqinject import Rule
    from jqinject.quant import (
        Int8DynamicActPerRowFloat,
        Int8WeightPerChannelFloat,
        IntWeightSymmetricGroupQuant,
    )

    first = jnp.zeros((1, 1), jnp.int32)
    group = min(128, sizes.width)
    weights = {
        "jqinject int8": Int8WeightPerChannelFloat,
        "jqinject int4": IntWeightSymmetricGroupQuant.let(bit_width=4, group_size=group),
    }
    models = {"float": decoder(sizes)}
    for name, weight in weights.items():
        rules = [
            Rule("table"),
            Rule(weight_quant=weight, input_quant=Int8DynamicActPerRowFloat),
            Rule(cache_quant=Int8DynamicActPerRowFloat),
        ]
        made = jqinject.freeze(jqinject.quantize(decoder(sizes), rules, inputs=first))
        models[name] = jqinject.quantized_cache(made)
    if importlib.util.find_spec("qwix") is not None:
        import qwix

        rule = qwix.QuantizationRule(module_path=r"(blocks|head).*", weight_qtype="int8", act_qtype="int8")
        models["Qwix"] = qwix.quantize_model(decoder(sizes), qwix.PtqProvider([rule]), first)
    return {name: generation(model, first, sizes.tokens) for name, model in models.items()}


def generation(model: Any, first: Any, tokens: int) -> Call:
    """Return what generates all tokens from an empty cache."""
    import jqinject

    model.eval()
    step = jqinject.compiled(model, first)

    def generate() -> Any:
        step.update(model)
        ids = first
        for _ in range(tokens):
            ids = step(ids)
        return ids.block_until_ready()

    return generate


def torch_models(sizes: argparse.Namespace) -> dict[str, Call]:
    """Return what generates all tokens in torch, by name."""
    import warnings

    import torch
    from torch import nn

    warnings.simplefilter("ignore")
    head = sizes.width // sizes.heads

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.RMSNorm(sizes.width) for _ in range(2)])
            self.q, self.k, self.v, self.o = (
                nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(4)
            )
            self.up, self.down = nn.Linear(sizes.width, sizes.hidden), nn.Linear(sizes.hidden, sizes.width)
            self.keys = torch.zeros(1, sizes.heads, sizes.tokens, head)
            self.values = torch.zeros(1, sizes.heads, sizes.tokens, head)

        def forward(self, x: Any, at: int) -> Any:
            y = self.norms[0](x)
            q, k, v = (layer(y).view(1, sizes.heads, 1, head) for layer in (self.q, self.k, self.v))
            self.keys[:, :, at : at + 1], self.values[:, :, at : at + 1] = k, v
            known = self.keys[:, :, : at + 1], self.values[:, :, : at + 1]
            mixed = nn.functional.scaled_dot_product_attention(q, *known)
            x = x + self.o(mixed.reshape(1, 1, sizes.width))
            return x + self.down(torch.relu(self.up(self.norms[1](x))))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(sizes.vocabulary, sizes.width)
            self.blocks = nn.ModuleList([Block() for _ in range(sizes.depth)])
            self.norm = nn.RMSNorm(sizes.width)
            self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

        def forward(self, ids: Any, at: int) -> Any:
            x = self.table(ids)
            for block in self.blocks:
                x = block(x, at)
            return self.head(self.norm(x)).argmax(-1)

    def generates(model: Any) -> Call:
        def generate() -> None:
            with torch.inference_mode():
                ids = torch.zeros(1, 1, dtype=torch.long)
                for at in range(sizes.tokens):
                    ids = model(ids, at)

        return generate

    model = Decoder().eval()
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return {"torch": generates(model), "torch int8": generates(quantized)}


def sizes_of(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=f"(default: {size}; {QUICK[name]} with --quick)")
    parser.add_argument("--quick", action="store_true", help="sizes too small to mean anything")
    parser.add_argument("--python", help="an interpreter that has torch")
    parser.add_argument("--only-torch", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    for name, size in (QUICK if given.quick else SIZES).items():
        if getattr(given, name) is None:
            setattr(given, name, size)
    return given


def main() -> None:
    """Read the options and measure."""
    sizes = sizes_of(sys.argv[1:])
    if sizes.only_torch:
        answer({"": interleaved(torch_models(sizes), rounds=sizes.rounds, warmup=1)})
        return
    timings = interleaved(jax_models(sizes), rounds=sizes.rounds, warmup=1)
    same = [f"--{name}={getattr(sizes, name)}" for name in SIZES]
    timings |= timed_elsewhere(__file__, sizes.python, same).get("", {})
    import jax

    from jqinject import native

    def row(name: str, one: Timing) -> list[str]:
        low, high = one.quartiles
        n, base = sizes.tokens, timings["float"].median
        return [name, f"{n / one.median:.0f}", f"{n / high:.0f} to {n / low:.0f}", f"{base / one.median:.2f}"]

    rows = [row(name, one) for name, one in timings.items()]
    where = processor() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    print(f"jqinject on {where}, jax {jax.__version__}; compiled kernel: {native.status()}")
    title = f"{sizes.depth} blocks of {sizes.width}, {sizes.tokens} tokens"
    print_table(title, ["", "tokens a second", "half of the rounds", "/ float"], rows)


if __name__ == "__main__":
    main()
