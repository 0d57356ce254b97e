"""Drift alerts: each rule alerts once when its condition starts to hold, and rarely by chance."""

from __future__ import annotations

from random import Random

import pytest

from agentrl.config.learner import Limit
from agentrl.observe.drift import WINDOW, drift_alerts, fisher_p_value, limit_alerts

OLD, NEW = range(WINDOW), range(WINDOW, 3 * WINDOW)


def noisy(name: str, before: float, after: float, seed: int = 0, spread: float = 0.01) -> list[dict[str, float]]:
    rng = Random(f"{name}{seed}")
    return [{name: rng.gauss(before if at in OLD else after, spread)} for at in (*OLD, *NEW)]


def run(*figures: list[dict[str, float]]) -> list[dict[str, float]]:
    steps = enumerate(zip(*figures, strict=True), 1)
    return [{"step": float(number), **{key: value for metrics in line for key, value in metrics.items()}} for number, line in steps]


def raised(steps: list[dict[str, float]]) -> list[str]:
    """Returns the names of the rules that alerted during the run, in order."""
    return [text.partition(":")[0] for at in range(len(steps)) for text in drift_alerts(steps[: at + 1])]


@pytest.mark.parametrize(
    ("figures", "rule"),
    [
        ([noisy("reward_mean", 0.4, 0.7), noisy("audit_mean", 0.4, 0.2)], "drift (reward-audit)"),
        ([noisy("completion_tokens_mean", 90, 160, spread=3), noisy("audit_mean", 0.4, 0.4)], "drift (length-audit)"),
        ([noisy("judge_disagreement", 0.1, 0.3)], "drift (disagreement)"),
        ([noisy("ess", 0.8, 0.4)], "drift (sample-size)"),
    ],
)
def test_each_rule_alerts_once(figures: list[list[dict[str, float]]], rule: str) -> None:
    steps = run(*figures)
    assert raised(steps) == [rule]
    assert "nan" not in alarms_text(steps)


def alarms_text(steps: list[dict[str, float]]) -> str:
    return " ".join(text for at in range(len(steps)) for text in drift_alerts(steps[: at + 1]))


@pytest.mark.parametrize(
    "figures",
    [
        [noisy("reward_mean", 0.4, 0.7), noisy("audit_mean", 0.4, 0.7)],  # both learn
        [noisy("reward_mean", 0.4, 0.7)],  # no audit, no rule
        [noisy("reward_mean", 0.4, 0.39), noisy("audit_mean", 0.4, 0.2)],  # both fall: bad, but no drift of the reward
        [noisy("completion_tokens_mean", 90, 160, spread=3), noisy("audit_mean", 0.4, 0.6)],  # longer, and better
        [noisy("completion_tokens_mean", 90, 100, spread=1), noisy("audit_mean", 0.4, 0.4)],  # hardly longer
        [noisy("judge_disagreement", 0.3, 0.1)],  # falls
        [noisy("ess", 0.95, 0.6)],
        [noisy("judge_disagreement", 0.02, 0.04, spread=0.001)],  # too small, although significant
    ],
)
def test_other_changes_raise_no_alert(figures: list[list[dict[str, float]]]) -> None:
    assert raised(run(*figures)) == []


def test_a_reward_hack_learned_within_two_steps_alerts_each_time() -> None:
    """The metrics of a real run whose gate rolled the policy back after steps 4 and 8 (benchmarks/weakness.py)."""
    reward = [0.46, 0.48, 0.94, 0.98, 0.97, 1.0, 0.99, 0.52, 0.73, 0.85, 0.99]
    audit = [0.85, 0.87, 0.16, 0.2, 0.0, 0.0, 0.06, 0.78, 0.54, 0.36, 0.0]
    steps = run([{"reward_mean": value} for value in reward], [{"audit_mean": value} for value in audit])
    assert [at + 1 for at in range(len(steps)) if drift_alerts(steps[: at + 1])] == [4, 11]
    assert raised(steps) == ["drift (reward-audit-jump)"] * 2
    (alert,) = drift_alerts(steps[:4])
    assert "from 2 steps to the next 2, the mean reward rose from 0.47 to 0.96 while the audit fell from 0.86 to 0.18" in alert


def test_a_step_without_the_metric_does_not_count_as_zero() -> None:
    steps = run(noisy("judge_disagreement", 0.02, 0.3))
    steps[WINDOW + 2] = {"step": WINDOW + 3}
    assert raised(steps) == ["drift (disagreement)"], "it alerts when there are two full windows of known values again"


def test_a_collapsed_sample_size_alerts_at_its_first_update_and_not_again_after_a_step_without_one() -> None:
    steps: list[dict[str, float]] = [{"step": 1, "ess": 0.5}, {"step": 2, "ess": 0.49}, {"step": 3}, {"step": 4, "ess": 0.1}]
    assert [bool(drift_alerts(steps[: at + 1])) for at in range(4)] == [False, True, False, False]
    assert "0.49 of the tokens" in drift_alerts(steps[:2])[0]


@pytest.mark.slow
def test_noise_alone_alerts_in_few_runs() -> None:
    """All rules together, over 24 steps of noisy metrics without drift; docs/verifiers.md states the rate."""
    spreads = {"reward_mean": 0.1, "audit_mean": 0.1, "completion_tokens_mean": 10.0, "judge_disagreement": 0.1}
    rngs = map(Random, range(100))
    runs = [[{name: rng.gauss(10 * spread, spread) for name, spread in spreads.items()} for _ in range(24)] for rng in rngs]
    assert sum(bool(raised(steps)) for steps in runs) <= 10


def faulty(*counts: tuple[int, int]) -> list[dict[str, float]]:
    return run([{"excluded_policy_reachable": faults / ended, "attempts_ended": float(ended)} for faults, ended in counts])


@pytest.mark.parametrize(
    ("counts", "alerts"),
    [
        ([(1, 128)] * WINDOW + [(6, 128)] * WINDOW, 1),  # rises
        ([(1, 128)] * 2 * WINDOW, 0),
        ([(6, 128)] * WINDOW + [(1, 128)] * WINDOW, 0),  # falls
        ([(0, 128)] * WINDOW + [(1, 128)] * 2, 0),  # chance
        ([(60, 128)] * WINDOW, 0),  # no earlier attempts; `FaultRate.suspect_alert` reports such a share
        ([(0, 16)] * 3 * WINDOW + [(16, 16)], 1),
    ],
)
def test_a_rising_share_of_policy_reachable_faults_alerts(counts: list[tuple[int, int]], alerts: int) -> None:
    assert raised(faulty(*counts)) == ["drift (exclusions)"] * alerts


COUNTS = [(10, 100, 5, 500), (0, 10, 0, 10), (3, 3, 0, 3), (9, 10, 20, 22), (0, 5, 5, 5)]


@pytest.mark.parametrize(("hits", "n", "other_hits", "other_n"), COUNTS)
def test_the_p_value_against_scipy(hits: int, n: int, other_hits: int, other_n: int) -> None:
    from scipy.stats import hypergeom  # the import takes a second, which every test process would need

    expected = hypergeom.sf(hits - 1, n + other_n, hits + other_hits, n)
    assert fisher_p_value(hits, n, other_hits, other_n) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.slow
def test_a_constant_share_of_faults_alerts_in_few_runs() -> None:
    """At most one run in a hundred alerts, for any number of steps (the union bound is loose)."""
    rngs = map(Random, range(200))
    runs = [faulty(*((sum(rng.random() < 0.05 for _ in range(64)), 64) for _ in range(40))) for rng in rngs]
    assert sum(bool(raised(steps)) for steps in runs) <= 4


def test_a_limit_alerts_when_its_metric_starts_to_violate_it() -> None:
    limits = (
        Limit(metric="step_s", at=10.0, action="alert"),
        Limit(metric="reward_mean", at=0.5, action="alert"),
        Limit(metric="grad_norm", at=1.0),  # the learner's
    )
    values = [(9.0, 0.6), (11.0, 0.6), (12.0, 0.4), (9.0, 0.4), (11.0, 0.5)]
    steps = run([{"step_s": seconds, "reward_mean": reward, "grad_norm": 5.0} for seconds, reward in values])
    alerts = [limit_alerts(steps[: at + 1], limits) for at in range(len(steps))]
    slow = "step_s is 11, beyond its limit 10 (learner.limits)"
    assert alerts == [[], [slow], ["reward_mean is 0.4, beyond its limit 0.5 (learner.limits)"], [], [slow]]
    assert limit_alerts(run([{}]), limits) == []
