"""The kernels for ARM64, cross-compiled and run by an emulator, on a processor with `sdot` and on one without.

A driver calls them as XLA does; their results are compared with NumPy's.
"""

import re
import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jqinject.native.build import FLAGS, SOURCES
from jqinject.native.library import FEW_ROWS, FUNCTIONS
from jqinject.ops import IntGrid
from tests.native import fused_steps

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PROCESSORS = {"max": "dot_bytes_sdot", "cortex-a57": "dot_bytes_widened"}
"""Those that are emulated, and the function that multiplies bytes there."""
DTYPES = {
    "bfloat16": 16,
    "int8": 2,
    "int32": 4,
    "uint8": 6,
    "float32": 11,
    "float8_e4m3fn": 20,
    "float8_e8m0fnu": 33,
}
INT4 = np.asarray((*range(8), *range(-8, 0)))
WIDE = np.asarray((-128, 127, *range(-7, 7)))


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    for name in (COMPILER, EMULATOR):
        if shutil.which(name) is None:
            pytest.skip(
                f"{name} is not installed, with which code for ARM64 is made and run on this processor"
            )
    path = tmp_path_factory.mktemp("neon") / "driver"
    sources = [Path(__file__).with_name("neon_driver.c"), *SOURCES.glob("*.c")]
    warnings = ("-Wall", "-Wextra", "-Werror")
    done = subprocess.run(
        [COMPILER, *FLAGS, *warnings, "-static", f"-I{SOURCES}", *sources, "-o", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(params=PROCESSORS)
def run(program, request, tmp_path):
    """Makes calls `(function, operands)` on one of the processors and returns their results.

    A fused product has the dtype of its result as well.
    """

    def run(*calls):
        outs = [result(*call) for call in calls]
        given = b"".join(
            numbers(FUNCTIONS.index(name), len(operands)) + b"".join(map(buffer, operands)) + header(out)
            for (name, operands, *_), out in zip(calls, outs, strict=True)
        )
        log = tmp_path / "log"  # of all code that ran
        command = [EMULATOR, "-cpu", request.param, "-d", "in_asm", "-D", log, program]
        done = subprocess.run(command, input=given, capture_output=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr.decode()
        multiplied = (
            {PROCESSORS[request.param]}
            if {name for name, *_ in calls} - {"float_matmul", "three_bits"}
            else set()
        )
        assert set(re.findall(r"IN: (dot_bytes_\w+)", log.read_text())) == multiplied
        assert np.frombuffer(done.stdout, np.int32, 1) == FEW_ROWS
        found, start = [], 4
        for out in outs:
            found.append(np.frombuffer(done.stdout, out.dtype, out.size, start).reshape(out.shape))
            start += out.nbytes
        assert start == len(done.stdout)
        return found

    return run


def result(name, operands, dtype=None):
    if name == "row_amax":
        return np.empty((len(operands[0]), 1), np.float32)
    if name == "three_bits":
        return np.empty((len(operands[0]), operands[0].shape[1] // 3 * 4), np.uint8)
    lhs, rhs = operands[:2]
    if dtype is not None:
        return np.empty((len(lhs), len(rhs)), dtype)
    lead = np.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    dtype = np.int32 if name in ("int8_matmul", "int4_matmul") else np.float32
    return np.empty((*lead, lhs.shape[-2], rhs.shape[-2]), dtype)


def numbers(*of):
    return np.asarray(of, np.int64).tobytes()


def header(x):
    return numbers(DTYPES[x.dtype.name], x.ndim, *x.shape)


def buffer(x):
    return header(x) + x.tobytes()


def integers(draw, *shape):
    """Int8, among them the least beside the least and the greatest."""
    x = draw.integers(-128, 128, shape, np.int8)
    x[..., 0, : shape[-1] // 2] = -128
    x[..., -1, : shape[-1] // 3] = 127
    return x


def halves(draw, *shape):
    """Indices of 4 bits, and the same packed."""
    indices = draw.integers(0, 16, shape, np.uint8)
    padded = np.pad(indices, [(0, 0)] * (len(shape) - 1) + [(0, shape[-1] % 2)])
    return indices, padded[..., ::2] | padded[..., 1::2] << 4


def row(values, dtype):
    return np.asarray(values, dtype)[None]


SHAPES = [(1, 1, 1), (2, 5, 31), (3, 9, 32), (16, 3, 65), (1, 37, 127), (4, 33, 4127), (3, 36, 8193)]
"""The last two take two threads, and more numbers of a row than are unpacked at a time."""


def test_integers(run):
    draw, calls, wanted = np.random.default_rng(0), [], []
    for m, n, k in SHAPES:
        x, w = integers(draw, m, k), integers(draw, n, k)
        calls.append(("int8_matmul", [x, w]))
        wanted.append(x.astype(int) @ w.T.astype(int))
        for table in (INT4, WIDE):
            indices, packed = halves(draw, n, k)
            calls.append(("int4_matmul", [x, packed, row(table, np.int8)]))
            wanted.append(x.astype(int) @ table[indices].T)
    x, w = integers(draw, 2, 1, 3, 50), integers(draw, 1, 3, 4, 50)
    calls.append(("int8_matmul", [x, w]))
    wanted.append(x.astype(int) @ np.swapaxes(w, -1, -2).astype(int))
    x = np.full((1, 2**17), -128, np.int8)  # the sum is one more than int32 holds
    calls.append(("int8_matmul", [x, x]))
    wanted.append(np.full((1, 1), -(2**31)))
    for got, correct in zip(run(*calls), wanted, strict=True):
        np.testing.assert_array_equal(got, correct)


# The depth, the size of a group (0: all), the dtypes of scales and of zero points (None: without).
GROUPS = [
    (303, 0, "float32", None),
    (4127, 0, "float32", "float32"),
    (160, 32, "float8_e8m0fnu", None),
    (160, 16, "float8_e4m3fn", "int8"),
    (384, 128, "float32", "uint8"),
    (4992, 384, "float8_e4m3fn", "float32"),
]


@pytest.mark.parametrize("exact", [True, False])
def test_groups(run, exact):
    """With rows of integers and of floats: exact if scales are powers of 2, otherwise within float32 rounding."""
    draw, calls, wanted, bounds = np.random.default_rng(1), [], [], []
    for number, (k, group, of_scale, of_zero) in enumerate(GROUPS):
        m, n, count, by_column = number + 1, 5, k // (group or k), number % 2
        scale = draw.choice([0.5, 1, 2], (count, n)) if exact else draw.uniform(0.5, 2, (count, n))
        scale = scale.astype(jnp.dtype(of_scale))
        zero = draw.integers(0 if of_zero == "uint8" else -8, 9, (count, n)).astype(of_zero or "float32")
        form = row((group, by_column), np.int32)
        laid_out = [np.ascontiguousarray(x.T if by_column else x) for x in (scale, zero)]
        laid_out[1] = laid_out[1] if of_zero else np.zeros((0, 1), np.float32)
        scales, zeros = (wide(x, k).T for x in (scale, zero if of_zero else zero * 0))
        bytes_, (indices, packed) = draw.integers(-128, 128, (n, k), np.int8), halves(draw, n, k)
        for payload, stored in ((bytes_, bytes_.astype(float)), (packed, INT4[indices].astype(float))):
            weight, size = (stored - zeros) * scales, (np.abs(stored) + np.abs(zeros)) * scales
            x = draw.integers(-8, 9, (m, k)) if exact else draw.normal(size=(m, k))
            rows = [("float_matmul", x.astype(np.float32), [])]
            for of_x in {1, count}:
                x_scale = draw.choice([0.5, 1, 2], (m, of_x)) if exact else draw.uniform(0.5, 2, (m, of_x))
                rows.append(("group_matmul", integers(draw, m, k), [x_scale.astype(np.float32)]))
            for name, x, x_scale in rows:
                table = row(INT4, np.int8 if x_scale else np.float32)
                calls.append((name, [x, payload, table, *laid_out, form, *x_scale]))
                x = x * (wide(x_scale[0].T, k).T if x_scale else 1.0)
                wanted.append(x @ weight.T)
                bounds.append(np.abs(x) @ size.T * (0 if exact else (k + 8) * 2.0**-24))
    for got, correct, bound in zip(run(*calls), wanted, bounds, strict=True):
        assert np.all(np.abs(got - correct) <= bound)


def wide(of_groups, depth):
    """One for each number of a column."""
    return np.repeat(of_groups.astype(float), depth // len(of_groups), 0)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e8m0fnu])
def test_every_scale_of_a_byte(run, dtype):
    """Each is that of a column, whose first number is 1."""
    scale = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype))[None]
    payload = np.zeros((256, 4), np.int8)
    payload[:, 0] = 1
    x, none, form = payload[:1], np.zeros((0, 1), np.float32), row((0, 0), np.int32)
    calls = [
        ("group_matmul", [x, payload, row(INT4, np.int8), scale, none, form, np.ones((1, 1), np.float32)]),
        ("float_matmul", [x.astype(np.float32), payload, row(INT4, np.float32), scale, none, form]),
    ]
    for got in run(*calls):
        np.testing.assert_array_equal(got, scale.astype(np.float32))


def test_dequantized_numbers(run):
    """Products with the identity are the numbers themselves, to the last bit."""
    draw, k, n = np.random.default_rng(2), 39, 4
    bytes_, (indices, packed) = integers(draw, n, k), halves(draw, n, k)
    table, scale, zero = (draw.normal(size=(1, size)).astype(np.float32) for size in (16, n, n))
    more = [table, scale, zero, row((0, 0), np.int32)]
    got = run(*(("float_matmul", [np.eye(k, dtype=np.float32), x, *more]) for x in (bytes_, packed)))
    for dequantized, stored in zip(got, (bytes_.astype(np.float32), table[0, indices]), strict=True):
        np.testing.assert_array_equal(dequantized, (stored.T - zero) * scale)


@pytest.mark.parametrize("signed", [True, False])
def test_three_bits_become_four(run, signed):
    three, four = IntGrid(3, signed), IntGrid(4, signed)
    draw, sign, calls, wanted = np.random.default_rng(4), row((0x44444444 * signed,), np.int32), [], []
    for shape in ((1, 8), (5, 88), (129, 1040)):
        numbers = jnp.asarray(draw.integers(*three.bounds, shape, three.storage, endpoint=True))
        calls.append(("three_bits", [np.asarray(three.pack(numbers)), sign]))
        wanted.append(four.pack(numbers))
    for got, correct in zip(run(*calls), wanted, strict=True):
        np.testing.assert_array_equal(got, correct)


def test_products_with_steps_around_them(run):
    """To the bit, operation by operation."""
    draw, calls, wanted = np.random.default_rng(3), [], []
    for m, n, k in SHAPES[:5]:
        for lhs, rhs, before, after, dtype in fused_steps.cases(draw, m, n, k):
            codes = np.asarray([len(before), *(kind for kind, _ in (*before, *after))], np.int32)
            operands = [operand for _, more in (*before, *after) for operand in more]
            calls.append(("fused_matmul", [lhs, rhs, codes, *operands], np.dtype(dtype)))
            wanted.append(fused_steps.result(lhs, rhs, before, after, dtype))
        x = draw.normal(size=(m, k)).astype(np.float32)
        x[0] = 0
        for steps in ((), fused_steps.scales()):
            codes = np.asarray([kind for kind, _ in steps], np.int32)
            calls.append(("row_amax", [x, codes, *(operand for _, more in steps for operand in more)]))
            wanted.append(fused_steps.applied(np.abs(x).max(1, keepdims=True), steps))
    for got, correct in zip(run(*calls), wanted, strict=True):
        np.testing.assert_array_equal(got, correct)
