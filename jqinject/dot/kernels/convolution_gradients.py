"""The gradients of a convolution as convolutions: of gradient and kernel, of input and gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jqinject.dot.kernels.convolution import Convolution

Shape = tuple[int, ...]


def is_plain(conv: Convolution) -> bool:
    """Whether its gradients are also plain convolutions: it has no groups."""
    options = dict(conv.options)
    return options["feature_group_count"] == 1 and options["batch_group_count"] == 1


def of_lhs_gradient(conv: Convolution, shapes: tuple[Shape, Shape, Shape], dtype: np.dtype) -> Convolution:
    """The convolution of the gradient and the kernel, its spatial axes reversed, that gives the gradient of the input.

    Args:
        conv: without groups.
        shapes: of the input, the kernel and the output.
        dtype: of the result.
    """
    lhs, kernel, out = (_dilated(conv, place, shape) for place, shape in enumerate(shapes))
    before = [window - 1 - low for window, (low, _) in zip(kernel, conv.padding, strict=True)]
    after = [a + k - 1 - o - b for a, k, o, b in zip(lhs, kernel, out, before, strict=True)]
    output, inputs, *space = conv.specs[1]
    options = dict(conv.options)
    return replace(
        conv,
        specs=(conv.specs[2], (inputs, output, *space), conv.specs[0]),
        padding=tuple(zip(before, after, strict=True)),
        lhs_dilation=options["window_strides"],
        options=tuple((options | {"window_strides": conv.lhs_dilation}).items()),
        dtype=np.dtype(dtype),
        out_sharding=None,
    )


def of_rhs_gradient(conv: Convolution, shapes: tuple[Shape, Shape, Shape], dtype: np.dtype) -> Convolution:
    """The convolution of the input and the gradient that gives the gradient of the kernel; arguments as above."""
    lhs, kernel, out = (_dilated(conv, place, shape) for place, shape in enumerate(shapes))
    low = [low for low, _ in conv.padding]
    high = [k - 1 + o - a - b for a, k, o, b in zip(lhs, kernel, out, low, strict=True)]
    options = dict(conv.options)
    turned = {"window_strides": options["rhs_dilation"], "rhs_dilation": options["window_strides"]}
    (batch, feature, *space), (out_batch, out_feature, *out_space) = conv.specs[0], conv.specs[2]
    output, inputs, *kernel_space = conv.specs[1]
    return replace(
        conv,
        specs=(
            (feature, batch, *space),
            (out_feature, out_batch, *out_space),
            (inputs, output, *kernel_space),
        ),
        padding=tuple(zip(low, high, strict=True)),
        options=tuple((options | turned).items()),
        dtype=np.dtype(dtype),
        out_sharding=None,
    )


def _dilated(conv: Convolution, place: int, shape: Shape) -> list[int]:
    """The dilated lengths of the spatial axes of the input, the kernel or the output."""
    options = dict(conv.options)
    steps = (conv.lhs_dilation, options["rhs_dilation"], options["window_strides"])[place]
    return [
        (shape[axis] - 1) * step + 1 if shape[axis] else 0
        for axis, step in zip(conv.specs[place][2:], steps, strict=True)
    ]
