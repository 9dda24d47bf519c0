"""`refresh`: what a rollout server serves after a sync is what the trainer quantizes, in the server's own arrays."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqinject
import jqinject.quant as q
from jqinject import Rule, compiled, freeze, load_state, quantize, refresh, unfreeze
from jqinject.core.transforms import Hadamard
from jqinject.dot import FrozenParam, QDotGeneral, Scheme
from jqinject.model.state.weight_sync import FloatIndex, How, WeightSync, sync_program
from jqinject.nn import QuantLinear
from jqinject.program import OpQuantizers
from jqinject.quant_tensor import IntQuantTensor

IDS, X = jnp.arange(6), jax.random.normal(jax.random.key(5), (3, 16))
BF16 = jnp.bfloat16


class Block(nnx.Module):
    def __init__(self, key: jax.Array) -> None:
        self.w = nnx.Param(jax.random.normal(key, (16, 16)) * 0.1)

    def __call__(self, h: jax.Array) -> jax.Array:
        return jnp.tanh(h @ self.w)


class Mixed(nnx.Module):
    """A tied table, two parameters of one shape, a scanned stack, a layer of Flax, and a gain that stays float."""

    def __init__(self, seed: int = 0, sharded: bool = False) -> None:
        rngs = nnx.Rngs(seed)
        names: dict[str, Any] = {"out_sharding": (None, "model")} if sharded else {}
        self.table = nnx.Param(rngs.params.normal((32, 16)))
        self.up = nnx.Param(rngs.params.normal((16, 64)), **names)
        self.gate = nnx.Param(rngs.params.normal((16, 64)), **names)
        self.layer = nnx.Linear(64, 16, rngs=rngs)
        self.blocks = nnx.vmap(Block)(jax.random.split(rngs.params(), 3))
        self.gain = nnx.Param(rngs.params.normal((16,)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block: Block, h: jax.Array) -> jax.Array:
            return block(h)

        x = run(self.blocks, self.table[ids] * self.gain)
        up, gate = (jnp.einsum("nd,df->nf", x, w[...]) for w in (self.up, self.gate))
        return self.layer(up * nnx.silu(gate)) @ self.table.T


def rounded(model: Any) -> Any:
    """A model whose matrices are bfloat16 numbers."""
    for _, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        leaf.set_value(
            leaf.get_value().astype(BF16).astype(jnp.float32) if leaf.ndim > 1 else leaf.get_value()
        )
    return model


def served_of(rule: Rule, seed: int = 0, **how: Any) -> Any:
    return freeze(quantize(Mixed(seed, **how), rule, inputs=IDS), allow_uncalibrated=True)


def numbers_of(model: Any) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(model)))
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


def same(one: Any, other: Any) -> None:
    mine, wanted = numbers_of(one), numbers_of(other)
    assert mine.keys() == wanted.keys()
    for name, number in wanted.items():
        assert (mine[name].dtype, mine[name].tobytes()) == (number.dtype, number.tobytes()), name


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The programs that are traced and compiled meanwhile, as JAX reports them."""
    events: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


FORMATS = {
    "int8": q.Int8WeightPerChannelFloat,
    "int4 groups": q.Int4WeightPerGroupAbsMax.let(group_size=8),
    "zero points": q.ShiftedUint8WeightPerChannelFloat.let(bit_width=4),
    "mxfp8": q.MXFloat8e4m3Weight,
    "nvfp4": q.NVFP4Weight,
    "fp8": q.Fp8e4m3OCPWeightPerChannelFloat,
    "nf4": q.NF4WeightPerChannelFloat,
}


@pytest.mark.heavy
@pytest.mark.parametrize("weight_quant", FORMATS.values(), ids=FORMATS)
def test_codes_are_those_of_the_trainer(weight_quant: Any) -> None:
    """100 % of the codes, for layers, own parameters, stacks and tied tables; scales and zero points too."""
    rule = Rule(weight_quant=weight_quant)
    floats, served = Mixed(1), served_of(rule)
    report = refresh(served, nnx.state(floats), source_dtype=BF16)
    assert set(report.quantized) == {"table", "up", "gate", "layer.kernel", "blocks.w"}
    assert set(report.loaded) == {"layer.bias", "gain"} and not report.missing
    trainer = quantize(rounded(Mixed(1)), rule, inputs=IDS)
    trainer.eval()
    for path, param in (("up", served.up), ("table", served.table), ("layer.kernel", served.layer.kernel)):
        holder = trainer.layer if path == "layer.kernel" else site(trainer, path)
        codes = holder.weight_quant(holder.weight[...]).narrow_numbers()
        np.testing.assert_array_equal(
            np.asarray(param.quant_tensor().narrow_numbers()), np.asarray(codes), err_msg=path
        )
    same(served, freeze(trainer, allow_uncalibrated=True))
    np.testing.assert_array_equal(served.gain[...], floats.gain[...])


def site(trainer: Any, name: str) -> Any:
    (sites,) = [
        node.weight_sites() for _, node in nnx.iter_modules(trainer) if isinstance(node, OpQuantizers)
    ]
    jqinject.reassemble(trainer)  # binds the sites
    return sites[name]


INT8 = Rule(weight_quant=q.Int8WeightPerChannelFloat)


@pytest.fixture(scope="module")
def int8() -> Any:
    """A served model that tests may refresh."""
    return served_of(INT8)


def test_a_second_sync_compiles_nothing_and_calls_are_not_traced_again(int8: Any) -> None:
    call = nnx.jit(lambda model, ids: model(ids))
    states = [nnx.state(Mixed(seed)) for seed in (2, 3)]
    refresh(int8, states[0], source_dtype=BF16)
    call(int8, IDS)
    with compilations() as events:
        refresh(int8, states[1], source_dtype=BF16)
        call(int8, IDS)
    assert events == []
    same(int8, freeze(quantize(rounded(Mixed(3)), INT8, inputs=IDS)))


def test_payloads_are_overwritten_and_equal_weights_share_a_program(int8: Any) -> None:
    old = {name: getattr(int8, name).numbers["value"] for name in ("up", "gate", "table")}
    state = nnx.state(Mixed(4))
    sync_program.cache_clear()
    refresh(int8, state)
    assert all(payload.is_deleted() for payload in old.values()), "their memory was taken over"
    # table; up and gate; layer.kernel; blocks.w
    assert sync_program.cache_info().currsize == 4
    assert not any(x.is_deleted() for x in jax.tree.leaves(state)), "the trainer keeps its arrays"
    assert int8.gain.get_raw_value() is not state["gain"].get_raw_value(), (
        "a copy, which the trainer may donate"
    )
    entry, param = next((entry, param) for entry, param in FloatIndex(int8).frozen if param is int8.up)
    weight = WeightSync(FloatIndex(int8), entry, param, {("up",): state["up"][...]}, How(None, False))
    program = weight.program
    payload = param.numbers["value"]
    memory = program.lower(*weight.arguments(payload, state["up"][...])).compile().memory_analysis()
    assert memory.alias_size_in_bytes == payload.nbytes
    # The weight, its old payload, and what is new beside it: scales, sums, a flag.
    small = sum(x.nbytes for name, x in param.numbers.items() if name != "value") + 64
    assert memory.argument_size_in_bytes <= state["up"][...].nbytes + payload.nbytes
    assert memory.output_size_in_bytes <= payload.nbytes + small


def test_one_float_weight_at_a_time() -> None:
    class Deep(nnx.Module):
        def __init__(self, seed: int = 0) -> None:
            rngs = nnx.Rngs(seed)
            self.layers = nnx.List([QuantLinear(48, 48, use_bias=False, rngs=rngs) for _ in range(5)])

    served = freeze(Deep())
    state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(Deep(1), nnx.Param)))
    alive: list[int] = []
    quantize_one = WeightSync.quantize

    def watched(self: Any, *args: Any) -> None:
        quantize_one(self, *args)
        alive.append(sum(x.shape == (48, 48) and x.dtype == jnp.float32 for x in jax.live_arrays()))

    before = sum(x.shape == (48, 48) and x.dtype == jnp.float32 for x in jax.live_arrays())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightSync, "quantize", watched)
        refresh(served, state)
    assert len(alive) == 5 and max(alive) <= before


def test_a_compiled_model_answers_with_the_new_weights_and_is_not_traced_again() -> None:
    rule = Rule(weight_quant=q.Int8WeightPerChannelFloat, input_quant=q.Int8DynamicActPerRowAbsMax)
    model = served_of(rule)
    answer = compiled(model, IDS)
    refresh(answer, nnx.state(Mixed(2)))
    with compilations() as events:
        refresh(answer, nnx.state(Mixed(6)))
        out = answer(IDS)
    assert events == []
    assert len(answer.programs) == 1
    wanted = served_of(rule, 6)
    np.testing.assert_array_equal(out, compiled(wanted, IDS)(IDS))
    same(answer.model(), wanted)
    with pytest.raises(ValueError) as error:
        refresh(model, nnx.state(Mixed(6)))
    assert str(error.value) == (
        "refresh: the numbers of blocks.w are gone: a model that shared them was refreshed.\n"
        "  cure: refresh one of the models that share arrays; of a compiled one take answer.model()"
    )
    refresh(wanted, nnx.state(Mixed(7)))
    answer.update(wanted)
    same(answer.model(), served_of(rule, 7))


@pytest.mark.heavy
@pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")
@pytest.mark.parametrize("weight_quant", [q.Int8WeightPerChannelFloat, q.MXFloat8e4m3Weight], ids=repr)
def test_arrays_stay_sharded(weight_quant: Any) -> None:
    rule, mesh = Rule(weight_quant=weight_quant), jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        served = served_of(rule, sharded=True)
        before = {name: x.sharding for name, x in served.up.numbers.items()}
        assert before["value"].spec == P("model", None) or not before["value"].is_fully_replicated
        state = nnx.to_pure_dict(nnx.state(Mixed(2)))
        for form in (state, jax.tree.map(np.asarray, state)):
            refresh(served, form)
            assert {name: x.sharding for name, x in served.up.numbers.items()} == before
        with compilations() as events:
            refresh(served, nnx.state(Mixed(3)))
        assert events == []
    assert isinstance(served.up.sharding, NamedSharding)
    same(served, served_of(rule, 3))


class Learned(q.Int8WeightPerChannelFloat):
    scaling_impl_type = "parameter_from_stats"


def test_learned_scales_come_from_the_trainer_or_are_refused() -> None:
    trainer = QuantLinear(16, 8, weight_quant=Learned, rngs=nnx.Rngs(1))
    trainer(X)  # fills the parameter
    scaling = trainer.weight_quant.tensor_quant.scaling_impl
    scaling.value[...] = scaling.value[...] * 1.5
    served = freeze(QuantLinear(16, 8, weight_quant=Learned, rngs=nnx.Rngs(0)))
    before = numbers_of(served)
    with pytest.raises(ValueError) as error:
        refresh(served, nnx.state(nnx.Linear(16, 8, rngs=nnx.Rngs(1))))
    assert str(error.value) == (
        "refresh: the state does not fit the model, nothing was changed (1 problem):\n"
        "  kernel: has scales that Learned learned or collected, and the state does not hold "
        "weight_quant.tensor_quant.scaling_impl.record.counter, weight_quant.tensor_quant.scaling_impl.value.\n"
        "    cure: the trainer's model or its whole state (nnx.state(trainer)), not weights alone; or scales='kept'"
    )
    assert all((numbers_of(served)[name] == x).all() for name, x in before.items())
    for state in (trainer, nnx.state(trainer), nnx.state(trainer, nnx.Param)):
        fresh = freeze(QuantLinear(16, 8, weight_quant=Learned, rngs=nnx.Rngs(0)))
        refresh(fresh, state)
        same(fresh, freeze(nnx.clone(trainer)))


@pytest.mark.parametrize(
    "weight_quant",
    [
        q.Int8WeightPerChannelFloat,
        q.ShiftedUint8WeightPerChannelFloat,
        q.Int4WeightPerGroupAbsMax.let(group_size=8),
        Learned,
    ],
    ids=["int8", "zero points", "groups", "learned"],
)
def test_scales_that_are_kept(weight_quant: Any) -> None:
    served = freeze(QuantLinear(16, 8, weight_quant=weight_quant, rngs=nnx.Rngs(0)))
    weight = jax.random.normal(jax.random.key(2), (16, 8)) * 0.3
    scale = {name: np.array(x) for name, x in served.kernel.numbers.items() if name not in ("value", "sums")}
    form, tensor = served.kernel.form, served.kernel.quant_tensor()
    steps, zero = np.asarray(tensor.scale), np.asarray(tensor.zero_point)
    refresh(served, {"kernel": weight, "bias": jnp.zeros(8)}, scales="kept")
    for name, x in scale.items():
        np.testing.assert_array_equal(served.kernel.numbers[name], x)
    low = -(2 ** (form.grid.bit_width - 1)) if form.grid.signed else 0
    narrow = weight_quant is not q.ShiftedUint8WeightPerChannelFloat and form.groups is None
    codes = np.round(np.asarray(weight) / steps + zero)
    codes = np.clip(codes, low + narrow, low + 2**form.grid.bit_width - 1)
    np.testing.assert_array_equal(np.asarray(served.kernel.quant_tensor().int()), codes)


def test_a_layer_whose_op_quantizes_its_kernel() -> None:
    def make(seed: int) -> nnx.Linear:
        op = QDotGeneral(
            Scheme.let(fprop_lhs=q.Int8DynamicActPerRowAbsMax, fprop_rhs=q.Int8WeightPerChannelAbsMax)
        )
        return nnx.Linear(16, 8, dot_general=op, rngs=nnx.Rngs(seed))

    served, floats = freeze(make(0)), nnx.Linear(16, 8, rngs=nnx.Rngs(1))
    assert refresh(served, nnx.state(floats)).quantized == ("kernel",)
    same(served, freeze(make(1)))
    with pytest.raises(
        ValueError, match=r"kernel: has scales that its layer's op measures\.\n    cure: scales='measured'"
    ):
        refresh(served, nnx.state(floats), scales="kept")


def test_averaged_ranges_of_inputs_become_constants_again() -> None:
    def make(seed: int, scale: float) -> QuantLinear:
        layer = QuantLinear(16, 8, input_quant=q.Int8ActPerTensorMinMax, rngs=nnx.Rngs(seed))
        jqinject.calibrate(layer, [X * scale])
        return layer

    served, trainer = freeze(make(0, 1.0)), make(1, 3.0)
    refresh(served, trainer)
    trainer.eval()
    same(served, freeze(trainer))


def test_masters_follow_and_copies_can_be_refreshed() -> None:
    floats = nnx.Linear(16, 8, rngs=nnx.Rngs(1))
    served = freeze(QuantLinear(16, 8, rngs=nnx.Rngs(0)), keep_masters=True)
    refresh(served, floats)
    np.testing.assert_array_equal(unfreeze(served).kernel[...], floats.kernel[...])
    wanted = freeze(served)
    for copy in (pickle.loads(pickle.dumps(wanted)), nnx.clone(wanted)):
        refresh(copy, {"kernel": floats.kernel[...] * 2, "bias": floats.bias[...]})
        twice = QuantLinear(16, 8, rngs=nnx.Rngs(0))
        load_state(twice, {"kernel": floats.kernel[...] * 2, "bias": floats.bias[...]})
        same(copy, freeze(twice))


def test_part_of_a_state_is_as_for_load_state(int8: Any) -> None:
    state = nnx.to_pure_dict(nnx.state(Mixed(8)))
    table = int8.table.numbers["value"]
    report = refresh(int8, {"up": state["up"]}, missing=...)
    assert report.quantized == ("up",) and "table" in report.missing
    assert int8.table.numbers["value"] is table and not table.is_deleted()


def small(**how: Any) -> Any:
    return freeze(QuantLinear(16, 8, rngs=nnx.Rngs(0), **how))


FITS = {"kernel": np.ones((16, 8), np.float32), "bias": np.ones(8, np.float32)}
HEAD = "refresh: the state does not fit the model, nothing was changed (1 problem):\n  "


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kernal": FITS["bias"]}, "kernal: the model has no such variable; did you mean 'kernel'?"),
        ({"bias": None}, "bias: is missing from the state (missing=... names what may be)"),
        ({"kernel": FITS["kernel"].T}, "kernel: has shape (8, 16), the model needs (16, 8)"),
        ({"kernel": FITS["kernel"].astype(int)}, "kernel: has dtype int64, the model needs float32"),
        (
            {"kernel": FITS["kernel"] * np.nan},
            "kernel: has nan or inf as bfloat16.\n    cure: optax.apply_if_finite",
        ),
    ],
    ids=["unknown", "missing", "shape", "dtype", "nan"],
)
def test_states_that_do_not_fit(change: dict[str, Any], text: str) -> None:
    served = small()
    payload = served.kernel.numbers["value"]
    with pytest.raises(ValueError) as error:
        refresh(served, {**FITS, **change}, source_dtype=BF16)
    assert str(error.value) == HEAD + text
    assert (
        not payload.is_deleted()
        and served.kernel.numbers["value"] is payload
        and (served.bias[...] == 0).all()
    )


def committed() -> Any:
    layer = QuantLinear(16, 8, rngs=nnx.Rngs(0))
    layer.weight_quant.commit()
    return freeze(layer)


def shared() -> Any:
    first = QuantLinear(16, 8, rngs=nnx.Rngs(0))
    second = QuantLinear(16, 8, weight_quant=first.weight_quant, rngs=nnx.Rngs(1))
    return freeze(Pair(first, second))


class Pair(nnx.Module):
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


def stored() -> Any:
    layer = small()
    layer.kernel = FrozenParam.of(
        IntQuantTensor.from_int(jnp.ones((16, 8), jnp.int8), jnp.ones((1, 8))), (0,)
    )
    return layer


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            committed,
            "kernel: holds codes that a solver chose, which rounding to nearest would not choose.\n    cure: the "
            "recipe and freeze once more; or scales='kept', which rounds to nearest on the solver's scales",
        ),
        (
            stored,
            "kernel: came in low bits, without a quantizer.\n    cure: freeze(quantize(float_model, rules))",
        ),
    ],
    ids=["committed", "low bits"],
)
def test_weights_that_cannot_be_quantized_again(make: Any, text: str) -> None:
    with pytest.raises(ValueError) as error:
        refresh(make(), FITS)
    assert str(error.value) == HEAD + text


def test_committed_codes_follow_a_trainer_that_has_them() -> None:
    layer = QuantLinear(16, 8, rngs=nnx.Rngs(1))
    layer.weight_quant.commit()
    served = committed()
    refresh(served, layer)
    same(served, freeze(layer))


def test_a_shared_scale_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        refresh(shared(), {"first": FITS, "second": FITS})
    why = "shares its scales (Int8WeightPerTensorFloat).\n    cure: a quantizer for each layer; or scales='kept'"
    lines = f"  first.kernel: {why}\n  second.kernel: {why}"
    assert str(error.value) == HEAD.replace("1 problem", "2 problems").rstrip() + f"\n{lines}"


def test_weights_that_are_stored_for_transforms_are_refused() -> None:
    quant = q.Int8DynamicActPerRowAbsMax.let(pre_transform=Hadamard())
    served = small(input_quant=quant)
    with pytest.raises(ValueError) as error:
        refresh(served, FITS)
    assert str(error.value) == (
        "refresh: this model's weights are stored for transforms of their inputs, and the state's are not: "
        "input_quant.\n  cure: the recipe that made this model, on a float model with that state, and freeze; or the "
        "trainer's model itself, if its quantizers have these transforms"
    )
    trainer = QuantLinear(16, 8, input_quant=quant, rngs=nnx.Rngs(1))
    refresh(served, trainer)
    np.testing.assert_array_equal(served.quant_weight().int(), trainer.quant_weight().int())


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="refresh: scales is 'measured' or 'kept', got 'learned'"):
        refresh(small(), FITS, scales="learned")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="refresh: source_dtype is int8; expected a float dtype"):
        refresh(small(), FITS, source_dtype=jnp.int8)
    with pytest.raises(
        TypeError, match=r"refresh takes an nnx.State, a nested dict of arrays or a module, got str"
    ):
        refresh(small(), "weights.safetensors")
    with pytest.raises(TypeError, match="refresh takes an NNX module, got dict"):
        refresh({}, FITS)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="refresh writes arrays, and bias holds ShapeDtypeStruct"):
        refresh(nnx.eval_shape(small), FITS)


def test_a_compiled_model_takes_a_model_that_came_in_low_bits(tmp_path: Any) -> None:
    def layers(seed: int) -> Any:
        return nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(seed)), nnx.relu)

    rule = Rule(weight_quant=q.Int8WeightPerChannelFloat)
    answer, other = (compiled(freeze(quantize(layers(seed), rule)), X) for seed in (0, 1))
    jqinject.formats.save(freeze(quantize(layers(1), rule)), tmp_path / "model.safetensors")
    loaded = jqinject.formats.load(layers(0), tmp_path / "model.safetensors")
    answer.update(loaded)
    np.testing.assert_array_equal(answer(X), other(X))
    with pytest.raises(ValueError, match="came in low bits"):
        refresh(answer, nnx.state(layers(2)))
