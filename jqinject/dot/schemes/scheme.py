"""`Scheme`: the quantizers of the six operands of a contraction and its gradients."""

import enum
import inspect
import sys
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
from jax.typing import DTypeLike

from jqinject.core import check
from jqinject.core.check import Check
from jqinject.core.quantizers.delay import delay_steps
from jqinject.dot.geometry.tiles import LocalAqt
from jqinject.dot.kernels.accumulate import checked_accumulator
from jqinject.dot.schemes.product_transforms import SIGNS, check_transforms, declared
from jqinject.dot.tensors.product import Sums
from jqinject.inject import (
    Binding,
    ExtendedInjector,
    Node,
    check_declarations,
    check_lets,
    explain,
    this,
)
from jqinject.terminal import table


class Kept(enum.Enum):
    """What a backward product may use instead of a quantizer's result."""

    #: The forward product's operand: its payload if that fits, else the dequantized value.
    FPROP = "fprop"
    #: The forward product's payload; refused if its scales vary along what the backward product sums over.
    PAYLOAD = "payload"


PLACES = {
    "fprop_lhs": "x in y = x w",
    "fprop_rhs": "w in y = x w",
    "dgrad_grad": "g in dx = g w^T",
    "dgrad_rhs": "w in dx = g w^T",
    "wgrad_lhs": "x in dw = x^T g",
    "wgrad_grad": "g in dw = x^T g",
}


class OperandTable(Node):
    """The six operands of a scheme: a node each, printed as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("name", "operand", "numbers", "quantizer", "decided by")]
        for node in self.children:
            origin = node.origin.__name__ if isinstance(node.origin, type) else node.origin or ""
            if node.error:
                numbers, name = "ERROR: " + "; ".join(map(str.strip, node.error.splitlines())), ""
            else:
                # As the scheme resolves it: what it takes from the scheme's other names is known then.
                value = getattr(self.value, node.name)
                numbers, name = _numbers(value), _name_of(value)
            rows.append((node.name, PLACES[node.name], numbers, name, origin))
        header, *operands = rows
        return "\n".join((*table(header, operands, width=sys.maxsize), *_delay_of(self.value)))


def operand_table(scheme: Any) -> OperandTable:
    """The operands of a scheme.

    Args:
        scheme: its injector.
    """
    nodes = tuple(explain(scheme, name=name) for name in PLACES)
    return OperandTable(scheme.__name__, "injector", scheme, children=nodes)


def _delay_of(scheme: Any) -> tuple[str, ...]:
    """What a scheme says of its first calls."""
    if not scheme.quant_delay_steps:
        return ()
    before = "in float" if scheme.before is None else f"by {_name_of(scheme.before)}"
    return (f"the first {scheme.quant_delay_steps} calls in training are made {before}",)


def _name_of(value: object) -> str:
    """The name of an injector, or of one behind a binding; empty for anything else."""
    if isinstance(value, Binding):
        return value.base.__name__
    return value.__name__ if isinstance(value, type) else ""


def _numbers(value: Any) -> str:
    """The numbers of an operand as text; empty if only an assembled quantizer knows."""
    if value is None:
        return "float"
    if not _name_of(value):
        return "as in y = x w"
    injector: Any = value.injector if isinstance(value, Binding) else value
    names = ("q_dtype", "exponent_bit_width", "mantissa_bit_width", "bit_width", "group_size")
    values = {name: explain(value, name=name).value for name in names if name in injector}
    numbers = {name: x for name, x in values.items() if isinstance(x, int)}
    size = values.get("group_size")
    group = f" in {size}s" if isinstance(size, int) else ""
    if isinstance(size, tuple):
        group = " in {} x {}".format(*size)
    if values.get("q_dtype") is not None:
        return np.dtype(values["q_dtype"]).name + group
    if {"exponent_bit_width", "mantissa_bit_width"} <= numbers.keys():
        return f"e{numbers['exponent_bit_width']}m{numbers['mantissa_bit_width']}{group}"
    return f"{numbers['bit_width']} bits{group}" if "bit_width" in numbers else group.strip()


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
takes them: on CUDA `jax.nn.scaled_matmul`, on ROCm and TPU `jax.lax.scaled_dot` | False |
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
#: The prefixes of what a scheme says of one product.
PRODUCTS = {"fprop": "", "dgrad": "dgrad_", "wgrad": "wgrad_"}
TILES = tuple(f"{prefix}tile_size" for prefix in PRODUCTS.values())
COMPONENTS = ("explained_by", "calibration", "restrict_scaling_impl")  # of a scheme, shared by its operands
SchemeOperand = Binding | Kept | None


@dataclass(frozen=True)
class SchemeSpec:
    """A scheme, resolved: static, compared by value. `spec[name]` is what it says.

    Attributes:
        values: by the names of a scheme: an operand is a binding of its injector, None or `Kept`, `before` a spec.
        name: of the scheme.
    """

    values: tuple[tuple[str, Any], ...]
    name: str

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, scheme: type[Scheme] | Binding) -> "SchemeSpec":
        """Resolve a scheme, once for all its contractions.

        Raises:
            TypeError: an unknown override, an operand that is not a quantizer, a gradient kept from the forward pass;
                an accumulator that is not an integer dtype; a transform that does not cancel; `before` that is not a
                scheme, or has a delay itself.
            ValueError: a tile size below 1; a delay without steps.
        """
        injector = scheme.injector if isinstance(scheme, Binding) else scheme
        name = _name_of(scheme)
        check_lets(injector, (*CHECKS, *COMPONENTS))
        check_declarations(injector, also_requested=frozenset(CHECKS))
        declared = {key: getattr(injector, key) for key in CHECKS}
        spec = cls(tuple((key, check(declared[key], name, key)) for key, check in CHECKS.items()), name)
        check_transforms(spec.by_name, name)
        for again, forward in zip(AGAIN, reversed(FORWARD), strict=True):
            if spec[again] is Kept.PAYLOAD:
                _check_payload(spec[forward], again, forward, name)
        return spec._with_before()

    def _with_before(self) -> "SchemeSpec":
        delay, before = self.delay, self.before
        if before is None:
            return self.replaced(before=SchemeSpec.of(Scheme)) if delay else self
        if not delay:
            raise ValueError(
                f"{self.name}: before = {before.name} would make no call.\n"
                "  cure: quant_delay_steps = 1000, how many calls in training it makes; or before = None"
            )
        if before.delay:
            raise TypeError(
                f"{self.name}: before = {before.name} has quant_delay_steps itself, and a scheme is switched once.\n"
                "  cure: a scheme without them"
            )
        return self

    def __getitem__(self, name: str) -> Any:
        return self.by_name[name]

    @cached_property
    def by_name(self) -> dict[str, Any]:
        """What it says, by name."""
        return dict(self.values)

    @cached_property
    def quantizers(self) -> dict[str, Binding]:
        """The operands that have a quantizer of their own."""
        return {name: self[name] for name in OPERANDS if isinstance(self[name], Binding)}

    @cached_property
    def sums(self) -> dict[str, Sums]:
        """How the products sum."""
        return {
            product: Sums(
                self[f"{prefix}accumulator_dtype"], self[f"{prefix}tile_size"], scaled=self["scaled_products"]
            )
            for product, prefix in PRODUCTS.items()
        }

    @property
    def delay(self) -> int:
        """How many calls in training `before` makes first."""
        return self["quant_delay_steps"]

    @property
    def before(self) -> "SchemeSpec | None":
        """The scheme of these; None without a delay."""
        return self["before"]

    @property
    def as_before(self) -> str:
        """How it contracts, as text: by its name, or in float."""
        return f"by {self.name}" if self.quantizers else "in float"

    @property
    def both(self) -> "tuple[SchemeSpec, ...]":
        """It, and the scheme of the first calls, if any."""
        return (self,) if self.before is None else (self, self.before)

    def replaced(self, **changes: object) -> "SchemeSpec":
        """Another one, with some names changed."""
        return replace(self, values=tuple({**self.by_name, **changes}.items()))

    def of_convolution(self) -> "SchemeSpec":
        """For a convolution: without tiles; where its gradients are float, of the original operands."""
        changes: dict[str, Any] = dict.fromkeys(TILES)
        if not self["conv_gradients"]:
            changes |= dict.fromkeys((*AGAIN, *GRADIENTS))
            changes |= dict.fromkeys(("dgrad_use_fwd_quant", "wgrad_use_fwd_quant"), False)
        return self.replaced(**changes)


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


def _operand(quantizer: object, name: str, operand: str) -> SchemeOperand:
    if quantizer is None or isinstance(quantizer, Binding):
        return quantizer
    if isinstance(quantizer, Kept) and operand in AGAIN:
        return quantizer
    if inspect.isclass(quantizer) and issubclass(quantizer, ExtendedInjector) and not is_scheme(quantizer):
        return Binding(quantizer)
    also = ", Kept.FPROP or Kept.PAYLOAD for what the forward product took" if operand in AGAIN else ""
    raise TypeError(
        f"{name}: {operand} takes a quantizer (an injector such as jqinject.quant.Int8WeightPerChannelFloat), None for "
        f"float{also}; got {quantizer!r:.80}"
    )


def _before(before: object, name: str, key: str) -> SchemeSpec | None:
    if before is None:
        return None
    if not is_scheme(before):
        raise TypeError(
            f"{name}: before takes a Scheme, or None for float; got {before!r:.80}.\n  cure: Scheme.let(...)"
        )
    return SchemeSpec.of(before)


def _check_payload(quantizer: SchemeOperand, again: str, forward: str, name: str) -> None:
    """Refuse a payload that is certain not to fit the backward product."""
    why = ""
    if not isinstance(quantizer, Binding):
        why = f"{forward} is float, and has none"
    else:
        shared, size = (declared(quantizer, name) for name in ("scaling_per_output_type", "group_size"))
        if shared == "group" and not isinstance(size, tuple):
            why = f"{quantizer.base.__name__} quantizes in groups of {size} along what y = x w sums over"
        elif shared == "channel" or (declared(quantizer, "keepdim") is True and shared != "group"):
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


def _accumulator(dtype: DTypeLike | None, name: str, key: str) -> np.dtype | None:
    return None if dtype is None else checked_accumulator(dtype, f"{name}: {key}")


def _tiles(tile: object, name: str, key: str) -> LocalAqt | None:
    if tile is None or isinstance(tile, LocalAqt):
        return tile
    if not isinstance(tile, int) or isinstance(tile, bool):
        raise TypeError(f"{name}: {key} must be an int, a LocalAqt or None, got {tile!r}")
    if tile < 1:
        raise ValueError(f"{name}: {key} must be at least 1, got {tile}")
    return LocalAqt(contraction_axis_shard_size=tile)


_SOURCE = check.among(("original", "dequantized"))
#: The names of a scheme, each with the check of what it declares.
CHECKS: dict[str, Check] = {
    **dict.fromkeys(OPERANDS, _operand),
    **{f"{prefix}accumulator_dtype": _accumulator for prefix in PRODUCTS.values()},
    **dict.fromkeys(TILES, _tiles),
    **dict.fromkeys(("dgrad_use_fwd_quant", "wgrad_use_fwd_quant", *SIGNS), check.flag),
    **dict.fromkeys(("scaled_products", "conv_gradients"), check.flag),
    **dict.fromkeys(("dgrad_source", "wgrad_source"), _SOURCE),
    "quant_delay_steps": lambda steps, name, key: delay_steps(steps, name),
    "before": _before,
}
