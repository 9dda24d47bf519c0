"""One operand of a contraction: the axes that its quantizer sees, and the quantizer, assembled once."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core.component import InnerModule
from jqinject.core.state import QuantParam
from jqinject.dot.geometry.dimensions import Labels
from jqinject.dot.schemes.product_transforms import transform_of
from jqinject.dot.schemes.scheme import FORWARD, GRADIENTS, Kept, SchemeSpec
from jqinject.dot.tensors import backward_quantizer, labelled_tensor
from jqinject.inject import Binding
from jqinject.quant_tensor.array_methods import attribute

PARAMETERS = ("weight", "parameter")
ROTATED = ("activation", "gradient")
MODES = ("use_running_average", "deterministic")


@dataclass(frozen=True)
class OperandAxes:
    """The axes of an operand.

    Attributes:
        shape: its shape.
        summed: the axes that its product sums over.
        free: its free axes.
    """

    shape: tuple[int, ...]
    summed: tuple[int, ...]
    free: tuple[int, ...]

    @classmethod
    def of(cls, x: labelled_tensor.LabelledTensor, summed: Labels) -> "OperandAxes":
        """The axes of a labelled tensor in a product that sums over some labels."""
        over = tuple(x.axis(label) for label in x.labels if label in summed)
        free = [label for label in x.labels if label not in summed and label[0] not in ("batch", "tile")]
        return cls(tuple(x.tensor.shape), over, tuple(map(x.axis, free)))

    @property
    def channels(self) -> tuple[int, ...]:
        """The axes that the product keeps."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.summed)

    @property
    def channel_dim(self) -> int | tuple[int, ...]:
        """The axis of `channels`; a tuple if there are several."""
        return self.channels[0] if len(self.channels) == 1 else self.channels

    @property
    def features(self) -> tuple[int, ...]:
        """The shape of a per-feature scale: the last summed axis comes last."""
        return (self.shape[self.summed[-1]],) if self.summed else self.shape[-1:]

    def without_rows(self, name: str) -> "OperandAxes":
        """What the state of an activation or a gradient may depend on: the features, and no number of rows.

        Args:
            name: of the operand; a product for `dw` sums over rows.
        """
        features = (1,) if name.startswith("wgrad") else self.features
        return OperandAxes(features, tuple(range(len(features))), ())

    @property
    def sized(self) -> bool:
        """Whether all lengths are known, as in any program but an export for any size."""
        return all(isinstance(size, int) for size in self.shape)


class QuantOperand(InnerModule):
    """The quantizer of one operand, and the stand-in for its layer.

    Attributes:
        quant: the proxy.
        axes: axes of its operand.
        draws: whether the quantizer draws random numbers.
        keeps_state: whether it has Variables other than random streams.

    Args:
        name: of the operand in its scheme.
        binding: the quantizer's injector.
        axes: see above.
        rngs: for a quantizer that draws random numbers.
        where: the user's callable and the operand, for errors.
        modes: the arguments of `Contraction.set_view`.

    Raises:
        TypeError: the quantizer does not fit the operand.
    """

    bias = None
    rotates_both_operands = True

    def __init__(
        self,
        name: str,
        binding: Binding,
        axes: OperandAxes,
        rngs: nnx.Rngs | None,
        where: str,
        modes: tuple[bool, bool],
    ) -> None:
        self.axes = axes
        if not binding.declares("proxy_class"):
            raise TypeError(
                f"{where}: {binding.base.__name__} does not say what it quantizes.\n  cure: derive it from a "
                "quantizer of jqinject.quant, or declare proxy_class = jqinject.proxy.ActQuantProxyFromInjector"
            )
        proxy_class = binding.resolve("proxy_class", module=self)
        offered = {"activation_channel_shape": axes.features}
        self.quant = proxy_class(binding, self, offered=offered, rngs=rngs, where=(where, ""))
        why = _why_misplaced(name, binding, self.quant)
        if why:
            raise TypeError(
                f"{where}: {binding.base.__name__} does not go here: {why}.\n  cure: {_cure(name)}"
            )
        state = nnx.state(self.quant, graph=True)
        streams, others = nnx.split_state(state, nnx.RngState, ...)
        self.draws = bool(jax.tree.leaves(streams))
        self.keeps_state = bool(jax.tree.leaves(others))
        modes_by_name = dict(zip(MODES, modes, strict=True))
        self.set_attributes(**modes_by_name, raise_if_not_found=False, graph=True)

    def drawing_from(self, stream: nnx.RngStream) -> "QuantOperand":
        """A copy whose random streams begin at the next keys of another one.

        Args:
            stream: the source of keys.
        """
        graphdef, keys, counts, others = nnx.split(self, nnx.RngKey, nnx.RngCount, ..., graph=True)
        # Mapped, so that the copy has Variables of its own, of the trace that it is made in; its counters begin there
        # as well, since a backward pass would keep those of an array from outside.
        keys, counts = jax.tree.map(lambda _: stream(), keys), jax.tree.map(jnp.zeros_like, counts)
        return nnx.merge(graphdef, keys, counts, jax.tree.map(lambda x: x, others))

    @property
    def weight(self) -> Any:
        """The operand as known before a call: its shape."""
        return jax.ShapeDtypeStruct(self.axes.shape, jnp.float32)

    weight_shape: tuple[int, ...] = attribute("axes.shape", "Its shape.")
    output_channel_dim: int | tuple[int, ...] = attribute("axes.channel_dim", "What its product keeps.")

    @property
    def weight_ndim(self) -> int:
        """How many axes it has."""
        return len(self.axes.shape)


@lru_cache(maxsize=1024)
def assembled(
    name: str, binding: Binding, axes: OperandAxes, where: str, modes: tuple[bool, bool] = (False, False)
) -> QuantOperand:
    """The quantizer of an operand, assembled once for all calls and traces.

    One without state is used as it is by everybody, as nothing writes to it. One with state only says so, and one that
    draws random numbers is copied for each call (`QuantOperand.drawing_from`).

    Args:
        name, binding, axes, where: as for `QuantOperand`.
        modes: in their order.
    """
    with jax.ensure_compile_time_eval():
        return QuantOperand(name, binding, axes, None, where, modes)


def sampled(scheme: SchemeSpec) -> dict[str, QuantOperand | None]:
    """The quantizers of a scheme for operands of any axes; None for one that needs its real ones, or is refused."""

    def sample(name: str, binding: Binding) -> QuantOperand | None:
        try:
            return assembled(name, binding, OperandAxes((32, 32), (0,), (1,)), "scheme")
        except (TypeError, ValueError):
            return None

    return {name: sample(name, binding) for name, binding in scheme.quantizers.items()}


def _why_misplaced(name: str, binding: Binding, proxy: Any) -> str:
    """Why a quantizer does not fit an operand; empty if it does."""
    if transform_of(binding) is not None and proxy.role not in (*PARAMETERS, *ROTATED):
        return f"it quantizes {proxy.role}s, which go through no pre_transform"
    if proxy.role in ("bias", "accumulator"):
        return f"it quantizes {proxy.role}s, and none is an operand"
    if name in GRADIENTS:
        if proxy.role in PARAMETERS:
            return "it quantizes weights, and this operand is a gradient"
        return backward_quantizer.why_not_backward(proxy)
    if name not in FORWARD and any(isinstance(x, QuantParam) for _, x in nnx.iter_graph(proxy, graph=True)):
        return "it learns a parameter, which no derivative reaches from a backward product"
    return ""


def _cure(name: str) -> str:
    if name in GRADIENTS:
        return (
            "a ...Grad... quantizer of jqinject.quant (Int8DynamicGradPerRowFloat, Fp8e5m2GradPerTensorDelayed), or a "
            "dynamic one of activations"
        )
    if name in FORWARD:
        return "a quantizer of weights or activations"
    return f"{Kept.FPROP}, what the forward product took; or a quantizer whose scale follows from the tensor"
