"""Bags of rows: compared with a trial of every pairing, and at the largest size of SQL results and output files."""

from __future__ import annotations

import math
import time
from itertools import permutations
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards import bags
from rewards.outputs import Outputs
from rewards.outputs import _finite as number_of_text
from rewards.sql import MAX_ROWS
from tests.judging import episode, judged, task

CELLS = bags.Cells(
    near=lambda a, b: a == b or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=0.1)),
    number=lambda cell: cell if isinstance(cell, float) else None,
    relative=0.1,
)
NARROW = CELLS._replace(
    near=lambda a, b: a == b or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-9)),
    relative=1e-9,
)
cell = st.sampled_from(["a", None, 0.0, 1.0, 1.04, 1.09, 1.14, 1.2, -1.0, -1.05, 5.0])
rows = st.integers(1, 5).flatmap(
    lambda size: st.lists(st.lists(st.tuples(cell, cell), min_size=size, max_size=size), min_size=2, max_size=2)
)


@given(rows)
def test_bags_are_equal_if_some_pairing_is_near(sides: list[list[tuple[Any, ...]]]) -> None:
    answer, truth = sides
    equal = any(all(bags.near_rows(a, b, CELLS) for a, b in zip(answer, order, strict=True)) for order in permutations(truth))
    assert bags.same_bag(answer, truth, CELLS) == equal
    assert bags.same_bag(truth, truth[::-1], CELLS)


def noisy(random: Random, value: float) -> float:
    return value * (1 + random.uniform(-1e-15, 1e-15))


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["float", "float float", "text float", "few few", "few id", "few id float", "float text few"])
def test_the_largest_bag_is_compared_within_seconds(kinds: str) -> None:
    """`few`: floats of which many are equal up to rounding; `id`: large integers that are equal within the tolerance."""
    random = Random(kinds)
    draw = {
        "float": lambda index: random.uniform(-1e9, 1e9),
        "few": lambda index: random.choice([1 / 3, 2 / 3, 0.1 + 0.2, 0.3]),
        "id": lambda index: float(10**13 + index),
        "text": lambda index: random.choice("abc"),
    }
    truth = [tuple(draw[kind](index) for kind in kinds.split()) for index in range(MAX_ROWS)]
    # ids are exact; other numbers are rounded as after additions in another order
    answer = [tuple(noisy(random, c) if isinstance(c, float) and c < 1e13 else c for c in row) for row in truth]
    random.shuffle(answer)
    started = time.monotonic()
    assert not bags.crowded(truth, NARROW)
    assert bags.same_bag(answer, truth, NARROW)
    first = next(index for index, kind in enumerate(kinds.split()) if kind != "text")
    changed_row = list(answer[7])
    changed_row[first] *= 1 + 1e-7
    assert not bags.same_bag([*answer[:7], tuple(changed_row), *answer[8:]], truth, NARROW)
    assert time.monotonic() - started < 60, "a bound for a busy machine; two seconds on an idle one"


def test_truth_with_indistinguishable_rows_is_detected() -> None:
    random = Random(0)
    chain = [(random.uniform(1, 2), random.uniform(1, 2)) for _ in range(bags.MAX_CROWD + 1)]
    assert bags.crowded(chain, CELLS) and not bags.crowded(chain[:-1], CELLS) and not bags.crowded(chain, NARROW)
    assert not bags.crowded([(1.5, 2.5)] * 1000, CELLS), "equal rows are indistinguishable in every pairing"


@pytest.mark.parametrize(("size", "expected"), [(299, 1.0), (301, 1.0), pytest.param(20_000, 1.0, marks=pytest.mark.slow)])
async def test_a_table_is_compared_within_its_tolerance_at_any_size(size: int, expected: float) -> None:
    """An earlier version compared at most 300 rows."""
    random = Random(size)
    values = [(random.choice("abc"), random.uniform(0, 1)) for _ in range(size)]
    truth = "k,v\n" + "".join(f"{key},{value!r}\n" for key, value in values)
    random.shuffle(values)
    right = "\ufeffk,v\n" + "".join(f"{key},{value * (1 + 1e-13)!r}\n" for key, value in values)
    wrong = "k,v\n" + "".join(f"{key},{value * (1 + 1e-13)!r}\n" for key, value in [*values[:-1], ("a", 2.0)])
    data = {"answer": {"t.csv": {"table": truth}}, "outputs": ("t.csv",)}
    assert (await judged(Outputs(), task(**data), episode(**{"t.csv": right.encode()}))).value == expected
    assert (await judged(Outputs(), task(**data), episode(**{"t.csv": wrong.encode()}))).value == 0.0


async def test_truth_that_no_output_can_equal_is_a_task_fault() -> None:
    random = Random(1)
    chain = "k,v\n" + "".join(f"{random.uniform(1, 2)},{random.uniform(1, 2)}\n" for _ in range(200))
    for truth, reason in (
        ({"text": "x" * 101}, "101 bytes"),
        ({"json": ["x" * 200]}, "204 bytes"),
        ({"table": chain}, "close to each other"),
    ):
        verifier = Outputs(longest=100 if reason != "close to each other" else 100_000, relative=0.1)
        score = await judged(verifier, task(answer={"a": truth}, outputs=("a",)), episode(a=chain.encode()))
        assert score.value is None and score.blame is not None and reason in score.reason, score


def test_only_finite_numbers_are_numbers() -> None:
    assert [number_of_text(text) for text in ("1.5", "nan", "inf", "x", "1_0")] == [1.5, None, None, None, None]
