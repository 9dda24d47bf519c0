"""Enums and strings."""

import copy
import pickle

import pytest

from jqinject.quant import enums
from jqinject.quant.enums import QuantType, RestrictValueType, ScalingImplType, StatsOp, as_enum

MEMBERS = {
    "BitWidthImplType": "CONST PARAMETER STATEFUL_CONST",
    "QuantType": "BINARY TERNARY INT FP",
    "RestrictValueType": "FP SIGNED_FP LOG_FP INT POWER_OF_TWO",
    "FloatToIntImplType": "ROUND CEIL FLOOR ROUND_TO_ZERO DPU LEARNED_ROUND STOCHASTIC_ROUND",
    "LearnedRoundImplType": "HARD_SIGMOID SIGMOID IDENTITY",
    "ScalingImplType": "HE CONST STATS AFFINE_STATS PARAMETER PARAMETER_FROM_STATS",
    "ScalingPerOutputType": "TENSOR CHANNEL GROUP",
    "StatsOp": (
        "MAX AVE MAX_AVE MEAN_SIGMA_STD MEAN_LEARN_SIGMA_STD PERCENTILE MIN_MAX PERCENTILE_INTERVAL "
        "SIGNED_MAX SIGMA_STD"
    ),
    "TruncScalingImplType": "MSB WRAPPER",
}


@pytest.mark.parametrize("name", MEMBERS)
def test_members_equal_what_they_hash_like_and_are_chosen_in_any_case(name):
    enum_class = getattr(enums, name)
    assert list(enum_class.__members__) == MEMBERS[name].split()
    for member in enum_class:
        for text in (member.name, member.name.lower(), member.name.title()):
            assert (member == text) == (text == member) == (hash(member) == hash(text)) == (text in {member})
            assert (member != text) is not (member == text)
            assert enum_class(text) is member
            assert as_enum(enum_class, text) is member
            assert enums.chooses(text, member)
        assert member == member.name.lower() != member.name
        assert hash(member) == hash(member.name.lower())
        assert as_enum(enum_class, member) is member
        assert pickle.loads(pickle.dumps(member)) is member
        assert copy.deepcopy(member) is member
        assert f"{member}" == member.name.lower()


def test_tables_by_member_or_by_string():
    assert {QuantType.INT: 1}["int"] == 1
    assert {"int": 1}[QuantType.INT] == 1


def test_members_of_different_enums_differ():
    assert QuantType.FP != RestrictValueType.FP and not enums.chooses(QuantType.FP, RestrictValueType.FP)
    assert QuantType.FP != QuantType.INT
    assert QuantType.FP != "float"
    assert QuantType.FP != 3


def test_as_enum_names_the_members_and_the_nearest():
    with pytest.raises(ValueError) as error:
        as_enum(ScalingImplType, "parametr", name="scaling_impl_type")
    assert str(error.value).splitlines() == [
        "scaling_impl_type = 'parametr' is not a ScalingImplType: give one of HE, CONST, STATS, AFFINE_STATS, "
        "PARAMETER, PARAMETER_FROM_STATS",
        "  did you mean 'PARAMETER'?",
    ]


@pytest.mark.parametrize("bad", [3, None, RestrictValueType.FP, ["max"]])
def test_as_enum_takes_members_and_strings_only(bad):
    with pytest.raises(TypeError, match="is not a StatsOp: give one of MAX, AVE"):
        as_enum(StatsOp, bad)
