"""Proxies: which tensor of which layer is quantized, and when its quantizer is put together.

There is one class for each role. What the numbers are (integers, minifloats, a table, with or without groups) is what
the quantizer and its result say.
"""

from jqinject.dot.schemes.product_transforms import transform_of as transform_of
from jqinject.dot.schemes.product_transforms import undone_transform_of as undone_transform_of
from jqinject.proxy.act import ActQuantProxyFromInjector as ActQuantProxyFromInjector
from jqinject.proxy.act import GradQuantProxyFromInjector as GradQuantProxyFromInjector
from jqinject.proxy.act import OperandQuantProxyFromInjector as OperandQuantProxyFromInjector
from jqinject.proxy.act import TruncQuantProxyFromInjector as TruncQuantProxyFromInjector
from jqinject.proxy.answers import check_range as check_range
from jqinject.proxy.answers import complete as complete
from jqinject.proxy.answers import links_of as links_of
from jqinject.proxy.answers import restored as restored
from jqinject.proxy.answers import transformed as transformed
from jqinject.proxy.assembly import Committed as Committed
from jqinject.proxy.assembly import QuantizerReplacedWarning as QuantizerReplacedWarning
from jqinject.proxy.assembly import beside_weights as beside_weights
from jqinject.proxy.assembly import build_stacked as build_stacked
from jqinject.proxy.assembly import map_stack as map_stack
from jqinject.proxy.assembly import stack_of as stack_of
from jqinject.proxy.assembly import write as write
from jqinject.proxy.base import QuantizerLike as QuantizerLike
from jqinject.proxy.base import QuantProxyFromInjector as QuantProxyFromInjector
from jqinject.proxy.weight import BiasQuantProxyFromInjector as BiasQuantProxyFromInjector
from jqinject.proxy.weight import IntegerFormat as IntegerFormat
from jqinject.proxy.weight import WeightQuantProxyFromInjector as WeightQuantProxyFromInjector
