"""The weight of a contraction by a scheme, as it is stored for serving."""

from __future__ import annotations

import jax

from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_groups import ScaleForms
from jqinject.dot.frozen.frozen_numbers import frozen_numbers
from jqinject.dot.geometry.labels import Labels
from jqinject.dot.schemes.scheme_quantizers import SchemeQuantizers
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, in_order
from jqinject.quant_tensor import is_quantized, on_integers


def frozen_operand(
    quantizers: SchemeQuantizers, w: LabelledTensor, summed: Labels, stored_last: tuple[int, ...]
) -> tuple[dict[str, jax.Array], FrozenForm]:
    """The low-bit numbers of the forward product's right operand, as `frozen_numbers` returns them.

    Args:
        quantizers: of the scheme.
        w: the operand.
        summed: the axes that are summed over.
        stored_last: those of its axes that are stored last.

    Raises:
        ValueError: it is not quantized, or only as the contraction sees it.
    """
    quantizers.check_freezes()
    proxy = quantizers.proxy("fprop_rhs", w, summed)
    found = in_order(quantizers.operand("fprop_rhs", w, summed), w.labels)
    if proxy is None or not is_quantized(found):
        name = "None" if proxy is None else proxy.binding.base.__name__
        raise ValueError(
            f"{quantizers.where}: {quantizers.scheme.name}.fprop_rhs = {name} is not stored for serving: it makes no "
            "QuantTensor with the axes of the weight.\n  cure: a quantizer of weights, such as "
            "Int8WeightPerChannelAbsMax"
        )
    forms = ScaleForms(proxy.scale_dtype, proxy.has_whole_zero_points)
    shifted = proxy.has_zero_point and (not on_integers(found) or found.has_zero_point)
    return frozen_numbers(found, stored_last, shifted, None, forms)
