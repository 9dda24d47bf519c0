"""Frozen models as files of compressed-tensors: what is read back is what was frozen, to the bit."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, freeze, quantize
from jqinject.core import FloorSte
from jqinject.formats import CheckpointError, explain_load, load, read_checkpoint, save
from jqinject.inject import ExtendedInjector
from jqinject.quant import (
    Fp8e4m3OCPActPerTensorFloat,
    Fp8e4m3OCPDynamicActPerGroupFloat,
    Fp8e4m3OCPDynamicActPerRowFloat,
    Fp8e4m3OCPWeightPerChannelFloat,
    Fp8e4m3OCPWeightPerTensorFloat,
    Fp8e4m3WeightPerTensorFloat,
    Int8ActPerTensorAbsMax,
    Int8ActPerTensorFloat,
    Int8ActPerTensorMinMax,
    Int8DynamicActPerRowAbsMax,
    Int8DynamicActPerRowFixedPoint,
    Int8DynamicActPerRowFloat,
    Int8DynamicActPerTensorAbsMax,
    Int8WeightPerChannelFloat,
    IntWeightSymmetricGroupQuant,
    MXFloat4e2m1Weight,
    MXFloat6e2m3Weight,
    MXFloat8e4m3Weight,
    NF4WeightPerGroupFloat,
    NVFP4Act,
    NVFP4Weight,
    ShiftedUint8ActPerTensorFloat,
    ShiftedUint8DynamicActPerRowFloat,
    ShiftedUint8WeightGroupQuantFloat,
    Uint8ActPerTensorFloat,
)

pytest.importorskip("safetensors", reason="of the extra jqinject[formats]")
UINT4 = {"weight_quant": ShiftedUint8WeightGroupQuantFloat, "weight_group_size": 16, "weight_bit_width": 4}


def floats() -> nnx.Sequential:
    return nnx.Sequential(nnx.Linear(64, 8, rngs=nnx.Rngs(0)))


def frozen(**settings: Any) -> Any:
    model = quantize(floats(), Rule(**settings))
    model(jax.random.normal(jax.random.key(0), (4, 64)))
    return freeze(model)


FP8_GROUPS = Fp8e4m3OCPDynamicActPerGroupFloat.let(group_size=128)
INT_GROUPS = {"weight_quant": IntWeightSymmetricGroupQuant, "weight_group_size": 32}
PER_ROW = {"weight_quant": Int8WeightPerChannelFloat}


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        (UINT4, "pack-quantized"),
        (PER_ROW | {"weight_bit_width": 3}, "pack-quantized"),
        (INT_GROUPS | {"weight_bit_width": 5}, "pack-quantized"),
        (PER_ROW | {"input_quant": Int8DynamicActPerRowAbsMax}, "int-quantized"),
        (PER_ROW | {"input_quant": Int8ActPerTensorFloat}, "int-quantized"),
        (PER_ROW | {"input_quant": ShiftedUint8ActPerTensorFloat}, "int-quantized"),
        (
            {"weight_quant": Fp8e4m3OCPWeightPerChannelFloat, "input_quant": Fp8e4m3OCPDynamicActPerRowFloat},
            "float-quantized",
        ),
        (
            {"weight_quant": Fp8e4m3OCPWeightPerTensorFloat, "input_quant": Fp8e4m3OCPActPerTensorFloat},
            "float-quantized",
        ),
        ({"weight_quant": NVFP4Weight, "input_quant": NVFP4Act}, "nvfp4-pack-quantized"),
        ({"weight_quant": MXFloat4e2m1Weight}, "mxfp4-pack-quantized"),
        ({"weight_quant": MXFloat6e2m3Weight}, "mxfp6-pack-quantized"),
        ({"weight_quant": MXFloat8e4m3Weight}, "mxfp8-quantized"),
    ],
)
@pytest.mark.lengthy
def test_what_is_read_back_is_what_was_frozen(settings: dict[str, Any], layout: str, tmp_path: Path) -> None:
    served = frozen(**settings)
    folder = save(served, tmp_path / "saved", config={"model_type": "llama"})
    check_read_back(served, folder, f"compressed-tensors {layout}")


def check_read_back(served: Any, folder: Path, layout: str, name: str = "layers.0.weight") -> None:
    found = read_checkpoint(folder)
    assert [matrix.layout for matrix in found.matrices.values()] == [layout]
    weight = np.asarray(served.layers[0].kernel[...]).T
    np.testing.assert_allclose(found.matrices[name].dequantize(), weight, rtol=2e-7)
    again = load(floats(), folder)
    x = jax.random.normal(jax.random.key(1), (3, 64))
    np.testing.assert_allclose(again(x), served(x), rtol=1e-6, atol=1e-6)


class RoundsDown(ExtendedInjector):
    """Changes a quantizer from beside its base."""

    float_to_int_impl = FloorSte


class Floors(RoundsDown, Int8DynamicActPerRowAbsMax):
    pass


SAVED_INPUTS = (
    *(Int8ActPerTensorMinMax, Int8ActPerTensorFloat, ShiftedUint8ActPerTensorFloat, Uint8ActPerTensorFloat),
    *(Int8DynamicActPerRowAbsMax, Int8DynamicActPerTensorAbsMax, ShiftedUint8DynamicActPerRowFloat),
    *(Fp8e4m3OCPActPerTensorFloat, Fp8e4m3OCPDynamicActPerRowFloat),
)


def near_ties(scale: float) -> jax.Array:
    """Numbers where roundings differ, and beyond the range."""
    ties = np.float32(scale) * (np.arange(-320, 320, dtype=np.float32) + np.float32(0.5))
    beside = [np.nextafter(ties, np.float32(end)) for end in (-np.inf, np.inf)]
    return jnp.asarray(np.concatenate([ties, *beside]).reshape(-1, 64))


@pytest.mark.heavy
@pytest.mark.parametrize("method", ("compressed-tensors", "jqinject"))
@pytest.mark.parametrize("quant", SAVED_INPUTS, ids=lambda quant: quant.__name__)
def test_loaded_inputs_are_quantized_as_before_to_the_bit(quant: Any, method: str, tmp_path: Path) -> None:
    served = frozen(**PER_ROW, input_quant=quant)
    again: Any = load(floats(), save(served, tmp_path / "saved", method=method))
    ours, theirs = served.layers[0].input_quant, again.layers[0].input_quant
    assert not theirs.is_dynamic or ours.is_dynamic
    static = 0.02 if ours.is_dynamic else float(np.ravel(ours.scale())[0])
    for x in (near_ties(static), jax.random.normal(jax.random.key(5), (64, 64)), jnp.zeros((2, 64))):
        np.testing.assert_array_equal(theirs(x).value, ours(x).value)
        np.testing.assert_array_equal(again(x), served(x))


@pytest.mark.heavy
@pytest.mark.parametrize("method", ("compressed-tensors", "jqinject"))
@pytest.mark.parametrize(
    "quant",
    (
        *(Int8DynamicActPerRowFloat, Int8DynamicActPerRowFixedPoint, Int8ActPerTensorAbsMax, Floors),
        Int8ActPerTensorFloat.let(float_to_int_impl=FloorSte),
        Int8ActPerTensorFloat.let(narrow_range=True),
    ),
    ids=str,
)
def test_inputs_that_would_be_quantized_otherwise_are_refused(
    quant: Any, method: str, tmp_path: Path
) -> None:
    with pytest.raises(
        CheckpointError, match=r"(?s)layers\.0\.kernel: .*compute other numbers.*cure: "
    ) as refused:
        save(frozen(**PER_ROW, input_quant=quant), tmp_path / "saved", method=method)
    cure = str(refused.value).partition("cure: ")[2]
    names = [name for name in re.findall(r"\w+", cure) if hasattr(jqinject.quant, name)]
    assert "Int8ActPerTensorMinMax" in names
    for name in names:
        weights = {"weight_quant": NVFP4Weight} if name == "NVFP4Act" else PER_ROW
        weights = {"weight_quant": Fp8e4m3OCPWeightPerChannelFloat} if name.startswith("FP8") else weights
        cured = frozen(**weights, input_quant=getattr(jqinject.quant, name))
        save(cured, tmp_path / name, method=method)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("settings", "method", "layout"),
    [
        (
            {"weight_quant": NF4WeightPerGroupFloat, "weight_group_size": 32},
            "bitsandbytes",
            "bitsandbytes nf4",
        ),
        (
            {"weight_quant": Fp8e4m3OCPWeightPerTensorFloat, "input_quant": FP8_GROUPS},
            "fp8",
            "fp8 blocks",
        ),
    ],
)
def test_other_methods_keep_codes_and_scales_too(
    settings: dict[str, Any], method: str, layout: str, tmp_path: Path
) -> None:
    served = frozen(**settings)
    check_read_back(served, save(served, tmp_path / "saved", method=method), layout)


@pytest.mark.parametrize(("bits", "kind"), [(8, "Q8_0"), (4, "Q4_0")])
def test_gguf_files_are_what_its_own_library_reads(bits: int, kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="of the extra jqinject[formats]")
    served = frozen(**INT_GROUPS, weight_bit_width=bits)
    with pytest.raises(CheckpointError, match=r"layers\.0\.kernel has scales that are no floats of 16 bits"):
        save(served, tmp_path / "saved", method="gguf", config=LLAMA)
    assert not (tmp_path / "saved").exists()
    folder = save(served, tmp_path / "saved", method="gguf", config=LLAMA, round_scales=True)
    (weight,) = [each for each in gguf.GGUFReader(folder / "model.gguf").tensors if "weight" in each.name]
    assert weight.tensor_type.name == kind
    again: Any = load(floats(), folder)
    read = gguf.quants.dequantize(weight.data, weight.tensor_type)
    np.testing.assert_array_equal(again.layers[0].kernel[...].T, read)
    np.testing.assert_allclose(read, served.layers[0].kernel[...].T, rtol=2.0**-11)
    # Scales of 16 bits are written as they are.
    twice = save(again, tmp_path / "twice", method="gguf", config=LLAMA)
    assert (twice / "model.gguf").read_bytes() == (folder / "model.gguf").read_bytes()


LLAMA = {
    "general.architecture": "llama",
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.rope.freq_base": 1e4,
    "tokenizer.ggml.tokens": ["a", "b"],
}


class Heads(nnx.Module):
    """Queries and keys of one layer, called as in published checkpoints."""

    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Dict({"self_attn": nnx.Dict(self.parts())})])

    @staticmethod
    def parts() -> dict[str, Any]:
        return {
            f"{name}_proj": nnx.Linear(64, width, use_bias=name == "q", rngs=nnx.Rngs(width))
            for name, width in (("q", 16), ("k", 8))
        }

    def __call__(self, x: jax.Array) -> Any:
        parts = self.layers[0]["self_attn"]
        return parts["q_proj"](x), parts["k_proj"](x)


@pytest.mark.lengthy
def test_rows_of_llamas_heads_are_turned_into_llama_cpps_order_and_back(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="of the extra jqinject[formats]")
    rules = Rule(r".*q_proj", **INT_GROUPS)
    net = freeze(quantize(Heads(), rules))
    q = net.layers[0]["self_attn"]["q_proj"]
    folder = save(net, tmp_path, method="gguf", config=LLAMA, round_scales=True)
    found = read_checkpoint(folder)
    turned = found.matrices["blk.0.attn_q.weight"].dequantize().reshape(2, 4, 2, 64)
    # llama.cpp rotates neighbours; published checkpoints, rows that are half a head apart.
    own = np.asarray(q.kernel[...]).T.reshape(2, 2, 4, 64)
    np.testing.assert_allclose(turned, own.swapaxes(1, 2), rtol=2.0**-11)
    assert "rows of 2 heads turned back" in str(explain_load(Heads(), found))
    again = load(Heads(), found)
    x = jax.random.normal(jax.random.key(0), (3, 64))
    for ours, theirs in zip(again(x), net(x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-2)
    as_they_lie = {
        f"blk.0.attn_{p}.{end}": f"layers.0.self_attn.{p}_proj.{leaf}"
        for p in "qk"
        for end, leaf in (("weight", "kernel"), ("bias", "bias"))
        if (p, end) != ("k", "bias")
    }
    kept = load(Heads(), found, names=as_they_lie).layers[0]["self_attn"]["q_proj"].kernel[...]
    np.testing.assert_allclose(kept.T.reshape(2, 4, 2, 64), turned, rtol=1e-6)


# --- our own layout


class Own(nnx.Module):
    """Weights of every kind, one of which a loop runs over and one of which the model contracts by itself."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(64, 16, rngs=rngs)
        self.heads = nnx.LinearGeneral(16, (2, 8), use_bias=False, rngs=rngs)
        self.table = nnx.Linear(64, 8, use_bias=False, rngs=rngs)
        self.uneven = nnx.Linear(64, 6, use_bias=False, rngs=rngs)
        self.conv = nnx.Conv(1, 3, (3, 3), rngs=rngs)
        self.own = nnx.Param(jax.random.normal(jax.random.key(3), (3, 16, 4)))

    def __call__(self, x: jax.Array) -> Any:
        own = jnp.einsum("bi,lio->lbo", self.up(x), self.own[...])
        seen = self.conv(x.reshape(-1, 8, 8, 1)).sum()
        return self.heads(self.up(x)), self.table(x), self.uneven(x), own, seen


OWN_RULES = (
    Rule("up", weight_quant=Int8WeightPerChannelFloat, input_quant=Int8DynamicActPerRowAbsMax),
    Rule("heads", **UINT4 | {"weight_group_size": 8}),
    Rule("table", weight_quant=NF4WeightPerGroupFloat, weight_group_size=16),
    Rule("uneven", weight_quant=NVFP4Weight, input_quant=NVFP4Act),
    Rule("conv", weight_quant=Int8WeightPerChannelFloat, weight_bit_width=3),
    Rule("own", weight_quant=Int8WeightPerChannelFloat),
)


def inputs_of_own() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (3, 64))


@pytest.mark.lengthy
def test_our_own_layout_keeps_every_kind_of_weight(tmp_path: Path) -> None:
    x = inputs_of_own()
    served = freeze(quantize(Own(), OWN_RULES, inputs=(x,)))
    folder = save(served, tmp_path / "own", method="jqinject")
    assert str(explain_load(Own(), folder)).endswith("load needs inputs= for: own")
    assert "needs inputs" not in str(explain_load(Own(), folder, inputs=(x,)))
    with pytest.raises(CheckpointError, match=r"(?s)for own, which the model.*cure: load\(.*inputs=\.\.\.\)"):
        load(Own(), folder)
    again = load(Own(), folder, inputs=(x,))
    for ours, theirs in zip(again(x), served(x), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name in ("up", "heads", "table", "uneven", "conv"):
        numbers, loaded = (getattr(model, name).kernel.numbers for model in (served, again))
        assert numbers.keys() == loaded.keys()
        for part, array in numbers.items():
            assert loaded[part].dtype == array.dtype
            np.testing.assert_array_equal(loaded[part], array, err_msg=f"{name}: {part}")
    assert (folder / "model.safetensors").stat().st_size < 12_000


STORED = Path(__file__).parent / "data" / "own_version_1"


@pytest.mark.heavy
def test_a_checkpoint_of_the_first_version_is_read() -> None:
    net: Any = load(Stored(), STORED)
    with np.load(STORED / "arrays.npz") as arrays:
        for name in ("up", "down"):
            np.testing.assert_array_equal(getattr(net, name).kernel[...], arrays[f"{name}.kernel"])
        np.testing.assert_allclose(net(jnp.asarray(arrays["x"])), arrays["y"], rtol=1e-6, atol=1e-6)


class Stored(nnx.Module):
    """What the stored checkpoint is for."""

    def __init__(self) -> None:
        self.up = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(16, 4, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            ('"format_version": 1', '"format_version": 2'),
            r"(?s)format_version is 2; this release reads up to 1.*newer",
        ),
        (('"format_version": 1', '"format_version": "1"'), "format_version is '1', expected an integer"),
        (('"kind": "int"', '"kind": "ints"'), r"weights\.\S+: kind is 'ints'"),
        (('"signed"', '"singed"'), r"weights\.\S+: singed is not known"),
    ],
)
def test_versions_and_settings_that_are_not_known_are_refused(
    change: tuple[str, str], match: str, tmp_path: Path
) -> None:
    shutil.copytree(STORED, tmp_path / "changed")
    config = tmp_path / "changed" / "config.json"
    config.write_text(config.read_text().replace(*change))
    with pytest.raises(CheckpointError, match=match):
        read_checkpoint(config.parent)


@pytest.mark.heavy
def test_blocks_of_rows_are_written_as_blocks(tmp_path: Path) -> None:
    files = Path(__file__).parents[1] / "golden" / "formats" / "files"
    for case, method in (
        ("compressed_tensors/fp8_block128", "compressed-tensors"),
        ("fp8_block/deepseek_ragged", "fp8"),
    ):
        found = read_checkpoint(files / case)
        name, matrix = next(
            (name, each) for name, each in found.matrices.items() if "o_proj" in name or "q_proj" in name
        )
        out, into = matrix.shape
        only = replace(found, matrices={name: matrix}, tensors={})
        net = nnx.Sequential(nnx.Linear(into, out, use_bias=False, rngs=nnx.Rngs(0)))
        names = {name: "layers.0.kernel"}
        served = load(net, only, names=names)
        again = read_checkpoint(save(served, tmp_path / method, method=method, names=names)).matrices[name]
        before, after = matrix.read(), again.read()
        np.testing.assert_array_equal(before.scale.astype(np.float32), after.scale.astype(np.float32))
        np.testing.assert_array_equal(before.codes, after.codes)
        assert before.block == after.block


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("settings", "method", "match"),
    [
        (
            {"weight_quant": NF4WeightPerGroupFloat},
            "compressed-tensors",
            r"(?s)kernel is nf4 .*compressed-tensors has integers.*cure: ",
        ),
        (UINT4, "bitsandbytes", r"(?s)kernel is uint4 .*bitsandbytes has NF4.*cure: NF4WeightPerGroupFloat"),
        (
            {"weight_quant": NF4WeightPerGroupFloat, "weight_group_size": 16},
            "bitsandbytes",
            "groups of 16 in rows of 64",
        ),
        (
            PER_ROW | {"input_quant": Int8DynamicActPerRowAbsMax},
            "gguf",
            r"kernel is int8 .*its input quantized as token int8; GGUF has .*float inputs",
        ),
        (
            {"weight_quant": Fp8e4m3WeightPerTensorFloat},
            "compressed-tensors",
            r"(?s)kernel has a minifloat, .* up to 480.*cure: .*Fp8e4m3OCPWeightPerChannelFloat",
        ),
        (UINT4, "gguf", "kernel is uint4 with zero points .* GGUF has integers .* without zero points"),
        (INT_GROUPS | {"weight_group_size": 16}, "gguf", "groups of 16 in rows of 64"),
        (
            {"weight_quant": Fp8e4m3OCPWeightPerTensorFloat},
            "fp8",
            r"(?s)kernel is e4m3 .*inputs in groups of 128.*cure: .*input_quant=",
        ),
        (
            {"weight_quant": Fp8e4m3OCPWeightPerChannelFloat, "input_quant": FP8_GROUPS},
            "fp8",
            r"(?s)kernel is e4m3 .*not for rows of their own.*cure: Fp8e4m3OCPWeightPerTensorFloat",
        ),
        (
            PER_ROW | {"input_quant": Int8ActPerTensorFloat, "input_bit_width": 4},
            "compressed-tensors",
            "no checkpoint can say how Int8ActPerTensorFloat quantizes the input",
        ),
        (
            PER_ROW | {"input_quant": Int8DynamicActPerRowAbsMax, "input_group_size": 16},
            "compressed-tensors",
            "no checkpoint can say how Int8DynamicActPerRowAbsMax quantizes the input",
        ),
        (
            PER_ROW | {"output_quant": Int8ActPerTensorFloat},
            "compressed-tensors",
            r"this model also has layers\.0\.output_quant",
        ),
    ],
)
def test_what_a_format_cannot_hold_is_refused_and_nothing_is_written(
    settings: dict[str, Any], method: str, match: str, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    with pytest.raises(CheckpointError, match=match):
        save(frozen(**settings), folder, method=method, config=LLAMA)
    assert not folder.exists()


def test_methods_and_shards_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'gguff'; did you mean 'gguf'"):
        save(floats(), tmp_path, method="gguff")
    with pytest.raises(ValueError, match="shard_bytes is 10"):
        save(floats(), tmp_path, method="gguf", shard_bytes=10)
    with pytest.raises(CheckpointError, match=r"cure: config=\{'general.architecture'"):
        save(floats(), tmp_path, method="gguf")
    assert not list(tmp_path.iterdir())


def test_large_checkpoints_are_several_files_with_an_index(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    served = frozen(**PER_ROW)
    save(served, tmp_path, shard_bytes=256)
    files = [load_file(path) for path in tmp_path.glob("model-0000?-of-0000?.safetensors")]
    assert len(files) > 1
    assert all(len(arrays) == 1 or sum(x.nbytes for x in arrays.values()) <= 256 for arrays in files)
    check_read_back(served, tmp_path, "compressed-tensors pack-quantized")


@pytest.mark.heavy
def test_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    model = floats()
    save(model, tmp_path)
    with pytest.raises(FileExistsError, match="cure: another folder"):
        save(model, tmp_path)
    kernel = read_checkpoint(tmp_path).array("layers.0.weight")
    np.testing.assert_array_equal(kernel, np.asarray(nnx.state(model)["layers"][0]["kernel"][...]).T)
