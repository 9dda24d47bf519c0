"""Trees of Qwix's and AQT's quantized arrays in models: weights are `(codes - zero point) * scale`, in tiles."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jqinject.formats import CheckpointError, explain_load, load, read_checkpoint
from jqinject.ops import NF4

RNG = np.random.default_rng(0)


@dataclass
class Box:
    """What Qwix puts an array into."""

    array: Any
    how: str = ""


@dataclass
class Array:
    """A quantized array, with the names that Qwix and AQT use."""

    qvalue: Any
    scale: Any
    zero_point: Any = None
    qtype: Any = None


class Net(nnx.Module):
    def __init__(self) -> None:
        self.up = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
        self.heads = nnx.LinearGeneral(32, (2, 8), use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> Any:
        return self.heads(self.up(x))


def codes_of(shape: tuple[int, ...], dtype: Any = np.int8, low: int = -8, high: int = 8) -> np.ndarray:
    return RNG.integers(low, high, shape).astype(dtype)


def scale_of(shape: tuple[int, ...]) -> np.ndarray:
    return RNG.uniform(0.5, 1, shape).astype(np.float32)


def tree_of(up: Any) -> dict[str, Any]:
    heads = Array(codes_of((32, 2, 8)), scale_of((1, 2, 8)))
    return {"up": {"kernel": up, "bias": scale_of((32,))}, "heads": {"kernel": Box(heads)}}


def widened(x: np.ndarray, tiles: int) -> np.ndarray:
    return np.repeat(np.asarray(x, np.float32), tiles, axis=0)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "dtype", "label"),
    [
        ("tiles", np.int8, "int8"),
        ("zero points", ml_dtypes.int4, "int4"),
        ("nf4", ml_dtypes.uint4, "nf4"),
        ("minifloats", ml_dtypes.float8_e4m3fn, "e4m3"),
    ],
)
def test_a_tree_of_qwix_keeps_its_codes(name: str, dtype: Any, label: str) -> None:
    tiles = 1 if name == "minifloats" else 2
    codes = codes_of((32, 32), dtype, 0 if name == "nf4" else -8)
    scale = scale_of((tiles, 32))
    zero = codes_of((tiles, 32), np.int8) if name == "zero points" else None
    tree = tree_of(
        {
            "array": {
                "qvalue": codes,
                "scale": scale,
                "zero_point": zero,
                "qtype": label if label == "nf4" else None,
            }
        }
    )
    values = NF4.table[codes.astype(int)] if name == "nf4" else codes.astype(np.float32)
    lowered = values if zero is None else values - widened(zero, 32 // tiles)
    expected = lowered * widened(scale, 32 // tiles)
    found = read_checkpoint(tree)
    assert (found.method, found.matrices["up.kernel"].label) == ("qwix", label)
    net: Any = load(Net(), tree)
    np.testing.assert_allclose(net.up.kernel[...], expected, rtol=1e-6)
    np.testing.assert_array_equal(net.up.bias[...], tree["up"]["bias"])
    heads = tree["heads"]["kernel"].array
    np.testing.assert_allclose(net.heads.kernel[...], heads.qvalue * heads.scale, rtol=1e-6)
    assert net.up.kernel.get_raw_value()["value"].dtype.itemsize == 1
    assert "'a1 a0 -> a0 a1'" in str(explain_load(Net(), tree))
    assert net(jnp.ones((1, 32))).shape == (1, 2, 8)


def test_a_frozen_tree_of_aqt_is_read_beside_the_float_parameters() -> None:
    codes, scale = codes_of((32, 32)), scale_of((1, 32))
    floats = {
        "up": {"kernel": scale_of((32, 32)), "bias": scale_of((32,))},
        "heads": {"kernel": scale_of((32, 2, 8))},
    }
    frozen = {
        "up": {
            "AqtDotGeneral_0": {
                "qrhs": {"frozen": {"qvalue": codes, "scale": [scale], "scale_t": None, "bias": []}}
            }
        }
    }
    net = load(Net(), {"params": floats, "aqt": frozen})
    np.testing.assert_allclose(net.up.kernel[...], codes * scale, rtol=1e-6)
    np.testing.assert_array_equal(net.heads.kernel[...], floats["heads"]["kernel"])


@pytest.mark.parametrize(
    ("leaf", "match"),
    [
        (
            Array(codes_of((32, 32), ml_dtypes.uint4, 0), scale_of((1, 32))),
            r"(?s)up\.kernel.*uint4.*cure: 'qtype'",
        ),
        (
            Array(codes_of((32, 32)), scale_of((5, 32))),
            r"up\.kernel has codes of \(32, 32\), scales of \(5, 32\)",
        ),
        (Array(codes_of((32, 32)), scale_of((4, 4))), r"up\.kernel has tiles along the axes \[0, 1\]"),
        (Array(codes_of((32, 32)), None), r"up\.kernel has no scale"),
        (Array(codes_of((32, 32), np.int16), scale_of((1, 32))), r"up\.kernel has codes of int16"),
        (b"pickled", r"up\.kernel is a bytes, expected arrays"),
    ],
)
def test_what_a_tree_does_not_say_is_refused_by_path(leaf: Any, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        load(Net(), tree_of(leaf))
