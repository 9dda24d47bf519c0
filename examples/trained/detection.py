"""The cascade of MTCNN: boxes of faces in a picture, by the three networks of `mtcnn.py`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

CELL, STRIDE = 12, 2
"""Pixels that the first network sees, and from one place to the next."""


def normalized(picture: np.ndarray) -> np.ndarray:
    """Return bytes as the networks were trained on them."""
    return ((np.asarray(picture, np.float32) - 127.5) / 128.0).astype(np.float32)


def resized(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return a picture (rows, columns, 3) of another size, by means of areas."""
    for axis, size in enumerate((height, width)):
        edges = np.arange(size) * picture.shape[axis] // size
        ends = -(-(np.arange(size) + 1) * picture.shape[axis] // size)
        sums = np.concatenate([np.zeros_like(picture.take([0], axis)), picture.cumsum(axis)], axis)
        lengths = (ends - edges).reshape(-1, 1, 1) if axis == 0 else (ends - edges)[:, None]
        picture = (sums.take(ends, axis) - sums.take(edges, axis)) / lengths
    return picture


def overlap(box: np.ndarray, boxes: np.ndarray, *, by_smaller: bool = False) -> np.ndarray:
    """Return the share that a box has in common with others: of the union, or of the smaller one."""
    low, high = np.maximum(box[:2], boxes[:, :2]), np.minimum(box[2:4], boxes[:, 2:4])
    shared = np.maximum(0, high - low).prod(1)
    area, areas = (box[2:4] - box[:2]).prod(), (boxes[:, 2:4] - boxes[:, :2]).prod(1)
    return shared / (np.minimum(area, areas) if by_smaller else area + areas - shared)


def separate(boxes: np.ndarray, threshold: float, *, by_smaller: bool = False) -> np.ndarray:
    """Return the boxes (x, y, x, y, score) that none with a better score overlaps by more than a threshold."""
    boxes, best = boxes[np.argsort(-boxes[:, 4])], []
    while len(boxes):
        best.append(boxes[0])
        boxes = boxes[1:][overlap(boxes[0], boxes[1:], by_smaller=by_smaller) <= threshold]
    return np.array(best).reshape(-1, 5)


def corrected(boxes: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return boxes with edges moved by shares of their sizes."""
    size = np.tile(boxes[:, 2:4] - boxes[:, :2] + 1, 2)
    return np.concatenate([boxes[:, :4] + shares * size, boxes[:, 4:5]], 1)


def square(boxes: np.ndarray) -> np.ndarray:
    """Return squares around the middles of boxes, as long as the longer edges."""
    middle = (boxes[:, :2] + boxes[:, 2:4]) / 2
    half = (boxes[:, 2:4] - boxes[:, :2]).max(1, keepdims=True, initial=0) / 2
    return np.concatenate([middle - half, middle + half, boxes[:, 4:5]], 1)


def proposals(net: Any, picture: np.ndarray, scale: float, threshold: float) -> np.ndarray:
    """Return the boxes that the first network proposes at one size of the picture."""
    height, width = (int(size * scale + 1) for size in picture.shape[:2])
    logits, shares = net(jnp.asarray(normalized(resized(picture, height, width)))[None])
    scores = np.asarray(nnx.softmax(logits)[0, ..., 1])
    rows, columns = np.nonzero(scores >= threshold)
    corner = STRIDE * np.stack([columns, rows], 1)
    boxes = np.concatenate(
        [(corner + 1) // scale, (corner + CELL) // scale, scores[rows, columns][:, None]], 1
    )
    moved = corrected(boxes, np.asarray(shares)[0, rows, columns])
    return moved[separate_indices(boxes, 0.5)] if len(boxes) else moved


def separate_indices(boxes: np.ndarray, threshold: float) -> np.ndarray:
    """Return the indices of the boxes that `separate` returns."""
    best = separate(boxes, threshold)
    return np.array([int(np.nonzero((boxes == box).all(1))[0][0]) for box in best], int)


def looked_at(net: Any, picture: np.ndarray, boxes: np.ndarray, size: int, threshold: float) -> np.ndarray:
    """Return the boxes in which a network sees a face, corrected by it."""
    height, width = picture.shape[:2]
    low = np.clip(boxes[:, :2].astype(int) - 1, 0, [width - 1, height - 1])
    high = np.clip(boxes[:, 2:4].astype(int), low + 1, [width, height])
    crops = [resized(picture[y:b, x:a], size, size) for (x, y), (a, b) in zip(low, high, strict=True)]
    crops += [np.zeros((size, size, 3))] * (-len(crops) % 32)  # few shapes to compile
    logits, shares, *_ = net(jnp.asarray(normalized(np.stack(crops))))
    scores = np.asarray(nnx.softmax(logits)[: len(boxes), 1])
    rescored = np.concatenate([boxes[:, :4], scores[:, None]], 1)
    return np.concatenate([rescored, np.asarray(shares)[: len(boxes)]], 1)[scores > threshold]


def detect(model: Any, picture: np.ndarray, smallest: int = 40, factor: float = 0.709) -> np.ndarray:
    """Return the boxes (faces, 5) in a picture of bytes: x, y, x, y and score.

    Args:
        model: an `Mtcnn`, or what was made of one.
        picture: (rows, columns, 3).
        smallest: edge of the smallest face, in pixels.
        factor: from one size of the picture to the next.
    """
    nets = [jax.jit(net) for net in (model.propose, model.refine, model.output)]
    picture = picture.astype(np.float32)
    scales = [CELL / smallest]
    while min(picture.shape[:2]) * scales[-1] * factor >= CELL:
        scales.append(scales[-1] * factor)
    boxes = np.concatenate([proposals(nets[0], picture, scale, 0.6) for scale in scales])
    boxes = square(separate(boxes, 0.7))
    for net, size, threshold in ((nets[1], 24, 0.7), (nets[2], 48, 0.7)):
        if not len(boxes):
            return boxes
        rescored = looked_at(net, picture, boxes, size, threshold)
        if size == 48:
            return separate(corrected(rescored[:, :5], rescored[:, 5:]), 0.7, by_smaller=True)
        rescored = rescored[separate_indices(rescored[:, :5], 0.7)]
        boxes = square(corrected(rescored[:, :5], rescored[:, 5:]))
    return boxes
