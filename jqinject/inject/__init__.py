"""Pure wiring: injectors, the resolver behind them, and their errors. Knows no array library but numpy."""

from jqinject.inject.binding import Binding as Binding
from jqinject.inject.dependencies_library import DependencyError as DependencyError
from jqinject.inject.explain import Node as Node
from jqinject.inject.explain import explain as explain
from jqinject.inject.explain import reach_of as reach_of
from jqinject.inject.injector import ExtendedInjector as ExtendedInjector
from jqinject.inject.names import check_declarations as check_declarations
from jqinject.inject.names import declared_names as declared_names
from jqinject.inject.names import requested_names as requested_names
from jqinject.inject.names import unasked_names as unasked_names
from jqinject.inject.overrides import check_lets as check_lets
from jqinject.inject.overrides import check_overrides as check_overrides
from jqinject.inject.resolver import resolve as resolve
from jqinject.inject.specs import choices as choices
from jqinject.inject.specs import this as this
from jqinject.inject.specs import value as value
