"""The digits that come with scikit-learn: 1,797 images of 8 x 8 pixels, no download."""

from typing import Any, NamedTuple

import numpy as np


class Digits(NamedTuple):
    """Images in [0, 1], float32, (n, 8, 8, 1); labels int32, (n,)."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(seed: int) -> Digits:
    """The digits, shuffled and split into 1,347 for training and 450 for testing."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits: Any = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    parts: Any = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
    train, test, train_labels, test_labels = parts
    return Digits(train, train_labels, test, test_labels)
