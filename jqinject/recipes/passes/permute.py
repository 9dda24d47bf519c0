"""`Permute`: another order of channels, so that blocks of them are alike, or hold what is alike."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import jax.numpy as jnp
import numpy as np

from jqinject.ops.processes import on_host
from jqinject.recipes.passes.float_change import FloatChange
from jqinject.recipes.solvers.solver import Checked, at_least
from jqinject.recipes.stream.flat_program import ContractionSite, Note
from jqinject.recipes.transforms.permutations import permuted_regions
from jqinject.recipes.transforms.regions import RotatedRegion, per_channel
from jqinject.recipes.work import Work


def massdiff(mass: np.ndarray, block: int) -> np.ndarray:
    """The order of channels in which blocks have sums as equal as a greedy choice makes them.

    From the largest channel on, each goes to the block with the least sum that is not full.

    Args:
        mass: the mean magnitude of each channel, `(channels,)`.
        block: how many channels a block has; divides them.

    Example:
        >>> massdiff(np.array([9.0, 8.0, 1.0, 1.0, 7.0, 1.0]), 2).tolist()
        [0, 5, 1, 3, 4, 2]
    """
    order = np.argsort(-mass, kind="stable")
    blocks: list[list[int]] = [[] for _ in range(mass.size // block)]
    sums = np.zeros(len(blocks))
    for channel in order.tolist():
        least = int(np.argmin(sums))
        blocks[least].append(channel)
        sums[least] = np.inf if len(blocks[least]) == block else sums[least] + mass[channel]
    return np.concatenate(blocks).astype(np.int32)


def zigzag(largest: np.ndarray, block: int) -> np.ndarray:
    """The order of channels in which each block gets one of the largest, then in reverse one of the next, and so on.

    Args:
        largest: the largest magnitude of each channel, `(channels,)`.
        block: how many channels a block has; divides them.

    Example:
        >>> zigzag(np.array([9.0, 8.0, 7.0, 3.0, 2.0, 1.0]), 2).tolist()
        [0, 5, 1, 4, 2, 3]
    """
    turns = np.argsort(-largest, kind="stable").reshape(block, -1)
    turns[1::2] = turns[1::2, ::-1]
    return turns.T.reshape(-1).astype(np.int32)


def absmax(largest: np.ndarray, block: int) -> np.ndarray:
    """The order of channels by size, the largest first.

    Args:
        largest: the largest magnitude of each channel, `(channels,)`.
        block: of any size.

    Example:
        >>> absmax(np.array([1.0, 9.0, 8.0]), 2).tolist()
        [1, 2, 0]
    """
    return np.argsort(-largest, kind="stable").astype(np.int32)


ORDERS = {"massdiff": massdiff, "zigzag": zigzag, "absmax": absmax}


@dataclass(frozen=True)
class Permute(Checked):
    """Puts channels into another order, in all parameters around them: the float model's function stays, at no cost.

    | method | order |
    |---|---|
    | "massdiff" | blocks whose sums of mean magnitudes are nearly equal (`massdiff`) |
    | "zigzag" | blocks that choose by turns, to and fro, the channel with the largest magnitude |
    | "absmax" | by the largest magnitude: channels of a block are alike, for quantizers with a scale for each |

    The first two come before `Rotate(block=...)`: a matrix of a block spreads what is large over that block alone, so
    the largest number after it is least where large channels are spread over the blocks. Channels are those of
    the residual stream, with the gains of its norms; of what comes out of a nonlinearity; of values within a head of
    attention. Which parameters these are is found from the program; where something depends on the order, such as RoPE
    or the model's inputs and outputs, it stays, and the report says why.

    Args:
        method: the order.
        block: how many channels a block has.

    Raises:
        ValueError: an unknown method, or a block of less than 2; or, when applied, the float model's outputs move.

    Source: Sanjeet et al., "MixQuant: Pushing the Limits of Block Rotations in Post-Training Quantization", 2026;
    Lin et al., "DuQuant: Distributing Outliers via Dual Transformation Makes Stronger Quantized LLMs", 2024 (zigzag);
    Brevitas's `GraphPermutationEqualization`.

    Differs from Brevitas: the residual stream's gains need not be folded before; magnitudes are means over each site's
    samples, so that all sites that contract the channels count alike.

    Example:
        >>> Permute("zigzag", block=16)
        Permute(method='zigzag', block=16)
    """

    method: Literal["massdiff", "zigzag", "absmax"] = "massdiff"
    block: Annotated[int, at_least(2)] = 32

    def __call__(self, work: Work) -> list[Note]:
        """See `Pass`."""
        change = FloatChange(work, repr(self), ("magnitude", "largest", "smallest"))
        for site, region in permuted_regions(change.flat):
            why = region if isinstance(region, str) else self._why_not(region.block)
            if why or isinstance(region, str):
                change.done.append(Note(site.name, site.path, reason=why))
            else:
                change.done.append(self._permuted(change, site, region))
        return change.finish()

    def _why_not(self, channels: int) -> str:
        if channels <= self.block:
            return f"its {channels} channels that stay together are no more than a block of {self.block}"
        return (
            f"blocks of {self.block} do not divide its {channels} channels" if channels % self.block else ""
        )

    def _permuted(self, change: FloatChange, site: ContractionSite, region: RotatedRegion) -> Note:
        def of_inputs(name: str, reduce: np.ufunc, start: float) -> np.ndarray:
            pairs = [(region.labels(own), change.statistics[own.name]) for own in region.sites]
            numbers = ((labels, on_host(statistics.mean(name))) for labels, statistics in pairs)
            spread = ((np.broadcast_to(labels, x.shape), x) for labels, x in numbers)
            return per_channel(region.block, spread, reduce, start)

        mass = of_inputs("magnitude", np.add, 0.0)
        high, low = of_inputs("largest", np.maximum, -np.inf), of_inputs("smallest", np.minimum, np.inf)
        sizes = mass if self.method == "massdiff" else np.maximum(np.abs(high), np.abs(low))
        order = ORDERS[self.method](sizes, self.block)
        taken = partial(jnp.take, indices=jnp.asarray(order), axis=-1)
        change.change(site.name, [(path, partial(region.mapped, path, taken)) for path in region.parameters])
        heaviest = [float(x.reshape(-1, self.block).sum(1).max()) for x in (mass, mass[order])]
        mean = float(mass.sum()) * self.block / region.block or 1.0
        what = (
            f"{region.block} channels in blocks of {self.block}; the sum of magnitudes of the heaviest block, over the "
            f"mean, from {heaviest[0] / mean:.3g} to {heaviest[1] / mean:.3g}; in {', '.join(region.parameters)}"
        )
        facts = {"block": self.block, "channels": tuple(order.tolist()), "folded": tuple(region.parameters)}
        return Note(", ".join(sorted(own.name for own in region.sites)), "", what, facts)
