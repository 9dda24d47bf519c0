"""One step of a long short-term memory on quantized numbers."""

from typing import Any

import jax
import jax.numpy as jnp

from jqinject.nn.recurrent._cell import (
    CELL_STATE,
    GATE_ACC,
    SIGMOID,
    TANH,
    Activation,
    CellOutput,
    Quantizers,
    QuantRecurrentCell,
    Slot,
    quantized,
    value_of,
)
from jqinject.quant_tensor import as_array

FORGET = ("forget_acc_quant", "forget_sigmoid_quant")


class QuantLSTMStep(QuantRecurrentCell):
    """Abstract: the arithmetic that cells of long short-term memories share, once the sums of their gates are made."""

    cell_state_quant: Any = CELL_STATE
    input_acc_quant: Any = GATE_ACC.of("input_acc_quant")
    forget_acc_quant: Any = GATE_ACC.of("forget_acc_quant")
    cell_acc_quant: Any = GATE_ACC.of("cell_acc_quant")
    output_acc_quant: Any = GATE_ACC.of("output_acc_quant")
    input_sigmoid_quant: Any = SIGMOID.of("input_sigmoid_quant")
    forget_sigmoid_quant: Any = SIGMOID.of("forget_sigmoid_quant")
    cell_tanh_quant: Any = TANH.of("cell_tanh_quant")
    output_sigmoid_quant: Any = SIGMOID.of("output_sigmoid_quant")
    hidden_state_tanh_quant: Any = TANH.of("hidden_state_tanh_quant")
    coupled_input_forget_gates: bool = False
    gate_fn: Activation
    activation_fn: Activation

    def _held_quantizers(self) -> dict[str, Slot]:
        without = FORGET if self.coupled_input_forget_gates else ()
        return {name: slot for name, slot in self.act_quantizers.items() if name not in without}

    def _update(
        self,
        quantizers: Quantizers,
        sums: tuple[jax.Array, jax.Array | None, jax.Array, jax.Array],
        memory: jax.Array,
    ) -> CellOutput:
        """The new states from the sums of the gates: input, forget (None where it is coupled), cell, output."""
        of_input, of_forget, of_cell, of_output = sums
        i = self._gate(quantizers, "input", of_input)
        f = (
            self._open(quantizers, i) - i
            if of_forget is None
            else self._gate(quantizers, "forget", of_forget)
        )
        g = value_of(quantizers, "cell_acc_quant", of_cell)
        g = value_of(quantizers, "cell_tanh_quant", self.activation_fn(g))
        o = self._gate(quantizers, "output", of_output)
        kept = value_of(quantizers, "cell_state_quant", f * memory)
        added = value_of(quantizers, "cell_state_quant", i * g)
        new_memory = quantized(quantizers, "cell_state_quant", kept + added)
        c = as_array(new_memory)
        shown = value_of(quantizers, "hidden_state_tanh_quant", self.activation_fn(c))
        output = quantized(quantizers, "io_quant", o * shown)
        return CellOutput((c, as_array(output)), output, new_memory)

    def _gate(self, quantizers: Quantizers, gate: str, x: jax.Array) -> jax.Array:
        x = value_of(quantizers, f"{gate}_acc_quant", x)
        return value_of(quantizers, f"{gate}_sigmoid_quant", self.gate_fn(x))

    def _open(self, quantizers: Quantizers, like: jax.Array) -> jax.Array:
        """1 as the quantizer of the input gate represents it: what the coupled gates add up to."""
        return value_of(quantizers, "input_sigmoid_quant", jnp.ones_like(like))
