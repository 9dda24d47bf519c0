"""What happens when a parameter of a layer with quantizers is assigned."""

from typing import Any, ClassVar

from flax import nnx

from jqinject.nn.base.quant_layer import Out, QuantLayer
from jqinject.nn.base.slots import BIAS, WEIGHT


class ReassembledOnAssignment(QuantLayer[Out]):
    """Abstract: a new weight or bias assembles its quantizer again."""

    weight_quant: Any = WEIGHT
    bias_quant: Any = BIAS
    weight_name: ClassVar[str]

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
