"""`FunctionModel`: a pure function of parameters as an NNX module, and back: models of other libraries."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jqinject.core.component import hidden_method
from jqinject.inject.errors import did_you_mean
from jqinject.program.kept_state import node_at
from jqinject.program.policy import HELD, dotted
from jqinject.program.tracked_value import Path

Function = Callable[..., object]
LEAVES = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
#: The name of a pytree that is a single array.
SINGLE = "params"


class FunctionState(NamedTuple):
    """The state of a function with quantizers, a pytree of arrays.

    Attributes:
        params: the parameters, in the structure of the user's own, with None in the place of what is no array; of a
            frozen model, a dict of the payload, the scale and so on in the place of each quantized array.
        quantizers: the state of the quantizers, nested dicts: learned scales, statistics, histories, random keys.
    """

    params: object
    quantizers: dict[str, object]


@dataclass(frozen=True)
class _Structure:
    """How parameters are put together.

    Attributes:
        tree: the structure of the pytree.
        paths: of its leaves in the model.
        constants: its leaves that are no arrays; None in the place of an array.
    """

    tree: Any
    paths: tuple[Path, ...]
    constants: tuple[Hashable, ...]

    def filled(self, value_of: Callable[[Path], object], constants: Sequence[object]) -> object:
        """Return the pytree.

        Args:
            value_of: a path -> what is in an array's place.
            constants: what is in the places of leaves that are no arrays.
        """
        rows = zip(self.paths, self.constants, constants, strict=True)
        leaves = [value_of(path) if own is None else constant for path, own, constant in rows]
        return jax.tree.unflatten(self.tree, leaves)

    def arrays_of(self, params: object) -> dict[Path, object]:
        """Return what is in the places of arrays, by path.

        Raises:
            ValueError: the pytree has another structure.
        """
        try:
            leaves = self.tree.flatten_up_to(params)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"FunctionModel: these parameters have another structure than the model's: {error}\n"
                "  cure: parameters like model.state.params"
            ) from None
        rows = zip(self.paths, self.constants, leaves, strict=True)
        return {path: leaf for path, constant, leaf in rows if constant is None}


class _Branch(nnx.Module):
    """What is below one key of a pytree; without methods, so that any key can be an attribute."""


class FunctionModel(nnx.Module):
    """A function `f(params, *inputs)` and its parameters as an NNX module, which everything in jqinject takes.

    Equinox modules, the parameters of Linen's and Haiku's `apply`, dicts and lists: a pytree of any kind. Each
    floating-point array becomes an `nnx.Param`, any other array an `nnx.Variable`, under the path that the pytree has
    there, written with dots: `layers.0.weight`. Leaves that are no arrays, such as the activation functions of an
    Equinox module, are constants.

    The call `model(*inputs)` is `f(params, *inputs)`. `model.state` and `model.apply` are the model as a pure function
    for `jax.jit`, `jax.grad`, `jax.vmap` and the like.

    Args:
        function: f, which takes the parameters first; pure, hashable.
        params: its parameters, arrays or `jax.ShapeDtypeStruct`s.

    Raises:
        TypeError: `function` cannot be called; an unhashable leaf that is no array.
        ValueError: no floating-point array among the parameters; two leaves with one path; a path that begins with
            the name of a method of the model.

    Example:
        >>> import jax.numpy as jnp
        >>> model = FunctionModel(lambda params, x: x @ params["w"] + params["b"], {"w": jnp.eye(2), "b": jnp.ones(2)})
        >>> model(jnp.ones(2)), model.w.shape
        (Array([2., 2.], dtype=float32), (2, 2))
        >>> y, state = jax.jit(model.apply)(model.state, jnp.zeros(2))
        >>> y, state.params["b"]
        (Array([1., 1.], dtype=float32), Array([1., 1.], dtype=float32))
    """

    def __init__(self, function: Function, params: object) -> None:
        if not callable(function) or isinstance(function, linen.Module):
            written = "module.apply, variables" if callable(function) else "lambda params, x: ..., params"
            raise TypeError(
                f"FunctionModel takes a function of parameters, got {type(function).__name__}.\n"
                f"  cure: FunctionModel({written})"
            )
        flat, tree = jax.tree_util.tree_flatten_with_path(params)
        paths = tuple(tuple(map(_name, path)) or (SINGLE,) for path, _ in flat)
        leaves = [leaf for _, leaf in flat]
        constants = tuple(None if isinstance(leaf, LEAVES) else leaf for leaf in leaves)
        self.function = function
        self._structure = _Structure(tree, paths, constants)
        _check(self._structure, function, leaves)
        for path, leaf in self._structure.arrays_of(params).items():
            parent: nnx.Module = self
            for name in path[:-1]:
                if name not in vars(parent):
                    setattr(parent, name, _Branch())
                parent = vars(parent)[name]
            kind = nnx.Param if _is_float(leaf) else nnx.Variable
            setattr(parent, path[-1], kind(jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf))

    def __call__(self, *inputs: object, **kwargs: object) -> Any:
        """Return `f(params, *inputs, **kwargs)`."""
        structure = self._structure
        params = structure.filled(lambda path: node_at(self, path)[...], structure.constants)
        return self.function(params, *inputs, **kwargs)

    @property
    def state(self) -> FunctionState:
        """The parameters and the state of the quantizers."""
        structure = self._structure
        nothing = (None,) * len(structure.constants)  # `jax.jit` takes no functions
        params = structure.filled(lambda path: node_at(self, path).get_raw_value(), nothing)
        quantizers = vars(self).get(HELD)
        state = {} if quantizers is None else nnx.as_pure(nnx.state(quantizers, graph=True))
        return FunctionState(params, dict(state))

    @hidden_method
    def apply(self, state: FunctionState, *inputs: object, **kwargs: object) -> tuple[Any, FunctionState]:
        """Call the function with a state, without a change of the model: pure.

        Args:
            state: as `state`, from which its parameters or its quantizers may have been replaced.
            inputs, kwargs: of the function.

        Returns:
            The outputs, and the state after the call: in training mode statistics have changed.

        Raises:
            ValueError: the state has another structure than the model.
        """
        copy = nnx.clone(self, graph=True)
        copy.update(state)
        outputs = copy(*inputs, **kwargs)
        return outputs, copy.state

    @hidden_method
    def update(self, state: FunctionState) -> None:
        """Write a state into the model.

        Args:
            state: as `state`.

        Raises:
            ValueError: the state has another structure or other shapes than the model; nothing is changed then.
        """
        arrays, own = self._structure.arrays_of(state.params), self.state
        _check_like(_by_name(self._structure.arrays_of(own.params)), _by_name(arrays))
        _check_like(own.quantizers, state.quantizers)
        for path, value in arrays.items():
            node_at(self, path).set_raw_value(value)
        quantizers = vars(self).get(HELD)
        if quantizers is not None:
            nnx.update(quantizers, state.quantizers)


def _by_name(arrays: Mapping[Path, object]) -> dict[str, object]:
    return {dotted(path): leaf for path, leaf in arrays.items()}


def _check_like(own: Mapping[str, object], arrays: Mapping[str, object]) -> None:
    """Refuse arrays of other names or shapes than the model's own."""
    expected, actual = _shapes(own), _shapes(arrays)
    for name in sorted({*expected, *actual}):
        if expected.get(name) != actual.get(name):
            shapes = [str(shapes.get(name, "nothing")) for shapes in (actual, expected)]
            hint = did_you_mean(name, expected.keys() - actual.keys()) if name not in expected else ""
            raise ValueError(
                f"FunctionModel: {name}{hint and f', {hint}'}: the state has {shapes[0]}, the model {shapes[1]}.\n"
                "  cure: a state like model.state, with arrays of the same shapes"
            )


def _shapes(tree: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree.leaves_with_path(dict(tree))
    return {jax.tree_util.keystr(path, simple=True, separator="."): jnp.shape(leaf) for path, leaf in leaves}


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, LEAVES) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _check(structure: _Structure, function: Function, leaves: Sequence[object]) -> None:
    """Refuse parameters that no model can be made of."""
    if not any(map(_is_float, leaves)):
        kinds = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves)) or "nothing"
        raise ValueError(
            f"FunctionModel: no floating-point array among the parameters, which hold {kinds}.\n"
            "  cure: FunctionModel(f, params), whose f takes params, a pytree of arrays, first"
        )
    for value in (function, *structure.constants):
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"FunctionModel: a constant must be hashable, got {type(value).__name__} {value!r:.80}.\n"
                "  cure: an array in its place; or bind it to the function"
            ) from None
    paths = sorted(structure.paths)
    for path, following in pairwise(paths):
        if following[: len(path)] == path:
            raise ValueError(
                f"FunctionModel: {dotted(path)} and {dotted(following)} cannot both be paths of parameters; a dot "
                "within a key is written as an underscore.\n  cure: rename one of the keys"
            )
    taken = next((path for path in paths if path[0] in RESERVED), None)
    if taken is not None:
        raise ValueError(
            f"FunctionModel: {dotted(taken)} begins with the name of an attribute of the model itself.\n"
            "  cure: params one level below, {'params': params}, and f that takes them from there"
        )


def _name(key: object) -> str:
    """The name of one key of a pytree's path, without dots, which separate names."""
    return jax.tree_util.keystr((key,), simple=True).replace(".", "_")


RESERVED = frozenset({*dir(FunctionModel), "function", "_structure", HELD})
