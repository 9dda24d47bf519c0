"""Drives torchao's and bitsandbytes's optimizers with low-bit states, their tables, and stochastic rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jqinject import optim
from jqinject.ops import to_bfloat16_stochastically
from jqinject.optim import BlockFloat8, BlockTable, StoredBlocks, dynamic_table, linear_table
from jqinject.optim.aliases import decayed_in_float32
from tests.golden._config import Settings, reading

Arrays = dict[str, np.ndarray]
Drive = Callable[[Arrays], dict[str, Any]]


def l2_by_zero_decay(make: Callable[..., Any]) -> Callable[..., Any]:
    """torchao's Adam adds weight decay to the gradient; the library's 4-bit and fp8 makers decouple it."""

    def made(learning_rate: float, weight_decay: float = 0.0, **more: Any) -> Any:
        return optax.chain(decayed_in_float32(weight_decay), make(learning_rate, weight_decay=0.0, **more))

    return made


def decoupled(learning_rate: float, weight_decay: float = 0.0, **more: Any) -> Any:
    """bitsandbytes's Adam decouples weight decay too."""
    return optim.adamw8bit(learning_rate, weight_decay=weight_decay, **more)


# The optimizer, its defaults, and what the peer calls its moments.
TORCHAO: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "torchao.optim.Adam8bit": (optim.adam8bit, {}),
    "torchao.optim.Adam4bit": (l2_by_zero_decay(optim.adamw4bit), {}),
    "torchao.optim.AdamFp8": (l2_by_zero_decay(optim.adamw_fp8), {}),
    "torchao.optim.AdamW8bit": (optim.adamw8bit, {}),
    "torchao.optim.AdamW4bit": (optim.adamw4bit, {}),
    "torchao.optim.AdamWFp8": (optim.adamw_fp8, {}),
}
BITSANDBYTES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "bitsandbytes.optim.Adam8bit": (decoupled, {}),
    "bitsandbytes.optim.AdamW8bit": (optim.adamw8bit, {}),
    "bitsandbytes.optim.Lion8bit": (optim.lion8bit, {}),
    "bitsandbytes.optim.SGD8bit": (optim.sgd8bit, {"momentum": 0.0}),
}
OPTIONS = {
    "Ada": ("lr", "weight_decay", "betas", "eps", "block_size"),
    "Lio": ("lr", "weight_decay", "betas"),
    "SGD": ("lr", "weight_decay", "momentum"),
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def forms_of(name: str) -> Callable[[int], dict[str, Any]]:
    """How an optimizer stores its moments, in blocks of a size."""
    if name.endswith("Fp8"):
        return lambda block: dict.fromkeys(("mu", "nu"), BlockFloat8(block))
    bits = 4 if "4bit" in name else 8
    signed, unsigned = dynamic_table(bits, True), linear_table(4) if bits == 4 else dynamic_table(8, False)
    tables = {"mu": signed, "trace": signed, "nu": unsigned}
    return lambda block: {field: BlockTable(table, block) for field, table in tables.items()}


def optimizer_of(config: dict[str, Any]) -> Drive:
    """What drives a case, from its config."""
    with reading(config, "an optimizer") as given:
        given.take("seed", None)
        if "draws" in given:
            return rounding_of(given)
        if "runs" in given:
            return many_steps_of(given)
        if "signed" in given:
            return blocks_of(given)
        return steps_of(given)


def steps_of(given: Settings) -> Drive:
    """Steps of an optimizer, the parameter and the states on the way."""
    make, options = given.choose("optimizer", TORCHAO | BITSANDBYTES)
    ours = given.take("optimizer") in BITSANDBYTES
    options = {**options, **options_of(given, OPTIONS[given.take("optimizer").rpartition(".")[2][:3]])}
    if "blocksize" in given:
        options["block_size"] = given.take("blocksize")
    forms = forms_of(given.take("optimizer"))
    block = options.get("block_size", 128 if "4bit" in given.take("optimizer") else 256)
    dtype = given.choose("param_dtype", DTYPES, jnp.float32)
    steps, middle = given.take("steps"), given.take("middle_step")
    given.take("shape", None)
    optimizer = make(options.pop("lr", 1e-3), **options)
    names = {"mu": ("1", "exp_avg"), "trace": ("1", ""), "nu": ("2", "exp_avg_sq")}

    def run(inputs: Arrays) -> dict[str, Any]:
        params = jnp.asarray(inputs["p0"], dtype)
        state, found = optimizer.init(params), {}
        step = jax.jit(stepped(optimizer))
        for place in range(1, steps + 1):
            params, state = step(params, state, jnp.asarray(inputs["grads"][place - 1], dtype))
            label = {1: "p_step1", middle: "p_middle", steps: "p_last"}.get(place)
            if label is None:
                continue
            found |= {label: params.astype(jnp.float32)} | ({"p_last": params} if place == steps else {})
            for field, (number, name) in names.items():
                kept: Any = optax.tree_utils.tree_get(state, field)
                if kept is not None:
                    moment = (
                        StoredBlocks(kept.codes, kept.scale, forms(block)[field], params.shape)
                        if kept.codes.dtype == jnp.uint8
                        else kept.codes
                    )
                    found |= peer_blocks(number, place, moment) if ours else peer_moment(name, place, moment)
        return {
            name: value if value.dtype == jnp.uint8 else value.astype(np.float32)
            for name, value in found.items()
        }

    return run


def options_of(given: Settings, names: tuple[str, ...]) -> dict[str, Any]:
    """The peer's options by our names: those that its optimizer has."""
    with reading(given.nested("options"), "options of an optimizer") as options:
        found = {}
        for name in names:
            if name == "betas" and name in options:
                found["b1"], found["b2"] = options.take("betas")
            elif name in options:
                found[name] = options.take(name)
    return found


def stepped(optimizer: Any) -> Callable[..., Any]:
    def step(params: jax.Array, state: Any, grads: jax.Array) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

    return step


def peer_moment(name: str, place: int, moment: Any) -> dict[str, Any]:
    """A moment as torchao has it."""
    if not isinstance(moment, StoredBlocks):
        return {f"step{place}.{name}.value": moment}
    start = f"step{place}.{name}"
    found: dict[str, Any] = {
        f"{start}.codes": moment.codes,
        f"{start}.scale": moment.scale,
        f"{start}.dequantized_absmean": jnp.abs(moment.decoded()).mean(),
    }
    if isinstance(moment.form, BlockTable):
        found[f"{name}.qmap"] = moment.form.table.table
    return found


def peer_blocks(number: str, place: int, moment: Any) -> dict[str, Any]:
    """A moment as bitsandbytes has it; float32 where it is not stored in blocks."""
    if not isinstance(moment, StoredBlocks):
        return {f"step{place}.state{number}": moment}
    return {
        f"step{place}.state{number}": moment.codes,
        f"step{place}.absmax{number}": moment.scale,
        f"qmap{number}": moment.form.table.table,  # pyright: ignore[reportAttributeAccessIssue]
    }


def blocks_of(given: Settings) -> Drive:
    """An array in blocks, by itself."""
    form = BlockTable(
        dynamic_table(8, given.choose("signed", {True: True, False: False})), given.take("blocksize")
    )

    def run(inputs: Arrays) -> dict[str, Any]:
        stored = form.encode(jnp.asarray(inputs["x"]))
        return {
            "codes": stored.codes,
            "absmax": stored.scale,
            "dequantized": stored.decoded(),
            "map": form.table.table,
        }

    return run


def rounding_of(given: Settings) -> Drive:
    """bfloat16 by chance, many times."""
    draws = given.take("draws")

    def run(inputs: Arrays) -> dict[str, Any]:
        x = jnp.asarray(inputs["x"])
        keys = jax.random.split(jax.random.key(0), draws)
        drawn = np.asarray(jax.vmap(lambda key: to_bfloat16_stochastically(x, key))(keys), np.float32)
        low, high = drawn.min(0), drawn.max(0)
        near = np.where(np.abs(low) <= np.abs(high), low, high)
        bits = np.asarray(inputs["x"]).view(np.uint32) & 0xFFFF
        return {
            "low": low,
            "high": high,
            "toward_zero": near,
            "frequency_away": (drawn != near).mean(0),
            "probability_away": bits / 65536.0,
            "mean": drawn.mean(0),
        }

    return run


def many_steps_of(given: Settings) -> Drive:
    """One step of a bfloat16 parameter, with many seeds."""
    runs, rate = given.take("runs"), given.take("lr")

    def run(inputs: Arrays) -> dict[str, Any]:
        params = jnp.asarray(inputs["p0"], jnp.bfloat16)
        grads = jnp.asarray(inputs["grad"])

        def after(optimizer: optax.GradientTransformation, params: jax.Array) -> jax.Array:
            return stepped(optimizer)(params, optimizer.init(params), grads)[0].astype(jnp.float32)

        # One program: of the seeds, `round_stochastically` makes keys, and a count tells runs apart as well.
        state = optim.adamw8bit(rate, rounding_seed=0)

        def one(count: jax.Array) -> jax.Array:
            initial = optax.tree_utils.tree_set(state.init(params), updates=count)
            return stepped(state)(params, initial, grads)[0].astype(jnp.float32)

        found = jax.jit(lambda: jax.lax.map(one, jnp.arange(runs)))()
        return {
            "mean_after_step": found.mean(0),
            "float32_after_step": after(optim.adamw8bit(rate), params.astype(jnp.float32)),
        }

    return run
