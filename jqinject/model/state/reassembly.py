"""Re-assembles the quantizers of a model from its current weights."""

from collections.abc import Iterable
from typing import Any

from jqinject.model.state.reports import ReassemblyReport
from jqinject.model.walk import Holders, ModelIndex, dotted


def reassemble(model: Any) -> ReassemblyReport:
    """Re-assemble every quantizer of a model, from the layers that hold it.

    For use after writing weights by other means than `load_state` (`nnx.update`, in-place writes). The layers are found
    by walking the model, so this also works for clones, copies, unpickled and merged models. A quantizer of the same
    structure keeps its Variables and takes the new values; learned scales and statistics start afresh.

    Args:
        model: a module; shared quantizers are found wherever they are held.

    Returns:
        A report.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(8, 4, rngs=nnx.Rngs(0))
        >>> fc.kernel[...] = jnp.ones((8, 4))
        >>> reassemble(fc).reassembled
        ('weight_quant',)
    """
    return reassemble_held(ModelIndex(model).proxies)


def reassemble_held(held: Iterable[Holders]) -> ReassemblyReport:
    """Re-assemble the given proxies, each from the layers that hold it."""
    done, replaced = [], []
    for entry in held:
        path = dotted(entry.paths[0])
        done.append(path)
        try:
            other = entry.proxy.init_tensor_quant(*entry.layers)
        except Exception as error:
            error.add_note(f"while re-assembling {path}")
            raise
        if other:
            replaced.append(path)
    return ReassemblyReport(tuple(done), tuple(replaced))
