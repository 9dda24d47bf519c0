"""The solver of gradients."""

from jqinject.inject import value
from jqinject.inject.enum import ScalingPerOutputType
from jqinject.proxy import GradQuantProxyFromInjector, GroupwiseGradQuantProxyFromInjector
from jqinject.quant.solver.act import ActQuantSolver


class GradQuantSolver(ActQuantSolver):
    """As for activations, and what is recorded belongs to the backward pass.

    List it last among the bases of a quantizer, so that whatever the others declare wins.
    """

    amax_of_gradient = True

    @value
    def proxy_class(scaling_per_output):
        per_group = scaling_per_output == ScalingPerOutputType.GROUP
        return GroupwiseGradQuantProxyFromInjector if per_group else GradQuantProxyFromInjector
