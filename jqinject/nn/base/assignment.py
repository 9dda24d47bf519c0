"""What happens when an attribute of a layer with quantizers is read or assigned."""

from typing import Any, ClassVar, NamedTuple

from flax import nnx

from jqinject.nn.base.weight_input import input_format
from jqinject.proxy import InputFormat, link_if_proxy


class LayerParameters(NamedTuple):
    """What a weight's or bias's proxy may be asked about: it stays when the layer is gone.

    Attributes:
        weight, bias: Variables, or None.
        input_quant: the proxy of the input, or None.
    """

    weight: Any
    bias: Any
    input_quant: Any

    def input_format(self) -> InputFormat | None:
        """Of the quantized input, as far as `input_quant` says it."""
        return input_format(self)


class ReassembledOnAssignment(nnx.Module):
    """Abstract: a proxy knows the layer that it is read from, and a new weight or bias assembles it again."""

    weight_quant: Any = None
    bias_quant: Any = None
    weight_name: ClassVar[str]

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.endswith("_quant"):
            of_parameter = name in ("weight_quant", "bias_quant")
            link_if_proxy(self, value, self._parameters() if of_parameter and value is not None else None)
        return value

    def _parameters(self) -> LayerParameters:
        held = vars(self)
        return LayerParameters(held.get(self.weight_name), held.get("bias"), held.get("input_quant"))

    def __setattr__(self, name: str, value: Any) -> None:
        name = self.weight_name if name == "weight" else name
        before = vars(self).get(name)
        replaced = (
            isinstance(before, nnx.Variable) and isinstance(value, nnx.Variable) and value is not before
        )
        if replaced:
            self._check_known_to_quantizers()
        super().__setattr__(name, value)
        if replaced and name in (self.weight_name, "bias"):
            try:
                for proxy in (self.weight_quant, self.bias_quant):
                    if proxy is not None:
                        proxy.init_tensor_quant()
            except Exception:
                super().__setattr__(name, before)
                raise

    def _check_known_to_quantizers(self) -> None:
        """Refuse to replace a parameter before anything is changed where it could not be assembled again."""
        for proxy in (vars(self).get("weight_quant"), vars(self).get("bias_quant")):
            if proxy is not None:
                proxy.check_layers_known(self)
