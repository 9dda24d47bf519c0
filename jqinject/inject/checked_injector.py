"""`CheckedInjector`: injectors that are read directly, without a proxy that checks redeclared names."""

import copyreg
from typing import Any

from jqinject.inject.binding import Binding
from jqinject.inject.injector import ExtendedInjector, InjectorMeta, reduced
from jqinject.inject.overrides import check_lets


class CheckedInjectorMeta(InjectorMeta):
    """The metaclass of checked injectors: reading an assembled name checks the names that `let` declared."""

    __assembles__: tuple[str, ...] = ()

    def __new__(
        mcs,
        class_name: str,
        bases: tuple[type, ...],
        namespace: dict[str, object],
        assembles: tuple[str, ...] = (),
    ) -> "CheckedInjectorMeta":
        cls: Any = super().__new__(mcs, class_name, bases, namespace)
        if assembles:
            type.__setattr__(cls, "__assembles__", assembles)
        return cls

    def __init__(cls, *args: object, **kwargs: object) -> None:
        super().__init__(*args)

    def __getattr__(cls, attrname: str) -> Any:
        result = super().__getattr__(attrname)
        if attrname in cls.__assembles__:
            Binding.of(cls).once(_check_assembled)
        return result


def _check_assembled(injector: CheckedInjectorMeta) -> None:
    check_lets(injector, injector.__assembles__)


copyreg.pickle(CheckedInjectorMeta, reduced)  # type: ignore[arg-type]


class CheckedInjector(ExtendedInjector, metaclass=CheckedInjectorMeta):
    """An injector whose overrides are checked when an assembled name is read.

    `class Mine(CheckedInjector, assembles=("product",))`: reading `product` of it or of a subclass refuses names that
    `let` declared, there or in a nested injector, and that the wiring of `product` does not read.

    >>> class Product(CheckedInjector, assembles=("product",)):
    ...     product = 6
    >>> Product.let(produkt=7).product
    Traceback (most recent call last):
    TypeError: Product.let(...): 'produkt' would have no effect: nothing in 'Product' declares or asks for 'produkt'
      did you mean 'product'?
    """
