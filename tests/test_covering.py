"""Covering arrays have every pair that is possible, and few cases."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from covering import covering

AXES = {"a": [0, 1, 2, 3, 4], "b": ["x", "y", "z", "u"], "c": [None, {}], "d": [16, 32, 64], "e": ["8 bit", "16 bit"]}


def is_possible(case):
    return not (case.get("d") == 16 and case.get("e") == "8 bit")


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_possible_combination_is_in_some_case_and_no_impossible_one(strength):
    cases = covering(AXES, strength, is_possible)
    for chosen in itertools.combinations(AXES, strength):
        for values in itertools.product(*(AXES[name] for name in chosen)):
            combination = dict(zip(chosen, values, strict=True))
            found = any(all(case[name] == value for name, value in combination.items()) for case in cases)
            assert found == is_possible(combination)
    assert all(list(case) == list(AXES) and is_possible(case) for case in cases)


def test_cases_are_few_and_the_same_each_time():
    """At least the product of the longest axes, and no more than half of it beyond."""
    assert len(covering(AXES, 1)) == 5
    assert 20 <= len(covering(AXES, 2)) <= 30
    assert covering(AXES, 2) == covering(AXES, 2)


def test_values_that_leave_none_for_an_axis_are_refused():
    with pytest.raises(ValueError, match=r"no value of b is possible beside \{'a': 0\}"):
        covering({"a": [0, 1], "b": [0, 1]}, 1, lambda case: case.get("a") != 0 or "b" not in case)
