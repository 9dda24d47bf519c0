"""Whole-model functions on two processes give what one process with two devices gives, to the bit."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("_two_processes.py")
ROOT = Path(__file__).parents[2]
SECONDS = 600


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(rank, processes, port, results):
    """Start one process, compiling as quickly as the tests do, and as patient as the test is.

    A collective ends its process when a partner stays away for 40 seconds, which a busy machine takes to compile.
    """
    flags = {
        "xla_force_host_platform_device_count": 2 // processes,
        "xla_cpu_collective_call_warn_stuck_timeout_seconds": SECONDS,
        "xla_cpu_collective_call_terminate_timeout_seconds": SECONDS,
    }
    kept = [flag for flag in os.environ["XLA_FLAGS"].split() if flag.partition("=")[0][2:] not in flags]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "XLA_FLAGS": " ".join([*kept, *(f"--{name}={number}" for name, number in flags.items())]),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(SCRIPT), str(rank), str(processes), str(port), str(results)]
    log = results.with_suffix(f".{processes}.{rank}.log")
    with log.open("w") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT), log


def finish(*started):
    try:
        for process, log in started:
            assert process.wait(timeout=SECONDS) == 0, log.read_text()[-4000:]
    finally:
        for process, _ in started:
            process.kill()
            process.wait()


@pytest.mark.lengthy
def test_two_processes_are_one(tmp_path):
    port = free_port()
    two = [start(rank, 2, port, tmp_path / "two.npz") for rank in range(2)]
    finish(start(0, 1, 0, tmp_path / "one.npz"), *two)
    with np.load(tmp_path / "one.npz") as one, np.load(tmp_path / "two.npz") as two:
        assert set(one.files) == set(two.files) and len(one.files) > 50
        for name in one.files:
            np.testing.assert_array_equal(two[name], one[name], err_msg=name)
