"""What has to be the same for a run of a recipe to go on from where another one stopped, as short texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.inject.injector import InjectorMeta
from jqinject.inject.keys import Same, key_of
from jqinject.model.walk import ModelIndex
from jqinject.ops.processes import on_host

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), np.dtype)


def identity_of(
    passes: Sequence[Any],
    model: nnx.Module,
    rules: Sequence[Any],
    batches: Sequence[Any],
    call: Sequence[Any],
) -> dict[str, str]:
    """The parts of a run, each as a short text that is another one where anything that it depends on is another.

    Args:
        passes: of the recipe.
        model: the float model.
        rules: which quantizer each site gets.
        batches: the data.
        call: how batches become calls.
    """
    return {
        "recipe": _hashed([written(key_of(tuple(passes)))]),
        "model": _hashed(_of_model(model)),
        "rules": _hashed([written(key_of(tuple(rules)))]),
        "batches": _hashed(_of_data(list(batches))),
        "method or call": _hashed([written(key_of(tuple(call)))]),
        "JAX or number of devices": _hashed(
            [jax.__version__, jax.default_backend(), jax.process_count(), jax.device_count()]
        ),
    }


def written(key: Any) -> str:
    """A key of a value (`jqinject.inject.keys.key_of`) as text that does not change from process to process.

    Example:
        >>> written(key_of({"bits": (2, 4)}))
        "(dict, (((str, 'bits'), (tuple, ((int, 2), (int, 4)))),))"
    """
    if isinstance(key, Same):
        return written(key.it) if isinstance(key.it, type) else _named(key.it)
    if isinstance(key, InjectorMeta):
        return f"{_named(key)}[{_declared(key)}]"
    if isinstance(key, type):
        return key.__name__ if key.__module__ == "builtins" else _named(key)
    if isinstance(key, tuple):
        return f"({', '.join(map(written, key))}{',' if len(key) == 1 else ''})"
    if isinstance(key, frozenset):
        return f"{{{', '.join(sorted(map(written, key)))}}}"
    return repr(key) if isinstance(key, PLAIN) else _named(key)


def _declared(injector: Any) -> str:
    """What an injector of the user's declares: its body may change from one run to the next."""
    own = [base for base in injector.__mro__ if isinstance(base, InjectorMeta)]
    parts = [
        f"{name}={written(key_of(spec.declared))}"
        for base in own
        if not base.__module__.startswith("jqinject.")
        for name, spec in sorted(base.__declared__.items())
    ]
    return ", ".join(parts)


def _named(thing: Any) -> str:
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"


def _of_model(model: nnx.Module) -> Iterable[Any]:
    index = ModelIndex(model)
    for path, node in index.places:
        yield path, _named(type(node))
        if isinstance(node, nnx.Pytree):
            static = {name: x for name, x in vars(node).items() if not name.startswith("_pytree__")}
            yield from (
                (name, written(key_of(x)))
                for name, x in sorted(static.items())
                if not isinstance(x, nnx.Pytree | nnx.Variable | jax.Array)
            )
    yield from ((one.path, on_host(one.variable.get_value())) for one in index.variables if _is_array(one))


def _is_array(entry: Any) -> bool:
    held = entry.variable.get_value()
    return isinstance(held, jax.Array | np.ndarray) and not jnp.issubdtype(held.dtype, jax.dtypes.prng_key)


def _of_data(batches: list[Any]) -> Iterable[Any]:
    for path, leaf in jax.tree.leaves_with_path(batches):
        yield jax.tree_util.keystr(path), on_host(leaf) if isinstance(leaf, jax.Array) else leaf


def _hashed(parts: Iterable[Any]) -> str:
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, tuple):
            for one in part:
                add(one)
        elif isinstance(part, np.ndarray):
            digest.update(f"{part.shape}{part.dtype}".encode())
            digest.update(np.ascontiguousarray(part).tobytes())
        else:
            digest.update(repr(part).encode() + b"\0")

    for part in parts:
        add(part)
    return digest.hexdigest()
