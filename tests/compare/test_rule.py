from __future__ import annotations

import pytest

from agentrl.compare import Rule, judge, suspicious
from agentrl.compare.simulation import block_rate, block_rate_in_a_run

RULE = Rule(repeats=4, confirm=24, alpha=0.05)
MIXED = [1.0, 0.95, 0.8, 0.5, 0.05] * 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "rates"),
    [(RULE, [0.95] * 50), (RULE, MIXED), (Rule(repeats=1, confirm=0), [0.95] * 50), (Rule(repeats=8, confirm=24), MIXED)],
)
def test_an_unchanged_policy_passes(rule: Rule, rates: list[float]) -> None:
    """One evaluation after the other, as in a run: this is where alarms are more frequent."""
    assert block_rate_in_a_run(rule, rates, evaluations=200, seed=2) <= 0.05


@pytest.mark.parametrize(
    ("rule", "before", "now", "stated"),
    [
        (RULE, [0.95] * 50, [0.85] * 50, 0.80),  # spread over all cases
        (RULE, [0.95] * 50, [0.0] * 5 + [0.95] * 45, 0.95),  # as much, in a tenth of the cases
        (Rule(repeats=8), [0.95] * 50, [0.0] + [0.95] * 49, 0.95),  # one case, lost for good
    ],
)
def test_a_drop_of_ten_points_is_seen_as_often_as_is_stated(rule: Rule, before: list[float], now: list[float], stated: float) -> None:
    assert block_rate(rule, before, now, evaluations=100, seed=3) >= stated


def test_a_case_that_was_lost_is_tried_again_and_named_and_one_that_was_unlucky_is_not() -> None:
    before = {f"c{n}": [1.0] * 4 for n in range(50)}
    now = {**before, "c7": [0.0] * 4, "c9": [0.0, 0.0, 0.0, 1.0], "c11": [0.0, 1.0, 1.0, 1.0]}
    assert suspicious(RULE, before, now) == ("c7", "c9")
    found = judge(RULE, before, now, {"c7": [0.0] * 24, "c9": [1.0] * 24})
    assert found.blocked and [one.case for one in found.regressed] == ["c7"] and len(found.again) == 2
    assert "case c7: 4 of 4 before, 0 of 28 now" in found.reason and not found.suite_blocks
    assert not judge(RULE, before, now, {}).blocked, "what was not tried again is not significant"


def test_a_margin_lets_small_drops_of_the_suite_pass() -> None:
    before = {f"c{n}": [1.0] for n in range(100)}
    now = {f"c{n}": [float(n >= 8)] for n in range(100)}
    assert judge(Rule(repeats=1, confirm=0), before, now, {}).suite_blocks
    assert not judge(Rule(repeats=1, confirm=0, margin=0.1), before, now, {}).blocked


def test_nothing_is_concluded_from_too_few_scored_cases() -> None:
    before = {f"c{n}": [1.0] for n in range(10)}
    now = {f"c{n}": [0.0 if n < 7 else None] for n in range(10)}
    found = judge(RULE, before, now, {})
    assert (found.enough, found.blocked, found.cases, found.unscored) == (False, False, 7, 3) and "only 7 cases" in found.reason


def test_what_cannot_name_a_case_leaves_alpha_to_the_suite() -> None:
    assert Rule(repeats=4).names_cases(50) and not Rule(repeats=2).names_cases(5) and not Rule(repeats=4, confirm=0).names_cases(50)
    once, often = ({f"c{n}": [1.0] * tries for n in range(50)} for tries in (1, 4))
    assert Rule(repeats=1, confirm=0).suite_alpha(once, once) == pytest.approx(0.035)
    assert Rule().suite_alpha(often, often) == pytest.approx(0.0175) and Rule().suite_alpha(once, once) == pytest.approx(0.035)


def test_a_case_that_is_tried_often_enough_by_itself_can_block_where_the_others_cannot() -> None:
    before = {f"c{n}": [1.0] for n in range(20)} | {"often": [1.0] * 6}
    now = before | {"often": [0.0] * 6, "c3": [0.0]}
    rule = Rule(repeats=1)
    assert suspicious(rule, before, now) == ("often",)
    assert [one.case for one in judge(rule, before, now, {"often": [0.0] * 24}).regressed] == ["often"]


def test_a_case_holds_while_its_attempts_reach_its_own_threshold() -> None:
    """A quarter of the attempts pass: significantly fewer, and no less than is asked for. Partial scores pass from the threshold."""
    before = {f"c{n}": [1.0] * 8 for n in range(20)}
    now = before | {"c1": [0.0, 0.0, 0.0, 1.0] * 2, "c2": [0.6] * 8, "c3": [0.0] * 8}
    again = {"c1": [0.0, 0.0, 0.0, 1.0] * 6, "c2": [0.6] * 24, "c3": [0.0] * 24}

    def regressed(**thresholds: float) -> list[str]:
        return sorted(one.case for one in judge(Rule(repeats=8, thresholds=thresholds), before, now, again).regressed)

    assert regressed() == ["c1", "c2", "c3"]
    assert regressed(c1=0.25, c2=0.6, c3=0.5) == ["c3"]
