"""What a weight quantizer may have to know of the input that its weight is contracted with."""

from typing import Any, NamedTuple

import jax

from jqinject.quant_tensor import IntQuantTensor


class InputFormat(NamedTuple):
    """The integers of a layer's input.

    Attributes:
        bit_width: bits of an integer: a Python int, or an array if learned.
        signed: whether the integers have a sign.
    """

    bit_width: int | jax.Array
    signed: bool


def input_format_of(quant_input: Any, quantizer: str) -> InputFormat:
    """The format of a quantized input.

    Args:
        quant_input: an `IntQuantTensor`, or its `InputFormat`.
        quantizer: the name of the weight's injector, for the error text.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(quant_input, InputFormat):
        return quant_input
    if isinstance(quant_input, IntQuantTensor):
        return InputFormat(quant_input.bit_width, quant_input.signed)
    raise TypeError(
        f"{quantizer} quantizes the weight for the integers that it is multiplied with, and the input is not quantized "
        f"to integers: got {type(quant_input).__name__}.\n  cure: give the layer input_quant=... (such as "
        "Int8ActPerTensorFloat), or feed it an IntQuantTensor"
    )
