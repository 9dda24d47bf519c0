"""Centring: the weights that make what a LayerNorm takes lose the mean over their outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from jqinject.program import dotted
from jqinject.recipes.passes.float_change import FloatChange
from jqinject.recipes.work import Work, site_path


@dataclass(frozen=True)
class Centred:
    """Parameters whose outputs have the mean 0.

    Attributes:
        paths: of the parameters.
        sites: names of the sites that read what the norms make of these.
    """

    paths: tuple[str, ...]
    sites: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{', '.join(self.paths)}: centred, so that the norms before {', '.join(self.sites)} need no mean"
        )


def centred(work: Work, by: str) -> list[Centred]:
    """Centre all that makes the inputs of LayerNorms; the float model's function stays, and is checked.

    Args:
        work: of the recipe.
        by: the pass, for messages.

    Raises:
        ValueError: the outputs move.
    """
    change = FloatChange(work, by)
    change.run()
    done: list[Centred] = []
    for site, region in change.turning():
        if isinstance(region, str) or not (region.normalized and region.keeps_sums):
            continue
        read = {site_path(each) for each in change.sites if each.name in region.sinks}
        makers = {path: axis for path, axis in region.parameters.items() if dotted(path) not in read}
        changes = {
            path: partial(without_mean, axis=axis, block=region.block) for path, axis in makers.items()
        }
        change.change(site.name, changes)
        names = tuple(map(dotted, makers))
        done.append(Centred(names, tuple(sorted(region.sinks))))
    change.finish()
    return done


def without_mean(value: jax.Array, *, axis: int, block: int) -> jax.Array:
    """Numbers less the mean of each block along an axis.

    Example:
        >>> import jax.numpy as jnp
        >>> without_mean(jnp.array([1.0, 3.0]), axis=0, block=2).tolist()
        [-1.0, 1.0]
    """
    shape = value.shape
    blocks = value.reshape(*shape[:axis], -1, block, *shape[axis + 1 :])
    return (blocks - blocks.mean(axis=axis + 1, keepdims=True)).reshape(shape)
