"""`Rotate`: mixes channels by Hadamard matrices, so that none of them is far larger than the others."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core.transforms import Hadamard, Orthogonal, Transform
from jqinject.model.quantizing.rules import Rule
from jqinject.ops import hadamard
from jqinject.recipes.passes import scores
from jqinject.recipes.passes.float_change import FloatChange
from jqinject.recipes.stream.flat_program import ContractionSite, Note
from jqinject.recipes.transforms import rotations
from jqinject.recipes.transforms.regions import RotatedRegion
from jqinject.recipes.work import Work

KINDS = ("R1", "R2", "R3", "R4")


@dataclass(frozen=True, init=False)
class Rotate:
    """Multiplies channels by orthogonal matrices, and weights by their inverses: the float model's function stays.

    | kind | which channels | where the matrix goes |
    |---|---|---|
    | R1 | those that norms normalize: the residual stream | into the weights that write and read it |
    | R2 | those between two contractions with nothing nonlinear in between: values of attention | into both weights |
    | R3 | those of a head, of queries and keys after RoPE | online, on both operands; before a cache that rounds keys |
    | R4 | those that come out of something nonlinear, number by number | online, before the input |

    Which channels these are is found from the program. The matrices are Hadamard's, with random signs where they are
    not online; they mix all channels or, without a matrix of that size, blocks of them. Where a program subtracts the
    mean of the channels (LayerNorm), R1 is changed to leave their sum as it is. Norms' gains have to be folded before.

    Args:
        which, kinds: the rotations; all by default.
        seed: of the signs.
        full_size: refuse sizes without a Hadamard matrix instead of mixing blocks.
        block: at most how many channels a matrix mixes, so that an online one takes `n log(block)` additions and
            nothing is mixed between groups of so many; None for as many as there are. R1 of a LayerNorm's stream mixes
            all channels nevertheless. `Permute` comes before.

    Raises:
        ValueError: an unknown kind; `block` is below 2, or comes with `full_size`; when applied, with `full_size`, a
            size without a matrix: the text names the site; or the float model's outputs move.

    Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024.

    Differs from QuaRot: a table that is looked up and is the head too is rotated once; a norm's gain that cannot be
    folded leaves the stream as it is, and the report says so. R3 is done where a rule quantizes queries, keys
    (`op=("dot_general", "einsum")`) or their cache (`cache_quant`). A cache then keeps rotated keys: one that a float
    model has filled is handed over by `jqinject.quantized_cache`.

    Example:
        >>> Rotate("R1", "R4")
        Rotate('R1', 'R4')
    """

    kinds: tuple[str, ...]
    seed: int
    full_size: bool
    block: int | None

    def __init__(
        self,
        *which: str,
        kinds: Sequence[str] = (),
        seed: int = 0,
        full_size: bool = False,
        block: int | None = None,
    ) -> None:
        names = (*which, *kinds) or KINDS
        for kind in names:
            if kind not in KINDS:
                raise ValueError(
                    f"Rotate: {kind!r} is no kind of rotation.\n  cure: one of {', '.join(KINDS)}"
                )
        if block is not None and (full_size or isinstance(block, bool) or not block >= 2):
            raise ValueError(
                f"Rotate: block={block!r}, full_size={full_size}; expected a block of at least 2 channels, or "
                "full_size.\n  cure: block=32"
            )
        vars(self).update(kinds=names, seed=seed, full_size=full_size, block=block)

    def __repr__(self) -> str:
        more = [f"seed={self.seed}"] if self.seed else []
        more += ["full_size=True"] if self.full_size else []
        more += [] if self.block is None else [f"block={self.block}"]
        return f"Rotate({', '.join([*map(repr, self.kinds), *more])})"

    def __call__(self, work: Work) -> list[Note]:
        """See `Pass`."""
        change = FloatChange(work, repr(self))
        first: tuple[Rule, ...] = ()
        if "R3" in self.kinds:
            change.done, first = scores.rotated_scores(change.flat, work.rules, self._size)
        key = jax.random.key(self.seed)
        for site, region in rotations.rotated_regions(change.flat):
            if isinstance(region, str):
                change.done += self._before(change, site, region)
            elif region.kind in self.kinds:
                key, own = jax.random.split(key)
                change.done.append(self._rotated(change, site, region, own))
        done = change.finish()
        if first:
            work.rules, work.allow_idle = (*first, *work.rules), True
        return done

    def _rotated(
        self, change: FloatChange, site: ContractionSite, region: RotatedRegion, key: jax.Array
    ) -> Note:
        size = self._size(region.block, f"{site.name} ({site.path})")
        transform = rotation(region.block, size, region.keeps_sums, key)
        change.change(
            site.name, [(path, partial(region.mapped, path, transform)) for path in region.parameters]
        )
        return scores.rotated(
            region.kind, sorted(sink.name for sink in region.sites), size, [*region.parameters]
        )

    def _before(self, change: FloatChange, site: ContractionSite, why: str) -> list[Note]:
        """R4 before one site, or why not."""
        source = rotations.comes_from_nonlinearity(change.flat, site)
        if not source or "R4" not in self.kinds:
            return (
                [Note(site.name, site.path, reason=why)]
                if {"R1", "R2"} & {*self.kinds} and not source
                else []
            )
        if change.online.get(site.path) is not change.work.online.get(site.path):
            return []  # in a loop: an earlier turn has placed it
        channels = site.matrices.channels
        size = self._size(channels, f"{site.name} ({site.path})")
        refused = change.keep_online(site, Hadamard(None if size == channels else size))
        if refused:
            return [Note(site.name, site.path, reason=refused)]
        return [scores.rotated("R4", (site.name,), size, (site.path,), online="its inverse")]

    def _size(self, channels: int, site: str) -> int:
        """How many channels one matrix mixes."""
        if self.full_size:
            try:
                hadamard.table_size(channels)
            except ValueError as error:
                raise ValueError(f"{self!r}: {site}: {error}") from error
        return largest_size(channels, self.block)


def largest_size(channels: int, most: int | None = None) -> int:
    """The largest divisor of a number of channels that has a Hadamard matrix.

    Args:
        channels: how many there are.
        most: what it may be at most; None for any.

    Example:
        >>> largest_size(48), largest_size(6), largest_size(84), largest_size(48, 32)
        (48, 2, 28, 24)
    """
    limit = channels if most is None else min(channels, most)
    for size in sorted((size for size in range(1, limit + 1) if channels % size == 0), reverse=True):
        with contextlib.suppress(ValueError):
            hadamard.table_size(size)
            return size
    return 1


def rotation(channels: int, size: int, keeps_sums: bool, key: jax.Array) -> Transform:
    """A random Hadamard transform of blocks; where sums have to stay, reflected so that they do.

    Args:
        channels: how many there are.
        size: of a block.
        keeps_sums: whether the sum of the channels has to stay as it is.
        key: of the signs.
    """
    signs = np.asarray(jax.random.rademacher(key, (size,), jnp.int32))
    plain = Hadamard(size, signs=tuple(signs.tolist()))
    if not keeps_sums:
        return plain
    # H rotates the vector of equal numbers to another one; the reflection that takes it back comes after H.
    matrix = np.asarray(plain(jnp.eye(channels)), np.float64)
    even = np.full(channels, 1 / math.sqrt(channels))
    normal = even @ matrix - even
    length = normal @ normal
    if length > 1e-12:
        matrix = matrix - 2 * np.outer(matrix @ normal, normal) / length
    transform = Orthogonal(channels)
    transform.put(jnp.asarray(matrix, jnp.float32))
    return transform
