"""The only import of the `dependencies` library, pinned to 2.0.1 (the release that Brevitas pins too).

It provides the base `Injector` and its metaclass (so that `issubclass(Q, dependencies.Injector)` holds), the
markers `this` and `value` that jqinject's derive from, and the exception. Its resolver is not used, because it
edits the injector while reading it.
"""

from _dependencies.exceptions import DependencyError as DependencyError
from _dependencies.injector import Injector as Injector
from _dependencies.injector import _InjectorType as InjectorType  # pyright: ignore[reportPrivateUsage]
from _dependencies.operation import Operation as Operation
from _dependencies.package import Package as Package
from _dependencies.this import This as This
from _dependencies.value import Value as Value

__all__ = ["DependencyError", "Injector", "InjectorType", "Operation", "Package", "This", "Value"]
