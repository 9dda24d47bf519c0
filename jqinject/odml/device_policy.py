"""Which operations a device compiler expects to be quantized, in which order, and the quantizers that devices have."""

from dataclasses import dataclass, replace
from typing import Any

from jqinject.core import AbsMaxRange, FixedRange, MinMaxRange
from jqinject.model import Rule
from jqinject.program import Choice, Operation, Policy, Site, Tracked, other_axes
from jqinject.quant.integer.calibrated_int import CalibratedAct

Range = tuple[float, float]


class UnknownOperationError(ValueError):
    """A model runs an operation for which devices have no quantized form."""


@dataclass(frozen=True)
class OdmlPolicy(Policy):
    """Quantizes every operation; outputs late, so that operations that a device fuses stay together.

    Attributes:
        rules: `weight_quant` is for weights, `output_quant` for the outputs of matching operations.
        per_channel_weights: whether weights have a scale for each output channel.
        input_range: of the model's inputs, if fixed.
        output_range: of the model's outputs, if fixed.
        strict: whether an unknown operation is an error.
    """

    rules: tuple[Rule, ...]
    per_channel_weights: bool = True
    input_range: Range | None = None
    output_range: Range | None = None
    strict: bool = True

    delayed = True

    def choose(
        self, path: str, operation: Operation, weight_path: tuple[str | int, ...] = (), name: str = ""
    ) -> Choice | None:
        """See `Policy`."""
        for rule in self.rules:
            if rule.matches(path) and (rule.op is None or operation.name in rule.op):
                weight, act = rule.quantizer("weight_quant"), rule.quantizer("output_quant")
                if weight is None and act is None:
                    return None
                return Choice(weight, act, act, dynamic=act is not None and is_dynamic(act))
        return None

    def unknown(self, path: str, name: str) -> None:
        """See `Policy`."""
        if self.strict:
            raise UnknownOperationError(
                f"the operation {name!r} in {path or 'the model itself'} has no quantized form, so its output is float."
                "\n  cure: strict=False lets it pass as it is; or write it with operations that have one: "
                "jqinject.program.known_operations()"
            )

    def not_an_activation(self, path: str, what: str) -> None:
        """See `Policy`."""
        if self.strict:
            raise UnknownOperationError(
                f"{what} in {path or 'the model itself'} does not depend on the model's inputs and is no weight, so it "
                "has no range that could be calibrated.\n  cure: make it an nnx.Param, or strict=False"
            )

    def channel_axes(self, summed: tuple[int, ...], ndim: int, is_weight: bool) -> tuple[int, ...]:
        """See `Policy`."""
        return other_axes(summed, ndim) if self.per_channel_weights or not is_weight else ()

    def model_input(self, x: Tracked) -> Tracked:
        """See `Policy`."""
        return replace(x, fixed_range=self.input_range, twins={})

    def final_output(self, run: Any, x: Tracked, index: int) -> Tracked:
        """See `Policy`."""
        if not x.is_float:
            return x
        if not x.is_activation:
            self.not_an_activation("", f"output {index}")
        if x.pending is None or x.quantized:
            return x
        if self.output_range is not None:
            x = replace(x, fixed_range=self.output_range, twins={})
        return run.quantized(x, Site(f"final_output{index}", x.pending))


def is_dynamic(quantizer: object) -> bool:
    """Return whether a quantizer, or an injector of one, takes its range from the tensor itself."""
    scaling = getattr(quantizer, "scaling_impl", None)
    return getattr(scaling, "averaging_impl", None) is None


def overrides_of(site: Site) -> dict[str, object]:
    """Return the names that the quantizer at a site redeclares: the axes of its scale, and its range if known."""
    overrides: dict[str, object] = {}
    if site.overrides.get("channelwise_axes"):
        overrides["channelwise_axes"] = site.overrides["channelwise_axes"]
    if not site.overrides.get("static", True):
        overrides["averaging_impl"] = None
    elif "fixed_range" in site.overrides:
        overrides["calibration_impl"] = FixedRange(*site.overrides["fixed_range"])
        overrides["restart"] = True
    return overrides


class _OfDevices(CalibratedAct):
    batch_axes = (0,)  # every sample of a batch counts alike


class Int8Weight(_OfDevices):
    """Symmetric, a scale for each output channel (or for the tensor): `scale = max |w| / 127.5`.

    Source: Qwix's ODML provider.
    """

    calibration_impl = AbsMaxRange
    averaging_impl = None


class Int8Act(_OfDevices):
    """With a zero point; the range is the mean over all batches of each batch's range, from means over the batch axis.

    Override `calibration_impl` for another range: `AbsMaxRange` for no zero point, `FixedRange(low, high)`.

    Source: Qwix's ODML provider (`minmax`).
    """

    calibration_impl = MinMaxRange


class Int8DynamicAct(_OfDevices):
    """With a zero point, from the tensor itself: only for inputs of contractions with a weight, one range per row."""

    calibration_impl = MinMaxRange
    averaging_impl = None
