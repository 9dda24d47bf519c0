"""What `export.onnx` returns: an ONNX model that prints a line instead of its weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

SHOWN = 5  # kinds of operators in a repr


class OnnxModel:
    """An `onnx.ModelProto` with a short repr; what it has and does, this has and does.

    Attributes:
        proto: the `onnx.ModelProto`, for functions that ask for that class.
    """

    def __init__(self, proto: Any) -> None:
        self.proto = proto

    def __getattr__(self, name: str) -> Any:
        if name == "proto" or name.startswith("__"):  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.proto, name)

    def SerializeToString(self, **how: Any) -> bytes:
        """The bytes of the file."""
        return self.proto.SerializeToString(**how)

    def save(self, path: str | Path) -> None:
        """Write the file.

        Args:
            path: where to.
        """
        Path(path).write_bytes(self.SerializeToString())

    def __eq__(self, other: object) -> bool:
        return self.proto == (other.proto if isinstance(other, OnnxModel) else other)

    __hash__ = None  # type: ignore[assignment]  # as a ModelProto

    def __repr__(self) -> str:
        graph = self.proto.graph
        kinds = Counter(node.op_type for node in graph.node).most_common()
        more = f", {len(kinds) - SHOWN} more kinds" if len(kinds) > SHOWN else ""
        operators = ", ".join(f"{count} {kind}" for kind, count in kinds[:SHOWN])
        opset = next(
            (entry.version for entry in self.proto.opset_import if entry.domain in ("", "ai.onnx")), "?"
        )
        inputs, outputs = ([entry.name for entry in ends] for ends in (graph.input, graph.output))
        return (
            f"<ONNX model {graph.name!r}, opset {opset}: {', '.join(inputs)} -> {', '.join(outputs)}; "
            f"{len(graph.node)} nodes ({operators}{more}), {self.proto.ByteSize():,} bytes>"
        )
