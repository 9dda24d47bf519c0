"""An injector with the overrides given where it is used, and the check that each override is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jqinject.inject import (
    Binding,
    ExtendedInjector,
    check_declarations,
    check_overrides,
    declared_names,
    overrides_given,
    reach_of,
    requested_names,
)
from jqinject.proxy.naming import is_ours

_METADATA = frozenset({"narrow_range", "float_to_int_impl_type"})  # what proxies report about quantizers
_GROUPS = frozenset({"group_size", "group_dim"})  # read for a user's own quantizer
_NAMES = frozenset({"tensor_quant", "proxy_class", "signed"}) | _METADATA


def asks_for_layers(binding: Binding) -> bool:
    """Whether anything in the wiring asks for a layer, or for its parameters."""
    read = reach_of(binding.injector, module=(), tracked_parameter_list=()).names
    return not read.isdisjoint(("module", "tracked_parameter_list"))


@dataclass(frozen=True)
class DeclaredInjector:
    """An injector with its overrides.

    Attributes:
        binding: both as one.
        names: everything overridden: by keywords, by `let`, in a binding.
        overrides: those of them given as keywords.
        where: what the user called and the prefix of these.
    """

    binding: Binding
    names: tuple[str, ...]
    overrides: Mapping[str, Any]
    where: tuple[str, str]

    @classmethod
    def of(
        cls,
        injector: type[ExtendedInjector] | Binding,
        overrides: Mapping[str, Any] | None,
        offered: Mapping[str, Any] | None,
        where: tuple[str, str],
    ) -> "DeclaredInjector":
        """See `QuantProxyFromInjector` for the arguments."""
        binding = injector if isinstance(injector, Binding) else Binding(injector)
        binding = binding.let(**overrides) if overrides else binding
        names = tuple(overrides_given(binding.injector))
        if offered:
            asked = requested_names(binding.injector) - set(names)
            taken = {name: value for name, value in offered.items() if name in asked}
            binding = binding.let(**taken) if taken else binding
        return cls(binding, names, overrides or {}, where)

    def check_known(self, traced: set[str]) -> None:
        """Reject unknown names.

        Args:
            traced: the names that were asked for so far.
        """
        self._check(_NAMES | traced, None, {})

    def check_read(self, proxy: Any, quantizer: Any, traced: set[str], handed: Mapping[str, Any]) -> None:
        """Reject names that neither the quantizer, as it is wired, nor the proxy reads.

        Args:
            proxy: the proxy.
            quantizer: what was assembled.
            traced: the names that were asked for meanwhile.
            handed: what the assembly was handed.
        """
        if self.names:
            read = traced | proxy.reads
            if self.binding.declares("proxy_class"):
                self.binding.resolve("proxy_class", trace=read)
            if quantizer is not None and not is_ours(type(quantizer)):
                read |= _METADATA | _GROUPS
            if not is_ours(type(proxy)) and "reads" not in vars(type(proxy)):
                read |= declared_names(self.binding.base)  # any of which it may read when it is called
            self._check(frozenset(), read, handed)
        check_declarations(self.binding.injector, known=_NAMES | traced)

    def _check(
        self, known: frozenset[str] | set[str], read: set[str] | None, handed: Mapping[str, Any]
    ) -> None:
        beside = [name for name in self.names if name in self.overrides]
        before = [name for name in self.names if name not in self.overrides]
        for names, (where, prefix) in ((beside, self.where), (before, ("", ""))):
            check_overrides(
                self.binding.injector,
                names,
                known=known,
                read=read,
                given=handed,
                where=where,
                prefix=prefix,
            )
