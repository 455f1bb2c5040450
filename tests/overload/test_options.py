from __future__ import annotations

import math
from typing import Annotated

import pytest
from pydantic import BaseModel, BeforeValidator, ValidationError

from limitgate import ConfigError
from limitgate.overload.options import Adaptive, as_adaptive


def test_defaults() -> None:
    assert Adaptive() == Adaptive(min=4, max=200, tolerance=2.0, delay=0.02) == Adaptive(4, 200, 2.0, 0.02)


def test_a_delay_may_be_text() -> None:
    assert Adaptive(delay="30ms").delay == 0.03


def test_it_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Adaptive().min = 5


@pytest.mark.parametrize(
    ("given", "start"), [({}, 20), ({"max": 10}, 10), ({"min": 30}, 30), ({"min": 7, "max": 7}, 7), ({"min": 1}, 20)]
)
def test_start(given, start) -> None:
    assert Adaptive(**given).start == start


@pytest.mark.parametrize(("base_s", "allowed_s"), [(0.0, 0.02), (0.005, 0.02), (0.02, 0.02), (0.05, 0.05)])
def test_the_queue_that_is_allowed(base_s, allowed_s) -> None:
    assert Adaptive().allowed_queue_s(base_s) == allowed_s
    assert Adaptive(tolerance=3).allowed_queue_s(base_s) == max(0.02, 2 * base_s)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("min", 0, "adaptive: min: expected a whole number of requests from 1 to 100,000, not 0"),
        ("min", -3, "from 1 to 100,000, not -3"),
        ("min", True, "from 1 to 100,000, not True"),
        ("min", 4.0, "from 1 to 100,000, not 4.0"),
        ("min", "4", "from 1 to 100,000, not '4'"),
        ("max", 100_001, "adaptive: max: expected a whole number of requests from 1 to 100,000, not 100001"),
        ("max", None, "not None"),
        ("max", 3, "adaptive: max: expected at least 4, which is min, not 3"),
        ("tolerance", 1, "adaptive: tolerance: expected a number above 1 and up to 10, such as 2.0, not 1"),
        ("tolerance", 10.1, "not 10.1"),
        ("tolerance", math.nan, "not nan"),
        ("tolerance", math.inf, "not inf"),
        ("tolerance", "2", "not '2'"),
        ("tolerance", 10**400, f"not 1{'0' * 79}"),
        ("delay", 0, "adaptive: delay: expected a duration above 0 and up to 10 s, such as 20ms or 0.02, not 0"),
        ("delay", "11s", "not '11s'"),
        ("delay", "soon", "not 'soon'"),
        ("delay", None, "not None"),
        ("delay", True, "not True"),
    ],
)
def test_a_mistake_says_what_was_expected(field, value, expected) -> None:
    with pytest.raises(ConfigError) as caught:
        Adaptive(**{field: value})
    assert str(caught.value).endswith(expected)
    assert caught.value.field == (field,)
    assert not caught.value.others


def test_every_mistake_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        Adaptive(min=0, max=0, tolerance=0, delay=0)
    assert [each.field for each in caught.value.every] == [("min",), ("max",), ("tolerance",), ("delay",)]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (True, Adaptive()),
        (False, None),
        (None, None),
        ({}, Adaptive()),
        ({"min": 2, "max": 50, "tolerance": 3, "delay": "50ms"}, Adaptive(min=2, max=50, tolerance=3.0, delay=0.05)),
        (Adaptive(min=2), Adaptive(min=2)),
    ],
)
def test_how_it_may_be_given(given, options) -> None:
    assert as_adaptive(given) == options


@pytest.mark.parametrize("given", [1, "true", "yes", [4, 200], 0.5, 0])
def test_what_it_is_not(given) -> None:
    with pytest.raises(ConfigError, match=r"is not an adaptive limit, expected true or a mapping such as \{min: 4, max: 200\}"):
        as_adaptive(given)


def test_unknown_fields_and_mistakes_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        as_adaptive({"maxi": 5, "min": 0, 3: 4})
    assert [each.field for each in caught.value.every] == [("maxi",), ("3",), ("min",)]
    assert "did you mean 'max'? expected one of min, max, tolerance, delay" in str(caught.value)


def test_a_model_that_has_it_as_a_field_tells_where_the_mistake_is() -> None:
    """As a rule does: its own error names the field and the field within."""

    class Model(BaseModel):
        adaptive: Annotated[Adaptive | None, BeforeValidator(as_adaptive)] = None

    assert Model(adaptive=True).adaptive == Adaptive()
    assert Model(adaptive={"max": 9}).adaptive == Adaptive(max=9)
    with pytest.raises(ValidationError) as caught:
        Model(adaptive={"min": 0})
    mistake = ConfigError.explaining(caught.value, "rule 'all'", Model.model_fields)
    assert str(mistake) == "rule 'all': adaptive.min: expected a whole number of requests from 1 to 100,000, not 0"
