"""What the numbers that a quantizer keeps are, in words."""

from __future__ import annotations

# The last part of a name, as in `averaging_impl.sum_of_max`.
WORDS = {
    "amax_history": "largest magnitude of each step",
    "scale": "scale",
    "value": "learned value",
    "buffer": "collected average",
    "running_stats": "running statistic",
    "sum_of_max": "sum of the batches' largest numbers",
    "sum_of_min": "sum of the batches' smallest numbers",
    "minimum": "smallest number",
    "maximum": "largest number",
    "affine_weight": "learned factor",
    "affine_bias": "learned shift",
}
OWN = ("amax_history", "scale")  # are said without what they belong to
TENSORS = {"act": "activation", "grad": "gradient"}
# A part of the path before it that says what it belongs to.
OWNERS = {"scaling_impl": "scale", "zero_point_impl": "zero point", "bit_width_impl": "bit width"}


def in_words(slot: str, name: str) -> str:
    """A state in words.

    Args:
        slot: the quantizer, as in "input_quant".
        name: the path of the state within it.

    Example:
        >>> in_words("input_quant", "averaging_impl.sum_of_max")
        "input: sum of the batches' largest numbers"
        >>> in_words("weight_quant", "scaling_impl.value"), in_words("act_quant", "my_impl.some_thing")
        ('weight: learned value of the scale', 'activation: some thing of my')
    """
    *path, last = name.split(".")
    words = WORDS.get(last, last.replace("_", " "))
    owner = next((f"the {OWNERS[part]}" for part in reversed(path) if part in OWNERS), "")
    if not owner and path and last not in WORDS:
        owner = path[-1].removesuffix("_impl").replace("_", " ")
    of = f" of {owner}" if owner and last not in OWN else ""
    tensor = slot.removesuffix("_quant").replace("_", " ")
    return f"{TENSORS.get(tensor, tensor)}: {words}{of}"
