"""Array methods other than arithmetic: they act on the dequantized array of a quantized tensor."""

import abc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np


def _of_value(name: str) -> Callable[..., Any]:
    """A method that calls the array's own."""

    def method(self: "ArrayMethods", *args: Any, **kwargs: Any) -> Any:
        plain = (x.value if isinstance(x, ArrayMethods) else x for x in args)
        return getattr(self.value, name)(*plain, **kwargs)

    method.__name__, method.__doc__ = name, f"`value.{name}(...)`: an array."
    return method


# The tensor's reflected operators, for `array + tensor` with a NumPy array or number.
_REFLECTED = {
    np.add: "__radd__",
    np.subtract: "__rsub__",
    np.multiply: "__rmul__",
    np.true_divide: "__rtruediv__",
    np.floor_divide: "__rfloordiv__",
    np.remainder: "__rmod__",
    np.power: "__rpow__",
    np.matmul: "__rmatmul__",
    np.equal: "__eq__",
    np.not_equal: "__ne__",
    np.less: "__gt__",
    np.less_equal: "__ge__",
    np.greater: "__lt__",
    np.greater_equal: "__le__",
}


class ArrayMethods(abc.ABC):
    """Abstract: the methods of `jax.Array` and the protocols of NumPy, on the dequantized array `value`.

    A number format that keeps its scale through one of them overrides it.
    """

    __slots__ = ()

    @property
    @abc.abstractmethod
    def value(self) -> jax.Array:
        """The dequantized float array."""

    all = _of_value("all")
    any = _of_value("any")
    argmax = _of_value("argmax")
    argmin = _of_value("argmin")
    argpartition = _of_value("argpartition")
    argsort = _of_value("argsort")
    choose = _of_value("choose")
    clip = _of_value("clip")
    compress = _of_value("compress")
    conj = _of_value("conj")
    conjugate = _of_value("conjugate")
    copy = _of_value("copy")
    cumprod = _of_value("cumprod")
    cumsum = _of_value("cumsum")
    devices = _of_value("devices")
    diagonal = _of_value("diagonal")
    dot = _of_value("dot")
    item = _of_value("item")
    max = _of_value("max")
    mean = _of_value("mean")
    min = _of_value("min")
    nonzero = _of_value("nonzero")
    prod = _of_value("prod")
    ptp = _of_value("ptp")
    repeat = _of_value("repeat")
    round = _of_value("round")
    searchsorted = _of_value("searchsorted")
    sort = _of_value("sort")
    std = _of_value("std")
    sum = _of_value("sum")
    take = _of_value("take")
    tobytes = _of_value("tobytes")
    tolist = _of_value("tolist")
    trace = _of_value("trace")
    var = _of_value("var")
    view = _of_value("view")
    __dlpack__ = _of_value("__dlpack__")
    __dlpack_device__ = _of_value("__dlpack_device__")

    def block_until_ready(self) -> Any:
        """The tensor itself, once its value is computed."""
        self.value.block_until_ready()
        return self

    @property
    def at(self) -> Any:
        """`value.at`: its updates make arrays."""
        return self.value.at

    @property
    def real(self) -> jax.Array:
        """The dequantized array."""
        return self.value.real

    @property
    def imag(self) -> jax.Array:
        """Zeros."""
        return self.value.imag

    @property
    def itemsize(self) -> int:
        """Bytes of an element of `value`."""
        return self.value.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of `value`."""
        return self.value.size * self.value.dtype.itemsize

    @property
    def sharding(self) -> Any:
        """The sharding of `value`."""
        return self.value.sharding

    def reshape(self, *shape: Any, **options: Any) -> Any:
        """The same elements in another shape."""
        return self.value.reshape(*shape, **options)

    def ravel(self, *args: Any, **options: Any) -> Any:
        """The same elements along one axis."""
        return self.value.ravel(*args, **options)

    def flatten(self, *args: Any, **options: Any) -> Any:
        """As `ravel`."""
        return self.ravel(*args, **options)

    def transpose(self, *axes: Any) -> Any:
        """Axes permuted; reversed without arguments."""
        return self.value.transpose(*axes)

    def swapaxes(self, axis1: int, axis2: int) -> Any:
        """Two axes exchanged."""
        return self.value.swapaxes(axis1, axis2)

    def squeeze(self, axis: Any = None) -> Any:
        """Axes of size 1 removed."""
        return self.value.squeeze(axis)

    @property
    def T(self) -> Any:
        """All axes reversed."""
        return self.transpose()

    @property
    def mT(self) -> Any:
        """The last two axes exchanged."""
        return self.swapaxes(-1, -2)

    def __getitem__(self, key: Any) -> Any:
        return self.value[key]

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self.value)))

    def __contains__(self, item: Any) -> bool:
        return item in self.value

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)

    def __round__(self, ndigits: int | None = None) -> Any:
        return self.value.round(ndigits or 0)

    def __format__(self, format_spec: str) -> str:
        return format(self.value, format_spec) if format_spec else str(self)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.value, dtype=dtype)
        return array.copy() if copy else array

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, ArrayMethods) for x in kwargs.get("out", ())):
            raise TypeError(f"np.{ufunc.__name__}(out=...): a {type(self).__name__} cannot be changed")
        left, right = inputs[0], inputs[-1]
        operator = method == "__call__" and len(inputs) == 2 and not kwargs and _REFLECTED.get(ufunc)
        if operator and isinstance(right, ArrayMethods) and not isinstance(left, ArrayMethods):
            return getattr(right, operator)(left)
        plain = (np.asarray(x) if isinstance(x, ArrayMethods) else x for x in inputs)
        return getattr(ufunc, method)(*plain, **kwargs)
