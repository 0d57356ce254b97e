from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.evaluation.sequential import e_value


@given(st.lists(st.sampled_from([-1.0, -0.5, -0.125, 0.0, 0.25, 0.75, 1.0]), max_size=12))
def test_the_wealth_is_the_mean_over_the_stakes_of_the_product_over_the_cases(differences: list[float]) -> None:
    """In fractions, with the stakes that are stated: 0.05, 0.15, ..., 0.95."""
    stakes = [Fraction(odd, 20) for odd in range(1, 20, 2)]
    known = sum(math.prod(1 - stake * Fraction(one) for one in differences) for stake in stakes) / len(stakes)
    assert e_value(differences) == pytest.approx(float(known), rel=1e-9)


def test_differences_are_within_minus_1_and_1() -> None:
    assert e_value([-1.0]) == pytest.approx(1.5) and e_value([1.0]) == pytest.approx(0.5)
    for beyond in (math.nextafter(1, 2), math.nextafter(-1, -2), 1.05, -2.0, math.nan):
        for differences in ([beyond], [0.5, beyond, -0.5]):
            with pytest.raises(ValueError, match=r"within \[-1, 1\]"):
                e_value(differences)
