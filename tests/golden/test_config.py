"""The reader of configs: it must not let a key or a value pass that nobody understands."""

import pytest

from tests.golden._config import CannotDrive, reading, settings_of


def test_every_key_has_to_be_read() -> None:
    config = {"bits": 8, "mode": "A", "rule": {"qtype": "int8"}}
    with reading(config, "a case") as given:
        assert (given.take("bits"), given.take("other", 3)) == (8, 3)
        assert given.choose("mode", {"A": 1}) == 1
        assert given.choose("missing", {"A": 1}, None) is None
        assert given.nested("rule") == {"qtype": "int8"}
    with (
        pytest.raises(CannotDrive, match=r"a case: no adapter reads 'mod' = 'A'; did .* by 'mode'\?"),
        reading({"mod": "A"}, "a case") as given,
    ):
        given.take("mode", "B")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda given: given.take("bitz"), r"the config has no 'bitz', but \['bits'\]"),
        (lambda given: given.choose("bits", {4: "int4"}), r"bits: 8 has no meaning; known are \['4'\]"),
        (lambda given: given.nested("bits"), "bits must be a dict, got 8"),
    ],
)
def test_what_has_no_meaning_is_refused(read, message) -> None:
    with pytest.raises(CannotDrive, match=message), reading({"bits": 8}, "a case") as given:
        read(given)


def test_settings_are_named_as_in_the_vocabulary() -> None:
    config = {"rule": {"axes": [0, 1], "whole": True}, "tiled_axes": {"1": 0.5}, "act": "relu", "none": None}
    assert dict(settings_of(config)) == {
        "rule.axes": "[0, 1]",
        "rule.whole": "true",
        "tiled_axes.1": "0.5",
        "act": "relu",
        "none": "null",
    }
