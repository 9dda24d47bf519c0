"""Solvers: for each role of a quantizer, a table that says which function computes what.

A row `name = function` means: unless `name` is declared, `function` computes it from the names of its arguments. The
rows that roles have in common are in `solve_components` and `solve_shapes`. Below the solvers there is for each role
the quantizer that does not quantize: a layer that has it computes in float.
"""

from typing import Any

from jqinject import core, proxy
from jqinject.inject import ExtendedInjector
from jqinject.quant import enums
from jqinject.quant.solver import solve_components as components
from jqinject.quant.solver import solve_shapes as shapes


def _rows(*tables: type[ExtendedInjector]) -> dict[str, Any]:
    """The declarations of some tables, for the body of a solver."""
    return {name: spec.declared for table in tables for name, spec in table.__declared__.items()}


class WeightQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum and the shape of the layer into the components of a weight quantizer."""

    vars().update(_rows(components.Choices, components.ParameterChoices, components.BlockChoices))
    vars().update(_rows(shapes.Shapes, shapes.WeightShapes))
    proxy_class = proxy.WeightQuantProxyFromInjector
    tensor_quant = components.tensor_quant_from(components.WEIGHT_TENSOR_QUANT)


class ActQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum into the components of an activation quantizer."""

    vars().update(_rows(components.Choices, components.ActChoices, components.BlockChoices))
    vars().update(_rows(shapes.Shapes, shapes.ActShapes))
    proxy_class = proxy.ActQuantProxyFromInjector
    tensor_quant = components.tensor_quant_from(components.ACT_TENSOR_QUANT)
    input_view_impl = shapes.by_output(core.Identity, core.Identity, core.DynamicOverSubChannelBlockView)
    group_dim, block_dim = -1, -2
    block_width = shapes.block_width


class GradQuantSolver(ActQuantSolver, defaults=True):
    """As for activations, and what is recorded belongs to the backward pass."""

    proxy_class = proxy.GradQuantProxyFromInjector
    amax_of_gradient = True


class BiasQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum and the shape of the layer into the components of a bias quantizer."""

    vars().update(_rows(components.Choices, components.ParameterChoices, shapes.Shapes, shapes.BiasShapes))
    proxy_class = proxy.BiasQuantProxyFromInjector
    tensor_quant = components.bias_tensor_quant
    int_quant = components.selected("quant_type", components.INT_QUANT)


class TruncQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum into the components of a quantizer of accumulators."""

    vars().update(_rows(components.Choices, components.ActChoices, shapes.Shapes, shapes.ActShapes))
    proxy_class = proxy.TruncQuantProxyFromInjector
    tensor_quant = components.selected("quant_type", components.TRUNC_TENSOR_QUANT)
    trunc_scaling_impl = components.selected(
        "trunc_scaling_impl_type", components.TRUNC_SCALING_IMPL, default="msb"
    )
    trunc_int_scaling_impl = components.selected("restrict_scaling_type", components.POWER_OF_TWO_STEPS)


class NoneWeightQuant(WeightQuantSolver):
    """Float weights."""

    quant_type = enums.QuantType.FP


class NoneActQuant(ActQuantSolver):
    """Float activations."""

    quant_type = enums.QuantType.FP


class NoneBiasQuant(BiasQuantSolver):
    """Float biases."""

    quant_type = enums.QuantType.FP
    requires_input_scale = False


class NoneTruncQuant(TruncQuantSolver):
    """Accumulators with all their bits."""

    quant_type = enums.QuantType.FP
