"""Operations on whole models: quantizing, calibration, freezing, checkpoints, training steps and reports."""

from jqinject.model.caches import quantized_cache as quantized_cache
from jqinject.model.calibration import CalibrationReport as CalibrationReport
from jqinject.model.calibration import calibrate as calibrate
from jqinject.model.compiled_model import CompiledModel as CompiledModel
from jqinject.model.compiled_model import compiled as compiled
from jqinject.model.freezing import NothingFrozenWarning as NothingFrozenWarning
from jqinject.model.freezing import freeze as freeze
from jqinject.model.freezing import unfreeze as unfreeze
from jqinject.model.inspect.coverage import Coverage as Coverage
from jqinject.model.inspect.coverage import coverage as coverage
from jqinject.model.inspect.layer_numbers import Histogram as Histogram
from jqinject.model.inspect.layer_numbers import Histograms as Histograms
from jqinject.model.inspect.layer_numbers import History as History
from jqinject.model.inspect.layer_numbers import LayerNumbers as LayerNumbers
from jqinject.model.inspect.layer_numbers import Saturation as Saturation
from jqinject.model.inspect.report import ContractionReport as ContractionReport
from jqinject.model.inspect.report import report as report
from jqinject.model.inspect.site_table import SiteRow as SiteRow
from jqinject.model.inspect.training_bytes import SiteResiduals as SiteResiduals
from jqinject.model.inspect.training_bytes import TrainingBytes as TrainingBytes
from jqinject.model.lora.adapting import lora as lora
from jqinject.model.lora.merging import LossyMergeWarning as LossyMergeWarning
from jqinject.model.lora.merging import merge_lora as merge_lora
from jqinject.model.quantizing.check_rules import LowCoverageWarning as LowCoverageWarning
from jqinject.model.quantizing.check_rules import OwnDerivativeWarning as OwnDerivativeWarning
from jqinject.model.quantizing.quantize_model import initialize as initialize
from jqinject.model.quantizing.quantize_model import quantize as quantize
from jqinject.model.quantizing.quantize_model import quantize_function as quantize_function
from jqinject.model.quantizing.rules import Rule as Rule
from jqinject.model.quantizing.rules_report import RulesReport as RulesReport
from jqinject.model.quantizing.rules_report import rules_report as rules_report
from jqinject.model.state.load_frozen import LowBits as LowBits
from jqinject.model.state.load_frozen import load_frozen as load_frozen
from jqinject.model.state.loading import LoadReport as LoadReport
from jqinject.model.state.loading import ReassemblyReport as ReassemblyReport
from jqinject.model.state.loading import load_state as load_state
from jqinject.model.state.loading import reassemble as reassemble
from jqinject.model.state.refresh import RefreshReport as RefreshReport
from jqinject.model.state.refresh import refresh as refresh
from jqinject.model.status import quantization_status_manager as quantization_status_manager
from jqinject.model.train.autodiff import grad as grad
from jqinject.model.train.autodiff import value_and_grad as value_and_grad
from jqinject.model.train.bit_width_loss import (
    ActivationBitWidthWeightedBySize as ActivationBitWidthWeightedBySize,
)
from jqinject.model.train.bit_width_loss import (
    QuantLayerOutputBitWidthWeightedByOps as QuantLayerOutputBitWidthWeightedByOps,
)
from jqinject.model.train.bit_width_loss import WeightBitWidthWeightedBySize as WeightBitWidthWeightedBySize
from jqinject.model.train.steps import begin_step as begin_step
from jqinject.model.train.steps import end_step as end_step
