"""jqinject: dependency-injected quantizers for JAX and Flax NNX.

A quantizer is a class, a flat list of named choices that assembles itself:

    class W4(Int8WeightPerChannelFloat):
        bit_width = 4

    layer = QuantLinear(64, 32, weight_quant=W4, input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
    twin = QuantLinear(64, 32, weight_quant=layer.weight_quant, rngs=nnx.Rngs(1))  # share the quantizer itself
    jqinject.load_state(model, float_checkpoint)  # weights in; every quantizer re-assembled from them

Rooms: `inject` (declare and wire), `core` (components), `quant` (ready-made quantizers), `proxy` (which tensor of which
layer), `nn` (layers), `quant_tensor` (what flows between layers), `program` (what layers do not hold), `model` (whole
models), `odml` and `export` (for other compilers).
"""

import importlib as _importlib
import typing as _typing

from jqinject.inject import DependencyError as DependencyError
from jqinject.inject import ExtendedInjector as ExtendedInjector
from jqinject.inject import explain as explain
from jqinject.inject import this as this
from jqinject.inject import value as value
from jqinject.inject.errors import did_you_mean as _did_you_mean

if _typing.TYPE_CHECKING:
    from jqinject import checkpoint_policies as checkpoint_policies
    from jqinject import core as core
    from jqinject import dot as dot
    from jqinject import export as export
    from jqinject import nn as nn
    from jqinject import odml as odml
    from jqinject import quant as quant
    from jqinject import quant_tensor as quant_tensor
    from jqinject.core import GatheredWarning as GatheredWarning
    from jqinject.core import LostStateWarning as LostStateWarning
    from jqinject.core import UncalibratedWarning as UncalibratedWarning
    from jqinject.model import LossyMergeWarning as LossyMergeWarning
    from jqinject.model import LowCoverageWarning as LowCoverageWarning
    from jqinject.model import OwnDerivativeWarning as OwnDerivativeWarning
    from jqinject.model import Rule as Rule
    from jqinject.model import begin_step as begin_step
    from jqinject.model import calibrate as calibrate
    from jqinject.model import compiled as compiled
    from jqinject.model import coverage as coverage
    from jqinject.model import end_step as end_step
    from jqinject.model import freeze as freeze
    from jqinject.model import grad as grad
    from jqinject.model import initialize as initialize
    from jqinject.model import load_frozen as load_frozen
    from jqinject.model import load_state as load_state
    from jqinject.model import lora as lora
    from jqinject.model import merge_lora as merge_lora
    from jqinject.model import quantization_status_manager as quantization_status_manager
    from jqinject.model import quantize as quantize
    from jqinject.model import quantize_function as quantize_function
    from jqinject.model import quantized_cache as quantized_cache
    from jqinject.model import reassemble as reassemble
    from jqinject.model import refresh as refresh
    from jqinject.model import report as report
    from jqinject.model import rules_report as rules_report
    from jqinject.model import unfreeze as unfreeze
    from jqinject.model import value_and_grad as value_and_grad
    from jqinject.program import FunctionModel as FunctionModel
    from jqinject.quant_tensor import FloatQuantTensor as FloatQuantTensor
    from jqinject.quant_tensor import IntQuantTensor as IntQuantTensor
    from jqinject.recipes import calibrate_batch_norm as calibrate_batch_norm
    from jqinject.recipes import correct_biases as correct_biases
    from jqinject.recipes import fold_batch_norm as fold_batch_norm
    from jqinject.recipes import learn_rounding as learn_rounding
    from jqinject.recipes import merge_batch_norm as merge_batch_norm
    from jqinject.recipes import post_training_quantize as post_training_quantize

__version__ = "0.3.0"

# Without ExtendedInjector: `help` cannot read classes whose metaclass comes from `dependencies`, and would fail on all.
__all__ = [
    "DependencyError",
    "FloatQuantTensor",
    "FunctionModel",
    "GatheredWarning",
    "IntQuantTensor",
    "LossyMergeWarning",
    "LostStateWarning",
    "LowCoverageWarning",
    "OwnDerivativeWarning",
    "Rule",
    "UncalibratedWarning",
    "begin_step",
    "calibrate",
    "calibrate_batch_norm",
    "checkpoint_policies",
    "compiled",
    "correct_biases",
    "coverage",
    "end_step",
    "explain",
    "export",
    "fold_batch_norm",
    "freeze",
    "grad",
    "initialize",
    "learn_rounding",
    "load_frozen",
    "load_state",
    "lora",
    "merge_batch_norm",
    "merge_lora",
    "odml",
    "post_training_quantize",
    "quantization_status_manager",
    "quantize",
    "quantize_function",
    "quantized_cache",
    "reassemble",
    "refresh",
    "report",
    "rules_report",
    "this",
    "unfreeze",
    "value",
    "value_and_grad",
]

# Where the names are that are loaded when they are first asked for: `import jqinject` takes no time, and who uses one
# room waits for the rooms below it alone.
_PLACES = {
    "GatheredWarning": "jqinject.core",
    "LostStateWarning": "jqinject.core",
    "UncalibratedWarning": "jqinject.core",
    "LossyMergeWarning": "jqinject.model",
    "LowCoverageWarning": "jqinject.model",
    "OwnDerivativeWarning": "jqinject.model",
    "Rule": "jqinject.model",
    "begin_step": "jqinject.model",
    "calibrate": "jqinject.model",
    "calibrate_batch_norm": "jqinject.recipes",
    "compiled": "jqinject.model",
    "correct_biases": "jqinject.recipes",
    "coverage": "jqinject.model",
    "end_step": "jqinject.model",
    "fold_batch_norm": "jqinject.recipes",
    "freeze": "jqinject.model",
    "grad": "jqinject.model",
    "initialize": "jqinject.model",
    "learn_rounding": "jqinject.recipes",
    "load_frozen": "jqinject.model",
    "load_state": "jqinject.model",
    "lora": "jqinject.model",
    "merge_batch_norm": "jqinject.recipes",
    "merge_lora": "jqinject.model",
    "post_training_quantize": "jqinject.recipes",
    "quantization_status_manager": "jqinject.model",
    "quantize": "jqinject.model",
    "quantize_function": "jqinject.model",
    "quantized_cache": "jqinject.model",
    "reassemble": "jqinject.model",
    "refresh": "jqinject.model",
    "report": "jqinject.model",
    "rules_report": "jqinject.model",
    "unfreeze": "jqinject.model",
    "value_and_grad": "jqinject.model",
    "FunctionModel": "jqinject.program",
    "FloatQuantTensor": "jqinject.quant_tensor",
    "IntQuantTensor": "jqinject.quant_tensor",
}
_ROOMS = {
    "checkpoint_policies",
    "core",
    "dot",
    "export",
    "formats",
    "inject",
    "model",
    "native",
    "nn",
    "odml",
    "ops",
    "optim",
    "program",
    "proxy",
    "quant",
    "quant_tensor",
    "recipes",
}


if not _typing.TYPE_CHECKING:  # it would hide misspelt names

    def __getattr__(name: str) -> _typing.Any:
        if name in _ROOMS:
            return _importlib.import_module(f"{__name__}.{name}")
        if name not in _PLACES:
            near = _did_you_mean(name, __dir__())
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near and ': ' + near}")
        attribute = globals()[name] = getattr(_importlib.import_module(_PLACES[name]), name)
        return attribute


# The rooms that users import from; the others are for the library itself.
_SHOWN = {"checkpoint_policies", "core", "dot", "export", "nn", "odml", "quant", "quant_tensor"}


def __dir__() -> list[str]:
    return sorted({*__all__, *_SHOWN, "ExtendedInjector", "__all__", "__doc__", "__version__"})
