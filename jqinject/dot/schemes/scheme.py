"""`Scheme`: the quantizers of the six operands of a contraction and its gradients."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
from jax.typing import DTypeLike

from jqinject.core import check as kinds
from jqinject.core.quantizers.delay import delay_steps
from jqinject.dot.geometry.tiles import LocalAqt
from jqinject.dot.schemes.operand_table import operand_table
from jqinject.dot.schemes.product_transforms import SIGNS, check_signs, check_transforms, check_whole
from jqinject.dot.tensors.product import Sums
from jqinject.inject import (
    Binding,
    ExtendedInjector,
    check_declarations,
    check_lets,
    this,
)


class Kept(enum.Enum):
    """What a backward product may use instead of a quantizer's result."""

    FPROP = "fprop"
    """The forward product's operand: its payload if that fits, else the dequantized value."""
    PAYLOAD = "payload"
    """The forward product's payload; refused if its scales vary along what the backward product sums over."""


class Scheme(ExtendedInjector):
    """The quantizers of `y = x w`, `dx = g w^T` and `dw = x^T g`: one for each operand of each product.

    | name | operand | default |
    |---|---|---|
    | `fprop_lhs`, `fprop_rhs` | `x`, `w` in `y = x w` | None: float |
    | `dgrad_grad` | `g` in `dx = g w^T` | None: float |
    | `dgrad_rhs` | `w` in `dx = g w^T` | `Kept.FPROP`: the result of `fprop_rhs` |
    | `wgrad_lhs` | `x` in `dw = x^T g` | `Kept.FPROP`: the result of `fprop_lhs` |
    | `wgrad_grad` | `g` in `dw = x^T g` | None: float |
    | `accumulator_dtype` | dtype of integer sums, for all products | None: int32 |
    | `dgrad_accumulator_dtype`, `wgrad_accumulator_dtype` | likewise for one product | `accumulator_dtype` |
    | `tile_size` | elements of the first summed axis of `y = x w` that share a scale, or a `LocalAqt` | None: all |
    | `dgrad_tile_size`, `wgrad_tile_size` | likewise for the other products | None: all |
    | `dgrad_use_fwd_quant` | `dgrad_rhs` quantizes the payload of `fprop_rhs`, whose scale goes into `g` | False |
    | `wgrad_use_fwd_quant` | likewise for `wgrad_lhs` and `fprop_lhs` | False |
    | `dgrad_random_signs`, `wgrad_random_signs` | random signs, drawn at each call, multiply both operands before the \
transform of the product | False |
    | `dgrad_source`, `wgrad_source` | what a quantizer in `dgrad_rhs` or `wgrad_lhs` rounds: "original", or \
"dequantized", what the forward product saw | "original" |
    | `scaled_products` | whether MXFP8 and NVFP4 operands go to the backend as payloads and block scales where it \
takes them: on CUDA `jax.nn.scaled_matmul` | False |
    | `quant_delay_steps` | how many calls in training are made by `before` first, which a module counts | 0 |
    | `before` | the scheme of these calls | None: float |
    | `conv_gradients` | whether the gradients of a convolution are quantized; else those of the float one | True |

    An operand is any quantizer of `jqinject.quant`, as a layer's `weight_quant=`, `input_quant=` and `grad_quant=` take
    it; a gradient's has no forward-pass state: a `...Grad...` or a dynamic one. None leaves the
    operand float; for `dgrad_rhs` and `wgrad_lhs` that is the unquantized original.

    Quantizers of activations and gradients see the summed axes last, those of weights see the other axes as channels:
    so scales "per row", "per channel" and per group along the inputs can be multiplied in after the sum. Forward,
    gradients pass through each quantizer by its own derivative; scales that are parameters are trained.

    A quantizer may declare a `pre_transform` (`jqinject.core.transforms`) of the axis that its product sums over, the
    last one if there are several. Both operands of the product then declare the same one, which is orthogonal, so that
    it cancels: `Hadamard(16, signs)` on `wgrad_lhs` and `wgrad_grad`. On `fprop_lhs` and `fprop_rhs`, the backward
    products take `x` and `w` transformed as the forward product did; their results pass the quantizers' gradient masks
    there, and are transformed back.

    Two operands are contracted as integers or 8-bit floats if both have such payloads and their scales do not vary
    along summed axes; otherwise as dequantized values. `QDotGeneral.explain` says which.

    Example:
        >>> from jqinject.quant import Int4WeightPerGroupAbsMax, Int8DynamicActPerRowAbsMax, Int8DynamicGradPerRowFloat
        >>> class W4A8G8(Scheme):
        ...     fprop_lhs = Int8DynamicActPerRowAbsMax
        ...     fprop_rhs = Int4WeightPerGroupAbsMax
        ...     dgrad_grad = wgrad_grad = Int8DynamicGradPerRowFloat
        >>> from flax import nnx
        >>> from jqinject.dot import QDotGeneral
        >>> layer = nnx.Linear(64, 32, dot_general=QDotGeneral(W4A8G8), rngs=nnx.Rngs(0))
    """

    fprop_lhs = None
    fprop_rhs = None
    dgrad_grad = None
    dgrad_rhs = Kept.FPROP
    wgrad_lhs = Kept.FPROP
    wgrad_grad = None
    accumulator_dtype = None
    dgrad_accumulator_dtype = this.accumulator_dtype
    wgrad_accumulator_dtype = this.accumulator_dtype
    tile_size = None
    dgrad_tile_size = None
    wgrad_tile_size = None
    dgrad_use_fwd_quant = False
    wgrad_use_fwd_quant = False
    dgrad_random_signs = False
    wgrad_random_signs = False
    dgrad_source = "original"
    wgrad_source = "original"
    scaled_products = False
    quant_delay_steps = 0
    before = None
    conv_gradients = True
    explained_by = operand_table


SchemeLike: TypeAlias = type[Scheme] | Binding

FORWARD = ("fprop_lhs", "fprop_rhs")
AGAIN = ("dgrad_rhs", "wgrad_lhs")
GRADIENTS = ("dgrad_grad", "wgrad_grad")
OPERANDS = (*FORWARD, *AGAIN, *GRADIENTS)
PRODUCTS = (("fprop_lhs", "fprop_rhs"), ("dgrad_grad", "dgrad_rhs"), ("wgrad_grad", "wgrad_lhs"))
FLAGS = ("dgrad_use_fwd_quant", "wgrad_use_fwd_quant", *SIGNS, "scaled_products", "conv_gradients")
SOURCES = ("original", "dequantized")
SUMS = ("accumulator_dtype", "tile_size")
OTHERS = (
    *FLAGS,
    "dgrad_source",
    "wgrad_source",
    "quant_delay_steps",
    "before",
    *(f"{product}{name}" for product in ("", "dgrad_", "wgrad_") for name in SUMS),
)
COMPONENTS = ("explained_by", "calibration", "restrict_scaling_impl")  # of a scheme, shared by its operands
SchemeOperand = Binding | Kept | None


@dataclass(frozen=True)
class SchemeSpec:
    """A scheme, resolved: static, compared by value.

    Attributes:
        operands: for each of the six names: a binding of its injector, None, or `Kept.FPROP`.
        fprop, dgrad, wgrad: how the products sum.
        flags: those of `FLAGS` that are set; and of a product "dgrad_dequantized" where its operand is made of what
            the forward product saw, "dgrad_payload" for `Kept.PAYLOAD`, which `operands` has as `Kept.FPROP`.
        name: of the scheme.
        delay: how many calls in training `before` makes first.
        before: the scheme of these; None without a delay.
    """

    operands: tuple[tuple[str, SchemeOperand], ...]
    fprop: Sums
    dgrad: Sums
    wgrad: Sums
    flags: frozenset[str]
    name: str
    delay: int = 0
    before: SchemeSpec | None = None

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, scheme: type[Scheme] | Binding) -> SchemeSpec:
        """Resolve a scheme, once for all its contractions.

        Raises:
            TypeError: an unknown override, an operand that is not a quantizer, a gradient kept from the forward pass;
                an accumulator that is not an integer dtype; a transform that does not cancel; `before` that is not a
                scheme, or has a delay itself.
            ValueError: a tile size below 1; a delay without steps.
        """
        injector = scheme.injector if isinstance(scheme, Binding) else scheme
        name = _name_of(scheme)
        check_lets(injector, (*OPERANDS, *OTHERS, *COMPONENTS))
        check_declarations(injector, also_requested=frozenset((*OPERANDS, *OTHERS)))
        declared = {key: getattr(injector, key) for key in (*OPERANDS, *OTHERS)}
        operands = tuple((operand, _operand(declared[operand], operand, name)) for operand in OPERANDS)
        check_transforms(dict(operands), PRODUCTS, name)
        scaled = kinds.flag(declared["scaled_products"], name, "scaled_products")
        fprop, dgrad, wgrad = (
            replace(_sums(declared, prefix, name), scaled=scaled) for prefix in ("", "dgrad_", "wgrad_")
        )
        check_whole(dict(operands), fprop.tiles, name)
        flags = [flag for flag in FLAGS if kinds.flag(declared[flag], name, flag)]
        check_signs(dict(operands), flags, name)
        flags += [
            f"{product}_dequantized"
            for product in ("dgrad", "wgrad")
            if _is_dequantized(declared[f"{product}_source"], product, name)
        ]
        for again, forward in zip(AGAIN, reversed(FORWARD), strict=True):
            if dict(operands)[again] is Kept.PAYLOAD:
                _check_payload(dict(operands)[forward], again, forward, name)
                flags.append(f"{again.partition('_')[0]}_payload")
        operands = tuple((o, Kept.FPROP if operand is Kept.PAYLOAD else operand) for o, operand in operands)
        spec = cls(operands, fprop, dgrad, wgrad, frozenset(flags), name)
        delay = delay_steps(declared["quant_delay_steps"], name)
        return replace(spec, delay=delay, before=cls._before(declared["before"], delay, name))

    @classmethod
    def _before(cls, before: Any, delay: int, name: str) -> SchemeSpec | None:
        if before is None:
            return cls.of(Scheme) if delay else None
        if not is_scheme(before):
            raise TypeError(
                f"{name}: before takes a Scheme, or None for float; got {before!r:.80}.\n  cure: Scheme.let(...)"
            )
        if not delay:
            raise ValueError(
                f"{name}: before = {_name_of(before)} would make no call.\n"
                "  cure: quant_delay_steps = 1000, how many calls in training it makes; or before = None"
            )
        spec = cls.of(before)
        if spec.delay:
            raise TypeError(
                f"{name}: before = {spec.name} has quant_delay_steps itself, and a scheme is switched once.\n"
                "  cure: a scheme without them"
            )
        return spec

    @property
    def as_before(self) -> str:
        """How it contracts, as text: by its name, or in float."""
        floats = all(operand in (None, Kept.FPROP) for _, operand in self.operands)
        return "in float" if floats else f"by {self.name}"

    @property
    def both(self) -> tuple[SchemeSpec, ...]:
        """It, and the scheme of the first calls, if any."""
        return (self,) if self.before is None else (self, self.before)

    def of_convolution(self) -> SchemeSpec:
        """For a convolution: without tiles; where its gradients are float, of the original operands."""
        before = None if self.before is None else self.before.of_convolution()
        uncut = {name: replace(getattr(self, name), tiles=None) for name in ("fprop", "dgrad", "wgrad")}
        if "conv_gradients" in self.flags:
            return replace(self, before=before, **uncut)
        floats = tuple((name, operand if name in FORWARD else None) for name, operand in self.operands)
        of_payloads = {
            f"{product}_{flag}" for product in ("dgrad", "wgrad") for flag in ("use_fwd_quant", "payload")
        }
        return replace(self, operands=floats, flags=self.flags - of_payloads, before=before, **uncut)

    def beside_quantized_weight(self) -> SchemeSpec:
        """For a weight that comes quantized: the scheme leaves it as it is in the forward product."""
        operands = tuple((name, None if name == "fprop_rhs" else operand) for name, operand in self.operands)
        return replace(self, operands=operands)

    def __getitem__(self, name: str) -> SchemeOperand:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, SchemeOperand]:
        return dict(self.operands)


def role_of(operand: Binding) -> str:
    """Return the role of the proxy that a quantizer declares; "parameter" without one."""
    return operand.resolve("proxy_class").role if operand.declares("proxy_class") else "parameter"


def is_scheme(config: object) -> bool:
    """Whether something is a scheme, or a binding of one."""
    config = config.injector if isinstance(config, Binding) else config
    return inspect.isclass(config) and issubclass(config, Scheme)


def checked_scheme(config: object) -> Any:
    """A scheme, or a binding of one.

    Raises:
        TypeError: it is neither.
    """
    if is_scheme(config):
        return config
    raise TypeError(
        f"config must be a Scheme, such as config_v4() or Scheme.let(fprop_rhs=...), got {config!r:.80}"
    )


def _name_of(scheme: SchemeLike) -> str:
    return scheme.base.__name__ if isinstance(scheme, Binding) else scheme.__name__


def _operand(quantizer: object, operand: str, name: str) -> SchemeOperand:
    if quantizer is None or (isinstance(quantizer, Kept) and operand in AGAIN):
        return quantizer
    if isinstance(quantizer, Binding):
        return quantizer
    if (
        inspect.isclass(quantizer)
        and issubclass(quantizer, ExtendedInjector)
        and not issubclass(quantizer, Scheme)
    ):
        return Binding(quantizer)
    also = ", Kept.FPROP or Kept.PAYLOAD for what the forward product took" if operand in AGAIN else ""
    raise TypeError(
        f"{name}: {operand} takes a quantizer (an injector such as jqinject.quant.Int8WeightPerChannelFloat), None for "
        f"float{also}; got {quantizer!r:.80}"
    )


def _is_dequantized(source: object, product: str, name: str) -> bool:
    if source not in SOURCES:
        raise ValueError(
            f"{name}: {product}_source must be one of {', '.join(map(repr, SOURCES))}, got {source!r}"
        )
    return source == "dequantized"


def _check_payload(quantizer: SchemeOperand, again: str, forward: str, name: str) -> None:
    """Refuse a payload that is certain not to fit the backward product."""
    why = ""
    if not isinstance(quantizer, Binding):
        why = f"{forward} is float, and has none"
    else:
        shared = (
            quantizer.resolve("scaling_per_output_type")
            if quantizer.declares("scaling_per_output_type")
            else None
        )
        size = quantizer.resolve("group_size") if quantizer.declares("group_size") else None
        if shared == "group" and not isinstance(size, tuple):
            why = f"{quantizer.base.__name__} quantizes in groups of {size} along what y = x w sums over"
        elif shared == "channel" or (
            quantizer.declares("keepdim") and quantizer.resolve("keepdim") is True and shared != "group"
        ):
            why = f"{quantizer.base.__name__} has a scale for each row or channel"
    if why:
        raise payload_does_not_fit(f"{name}.{again}", why)


def payload_does_not_fit(where: str, why: str) -> ValueError:
    """The error for a payload that is to be used in a product that sums along what its scales vary with.

    Args:
        where: the operand.
        why: what does not fit.
    """
    return ValueError(
        f"{where} asks for the payload of the forward product, which does not fit: {why}, and the backward product "
        "sums over another axis.\n  cure: a quantizer of its own for this product, Kept.FPROP for the dequantized "
        "value, or a forward quantizer with one scale for the tensor or square blocks (group_size = (128, 128))"
    )


def _sums(declared: Mapping[str, Any], prefix: str, name: str) -> Sums:
    dtype, tile = declared[f"{prefix}accumulator_dtype"], declared[f"{prefix}tile_size"]
    if dtype is not None and not _is_integer(dtype):
        raise TypeError(
            f"{name}: {prefix}accumulator_dtype must be a dtype of integers, such as jnp.int32, or None; got {dtype!r}"
        )
    dtype = None if dtype is None else np.dtype(dtype)
    if tile is None or isinstance(tile, LocalAqt):
        return Sums(dtype, tile)
    if not isinstance(tile, int) or isinstance(tile, bool):
        raise TypeError(f"{name}: {prefix}tile_size must be an int, a LocalAqt or None, got {tile!r}")
    if tile < 1:
        raise ValueError(f"{name}: {prefix}tile_size must be at least 1, got {tile}")
    return Sums(dtype, LocalAqt(contraction_axis_shard_size=tile))


def _is_integer(dtype: DTypeLike) -> bool:
    try:
        return np.issubdtype(np.dtype(dtype), np.signedinteger)
    except TypeError:
        return False
