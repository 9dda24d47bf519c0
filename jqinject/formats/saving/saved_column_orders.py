"""Inputs that are permuted before a weight: its columns are written in their own order, with the group of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from flax import nnx

from jqinject.core.transforms import Permutation, Sized
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.loading.rows import Rows
from jqinject.model.quantizing.rule_policy import RulePolicy
from jqinject.model.walk import ModelIndex
from jqinject.program import QuantizedProgram
from jqinject.proxy import ActQuantProxyFromInjector, transform_of


def order_before_layer(layer: Any, path: str) -> np.ndarray | None:
    """The order that a layer's input is brought into; None if it stays as it comes.

    Args:
        layer: the layer.
        path: of its weight, for errors.

    Raises:
        CheckpointError: another transform stands before the layer.
    """
    proxy = vars(layer).get("input_quant")
    return _order_of(vars(proxy).get("pre_transform"), path) if isinstance(proxy, nnx.Module) else None


class OrdersBeforeParameters:
    """The orders of the inputs of parameters that a model contracts by itself, by the model's rules.

    Args:
        index: of the model.
    """

    def __init__(self, index: ModelIndex) -> None:
        self.rules: tuple[Any, ...] = ()
        self.transforms: dict[str, Any] = {}
        for _, node in index.places:
            if isinstance(node, QuantizedProgram) and isinstance(node.op_quant.policy, RulePolicy):
                self.rules += node.op_quant.policy.rules
        if not self.rules:
            return
        for _, node in index.places:
            if isinstance(node, ActQuantProxyFromInjector) and node.pre_transform is not None:
                declared = transform_of(node.binding)
                self.transforms[declared.label if isinstance(declared, Sized) else ""] = node.pre_transform

    def order(self, path: str) -> np.ndarray | None:
        """As `order_before_layer`, of the parameter at `path`.

        Raises:
            CheckpointError: as there.
        """
        places = path, path.rpartition(".")[0]
        rule = next((r for r in self.rules if r.takes_weights and any(map(r.matches, places))), None)
        given = None if rule is None else rule.quantizer("input_quant")
        declared = transform_of(given)
        if declared is None:
            return None
        label = declared.label if isinstance(declared, Sized) else ""
        return _order_of(self.transforms.get(label, declared), path)


def _order_of(transform: Any, path: str) -> np.ndarray | None:
    if transform is None:
        return None
    if not isinstance(transform, Permutation):
        raise CheckpointError(
            f"{path}: a transform of the input is not written.\n  cure: a model without online transforms"
        )
    return np.asarray(transform.order.get_value())


def in_place(rows: Rows, order: np.ndarray | None) -> Rows:
    """Columns in the order of the layer's input, as it comes.

    Args:
        rows: columns `order` of the file's, one after the other.
        order: None for rows as they lie.

    Example:
        >>> from jqinject.formats.stored_matrix import NumberFormat
        >>> codes, scale = np.array([[1, 2, 3, 4]], np.int8), np.ones((1, 2), np.float32)
        >>> rows = in_place(Rows(codes, scale, None, 2, NumberFormat("int", 8)), np.array([3, 0, 1, 2]))
        >>> rows.codes.tolist(), rows.columns.tolist()
        ([[2, 3, 4, 1]], [0, 1, 1, 0])
    """
    if order is None:
        return rows
    back = np.argsort(order)
    groups = group_of_each(order, rows.group) if rows.scale.shape[-1] > 1 else None
    return replace(rows, codes=rows.codes[..., back], columns=groups)


def group_of_each(order: np.ndarray, size: int) -> np.ndarray | None:
    """The group of each column, int32; None if groups are consecutive columns.

    Args:
        order: the columns, one group after the other.
        size: columns of a group.
    """
    consecutive = np.arange(order.size, dtype=np.int32) // size
    groups = consecutive[np.argsort(order)]
    return None if np.array_equal(groups, consecutive) else groups
