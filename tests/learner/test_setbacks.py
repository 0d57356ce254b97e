"""Updates that are not finite or exceed a limit change nothing, on any number of ranks, at every ZeRO stage, and after a crash."""

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
from tests.learner.building import build_recipe, episode, random_group, scored, turn, write_run
from tests.ledgers import consumed

MakeLearner = Callable[[Path, Recipe], LearnerProcess]
Results = dict[tuple[int, str], dict[str, Any]]
SCENARIOS = {
    2: ["norm-0", "norm-2", "norm-3", "figure-2", "half-3", "logprob-2", "advantage-0", "halt-2", "undo-2", "undo-3", "undocritic-2"],
    1: ["norm-1", "norm-2", "figure-0", "half-1", "half-2", "logprob-0", "advantage-2", "undo-0", "undocritic-0"],
}
REJECTED = [(ranks, name) for ranks, names in SCENARIOS.items() for name in names if not name.startswith("undo")]
ROLLED_BACK = [(ranks, name) for ranks, names in SCENARIOS.items() for name in names if name.startswith("undo-")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, host: Path) -> Results:
    run_dir = tmp_path_factory.mktemp("run")
    write_run(run_dir, build_recipe(), [random_group(index, size=5) for index in range(6)])
    outputs: Results = {}
    for ranks, names in SCENARIOS.items():
        out = run_dir / f"out{ranks}"
        out.mkdir()
        command = preloaded.command(host, ranks, "tests.learner.setbacks_script", str(run_dir), str(out), *names)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
        assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-6000:]
        for name in names:
            outputs[ranks, name] = torch.load(out / f"{name}.pt", weights_only=False)
    return outputs


def _gap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.deepspeed
@pytest.mark.parametrize(("ranks", "name"), REJECTED)
def test_a_skipped_update_changes_nothing_and_is_logged(results: Results, ranks: int, name: str) -> None:
    result, kind = results[ranks, name], name.partition("-")[0]
    assert _gap(result["before"], result["after"]) == 0.0
    assert _gap(result["after_next"], result["clean"]) == 0.0, "moments and gradients are unchanged too"
    assert _gap(result["after_next"], result["before"]) > 0.0
    (failure,) = result["setbacks"]
    assert result["by_rank"] == [result["by_rank"][0]] * ranks, "every rank makes the same decision"
    assert failure.groups == (0, 1, 2)
    assert len(failure.episodes) == 15
    assert (failure.what, failure.action) == ("policy", "halt" if kind == "halt" else "skip")
    wanted = {
        "norm": "grad_norm",
        "half": "grad_norm",
        "figure": "entropy",
        "logprob": "the loss is not finite",
        "advantage": "1 advantages are not finite",
        "halt": "kl_behaviour",
    }
    assert any(reason.startswith(wanted[kind]) for reason in failure.reasons), failure.reasons
    if kind == "halt":
        assert "its limit 1e-06 (learner.limits)" in result["halted"]
    else:
        assert result["metrics"]["updates_left_out"] == 1 and result["metrics"]["optimizer_steps"] == 0
        assert result["counts"] == FailureCounts(bad_in_a_row=1)
    if kind in ("norm", "half", "figure"):
        assert result["metrics"]["grad_norm"] == pytest.approx(result["reference"]["grad_norm"], rel=1e-6), "the true norm is reported"
        assert math.isfinite(failure.metrics["loss"])
    if kind in ("logprob", "advantage"):
        assert failure.metrics["loss"] is None and "loss" not in result["metrics"]


@pytest.mark.deepspeed
@pytest.mark.parametrize(("ranks", "name"), ROLLED_BACK)
def test_an_engine_restores_a_checkpoint_exactly(results: Results, ranks: int, name: str) -> None:
    result = results[ranks, name]
    assert _gap(result["resumed"], result["straight"]) == 0.0
    assert _gap(result["from_scratch"], result["first"]) == 0.0
    assert _gap(result["straight"], result["first"]) > 0.0


@pytest.mark.deepspeed
@pytest.mark.parametrize(("ranks", "name"), [(2, "undocritic-2"), (1, "undocritic-0")])
def test_a_critic_is_restored_with_its_policy(results: Results, ranks: int, name: str) -> None:
    result = results[ranks, name]
    assert _gap(result["first"], result["resumed"]) == 0.0
    assert result["base"]["head.weight"].abs().max() == 0.0 < result["first"]["head.weight"].abs().max()


def _part(step: int = 3) -> Batch:
    sample = Sample(
        **{"episode_id": "e", "group_index": 7, "token_ids": (1, 2), "loss_mask": (False, True)},
        **{"logprobs": (0.0, -1.0), "advantages": (0.0, 1.0), "versions": (-1, 3)},
    )
    return Batch(step=step, samples=(sample, sample), denominator=2, group_indices=(7, 8))


FINE = {"loss": 0.1, "kl_behaviour": 0.1, "entropy": 2.0, "ess": 0.9, "ratio_max": 1.5, "clip_fraction": 0.1, "grad_norm": 1.0}


@pytest.mark.parametrize(
    ("metric", "bound", "bad"),
    [
        *((metric, 0.5, 0.6) for metric in ("kl_behaviour", "kl_reference", "clip_fraction", "mismatch_kl")),
        *(("ratio_max", 5.0, 6.0), ("grad_norm", 5.0, 6.0), ("entropy", 0.5, 0.4), ("ess", 0.5, 0.4)),
    ],
)
def test_each_limit_checks_its_metric_at_its_bound(metric: Any, bound: float, bad: float) -> None:
    guard = UpdateGuard(LearnerConfig(limits=(Limit(metric=metric, at=bound),)))
    for metrics in (FINE, FINE | {metric: bound}):
        known = {key: value for key, value in metrics.items() if key != "grad_norm"}
        assert guard.largest_norm(known) == (bound if metric == "grad_norm" else math.inf)
    beyond = FINE | {metric: bad}
    if metric != "grad_norm":
        assert guard.largest_norm(beyond) < 0
    guard.record_policy_step(_part(), beyond, applied=False)
    (failure,) = guard.take_failures()
    assert failure.reasons == (f"{metric} {bad:g} is {'below' if bad < bound else 'above'} its limit {bound:g} (learner.limits)",)
    assert failure.episodes == ("e",) and failure.groups == (7, 8)
    assert guard.take_failures() == ()


def test_the_strictest_action_wins_and_rollbacks_are_limited() -> None:
    limits = (Limit(metric="kl_behaviour", at=0.5), Limit(metric="entropy", at=0.5, action="rollback"))
    guard = UpdateGuard(LearnerConfig(limits=limits))
    bad = FINE | {"kl_behaviour": 0.6, "entropy": 0.1}
    for rollbacks in range(MAX_ROLLBACKS):
        guard.begin_step()
        guard.record_policy_step(_part(), bad, applied=False)
        assert guard.rolling_back and not guard.start_weights_passed and len(guard.counts.rollbacks) == rollbacks + 1
    guard.begin_step()
    guard.record_policy_step(_part(4), FINE, applied=True)
    assert guard.start_weights_passed and not guard.rolling_back
    with pytest.raises(LearnerHalted, match=f"{MAX_ROLLBACKS} rollbacks occurred"):
        guard.record_policy_step(_part(5), bad, applied=False)
    assert [failure.action for failure in guard.take_failures()] == [*["rollback"] * MAX_ROLLBACKS, "halt"]


def test_setbacks_count_against_a_budget_for_a_limited_number_of_steps() -> None:
    """Rare setbacks never halt a run. Frequent ones do, after any number of good steps."""
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
    failures = tuple(
        UpdateFailure(step=step, action="skip", what="group", reasons=("x",), groups=(step,), episodes=("e",), metrics={"loss": None})
        for step in range(3)
    )
    log.append(failures[:2])
    log.append(failures[2:])
    log.append(())
    with log.path.open("ab") as file:
        file.write(b'{"step": 3')  # a killed process
    assert log.read() == failures
    assert log.read(1) == failures[1:2]
    log.remove_from(2)
    assert log.read() == failures[:2]
    log.append(failures[2:])
    assert log.read() == failures


def _off_policy_group(index: int) -> Group:
    """A group sampled by a policy that is far from the learner's."""
    turns = [turn([1, 2, 3], [4, 5, 6], [-0.01, -0.01, -0.01], version=index // 3) for _ in range(4)]
    episodes = tuple(scored(episode(f"g{index}-e{number}", [only]), float(number % 2)) for number, only in enumerate(turns))
    return Group(index=index, task_id=f"t{index}", task_key=f"k{index}", episodes=episodes)


def _renumbered(group: Group, index: int) -> Group:
    return Group(index=index, task_id=group.task_id, task_key=group.task_key, episodes=group.episodes)


async def _learn(make_learner: MakeLearner, run_dir: Path, recipe: Recipe, groups: list[Group] | None = None) -> FolderRegistry:
    """Runs a learner until it ends; without `groups` it resumes in the existing run folder."""
    if groups is None:
        (run_dir / "recipe.json").write_text(recipe.model_dump_json())
    else:
        write_run(run_dir, recipe, groups)
    learner = make_learner(run_dir, recipe)
    await learner.start()
    try:
        await learner.wait(timeout_s=600)
    finally:
        await learner.kill()
    return FolderRegistry(run_dir / "versions")


def _limited_recipe(ranks: int, steps: int = 4, action: str = "rollback") -> Recipe:
    limits = [{"metric": "kl_behaviour", "at": 1.0, "action": action}]
    learner = {"ranks": ranks, "limits": limits, "warmup_steps": 3, "keep_checkpoints": 1}
    return build_recipe(learner=learner).model_copy(update={"steps": steps})


@pytest.mark.deepspeed
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_rollback_restores_the_last_good_weights(tmp_path: Path, host: Path, make_learner: MakeLearner, ranks: int) -> None:
    """The groups of step 2 exceed the limit: version 2 is rolled back, version 3 is version 1 again, and step 3 equals a step 1 with its
    groups bit for bit, in weights, moments and learning rate. The same if the learner is killed right after."""
    groups = [random_group(index) for index in range(12)]
    with_rollback = [*groups[:6], *(_off_policy_group(index) for index in range(6, 9)), *groups[9:]]
    without = [*groups[:3], *(_renumbered(groups[9 + n], 3 + n) for n in range(3))]
    run_dir, recipe = tmp_path / "rolled", _limited_recipe(ranks)
    if ranks == 1:
        write_run(run_dir, recipe, with_rollback)
        command = preloaded.command(host, 1, "tests.learner.crash", "publish-3", "--run-dir", str(run_dir))
        result = subprocess.run(command, capture_output=True, timeout=600, check=False)
        assert result.returncode != 0
        registry = FolderRegistry(run_dir / "versions")
        assert registry.get(3) is None and registry.get(2).state is VersionState.CANDIDATE  # type: ignore[union-attr]
        await _learn(make_learner, run_dir, recipe)
    else:
        registry = await _learn(make_learner, run_dir, recipe, with_rollback)
    undisturbed = await _learn(make_learner, tmp_path / "calm", _limited_recipe(ranks, 2), without)

    versions = registry.versions()
    assert [(version.number, version.parent) for version in versions] == [(0, None), (1, 0), (2, 1), (3, 1), (4, 3)]
    assert [version.number for version in versions if version.state is VersionState.ROLLED_BACK] == [2]
    assert versions[3].sha256 == versions[1].sha256 != versions[2].sha256
    assert versions[4].sha256 == undisturbed.versions()[2].sha256
    (failure,) = UpdateFailureLog(run_dir).read()
    assert (failure.step, failure.action, failure.groups) == (2, "rollback", (6, 7, 8))
    assert len(failure.episodes) == 12
    store = SqliteStore(run_dir / "experience.sqlite")
    assert consumed(store) == {index: index // 3 for index in range(12)}
    store.close()


@pytest.mark.deepspeed
async def test_unchanged_weights_stay_good(tmp_path: Path, make_learner: MakeLearner) -> None:
    """Step 0 has no preference, so version 1 equals the base and a rollback in step 1 has nothing to undo."""
    groups = [*(random_group(index, scores=[1.0] * 4) for index in range(3)), *(_off_policy_group(index) for index in range(3, 6))]
    versions = (await _learn(make_learner, tmp_path, _limited_recipe(1, 2), groups)).versions()
    assert [(version.number, version.parent) for version in versions] == [(0, None), (1, 0), (2, 1)]
    assert versions[1].sha256 == versions[2].sha256
    assert all(version.state is VersionState.CANDIDATE for version in versions)


@pytest.mark.deepspeed
async def test_delta_versions_equal_full_versions(tmp_path: Path, make_learner: MakeLearner) -> None:
    steps = FULL_EVERY + 2
    groups = [random_group(index) for index in range(3 * steps)]
    delta = build_recipe(learner={"lr": 1e-7, "keep_versions": 2}, serving={"weight_transfer": "delta"}).but(steps=steps)
    plain = build_recipe(learner={"lr": 1e-7}).but(steps=steps)
    registry = await _learn(make_learner, tmp_path / "deltas", delta, groups)
    full_registry = await _learn(make_learner, tmp_path / "whole", plain, groups)
    assert [version.sha256 for version in registry.versions()] == [version.sha256 for version in full_registry.versions()]
    folders = [registry.path(version) for version in registry.versions()]
    assert [folder.name for folder in folders if (folder / "model.safetensors").exists()] == ["000000", f"{FULL_EVERY:06d}"]
    assert [folder for folder in folders if (folder / "model.delta").exists()] == folders[-2:]
    for version in registry.versions()[FULL_EVERY:]:
        registry.verify(version)
    sizes = [sum(path.stat().st_size for path in folder.glob("model.*")) for folder in folders]
    assert sizes[steps] < 0.5 * sizes[FULL_EVERY]
    (folders[steps].parent / deltas.NEWEST_WEIGHTS).unlink()
    assert sha256_file(deltas.materialize(folders[steps])) == full_registry.versions()[steps].sha256


@pytest.mark.deepspeed
async def test_a_halt_stops_the_run_and_other_limits_let_it_resume(tmp_path: Path, make_learner: MakeLearner) -> None:
    groups = [*(random_group(index) for index in range(3)), *(_off_policy_group(index) for index in range(3, 6))]
    recipe = _limited_recipe(1, 2, "halt")
    with pytest.raises(LearnerHalted, match=r"step 1: kl_behaviour .* is above its limit 1 \(learner\.limits\)"):
        await _learn(make_learner, tmp_path, recipe, groups)
    registry, store = FolderRegistry(tmp_path / "versions"), SqliteStore(tmp_path / "experience.sqlite")
    assert registry.get(1) is not None and registry.get(2) is None
    assert consumed(store) == {0: 0, 1: 0, 2: 0}
    assert [(failure.step, failure.action) for failure in UpdateFailureLog(tmp_path).read()] == [(1, "halt")]

    recipe = _limited_recipe(1, 2, "skip")
    await _learn(make_learner, tmp_path, recipe)
    assert [(failure.step, failure.action) for failure in UpdateFailureLog(tmp_path).read()] == [(1, "skip")]
    first, second = registry.get(1), registry.get(2)
    assert first is not None and second is not None and first.sha256 == second.sha256, "a skipped step publishes its parent"
    assert consumed(store) == {index: index // 3 for index in range(6)}
    store.close()


@pytest.mark.deepspeed
async def test_non_finite_numbers_exclude_their_group_until_there_are_too_many(tmp_path: Path, make_learner: MakeLearner) -> None:
    """An infinite reward, an infinite logprob and scores too large to square, through the real store, on two ranks."""
    steps = MAX_BAD_GROUPS // 3 + 1
    groups = [random_group(index, scores=[math.inf, 0.0, 1.0, 0.0]) for index in range(3 * steps)]
    groups[0] = random_group(0)
    broken = [turn([1, 2], [3, 4], [-math.inf, -1.0]) for _ in range(4)]
    episodes = tuple(scored(episode(f"b{number}", [only]), float(number % 2)) for number, only in enumerate(broken))
    groups[2] = Group(index=2, task_id="t", task_key="k", episodes=episodes)
    groups[3] = random_group(3, scores=[1e300, -1e300, 0.0, 0.0])
    recipe = build_recipe(learner={"ranks": 2}).but(steps=steps)
    for _ in range(2):  # the second run resumes the last checkpoint
        with pytest.raises(LearnerHalted, match=f"{MAX_BAD_GROUPS + 1} groups were excluded"):
            await _learn(make_learner, tmp_path, recipe, None if (tmp_path / "versions").exists() else groups)
        failures = UpdateFailureLog(tmp_path).read()
        assert [failure.groups for failure in failures] == [(index,) for index in range(1, 3 * steps)], "each is logged once"
    assert [failure.reasons[0].split()[0] for failure in failures[:3]] == ["non_finite_score", "non_finite_logprob", "non_finite_advantage"]
    registry = FolderRegistry(tmp_path / "versions")
    base, first = registry.get(0), registry.get(1)
    assert base is not None and first is not None and base.sha256 != first.sha256, "the other groups were trained"
