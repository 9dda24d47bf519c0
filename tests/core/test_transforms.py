"""Transforms: their matrices, inverses and duals, by NumPy."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.core.transforms import (
    Chain,
    ChannelScale,
    Hadamard,
    Orthogonal,
    Permutation,
    Sized,
    Transform,
    along,
)

CHANNELS = 24


def _scale() -> Transform:
    made = ChannelScale(CHANNELS)
    made.put(jnp.linspace(0.5, 3.0, CHANNELS))
    return made


def _orthogonal() -> Transform:
    made = Orthogonal(CHANNELS)
    made.put(jnp.linalg.qr(jax.random.normal(jax.random.key(0), (CHANNELS, CHANNELS)))[0])
    return made


def _permutation() -> Transform:
    made = Permutation(CHANNELS)
    made.put(jax.random.permutation(jax.random.key(1), CHANNELS))
    return made


MADE: dict[str, Callable[[], Transform]] = {
    "hadamard": Hadamard,
    "blocks": lambda: Hadamard(4),
    "table": lambda: Hadamard(12, signs=(1, -1, -1) * 4),
    "scale": _scale,
    "orthogonal": _orthogonal,
    "permutation": _permutation,
    "chain": lambda: Chain((_scale(), Hadamard(8), _permutation())),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", MADE)
def test_inverse_and_dual_are_those_of_the_matrix(name: str) -> None:
    transform = MADE[name]()
    matrix = np.asarray(transform(jnp.eye(CHANNELS)), np.float64)
    x = np.asarray(jax.random.normal(jax.random.key(2), (3, CHANNELS)))
    np.testing.assert_allclose(transform(jnp.asarray(x)), x @ matrix, atol=1e-5)
    np.testing.assert_allclose(transform.inverse(jnp.asarray(x)), x @ np.linalg.inv(matrix), atol=1e-5)
    np.testing.assert_allclose(transform.dual(jnp.asarray(x)), x @ np.linalg.inv(matrix).T, atol=1e-5)


@pytest.mark.parametrize("name", MADE)
def test_bfloat16_is_rounded_once(name: str) -> None:
    transform = MADE[name]()
    x = jax.random.normal(jax.random.key(3), (5, CHANNELS), jnp.bfloat16)
    found, wide = transform(x), transform(x.astype(jnp.float32))
    assert found.dtype == jnp.bfloat16
    if name != "chain":
        np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16))


@pytest.mark.heavy
def test_signs_come_before_the_matrix_in_each_block() -> None:
    signs = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
    sylvester = np.array([[(-1) ** bin(i & j).count("1") for j in range(16)] for i in range(16)])
    x = np.asarray(jax.random.normal(jax.random.key(4), (2, 32)))
    wanted = (x.reshape(2, 2, 16) * signs) @ sylvester / 4
    np.testing.assert_allclose(Hadamard(16, signs)(jnp.asarray(x)), wanted.reshape(2, 32), atol=1e-6)


def test_several_axes_are_one() -> None:
    x = jax.random.normal(jax.random.key(5), (3, 4, 2, 6))
    found = along(Hadamard(), x, (1, 3))
    wanted = Hadamard()(x.transpose(0, 2, 1, 3).reshape(3, 2, 24)).reshape(3, 2, 4, 6).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(found, wanted)


def test_transforms_without_numbers_are_values() -> None:
    assert Hadamard(4) == Hadamard(4) != Hadamard(8)
    assert hash(Chain((Hadamard(4),))) == hash(Chain((Hadamard(4),)))
    assert not isinstance(Hadamard(4), nnx.Module) and isinstance(_scale(), nnx.Module)
    assert pickle.loads(pickle.dumps(Hadamard(2, signs=(1, -1)))) == Hadamard(2, signs=(1, -1))
    assert Sized(ChannelScale, 4, "a") == Sized(ChannelScale, 4, "a") != Sized(ChannelScale, 4, "b")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Hadamard(6), "no Hadamard matrix of size 6"),
        (lambda: Hadamard(4, signs=(1, 0, 1, 1)), "signs must be 1 or -1"),
        (lambda: Hadamard(4, signs=(1, 1)), "one sign for each of the 4 channels"),
        (lambda: Hadamard(16)(jnp.ones((2, 24))), "blocks of 16 do not fill 24 channels"),
        (lambda: Hadamard()(jnp.ones((2, 0))), "blocks of 0 do not fill 0 channels"),
        (lambda: ChannelScale(2).put(jnp.array([1.0, 0.0])), "finite and not 0"),
        (lambda: ChannelScale(2).put(jnp.ones(3)), r"expected numbers of shape \(2,\)"),
        (lambda: Permutation(3).put(jnp.array([0, 0, 1])), "each of 3 channels once"),
        (lambda: Orthogonal(2).put(jnp.ones((2, 2))), r"R\^T R is 2 away from the identity"),
        (lambda: Orthogonal(2).put(jnp.eye(3)), r"expected a matrix of shape \(2, 2\)"),
    ],
)
def test_what_has_no_inverse_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
