"""A test for arrays that does not depend on the library they come from."""

import abc
from typing import Any


class ArrayLike(abc.ABC):
    """Any instance whose class has `__array__`, `dtype` and `shape` (numpy, jax); only the class is inspected.

    A variable that forwards attribute reads to an array inside does not count: its array can change.

    >>> import numpy as np
    >>> isinstance(np.ones(2), ArrayLike), isinstance(np.float32, ArrayLike), isinstance([1.0], ArrayLike)
    (True, False, False)
    """

    dtype: Any
    shape: tuple[int, ...]

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        names = {name for base in subclass.__mro__ for name in base.__dict__}
        return {"__array__", "dtype", "shape"} <= names
