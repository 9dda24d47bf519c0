"""The number format of docs/write-your-own.md and its quantizers, as the page writes them."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "write-your-own.md"
IMPORTS = "import jax\nimport jax.numpy as jnp\nfrom dataclasses import dataclass\n"


def _section() -> dict[str, Any]:
    """What the first two blocks of the section define."""
    section = PAGE.read_text(encoding="utf-8").split("## A number format")[1]
    grid, quantizers, *_ = re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(IMPORTS + grid + quantizers, str(PAGE), "exec"), names)
    return names


_names = _section()
Log2Grid, Log2 = _names["Log2Grid"], _names["Log2"]
Log2WeightPerGroup, Log2ActPerRow = _names["Log2WeightPerGroup"], _names["Log2ActPerRow"]
