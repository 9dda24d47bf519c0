"""Recurrent layers over whole sequences, in layers and directions: weights are quantized once a sequence."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jqinject.core.flax_internals import canonicalize_dtype
from jqinject.nn import recurrent_cell, recurrent_cells
from jqinject.nn.base import Arguments, Out, QuantLayer, Results, Slot, check_features, keywords, through
from jqinject.quant_tensor import AnyQuantTensor, Operand, as_array, concatenate, on_integers


def run(
    cell: recurrent_cell.QuantRecurrentCell,
    inputs: Operand,
    initial: tuple[object, ...],
    *,
    time_axis: int,
    reverse: bool,
    quantize_input: bool,
) -> tuple[Any, Any, Any]:
    """Run a cell along the time axis of its input.

    Args:
        cell: the cell; statistics of its quantizers move as if they were called step by step.
        inputs: float array or QuantTensor, (batch, time, features) or (time, batch, features).
        initial: the hidden state, and of a cell with a memory the cell state: arrays, or None for zeros.
        time_axis: which axis is time: 0 or 1.
        reverse: begin with the last step.
        quantize_input: whether the input goes through `io_quant`.

    Returns:
        The hidden states of all steps, an `IntQuantTensor` where they are quantized; the last one; and the last cell
        state, None of cells without one.
    """
    x = through(cell.io_quant, inputs) if quantize_input else inputs
    parameters = cell._quant_parameters(x)
    array = as_array(x)
    carry = _initial_carry(cell, array, initial, time_axis)
    projected = cell._projected(parameters, array)
    by_step = {name: jnp.moveaxis(part, time_axis, 0) for name, part in projected.items()}
    quantizers = dict(cell._quantizers())
    graphdef, state = nnx.split(quantizers, graph=True)
    structures: list[Any] = []

    def body(carried: Any, projected: Any) -> Any:
        state, carry = carried
        copies = nnx.merge(graphdef, state)
        result = cell._step(recurrent_cell.CellParts(copies, parameters), carry, projected)
        tensors = result.output, result.memory
        tensors = [x if x is None or on_integers(x) else as_array(x) for x in tensors]
        structures[:] = map(jax.tree.structure, tensors)
        of_output, of_memory = map(jax.tree.leaves, tensors)  # a tensor's value is its first leaf
        return (nnx.state(copies, graph=True), result.carry), (of_output, of_memory[1:])

    (state, carry), (of_output, of_memory) = jax.lax.scan(body, (state, carry), by_step, reverse=reverse)
    nnx.update(quantizers, state)
    last = 0 if reverse else -1
    values, *metadata = of_output
    output = jax.tree.unflatten(structures[0], [leaf[last] for leaf in of_output])
    # In training mode scales differ from step to step.
    metadata = [x.mean(axis=0) if output.training else x[0] for x in metadata]
    outputs = jax.tree.unflatten(structures[0], [jnp.moveaxis(values, 0, time_axis), *metadata])
    if not isinstance(carry, tuple):
        return outputs, output, None
    return outputs, output, jax.tree.unflatten(structures[1], [carry[0], *(x[last] for x in of_memory)])


def _initial_carry(
    cell: Any, x: jax.Array, initial: tuple[object, ...], time_axis: int
) -> tuple[jax.Array, ...] | jax.Array:
    """The carry before the first step: zeros, or what was given, quantized."""
    steps, batch = x.shape[time_axis], x.shape[1 - time_axis]
    if steps == 0:
        raise ValueError(f"a recurrent layer needs at least one time step, got an input of shape {x.shape}")
    shape = (batch, cell.hidden_features)
    dtype = canonicalize_dtype(x, jnp.zeros((), cell.param_dtype), dtype=cell.dtype)
    slots = ("io_quant", "cell_state_quant")

    def state(start: Any, slot: str) -> jax.Array:
        if start is None:
            return jnp.zeros(shape, dtype)
        if start.shape != shape:
            raise ValueError(f"an initial state has to be (batch, hidden) = {shape}, got {start.shape}")
        proxy = getattr(cell, slot)
        return as_array(start if proxy is None else proxy(start)).astype(dtype)

    states = [state(start, slot) for start, slot in zip(initial, slots[: len(initial)], strict=True)]
    return (states[1], states[0]) if len(states) == 2 else states[0]


class QuantRecurrentStack(QuantLayer[Out]):
    """Abstract: layers of recurrent cells over whole sequences.

    Attributes:
        layers: layer -> direction -> the cell.
        batch_first: whether the batch comes before time.
        return_quant_tensor: whether results are QuantTensors.
        cell_class: the class of the cells.
        state_quantizers: the quantizers of the states that are returned.
        crossed: layer of the backward cell -> the layer of the forward cell that it takes if they are shared.
    """

    layers: Any
    batch_first: bool
    return_quant_tensor: bool
    cell_class: ClassVar[Any]
    state_quantizers: ClassVar[tuple[str, ...]]
    crossed: ClassVar[Mapping[str, str]]

    @classmethod
    def override_slots(cls) -> tuple[Slot, ...]:
        """Those of the cells."""
        return cls.cell_class.override_slots()

    def _init_quantizers(self, arguments: Arguments, overrides: Arguments, rngs: nnx.Rngs | None) -> None:
        """Make the cells.

        Args:
            arguments: those of `__init__`; the cells take those that they know.
            overrides: further keywords of the cells.
            rngs: among the arguments of the cells.
        """
        kind, num_layers, hidden_size = type(self).__name__, arguments["num_layers"], arguments["hidden_size"]
        directions = 2 if arguments["bidirectional"] else 1
        self.batch_first, self.return_quant_tensor = (
            arguments["batch_first"],
            arguments["return_quant_tensor"],
        )
        missing = next((name for name in self.state_quantizers if arguments[name] is None), None)
        if self.return_quant_tensor and missing is not None:
            raise self._no_scale_to_return(missing)
        if num_layers < 1:
            raise ValueError(f"{kind}: num_layers has to be at least 1, got {num_layers}")
        if arguments["shared_input_hidden_weights"] and directions == 1:
            raise ValueError(
                f"{kind}(shared_input_hidden_weights=True) shares the weights of the input between two "
                "directions.\n  cure: bidirectional=True"
            )
        crossed = self.crossed if arguments["shared_input_hidden_weights"] else {}
        shared = [name for name in self.state_quantizers if arguments.get(f"shared_{name}", True)]
        bound = 1.0 / math.sqrt(hidden_size)

        def draw(key: Any, shape: Any, dtype: DTypeLike = float, **_: object) -> jax.Array:
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        parameters = inspect.signature(self.cell_class).parameters.values()
        names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        of_cells: dict[str, Any] = {
            **{"kernel_init": draw, "recurrent_kernel_init": draw, "bias_init": draw},
            **{"use_bias": arguments["bias"], **overrides},
            **{name: argument for name, argument in arguments.items() if name in names},
        }
        layers = []
        for layer in range(num_layers):
            features = arguments["input_size"] if layer == 0 else hidden_size * directions
            cells: list[Any] = []
            for _ in range(directions):
                forward = vars(cells[0]) if cells else {}
                # With coupled gates there is nothing to cross, and each direction has an input gate of its own.
                taken = {n: forward[of] for n, of in crossed.items() if n in forward and of in forward}
                cells.append(self.cell_class(features, hidden_size, input_layers=taken, **of_cells))
                of_cells = _sharing(of_cells, shared, cells[-1])
            layers.append(nnx.List(cells))
        self.layers = nnx.List(layers)

    def _run(self, inputs: Any, initial: tuple[Any, ...]) -> tuple[Any, list[Any], list[Any]]:
        """All layers.

        Args:
            inputs: those of the call.
            initial: the states of all layers and directions, each an array or None.

        Returns:
            The outputs of the last layer, and by layer and direction the last hidden and cell states.
        """
        if inputs.ndim != 3:
            axes = "(batch, time, features)" if self.batch_first else "(time, batch, features)"
            raise ValueError(f"{type(self).__name__} takes {axes}, got shape {tuple(inputs.shape)}")
        check_features(self, inputs, {-1: self.layers[0][0].in_features}, argument="input_size")
        count = sum(len(cells) for cells in self.layers)
        for states in initial:
            if states is not None and states.shape[0] != count:
                raise ValueError(
                    f"{type(self).__name__}: an initial state has one row for each layer and direction, here {count}, "
                    f"got shape {tuple(states.shape)}"
                )
        outputs: list[Any] = []
        memories: list[Any] = []
        for number, cells in enumerate(self.layers):
            sequences = []
            for direction, cell in enumerate(cells):
                hidden, output, memory = run(
                    cell,
                    inputs,
                    tuple(None if states is None else states[len(outputs)] for states in initial),
                    time_axis=1 if self.batch_first else 0,
                    reverse=direction == 1,
                    quantize_input=number == 0,
                )
                sequences.append(hidden)
                outputs.append(output[None])
                memories.append(None if memory is None else memory[None])
            inputs = sequences[0] if len(sequences) == 1 else concatenate(sequences, axis=-1)
        return inputs, outputs, memories

    def _returned(self, tensor: object) -> Any:
        """A result as the user wants it: a tensor, or the states of layers and directions to be joined."""
        if isinstance(tensor, list):
            tensor = tensor[0] if len(tensor) == 1 else concatenate(tensor, axis=0)
        return tensor if self.return_quant_tensor and on_integers(tensor) else as_array(tensor)


def _sharing(arguments: Mapping[str, object], shared: Sequence[str], cell: object) -> dict[str, object]:
    """Arguments of the cells after one, which share some of its quantizers."""
    prefixes = tuple(name.removesuffix("quant") for name in shared)
    unshared = {name: argument for name, argument in arguments.items() if not name.startswith(prefixes)}
    return unshared | {name: getattr(cell, name) for name in shared}


NONLINEARITIES = {"tanh": nnx.tanh, "relu": nnx.relu}


@final
class QuantLSTM(QuantRecurrentStack[Out]):
    """Long short-term memories over whole sequences, quantized; `torch.nn.LSTM` with Brevitas's quantizers.

    `layers[layer][direction]` is a `QuantLSTMCell`, which says what is quantized where. Weights are quantized once a
    sequence, activations at every step: each call of a quantizer counts for its statistics, as in Brevitas. All layers
    and directions share `io_quant`, and with `shared_cell_state_quant` the quantizer of cell states. The first layer
    quantizes its input; the others get what is quantized already.

    Source: Brevitas's `QuantLSTM`. Differs from Brevitas: parameters are those of `nnx.LSTMCell` (kernels are
    (in, out); `jqinject.formats.recurrent_state_from_torch` converts); no slot has a quantizer by default; initial
    states of several layers in one direction are understood; an override without effect is an error.

    Args:
        input_size: features of the input.
        hidden_size: features of the hidden state.
        num_layers: layers, each of which runs over the outputs of the one before.
        bias: whether there are biases.
        batch_first: whether data is (batch, time, features) instead of (time, batch, features).
        bidirectional: also run backwards; the outputs of both directions stand side by side.
        weight_quant: quantizer of the weights; the two of a gate share it.
        bias_quant: quantizer of the biases; `Int32Bias` counts in steps of input scale * weight scale.
        io_quant: quantizer of the input and of the hidden states.
        gate_acc_quant: quantizer of each gate's sum.
        sigmoid_quant: quantizer of the gates.
        tanh_quant: quantizer of the cell's input, and of the tanh of its state.
        cell_state_quant: quantizer of the cell state and its two parts.
        coupled_input_forget_gates: forget gate = 1 - input gate, without its own weights.
        cat_output_cell_states: return the cell states as one array instead of a tuple.
        shared_input_hidden_weights: both directions have the kernels of the input in common (input and forget gate
            crossed, as in Brevitas).
        shared_intra_layer_weight_quant: one weight quantizer for all gates of a cell.
        shared_intra_layer_gate_acc_quant: one quantizer for the sums of all gates of a cell.
        shared_cell_state_quant: one quantizer for the cell states of all cells.
        return_quant_tensor: return `IntQuantTensor`s; in training mode with the mean of the scales of all steps.
        rngs: for the parameters, and for quantizers that draw random numbers.
        more: `dtype`, `param_dtype` and other keywords of `nnx.LSTMCell`, and overrides: `weight_...`, `bias_...`,
            `io_...`, `gate_acc_...`, `sigmoid_...`, `tanh_...`, `cell_state_...`.

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: arguments that do not go together; the text names them.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat
        >>> lstm = QuantLSTM(
        ...     3, 4, batch_first=True, weight_quant=Int8WeightPerTensorFloat, weight_bit_width=4,
        ...     io_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
        >>> out, (h, c) = lstm(jnp.ones((2, 5, 3)))
        >>> out.shape, h.shape, c.shape
        ((2, 5, 4), (1, 2, 4), (1, 2, 4))
    """

    cell_class = recurrent_cells.QuantLSTMCell
    state_quantizers = ("io_quant", "cell_state_quant")
    # The input gate takes the kernel of the forget gate and the other way round, as in Brevitas, whose models would
    # give other numbers else.
    crossed = {"ii": "if_", "if_": "ii", "ig": "ig", "io": "io"}

    _results: "Results[QuantLSTM[jax.Array], QuantLSTM[AnyQuantTensor]]"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        bidirectional: bool = False,
        *,
        coupled_input_forget_gates: bool = False,
        cat_output_cell_states: bool = True,
        shared_input_hidden_weights: bool = False,
        shared_intra_layer_weight_quant: bool = False,
        shared_intra_layer_gate_acc_quant: bool = False,
        shared_cell_state_quant: bool = True,
        rngs: nnx.Rngs,
        **more: Unpack[keywords.QuantLSTMKeywords],
    ) -> None:
        if (
            cat_output_cell_states
            and more.get("cell_state_quant") is not None
            and not shared_cell_state_quant
        ):
            raise ValueError(
                "QuantLSTM: cell states that are quantized each by a quantizer of its own cannot be one array.\n"
                "  cure: cat_output_cell_states=False, or shared_cell_state_quant=True"
            )
        self.cat_output_cell_states = cat_output_cell_states
        self._init_layer(locals())

    def __call__(self, inputs: Any, hx: Any = None, cx: Any = None) -> tuple[Out, tuple[Out, Any]]:
        """Run over sequences.

        Args:
            inputs: float array or QuantTensor, (time, batch, features), or (batch, time, features) with `batch_first`.
            hx: initial hidden states, (layers * directions, batch, hidden); None for zeros.
            cx: initial cell states likewise.

        Returns:
            (outputs, (hidden, cell)): the hidden states of the last layer at all steps, and the last states of all
            layers and directions, (layers * directions, batch, hidden); with `cat_output_cell_states=False` the cell
            states as a tuple.

        Raises:
            ValueError: a wrong shape; a bias takes its scale from an input that is not quantized.
        """
        out, hidden, cells = self._run(inputs, (hx, cx))
        joins = self.cat_output_cell_states
        memory = self._returned(cells) if joins else tuple(self._returned(cell) for cell in cells)
        return self._returned(out), (self._returned(hidden), memory)


@final
class QuantRNN(QuantRecurrentStack[Out]):
    """Simple recurrent layers over whole sequences, quantized; `torch.nn.RNN` with Brevitas's quantizers.

    `layers[layer][direction]` is a `QuantSimpleCell`, which says what is quantized where; its bias stands in `dense_h`.
    Weights are quantized once a sequence, activations at every step. All layers and directions share `io_quant`. The
    first layer quantizes its input; the others get what is quantized already.

    Source: Brevitas's `QuantRNN`. Differs from Brevitas: no slot has a quantizer by default; that of the sums has no
    prefix of its own, and its learned scale does not begin with a random number added; kernels are (in, out)
    (`jqinject.formats.recurrent_state_from_torch` converts); initial states of several layers in one direction are
    understood; an override without effect is an error.

    Args:
        input_size: features of the input.
        hidden_size: features of the hidden state.
        num_layers: layers, each of which runs over the outputs of the one before.
        nonlinearity: "tanh" or "relu".
        bias: whether there are biases.
        batch_first: whether data is (batch, time, features) instead of (time, batch, features).
        bidirectional: also run backwards; the outputs of both directions stand side by side.
        weight_quant: quantizer of the weights; the two of a cell share it.
        bias_quant: quantizer of the biases; `Int32Bias` counts in steps of input scale * weight scale.
        io_quant: quantizer of the input and of the hidden states.
        gate_acc_quant: quantizer of the sums.
        shared_input_hidden_weights: both directions have the kernel of the input in common.
        return_quant_tensor: return `IntQuantTensor`s; in training mode with the mean of the scales of all steps.
        rngs: for the parameters, and for quantizers that draw random numbers.
        more: `dtype`, `param_dtype` and other keywords of `nnx.SimpleCell`, and overrides: `weight_...`, `bias_...`,
            `io_...`, `gate_acc_...` (`gate_acc_quant_...` means the same, as Brevitas writes it).

    Raises:
        TypeError: an argument that is not a quantizer or is one of another kind, or an override that has no effect.
        ValueError: arguments that do not go together; the text names them.
        DependencyError: a quantizer that cannot be assembled; the text shows the path.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant import Int8WeightPerTensorFloat
        >>> rnn = QuantRNN(
        ...     3, 4, num_layers=2, bidirectional=True, weight_quant=Int8WeightPerTensorFloat, rngs=nnx.Rngs(0))
        >>> out, h = rnn(jnp.ones((5, 2, 3)))
        >>> out.shape, h.shape
        ((5, 2, 8), (4, 2, 4))
    """

    cell_class = recurrent_cells.QuantSimpleCell
    state_quantizers = ("io_quant",)
    crossed = {"dense_i": "dense_i"}

    _results: "Results[QuantRNN[jax.Array], QuantRNN[AnyQuantTensor]]"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        bidirectional: bool = False,
        *,
        shared_input_hidden_weights: bool = False,
        rngs: nnx.Rngs,
        **more: Unpack[keywords.QuantRNNKeywords],
    ) -> None:
        if nonlinearity not in NONLINEARITIES:
            names = " or ".join(map(repr, NONLINEARITIES))
            raise ValueError(f"QuantRNN: nonlinearity has to be {names}, got {nonlinearity!r}")
        own = {"bias_of_hidden": bias, "activation_fn": NONLINEARITIES[nonlinearity], "dtype": None}
        overrides = {key.replace("gate_acc_quant_", "gate_acc_", 1): value for key, value in more.items()}
        self._init_declared(locals(), {**own, **overrides})

    def __call__(self, inputs: Any, hx: jax.Array | None = None) -> tuple[Out, Out]:
        """Run over sequences.

        Args:
            inputs: float array or QuantTensor, (time, batch, features), or (batch, time, features) with `batch_first`.
            hx: initial hidden states, (layers * directions, batch, hidden); None for zeros.

        Returns:
            (outputs, hidden): the hidden states of the last layer at all steps, and the last ones of all layers and
            directions, (layers * directions, batch, hidden).

        Raises:
            ValueError: a wrong shape; a bias takes its scale from an input that is not quantized.
        """
        out, hidden, _ = self._run(inputs, (hx,))
        return self._returned(out), self._returned(hidden)
