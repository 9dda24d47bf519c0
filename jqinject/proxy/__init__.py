"""Proxies: which tensor of which layer is quantized, and when its quantizer is put together.

There is one class for each role. What the numbers are (integers, minifloats, a table, with or without groups) is what
the quantizer and its result say.
"""

import warnings
from typing import TYPE_CHECKING, Any

from jqinject.proxy.act import ActQuantProxyFromInjector as ActQuantProxyFromInjector
from jqinject.proxy.act import GradQuantProxyFromInjector as GradQuantProxyFromInjector
from jqinject.proxy.act import TruncQuantProxyFromInjector as TruncQuantProxyFromInjector
from jqinject.proxy.assembly import build_stacked as build_stacked
from jqinject.proxy.assembly import stack_of as stack_of
from jqinject.proxy.assembly import write as write
from jqinject.proxy.base import DistantWeight as DistantWeight
from jqinject.proxy.base import QuantizerLike as QuantizerLike
from jqinject.proxy.base import QuantizerReplacedWarning as QuantizerReplacedWarning
from jqinject.proxy.base import QuantProxyFromInjector as QuantProxyFromInjector
from jqinject.proxy.base import WeightLayer as WeightLayer
from jqinject.proxy.base import beside_weights as beside_weights
from jqinject.proxy.links import LINKS as LINKS
from jqinject.proxy.links import check_range as check_range
from jqinject.proxy.links import complete as complete
from jqinject.proxy.links import has_transform as has_transform
from jqinject.proxy.links import linked_layers as linked_layers
from jqinject.proxy.links import note_of_transform as note_of_transform
from jqinject.proxy.links import relink as relink
from jqinject.proxy.links import transform_of as transform_of
from jqinject.proxy.links import transformed as transformed
from jqinject.proxy.weight import BiasQuantProxyFromInjector as BiasQuantProxyFromInjector
from jqinject.proxy.weight import InputFormat as InputFormat
from jqinject.proxy.weight import WeightQuantProxyFromInjector as WeightQuantProxyFromInjector

ActQuantProxy = ActQuantProxyFromInjector
GradQuantProxy = GradQuantProxyFromInjector
WeightQuantProxy = WeightQuantProxyFromInjector

# Names by format, as in Brevitas: deprecated, each stands for the class of its role.
_BY_FORMAT = {
    "ActFloatQuantProxyFromInjector": ActQuantProxyFromInjector,
    "DynamicActFloatQuantProxyFromInjector": ActQuantProxyFromInjector,
    "DynamicActQuantProxyFromInjector": ActQuantProxyFromInjector,
    "GroupwiseActFloatQuantProxyFromInjector": ActQuantProxyFromInjector,
    "GroupwiseActQuantProxyFromInjector": ActQuantProxyFromInjector,
    "GroupwiseGradQuantProxyFromInjector": GradQuantProxyFromInjector,
    "DecoupledWeightQuantProxyFromInjector": WeightQuantProxyFromInjector,
    "DecoupledWeightQuantWithInputProxyFromInjector": WeightQuantProxyFromInjector,
    "GroupwiseWeightFloatQuantProxyFromInjector": WeightQuantProxyFromInjector,
    "GroupwiseWeightQuantProxyFromInjector": WeightQuantProxyFromInjector,
    "WeightFloatQuantProxyFromInjector": WeightQuantProxyFromInjector,
}


if not TYPE_CHECKING:  # it would hide misspelt names

    def __getattr__(name: str) -> Any:
        if name not in _BY_FORMAT:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        role = _BY_FORMAT[name]
        warnings.warn(
            f"jqinject.proxy.{name} is deprecated: one class serves all formats. Use {role.__name__}.",
            DeprecationWarning,
            stacklevel=2,
        )
        return role
