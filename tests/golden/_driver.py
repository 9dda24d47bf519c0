"""Runs golden cases: finds the manifests, calls the adapter of a case's kind, and compares what it returns.

An adapter is a module `adapters/<kind>.py` with

    run(case, inputs) -> {output name: array}     every output that the manifest's case names
    facts(case, inputs) -> {fact name: value}     the facts in `COMPARED_FACTS` that the case states

Arrays are in the reference's layout (the manifest's README says which): an adapter converts. A case with
`expect_error` passes if `run` raises ValueError, TypeError or RuntimeError. Only out_of_scope.toml excuses
a case.
"""

import fnmatch
import functools
import importlib
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden._config import CannotDrive as CannotDrive
from tests.golden._config import settings_of

HERE = Path(__file__).parent
COMPARED_FACTS = (
    "type",
    "signed",
    "is_valid",
    "int_dtype",
    "training",
    "requires_input_scale",
    "is_quant_enabled",
    "scale_is_none",
    "same_proxy",
    "saturating",
    "inf_values",
    "nan_values",
)
USER_ERRORS = (ValueError, TypeError, RuntimeError)


def folder() -> Path:
    """The folder with the reference sets: the environment variable JQINJECT_GOLDEN, or this one."""
    return Path(os.environ.get("JQINJECT_GOLDEN") or HERE)


def load_cases(peer: str) -> list[dict[str, Any]]:
    """Every case of every manifest of `peer` below the folder; `_folder` says where its arrays are."""
    cases = []
    for path in sorted(folder().rglob("manifest.json")):
        manifest = json.loads(path.read_text())
        if isinstance(manifest, dict) and _peer_of(manifest) == peer:
            cases += [case | {"_folder": str(path.parent)} for case in manifest["cases"]]
    return cases


def _peer_of(manifest: dict[str, Any]) -> str | None:
    """The one peer that a manifest names; of sets of many peers "ptq" (after training) or "lowbit_training"."""
    if "peers" in manifest:
        return "ptq"
    of_many = manifest.get("packages", {})
    return "lowbit_training" if "transformer_engine" in of_many else manifest.get("peer")


@functools.cache
def _archive(path: str) -> dict[str, np.ndarray]:
    with np.load(path) as archive:
        return {key: archive[key] for key in archive.files}


def arrays_of(case: dict[str, Any], side: str) -> dict[str, np.ndarray]:
    """The arrays of a case, its "inputs" or its "outputs", by name."""
    if not case[side]:  # its file may not exist
        return {}
    archive = _archive(str(Path(case["_folder"]) / case["file"]))
    return {name: archive[spec["key"]].copy() for name, spec in case[side].items()}


def labels(case: dict[str, Any]) -> list[str]:
    """What a line of out_of_scope.toml may name: see there."""
    found = [case["id"], case["area"], f"kind/{case.get('kind')}"]
    if case.get("quantizer"):
        found.append(f"quantizer/{case['quantizer']}")
    layer = case.get("layer") or {}
    if "kind" in layer:
        found.append(f"layer/{layer['kind']}")
    arguments = case.get("config", {}).get("kwargs", {})
    found += [f"quantizer/{v}" for k, v in arguments.items() if k.endswith("_quant") and isinstance(v, str)]
    group = case["id"].split("/")[0]
    found += [f"{group}:{key}={value}" for key, value in settings_of(case.get("config", {}))]
    return found


def matches(case: dict[str, Any], pattern: str) -> bool:
    """Whether a pattern of out_of_scope.toml names the case: all its parts, if it has several."""
    found = labels(case)
    return all(any(fnmatch.fnmatchcase(label, part) for label in found) for part in pattern.split(" & "))


@functools.cache
def out_of_scope(peer: str) -> dict[str, str]:
    """The table of `peer` in out_of_scope.toml: pattern -> reason."""
    return tomllib.loads((HERE / "out_of_scope.toml").read_text()).get(peer, {})


def reason_to_skip(case: dict[str, Any], peer: str) -> str | None:
    """Why the case is out of scope, or None."""
    for pattern, reason in out_of_scope(peer).items():
        if matches(case, pattern):
            return reason
    return None


def adapter(kind: str) -> Any:
    """The module that drives cases of this kind."""
    if not (HERE / "adapters" / f"{kind}.py").is_file():
        raise CannotDrive(
            f"no adapter for cases of kind {kind!r}: tests/golden/adapters/{kind}.py does not exist"
        )
    return importlib.import_module(f"tests.golden.adapters.{kind}")


def check(case: dict[str, Any]) -> None:
    """Run one case and compare outputs and facts; AssertionError where they disagree."""
    module = adapter(case["kind"])
    inputs = arrays_of(case, "inputs")
    if case.get("expect_error"):
        _check_raises(module, case, inputs)
        return
    actual = module.run(case, inputs)
    problems = []
    for name, expected in arrays_of(case, "outputs").items():
        if name not in actual:
            problems.append(f"{name}: not returned; the adapter returned {sorted(actual)}")
        else:
            problems += _compare(case, name, np.asarray(actual[name]), expected, actual)
    if any(_facts_of(case)):
        problems += _compare_facts(case, module.facts(case, inputs))
    assert not problems, case["id"] + "\n" + "\n".join(problems)


def _check_raises(module: Any, case: dict[str, Any], inputs: dict[str, np.ndarray]) -> None:
    try:
        returned = module.run(case, inputs)
    except CannotDrive:
        raise
    except USER_ERRORS:
        return
    error = case["expect_error"]
    raise AssertionError(
        f"{case['id']}: expected {error['type']}: {error['message']}, but it returned {sorted(returned)}"
    )


def _compare(
    case: dict[str, Any], name: str, actual: np.ndarray, expected: np.ndarray, outputs: dict[str, Any]
) -> list[str]:
    """What is wrong with one output: nothing, or one line."""
    if actual.shape != expected.shape:
        return [f"{name}: shape {actual.shape}, expected {expected.shape}"]
    default = case["tolerance"]["default"]
    is_int = name.split(".")[-1] == "int"
    if is_int and not np.issubdtype(actual.dtype, np.integer):
        return [f"{name}: dtype {actual.dtype}, expected integers"]
    if is_int:
        wrong = np.abs(actual.astype(np.int64) - expected.astype(np.int64)) > default.get("int_steps", 0)
    else:
        tolerance = case["tolerance"]["grad"] if "grad." in name else default
        wrong = ~np.isclose(actual, expected, tolerance["rtol"], tolerance["atol"], equal_nan=True)
    if not wrong.any() or _one_step_off(default, name, actual, expected, wrong, outputs):
        return []
    where = np.argwhere(wrong)[0]
    index = tuple(int(i) for i in where)
    return [
        f"{name}: {int(wrong.sum())} of {wrong.size} elements differ, first at {index}: "
        f"{actual[index]!r}, expected {expected[index]!r}"
    ]


def _one_step_off(
    default: dict[str, Any],
    name: str,
    actual: np.ndarray,
    expected: np.ndarray,
    wrong: np.ndarray,
    outputs: dict[str, Any],
) -> bool:
    """Whether `int_off_by_one_allowed` allows the differences: so many elements one integer step away."""
    prefix, _, last = name.rpartition(".")
    if last not in ("int", "value") or wrong.sum() > default.get("int_off_by_one_allowed", 0):
        return False
    scale_name = f"{prefix}.scale" if prefix else "scale"
    if last == "value" and scale_name not in outputs:
        return False
    step = 1.0 if last == "int" else float(np.max(np.abs(np.asarray(outputs[scale_name]))))
    return bool(np.all(np.abs(actual.astype(np.float64) - expected)[wrong] <= step * 1.001))


def _facts_of(case: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """The compared facts of a case: of the whole, of every step, and its counters after every step."""
    facts = case.get("facts") or {}
    whole = {name: facts[name] for name in COMPARED_FACTS if name in facts}
    length = len(case.get("schedule") or [])
    return whole, _per_step(facts.get("steps"), length), facts.get("counters") or []


def _per_step(steps: Any, length: int) -> list[dict[str, Any]]:
    """`facts.steps` is one dict where it is the same at every step."""
    if isinstance(steps, dict):
        steps = [steps] * max(length, 1)
    return [{name: fact for name, fact in step.items() if name in COMPARED_FACTS} for step in steps or []]


def _compare_facts(case: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    whole, steps, counters = _facts_of(case)
    problems = _compare_dicts("facts", whole, actual)
    actual_steps = _per_step(actual.get("steps"), len(steps))
    pairs = [("steps", steps, actual_steps), ("counters", counters, actual.get("counters") or [])]
    for name, expected_list, actual_list in pairs:
        if len(actual_list) != len(expected_list):
            problems.append(f"facts.{name}: {len(actual_list)} entries, expected {len(expected_list)}")
            continue
        for step, (expected, got) in enumerate(zip(expected_list, actual_list, strict=True)):
            problems += _compare_dicts(f"facts.{name}[{step}]", expected, got)
    return problems


def _compare_dicts(where: str, expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    problems = []
    for name, fact in expected.items():
        if name not in actual:
            problems.append(f"{where}.{name}: not returned, expected {fact!r}")
        elif actual[name] != fact:
            problems.append(f"{where}.{name}: {actual[name]!r}, expected {fact!r}")
    return problems
