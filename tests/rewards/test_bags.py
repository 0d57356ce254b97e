"""Bags of rows: compared with trying every pairing, and at the largest size of SQL results and output files."""

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
    near=lambda one, other: one == other or (isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=0.1)),
    number=lambda cell: cell if isinstance(cell, float) else None,
    relative=0.1,
)
NARROW = CELLS._replace(
    near=lambda one, other: (
        one == other or (isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=1e-9))
    ),
    relative=1e-9,
)
cell = st.sampled_from(["a", None, 0.0, 1.0, 1.04, 1.09, 1.14, 1.2, -1.0, -1.05, 5.0])
rows = st.integers(1, 5).flatmap(
    lambda size: st.lists(st.lists(st.tuples(cell, cell), min_size=size, max_size=size), min_size=2, max_size=2)
)


@given(rows)
def test_bags_are_equal_if_some_pairing_is_near(sides: list[list[tuple[Any, ...]]]) -> None:
    some, true = sides
    pairs = any(all(bags.near_rows(one, other, CELLS) for one, other in zip(some, order, strict=True)) for order in permutations(true))
    assert bags.same_bag(some, true, CELLS) == pairs
    assert bags.same_bag(true, true[::-1], CELLS)


def noisy(random: Random, value: float) -> float:
    return value * (1 + random.uniform(-1e-15, 1e-15))


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["float", "float float", "text float", "few few", "few id", "few id float", "float text few"])
def test_the_largest_bag_is_compared_within_seconds(kinds: str) -> None:
    """`few`: floats of which many are equal but for rounding; `id`: large whole numbers that a tolerance does not tell apart."""
    random = Random(kinds)
    make = {
        "float": lambda place: random.uniform(-1e9, 1e9),
        "few": lambda place: random.choice([1 / 3, 2 / 3, 0.1 + 0.2, 0.3]),
        "id": lambda place: float(10**13 + place),
        "text": lambda place: random.choice("abc"),
    }
    true = [tuple(make[kind](place) for kind in kinds.split()) for place in range(MAX_ROWS)]
    # an id is given as it is, everything else with the rounding of another order of additions
    some = [tuple(noisy(random, c) if isinstance(c, float) and c < 1e13 else c for c in row) for row in true]
    random.shuffle(some)
    started = time.monotonic()
    assert not bags.crowded(true, NARROW)
    assert bags.same_bag(some, true, NARROW)
    first = next(place for place, kind in enumerate(kinds.split()) if kind != "text")
    off = list(some[7])
    off[first] *= 1 + 1e-7
    assert not bags.same_bag([*some[:7], tuple(off), *some[8:]], true, NARROW)
    assert time.monotonic() - started < 60, "a bound for a busy machine; two seconds on an idle one"


def test_truth_with_indistinguishable_rows_is_detected() -> None:
    random = Random(0)
    chain = [(random.uniform(1, 2), random.uniform(1, 2)) for _ in range(bags.MAX_CROWD + 1)]
    assert bags.crowded(chain, CELLS) and not bags.crowded(chain[:-1], CELLS) and not bags.crowded(chain, NARROW)
    assert not bags.crowded([(1.5, 2.5)] * 1000, CELLS), "equal rows are told apart by no pairing"


@pytest.mark.parametrize(("size", "answers"), [(299, 1.0), (301, 1.0), pytest.param(20_000, 1.0, marks=pytest.mark.slow)])
async def test_a_table_is_compared_within_its_tolerance_at_any_size(size: int, answers: float) -> None:
    """300 rows was where it stopped."""
    random = Random(size)
    values = [(random.choice("abc"), random.uniform(0, 1)) for _ in range(size)]
    truth = "k,v\n" + "".join(f"{key},{value!r}\n" for key, value in values)
    random.shuffle(values)
    left = "\ufeffk,v\n" + "".join(f"{key},{value * (1 + 1e-13)!r}\n" for key, value in values)
    wrong = "k,v\n" + "".join(f"{key},{value * (1 + 1e-13)!r}\n" for key, value in [*values[:-1], ("a", 2.0)])
    data = {"answer": {"t.csv": {"table": truth}}, "outputs": ("t.csv",)}
    assert (await judged(Outputs(), task(**data), episode(**{"t.csv": left.encode()}))).value == answers
    assert (await judged(Outputs(), task(**data), episode(**{"t.csv": wrong.encode()}))).value == 0.0


async def test_truth_that_no_output_can_equal_is_a_task_fault() -> None:
    random = Random(1)
    chain = "k,v\n" + "".join(f"{random.uniform(1, 2)},{random.uniform(1, 2)}\n" for _ in range(200))
    for truth, said in (({"text": "x" * 101}, "101 bytes"), ({"json": ["x" * 200]}, "204 bytes"), ({"table": chain}, "near each other")):
        verifier = Outputs(longest=100 if said != "near each other" else 100_000, relative=0.1)
        score = await judged(verifier, task(answer={"a": truth}, outputs=("a",)), episode(a=chain.encode()))
        assert score.value is None and score.blame is not None and said in score.reason, score


def test_only_finite_numbers_are_numbers() -> None:
    assert [number_of_text(text) for text in ("1.5", "nan", "inf", "x", "1_0")] == [1.5, None, None, None, None]
