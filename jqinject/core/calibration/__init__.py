"""Clipping ranges: how they are found and averaged over batches."""

from jqinject.core.calibration.averaging import SimpleMovingAverage as SimpleMovingAverage
from jqinject.core.calibration.error_range import MSERange as MSERange
from jqinject.core.calibration.ranges import OF_NO_AXES as OF_NO_AXES
from jqinject.core.calibration.ranges import AbsMaxRange as AbsMaxRange
from jqinject.core.calibration.ranges import AbsMeanRange as AbsMeanRange
from jqinject.core.calibration.ranges import AbsPercentileRange as AbsPercentileRange
from jqinject.core.calibration.ranges import ClippingRange as ClippingRange
from jqinject.core.calibration.ranges import FixedRange as FixedRange
from jqinject.core.calibration.ranges import MinMaxRange as MinMaxRange
from jqinject.core.calibration.ranges import NonzeroRange as NonzeroRange
from jqinject.core.calibration.ranges import RangeMethod as RangeMethod
from jqinject.core.calibration.ranges import RMSRange as RMSRange
