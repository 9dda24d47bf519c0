"""What the names of the ready-made quantizers mean, and what may be given for them.

`QuantLinear.overrides(...)` shows this, and the keywords that type checkers know are made from it
(`tools/typed_keywords.py`). A name of a user's own injector is not in the table,
`override_names.toml`: it goes through `.let()`.
"""

import importlib.resources
import tomllib
from collections.abc import Mapping

# Passed by layers and proxies, or from around a nested injector: not to be overridden.
PASSED = frozenset(
    {"module", "rngs", "tracked_parameter_list", "activation_channel_shape"}
    | {"upstream_scaling", "deterministic"}
)

_TABLE = importlib.resources.files("jqinject.quant").joinpath("override_names.toml").read_text("utf-8")
#: Of each name its type, as it stands in an annotation, and what the name says.
NAMES: Mapping[str, tuple[str, str]] = {
    name: (annotation, meaning)
    for subject in tomllib.loads(_TABLE).values()
    for name, (annotation, meaning) in subject.items()
}
