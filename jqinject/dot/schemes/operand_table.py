"""What `explain` shows of a scheme: its six operands, as a table."""

from typing import Any

import numpy as np

from jqinject.inject import Binding, Node, explain

PLACES = {
    "fprop_lhs": "x in y = x w",
    "fprop_rhs": "w in y = x w",
    "dgrad_grad": "g in dx = g w^T",
    "dgrad_rhs": "w in dx = g w^T",
    "wgrad_lhs": "x in dw = x^T g",
    "wgrad_grad": "g in dw = x^T g",
}


class OperandTable(Node):
    """The six operands of a scheme: a node each, printed as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("name", "operand", "numbers", "quantizer", "decided by")]
        for node in self.children:
            origin = node.origin.__name__ if isinstance(node.origin, type) else node.origin or ""
            if node.error:
                numbers, name = "ERROR: " + "; ".join(map(str.strip, node.error.splitlines())), ""
            else:
                # As the scheme resolves it: what it takes from the scheme's other names is known then.
                value = getattr(self.value, node.name)
                numbers, name = _numbers(value), _quantizer(value)
            rows.append((node.name, PLACES[node.name], numbers, name, origin))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
        return "\n".join((*(line.rstrip() for line in lines), *_delay_of(self.value)))


def operand_table(scheme: Any) -> OperandTable:
    """The operands of a scheme.

    Args:
        scheme: its injector.
    """
    nodes = tuple(explain(scheme, name=name) for name in PLACES)
    return OperandTable(scheme.__name__, "injector", scheme, children=nodes)


def _delay_of(scheme: Any) -> tuple[str, ...]:
    """What a scheme says of its first calls."""
    if not scheme.quant_delay_steps:
        return ()
    before = "in float" if scheme.before is None else f"by {_quantizer(scheme.before)}"
    return (f"the first {scheme.quant_delay_steps} calls in training are made {before}",)


def _quantizer(value: object) -> str:
    if isinstance(value, Binding):
        return value.base.__name__
    return value.__name__ if isinstance(value, type) else ""


def _numbers(value: Any) -> str:
    """The numbers of an operand as text; empty if only an assembled quantizer knows."""
    if value is None:
        return "float"
    if not _quantizer(value):
        return "as in y = x w"
    injector: Any = value.injector if isinstance(value, Binding) else value
    names = ("q_dtype", "exponent_bit_width", "mantissa_bit_width", "bit_width", "group_size")
    values = {name: explain(value, name=name).value for name in names if name in injector}
    numbers = {name: x for name, x in values.items() if isinstance(x, int)}
    size = values.get("group_size")
    group = f" in {size}s" if isinstance(size, int) else ""
    if isinstance(size, tuple):
        group = " in {} x {}".format(*size)
    if values.get("q_dtype") is not None:
        return np.dtype(values["q_dtype"]).name + group
    if {"exponent_bit_width", "mantissa_bit_width"} <= numbers.keys():
        return f"e{numbers['exponent_bit_width']}m{numbers['mantissa_bit_width']}{group}"
    return f"{numbers['bit_width']} bits{group}" if "bit_width" in numbers else group.strip()
