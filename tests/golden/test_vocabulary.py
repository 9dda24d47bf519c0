"""Every key and value that cases use, also those that are kept back, is understood by an adapter or out of scope."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.golden import _driver
from tests.golden._config import CannotDrive, settings_of
from tests.golden.adapters import (
    aqt,
    aqt_config,
    aqt_flax,
    aqt_stochastic,
    lowbit_fp8,
    lowbit_mx,
    lowbit_nvfp4,
    lowbit_optim,
    lowbit_quest,
    ptq_autoround,
    ptq_awq,
    ptq_corrections,
    ptq_equalize,
    ptq_layerwise,
    ptq_matrices,
    ptq_smooth,
    qwix,
    qwix_arrays,
    qwix_errors,
    qwix_models,
    qwix_odml,
    qwix_rules,
)

Read = Callable[[dict[str, Any]], Any]
MATMUL = [[[1], [0]], [[], []]]
DOT = {"dimension_numbers": MATMUL, "dtype": "float32"}
OPERANDS = {"lhs_qtype": "int8", "rhs_qtype": "int8"}
CONV = {**OPERANDS, "dimension_numbers": ["NHWC", "HWIO", "NHWC"], "padding": "SAME"}
NOISE = {"n_keys": 2, "shape": [2], "channelwise_noise_axes": [0], "method": "uniform"}
RULE = {"weight_qtype": "int8", "act_qtype": "int8"}
ODML = {"model": "LMlp", "provider": {}, "rule": RULE}
RESIDUAL = {**ODML, "model": "LRes", "model_fields": {"kind": "add"}}
CNN = {**ODML, "model": "LCnn"}

LAYERWISE = {
    **{"peer": "brevitas", "algorithm": "gptq", "hessian": ptq_layerwise.HESSIANS["gptq"], "seed": 1},
    **{"act_order": False, "order": "natural", "scale_rule": "frozen: ", "num_blocks": 1, "batches": 1},
    **{"dead_inputs": None, "conv": None, "layer_sizes": [4, 2], "input_quant": None},
    **{"quantizer": "int8_channel", "quantizer_class": "Int8WeightPerChannelFloat", "overrides": {}},
    "use_quant_activations": True,
}
CONVOLUTION = {"conv": {"kernel": 3, "groups": 1, "stride": 1, "padding": 0, "dilation": 1}}
MAGR = {
    **{"peer": "brevitas", "algorithm": "magr", "alpha": 0.1, "num_steps": 5, "conv": None, "seed": 1},
    **{"hessian": "H = (2/n) sum x x^T, no damping", "lambda_max": "30 power iterations"},
}
COMPRESSOR = {
    **{"peer": "llmcompressor", "algorithm": "gptq", "bits": 4, "strategy": "channel", "symmetric": True},
    "hessian": "H = (2/S) sum x x^T, S = number of sequences (here 8 of 16 tokens)",
}
COMPRESSOR_AWQ = {
    **{"peer": "llmcompressor", "algorithm": "awq", "bits": 4, "strategy": "channel", "symmetric": True},
    **{"group_size": None, "n_grid": 20, "duo_scaling": True, "batches": "4 of 16 rows", "seed": 1},
    "model": "norm -> fc1 (balanced), fc2 not in the mapping",
}
QWIX_AWQ = {
    **{"peer": "qwix", "algorithm": "awq", "bits": 4, "group_size": None, "n_grid": 20, "seed": 1},
}
MODELOPT = {
    **{"peer": "nvidia-modelopt", "algorithm": "awq_lite", "alpha": None, "alpha_step": 0.1, "bits": 4},
    **{"block_size": 16, "batches": "2 of 32 rows", "seed": 1},
}
QWIX_GPTQ = {
    **{"peer": "qwix", "algorithm": "gptq", "bits": 4, "block_size": 8, "percdamp": 0.01, "group_size": None},
    **{
        "dead_inputs": None,
        "seed": 1,
        "hessian": "H = X X^T (no 2, no 1/n); damp = percdamp*mean(diag H) before dead",
    },
    "scale_rule": "absmax/(2^(b-1)-0.5) at the first column of each group, from the matrix",
}
QEP = {
    **{"peer": "qwix", "algorithm": "qep", "correction_factor": 0.5, "damping_factor": 0.01, "seed": 1},
    "hessian": "H = Xq Xq^T, delta = (X - Xq) Xq^T",
}
AUTOROUND = {
    **{"peer": "auto-round", "algorithm": "signround", "bits": 4, "group_size": 8, "iters": 100, "seed": 1},
    **{"symmetric": True, "lr": 0.01, "minmax_lr": 0.01, "minmax_tuning": True, "scale_dtype": "float32"},
    **{"batch": "all 64 rows at every iteration", "driven": "WrapperLinear + SignSGD of the package"},
    **{"loss": "mean squared output error", "schedule": "linear from lr to 0 over iters"},
}
BIASES = {
    **{
        "peer": "brevitas",
        "algorithm": "bias_correction",
        "quantizer": "Int8WeightPerChannelFloat",
        "seed": 1,
    },
    **{"weight_bits": 3, "input_quant": None, "batches": 1, "layer_sizes": [4, 2]},
}
NORMS = {
    **{"peer": "brevitas", "algorithm": "norm_correction", "model": "conv1 - bn1 - relu - conv2", "seed": 1},
    **{"quantizer": "Int8WeightPerChannelFloat, 3 bits, on both convolutions", "batches": 1},
    **{"channels": [3, 4, 2], "kernel": 3, "padding": 0},
}
CROSS_LAYER = {
    **{
        "peer": "brevitas",
        "algorithm": "EqualizeGraph",
        "conv3x3": False,
        "seed": 1,
        "layer_sizes": [4, 5, 6, 3],
    },
    **{"regions": [[["0"], ["2"]], [["2"], ["4"]]], "iterations": 1, "threshold": 0.05},
    **{"scale_computation_type": "maxabs", "merge_bias": True, "bias_shrinkage": "vaiq"},
}
NORMED = {
    **{"peer": "brevitas", "algorithm": "EqualizeGraph", "model": ptq_equalize.NORMED, "seed": 1},
    **{"regions": [[["bn1"], ["conv2"]]], "iterations": 1, "merge_bias": True, "bias_shrinkage": "vaiq"},
}
ACTIVATIONS = {
    **{
        "peer": "brevitas",
        "algorithm": "activation_equalization_mode",
        "model": "ln - fc1 - act - fc2",
        "seed": 1,
    },
    **{"activation": "ReLU", "add_mul_node": False, "layerwise": False, "co_optimize_act_weights": False},
    **{"alpha": 0.5, "batches": 1, "sizes": [4, 6, 3]},
}
MERGED = {"peer": "brevitas", "seed": 1, "sizes": [6, 12, 5]}
SPLITTING = {
    **{"peer": "brevitas", "algorithm": "GraphChannelSplitting", "criterion": "maxabs", "seed": 1},
    **{"layer_sizes": [4, 6, 3], "split_input": False, "split_ratio": 0.3},
}
SMOOTH = {
    **{
        "peer": "llmcompressor",
        "algorithm": "smoothquant",
        "model": "norm -> fc1, fc2",
        "batches": 3,
        "seed": 1,
    },
    "smoothing_strength": 0.5,
}
QWIX_SMOOTH = {
    **{"peer": "qwix", "algorithm": "smooth_quant", "layout": "weight (in, out), x (rows, in)", "seed": 1},
    "alpha": 0.5,
}
MX = {"block": 32, "data": "normal", "element": "e4m3", "input_dtype": "float32", "scale_mode": "FLOOR"}
TE_CURRENT = {
    **{"data": "normal", "eps": 0.0, "fp8": "float8_e4m3fn", "input_dtype": "float32", "seed": 1},
    **{"power_of_two_scale": False, "shape": [4, 8]},
}
TE_CURRENT_GEMM = {
    **{"g": "e5m2", "w": "e4m3", "x": "e4m3", "k": 4, "m": 4, "n": 4, "seed": 1},
    "power_of_two_scale": False,
}
TE_JAX = {
    **{"data": "normal", "flatten_axis": -1, "input_dtype": "float32", "seed": 1, "shape": [4, 8]},
    **{"mode": "MXFP8_1D_SCALING", "q_dtype": "float8_e4m3fn"},
}
TE_JAX_GEMM = {
    **{"bwd": "float8_e5m2", "fwd": "float8_e4m3fn", "mode": "MXFP8_1D_SCALING", "k": 4, "m": 4, "n": 4},
    **{"layout": "x (M,K), kernel (K,N), g (M,N)", "fprop": "x.row @ w.col", "seed": 1},
    **{"dgrad": "g.row @ w.row.T", "wgrad": "x.col.T @ g.col"},
}
TE_DELAYED = {
    **{"amax_compute_algo": "max", "history": 4, "margin": 0.0, "q_dtype": "float8_e4m3fn", "seed": 1},
    "steps": 10,
}
TORCHAO_FLOAT8 = {
    **{"axiswise_dim": None, "fp8": "float8_e4m3fn", "granularity": "TENSORWISE", "input_dtype": "float32"},
    "power_of_two": False,
}
TORCHAO_ROWS = {**TORCHAO_FLOAT8, "axiswise_dim": -1, "granularity": "AXISWISE"}
ALLOCATION = {
    **{"algorithm": "mixed precision bit allocation", "source": "exhaustive", "bits": [4, 8]},
    "budget_bytes": 10,
}


def layerwise(algorithm: str, **more: Any) -> list[tuple[dict[str, Any], Read]]:
    """Readers of a layer-wise algorithm's cases: of linear layers, and of a convolution."""
    config = {**LAYERWISE, "algorithm": algorithm, "hessian": ptq_layerwise.HESSIANS[algorithm], **more}
    return [(given, ptq_layerwise.layerwise_of) for given in (config, {**config, **CONVOLUTION})]


def odml(config: dict[str, Any]) -> None:
    """Read a case, and build its model as far as that needs no parameters."""
    found = qwix_odml.odml_of(config)
    found.provider(1.0)
    if found.model not in qwix_models.NNX_MODELS:
        qwix_models.linen_model(found.model, found.fields, {})


STEPS = {
    **{"optimizer": "torchao.optim.AdamW8bit", "options": {"lr": 0.01}, "steps": 4, "middle_step": 3},
    **{"param_dtype": "float32", "seed": 1, "shape": [64, 64]},
}
QUARTET = {"quest": True, "gaussian_scale": 0.5, "group": 32, "hadamard_dim": 32, "seed": 1}

# For every group what reads its configs, each with a config that it can read.
TE_NVFP4 = {"data": "normal", "input_dtype": "float32", "seed": 1, "shape": [16, 32], "tile": [1, 16]}
ROTATES = {"rht_columnwise": True, "tile": [1, 16]}
TE_NVFP4_GEMM = {
    **{"fprop": "x.row @ w.row.T", "dgrad": "g.row @ w.col.T", "wgrad": "g.col @ x.col.T", "seed": 1},
    **{"k": 32, "m": 32, "n": 32, "input_dtype": "float32", "out_dtype": "float32", "random_sign": True},
    **{"x": ROTATES, "w": {"rht_columnwise": False, "tile": [16, 16]}, "g": ROTATES},
}
TE_JAX_NVFP4 = {
    **{"data": "normal", "input_dtype": "float32", "seed": 1, "shape": [16, 32], "flatten_axis": -1},
    **{"mode": "NVFP4_1D_SCALING", "q_dtype": "float4_e2m1fn"},
}
TE_JAX_DRAWS = {
    **{"keys": 2, "max_abs_bias_of_mean": 0.1, "mode": "NVFP4_1D_SCALING", "seed": 1, "shape": [16, 32]}
}

READERS: dict[str, dict[str, list[tuple[dict[str, Any], Read]]]] = {
    "aqt": {
        "config": [({"factory": "v4-default"}, aqt_config.preset_of)],
        "conv": [({"bits": 8, "padding": "SAME", "strides": [1, 1]}, aqt.conv_of)],
        "dot": [
            (DOT, aqt.dot_of),
            ({**DOT, "factory": "fully_quantized", "use_stochastic_rounding": False}, aqt.dot_of),
            ({"config": "v4"}, aqt.accumulator_of),
        ],
        "einsum": [({"config": "v4", "eqn": "bd,df->bf"}, aqt.einsum_of)],
        "flax": [
            ({"config": "v4", "kind": "dense", "use_legacy_freezer": True}, aqt_flax.served_of),
            ({}, aqt_flax.refused_of),
            ({"tile_count": 2, "eqn": "bd,df->bf", "contraction": 16}, aqt_flax.tiled_of),
        ],
        "quantizer": [({"bits": 8}, aqt.quantizer_of)],
        "stochastic": [
            ({"implementation": "custom-1", "shape": [2], "n_keys": 2}, aqt_stochastic.noise_of),
            ({"bits": 8, "n_keys": 2}, aqt_stochastic.rounding_of),
            ({"drhs_bits": 8, "rng_type": "custom-1", "n_keys": 2}, aqt_stochastic.gradients_of),
            ({"config": "config_v4"}, aqt_stochastic.without_key_of),
        ],
    },
    "qwix": {
        "nnx_qat": [({"model": "mlp", "rule": RULE}, qwix_rules.training_of)],
        "odml_qat": [(ODML, odml), (RESIDUAL, odml), (CNN, odml)],
        "odml_conv": [(ODML, odml), (RESIDUAL, odml), (CNN, odml)],
        "odml_nnx": [(ODML, odml)],
        "odml_errors": [
            ({"case": "quant_stats missing"}, qwix_errors.attempt_of),
            ({"model": "const-lhs", "strict": True}, qwix_errors.attempt_of),
        ],
        "ops": [
            ({**OPERANDS, "dimension_numbers": MATMUL}, qwix.dot_of),
            ({**OPERANDS, "eqn": "bk,kn->bn"}, qwix.einsum_of),
            (CONV, qwix.conv_of),
            ({**OPERANDS, "tile_size": 16}, qwix.subchannel_of),
        ],
        "ptq": [({"model": "mlp", "rule": RULE}, qwix_rules.post_training_of)],
        "qarray": [
            ({"qtype": "int8"}, qwix_arrays.array_of),
            ({"bootstrap_steps": 0}, qwix_arrays.average_of),
        ],
        "qt_core": [({}, qwix.gradients_of), (NOISE, qwix.noise_of)],
    },
    "flax_fp8": {},
    "ptq": {
        "brevitas_gptq": layerwise("gptq"),
        "brevitas_gpfq": layerwise("gpfq", num_blocks=None),
        "brevitas_qronos": layerwise("qronos"),
        "brevitas_magr": [(MAGR, ptq_matrices.magr_of), ({**MAGR, **CONVOLUTION}, ptq_matrices.magr_of)],
        "brevitas_corrections": [
            (BIASES, ptq_corrections.correction_of),
            (NORMS, ptq_corrections.correction_of),
        ],
        "brevitas_equalize": [
            (config, ptq_equalize.equalization_of)
            for config in (
                CROSS_LAYER,
                {**CROSS_LAYER, "conv3x3": True},
                NORMED,
                ACTIVATIONS,
                SPLITTING,
                {**MERGED, "algorithm": "MergeLnAffine", "model": "emb - ln - fc"},
                {**MERGED, "algorithm": "LayerNormToRMS", "model": "emb - rms - fc", "eps": 1e-5},
            )
        ],
        "llmc_smoothquant": [(SMOOTH, ptq_smooth.compressor_smooth_of)],
        "qwix_smoothquant": [(QWIX_SMOOTH, ptq_smooth.qwix_smooth_of)],
        "llmc_gptq": [(COMPRESSOR, ptq_matrices.compressor_of)],
        "qwix_gptq": [(QWIX_GPTQ, ptq_matrices.qwix_gptq_of)],
        "qwix_qep": [(QEP, ptq_matrices.qep_of)],
        "autoround": [(AUTOROUND, ptq_autoround.rounded_of)],
        "llmc_awq": [(COMPRESSOR_AWQ, ptq_awq.compressor_of)],
        "qwix_awq": [(QWIX_AWQ, ptq_awq.qwix_of)],
        "modelopt": [(MODELOPT, ptq_awq.optimum_of)],
        "bit_allocation": [(ALLOCATION, ptq_matrices.budget_of)],
    },
    "lowbit_training": {
        "mx": [
            (MX, lowbit_mx.mx_of),
            ({"input_dtype": "float32", "two_level": True}, lowbit_nvfp4.torchao_of),
        ],
        "te_nvfp4": [(TE_NVFP4, lowbit_nvfp4.te_nvfp4_of)],
        "te_nvfp4_gemm": [(TE_NVFP4_GEMM, lowbit_nvfp4.gemm_of)],
        "te_current": [
            (TE_CURRENT, lowbit_fp8.te_current_of),
            (TE_CURRENT_GEMM, lowbit_fp8.te_current_gemm_of),
        ],
        "te_jax": [
            (TE_JAX, lowbit_fp8.te_jax_of),
            (TE_JAX_GEMM, lowbit_fp8.te_jax_gemm_of),
            (TE_JAX_NVFP4, lowbit_nvfp4.te_jax_of),
            (TE_JAX_DRAWS, lowbit_nvfp4.stochastic_of),
            ({"block": 16, "sign_mask": 55272}, lowbit_nvfp4.rotation_of),
            (TE_DELAYED, lowbit_fp8.delayed_of),
        ],
        "torchao_float8": [
            (TORCHAO_FLOAT8, lowbit_fp8.torchao_float8_of),
            (TORCHAO_ROWS, lowbit_fp8.torchao_float8_of),
        ],
        "torchao_int8": [({"input_dtype": "float32", "samples": 2}, lowbit_fp8.torchao_int8_of)],
        "optim": [
            (STEPS, lowbit_optim.optimizer_of),
            ({**STEPS, "optimizer": "bitsandbytes.optim.SGD8bit"}, lowbit_optim.optimizer_of),
            ({"signed": True, "blocksize": 256, "seed": 1}, lowbit_optim.optimizer_of),
            ({"draws": 2, "seed": 1}, lowbit_optim.optimizer_of),
            ({"runs": 2, "lr": 1e-4, "seed": 1}, lowbit_optim.optimizer_of),
        ],
        "quest": [
            ({"cls": "TrustQuantizer", "bits": 4, "hadamard_dim": 128}, lowbit_quest.quest_of),
            ({"cls": "GaussianTrustQuantizer"}, lowbit_quest.quest_of),
            (QUARTET, lowbit_quest.quest_of),
        ],
    },
}

# Groups of cases whose configs are sizes alone, which their adapters read case by case.
NOT_DRIVEN = {
    **dict.fromkeys(("hadamard", "qwix_hadamard"), "ptq"),
}

# What the library refuses, as the reference does, in cases of errors.
REFUSED = ("qarray:calibration_method=fixed", "qarray:calibration_method=fixed,1,2")


def vocabulary(peer: str) -> dict[str, dict[str, list[str]]]:
    return json.loads((_driver.HERE / peer / "VOCABULARY.json").read_text())


KEYS = [
    pytest.param(peer, group, key, values, id=f"{peer}/{group}/{key}")
    for peer in READERS
    for group, keys in vocabulary(peer).items()
    if NOT_DRIVEN.get(group) != peer
    for key, values in keys.items()
    if NOT_DRIVEN.get(f"{group}.{key}") != peer
]


def put(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The config with one more setting; dots lead into inner dicts."""
    name, _, rest = key.partition(".")
    inner = config.get(name, {})
    return {**config, name: put(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


def decoded(text: str) -> Any:
    """A value of the vocabulary: JSON, else a text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def complaints(peer: str, group: str, key: str, value: Any) -> list[str]:
    """What every reader of the group has against a setting; nothing if one understands it."""
    found = []
    for config, read in READERS[peer].get(group, []):
        try:
            read(put(config, key, value))
        except CannotDrive as problem:
            found.append(str(problem))
        except _driver.USER_ERRORS as error:
            assert f"{group}:{key}={value}" in REFUSED, f"{key} = {value!r}: {error}"
            return []
        else:
            return []
    return found or [f"nothing reads cases of group {group!r}"]


def is_out_of_scope(peer: str, group: str, key: str, text: str) -> bool:
    case = {"id": f"{group}/any", "area": "any", "config": put({}, key, decoded(text))}
    assert dict(settings_of(case["config"])) == {key: text}, "as the vocabulary writes it"
    return _driver.reason_to_skip(case, peer) is not None


@pytest.mark.parametrize(("peer", "group", "key", "values"), KEYS)
def test_a_setting_is_understood_or_out_of_scope(peer: str, group: str, key: str, values: list[str]) -> None:
    for text in values:
        if not is_out_of_scope(peer, group, key, text):
            assert not (found := complaints(peer, group, key, decoded(text))), f"{key} = {text}: {found}"


@pytest.mark.parametrize(
    ("peer", "group"), [(peer, group) for peer, groups in READERS.items() for group in groups]
)
def test_no_reader_accepts_a_key_that_it_does_not_know(peer: str, group: str) -> None:
    for config, read in READERS[peer][group]:
        read(config)
        with pytest.raises(CannotDrive, match="unheard"):
            read(put(config, "unheard", 1))
        for name, inner in config.items():
            if isinstance(inner, dict):
                with pytest.raises(CannotDrive, match="unheard"):
                    read(put(config, f"{name}.unheard", 1))


@pytest.mark.parametrize(
    ("peer", "group", "key", "value"),
    [
        ("aqt", "dot", "factory", "config_v5"),
        ("aqt", "config", "factory", "v4-3bit"),
        ("aqt", "quantizer", "calibration", "median"),
        ("aqt", "flax", "kind", "conv"),
        ("qwix", "qarray", "calibration_method", "median"),
        ("qwix", "odml_qat", "model", "LTransformer"),
        ("qwix", "odml_qat", "model_fields.act", "mish"),
        ("qwix", "odml_qat", "model_fields.kind", "divide"),
        ("qwix", "odml_qat", "rule.weight_qtype", "float64"),
        ("qwix", "nnx_qat", "rule.act_calibration_method", "median"),
        ("qwix", "nnx_qat", "model", "transformer"),
        ("qwix", "ptq", "rule", "w2a2 static"),
        ("qwix", "odml_errors", "case", "another"),
        ("ptq", "brevitas_gptq", "quantizer_class", "NoWeight"),
        ("ptq", "brevitas_gptq", "quantizer", "int4_rows"),
        ("ptq", "brevitas_gptq", "scale_rule", "thawed"),
        ("ptq", "brevitas_gptq", "overrides.weight_bitwidth", 4),
        ("ptq", "brevitas_gpfq", "num_blocks", 4),
        ("lowbit_training", "mx", "scale_mode", "DOWN"),
        ("lowbit_training", "mx", "element", "int8"),
    ],
)
def test_a_value_without_a_meaning_is_refused(peer: str, group: str, key: str, value: str) -> None:
    assert complaints(peer, group, key, value)
