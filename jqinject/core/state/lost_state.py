"""Warnings about what quantizers record and nothing keeps."""

import warnings


class LostStateWarning(UserWarning):
    """What quantizers record is thrown away: by a part of a program, or by a backward pass that nobody listens to."""


def warn_of_unheard(quantizer: str) -> None:
    """Tell that a backward pass runs a quantizer in training mode whose report goes nowhere.

    Args:
        quantizer: its name.
    """
    warnings.warn(
        f"{quantizer} quantizes a gradient in training mode, and the amax that it sees is lost: the backward pass is "
        "not one of jqinject.value_and_grad (or grad), or the quantizer is not among its positional arguments (the "
        "model is reached some other way, its statistics were split off, or it was made during the call).\n"
        "  cure: pass the whole model, called once before, as a positional argument: "
        "jqinject.value_and_grad(loss_fn)(model, ...); or nnx.vjp between jqinject.begin_step(model) and "
        "jqinject.end_step(model, gradients=...); or put what is not trained into eval mode: model.eval()",
        LostStateWarning,
        stacklevel=1,  # the caller is JAX's transposition
    )
