"""The same script in another interpreter, one that has torch: its timings come back as JSON."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from _timing import Timing

Timings = dict[str, dict[str, Timing]]


def timed_elsewhere(script: str, python: str | None, arguments: list[str]) -> Timings:
    """Return the timings that a script answers with `--only-torch`; none without an interpreter.

    Args:
        script: the file.
        python: the interpreter, or None.
        arguments: of the script.
    """
    if python is None:
        print("torch is left out: name an interpreter that has it with --python")
        return {}
    command = [python, str(Path(script).resolve()), "--only-torch", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, stdin=subprocess.DEVNULL)
    found = json.loads(done.stdout.splitlines()[-1])
    return {row: {name: Timing(tuple(s)) for name, s in timings.items()} for row, timings in found.items()}


def answer(timings: Mapping[str, Mapping[str, Timing]]) -> None:
    """Print timings for the process that asked for them: row -> name -> timing."""
    print(json.dumps({row: {name: t.seconds for name, t in found.items()} for row, found in timings.items()}))
