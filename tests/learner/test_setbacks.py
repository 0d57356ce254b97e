"""What is not finite, or beyond a limit, changes nothing: on any number of ranks, at every ZeRO stage, and over a crash."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.base.files import sha256_file
from agentrl.config import LearnerConfig, Limit, Recipe
from agentrl.errors import LearnerHalted
from agentrl.experience import SqliteStore
from agentrl.learner import LearnerProcess
from agentrl.learner.driver_reports import UpdateFailureLog
from agentrl.learner.publish import FULL_EVERY
from agentrl.learner.update_guard import MAX_BAD_GROUPS, MAX_BAD_UPDATES, MAX_ROLLBACKS, FailureCounts, UpdateFailure, UpdateGuard
from agentrl.records import Batch, Group, Sample, VersionState
from agentrl.version import FolderRegistry, deltas
from agentrl.version.rollback import BUDGET_STEPS
from tests.learner import preloaded
from tests.learner.building import episode, random_group, recipe, scored, turn, write_run
from tests.ledgers import consumed

MakeLearner = Callable[[Path, Recipe], LearnerProcess]
Results = dict[tuple[int, str], dict[str, Any]]
SCENARIOS = {
    2: ["norm-0", "norm-2", "norm-3", "figure-2", "half-3", "logprob-2", "advantage-0", "halt-2", "undo-2", "undo-3", "undocritic-2"],
    1: ["norm-1", "norm-2", "figure-0", "half-1", "half-2", "logprob-0", "advantage-2", "undo-0", "undocritic-0"],
}
REFUSED = [(ranks, name) for ranks, names in SCENARIOS.items() for name in names if not name.startswith("undo")]
UNDONE = [(ranks, name) for ranks, names in SCENARIOS.items() for name in names if name.startswith("undo-")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, host: Path) -> Results:
    run_dir = tmp_path_factory.mktemp("run")
    write_run(run_dir, recipe(), [random_group(index, size=5) for index in range(6)])
    found: Results = {}
    for ranks, names in SCENARIOS.items():
        out = run_dir / f"out{ranks}"
        out.mkdir()
        command = preloaded.command(host, ranks, "tests.learner.setbacks_script", str(run_dir), str(out), *names)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        for name in names:
            found[ranks, name] = torch.load(out / f"{name}.pt", weights_only=False)
    return found


def _gap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.deepspeed
@pytest.mark.parametrize(("ranks", "name"), REFUSED)
def test_a_skipped_update_changes_nothing_and_is_logged(results: Results, ranks: int, name: str) -> None:
    found, kind = results[ranks, name], name.partition("-")[0]
    assert _gap(found["before"], found["after"]) == 0.0
    assert _gap(found["then"], found["clean"]) == 0.0, "moments and gradients were untouched too"
    assert _gap(found["then"], found["before"]) > 0.0
    (setback,) = found["setbacks"]
    assert found["everyone"] == [found["everyone"][0]] * ranks, "every rank decided the same"
    assert setback.groups == (0, 1, 2)
    assert len(setback.episodes) == 15
    assert (setback.what, setback.action) == ("policy", "halt" if kind == "halt" else "skip")
    wanted = {
        "norm": "grad_norm",
        "half": "grad_norm",
        "figure": "entropy",
        "logprob": "the loss is not finite",
        "advantage": "1 advantages are not finite",
        "halt": "kl_behaviour",
    }
    assert any(reason.startswith(wanted[kind]) for reason in setback.reasons), setback.reasons
    if kind == "halt":
        assert "its limit 1e-06 (learner.limits)" in found["halted"]
    else:
        assert found["metrics"]["updates_left_out"] == 1 and found["metrics"]["optimizer_steps"] == 0
        assert found["counts"] == FailureCounts(bad_in_a_row=1)
    if kind in ("norm", "half", "figure"):
        assert found["metrics"]["grad_norm"] == pytest.approx(found["reference"]["grad_norm"], rel=1e-6), "the true norm is told"
        assert math.isfinite(setback.metrics["loss"])
    if kind in ("logprob", "advantage"):
        assert setback.metrics["loss"] is None and "loss" not in found["metrics"]


@pytest.mark.deepspeed
@pytest.mark.parametrize(("ranks", "name"), UNDONE)
def test_an_engine_restores_a_checkpoint_exactly(results: Results, ranks: int, name: str) -> None:
    found = results[ranks, name]
    assert _gap(found["again"], found["straight"]) == 0.0
    assert _gap(found["from_scratch"], found["first"]) == 0.0
    assert _gap(found["straight"], found["first"]) > 0.0


@pytest.mark.deepspeed
@pytest.mark.parametrize(("ranks", "name"), [(2, "undocritic-2"), (1, "undocritic-0")])
def test_a_critic_is_restored_with_its_policy(results: Results, ranks: int, name: str) -> None:
    found = results[ranks, name]
    assert _gap(found["first"], found["again"]) == 0.0
    assert found["base"]["head.weight"].abs().max() == 0.0 < found["first"]["head.weight"].abs().max()


def _part(step: int = 3) -> Batch:
    made = Sample(
        **{"episode_id": "e", "group_index": 7, "token_ids": (1, 2), "loss_mask": (False, True)},
        **{"logprobs": (0.0, -1.0), "advantages": (0.0, 1.0), "versions": (-1, 3)},
    )
    return Batch(step=step, samples=(made, made), denominator=2, group_indices=(7, 8))


FINE = {"loss": 0.1, "kl_behaviour": 0.1, "entropy": 2.0, "ess": 0.9, "ratio_max": 1.5, "clip_fraction": 0.1, "grad_norm": 1.0}


@pytest.mark.parametrize(
    ("metric", "at", "bad"),
    [
        *((metric, 0.5, 0.6) for metric in ("kl_behaviour", "kl_reference", "clip_fraction", "mismatch_kl")),
        *(("ratio_max", 5.0, 6.0), ("grad_norm", 5.0, 6.0), ("entropy", 0.5, 0.4), ("ess", 0.5, 0.4)),
    ],
)
def test_each_limit_checks_its_metric_at_its_bound(metric: Any, at: float, bad: float) -> None:
    guard = UpdateGuard(LearnerConfig(limits=(Limit(metric=metric, at=at),)))
    for fine in (FINE, FINE | {metric: at}):
        known = {key: value for key, value in fine.items() if key != "grad_norm"}
        assert guard.largest_norm(known) == (at if metric == "grad_norm" else math.inf)
    beyond = FINE | {metric: bad}
    if metric != "grad_norm":
        assert guard.largest_norm(beyond) < 0
    guard.record_policy_step(_part(), beyond, applied=False)
    (setback,) = guard.take_failures()
    assert setback.reasons == (f"{metric} {bad:g} is {'below' if bad < at else 'above'} its limit {at:g} (learner.limits)",)
    assert setback.episodes == ("e",) and setback.groups == (7, 8)
    assert guard.take_failures() == ()


def test_the_strictest_action_wins_and_rollbacks_are_limited() -> None:
    limits = (Limit(metric="kl_behaviour", at=0.5), Limit(metric="entropy", at=0.5, action="rollback"))
    guard = UpdateGuard(LearnerConfig(limits=limits))
    bad = FINE | {"kl_behaviour": 0.6, "entropy": 0.1}
    for made in range(MAX_ROLLBACKS):
        guard.begin_step()
        guard.record_policy_step(_part(), bad, applied=False)
        assert guard.rolling_back and not guard.start_weights_passed and len(guard.counts.rollbacks) == made + 1
    guard.begin_step()
    guard.record_policy_step(_part(4), FINE, applied=True)
    assert guard.start_weights_passed and not guard.rolling_back
    with pytest.raises(LearnerHalted, match=f"{MAX_ROLLBACKS} rollbacks were made"):
        guard.record_policy_step(_part(5), bad, applied=False)
    assert [setback.action for setback in guard.take_failures()] == [*["rollback"] * MAX_ROLLBACKS, "halt"]


def test_setbacks_count_against_a_budget_for_some_steps_only() -> None:
    """So rare ones never halt a run, and frequent ones do, also after any number of good steps."""
    guard = UpdateGuard(LearnerConfig(limits=(Limit(metric="entropy", at=0.5, action="rollback"),)))
    bad, broken = FINE | {"entropy": 0.1}, [random_group(0)]
    every = BUDGET_STEPS // MAX_ROLLBACKS + 1
    for step in range(0, 40 * every, every):
        guard.begin_step()
        guard.record_policy_step(_part(step), bad, applied=False)
        assert guard.rolling_back and len(guard.counts.rollbacks) <= MAX_ROLLBACKS
        for _ in range(MAX_BAD_GROUPS // MAX_ROLLBACKS - 1):
            guard.exclude_groups(step, broken, {0: "non_finite_score"})
    with pytest.raises(LearnerHalted, match=f"within {BUDGET_STEPS} steps"):
        for _ in range(2):
            guard.record_policy_step(_part(step + 1), bad, applied=False)
    with pytest.raises(LearnerHalted, match=f"{MAX_BAD_GROUPS} groups were excluded within {BUDGET_STEPS} steps"):
        for _ in range(MAX_BAD_GROUPS):
            guard.exclude_groups(step + 1, broken, {0: "non_finite_score"})


def test_a_working_critic_does_not_reset_the_policys_skipped_steps() -> None:
    guard = UpdateGuard(LearnerConfig())
    nan = FINE | {"grad_norm": math.nan}
    for _ in range(MAX_BAD_UPDATES - 1):
        guard.record_critic_step(_part(), {}, applied=True)
        guard.record_policy_step(_part(), nan, applied=False)
    with pytest.raises(LearnerHalted, match=rf"{MAX_BAD_UPDATES} optimizer steps in a row were skipped, .* the gradient is not finite"):
        guard.record_policy_step(_part(), nan, applied=False)
    guard = UpdateGuard(LearnerConfig())
    for _ in range(MAX_BAD_UPDATES - 1):
        guard.record_critic_step(_part(), {"value_grad_norm": math.inf}, applied=False)
        guard.record_policy_step(_part(), FINE, applied=True)
    with pytest.raises(LearnerHalted, match="of the critic"):
        guard.record_critic_step(_part(), {}, applied=False)
    assert guard.take_failures()[0].metrics == {"value_grad_norm": None}


def test_the_log_drops_steps_that_run_again(tmp_path: Path) -> None:
    log = UpdateFailureLog(tmp_path)
    assert log.read() == ()
    log.remove_from(0)
    made = tuple(
        UpdateFailure(step=step, action="skip", what="group", reasons=("x",), groups=(step,), episodes=("e",), metrics={"loss": None})
        for step in range(3)
    )
    log.append(made[:2])
    log.append(made[2:])
    log.append(())
    with log.path.open("ab") as file:
        file.write(b'{"step": 3')  # a killed process
    assert log.read() == made
    assert log.read(1) == made[1:2]
    log.remove_from(2)
    assert log.read() == made[:2]
    log.append(made[2:])
    assert log.read() == made


def _strange(index: int) -> Group:
    """A group sampled by a policy that the learner's is nowhere near."""
    made = [turn([1, 2, 3], [4, 5, 6], [-0.01, -0.01, -0.01], version=index // 3) for _ in range(4)]
    episodes = tuple(scored(episode(f"g{index}-e{number}", [one]), float(number % 2)) for number, one in enumerate(made))
    return Group(index=index, task_id=f"t{index}", task_key=f"k{index}", episodes=episodes)


def _as(group: Group, index: int) -> Group:
    return Group(index=index, task_id=group.task_id, task_key=group.task_key, episodes=group.episodes)


async def _learn(make_learner: MakeLearner, run_dir: Path, made: Recipe, groups: list[Group] | None = None) -> FolderRegistry:
    """A learner's whole life; without `groups` it goes on in the run folder that is there."""
    if groups is None:
        (run_dir / "recipe.json").write_text(made.model_dump_json())
    else:
        write_run(run_dir, made, groups)
    learner = make_learner(run_dir, made)
    await learner.start()
    try:
        await learner.wait(timeout_s=600)
    finally:
        await learner.kill()
    return FolderRegistry(run_dir / "versions")


def _rolling(ranks: int, steps: int = 4, action: str = "rollback") -> Recipe:
    limits = [{"metric": "kl_behaviour", "at": 1.0, "action": action}]
    learner = {"ranks": ranks, "limits": limits, "warmup_steps": 3, "keep_checkpoints": 1}
    return recipe(learner=learner).model_copy(update={"steps": steps})


@pytest.mark.deepspeed
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_rollback_restores_the_last_good_weights(tmp_path: Path, host: Path, make_learner: MakeLearner, ranks: int) -> None:
    """Update 2 finds the policy far from everything: version 2 is refused, version 3 is version 1 again, and update 3 is what update 1
    would have been with its groups: same weights, moments and learning rate, bit for bit. So too when it dies right after."""
    groups = [random_group(index) for index in range(12)]
    rolled = [*groups[:6], *(_strange(index) for index in range(6, 9)), *groups[9:]]
    run_dir = tmp_path / "rolled"
    made = _rolling(ranks)
    if ranks == 1:
        write_run(run_dir, made, rolled)
        command = preloaded.command(host, 1, "tests.learner.crash", "publish-3", "--run-dir", str(run_dir))
        done = subprocess.run(command, capture_output=True, timeout=600, check=False)
        assert done.returncode != 0
        registry = FolderRegistry(run_dir / "versions")
        assert registry.get(3) is None and registry.get(2).state is VersionState.CANDIDATE  # type: ignore[union-attr]
        await _learn(make_learner, run_dir, made)
    else:
        registry = await _learn(make_learner, run_dir, made, rolled)
    calm = await _learn(make_learner, tmp_path / "calm", _rolling(ranks, 2), [*groups[:3], *(_as(groups[9 + n], 3 + n) for n in range(3))])

    versions = registry.versions()
    assert [(version.number, version.parent) for version in versions] == [(0, None), (1, 0), (2, 1), (3, 1), (4, 3)]
    assert [version.number for version in versions if version.state is VersionState.ROLLED_BACK] == [2]
    assert versions[3].sha256 == versions[1].sha256 != versions[2].sha256
    assert versions[4].sha256 == calm.versions()[2].sha256
    (setback,) = UpdateFailureLog(run_dir).read()
    assert (setback.step, setback.action, setback.groups) == (2, "rollback", (6, 7, 8))
    assert len(setback.episodes) == 12
    store = SqliteStore(run_dir / "experience.sqlite")
    assert consumed(store) == {index: index // 3 for index in range(12)}
    store.close()


@pytest.mark.deepspeed
async def test_unchanged_weights_stay_good(tmp_path: Path, make_learner: MakeLearner) -> None:
    """Nothing to learn in step 0: version 1 is the base, so that a rollback in step 1 finds nothing to undo."""
    groups = [*(random_group(index, scores=[1.0] * 4) for index in range(3)), *(_strange(index) for index in range(3, 6))]
    versions = (await _learn(make_learner, tmp_path, _rolling(1, 2), groups)).versions()
    assert [(version.number, version.parent) for version in versions] == [(0, None), (1, 0), (2, 1)]
    assert versions[1].sha256 == versions[2].sha256
    assert all(version.state is VersionState.CANDIDATE for version in versions)


@pytest.mark.deepspeed
async def test_delta_versions_equal_whole_ones(tmp_path: Path, make_learner: MakeLearner) -> None:
    steps = FULL_EVERY + 2
    groups = [random_group(index) for index in range(3 * steps)]
    made = recipe(learner={"lr": 1e-7, "keep_versions": 2}, serving={"weight_transfer": "delta"}).but(steps=steps)
    plain = recipe(learner={"lr": 1e-7}).but(steps=steps)
    registry = await _learn(make_learner, tmp_path / "deltas", made, groups)
    reference = await _learn(make_learner, tmp_path / "whole", plain, groups)
    assert [one.sha256 for one in registry.versions()] == [one.sha256 for one in reference.versions()]
    homes = [registry.path(version) for version in registry.versions()]
    assert [home.name for home in homes if (home / "model.safetensors").exists()] == ["000000", f"{FULL_EVERY:06d}"]
    assert [home for home in homes if (home / "model.delta").exists()] == homes[-2:]
    for version in registry.versions()[FULL_EVERY:]:
        registry.verify(version)
    size = [sum(path.stat().st_size for path in home.glob("model.*")) for home in homes]
    assert size[steps] < 0.5 * size[FULL_EVERY]
    (homes[steps].parent / deltas.NEWEST_WEIGHTS).unlink()
    assert sha256_file(deltas.materialize(homes[steps])) == reference.versions()[steps].sha256


@pytest.mark.deepspeed
async def test_a_halt_stops_the_run_and_other_limits_let_it_resume(tmp_path: Path, make_learner: MakeLearner) -> None:
    groups = [*(random_group(index) for index in range(3)), *(_strange(index) for index in range(3, 6))]
    made = _rolling(1, 2, "halt")
    with pytest.raises(LearnerHalted, match=r"step 1: kl_behaviour .* is above its limit 1 \(learner\.limits\)"):
        await _learn(make_learner, tmp_path, made, groups)
    registry, store = FolderRegistry(tmp_path / "versions"), SqliteStore(tmp_path / "experience.sqlite")
    assert registry.get(1) is not None and registry.get(2) is None
    assert consumed(store) == {0: 0, 1: 0, 2: 0}
    assert [(one.step, one.action) for one in UpdateFailureLog(tmp_path).read()] == [(1, "halt")]

    made = _rolling(1, 2, "skip")
    await _learn(make_learner, tmp_path, made)
    assert [(one.step, one.action) for one in UpdateFailureLog(tmp_path).read()] == [(1, "skip")]
    first, second = registry.get(1), registry.get(2)
    assert first is not None and second is not None and first.sha256 == second.sha256, "a step that is left out publishes its parent"
    assert consumed(store) == {index: index // 3 for index in range(6)}
    store.close()


@pytest.mark.deepspeed
async def test_non_finite_numbers_exclude_their_group_until_there_are_too_many(tmp_path: Path, make_learner: MakeLearner) -> None:
    """An infinite reward, an infinite logprob and scores too large to square, through the real store, on two ranks."""
    steps = MAX_BAD_GROUPS // 3 + 1
    groups = [random_group(index, scores=[math.inf, 0.0, 1.0, 0.0]) for index in range(3 * steps)]
    groups[0] = random_group(0)
    broken = [turn([1, 2], [3, 4], [-math.inf, -1.0]) for _ in range(4)]
    episodes = tuple(scored(episode(f"b{number}", [one]), float(number % 2)) for number, one in enumerate(broken))
    groups[2] = Group(index=2, task_id="t", task_key="k", episodes=episodes)
    groups[3] = random_group(3, scores=[1e300, -1e300, 0.0, 0.0])
    made = recipe(learner={"ranks": 2}).but(steps=steps)
    for _ in range(2):  # the second time from the last checkpoint
        with pytest.raises(LearnerHalted, match=f"{MAX_BAD_GROUPS + 1} groups were excluded"):
            await _learn(make_learner, tmp_path, made, None if (tmp_path / "versions").exists() else groups)
        found = UpdateFailureLog(tmp_path).read()
        assert [one.groups for one in found] == [(index,) for index in range(1, 3 * steps)], "each is written down once"
    assert [one.reasons[0].split()[0] for one in found[:3]] == ["non_finite_score", "non_finite_logprob", "non_finite_advantage"]
    registry = FolderRegistry(tmp_path / "versions")
    base, first = registry.get(0), registry.get(1)
    assert base is not None and first is not None and base.sha256 != first.sha256, "the other groups were trained on"
