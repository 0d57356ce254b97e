from __future__ import annotations

import pytest

from agentrl.config.gate import GateConfig
from agentrl.evaluation.comparison import Scores
from agentrl.gate.rule import CaseDrop, GateRule, RuleResult, apply_rule, can_trigger_retry, cases_to_retry
from benchmarks.gate import block_rate, block_rate_in_a_run

RULE = GateRule(repeats=4, confirm=24, alpha=0.05)
MIXED = [1.0, 0.95, 0.8, 0.5, 0.05] * 10


def all_passed(cases: int, *, attempts: int = 4) -> Scores:
    return {f"c{n:02d}": [1.0] * attempts for n in range(cases)}


def test_the_defaults_are_those_of_a_recipe() -> None:
    gate = GateConfig(suite="evals/x")
    assert GateRule() == GateRule(repeats=gate.repeats, margin=gate.margin)
    assert GateRule().pass_threshold("any") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "rates"),
    [(RULE, [0.95] * 50), (RULE, MIXED), (GateRule(repeats=1, confirm=0), [0.95] * 50), (GateRule(repeats=8, confirm=24), MIXED)],
)
def test_an_unchanged_policy_passes(rule: GateRule, rates: list[float]) -> None:
    """Repeated evaluations, as in a run, where false alarms are more frequent."""
    assert block_rate_in_a_run(rule, rates, evaluations=200, seed=2) <= 0.05


@pytest.mark.parametrize(
    ("rule", "before", "now", "stated"),
    [
        (RULE, [0.95] * 50, [0.85] * 50, 0.80),  # spread over all cases
        pytest.param(RULE, [0.95] * 50, [0.0] * 5 + [0.95] * 45, 0.95, marks=pytest.mark.slow),  # the same drop, in a tenth of the cases
        pytest.param(GateRule(repeats=8), [0.95] * 50, [0.0] + [0.95] * 49, 0.95, marks=pytest.mark.slow),  # one case, completely lost
    ],
)
def test_a_drop_of_ten_points_is_detected(rule: GateRule, before: list[float], now: list[float], stated: float) -> None:
    assert block_rate(rule, before, now, evaluations=100, seed=3) >= stated


def test_a_lost_case_is_retried_and_named_and_an_unlucky_one_is_not() -> None:
    before = {f"c{n}": [1.0] * 4 for n in range(50)}
    now = {**before, "c7": [0.0] * 4, "c9": [0.0, 0.0, 0.0, 1.0], "c11": [0.0, 1.0, 1.0, 1.0]}
    assert cases_to_retry(RULE, before, now) == ("c7", "c9")
    result = apply_rule(RULE, before, now, {"c7": [0.0] * 24, "c9": [1.0] * 24})
    assert result.blocked and [drop.case for drop in result.regressed] == ["c7"] and len(result.again) == 2
    assert "case c7: 4 of 4 before, 0 of 28 now" in result.reason and not result.suite_blocks
    assert not apply_rule(RULE, before, now, {}).blocked, "without retries the drop is not significant"


def test_a_margin_lets_small_drops_of_the_suite_pass() -> None:
    before = {f"c{n}": [1.0] for n in range(100)}
    now = {f"c{n}": [float(n >= 8)] for n in range(100)}
    assert apply_rule(GateRule(repeats=1, confirm=0), before, now, {}).suite_blocks
    assert not apply_rule(GateRule(repeats=1, confirm=0, margin=0.1), before, now, {}).blocked


def test_nothing_is_concluded_from_too_few_scored_cases() -> None:
    before = {f"c{n}": [1.0] for n in range(10)}
    now = {f"c{n}": [0.0 if n < 7 else None] for n in range(10)}
    result = apply_rule(RULE, before, now, {})
    assert (result.enough, result.blocked, result.cases, result.unscored) == (False, False, 7, 3) and "only 7 cases" in result.reason
    assert (result.effect, result.p_value, result.suite_blocks, result.suite_alpha, result.again) == (0.0, 1.0, False, 0.0, ())
    four_fifths = apply_rule(RULE, before, {**now, "c9": [0.0]}, {})
    assert four_fifths.enough and four_fifths.blocked and four_fifths.cases == 8
    assert not apply_rule(RULE, {}, {}, {}).enough


def test_a_case_is_retried_up_to_a_p_value_of_a_tenth() -> None:
    """2 of 2 before and 0 of 3 now: 1 of the 10 ways to choose which 2 of 5 attempts pass."""
    assert can_trigger_retry(2, 3) and can_trigger_retry(3, 2) and can_trigger_retry(1, 9)
    assert not can_trigger_retry(2, 2) and not can_trigger_retry(1, 8)
    assert cases_to_retry(RULE, {"a": [1.0] * 2}, {"a": [0.0] * 3}) == ("a",)
    assert cases_to_retry(RULE, {"a": [1.0] * 3}, {"a": [0.0] * 2 + [1.0] * 2}) == ()


def test_at_most_the_32_worst_cases_are_retried() -> None:
    before = all_passed(40, attempts=8)
    now = {case: [0.0] * 4 + [1.0 if case < "c08" else 0.0] * 4 for case in before}
    assert cases_to_retry(RULE, before, now) == tuple(f"c{n:02d}" for n in range(8, 40))
    assert cases_to_retry(RULE, before, now | {"c20": [1.0] * 8}) == (*(f"c{n:02d}" for n in range(8, 40) if n != 20), "c00")


def test_a_p_value_equal_to_its_share_blocks() -> None:
    """3 of 3 before and 0 of 3 + 10 now have a p-value of 1/560; 5 cases lost and none gained have one of 1/32."""
    for cases in (1, 2):
        rule = GateRule(repeats=3, confirm=10, alpha=cases * 2 / 560 / 0.7)
        assert rule.case_alpha / cases == 1 / 560
        assert rule.can_block(cases, 3, 3) and not rule.can_block(cases + 1, 3, 3)
        assert not rule.can_block(cases, 0, 3) and not rule.can_block(cases, 3, 0) and not rule.can_block(cases, 0, 0)
        before = all_passed(cases, attempts=3)
        result = apply_rule(rule, before, before | {"c00": [0.0] * 3}, {"c00": [0.0] * 10})
        assert [drop.p_value for drop in result.regressed] == [1 / 560]
    rule, five = GateRule(repeats=1, confirm=0, alpha=1 / 32 / 0.7), all_passed(5, attempts=1)
    result = apply_rule(rule, five, {case: [0.0] for case in five}, {})
    assert result.suite_blocks and result.p_value == result.suite_alpha == 1 / 32


@pytest.mark.parametrize(("cases", "blocks"), [(41, True), (42, False)])
def test_the_correction_is_over_every_case_of_the_suite(cases: int, blocks: bool) -> None:
    """4 of 4 before, 2 of 28 now: p = C(6, 4) / C(32, 4) = 0.000417, between 0.0175 / 42 and 0.0175 / 41."""
    before = all_passed(cases)
    result = apply_rule(RULE, before, before | {"c07": [0.0] * 4}, {"c07": [0.0] * 22 + [1.0] * 2})
    assert [drop.p_value for drop in result.again] == [pytest.approx(15 / 35960)] and result.blocked is blocks


@pytest.mark.parametrize(("lost_cases", "more"), [(3, ""), (4, "and 1 more case"), (5, "and 2 more cases")])
def test_a_reason_names_the_three_clearest_cases(lost_cases: int, more: str) -> None:
    """The suite has 48 cases; the last of the lost cases fell most."""
    before, cases = all_passed(48, attempts=8), [f"c{n:02d}" for n in range(lost_cases)]
    retries = {case: [0.0] * (24 - lost_cases + n) + [1.0] * (lost_cases - n) for n, case in enumerate(cases)}
    result = apply_rule(RULE, before, before | dict.fromkeys(cases, [0.0] * 8), retries)
    assert [drop.case for drop in result.again] == [drop.case for drop in result.regressed] == cases[::-1] and not result.suite_blocks
    parts = result.reason.split("; ")
    clearest = [f"case {cases[-n]}: 8 of 8 before, {n} of 32 now" for n in (1, 2, 3)]
    assert [part.split(" (p")[0] for part in parts[:3]] == clearest and "".join(parts[3:]) == more


def test_a_drop_blocks_only_if_it_is_marked() -> None:
    drop = CaseDrop(case="a", before_passed=4, before_tries=4, passed=0, tries=4, p_value=0.01)
    assert RuleResult(enough=True, blocked=False, cases=1, unscored=0, again=(drop,)).regressed == ()


def test_the_suite_gets_all_of_alpha_if_no_case_can_block() -> None:
    assert GateRule().can_block(50, 4, 4) and not GateRule().can_block(5, 2, 2) and not GateRule(confirm=0).can_block(50, 4, 4)
    once, often = ({f"c{n}": [1.0] * tries for n in range(50)} for tries in (1, 4))
    assert GateRule(repeats=1, confirm=0).suite_alpha(once, once) == pytest.approx(0.035)
    assert GateRule().suite_alpha(often, often) == pytest.approx(0.0175) and GateRule().suite_alpha(once, once) == pytest.approx(0.035)


def test_a_case_with_more_attempts_can_block_if_others_cannot() -> None:
    before = {f"c{n}": [1.0] for n in range(20)} | {"often": [1.0] * 6}
    now = before | {"often": [0.0] * 6, "c3": [0.0]}
    rule = GateRule(repeats=1)
    assert cases_to_retry(rule, before, now) == ("often",)
    assert [drop.case for drop in apply_rule(rule, before, now, {"often": [0.0] * 24}).regressed] == ["often"]


def test_a_case_does_not_block_while_it_reaches_its_threshold() -> None:
    """A quarter of the attempts pass: significantly fewer, and as many as required. Partial scores pass from the threshold."""
    before = {f"c{n}": [1.0] * 8 for n in range(20)}
    now = before | {"c1": [0.0, 0.0, 0.0, 1.0] * 2, "c2": [0.6] * 8, "c3": [0.0] * 8}
    retries = {"c1": [0.0, 0.0, 0.0, 1.0] * 6, "c2": [0.6] * 24, "c3": [0.0] * 24}

    def regressed(**thresholds: float) -> list[str]:
        return sorted(drop.case for drop in apply_rule(GateRule(repeats=8, thresholds=thresholds), before, now, retries).regressed)

    assert regressed() == ["c1", "c2", "c3"]
    assert regressed(c1=0.25, c2=0.6, c3=0.5) == ["c3"]
    assert regressed(c1=0.26, c2=0.61, c3=0.5) == ["c1", "c2", "c3"]
