"""What the proxies of activations, gradients and accumulators share: they quantize what a running layer is given."""

from typing import Any

from jqinject.proxy.number_format import FormatQueries


class RunTimeQuantProxy(FormatQueries):
    """Abstract: quantizes tensors that come at run time, so that its quantizer needs no layer."""

    def depends_on_layers(self) -> bool:
        """Only if the injector asks for `module`, which none of the ready-made ones does."""
        return self._asks_for_layers()

    def _tracked_parameters(self, layers: tuple[Any, ...]) -> list[Any]:
        return []

    def _stack(self, layers: tuple[Any, ...]) -> tuple[int, ...]:
        # Nothing depends on how many layers are stacked: values are broadcast into the stack.
        return ()
