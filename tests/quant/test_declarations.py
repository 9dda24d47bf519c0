"""How quantizers are declared: few ancestors, a solver at any place, fragments and enums where users look for them."""

import importlib

import jax
import numpy as np
import pytest
from flax import nnx

import jqinject.quant
from jqinject.catalogue.entries import ready_made
from jqinject.inject import ExtendedInjector
from jqinject.nn import QuantLinear
from jqinject.quant import enums, solver

SOLVERS = {name: found for name, found in vars(solver).items() if name.endswith("QuantSolver")}
MOST_ANCESTORS = 12  # itself, `ExtendedInjector`, its base and `object` included


def test_no_ready_made_quantizer_is_a_tower():
    counted = {name: len(quantizer.__mro__) for name, quantizer in ready_made().items()}
    assert {name: count for name, count in counted.items() if count > MOST_ANCESTORS} == {}


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_a_solver_is_one_table(name):
    """A row for each name; the solver of gradients changes two rows of the other for activations."""
    above = [base for base in SOLVERS[name].__mro__[1:-3] if base is not solver.ActQuantSolver]
    assert above == []
    assert name == "GradQuantSolver" or len(SOLVERS[name].__declared__) > 25


def test_a_solver_may_stand_anywhere_among_the_bases():
    tried = 0
    for name, quantizer in ready_made().items():
        role = [base for base in quantizer.__bases__ if base in SOLVERS.values()]
        if role:
            others = [base for base in quantizer.__bases__ if base not in role]
            own = {key: spec.declared for key, spec in quantizer.__declared__.items()}
            turned = type(quantizer)(name, (*role, *others), own)
            assert turned.__dependencies__.keys() == quantizer.__dependencies__.keys()
            changed = [
                key
                for key, spec in quantizer.__dependencies__.items()
                if turned.__dependencies__[key].declared is not spec.declared
            ]
            assert changed == [], name
            tried += 1
    assert tried > 40


def test_enums_can_be_imported_from_quant():
    for name, found in vars(enums).items():
        if isinstance(found, type) and issubclass(found, enums.ImplEnum) and found is not enums.ImplEnum:
            assert getattr(jqinject.quant, name) is found


@pytest.mark.heavy
def test_names_in_upper_case_choose_what_members_choose():
    lower = {
        "quant_type": "int",
        "bit_width_impl_type": "parameter",
        "scaling_impl_type": "parameter_from_stats",
        "scaling_per_output_type": "channel",
        "scaling_stats_op": "max",
        "restrict_scaling_type": "log_fp",
        "float_to_int_impl_type": "round",
    }
    binding, upper = (
        jqinject.quant.Int8WeightPerTensorFloat.let(**names)
        for names in (lower, {key: text.upper() for key, text in lower.items()})
    )
    layers = [QuantLinear(4, 2, weight_quant=quant, rngs=nnx.Rngs(0)) for quant in (binding, upper)]
    states = [nnx.state(layer) for layer in layers]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert layers[0].weight_quant.scale().shape == layers[1].weight_quant.scale().shape == (1, 2)


def test_fragments_of_minifloats_are_found_by_brevitas_path():
    by_path = importlib.import_module("jqinject.quant.float_base")
    for name in ("FloatWeightBase", "ScaledFloatActBase", "Fp6e3m2Mixin"):
        assert issubclass(getattr(by_path, name), ExtendedInjector)
