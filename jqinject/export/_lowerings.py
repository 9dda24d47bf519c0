"""How jax2onnx writes jqinject's operations: registered through its plugins."""

from __future__ import annotations

from typing import Any

from jqinject.export._grid import DEQUANTIZE, QUANTIZE
from jqinject.export._marks import MARK
from jqinject.export._pool import POOL


def register(plugins: Any) -> None:
    """Register jqinject's operations with jax2onnx; may be called repeatedly.

    Args:
        plugins: the module `jax2onnx.plugins.plugin_system`.
    """
    for primitive, write in ((QUANTIZE, _quantize), (DEQUANTIZE, _dequantize), (POOL, _pool), (MARK, _mark)):
        plugin = type(primitive.name, (plugins.PrimitiveLeafPlugin,), {"lower": write})
        plugins.register_primitive(jaxpr_primitive=primitive.name)(plugin)


def _quantize(self: Any, ctx: Any, eqn: Any) -> None:
    _write(ctx, eqn, "QuantizeLinear", _axis(eqn))


def _dequantize(self: Any, ctx: Any, eqn: Any) -> None:
    _write(ctx, eqn, "DequantizeLinear", _axis(eqn))


def _pool(self: Any, ctx: Any, eqn: Any) -> None:
    _write(ctx, eqn, eqn.params["operator"], dict(eqn.params["attributes"]))


def _mark(self: Any, ctx: Any, eqn: Any) -> None:
    # Remaining marks are inside loop bodies, where no grid is known: keep the computed value.
    ctx.bind_value_for_var(eqn.outvars[0], ctx.get_value_for_var(eqn.invars[1]))


def _axis(eqn: Any) -> dict[str, int]:
    axis = eqn.params["axis"]
    return {} if axis is None else {"axis": axis}


def _write(ctx: Any, eqn: Any, operator: str, attributes: dict[str, Any]) -> None:
    operands = [ctx.get_value_for_var(variable) for variable in eqn.invars]
    (result,) = eqn.outvars
    known = ctx.get_value_for_var(result, name_hint=ctx.fresh_name(operator))
    written = getattr(ctx.builder, operator)(*operands, _outputs=[known.name], **attributes)
    written.type, written.shape = known.type, known.shape
    ctx.bind_value_for_var(result, written)
