"""`stablehlo`: exports a model as a StableHLO program that needs neither the model nor this package."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export
from jax.typing import ArrayLike

from jqinject.export._model import ExportedCall, PyTree, checked_path, needed, serving_copy
from jqinject.program import CALL, Call, Method, checked_method

WEIGHTS = ("constants", "argument")


class stablehlo:
    """A model's program in evaluation mode, exported by `jax.export`.

    `stablehlo(model, *inputs, **keywords)` exports, `stablehlo.load(path)` reads a file that `save` wrote. The model is
    not changed; a copy of it is traced, in evaluation mode. Stored integers stay integers (`tensor<...xi8>`; 4-bit and
    narrower ones packed into bytes), and composites (`jax.lax.composite`) stay composites. If the model returns a
    QuantTensor, the program returns its value.

    The result, called or loaded anywhere, equals that of `nnx.jit` of the model on the same platform, bit for bit: the
    compiler is kept from folding the weights into other operations, except in programs with composites, whose compilers
    have to see that a weight is a constant. Compiled kernels add float32 sums (of float inputs,
    and of integers in groups) in another order: there it is that of layers with `contraction="float"`.

    It contains no kernels of `jqinject.native` and no layout constraints, so it runs anywhere.

    Args:
        model: an NNX module, quantized or not, frozen or not.
        inputs, keywords: the model's arguments: arrays, or `jax.ShapeDtypeStruct`s, whose shape may have symbolic sizes
            (`jax.export.symbolic_shape("batch, 8")`), or pytrees of them. Everything else (flags, None, modules)
            becomes a part of the program.
        weights: "constants": the program holds them, and only needs its inputs. "argument": it takes them when called,
            as a dict from path to array; for large models, and for several sets of weights.
        method: the method that they are arguments of: its name, or a function that takes the model first.
        platforms: names of JAX platforms, such as `("cpu", "cuda")`; None means the current one.
        allow_uncalibrated: go on even if static ranges of activations never saw data.

    Attributes:
        exported: the `jax.export.Exported`.
        weights: path -> array, with `weights="argument"`; otherwise, and in a loaded program, None.

    Raises:
        TypeError: `model` is not an NNX module, or there are no arrays among its arguments.
        ValueError: the model has no such method; the call changes a module among its arguments; `weights` is neither
            "constants" nor "argument"; a static range that never saw data, named by path.

    Example:
        >>> import jax.numpy as jnp
        >>> import jqinject
        >>> from jqinject.nn import QuantLinear
        >>> layer = jqinject.freeze(QuantLinear(8, 4, rngs=nnx.Rngs(0)))
        >>> (batch,) = export.symbolic_shape("batch")
        >>> program = stablehlo(layer, jax.ShapeDtypeStruct((batch, 8), jnp.float32))
        >>> program.call(jnp.ones((3, 8))).shape, "tensor<4x8xi8>" in program.text
        ((3, 4), True)
    """

    exported: export.Exported
    weights: dict[str, jax.Array] | None

    def __init__(
        self,
        model: nnx.Module,
        *inputs: PyTree,
        weights: str = "constants",
        method: Method = CALL,
        platforms: Sequence[str] | None = None,
        allow_uncalibrated: bool = False,
        **keywords: PyTree,
    ) -> None:
        if weights not in WEIGHTS:
            raise ValueError(f"stablehlo: weights must be 'constants' or 'argument', got {weights!r}")
        call = Call(inputs, keywords, checked_method(model, method, "stablehlo"))
        exported = ExportedCall(serving_copy(model, "stablehlo", allow_uncalibrated), call, "stablehlo")
        run, values = _function(exported)
        args, kwargs = exported.signature
        self.weights = values if weights == "argument" else None
        if self.weights is None:
            program = jax.jit(lambda *xs, **named: run(xs, named, jax.lax.optimization_barrier(values)))
        else:
            program = jax.jit(lambda *xs, weights, **named: run(xs, named, weights))
            kwargs["weights"] = {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in values.items()}
        self.exported = export.export(program, platforms=platforms)(*args, **kwargs)
        if self.weights is None and has_composites(self.exported):
            # Device compilers look for a constant as the operand of a composite.
            program = jax.jit(lambda *xs, **named: run(xs, named, values))
            self.exported = export.export(program, platforms=platforms)(*args, **kwargs)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a program that `save` wrote.

        Raises:
            FileNotFoundError: the file does not exist.
            ImportError: `flatbuffers` is not installed.
        """
        return cls.deserialize(Path(path).read_bytes())

    @classmethod
    def deserialize(cls, data: bytes | bytearray) -> Self:
        """The program from the bytes that `serialize` returned.

        Raises:
            ImportError: `flatbuffers` is not installed.
        """
        needed("flatbuffers", "export", "stablehlo.load")
        program = object.__new__(cls)
        program.exported = export.deserialize(bytearray(data))
        program.weights = None
        return program

    def serialize(self) -> bytes:
        """The program as bytes, in JAX's format: StableHLO with a description of inputs and outputs.

        Weights that are an argument are not included.

        Raises:
            ImportError: `flatbuffers` is not installed.
        """
        needed("flatbuffers", "export", "stablehlo.save")
        return bytes(self.exported.serialize())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program to a file.

        Raises:
            FileNotFoundError: the file's folder does not exist.
            ImportError: `flatbuffers` is not installed.
        """
        target = checked_path(path, "stablehlo.save")
        target.write_bytes(self.serialize())

    @property
    def text(self) -> str:
        """The program as StableHLO text."""
        return self.exported.mlir_module()

    def call(
        self, *inputs: PyTree, weights: Mapping[str, ArrayLike] | None = None, **keywords: PyTree
    ) -> PyTree:
        """Run the program; under `jax.jit` too.

        Args:
            inputs, keywords: the arguments that hold arrays, with the shapes and dtypes that it was exported for; None
                in the place of what is a part of the program.
            weights: path -> array, if they are an argument; None means those of the exported model.

        Raises:
            ValueError: weights are missing, or given although the program holds its own.
        """
        _, names = jax.tree.unflatten(self.exported.in_tree, self.exported.in_avals)
        if "weights" not in names:
            if weights is not None:
                raise ValueError(
                    "this StableHLO program holds its weights.\n  cure: export with weights='argument' to give others"
                )
            return self.exported.call(*inputs, **keywords)
        weights = self.weights if weights is None else weights
        if weights is None:
            raise ValueError(
                "this StableHLO program takes its weights as an argument, and a file has none.\n"
                "  cure: call(*inputs, weights=...), with the `weights` of the program when it was made"
            )
        return self.exported.call(*inputs, weights=dict(weights), **keywords)


def has_composites(exported: export.Exported) -> bool:
    """Return whether a program has composites, which it holds for other compilers."""
    return " stablehlo.composite " in exported.mlir_module()


def _function(exported: ExportedCall) -> tuple[Callable[..., PyTree], dict[str, jax.Array]]:
    """The call as a function of its arguments and weights, and the weights: path -> array."""
    paths, structure = jax.tree.flatten_with_path(exported.state)
    leaves = {_weight_name(path): leaf for path, leaf in paths}
    # A program's signature cannot contain random keys, and evaluation does not use them.
    weights = {n: x for n, x in leaves.items() if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}

    def run(args: PyTree, kwargs: PyTree, weights: Mapping[str, jax.Array]) -> PyTree:
        state = jax.tree.unflatten(structure, list({**leaves, **weights}.values()))
        return exported(state, jax.tree.leaves((args, kwargs)))

    return run, weights


def _weight_name(path: tuple[PyTree, ...]) -> str:
    """A path in the model; in a module among the arguments, with its number before it."""
    name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
    number, _, name = name.partition(".")
    return name if number == "0" else f"argument{number}.{name}".rstrip(".")
