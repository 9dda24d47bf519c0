"""The parts of `benchmarks/recipes.py`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
if str(ROOT / "examples") not in sys.path:
    sys.path.append(str(ROOT / "examples"))  # the language model is shared with the examples
