"""Warnings and errors about quantizers that layers share, or that were replaced under an optimizer."""

from flax import nnx


class QuantizerReplacedWarning(UserWarning):
    """Re-assembly gave a quantizer other learned parameters than it had: an optimizer made before no longer fits."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"re-assembly replaced the quantizer of {name} by one with other parameters. Make the optimizer again "
            "(nnx.Optimizer(model, ...)), and nnx.view and nnx.cached_partial objects too; optimizer.update would fail."
        )


def refuse_tree_mode() -> None:
    """Raise if NNX is in a mode without shared objects.

    Raises:
        ValueError: NNX is in tree mode.
    """
    if not nnx.set_graph_mode.current_value():
        raise ValueError(
            "two layers cannot share one quantizer in NNX's tree mode, which has no shared objects.\n"
            "  cure: leave tree mode (nnx.set_graph_mode(True)), or give each layer a quantizer of its own: "
            "weight_quant=MyQuantizer instead of weight_quant=other.weight_quant"
        )
