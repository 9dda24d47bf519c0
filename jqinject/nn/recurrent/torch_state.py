"""Checkpoints of torch's recurrent layers, as `QuantLSTM` and `QuantRNN` take them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

NAME = re.compile(r"(weight|bias)_(ih|hh)_l(\d+)(_reverse)?")
# Where torch stacks the gates, by how many there are: our layers of the input and of the hidden state, in its order.
GATES = {
    4: (("ii", "hi"), ("if_", "hf"), ("ig", "hg"), ("io", "ho")),
    1: (("dense_i", "dense_h"),),
}


def recurrent_state_from_torch(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a `torch.nn.LSTM` or `torch.nn.RNN` in the shape of a `QuantLSTM` or `QuantRNN`.

    Kernels are transposed, to (in, out), and taken apart by gate; the two biases that torch adds become one, of the
    layer of the hidden state.

    Args:
        state_dict: torch's `module.state_dict()`, with arrays as values (or tensors on the CPU, which NumPy can read).

    Returns:
        A nested dict, for `jqinject.load_state(layer, ...)`.

    Raises:
        ValueError: a name that none of these layers has, a missing weight, or a GRU's or a projection's weights.

    Example:
        >>> import jqinject
        >>> from flax import nnx
        >>> from jqinject.nn import QuantRNN
        >>> shapes = {"weight_ih_l0": (4, 3), "weight_hh_l0": (4, 4), "bias_ih_l0": (4,), "bias_hh_l0": (4,)}
        >>> rnn = QuantRNN(3, 4, rngs=nnx.Rngs(0))
        >>> state = recurrent_state_from_torch({name: np.ones(shape, "f4") for name, shape in shapes.items()})
        >>> report = jqinject.load_state(rnn, state)
        >>> rnn.layers[0][0].dense_h.bias[...]
        Array([2., 2., 2., 2.], dtype=float32)
    """
    found: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    for name, given in state_dict.items():
        match = NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f"{name!r} is no parameter of a torch.nn.LSTM or torch.nn.RNN: these are called weight_ih_l0, "
                "weight_hh_l0, bias_ih_l0, bias_hh_l0, and so on; projections (weight_hr_l0) are not supported.\n"
                "  cure: the state dict of the recurrent layer alone, without the prefix that it has in a model"
            )
        kind, source, layer, reverse = match.groups()
        cell = found.setdefault((int(layer), 1 if reverse else 0), {})
        cell[f"{kind}_{source}"] = np.asarray(given)
    layers: dict[int, Any] = {}
    for (layer, direction), cell in sorted(found.items()):
        layers.setdefault(layer, {})[direction] = _cell(cell, f"layer {layer}, direction {direction}")
    return {"layers": layers}


def _cell(arrays: dict[str, np.ndarray], where: str) -> dict[str, Any]:
    """One direction of one layer."""
    missing = [name for name in ("weight_ih", "weight_hh") if name not in arrays]
    if missing:
        raise ValueError(f"{where}: {' and '.join(missing)} missing, got {sorted(arrays)}")
    rows, hidden = arrays["weight_hh"].shape
    gates = GATES.get(rows // hidden)
    if gates is None or rows % hidden or arrays["weight_ih"].shape[0] != rows:
        raise ValueError(
            f"{where}: weight_ih of shape {arrays['weight_ih'].shape} and weight_hh of shape "
            f"{arrays['weight_hh'].shape} are not those of an LSTM (four gates) or a simple RNN (one)"
        )
    biases = [arrays[name] for name in ("bias_ih", "bias_hh") if name in arrays]
    made: dict[str, Any] = {}
    for index, (of_input, of_hidden) in enumerate(gates):
        part = slice(index * hidden, (index + 1) * hidden)
        made[of_input] = {"kernel": arrays["weight_ih"][part].T}
        made[of_hidden] = {"kernel": arrays["weight_hh"][part].T}
        if biases:
            made[of_hidden]["bias"] = sum(bias[part] for bias in biases)
    return made
