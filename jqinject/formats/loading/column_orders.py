"""Groups that are not consecutive columns (GPTQ's activation order): the columns change places, and so do inputs."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core.transforms import Permutation, Sized
from jqinject.formats.checkpoint import Checkpoint
from jqinject.formats.loading.loading_plan import Assignment
from jqinject.formats.loading.rows import order_of_groups
from jqinject.model.walk import ModelIndex
from jqinject.proxy import ActQuantProxyFromInjector, transform_of
from jqinject.quant import NoneActQuant


def keeps_payload(checkpoint: Checkpoint, each: Assignment, may_permute: bool) -> bool:
    """Whether the codes of a parameter can stay: their blocks are consecutive columns, if need be in another order.

    Args:
        checkpoint: the checkpoint.
        each: the parameter.
        may_permute: whether its input can be permuted.
    """
    found = [checkpoint.matrices[name] for name, _ in each.sources]
    if not all(matrix.by_rows for matrix in found):
        return all(matrix.in_turn for matrix in found) and _stays_whole(each)
    if all(matrix.column_groups is None for matrix in found):
        return True
    return may_permute and column_order(checkpoint, each) is not None


def _stays_whole(each: Assignment) -> bool:
    """Whether rows are neither cut nor joined nor reordered, and are an axis of the parameter."""
    whole = all(cut is None for _, cut in each.sources) and len(each.sources) == math.prod(each.depth)
    return whole and not each.heads and each.axes.outputs in each.axes.target


def column_order(checkpoint: Checkpoint, each: Assignment) -> np.ndarray | None:
    """The order of columns in which all groups of a parameter are consecutive; None if no single order does that.

    Args:
        checkpoint: the checkpoint.
        each: the parameter.
    """
    orders = []
    for name, _ in each.sources:
        groups = checkpoint.matrices[name].column_groups
        orders.append(None if groups is None else order_of_groups(groups()))
    first = orders[0]
    if first is None or each.depth or any(one is None or not np.array_equal(one, first) for one in orders):
        return None
    return first


def permuted(base: Any, order: np.ndarray) -> Any:
    """An input quantizer before which the input is permuted.

    Args:
        base: the quantizer; None for float inputs.
        order: of the columns, which `put_orders` fills in.
    """
    declared = NoneActQuant if base is None else base
    return declared.let(pre_transform=Sized(Permutation, order.size, _label(order)))


def put_orders(model: nnx.Module, orders: list[np.ndarray]) -> None:
    """Fill in the orders of permuted inputs.

    Args:
        model: it is written to.
        orders: those that were declared.
    """
    by_label = {_label(order): order for order in orders}
    for module in ModelIndex(model).modules if orders else ():
        if isinstance(module, ActQuantProxyFromInjector) and isinstance(module.pre_transform, Permutation):
            declared = transform_of(module.binding)
            if declared.label in by_label:
                module.pre_transform.put(jnp.asarray(by_label[declared.label]))


def _label(order: np.ndarray) -> str:
    return hashlib.sha256(order.astype(np.int32).tobytes()).hexdigest()[:16]
