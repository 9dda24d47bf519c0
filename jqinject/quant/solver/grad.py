"""The solver of gradients."""

from jqinject.proxy import GradQuantProxyFromInjector
from jqinject.quant.solver.act import ActQuantSolver


class GradQuantSolver(ActQuantSolver):
    """As for activations, and what is recorded belongs to the backward pass.

    List it last among the bases of a quantizer, so that whatever the others declare wins.
    """

    proxy_class = GradQuantProxyFromInjector
    amax_of_gradient = True
