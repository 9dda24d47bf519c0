"""The quantizers that devices have: signed 8-bit integers, weights without zero point."""

from jqinject.core import AbsMaxRange, MinMaxRange
from jqinject.quant.integer.calibrated_int import CalibratedAct


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
