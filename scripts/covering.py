"""Covering arrays: few cases that have each combination of the values of any two axes (or one, or three) among them.

Most faults come from one value or from two together (Kuhn, Wallace, Gallo: Software fault interactions, 2004).
"""

import itertools
from collections.abc import Callable
from typing import Any

Case = dict[str, Any]


def covering(axes: dict[str, list], strength: int, is_possible: Callable[[Case], bool] = lambda case: True) -> list:
    """Few cases, each a value for every axis, in which each possible combination of the values of any `strength` axes
    is there at least once. Greedy, and the same each time.

    `is_possible` says of some of a case's values whether they can be together. ValueError where values of some axes
    leave no possible one for another.
    """
    names = list(axes)
    left = [
        combination
        for chosen in itertools.combinations(names, strength)
        for values in itertools.product(*(range(len(axes[name])) for name in chosen))
        if is_possible(_named(axes, combination := dict(zip(chosen, values, strict=True))))
    ]
    cases = []
    while left:
        case = dict(left[0])
        for name in names:  # the value that takes most of what is left along
            if name not in case:
                candidates = [{**case, name: value} for value in range(len(axes[name]))]
                candidates = [candidate for candidate in candidates if is_possible(_named(axes, candidate))]
                if not candidates:
                    raise ValueError(f"no value of {name} is possible beside {_named(axes, case)}")
                case = max(candidates, key=lambda candidate: sum(c.items() <= candidate.items() for c in left))
        left = [combination for combination in left if not combination.items() <= case.items()]
        cases.append(_named(axes, {name: case[name] for name in names}))
    return cases


def _named(axes: dict[str, list], case: dict[str, int]) -> Case:
    return {name: axes[name][value] for name, value in case.items()}
