"""Which channel each number of a value belongs to, and which channels must have the same factor.

A label is a whole number: `c` says that the number is multiplied by the factor of channel `c`, `-c` that it is divided
by it, 0 that it stays. Labels of a value broadcast to it: an axis along which they are all the same has size 1.
"""

from __future__ import annotations

import numpy as np

Labels = np.ndarray


def compressed(labels: Labels) -> Labels:
    """Labels with size 1 along the axes along which they are all the same.

    Example:
        >>> compressed(np.array([[1, 2], [1, 2]])).tolist()
        [[1, 2]]
    """
    for axis, size in enumerate(labels.shape):
        first = labels.take([0], axis=axis) if size else labels
        # An axis that numpy has broadcast is known to hold the same numbers, without a look at them.
        if size > 1 and (labels.strides[axis] == 0 or (labels == first).all()):
            labels = first
    return np.ascontiguousarray(labels)


def varies(labels: Labels) -> set[int]:
    """The axes along which labels differ."""
    return {axis for axis, size in enumerate(labels.shape) if size > 1}


class Channels:
    """The channels of a region, and which of them must have the same factor.

    Args:
        count: how many there are at first.

    Example:
        >>> channels = Channels(3)
        >>> channels.join(np.array([1]), np.array([2]))
        True
        >>> channels.join(np.array([3]), np.array([0]))
        True
        >>> channels.groups().tolist()
        [0, 1, 1, 0]
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pairs: list[np.ndarray] = []

    def join(self, one: Labels, other: Labels) -> bool:
        """Say that numbers have the same factor under both labels; whether that says anything.

        Args:
            one, other: labels that broadcast with each other.
        """
        one, other = np.broadcast_arrays(one, other)
        differ = one != other
        if not differ.any():
            return False
        self._pairs.append(np.unique(np.stack([one[differ], other[differ]]), axis=1))
        return True

    def groups(self) -> np.ndarray:
        """The new label of each label from 0 to `count`: 0 if its factor must be 1.

        Channels with the same factor have the same new label; with opposite ones, if one must be the inverse.
        """
        pairs = np.concatenate([np.zeros((2, 0), int), *self._pairs], axis=1)
        pairs = np.concatenate([pairs, -pairs], axis=1) + self.count
        size = 2 * self.count + 1
        part = _parts(size, *pairs)
        found = np.zeros(self.count + 1, int)
        new: dict[int, int] = {}
        for channel in range(1, self.count + 1):
            here, inverse = part[self.count + channel], part[self.count - channel]
            if here == inverse or here == part[self.count]:
                continue
            if inverse in new and here not in new:
                found[channel] = -new[inverse]
            else:
                found[channel] = new.setdefault(here, len(new) + 1)
        return found


def _parts(size: int, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The smallest of the numbers below `size` that each is connected with by pairs."""
    part = np.arange(size)
    while True:
        lowest = np.minimum(part[one], part[other])
        new = part.copy()
        np.minimum.at(new, one, lowest)
        np.minimum.at(new, other, lowest)
        new = new[new]
        if (new == part).all():
            return part
        part = new


def relabelled(labels: Labels, groups: np.ndarray) -> Labels:
    """Labels after channels were joined."""
    return np.sign(labels) * groups[np.abs(labels)]


def factors_of(labels: Labels, factors: np.ndarray) -> np.ndarray:
    """The factor of each number.

    Args:
        labels: of the numbers.
        factors: of channels 1, 2, ....

    Example:
        >>> factors_of(np.array([0, 1, -2]), np.array([2.0, 4.0])).tolist()
        [1.0, 2.0, 0.25]
    """
    own = factors[np.maximum(np.abs(labels), 1) - 1]
    return np.where(labels == 0, 1, np.where(labels > 0, own, 1 / own)).astype(factors.dtype)
