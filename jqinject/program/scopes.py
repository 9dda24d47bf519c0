"""Finds the module that an operation belongs to: a private copy of the model leaves marks while it is traced."""

import contextlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

from jqinject.ops.processes import Bound
from jqinject.program.class_swap import intercept

V = TypeVar("V")
Path = tuple[object, ...]
MODULE, WEIGHT = "jqinject_module:", "jqinject_weight:"
NO_NAME = re.compile(r"[^\w.\-]")
BEGIN, END = "jqinject_begin", "jqinject_end"
LAYER, QUANTIZED_LAYER = LAYERS = ("layer", "quantized_layer")
RAISED_IN = "raised in the module at"

# Modules that count as one operation.
REGIONS: Mapping[str, tuple[type, ...]] = {
    "batch_norm_op": (nnx.BatchNorm, linen.BatchNorm),
    "norm_op": (
        *(nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm),
        *(linen.LayerNorm, linen.RMSNorm, linen.GroupNorm, linen.InstanceNorm),
    ),
    "dropout": (nnx.Dropout, linen.Dropout),
}


def path_in(scopes: Sequence[str]) -> str | None:
    """The path of the innermost module among the scopes of an equation; None if it has no mark."""
    paths = _marked(scopes, MODULE)
    if not paths:
        return None
    # A Linen module knows its path relative to the module that wraps it.
    around = next((path for path in reversed(paths) if not path.startswith("+")), "")
    return paths[-1] if paths[-1] == around else f"{around}.{paths[-1][1:]}".lstrip(".")


def weight_in(scopes: Sequence[str]) -> str | None:
    """The path of the parameter that an equation contracts, as `name_in_scope` writes it; None without a mark."""
    return next(reversed(_marked(scopes, WEIGHT)), None)


def _marked(scopes: Sequence[str], mark: str) -> list[str]:
    return [scope.removeprefix(mark) for scope in scopes if scope.startswith(mark)]


def weight_scope(weight_path: Path) -> contextlib.AbstractContextManager[object]:
    """Marks the contraction of a parameter, by its path, in the program's text; marks nothing without a path."""
    if not weight_path:
        return contextlib.nullcontext()
    return jax.named_scope(WEIGHT + name_in_scope(".".join(map(str, weight_path))))


def name_in_scope(path: str) -> str:
    """A path without the characters that have a meaning in a program's text; "." for that of the model itself."""
    return NO_NAME.sub("_", path) or "."


def region_of(module: object, is_leaf: Callable[[object], bool]) -> str | None:
    """The operation that a module counts as; "layer" or "quantized_layer" if it is not looked into; else None."""
    if is_leaf(module):
        ends_quantized = vars(module).get("output_quant") or vars(module).get("act_quant")
        return LAYER if ends_quantized is None else QUANTIZED_LAYER
    return next((name for name, kinds in REGIONS.items() if isinstance(module, kinds)), None)


def mark_modules(model: nnx.Module, is_leaf: Callable[[object], bool] | None = None) -> None:
    """Let the modules of a private copy of a model leave their paths in the programs traced of it.

    Args:
        model: a private copy.
        is_leaf: whether a module is not looked into; None leaves no marks of modules that count as one operation.
    """
    for path, module in list(nnx.iter_modules(model, graph=True)):
        if path and "__call__" in dir(type(module)):
            name, region = ".".join(map(str, path)), None if is_leaf is None else region_of(module, is_leaf)
            intercept(module, Bound(_in_scope, (name, region)))
            if region in LAYERS:  # without a region: the output of this method is not the layer's
                intercept(module, Bound(_in_scope, (name, None)), "attend")


def scopes(model: nnx.Module, is_leaf: Callable[[object], bool]) -> contextlib.AbstractContextManager[object]:
    """Let every module of a private copy of a model leave marks when it is called.

    Args:
        model: a private copy.
        is_leaf: whether a module is not looked into.

    Returns:
        A context in which Linen modules, wrapped by `nnx.bridge.ToNNX` or called by a function, leave the same marks.
    """
    mark_modules(model, is_leaf)

    def named(call: Callable[..., object], args: Path, kwargs: Any, context: Any) -> object:
        if context.method_name != "__call__" or not context.module.path:
            return call(*args, **kwargs)
        path = "+" + ".".join(context.module.path)
        return _in_scope(path, region_of(context.module, is_leaf), context.module, call, *args, **kwargs)

    return linen.intercept_methods(named)


def _in_scope(
    path: str, region: str | None, module: object, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a module under its path; as one operation if it is a region. See `intercept`."""
    with jax.named_scope(MODULE + path), _naming(path):
        if region is None or not args:
            return call(*args, **kwargs)
        label = f":{region}:{path}"
        begins = _is_array if region in LAYERS else _is_float  # a layer may take indices of rows
        first = jax.tree.map(lambda x: checkpoint_name(x, BEGIN + label) if begins(x) else x, args[0])
        out = call(first, *args[1:], **kwargs)
        return jax.tree.map(lambda x: checkpoint_name(x, END + label) if _is_float(x) else x, out)


@contextlib.contextmanager
def _naming(path: str) -> Generator[None]:
    """Add the innermost module's path to an error raised in it."""
    try:
        yield
    except Exception as error:
        if not any(note.startswith(RAISED_IN) for note in vars(error).get("__notes__", ())):
            error.add_note(f"{RAISED_IN} {path.removeprefix('+')}")
        raise


def _is_array(x: object) -> bool:
    return isinstance(x, jax.Array)


def _is_float(x: object) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
