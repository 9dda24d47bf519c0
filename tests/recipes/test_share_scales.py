"""Weights that contract one input get one global scale in NVFP4: in the model, and in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, freeze, quantize, unfreeze
from jqinject.model.inspect.site_table import shared_inputs
from jqinject.program import Call
from jqinject.quant import Int8WeightPerChannelFloat, NVFP4Act, NVFP4TrainingWeight, NVFP4Weight
from jqinject.recipes import GPTQ, RTN, Recipe, ShareGlobalScales, Solve

WIDTH, DEPTH = 32, 2
RULE = Rule(weight_quant=NVFP4Weight)
X = jax.random.normal(jax.random.key(0), (2, 20, WIDTH))


class Block(nnx.Module):
    """Queries, keys and values of Flax's layers, which have other sizes; gate and up of its own parameters."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = None) -> None:
        of_layers = {"use_bias": False, "rngs": rngs, "dtype": dtype}
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.q, self.k, self.v, self.o = (nnx.Linear(WIDTH, WIDTH, **of_layers) for _ in range(4))
        for layer, factor in ((self.q, 8.0), (self.v, 1 / 64)):
            layer.kernel.set_value(layer.kernel[...] * factor)
        self.gate, self.up = (nnx.Param(jax.random.normal(rngs(), (WIDTH, WIDTH)) / 6) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm(x)
        scores = self.q(h) @ self.k(h).swapaxes(-1, -2)
        x = x + self.o(jax.nn.softmax(scores) @ self.v(h)).astype(x.dtype)
        return x + jnp.tanh(x @ self.gate[...]) * jnp.einsum("btd,df->btf", x, self.up[...])


class Net(nnx.Module):
    def __init__(self, run: Any = None, dtype: Any = None) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs, dtype) for _ in range(DEPTH)])
        self.run = (lambda block, x: block(x)) if run is None else run(lambda block, x: block(x))

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = self.run(block, x)
        return x


class Stack(nnx.Module):
    def __init__(self) -> None:
        make = nnx.vmap(Block, in_axes=0, out_axes=0)
        self.blocks = nnx.split_rngs(splits=DEPTH)(make)(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


def groups(*starts: str) -> list[set[str]]:
    """The weights of one input in each block."""
    attention, gated = ("q.kernel", "k.kernel", "v.kernel"), ("gate", "up")
    return [{f"{start}.{name}" for name in names} for start in starts for names in (attention, gated)]


MODELS = {
    "layers": (Net, groups("blocks.0", "blocks.1")),
    "compiled once for all": (lambda: Net(nnx.jit), groups("blocks.0", "blocks.1")),
    "remat": (lambda: Net(nnx.remat), groups("blocks.0", "blocks.1")),
    "each casts its input": (lambda: Net(dtype=jnp.bfloat16), groups("blocks.0", "blocks.1")),
    "stack": (Stack, groups("blocks")),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_contract_one_activation_are_found_in_the_program(name: str) -> None:
    make, expected = MODELS[name]
    model, call = make(), Call((X,), {})
    assert [{*group} for group in shared_inputs(model, [call])] == expected
    served = freeze(quantize(model, Rule(weight_quant=NVFP4Weight, input_quant=NVFP4Act), inputs=(X,)))
    assert [{*group} for group in shared_inputs(served, [call])] == expected


NAMES = {
    "layers": None,
    "stack": {
        **{f"blocks.{{i}}.{name}.weight": f"blocks.{name}.kernel" for name in "qkvo"},
        **{f"blocks.{{i}}.{name}.weight": f"blocks.{name}" for name in ("gate", "up")},
        "blocks.{i}.norm.weight": "blocks.norm.scale",
    },
}


def global_scales(folder: Path) -> dict[str, float]:
    """As they are stored, by the name of the module."""
    from safetensors import safe_open

    end = ".weight_global_scale"
    with safe_open(str(folder / "model.safetensors"), "np") as file:
        return {
            name.removesuffix(end): float(file.get_tensor(name)[0])
            for name in list(file.keys())
            if name.endswith(end)
        }


@pytest.mark.parametrize("solver", [RTN(), GPTQ()], ids=["RTN", "GPTQ"])
@pytest.mark.parametrize("name", NAMES)
def test_the_file_has_one_global_scale_for_each_input(name: str, solver: Any, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="of the extra jqinject[formats]")
    from jqinject.formats import read_checkpoint, save

    model = MODELS[name][0]()
    result = Recipe(ShareGlobalScales(), Solve(solver)).apply(model, RULE, [X], progress=False)
    served = freeze(result.model)
    np.testing.assert_array_equal(served(X), result.model(X))
    folder = save(served, tmp_path / "saved", names=NAMES[name], inputs=(X,))  # without a warning
    scales, matrices = global_scales(folder), read_checkpoint(folder).matrices
    for layer in range(DEPTH):
        start = f"blocks.{layer}."
        assert scales[f"{start}q"] == scales[f"{start}k"] == scales[f"{start}v"] != scales[f"{start}o"]
        assert scales[f"{start}gate"] == scales[f"{start}up"]
        block = served.blocks if name == "stack" else served.blocks[layer]
        for own, weight in (("k", block.k.kernel), ("v", block.v.kernel), ("up", block.up)):
            value = weight[...][layer] if name == "stack" else weight[...]
            matrix = next(x for path, x in matrices.items() if path.startswith(f"{start}{own}"))
            np.testing.assert_array_equal(matrix.dequantize().T.reshape(value.shape), value)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_without_it_is_warned_of_by_path(name: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="of the extra jqinject[formats]")
    from jqinject.formats import UnsharedScaleWarning, save

    served = freeze(quantize(MODELS[name][0](), RULE, inputs=(X,)))
    start = "blocks" if name == "stack" else "blocks.0"
    with pytest.warns(UnsharedScaleWarning) as warned:
        save(served, tmp_path / "saved", names=NAMES[name], inputs=(X,))
    assert len(warned) == (2 if name == "stack" else 4)
    text = str(warned[0].message)
    assert all(f"{start}.{name}.kernel (" in text for name in "qkv") and f"{start}.o" not in text
    assert (
        "their weight_global_scale differs" in text and "cure: jqinject.recipes.ShareGlobalScales()" in text
    )
    save(served, tmp_path / "unchecked", names=NAMES[name])


def test_the_weight_with_the_largest_scale_keeps_its_codes() -> None:
    model = Net()
    apart, shared = (
        freeze(Recipe(*passes).apply(model, RULE, [X], progress=False).model).blocks[0]
        for passes in ((Solve(RTN()),), (ShareGlobalScales(), Solve(RTN())))
    )
    for name in ("q", "o"):
        before, after = (getattr(block, name).kernel.numbers for block in (apart, shared))
        for part in ("value", "scale"):
            np.testing.assert_array_equal(after[part], before[part])
        np.testing.assert_allclose(after["scale_factor"], before["scale_factor"], rtol=1e-6)
    codes = shared.k.kernel.numbers["scale"].astype(jnp.float32)
    assert (
        float(codes.max()) < 448 and float(apart.k.kernel.numbers["scale"].astype(jnp.float32).max()) == 448
    )


@pytest.mark.parametrize("name", NAMES)
def test_trained_on_the_numbers_stay_in_two_levels(name: str) -> None:
    recipe = Recipe(ShareGlobalScales(), Solve(RTN()))
    served = freeze(recipe.apply(MODELS[name][0](), RULE, [X], progress=False).model)
    block = served.blocks if name == "stack" else served.blocks[0]
    before = dict(block.v.kernel.numbers)
    again = freeze(unfreeze(served, from_payload=True))
    block = again.blocks if name == "stack" else again.blocks[0]
    jax.tree.map(np.testing.assert_array_equal, block.v.kernel.numbers, before)


def test_what_shares_nothing_is_left_alone() -> None:
    rules = [Rule(r".*\.(q|k)", weight_quant=NVFP4TrainingWeight), Rule(r".*\.v", weight_quant=NVFP4Weight)]
    rules.append(Rule(weight_quant=Int8WeightPerChannelFloat))
    (step,) = Recipe(ShareGlobalScales()).explain(Net(), rules, X).steps
    assert [str(site) for site in step.sites[:2]] == [
        f"blocks.0.{name}.kernel: its quantizer has no scale_quant that can be shared" for name in "qk"
    ]
    assert len(step.sites) == 2 * DEPTH


def test_after_a_solver_it_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"ShareGlobalScales changes .*\n  cure: Recipe\(ShareGlobalScales\(\), Solve"
    ):
        Recipe(Solve(RTN()), ShareGlobalScales()).apply(Net(), RULE, [X], progress=False)
