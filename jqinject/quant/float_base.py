"""Fragments of minifloats, by the path that Brevitas has them under; see `jqinject.quant.fragments`."""

from jqinject.quant.fragments import FloatActBase as FloatActBase
from jqinject.quant.fragments import FloatBase as FloatBase
from jqinject.quant.fragments import FloatWeightBase as FloatWeightBase
from jqinject.quant.fragments import Fp4e2m1Mixin as Fp4e2m1Mixin
from jqinject.quant.fragments import Fp6e2m3Mixin as Fp6e2m3Mixin
from jqinject.quant.fragments import Fp6e3m2Mixin as Fp6e3m2Mixin
from jqinject.quant.fragments import Fp8e4m3Mixin as Fp8e4m3Mixin
from jqinject.quant.fragments import Fp8e5m2Mixin as Fp8e5m2Mixin
from jqinject.quant.fragments import ScaledFloatActBase as ScaledFloatActBase
from jqinject.quant.fragments import ScaledFloatWeightBase as ScaledFloatWeightBase
