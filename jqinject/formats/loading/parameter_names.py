"""Which tensor of a checkpoint belongs to which parameter of a model: patterns of names, and ready-made ones.

The tables have the checkpoints of Llama, Qwen, Mistral and Gemma for models of JAX.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.layout_axes import TRANSPOSED

PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Name:
    """A rule from names of a file to paths of a model.

    `{layer}` stands for one part of a name, the same on both sides. What only the file's name has numbers the matrices
    that a parameter stacks along its first axes.

    Attributes:
        file: the tensor's name; several of them are joined, above one another in their order.
        model: the parameter's path; several of them divide the rows of the tensor, in their order.
        axes: how rows (`outputs`) and columns (`inputs`) become the parameter's axes; None takes it from the shapes.
        sizes: of axes that the shapes leave open.
        rows: of each tensor that is joined. A file says it itself; `save` needs it where tensors differ in it (queries
            beside the keys and values of fewer heads), or where no axis of the parameter counts them.

    Example:
        >>> fused = Name("model.layers.{i}.self_attn.qkv_proj.weight", ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v"))
        >>> fused.matches("model.layers.3.self_attn.qkv_proj.weight")
        (0, {'i': '3'})
    """

    file: str | tuple[str, ...]
    model: str | tuple[str, ...]
    axes: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.file, str) and not isinstance(self.model, str):
            raise ValueError(
                f"a Name joins several tensors or divides one, not both: {self.file} -> {self.model}"
            )
        missing = {*PLACE.findall(" ".join(self.models))} - {*PLACE.findall(" ".join(self.files))}
        if missing:
            raise ValueError(f"{self.model!r} has {{{missing.pop()}}}, which {self.file!r} has not")
        if self.rows is not None and (len(self.rows) != len(self.files) or min(self.rows) < 1):
            raise ValueError(
                f"rows is {self.rows}, expected a positive number for each of {', '.join(self.files)}"
            )

    @property
    def files(self) -> tuple[str, ...]:
        """The patterns of tensors."""
        return (self.file,) if isinstance(self.file, str) else tuple(self.file)

    @property
    def models(self) -> tuple[str, ...]:
        """The patterns of paths."""
        return (self.model,) if isinstance(self.model, str) else tuple(self.model)

    def matches(self, name: str) -> tuple[int, dict[str, str]] | None:
        """Return which of the file's patterns a name matches, and the texts of its places; None if it matches none."""
        return _first_match(self.files, name)

    def matches_path(self, path: str) -> tuple[int, dict[str, str]] | None:
        """Return which of the model's patterns a path matches, and the texts of its places; None if it matches none."""
        return _first_match(self.models, path)

    def filled(self, texts: Mapping[str, object]) -> Name:
        """Return the rule with texts in the place of its places; those without a text stay.

        Example:
            >>> Name("model.{i}.moe.{e}.weight", "layers.{i}.experts").filled({"i": 3})
            Name(file='model.3.moe.{e}.weight', model='layers.3.experts', axes=None, sizes={}, rows=None)
        """
        fill = partial(PLACE.sub, lambda place: str(texts.get(place[1], place[0])))
        sides = (self.file, self.model)
        file, model = (fill(side) if isinstance(side, str) else tuple(map(fill, side)) for side in sides)
        return replace(self, file=file, model=model)

    def stacked(self) -> tuple[str, ...]:
        """Return the places that number the matrices of a stack."""
        places = {*PLACE.findall(" ".join(self.models))}
        return tuple(place for place in dict.fromkeys(PLACE.findall(self.files[0])) if place not in places)


def _first_match(patterns: Sequence[str], text: str) -> tuple[int, dict[str, str]] | None:
    matches = ((at, compiled(pattern).fullmatch(text)) for at, pattern in enumerate(patterns))
    return next(((at, match.groupdict()) for at, match in matches if match is not None), None)


def compiled(pattern: str) -> re.Pattern[str]:
    """Return the expression of a pattern of names, with a group for each of its places."""
    texts, places = PLACE.split(pattern)[0::2], PLACE.split(pattern)[1::2]
    expression = re.escape(texts[0])
    for at, (place, text) in enumerate(zip(places, texts[1:], strict=True)):
        expression += f"(?P={place})" if place in places[:at] else f"(?P<{place}>[^.]+)"
        expression += re.escape(text)
    return re.compile(expression)


#: A `Name` for each rule; or a mapping from names of the file to paths of the model, or to a path and axes.
Names = Mapping[str, str | tuple[str, ...]] | Sequence[Name]


def checked_names(names: Names) -> tuple[Name, ...]:
    """Return names as rules.

    Raises:
        TypeError: they are something else.
        ValueError: one contradicts itself.
    """
    if isinstance(names, Mapping):
        return tuple(
            Name(file, model[0], model[1]) if _has_axes(model) else Name(file, model)
            for file, model in names.items()
        )
    is_single = isinstance(names, str | Name) or not isinstance(names, Iterable)
    rules: tuple[object, ...] = (names,) if is_single else tuple(names)
    for rule in rules:
        if not isinstance(rule, Name):
            raise TypeError(f"names are jqinject.formats.Name rules, or a mapping of texts, got {rule!r:.80}")
    return tuple(rule for rule in rules if isinstance(rule, Name))


def _has_axes(model: str | tuple[str, ...]) -> bool:
    return isinstance(model, tuple) and len(model) == 2 and "->" in str(model[1])


def _table(rows: str) -> tuple[Name, ...]:
    """Return the names of a table: rows of a tensor, a parameter, and axes; `a|b` in both makes a row for each."""
    names = []
    for row in rows.strip().replace("*", "model.layers.{i}").splitlines():
        file, model, *axes = re.split(r"\s{2,}", row.strip())
        choices = CHOICE.search(model)
        for choice in [""] if choices is None else choices[1].split("|"):
            names.append(Name(CHOICE.sub(choice, file), CHOICE.sub(choice, model), "".join(axes) or None))
    return tuple(names)


CHOICE = re.compile(r"<([^>]*)>")
#: Llama, Qwen and Mistral checkpoints for Tunix's models (`tunix.models.llama3`, `qwen2`, `qwen3`).
TUNIX = _table("""
    model.embed_tokens.weight             embedder.input_embedding              rows columns -> rows columns
    model.norm.weight                     final_norm.w
    lm_head.weight                        lm_head.w                             out in -> in out
    *.self_attn.<q|k|v>_proj.weight       layers.{i}.attn.<q|k|v>_proj.w        (heads dim) in -> in heads dim
    *.self_attn.o_proj.weight             layers.{i}.attn.o_proj.w              out (heads dim) -> heads dim out
    *.self_attn.<q|k|v>_proj.bias         layers.{i}.attn.<q|k|v>_bias
    *.self_attn.<q|k>_norm.weight         layers.{i}.attn.<q|k>_norm.w
    *.mlp.<gate|up|down>_proj.weight      layers.{i}.mlp.<gate|up|down>_proj.kernel   out in -> in out
    *.<input|post_attention>_layernorm.weight   layers.{i}.<input|post_attention>_layernorm.w
""")

KEYS_AND_VALUES = Name(
    tuple(f"model.layers.{{i}}.self_attn.{part}_proj.weight" for part in "kv"),
    "layers.{i}.attn.kv_einsum.w",
    "(both heads dim) in -> both heads in dim",
    {"both": 2},
)
#: Gemma 3 checkpoints (text) for `tunix.models.gemma3`, of models with fewer heads of keys than of queries. Its
#: parameters are bfloat16 unless `ModelConfig(param_dtype=jnp.float32)` says otherwise, and `load` keeps that; Tunix's
#: own loader gives them the dtype of the file.
TUNIX_GEMMA3 = (
    KEYS_AND_VALUES,
    *_table("""
    model.embed_tokens.weight             embedder.input_embedding              rows columns -> rows columns
    model.norm.weight                     final_norm.scale
    *.self_attn.q_proj.weight             layers.{i}.attn.q_einsum.w            (heads dim) in -> heads in dim
    *.self_attn.o_proj.weight             layers.{i}.attn.attn_vec_einsum.w     out (heads dim) -> heads dim out
    *.self_attn.q_norm.weight             layers.{i}.attn._query_norm.scale
    *.self_attn.k_norm.weight             layers.{i}.attn._key_norm.scale
    *.mlp.<gate|up|down>_proj.weight      layers.{i}.mlp.<gate|up|down>_proj.kernel   out in -> in out
    *.input_layernorm.weight              layers.{i}.pre_attention_norm.scale
    *.post_attention_layernorm.weight     layers.{i}.post_attention_norm.scale
    *.pre_feedforward_layernorm.weight    layers.{i}.pre_ffw_norm.scale
    *.post_feedforward_layernorm.weight   layers.{i}.post_ffw_norm.scale
    """),
)


def _divided(module: str, fused: str, parts: Sequence[str]) -> Name:
    """Return the name of a fused projection that a model has in parts."""
    models = tuple(f"layers.{{i}}.{module}.{part}_proj.kernel" for part in parts)
    return Name(f"model.layers.{{i}}.{module}.{fused}_proj.weight", models, TRANSPOSED)


#: Checkpoints with fused `qkv_proj` and `gate_up_proj` (Phi's, vLLM's) for models of Flax's layers, called as in
#: `transformers` without `model.`, that have them apart. Where nothing is fused such a model needs no names.
FUSED = (
    _divided("self_attn", "qkv", "qkv"),
    _divided("mlp", "gate_up", ("gate", "up")),
    *_table("""
    model.embed_tokens.weight             embed_tokens.embedding                rows columns -> rows columns
    model.norm.weight                     norm.scale
    lm_head.weight                        lm_head.kernel                        out in -> in out
    *.self_attn.o_proj.weight             layers.{i}.self_attn.o_proj.kernel    out in -> in out
    *.mlp.down_proj.weight                layers.{i}.mlp.down_proj.kernel       out in -> in out
    *.<input|post_attention>_layernorm.weight   layers.{i}.<input|post_attention>_layernorm.scale
    """),
)

#: All rules of these tables, which serve several models: no model has a tensor for each of them.
READY = (*TUNIX, *TUNIX_GEMMA3, *FUSED)


# Modules in GGUF files, as the models' own checkpoints call them.
GGUF = _table("""
    token_embd                      model.embed_tokens
    output_norm                     model.norm
    output                          lm_head
    blk.{i}.attn_<q|k|v>            *.self_attn.<q|k|v>_proj
    blk.{i}.attn_output             *.self_attn.o_proj
    blk.{i}.attn_<q|k>_norm         *.self_attn.<q|k>_norm
    blk.{i}.attn_norm               *.input_layernorm
    blk.{i}.ffn_norm                *.post_attention_layernorm
    blk.{i}.ffn_<gate|up|down>      *.mlp.<gate|up|down>_proj
""")
TO_GGUF = tuple(Name(rule.model, rule.file) for rule in GGUF)
# Tensors of heads whose two rotated halves llama.cpp keeps in turn, row by row; and what holds their number.
OF_HEADS = re.compile(r"blk\.([^.]+)\.attn_([qk])\.[^.]*")
HEADS = {"q": "llama.attention.head_count", "k": "llama.attention.head_count_kv"}


def published_name(gguf: str) -> str:
    """Return a name of a GGUF file as the model's own checkpoint has it; unknown ones stay.

    Example:
        >>> published_name("blk.2.attn_q.weight")
        'model.layers.2.self_attn.q_proj.weight'
    """
    return _renamed(gguf, GGUF)


def gguf_name(published: str) -> str:
    """Return a name of a model's own checkpoint, with or without `model.` in front, as GGUF has it.

    Example:
        >>> gguf_name("layers.2.self_attn.q_proj.weight")
        'blk.2.attn_q.weight'
    """
    return _renamed(published, TO_GGUF, ("", "model."))


def _renamed(name: str, rules: Sequence[Name], roots: Sequence[str] = ("",)) -> str:
    """Return a name with the path that the first rule has for its module, under one of the roots; else the name."""
    module, dot, leaf = name.rpartition(".")
    matches = ((rule, rule.matches(root + module)) for root in roots for rule in rules)
    names = (rule.filled(match[1]).models[0] + dot + leaf for rule, match in matches if match is not None)
    return next(names, name)


def heads_in_turn(gguf: str, values: Mapping[str, object]) -> int:
    """Return the heads of a tensor whose rows llama.cpp keeps in another order; 0 for any other tensor.

    Args:
        gguf: the tensor's name.
        values: of the file; Llama's architecture (Mistral's too) has such rows.

    Raises:
        CheckpointError: the number of heads is not there.
    """
    match = OF_HEADS.fullmatch(gguf)
    if match is None or values.get("general.architecture") != "llama":
        return 0
    layer, key = match[1], HEADS[match[2]]
    heads = values.get(key, values.get(HEADS["q"]))
    if isinstance(heads, list | tuple) and layer.isdigit() and int(layer) < len(heads):
        heads = heads[int(layer)]
    if not isinstance(heads, int) or heads < 1:
        raise CheckpointError(
            f"{gguf} has rows in the order of Llama's heads, but {key} is {heads!r}.\n"
            f"  cure: names={{{gguf!r}: ...}}, which takes them as they lie"
        )
    return heads


def published_order(rows: int, heads: int, name: str) -> np.ndarray:
    """Return the order of a GGUF file's rows in the model's own checkpoint: `published = gguf[order]`.

    llama.cpp keeps the numbers that one rotation turns next to each other; the checkpoints, half a head apart.

    Args:
        rows: of the tensor.
        heads: that they make up.
        name: of the tensor, for errors.

    Raises:
        CheckpointError: the rows are no such heads.

    Example:
        >>> published_order(8, 2, "blk.0.attn_q.weight").tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
    """
    if rows % (2 * heads):
        raise CheckpointError(f"{name} has {rows} rows, which are no {heads} heads with two halves each")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
