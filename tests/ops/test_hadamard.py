"""Hadamard matrices are orthogonal, and fast products with them are products with the matrix."""

import jax
import numpy as np
import pytest

from jqinject.ops import hadamard


@pytest.mark.parametrize("size", hadamard.TABLES)
def test_tables_are_hadamard_matrices(size: int) -> None:
    found = hadamard.table(size).astype(int)
    np.testing.assert_array_equal(np.abs(found), 1)
    np.testing.assert_array_equal(found @ found.T, size * np.eye(size))


@pytest.mark.parametrize("size", [1, 8, 24, 40])
def test_the_fast_product_is_that_with_the_matrix_and_its_inverse_undoes_it(size: int) -> None:
    count = hadamard.table_size(size)
    sylvester = np.ones((1, 1))
    while len(sylvester) < size // count:
        sylvester = np.kron(np.array([[1, 1], [1, -1]]), sylvester)
    base = np.ones((1, 1)) if count == 1 else hadamard.table(count)
    wanted = np.kron(base.T, sylvester) / np.sqrt(size)
    x = jax.random.normal(jax.random.key(0), (3, size))
    found = hadamard.transform(x)
    np.testing.assert_allclose(found, x @ wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(hadamard.transform(found, inverse=True), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [0, 6, 44, 84])
def test_sizes_without_a_matrix_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"no Hadamard matrix of size {size}"):
        hadamard.transform(np.zeros((1, size), np.float32))
