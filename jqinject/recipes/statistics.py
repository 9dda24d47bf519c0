"""What calibration leaves of the inputs of a site: sums that merge over batches, devices and processes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Statistics:
    """Sums over the inputs of a site; `X` are samples of the float model, `Y` of the quantized one.

    All are float32, one matrix or vector for each matrix of the site; what no pass asked for is None.

    Attributes:
        count: the number of samples, `(stack,)`.
        hessian: sum of `y y^T`, `(stack, columns, columns)`.
        cross: sum of `x y^T`, `(stack, columns, columns)`.
        magnitude: sum of `|x|`, `(stack, columns)`.
        largest, smallest: of the numbers of `x` in each column, `(stack, columns)`.

    Example:
        >>> x = jnp.array([[[1.0, -2.0], [3.0, 0.0]]])
        >>> seen = Statistics.of(x, x, ("hessian", "largest"))
        >>> seen.merged(seen).hessian.tolist(), seen.largest.tolist()
        ([[[20.0, -4.0], [-4.0, 8.0]]], [[3.0, 0.0]])
    """

    count: jax.Array
    hessian: jax.Array | None = None
    cross: jax.Array | None = None
    magnitude: jax.Array | None = None
    largest: jax.Array | None = None
    smallest: jax.Array | None = None

    @classmethod
    def of(
        cls, x: jax.Array, y: jax.Array, wanted: tuple[str, ...], own: jax.Array | None = None
    ) -> Statistics:
        """The sums over one batch.

        Args:
            x: samples of the float model, `(stack, samples, columns)`.
            y: the same samples in the quantized model.
            wanted: names of attributes.
            own: 1 for samples that belong to a matrix of the stack, `(stack, samples)`; None if all do.
        """
        return _of(x, y, tuple(sorted(wanted)), own)

    def merged(self, other: Statistics) -> Statistics:
        """The sums over both."""
        merge = {"largest": jnp.maximum, "smallest": jnp.minimum}
        found = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            found[field.name] = None if mine is None else merge.get(field.name, jnp.add)(mine, theirs)
        return replace(self, **found)

    def where_seen(self, seen: jax.Array) -> Statistics:
        """The sums with those of one sample for each column, all alike, where no sample reached a matrix.

        Args:
            seen: which matrices were reached, `(stack,)`.
        """
        if bool(seen.all()):
            return self
        eye = {
            name: jnp.eye(x.shape[-1])
            for name in ("hessian", "cross")
            if (x := getattr(self, name)) is not None
        }
        filled = {
            name: jnp.where(seen[:, None, None], getattr(self, name), each) for name, each in eye.items()
        }
        return replace(self, count=jnp.where(seen, self.count, 1.0), **filled)

    def mean(self, name: str) -> jax.Array:
        """A sum divided by the number of samples (at least 1)."""
        total = getattr(self, name)
        count = jnp.maximum(self.count, 1.0)
        return total / count.reshape(count.shape + (1,) * (total.ndim - 1))


def _of(x: Any, y: Any, wanted: tuple[str, ...], own: Any) -> Statistics:
    return _sums(wanted, x.astype(jnp.float32), y.astype(jnp.float32), own)


def _sums_of(wanted: tuple[str, ...], x: jax.Array, y: jax.Array, own: jax.Array | None) -> Statistics:
    highest = jax.lax.Precision.HIGHEST
    stack, samples = x.shape[:2]
    count = jnp.full((stack,), samples, jnp.float32) if own is None else own.sum(axis=1)
    found: dict[str, Any] = {}
    if "hessian" in wanted:
        found["hessian"] = jnp.einsum("sni,snj->sij", y, y, precision=highest)
    if "cross" in wanted:
        found["cross"] = jnp.einsum("sni,snj->sij", x, y, precision=highest)
    if "magnitude" in wanted:
        found["magnitude"] = jnp.abs(x).sum(axis=1)
    if "largest" in wanted:
        found["largest"] = _within(x, own, -jnp.inf).max(axis=1, initial=-jnp.inf)
    if "smallest" in wanted:
        found["smallest"] = _within(x, own, jnp.inf).min(axis=1, initial=jnp.inf)
    return Statistics(count, **found)


def _within(x: jax.Array, own: jax.Array | None, otherwise: float) -> jax.Array:
    return x if own is None else jnp.where(own[:, :, None] > 0, x, jnp.float32(otherwise))


_sums = jax.jit(_sums_of, static_argnums=0)
