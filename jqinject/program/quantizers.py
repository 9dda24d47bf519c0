"""The quantizers of a program's sites, and how their state crosses loops and rematerialized parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import jax
from flax import nnx

from jqinject.inject.errors import did_you_mean
from jqinject.program.policy import Site
from jqinject.proxy import ActQuantProxyFromInjector, check_range
from jqinject.quant_tensor import as_array


class Quantizers(Protocol):
    """The quantizers that the interpreter uses."""

    @abstractmethod
    def quantize(self, site: Site, x: jax.Array) -> jax.Array:
        """`x`, quantized and dequantized."""

    @abstractmethod
    def state(self, names: Iterable[str]) -> Any:
        """The arrays that the quantizers at some sites may change."""

    @abstractmethod
    def restored(self, state: Any) -> Quantizers:
        """Quantizers like these, with that state."""

    @abstractmethod
    def update(self, state: Any) -> None:
        """Adopt a state."""


class Finder:
    """Quantizes nothing: for a run that only finds the sites."""

    def quantize(self, site: Site, x: jax.Array) -> jax.Array:
        """`x` as it is."""
        return x

    def state(self, names: Iterable[str]) -> Any:
        """None."""
        return ()

    def restored(self, state: Any) -> Finder:
        """Itself."""
        return self

    def update(self, state: Any) -> None:
        """Has no effect."""


class HeldQuantizers:
    """The quantizers that a model holds, by the names of their sites.

    Args:
        held: name -> proxy.
    """

    def __init__(self, held: Mapping[str, ActQuantProxyFromInjector]) -> None:
        self._held = held
        self._graphdef: Any = None

    def quantize(self, site: Site, x: jax.Array) -> jax.Array:
        """`x` through its quantizer.

        Raises:
            ValueError: the model was quantized for a program that has no such site.
        """
        if site.name not in self._held:
            hint = did_you_mean(site.name, self._held)
            raise ValueError(
                f"{site.name} has no quantizer: the call runs operations that were not there when the model was "
                f"quantized{'; ' + hint if hint else '.'}\n"
                "  cure: quantize it with inputs that lead through them, in the mode that it is called in"
            )
        proxy = self._held[site.name]
        if proxy.is_quant_enabled:
            check_range(proxy, x, f"op_quant[{site.name!r}]")
        return as_array(proxy(x))

    def state(self, names: Iterable[str]) -> Any:
        """The Variables of some quantizers, as a state."""
        chosen = {name: self._held[name] for name in sorted(names) if name in self._held}
        self._graphdef, state = nnx.split(nnx.Dict(chosen), graph=True)
        return state

    def restored(self, state: Any) -> HeldQuantizers:
        """Copies with that state."""
        copies = nnx.merge(self._graphdef, state)
        return HeldQuantizers({name: copies[name] for name in copies})

    def update(self, state: Any) -> None:
        """Write a state into the quantizers."""
        for name, part in state.items():
            nnx.update(self._held[name], part)
