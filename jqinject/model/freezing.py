"""`freeze` and `unfreeze`: from a trained model to one that serves low-bit weights, and back."""

import itertools
import warnings
from collections.abc import Sequence
from typing import TypeVar

from flax import nnx

from jqinject.core import Quantizer, RangeScaling
from jqinject.model import frozen_weights
from jqinject.model.from_payload import unfreeze_from_payload
from jqinject.model.lora.merging import check_updates, merge_inside
from jqinject.model.walk import ModelIndex, check_calibrated, check_module, is_finite, place_name
from jqinject.nn.base.slots import is_on
from jqinject.nn.freeze_layer import SLICED_FROM, frozen_param, numbers_of

Model = TypeVar("Model", bound=nnx.Module)


class NothingFrozenWarning(UserWarning):
    """`freeze` was called on a model without quantizers."""


def freeze(
    model: Model,
    *,
    keep_masters: bool = False,
    allow_uncalibrated: bool = False,
    sliced_from: int = SLICED_FROM,
) -> Model:
    """Turn a model into a serving model, in place: quantized weights become low-bit payloads with scales.

    The model is set to evaluation mode. Every quantized weight becomes a `jqinject.dot.FrozenParam` in its place: the
    weight of a jqinject layer, whose quantizer and gradient quantizer go; the kernel of a Flax layer with a
    `QDotGeneral`, `QEinsum` or `QConvGeneralDilated`, which contracts it; and a parameter that the model contracts by
    itself. It holds the payload (int8; 4-bit and narrower integers packed; 8-bit floats in their dtype, other
    minifloats as codes, packed likewise), its scale, and its zero point unless it is symmetric. Everything else
    stays as it is. Weights are replaced one by one, so there are never two copies of the model.

    A frozen layer contracts integers if its input is quantized to at most 8 bits. Its output equals that of the
    unfrozen layer in evaluation, and that of training up to float rounding. Averaged ranges of inputs become
    constants, with their scales and zero points, until another calibration: nothing is reduced or averaged at run time.

    A frozen weight still answers under its name: `layer.kernel.shape`, `.dtype` and `.sharding` as before. Read as an
    array (`layer.embedding[ids]`, `layer.kernel.T`) it is the dequantized numbers, and a look-up dequantizes only the
    rows that it reads. Assigning an array to it raises.

    The static part of a weight's quantizer stays in the metadata of the `FrozenParam`, so that `jqinject.refresh` can
    quantize other weights likewise.

    Orbax saves `nnx.as_pure(nnx.state(model))`; `load_state` fills the abstract model
    `nnx.eval_shape(lambda: jqinject.freeze(make_model()))` with what it restores.

    Warns:
        NothingFrozenWarning: the model has no quantizer.

    Args:
        model: an NNX module, concrete or abstract.
        keep_masters: keep the float weights (`layer.master`) and their quantizers as well, for `unfreeze`.
        allow_uncalibrated: go on even if static ranges of activations never saw data.
        sliced_from: float weights of at least so many bytes are quantized slice by slice, which takes less memory and
            makes the same bits.

    Returns:
        The model itself.

    Raises:
        TypeError: `model` is not an NNX module.
        ValueError: a static range that never saw data, named by path; nan or inf in a weight or its low-rank update; an
            op whose forward contraction is cut into pieces (nothing is changed then); a learned bit width in an
            abstract model.

    Example:
        >>> import jax
        >>> from jqinject.nn import QuantLinear
        >>> layer = QuantLinear(64, 32, use_bias=False, rngs=nnx.Rngs(0))
        >>> frozen = freeze(layer)
        >>> {f"kernel/{name}": x.dtype.name for name, x in sorted(frozen.kernel.get_raw_value().items())}
        {'kernel/scale': 'float32', 'kernel/sums': 'int32', 'kernel/value': 'int8'}
    """
    check_module(model, "freeze")
    index = ModelIndex(model)
    if not allow_uncalibrated:
        check_calibrated(index, "freeze")
    layers = index.modules
    for layer in layers:
        op = frozen_weights.op_of_weight(layer)
        if op is not None:
            op.check_freezes()
    frozen_weights.check_parameters_freeze(index)
    weights = frozen_weights.quantized_weights(index)
    check_finite(index, weights, "freeze")
    check_updates(index)
    quantized = [layer for layer in layers if is_on(layer) or frozen_weights.quantized_op(layer) is not None]
    if not (quantized or index.frozen_parameters):
        warnings.warn(
            f"freeze: {type(model).__name__} has no quantizer, so nothing was frozen: it stays a float model.\n"
            "  cure: jqinject.quantize(model, Rule(weight_quant=...)) first",
            NothingFrozenWarning,
            2,
        )
    model.eval()
    merge_inside(index)
    ahead = numbers_of(weights[0], sliced_from) if weights else None
    for holder, following in itertools.zip_longest(weights, weights[1:]):
        numbers, ahead = ahead, None if following is None else numbers_of(following, sliced_from)
        stored = frozen_param(holder, numbers, sliced_from)
        frozen_weights.freeze_weight(index, holder, stored, keep_master=keep_masters)
    for layer in layers:
        kernel = frozen_weights.frozen_kernel(layer)
        if kernel is not None:
            frozen_weights.freeze_weight(index, layer, kernel, keep_master=keep_masters)
    freeze_ranges(layers)
    return model


def freeze_ranges(modules: Sequence[object]) -> None:
    """Turn averaged ranges, their scales and zero points into constants.

    Args:
        modules: a model's modules. An average that no batch has entered stays as it is.
    """
    for module in modules:
        if isinstance(module, Quantizer):
            module.freeze_range()
    for module in modules:  # also those that no quantizer holds
        if isinstance(module, RangeScaling):
            module.freeze()


def check_finite(index: ModelIndex, layers: Sequence[frozen_weights.WeightHolder], caller: str) -> None:
    """Refuse weights with nan or inf, which have no integer value, before any weight is replaced."""
    wrong = {id(layer) for layer in layers if not is_finite(layer.weight[...])}
    if wrong:
        paths = [place_name(path) for path, node in index.first_places.items() if id(node) in wrong]
        raise ValueError(
            f"{caller}: the weights of {', '.join(paths)} have nan or inf.\n"
            "  cure: load weights that are finite; in training, skip updates whose gradient is not "
            "(optax.apply_if_finite)"
        )


def unfreeze(model: Model, *, from_payload: bool = False) -> Model:
    """Restore the float weights of a model that was frozen with `keep_masters=True`, in training mode.

    Weights whose float numbers are gone, such as those of `jqinject.formats.load`, may begin at their low-bit numbers
    instead: they are then quantized by the same scales, committed (`commit`), to the same numbers, until training moves
    them.

    Args:
        model: an NNX module.
        from_payload: make float weights of the low-bit numbers where they were not kept.

    Returns:
        The model itself.

    Raises:
        TypeError: `model` is not an NNX module.
        ValueError: the weights of a layer were not kept, or no quantizer is for them; nothing is changed then.

    Example:
        >>> from jqinject.nn import QuantLinear
        >>> layer = freeze(QuantLinear(4, 2, rngs=nnx.Rngs(0)), keep_masters=True)
        >>> unfreeze(layer).kernel.shape
        (4, 2)
        >>> served = freeze(QuantLinear(4, 2, rngs=nnx.Rngs(0)))
        >>> codes = served.quant_weight().int()
        >>> bool((unfreeze(served, from_payload=True).quant_weight().int() == codes).all())
        True
    """
    check_module(model, "unfreeze")
    if from_payload:
        unfreeze_from_payload(ModelIndex(model))
    index = ModelIndex(model)
    lost = frozen_weights.without_masters(index)
    if lost:
        raise ValueError(
            f"the float numbers of {', '.join(map(place_name, lost))} are gone.\n"
            "  cure: freeze(model, keep_masters=True), or load a float checkpoint into a model that was not frozen"
        )
    for layer in index.modules:
        frozen_weights.unfreeze_op(layer)
    frozen_weights.restore_masters(index)
    for module in ModelIndex(model).modules:
        if isinstance(module, RangeScaling):
            module.unfreeze()
    model.train()
    return model
