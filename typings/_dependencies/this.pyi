from typing import Any

class This:
    __expression__: tuple[tuple[str, Any], ...]
    def __init__(self, expression: tuple[tuple[str, Any], ...]) -> None: ...
