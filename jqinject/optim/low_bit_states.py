"""Stores what another transformation keeps: its moments, in blocks."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jqinject.optim.block_format import BlockFormat, StoredBlocks

#: Arrays with fewer numbers stay float32: they take little memory, and are often norms and biases.
SMALLEST = 4096
KeepFloat = Callable[[str], bool]


class LowBitMoment(NamedTuple):
    """A moment of all parameters: two trees of the parameters' structure, of arrays alone.

    Attributes:
        codes: uint8, as `StoredBlocks` has them; float32 where the moment is not stored in blocks.
        scale: float32, one for each block; one 0 where there are none.
    """

    codes: Any
    scale: Any


def is_embedding(path: str) -> bool:
    """Whether a path names an embedding: one of its parts begins with "embed", or is "wte" or "wpe".

    Example:
        >>> is_embedding("model/embed_tokens/embedding"), is_embedding("layers/0/mlp/kernel")
        (True, False)
    """
    return any(part.lower().startswith("embed") or part in ("wte", "wpe") for part in path.split("/"))


def low_bit_states(
    inner: optax.GradientTransformation,
    formats: Mapping[str, BlockFormat],
    *,
    smallest: int = SMALLEST,
    keep_float: KeepFloat = is_embedding,
) -> optax.GradientTransformation:
    """A transformation that keeps the named fields of another's state in blocks, each as a `LowBitMoment`.

    At every update the fields are decoded to float32, `inner` computes in float32, and what it leaves is stored again:
    the update itself is made from the moments before they are rounded.

    An array stays float32 if it has fewer than `smallest` numbers, if blocks do not divide it, or if `keep_float` says
    so of its path: gradients of embeddings are sparse and uneven, which blocks do not suit.

    Args:
        inner: of optax, or your own; its state is a NamedTuple, such as that of `optax.scale_by_adam`.
        formats: field of the state -> how it is stored; the field is shaped like the parameters.
        smallest: numbers that an array must have.
        keep_float: says of a path, such as `"embed/embedding"`, whether it stays float32.

    Raises:
        ValueError: (from `init`) the state has no such field.

    Source: Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization".

    Example:
        >>> from jqinject.optim import BlockTable, dynamic_table
        >>> momentum = low_bit_states(optax.trace(0.9), {"trace": BlockTable(dynamic_table(8, True), 256)})
        >>> state = momentum.init({"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)})
        >>> state.trace.codes["kernel"].dtype, state.trace.codes["bias"].dtype
        (dtype('uint8'), dtype('float32'))
    """

    def encoded(state: Any) -> Any:
        moments = {
            name: _encoded(form, getattr(state, name), smallest, keep_float) for name, form in formats.items()
        }
        return state._replace(**moments)

    def decoded(state: Any, like: object) -> Any:
        moments = {name: _decoded(form, getattr(state, name), like) for name, form in formats.items()}
        return state._replace(**moments)

    def init(params: object) -> Any:
        state = inner.init(jax.tree.map(float32_of, params))
        fields = getattr(state, "_fields", ())
        if unknown := sorted(set(formats) - set(fields)):
            raise ValueError(
                f"low_bit_states: the state has no field {unknown[0]!r}, but {', '.join(map(repr, fields))}.\n"
                "  cure: name fields of the inner transformation's state"
            )
        return encoded(state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        wide = None if params is None else jax.tree.map(float32_of, params)
        updates = jax.tree.map(float32_of, updates)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer count
            updates, after = inner.update(updates, decoded(state, updates), wide)
        return updates, encoded(after)

    return optax.GradientTransformation(init, update)


def _encoded(form: BlockFormat, tree: object, smallest: int, keep_float: KeepFloat) -> LowBitMoment:
    """A moment in blocks, but for the arrays that stay float32."""

    def encode(path: tuple[Any, ...], leaf: jax.Array | nnx.Variable[Any]) -> LowBitMoment:
        x = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        codes, scale = x, jnp.zeros((), jnp.float32)
        fits = x.size >= smallest and x.size % form.block_size == 0
        if fits and not keep_float(jax.tree_util.keystr(path, simple=True, separator="/")):
            blocks = form.encode(x)
            codes, scale = blocks.codes, blocks.scale
        # In the Variable of the parameter, with its sharding, if they have its shape.
        if isinstance(leaf, nnx.Variable) and codes.shape == x.shape:
            codes = leaf.replace(codes)
        return LowBitMoment(codes, scale)

    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_variable)
    moments = [encode(path, leaf) for path, leaf in leaves]
    codes, scales = [moment.codes for moment in moments], [moment.scale for moment in moments]
    return LowBitMoment(treedef.unflatten(codes), treedef.unflatten(scales))


def _decoded(form: BlockFormat, moment: LowBitMoment, like: object) -> Any:
    """The float32 arrays of a moment, in the shapes of `like`."""

    def decode(x: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
        return StoredBlocks(codes, scale, form, x.shape).decoded() if codes.dtype == jnp.uint8 else codes

    return jax.tree.map(decode, like, *moment)


def float32_of(x: jax.Array) -> jax.Array:
    """An array as float32."""
    return x.astype(jnp.float32)


def _is_variable(x: object) -> bool:
    return isinstance(x, nnx.Variable)
