"""What `inspect` says of checkpoints: of whole ones what is in them, of others what is wrong."""

import importlib
import json
import pickle
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jqinject.__main__ import main as program
from jqinject.formats import Contents, MissingLibraryError, StoredArray, checkpoint_errors, inspect_checkpoint
from jqinject.formats.contents import main

TREE = {
    "fc": {"value": jnp.ones((4, 6), jnp.int8), "scale": jnp.ones((1, 6), jnp.float32)},
    "step": jnp.int32(3),
}


def needs(library):
    return pytest.importorskip(library, reason="of the extra jqinject[formats]")


def as_table(contents):
    return {array.name: (array.format, array.shape, array.bytes) for array in contents.arrays}


@pytest.fixture(scope="module")
def orbax_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "7"
    ocp.PyTreeCheckpointer().save(folder / "default", TREE)
    return folder


@pytest.mark.parametrize("below", ["", "default"])
def test_an_orbax_folder(orbax_folder, below):
    found = inspect_checkpoint(orbax_folder / below)
    assert found.kind == "Orbax"
    assert as_table(found) == {
        "fc.value": ("int8", (4, 6), 24),
        "fc.scale": ("float32", (1, 6), 24),
        "step": ("int32", (), 4),
    }
    assert (found.bytes, found.low_bytes, found.coverage) == (52, 24, 24 / 52)


def test_a_folder_of_checkpoints_asks_for_one(tmp_path):
    for name in ("params", "state"):
        ocp.PyTreeCheckpointer().save(tmp_path / "9" / name, TREE)
    with pytest.raises(ValueError, match=r"holds several: params, state\.\n  cure: name one"):
        inspect_checkpoint(tmp_path / "9")
    with pytest.raises(ValueError, match=r"holds several: 9"):
        inspect_checkpoint(tmp_path)


def test_a_broken_orbax_folder(orbax_folder, tmp_path):
    (tmp_path / "_METADATA").write_text('{"tree_metadata": ')
    with pytest.raises(ValueError, match="is not an Orbax checkpoint, or not a whole one"):
        inspect_checkpoint(tmp_path)


def write_safetensors(path, arrays, cut=0):
    """By hand: an 8-byte length, a JSON header, the data."""
    header, at, data = {}, 0, b""
    for name, (kind, shape, size) in arrays.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at, data = at + size, data + bytes(size)
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + data
    path.write_bytes(whole[: len(whole) - cut])
    return path


ARRAYS = {
    "w": ("I8", [8, 4], 32),
    "b": ("BF16", [4], 8),
    "q.qweight": ("I32", [2, 2], 16),
    "e": ("F8_E4M3", [3], 3),
}


def test_safetensors(tmp_path):
    needs("safetensors")
    found = inspect_checkpoint(write_safetensors(tmp_path / "m.safetensors", ARRAYS))
    assert as_table(found) == {
        "w": ("I8", (8, 4), 32),
        "b": ("BF16", (4,), 8),
        "q.qweight": ("I32 packed", (2, 2), 16),
        "e": ("F8_E4M3", (3,), 3),
    }
    assert found.low_bytes == 32 + 16 + 3
    write_safetensors(tmp_path / "n.safetensors", {"other": ("F32", [2], 8)})
    assert len(inspect_checkpoint(tmp_path).arrays) == 5, "a folder of shards"


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_safetensors_cut_short(tmp_path, cut):
    needs("safetensors")
    with pytest.raises(ValueError, match=r"not a whole one: .*\n  cure: fetch or write it again"):
        inspect_checkpoint(write_safetensors(tmp_path / "m.safetensors", ARRAYS, cut))


@pytest.fixture
def gguf_file(tmp_path):
    gguf = needs("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", np.zeros((64, 36), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("b", np.zeros((64,), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf"


def test_gguf(gguf_file):
    found = inspect_checkpoint(gguf_file)
    # blocks of 32 numbers in 4 bits with a scale of 2 bytes: 18 bytes
    assert as_table(found) == {"w": ("Q4_0", (64, 64), 64 * 64 // 32 * 18), "b": ("F32", (64,), 256)}
    assert found.coverage == 2304 / 2560


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        (20, "its header cannot be read"),
        (100, "its header cannot be read"),
        (2000, "the data of w, Q4_0, end"),
    ],
)
def test_gguf_cut_short(gguf_file, kept, why):
    gguf_file.write_bytes(gguf_file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"is not a GGUF file, or not a whole one: {why}"):
        inspect_checkpoint(gguf_file)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("executed",))


@pytest.mark.parametrize("ending", ["safetensors", "gguf"])
def test_a_pointer_of_git_lfs(ending, tmp_path):
    file = tmp_path / f"model.{ending}"
    file.write_text("version https://git-lfs.example/spec/v1\noid sha256:0\nsize 5000000000\n")
    with pytest.raises(ValueError, match=r"a pointer of Git LFS .*\n  cure: git lfs pull"):
        inspect_checkpoint(file)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "model.gguf", "model"])
def test_nothing_is_executed(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="may hold code: it is not opened"):
        inspect_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("m.gguf", b"abcdefghijk", "begins with b'abcd', not with b'GGUF'"),
        ("notes.txt", b"hello", "is not a checkpoint"),
        ("empty", b"", "is not a checkpoint"),
    ],
)
def test_other_files_are_refused(tmp_path, name, data, message, capsys):
    (tmp_path / name).write_bytes(data)
    assert main([str(tmp_path / name)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and message in said.err and "\n  cure: " in said.err
    assert main([str(tmp_path / "missing")]) == 2
    assert "there is no file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "library"), [("m.safetensors", "safetensors"), ("m.gguf", "gguf")])
def test_a_missing_library_is_named(tmp_path, name, library, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    (tmp_path / name).write_bytes(b"GGUF" + bytes(20) if library == "gguf" else bytes(20))
    monkeypatch.setattr(
        checkpoint_errors, "importlib", type("Nothing", (), {"import_module": staticmethod(missing)})
    )
    with pytest.raises(MissingLibraryError, match=rf"needs the library {library}.*\n  cure: pip install"):
        inspect_checkpoint(tmp_path / name)
    assert importlib.import_module("json") is json


def test_inspecting_imports_no_jax():
    code = "import sys, jqinject.formats.contents; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def test_lines_fit_and_nothing_is_cut(capsys, monkeypatch, orbax_folder):
    monkeypatch.setenv("COLUMNS", "80")
    long = "model.layers.11.attention." * 4 + "kernel"
    shown = str(Contents("m", "Orbax", (StoredArray(long, "float8_e4m3fn", (1024, 1024, 8), 8 << 20),)))
    assert max(map(len, shown.splitlines())) <= 80
    assert long in "".join(shown.split()) and "format         shape" in shown
    monkeypatch.setattr("sys.argv", ["jqinject", "inspect", str(orbax_folder)])
    assert program() == 0
    assert "46.2 % of the bytes have at most 8 bits a number." in capsys.readouterr().out
