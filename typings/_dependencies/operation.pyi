from collections.abc import Callable
from typing import Any

class Operation:
    __function__: Callable[..., Any]
    def __init__(self, function: Callable[..., Any]) -> None: ...
