"""How much a model minds that numbers of some of its parameters are others."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.model.walk import ModelIndex
from jqinject.program import Call, SplitCall, dotted
from jqinject.recipes.quantized_parameter import QuantizedParameter
from jqinject.recipes.solvers.solver import output_error
from jqinject.recipes.stream.stream import Visit
from jqinject.recipes.work import Work

Values = dict[str, jax.Array]
Choices = Sequence[Mapping[str, QuantizedParameter]]
Loss = Callable[[Any, Any], jax.Array]
Outputs = Callable[[Values], list[jax.Array]]
LossOf = Callable[[Values], jax.Array]
NEEDS_LOSS = ("gradient", "fisher")
WHOLE_MODEL = (*NEEDS_LOSS, "hessian", "kl")
"""Those for which the whole model runs."""


def errors_of_model(
    work: Work, choices: Choices, paths: Sequence[str], kind: str, loss: Loss | None
) -> Callable[[str], list[float]]:
    """From the path of a parameter to the measure with it alone rounded, at each width: the mean over all batches.

    Args:
        work: with the float model and the data.
        choices: for each width, the quantized parameters.
        paths: of the parameters that are measured.
        kind: which measure, see `AllocateBits`.
        loss: of a model and a batch, or None.
    """
    variables = ModelIndex(work.model).by_name
    values: Values = {path: variables[path].get_value() for path in paths}
    pairs = zip(work.calls, work.batches, strict=True)
    # Compiled once for all parameters.
    measures = [jax.jit(_measure(work.model, call, batch, kind, loss)) for call, batch in pairs]

    def error(parameter: QuantizedParameter) -> float:
        path = parameter.name
        rounded = parameter.nearest(parameter.value.astype(jnp.float32)).astype(values[path].dtype)
        errors = [float(measure(values, {**values, path: rounded})) for measure in measures]
        return sum(errors) / len(errors)

    return lambda path: [error(parameters[path]) for parameters in choices]


def _measure(
    model: nnx.Module, call: Call, batch: object, kind: str, loss: Loss | None
) -> Callable[[Values, Values], jax.Array]:
    """The measure by one batch: of the parameters as they are, and of others."""
    outputs = partial(_outputs, SplitCall(model, call))
    if kind == "kl":
        return partial(_divergence, outputs)
    if loss is None:
        return partial(_distance, outputs)
    of_loss = partial(_outputs, SplitCall(model, Call((batch,), {}, loss)))
    return partial(BY_LOSS[kind], lambda values: of_loss(values)[0])


def _filled(state: Any, values: Values) -> Any:
    """The state of a `SplitCall` with other numbers in some of the model's parameters, by path."""
    filled = []
    for path, variable in nnx.to_flat_state(state):
        value = values.get(dotted(path[1:]))
        filled.append((path, variable.replace(variable.get_value() if value is None else value)))
    return nnx.from_flat_state(filled)


def outputs_of(model: nnx.Module, call: Call) -> Callable[[Values, Sequence[jax.Array]], list[jax.Array]]:
    """The floating-point outputs of a model, float32, as a function of some parameters by path and of a call's arrays.

    Args:
        model: an NNX module.
        call: a call of it; the function's arrays are of it, or of another one with the same flags.
    """
    return partial(_outputs, SplitCall(model, call))


def _outputs(split: SplitCall, values: Values, arrays: Sequence[jax.Array] | None = None) -> list[jax.Array]:
    """The floating-point outputs of a call, float32."""
    model, call = split.merged(_filled(split.state, values), split.arrays if arrays is None else arrays)
    leaves = jax.tree.leaves(call(model))
    return [x.astype(jnp.float32) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


def _differences(values: Values, changed: Values) -> Values:
    return {path: changed[path] - value for path, value in values.items()}


def _dot(a: Values, b: Values) -> jax.Array:
    return sum((jnp.vdot(a[path], b[path]) for path in a), jnp.float32(0)).astype(jnp.float32)


def _divergence(outputs: Outputs, values: Values, changed: Values) -> jax.Array:
    """Kullback-Leibler divergence of the softmax of the outputs' last axis, mean over all others."""
    total = jnp.float32(0)
    for before, after in zip(outputs(values), outputs(changed), strict=True):
        log_p, log_q = jax.nn.log_softmax(before), jax.nn.log_softmax(after)
        total = total + (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean()
    return total


def relative_squares(differences: Sequence[jax.Array], outputs: Sequence[jax.Array]) -> jax.Array:
    """`|d|^2 / |y|^2`: the squares of differences, relative to those of outputs.

    Args:
        differences: of outputs.
        outputs: the outputs.
    """
    total, size = (
        sum((jnp.square(x).sum() for x in arrays), jnp.float32(0)) for arrays in (differences, outputs)
    )
    return total / jnp.where(size > 0, size, 1.0)


def _distance(outputs: Outputs, values: Values, changed: Values) -> jax.Array:
    """`|J d|^2 / |y|^2`: how far the outputs move, to first order."""
    before, moved = jax.jvp(outputs, (values,), (_differences(values, changed),))
    return relative_squares(moved, before)


def _gradient(loss: LossOf, values: Values, changed: Values) -> jax.Array:
    """`|g d|`: how far the loss moves, to first order."""
    return jnp.abs(_dot(jax.grad(loss)(values), _differences(values, changed)))


def _fisher(loss: LossOf, values: Values, changed: Values) -> jax.Array:
    """`g^2 d^2 / 2`, summed: by the diagonal of the empirical Fisher information."""
    gradient, moved = jax.grad(loss)(values), _differences(values, changed)
    return _dot(jax.tree.map(jnp.square, gradient), jax.tree.map(jnp.square, moved)) / 2


def _curvature(loss: LossOf, values: Values, changed: Values) -> jax.Array:
    """`|d H d| / 2`: how far the loss moves to second order."""
    moved = _differences(values, changed)
    return jnp.abs(_dot(moved, jax.jvp(jax.grad(loss), (values,), (moved,))[1])) / 2


BY_LOSS = {"gradient": _gradient, "fisher": _fisher, "hessian": _curvature}


def errors_of_output(visit: Visit, choices: Choices) -> list[float]:
    """The relative error of a site's output at each width.

    Args:
        visit: of the site.
        choices: for each width, the quantized parameters.
    """
    statistics = visit.statistics("hessian")
    original = jnp.asarray(visit.original, jnp.float32)
    weights = visit.site.weights(original)

    def error(parameter: QuantizedParameter) -> float:
        return output_error(visit.site.weights(parameter.nearest(original)) - weights, weights, statistics)

    return [error(parameters[visit.site.path]) for parameters in choices]
