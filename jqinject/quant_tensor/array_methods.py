"""Array methods other than arithmetic on a grid: they act on the dequantized array of a quantized tensor."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, ClassVar

import jax
import numpy as np
from jax.typing import DTypeLike


def attribute(path: str, doc: str) -> Any:
    """Return a read-only property that reads another attribute; its annotation says the type.

    It is read in C, without a Python frame: every call of every layer reads several.

    Args:
        path: the attribute, with dots for an attribute of an attribute.
        doc: the docstring.

    Example:
        >>> class Tensor:
        ...     def __init__(self, scale: float) -> None:
        ...         self._scale = scale
        ...     scale: float = attribute("_scale", "Float per integer step.")
        >>> Tensor(0.5).scale, Tensor.scale.__doc__
        (0.5, 'Float per integer step.')
    """
    return property(attrgetter(path), doc=doc)


class _OfValue:
    """Define a method of every name that this is assigned to: the method of `value` with that name."""

    def __set_name__(self, owner: type, name: str) -> None:
        def method(self: "ArrayMethods", *args: object, **kwargs: object) -> Any:
            return getattr(self.value, name)(*map(as_array, args), **kwargs)

        method.__name__, method.__doc__ = name, f"`value.{name}(...)`: an array."
        setattr(owner, name, method)


def _of_value() -> Any:
    return _OfValue()


# The tensor's reflected operators, for `array + tensor` with a NumPy array or number.
_REFLECTED = {
    getattr(np, ufunc): f"__{name}__"
    for ufunc, name in (
        *(("add", "radd"), ("subtract", "rsub"), ("multiply", "rmul"), ("true_divide", "rtruediv")),
        *(("floor_divide", "rfloordiv"), ("remainder", "rmod"), ("power", "rpow"), ("matmul", "rmatmul")),
        *(("equal", "eq"), ("not_equal", "ne"), ("less", "gt"), ("less_equal", "ge")),
        *(("greater", "lt"), ("greater_equal", "le")),
    )
}


class ArrayMethods:
    """Abstract: the methods of `jax.Array` and the protocols of NumPy, on the dequantized array `value`."""

    __slots__ = ()

    value: jax.Array
    kind: ClassVar[str] = ""

    all = any = argmax = argmin = argpartition = argsort = choose = clip = compress = conj = _of_value()
    conjugate = copy = cumprod = cumsum = devices = diagonal = dot = item = max = mean = min = _of_value()
    nonzero = prod = ptp = repeat = round = searchsorted = sort = std = sum = take = tobytes = _of_value()
    tolist = trace = var = view = __dlpack__ = __dlpack_device__ = __divmod__ = __rdivmod__ = _of_value()
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = _of_value()
    __rmod__ = __rtruediv__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _of_value()
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _of_value()
    __abs__ = __contains__ = __round__ = __bool__ = __int__ = __float__ = __complex__ = _of_value()
    __hash__ = None  # type: ignore[assignment]  # comparisons are elementwise, as for arrays

    at: Any = attribute("value.at", "`value.at`: its updates make arrays.")
    real: jax.Array = attribute("value.real", "The dequantized array.")
    imag: jax.Array = attribute("value.imag", "Zeros.")
    nbytes: int = attribute("value.nbytes", "Bytes of `value`.")
    itemsize: int = attribute("value.dtype.itemsize", "Bytes of an element of `value`.")
    sharding: Any = attribute("value.sharding", "The sharding of `value`.")

    def block_until_ready(self) -> Any:
        """The tensor itself, once its value is computed."""
        self.value.block_until_ready()
        return self

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self.value)))  # type: ignore[index]

    def __pos__(self) -> Any:
        return self

    def __format__(self, format_spec: str) -> str:
        return format(self.value, format_spec) if format_spec else str(self)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.value, dtype=dtype)
        return array.copy() if copy else array

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: object, **kwargs: Any) -> Any:
        if any(isinstance(x, ArrayMethods) for x in kwargs.get("out", ())):
            raise TypeError(f"np.{ufunc.__name__}(out=...): a {type(self).__name__} cannot be changed")
        left, right = inputs[0], inputs[-1]
        operator = method == "__call__" and len(inputs) == 2 and not kwargs and _REFLECTED.get(ufunc)
        if operator and isinstance(right, ArrayMethods) and not isinstance(left, ArrayMethods):
            return getattr(right, operator)(left)
        plain = (np.asarray(x) if isinstance(x, ArrayMethods) else x for x in inputs)
        return getattr(ufunc, method)(*plain, **kwargs)


def as_array(x: object) -> Any:
    """The plain array of `x`: `x.value` if it is a `QuantTensor`, else `x` itself.

    Args:
        x: a `QuantTensor`, an array, or anything else.

    Returns:
        The dequantized array of a `QuantTensor`; any other object unchanged.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor, as_array
        >>> x = IntQuantTensor(jnp.array([0.5, 1.0]), 0.5, 0.0, 4, signed=True, training=False)
        >>> as_array(x)
        Array([0.5, 1. ], dtype=float32)
        >>> as_array(3)
        3
    """
    return x.value if isinstance(x, ArrayMethods) else x


def kind_of(x: jax.Array) -> str:
    """The kind of a quantized tensor, as its class states it; empty for anything else.

    Example:
        >>> kind_of(3)
        ''
    """
    return x.kind if isinstance(x, ArrayMethods) else ""
