"""NVFP4 as TransformerEngine and torchao round it: codes, scales of blocks and of tensors, dequantized numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import CeilSte, FloorSte, FourOverSixScales, LeastNormalScales, NVFP4Scales
from jqinject.core.transforms import Hadamard, Transform
from jqinject.dot import QDotGeneral, Scheme
from jqinject.inject import Binding
from jqinject.nn import QuantIdentity
from jqinject.quant import MXFP4TrainingAct, NVFP4TrainingAct, NVFP4TrainingSigns
from tests.golden._config import CannotDrive, reading

Drive = Callable[[Mapping[str, np.ndarray]], dict[str, Any]]
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
BLOCK = 16
DATA = ("data", "seed", "shape")
FLAGS = {True: True, False: False}


def quantized(x: jax.Array, injector: Any) -> Any:
    """A tensor as a layer would quantize its activation, its features last."""
    return QuantIdentity(act_quant=injector, return_quant_tensor=True)(x)


def numbers(tensor: Any) -> dict[str, np.ndarray]:
    """What TransformerEngine keeps of a tensor: codes, scales of blocks, and what both mean in float32."""
    levels = tensor.grouped.levels
    scale = np.asarray(levels.block)[..., 0]
    return {
        "codes": np.asarray(tensor.codes()),
        "scale_e4m3": scale,
        "scale_bits": np.asarray(jnp.asarray(scale).astype(jnp.float8_e4m3fn)).view(np.uint8),
        # Not by XLA, which takes subnormal numbers for 0.
        "dequantized": np.asarray(tensor.minifloat()) * np.asarray(tensor.scale),
    }


def te_nvfp4_of(config: Mapping[str, Any]) -> Drive:
    """A case of `te_nvfp4`: blocks of 1 x 16 or 16 x 16, by row and by column."""
    with reading(config, "te_nvfp4") as given:
        for name in DATA:
            given.take(name)
        dtype = given.choose("input_dtype", DTYPES)
        tile = _tile(given.take("tile"))
        by_column = given.choose("columnwise", FLAGS, True)
        per_row = given.choose("row_scaled_nvfp4", FLAGS, False)
        of_two = given.choose("nvfp4_use_4over6", FLAGS, False)
        error = given.choose("nvfp4_4over6_err_mode", {"MAE": "mae", "MSE": "mse"}, "mae")
        fast = given.choose("nvfp4_4over6_err_use_fast_math", FLAGS, False)
        most = given.choose("nvfp4_e4m3_max", {448: 448, 256: 256}, 448)
        rotates = given.choose("with_rht", FLAGS, False)
        signs = given.choose("with_random_sign_mask", FLAGS, True)
    if tile == 32:
        return lambda inputs: _powers_of_two(jnp.asarray(inputs["x"], dtype))
    scales = FourOverSixScales(error, most, fast) if of_two else NVFP4Scales()
    row = NVFP4TrainingAct.let(group_size=tile, block_scale_impl=scales, shared_per_row=per_row)
    rotation = Hadamard(BLOCK, NVFP4TrainingSigns if signs else None)
    column = row.let(pre_transform=rotation) if rotates else row

    def drive(inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        x = jnp.asarray(inputs["x"], dtype)
        sides = {"row": (row, x, x), "col": (column, x.T, rotation(x.T) if rotates else x.T)}
        found: dict[str, Any] = {}
        for side in ("row", "col") if by_column else ("row",):
            injector, tensor, rotated = sides[side]
            found |= {f"{side}.{name}": part for name, part in numbers(quantized(tensor, injector)).items()}
            found[f"{side}.global_amax"] = _amax(rotated, per_row)
        return found

    return drive


def _tile(tile: list[int]) -> int | tuple[int, int]:
    known: dict[tuple[int, ...], int | tuple[int, int]] = {(1, 16): 16, (16, 16): (16, 16), (1, 32): 32}
    if tuple(tile) not in known:
        raise CannotDrive(f"te_nvfp4: tile {tile} has no meaning")
    return known[tuple(tile)]


def _amax(x: jax.Array, per_row: bool) -> np.ndarray:
    magnitude = np.abs(np.asarray(x.astype(jnp.float32)))
    return magnitude.max(-1) if per_row else magnitude.max().reshape(1)


def te_jax_of(config: Mapping[str, Any]) -> Drive:
    """A case of `te_jax` whose numbers are e2m1: minifloats, and dequantized ones without the rotation."""
    with reading(config, "te_jax nvfp4") as given:
        for name in DATA:
            given.take(name)
        dtype = given.choose("input_dtype", DTYPES)
        tile = given.choose("mode", {"NVFP4_1D_SCALING": BLOCK, "NVFP4_2D_SCALING": (BLOCK, BLOCK)})
        given.choose("q_dtype", {"float4_e2m1fn": None})
        given.choose("flatten_axis", {-1: None})
        rotates = given.choose("use_rht", FLAGS, False)
    row = NVFP4TrainingAct.let(group_size=tile, block_scale_impl=NVFP4Scales(folded=False))
    rotation = ByMatrix(NVFP4TrainingSigns)
    column = row.let(pre_transform=rotation) if rotates else row

    def drive(inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        x = jnp.asarray(inputs["x"], dtype)
        turned = jnp.moveaxis(x, -1, 0)
        found: dict[str, Any] = {}
        for side, injector, tensor in (("row", row, x), ("col", column, turned)):
            rotated = side == "col" and rotates
            made = quantized(tensor, injector)
            scale = np.asarray(made.grouped.levels.block)[..., 0]
            found |= {
                f"{side}.value": np.asarray(made.minifloat()),
                f"{side}.scale_e4m3": scale,
                f"{side}.scale_2d": scale[::BLOCK],
                f"{side}.amax": _amax(rotation(tensor) if rotated else tensor, per_row=False),
                f"{side}.dequantized": np.asarray(rotation.inverse(made.value) if rotated else made.value),
            }
        return found

    return drive


def _powers_of_two(x: jax.Array) -> dict[str, Any]:
    """MXFP4 with the largest magnitude / 6, rounded up to a power of two, as scale."""
    made = quantized(x, MXFP4TrainingAct)
    codes = np.asarray(made.codes())
    return {
        "row.codes": np.where((codes == 0) & (np.asarray(x) < 0), 8, codes),
        "row.scale_pow2": np.asarray(made.scale_)[..., 0],
        "row.dequantized": np.asarray(made.minifloat() * made.scale),
    }


def gemm_of(config: Mapping[str, Any]) -> Drive:
    """The three products of a layer, each of the operands quantized for it."""
    with reading(config, "te_nvfp4_gemm") as given:
        for name in ("k", "m", "n", "seed"):
            given.take(name)
        dtype, out = given.choose("input_dtype", DTYPES), given.choose("out_dtype", DTYPES)
        given.choose("fprop", {"x.row @ w.row.T": None})
        given.choose("dgrad", {"g.row @ w.col.T": None})
        given.choose("wgrad", {"g.col @ x.col.T": None})
        rotation = Hadamard(BLOCK, given.choose("random_sign", {True: NVFP4TrainingSigns, False: None}))
        sides = {name: _sides(given.nested(name), name, rotation) for name in ("x", "w", "g")}

    def drive(inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        arrays = {name: jnp.asarray(inputs[name], dtype) for name in sides}
        found: dict[str, Any] = {}
        for name, (row, column) in sides.items():
            x, turned = arrays[name], arrays[name].T
            rotated = rotation(turned) if column.declares("pre_transform") else turned
            for side, injector, tensor, seen in (("row", row, x, x), ("col", column, turned, rotated)):
                made = numbers(quantized(tensor, injector))
                found |= {f"{name}.{side}.{part}": made[part] for part in made if part != "dequantized"}
                found[f"{name}.{side}.global_amax"] = _amax(seen, per_row=False)

        def product(left: tuple[str, int], right: tuple[str, int]) -> np.ndarray:
            (a, summed_a), (b, summed_b) = left, right
            operands = {"fprop_lhs": sides[a][1 - summed_a], "fprop_rhs": sides[b][1 - summed_b]}
            dims = (((summed_a,), (summed_b,)), ((), ()))
            made = QDotGeneral(Scheme.let(**operands))(arrays[a], arrays[b], dims, preferred_element_type=out)
            return np.asarray(made.astype(jnp.float32))

        products = {"y": (("x", 1), ("w", 1)), "dx": (("g", 1), ("w", 0)), "dw": (("g", 0), ("x", 0))}
        return found | {name: product(*operands) for name, operands in products.items()}

    return drive


def _sides(config: Mapping[str, Any], name: str, rotation: Hadamard) -> tuple[Any, Any]:
    """How an operand is quantized along its rows, and along its columns."""
    with reading(config, f"te_nvfp4_gemm {name}") as given:
        row = Binding(NVFP4TrainingAct).let(group_size=_tile(given.take("tile")))
        rotates = given.choose("rht_columnwise", FLAGS)
    return row, row.let(pre_transform=rotation) if rotates else row


def rotation_of(config: Mapping[str, Any]) -> Drive:
    """The random Hadamard transform alone."""
    with reading(config, "te_jax rht") as given:
        size, mask = given.take("block"), given.take("sign_mask")
    signs = tuple(-1 if mask >> place & 1 else 1 for place in range(size))
    rotation = Hadamard(size, signs)

    def drive(inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        x = jnp.asarray(inputs["x"])
        turned = rotation(x)
        return {
            "matrix": np.asarray(rotation(jnp.eye(size))),
            "sign": np.asarray(signs, np.int32),
            "y_f32": np.asarray(turned),
            "y_bf16": np.asarray(rotation(x.astype(jnp.bfloat16)).astype(jnp.float32)),
            "back": np.asarray(rotation.inverse(turned)),
        }

    return drive


class ByMatrix(Transform):
    """A Hadamard transform as a product with its matrix, added in the order of XLA: four lanes, then pairs of them.

    Undone, small numbers are what rounding left over, so that any other order has others.
    """

    def __init__(self, signs: tuple[int, ...]) -> None:
        self.signs = signs

    def __call__(self, x: jax.Array) -> jax.Array:
        return self._product(x, Hadamard(BLOCK, self.signs)(jnp.eye(BLOCK)))

    def inverse(self, x: jax.Array) -> jax.Array:
        return self._product(x, Hadamard(BLOCK, self.signs)(jnp.eye(BLOCK)).T)

    def _product(self, x: jax.Array, matrix: jax.Array) -> jax.Array:
        parts = x.astype(jnp.float32).reshape(-1, 4, 4, 1) * matrix.reshape(4, 4, BLOCK)
        lanes = functools.reduce(jnp.add, (parts[:, place] for place in range(4)))
        product = (lanes[:, 0] + lanes[:, 1]) + (lanes[:, 2] + lanes[:, 3])
        return product.reshape(x.shape).astype(x.dtype)


def stochastic_of(config: Mapping[str, Any]) -> Drive:
    """A case of stochastic rounding: the neighbours of each number, and moments over keys."""
    with reading(config, "te_jax nvfp4_sr") as given:
        keys = given.take("keys")
        given.take("max_abs_bias_of_mean")
        given.take("seed"), given.take("shape")
        given.choose("mode", {"NVFP4_1D_SCALING": None})

    def drive(inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        x = jnp.asarray(inputs["x"])
        scales = NVFP4Scales(folded=False)

        @jax.jit
        def drawn(key: jax.Array) -> jax.Array:
            act = NVFP4TrainingAct.let(float_to_int_impl_type="stochastic_round", block_scale_impl=scales)
            return QuantIdentity(act_quant=act, rngs=nnx.Rngs(key))(x)

        values = jnp.stack([drawn(key) for key in jax.random.split(jax.random.key(0), keys)])
        ends = {
            name: quantized(x, NVFP4TrainingAct.let(float_to_int_impl=rounding(), block_scale_impl=scales))
            for name, rounding in (("low", FloorSte), ("high", CeilSte))
        }
        found = {name: np.asarray(end.value) for name, end in ends.items()}
        moments = {"mean": values.mean(0), "variance": values.var(0)}
        return {**found, **moments, "unit": np.asarray(ends["low"].scale)}

    return drive


def torchao_of(config: Mapping[str, Any]) -> Drive:
    """A case of `torchao_nvfp4`."""
    with reading(config, "torchao_nvfp4") as given:
        dtype = given.choose("input_dtype", DTYPES)
        two = given.choose("two_level", FLAGS)
    injector = NVFP4TrainingAct.let(block_scale_impl=LeastNormalScales(two_levels=two))

    def drive(inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        made = quantized(jnp.asarray(inputs["x"], dtype), injector)
        return {**numbers(made), "per_tensor_scale": np.asarray(made.grouped.levels.shared)}

    return drive
