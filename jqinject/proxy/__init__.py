"""Proxies: which tensor of which layer is quantized, and when its quantizer is put together."""

from jqinject.proxy._protocols import WeightLayer as WeightLayer
from jqinject.proxy.act import ActQuantProxy as ActQuantProxy
from jqinject.proxy.act import ActQuantProxyFromInjector as ActQuantProxyFromInjector
from jqinject.proxy.act import DynamicActQuantProxyFromInjector as DynamicActQuantProxyFromInjector
from jqinject.proxy.act_float import ActFloatQuantProxyFromInjector as ActFloatQuantProxyFromInjector
from jqinject.proxy.act_float import (
    DynamicActFloatQuantProxyFromInjector as DynamicActFloatQuantProxyFromInjector,
)
from jqinject.proxy.assembly import build_stacked as build_stacked
from jqinject.proxy.assembly import stack_of as stack_of
from jqinject.proxy.assembly import write as write
from jqinject.proxy.base import QuantizerLike as QuantizerLike
from jqinject.proxy.base import QuantProxyFromInjector as QuantProxyFromInjector
from jqinject.proxy.bias import BiasQuantProxyFromInjector as BiasQuantProxyFromInjector
from jqinject.proxy.grad import GradQuantProxy as GradQuantProxy
from jqinject.proxy.grad import GradQuantProxyFromInjector as GradQuantProxyFromInjector
from jqinject.proxy.grad import (
    GroupwiseGradQuantProxyFromInjector as GroupwiseGradQuantProxyFromInjector,
)
from jqinject.proxy.group_proxies import (
    GroupwiseActQuantProxyFromInjector as GroupwiseActQuantProxyFromInjector,
)
from jqinject.proxy.group_proxies import (
    GroupwiseWeightQuantProxyFromInjector as GroupwiseWeightQuantProxyFromInjector,
)
from jqinject.proxy.groupwise_float import (
    GroupwiseActFloatQuantProxyFromInjector as GroupwiseActFloatQuantProxyFromInjector,
)
from jqinject.proxy.groupwise_float import (
    GroupwiseWeightFloatQuantProxyFromInjector as GroupwiseWeightFloatQuantProxyFromInjector,
)
from jqinject.proxy.links import LINKS as LINKS
from jqinject.proxy.links import complete as complete
from jqinject.proxy.links import linked_layers as linked_layers
from jqinject.proxy.links import relink as relink
from jqinject.proxy.ranges import check_range as check_range
from jqinject.proxy.sharing import QuantizerReplacedWarning as QuantizerReplacedWarning
from jqinject.proxy.trunc import TruncQuantProxyFromInjector as TruncQuantProxyFromInjector
from jqinject.proxy.weight import WeightQuantProxy as WeightQuantProxy
from jqinject.proxy.weight import WeightQuantProxyFromInjector as WeightQuantProxyFromInjector
from jqinject.proxy.weight_decoupled import (
    DecoupledWeightQuantProxyFromInjector as DecoupledWeightQuantProxyFromInjector,
)
from jqinject.proxy.weight_decoupled import (
    DecoupledWeightQuantWithInputProxyFromInjector as DecoupledWeightQuantWithInputProxyFromInjector,
)
from jqinject.proxy.weight_decoupled import InputFormat as InputFormat
from jqinject.proxy.weight_float import WeightFloatQuantProxyFromInjector as WeightFloatQuantProxyFromInjector
