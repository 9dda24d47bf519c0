"""State dicts of torch's attention and recurrent layers, as the layers here take them."""

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

#: Arrays by the names of layers and parameters, nested.
Layers: TypeAlias = dict[str, Any]
PARTS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
NOT_HERE = ("bias_k", "bias_v")


def attention_from_torch(
    state: Mapping[str, object], num_heads: int, *, num_kv_heads: int | None = None, prefix: str = ""
) -> dict[str, dict[str, np.ndarray]]:
    """The parameters of `nnx.MultiHeadAttention` from the state of torch's or Brevitas's multi-head attention.

    A torch weight is `(out, in)`, packed or not; ours of the projections in is `(in, heads, features)`, of that out
    `(heads, features, out)`. The result is for `jqinject.load_state(mha, result)`.

    Args:
        state: arrays by name, as `{name: tensor.numpy() for name, tensor in module.state_dict().items()}`: packed
            `in_proj_weight` (torch) or `in_proj.weight` (Brevitas), or `q_proj_weight`, `q_proj.weight` and so on,
            `out_proj.weight`, and biases. Entries of quantizers are left out: they are assembled from the weights.
        num_heads: of the layer.
        num_kv_heads: heads of keys and values; None for `num_heads`.
        prefix: what the names of this layer start with, as "blocks.0.attn."; others are left out.

    Returns:
        {"query": {"kernel": ..., "bias": ...}, "key": ..., "value": ..., "out": ...}; biases where there are.

    Raises:
        KeyError: a weight is missing.
        ValueError: sizes that do not fit; `bias_k` and `bias_v`, which Flax's layer does not have.

    Example:
        >>> state = {"in_proj_weight": np.ones((24, 8)), "out_proj.weight": np.ones((8, 8))}
        >>> {name: layer["kernel"].shape for name, layer in attention_from_torch(state, 2).items()}
        {'query': (8, 2, 4), 'key': (8, 2, 4), 'value': (8, 2, 4), 'out': (2, 4, 8)}
    """
    own = {
        name.removeprefix(prefix).replace(".", "_"): np.asarray(x)
        for name, x in state.items()
        if name.startswith(prefix)
    }
    extra = [name for name in NOT_HERE if name in own]
    if extra:
        raise ValueError(
            f"attention_from_torch: {', '.join(extra)} (add_bias_kv=True): Flax's attention appends no key and value"
        )
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    heads = {"query": num_heads, "key": kv_heads, "value": kv_heads, "out": num_heads}
    layers: dict[str, dict[str, np.ndarray]] = {}
    for name, part in PARTS.items():
        weight, bias = _part(own, name, "weight"), _part(own, name, "bias")
        if weight is None:
            names = f"{part}_weight or {part}.weight" + (name != "out") * ", in_proj_weight or in_proj.weight"
            raise KeyError(
                f"attention_from_torch: no weight of the {name} projection ({names}) with the prefix {prefix!r} in "
                f"{sorted(state)}"
            )
        is_out = name == "out"
        kernel = _by_head(weight if is_out else weight.T, heads[name], name)
        layers[name] = {"kernel": np.moveaxis(kernel, 0, -1) if is_out else kernel}
        if bias is not None:
            layers[name]["bias"] = bias if is_out else _by_head(bias, heads[name], name)
    return layers


def _part(state: Mapping[str, np.ndarray], name: str, kind: str) -> np.ndarray | None:
    """The weight or bias of one projection: its own, or its third of the packed one."""
    own, packed = state.get(f"{PARTS[name]}_{kind}"), state.get(f"in_proj_{kind}")
    if own is not None or packed is None or name == "out":
        return own
    if len(packed) % 3:
        raise ValueError(f"attention_from_torch: in_proj of shape {packed.shape} is not three of a size")
    return np.split(packed, 3)[list(PARTS).index(name)]


def _by_head(x: np.ndarray, heads: int, name: str) -> np.ndarray:
    """The last axis as (heads, features)."""
    if x.shape[-1] % heads:
        raise ValueError(
            f"attention_from_torch: the {name} projection's {x.shape[-1]} features cannot be those of {heads} heads"
        )
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


NAME = re.compile(r"(weight|bias)_(ih|hh)_l(\d+)(_reverse)?")
# Where torch stacks the gates, by how many there are: our layers of the input and of the hidden state, in its order.
GATES = {
    4: (("ii", "hi"), ("if_", "hf"), ("ig", "hg"), ("io", "ho")),
    1: (("dense_i", "dense_h"),),
}


def recurrent_state_from_torch(state_dict: Mapping[str, object]) -> Layers:
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
    cells: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    for name, tensor in state_dict.items():
        match = NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f"{name!r} is no parameter of a torch.nn.LSTM or torch.nn.RNN: these are called weight_ih_l0, "
                "weight_hh_l0, bias_ih_l0, bias_hh_l0, and so on; projections (weight_hr_l0) are not supported.\n"
                "  cure: the state dict of the recurrent layer alone, without the prefix that it has in a model"
            )
        kind, source, layer, reverse = match.groups()
        cell = cells.setdefault((int(layer), 1 if reverse else 0), {})
        cell[f"{kind}_{source}"] = np.asarray(tensor)
    layers: dict[int, dict[int, Layers]] = {}
    for (layer, direction), cell in sorted(cells.items()):
        layers.setdefault(layer, {})[direction] = _cell(cell, f"layer {layer}, direction {direction}")
    return {"layers": layers}


def _cell(arrays: dict[str, np.ndarray], where: str) -> Layers:
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
    layers: Layers = {}
    for index, (of_input, of_hidden) in enumerate(gates):
        part = slice(index * hidden, (index + 1) * hidden)
        layers[of_input] = {"kernel": arrays["weight_ih"][part].T}
        layers[of_hidden] = {"kernel": arrays["weight_hh"][part].T}
        if biases:
            layers[of_hidden]["bias"] = sum(bias[part] for bias in biases)
    return layers
