"""An operand of one of the three products: a tensor with labelled axes, laid out for its quantizer, cut into tiles."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jqinject.dot.geometry.dimensions import Label, Labels, tile_of
from jqinject.dot.geometry.tiles import LocalAqt
from jqinject.quant_tensor import as_array, on_integers, on_minifloats, shaping


class LabelledTensor(NamedTuple):
    """A tensor with labelled axes.

    Attributes:
        tensor: an array or a QuantTensor.
        labels: of its axes.
    """

    tensor: Any
    labels: Labels

    def axis(self, label: Label) -> int:
        """Where an axis is."""
        return self.labels.index(label)

    def in_order(self, labels: Labels) -> "LabelledTensor":
        """With its axes in another order; dequantized if its scales do not follow."""
        if labels == self.labels:
            return self
        x, order = self.tensor, [self.axis(label) for label in labels]
        follows = on_integers(x) or on_minifloats(x)
        moved = shaping.transpose(x, order) if follows else as_array(x).transpose(order)
        return LabelledTensor(moved, labels)

    def with_last(self, last: Labels) -> "LabelledTensor":
        """With some axes last."""
        return self.in_order((*(label for label in self.labels if label not in last), *last))


#: Roles whose quantizers know the axes of their tensor.
IN_PLACE = ("weight", "parameter", "operand")


def quantized_by(
    proxy: Any, x: LabelledTensor, summed: Labels, *more: Any, in_rows: bool = True
) -> LabelledTensor:
    """An operand, quantized.

    Args:
        proxy: the quantizer.
        x: the operand.
        summed: the summed axes.
        more: further arguments of a weight's quantizer.
        in_rows: whether quantizers of activations and gradients see the summed axes as rows.
    """
    if proxy.role in IN_PLACE:
        return LabelledTensor(proxy(x.tensor, *more), x.labels)
    quantize = proxy.quantize_gradient if proxy.role == "gradient" else proxy
    if not in_rows:
        return LabelledTensor(quantize(x.tensor), x.labels)
    merges = proxy.quant_metadata.group_size is None
    if proxy.pre_transform is not None:
        # The transform goes along the last axis of a row: the same one for both operands of a product.
        x = x.with_last(tuple(label for label in sorted(summed) if label in x.labels))
    return quantized_along(quantize, x, summed, merges=merges)


def quantized_along(
    quantize: Callable[[jax.Array], object], x: LabelledTensor, summed: Labels, merges: bool
) -> LabelledTensor:
    """An array quantized by a quantizer that takes features last: the summed axes are moved there.

    Args:
        quantize: the quantizer.
        x: the array.
        summed: the summed axes.
        merges: whether several summed axes are merged for the quantizer, so that a row is one whole sum.

    Returns:
        The quantized tensor, its summed axes last.
    """
    # Blocks and transforms lie along the last of them, so both operands of a product have them in one order.
    ordered = x.labels if merges else sorted(summed)
    last = tuple(label for label in ordered if label in summed and label in x.labels)
    array, labels = x.with_last(last)
    if not merges or len(last) < 2:
        return LabelledTensor(quantize(array), labels)
    rows = array.reshape(*array.shape[: -len(last)], math.prod(array.shape[-len(last) :]))
    return LabelledTensor(reshaped(quantize(rows), array.shape), labels)


def reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """A tensor in another shape; the array if its scales have no such shape."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype)
    moves = on_integers(x) or on_minifloats(x)
    return shaping.reshape(x, shape) if moves else as_array(x).reshape(shape)


def cut(x: LabelledTensor, label: Label, size: int) -> LabelledTensor:
    """With an axis in tiles of `size`: two axes, tiles and elements.

    Raises:
        ValueError: the tiles do not fill the axis.
    """
    axis = x.axis(label)
    shape = tuple(x.tensor.shape)
    if size < 1 or shape[axis] % size:
        raise ValueError(
            f"tile_size={size} does not divide the summed axis of length {shape[axis]} (an operand of shape {shape}).\n"
            "  cure: a tile_size that divides it, or None"
        )
    labels = (*x.labels[:axis], tile_of(label), *x.labels[axis:])
    wide = (*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :])
    return LabelledTensor(reshaped(x.tensor, wide), labels)


def joined(x: LabelledTensor) -> LabelledTensor:
    """Without tiles."""
    for label in x.labels:
        if label[0] == "tile":
            axis = x.axis(label)
            shape = tuple(x.tensor.shape)
            joined_shape = (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
            return joined(
                LabelledTensor(reshaped(x.tensor, joined_shape), (*x.labels[:axis], *x.labels[axis + 1 :]))
            )
    return x


def in_tiles(tiles: LocalAqt | None, summed: Labels, *operands: LabelledTensor) -> tuple[LabelledTensor, ...]:
    """Operands with one summed axis in tiles, unless they already are.

    Args:
        tiles: how it is cut; None does not cut.
        summed: the axes that their product sums over.
        operands: one or both of the product; the first says how long the axes are.
    """
    if tiles is None or not summed:
        return operands
    ordered, first = sorted(summed), operands[0]
    lengths = [first.tensor.shape[first.axis(label)] for label in ordered]
    place = tiles.pair(lengths)
    size = tiles.contraction_axis_shard_size or lengths[place] // tiles.count(lengths[place])
    label = ordered[place]
    return tuple(x if tile_of(label) in x.labels else cut(x, label, size) for x in operands)
