"""Whole models: loading, re-assembly, and training steps whose statistics are right."""

from jqinject.model.autodiff import grad as grad
from jqinject.model.autodiff import value_and_grad as value_and_grad
from jqinject.model.batch_norm import calibrate_batch_norm as calibrate_batch_norm
from jqinject.model.bias_correction import correct_biases as correct_biases
from jqinject.model.bit_width_loss import (
    ActivationBitWidthWeightedBySize as ActivationBitWidthWeightedBySize,
)
from jqinject.model.bit_width_loss import (
    QuantLayerOutputBitWidthWeightedByOps as QuantLayerOutputBitWidthWeightedByOps,
)
from jqinject.model.bit_width_loss import WeightBitWidthWeightedBySize as WeightBitWidthWeightedBySize
from jqinject.model.calibration import CalibrationReport as CalibrationReport
from jqinject.model.calibration import calibrate as calibrate
from jqinject.model.contraction_report import report as report
from jqinject.model.freezing import NothingFrozenWarning as NothingFrozenWarning
from jqinject.model.freezing import freeze as freeze
from jqinject.model.freezing import unfreeze as unfreeze
from jqinject.model.histograms import Histogram as Histogram
from jqinject.model.histories import History as History
from jqinject.model.layer_numbers import Histograms as Histograms
from jqinject.model.layer_numbers import LayerNumbers as LayerNumbers
from jqinject.model.layer_numbers import Saturation as Saturation
from jqinject.model.layer_report import ContractionReport as ContractionReport
from jqinject.model.layer_report import LayerReport as LayerReport
from jqinject.model.learned_rounding import RoundingReport as RoundingReport
from jqinject.model.learned_rounding import learn_rounding as learn_rounding
from jqinject.model.loading import load_state as load_state
from jqinject.model.merging import merge_batch_norm as merge_batch_norm
from jqinject.model.outcome import LoadReport as LoadReport
from jqinject.model.outcome import ReassemblyReport as ReassemblyReport
from jqinject.model.post_training import post_training_quantize as post_training_quantize
from jqinject.model.quantizing import quantize as quantize
from jqinject.model.reassembly import reassemble as reassemble
from jqinject.model.round_training import RoundingErrors as RoundingErrors
from jqinject.model.rules import Rule as Rule
from jqinject.model.rules_report import RulesReport as RulesReport
from jqinject.model.rules_report import rules_report as rules_report
from jqinject.model.status import quantization_status_manager as quantization_status_manager
from jqinject.model.steps import begin_step as begin_step
from jqinject.model.steps import end_step as end_step
