"""The statistics of a quantizer are one Variable, and states of the time when they were several are read."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

import jqinject
from jqinject.core.state import RecordPart
from jqinject.nn import QuantLinear
from jqinject.quant import (
    Fp8e4m3ActPerTensorDelayed,
    Fp8e4m3WeightPerTensorDelayed,
    Fp8e5m2GradPerTensorDelayed,
    Int8ActPerTensorMinMax,
)

FP8: dict[str, Any] = {
    "weight_quant": Fp8e4m3WeightPerTensorDelayed,
    "input_quant": Fp8e4m3ActPerTensorDelayed,
    "grad_quant": Fp8e5m2GradPerTensorDelayed,
}
X = jnp.array([[0.5, -2.0, 1.0, 0.25]])


def trained(**quantizers: Any) -> QuantLinear:
    made = QuantLinear(4, 3, rngs=nnx.Rngs(0), **quantizers)
    if "grad_quant" in quantizers:
        jqinject.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))(made, X)
    else:
        made(X)
    return made


def paths(module: nnx.Module) -> set[str]:
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module))}


@pytest.mark.lengthy
def test_the_statistics_of_a_quantizer_are_one_variable() -> None:
    below = ".tensor_quant.scaling_impl"
    assert paths(trained(**FP8)) == {
        *("kernel", "bias", f"weight_quant{below}.record", f"input_quant{below}.record"),
        *(f"grad_quant{below}.record", f"grad_quant{below}.slot"),
    }
    averaged = trained(input_quant=Int8ActPerTensorMinMax)
    assert "input_quant.tensor_quant.scaling_impl.averaging_impl.record" in paths(averaged)
    assert len(paths(averaged)) == 3


def test_a_record_that_was_restored_without_a_target_is_read() -> None:
    source = trained(input_quant=Int8ActPerTensorMinMax)
    state: Any = nnx.to_pure_dict(nnx.state(source))
    average = state["input_quant"]["tensor_quant"]["scaling_impl"]["averaging_impl"]
    average["record"] = {"value": average["record"]}
    target = QuantLinear(4, 3, rngs=nnx.Rngs(1), input_quant=Int8ActPerTensorMinMax)
    report = jqinject.load_state(target, state)
    assert "input_quant.tensor_quant.scaling_impl.averaging_impl.record.counter" in report.loaded
    assert int(target.input_quant.tensor_quant.scaling_impl.averaging_impl.counter[...]) == 1


def test_parts_are_read_and_written_as_variables_are() -> None:
    average = trained(input_quant=Int8ActPerTensorMinMax).input_quant.tensor_quant.scaling_impl.averaging_impl
    part = average.counter
    assert isinstance(part, RecordPart) and (part.shape, part.dtype, part.size) == ((), jnp.float32, 1)
    part.set_value(jnp.float32(5))
    part[...] = part[...] + 1
    assert int(average.record.get_value()["counter"]) == int(average.counter.get_value()) == 6
    assert float(average.sum_of_max[...]) == 1.0
    assert repr(part).startswith("RecordPart(counter=")


@pytest.mark.heavy
def test_the_history_of_a_scaling_is_part_of_its_record() -> None:
    scaling = trained(**FP8).input_quant.tensor_quant.scaling_impl
    assert float(scaling.newest) == 2.0 and scaling.has_range()
    scaling.begin_calibration()
    assert not scaling.has_range()
    assert float(scaling.record.get_value()["amax_history"].sum()) == 0.0
