"""Reports of what loading and re-assembly did, for people and programs."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReassemblyReport:
    """What re-assembly did.

    Attributes:
        reassembled: paths of the re-assembled proxies.
        replaced: those whose quantizer is a new object, because its structure, shapes or dtypes changed: optimizers,
            `nnx.view`s and `nnx.cached_partial`s made before must be recreated.
    """

    reassembled: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        lines = [f"re-assembled {_count(self.reassembled, 'quantizer')}"]
        if self.replaced:
            lines.append(
                f"replaced {_count(self.replaced, 'quantizer')} (structure or shapes changed; make optimizers, views "
                f"and cached_partials again): {', '.join(self.replaced)}"
            )
        return lines


@dataclass(frozen=True)
class LoadReport(ReassemblyReport):
    """What `load_state` did.

    Attributes:
        loaded: paths that were written from the state.
        missing: paths that the state does not hold, except those of quantizers that were re-assembled or kept.
        base: instead, if the state holds adapters alone: what they lie beside, which stays as it is.
        cast: path -> "dtype -> dtype" for floats of another width.
        not_finite: paths of loaded weights that hold nan or inf.
        kept: paths of activation and gradient quantizers of the layers whose weights were loaded. They do not depend on
            weights, and keep what they learned and collected if the state holds nothing for them.
        below_zero: paths of learned scales below 0, whose magnitude counts.
        transformed: quantizers with a transform before them, for which weights are stored, if the state holds no
            quantizers and so knows nothing of it.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    base: tuple[str, ...] = ()
    cast: dict[str, str] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    below_zero: tuple[str, ...] = ()
    transformed: tuple[str, ...] = ()

    def _lines(self) -> list[str]:
        lines = [f"loaded {_count(self.loaded, 'variable')}"]
        if self.missing:
            lines.append(f"not in the state: {', '.join(self.missing)}")
        if self.base:
            lines.append(
                f"the state holds adapters alone: kept {_count(self.base, 'variable')} of their base"
            )
        if self.cast:
            lines.append("cast: " + ", ".join(f"{path} ({how})" for path, how in self.cast.items()))
        if self.not_finite:
            lines.append(f"nan or inf in: {', '.join(self.not_finite)}")
        if self.below_zero:
            lines.append(f"scales below 0, read by their magnitude: {', '.join(self.below_zero)}")
        if self.transformed:
            lines.append(f"weights are stored for transforms of inputs here: {', '.join(self.transformed)}")
        lines += super()._lines()
        if self.kept:
            lines.append(
                f"kept {_count(self.kept, 'quantizer')} that no weight decides: {', '.join(self.kept)}"
            )
        return lines


def _count(items: tuple[str, ...], what: str) -> str:
    return f"{len(items)} {what}{'' if len(items) == 1 else 's'}"
