"""The further keywords of each layer as a `TypedDict`, for type checkers, which read the stub beside this file.

They are those of the layer's Flax layer and the overrides of its quantizers. `tools/typed_keywords.py` of the
repository writes the stub from the installed Flax and the ready-made quantizers.
`QuantLinear.overrides()` says the same to a program, with what each keyword means. Here names stand without fields, so
that importing is fast.
"""

from typing import Any, TypedDict


def __getattr__(name: str) -> Any:
    if not name.endswith("Keywords"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    make: Any = TypedDict
    typed_dict = make(name, {}, total=False)
    globals()[name] = typed_dict
    return typed_dict
