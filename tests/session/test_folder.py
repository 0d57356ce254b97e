"""The folder of a run, the comparison of a resumed recipe with the recorded one, and the command that resumes a run."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.base.run_lock import DRIVER
from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.config.section import Section, named_section_of, resumable_keys, section_of
from agentrl.errors import RecipeError, UserError
from agentrl.observe import Summary
from agentrl.observe.summary import read_sessions, record_end
from agentrl.session.folder import (
    RunStart,
    check_links,
    check_resumed_recipe,
    claim_run_folder,
    finished_summary,
    merge_overrides,
    recorded_overrides,
    write_start,
)

RECIPE = Recipe(name="x", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"))


def folder_for(runs: Path, *, resume: bool = False, requested: Path | None = None) -> Path:
    with claim_run_folder(requested, runs, "q", resume=resume, command="test") as folder:
        return folder


def hold_run(folder: Path, overrides: Sequence[str] = (), recipe: Recipe = RECIPE) -> RunStart:
    start = RunStart(recipe=Path("recipes/mine.py"), folder=folder, overrides=tuple(overrides))
    write_start(folder, recipe.but(*overrides), start)
    return start


def test_a_new_run_gets_the_first_free_folder_and_resume_the_last_run(tmp_path: Path) -> None:
    assert folder_for(tmp_path) == tmp_path / "q"
    for name in ("q", "q-2"):
        hold_run(tmp_path / name)
    assert folder_for(tmp_path) == tmp_path / "q-3"
    (tmp_path / "q-3").mkdir()
    (tmp_path / "q-3" / DRIVER).write_text("")  # from a run that was stopped before its start
    assert folder_for(tmp_path, resume=True) == tmp_path / "q-2"
    assert folder_for(tmp_path) == tmp_path / "q-3"


def test_a_run_is_finished_only_under_its_own_recipe(tmp_path: Path) -> None:
    """Otherwise `--resume` would start a server, evaluate and export everything again."""
    hold_run(tmp_path)
    assert finished_summary(tmp_path, RECIPE) is None, "the driver was killed"
    record_end(tmp_path, "finished")
    assert finished_summary(tmp_path, RECIPE) is None, "there is no summary"
    summary = Summary(
        name="x", finished=True, steps=1, episodes=1, episodes_left_out=0, tokens_trained=1, weight_swaps=1, sandbox_backend="b", seed=0
    )
    summary.write(tmp_path)
    assert finished_summary(tmp_path, RECIPE) == summary
    further = RECIPE.but({"steps": RECIPE.steps + 1})
    assert finished_summary(tmp_path, further) is None, "more steps are requested"
    hold_run(tmp_path, recipe=further)
    assert finished_summary(tmp_path, further) is None, "this start has not ended yet"
    record_end(tmp_path, "failed", why="no model")
    assert finished_summary(tmp_path, further) is None and finished_summary(tmp_path, RECIPE) is None
    assert [session.ended for session in read_sessions(tmp_path)] == ["finished", "failed"]


def test_a_run_folder_is_not_reused_by_accident(tmp_path: Path) -> None:
    hold_run(tmp_path / "run")
    with pytest.raises(UserError, match="already contains a run") as error:
        folder_for(tmp_path, requested=tmp_path / "run")
    assert "--resume" in error.value.fix
    assert folder_for(tmp_path, requested=tmp_path / "run", resume=True) == tmp_path / "run"


def test_resume_needs_a_run_and_creates_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run to resume"):
        folder_for(tmp_path, requested=tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no run to resume"):
        folder_for(tmp_path, requested=tmp_path / "empty", resume=True)


def test_a_resumed_run_repeats_its_overrides_and_reports_changes(tmp_path: Path) -> None:
    hold_run(tmp_path, ["steps=24", "learner.lr=1e-3", "critic={}", "objective.advantage=gae"])
    before = recorded_overrides(tmp_path)
    assert check_resumed_recipe(tmp_path, RECIPE.but(*before)) == []
    longer = merge_overrides(before, ["steps=30", "learner.ranks=2"])
    assert check_resumed_recipe(tmp_path, RECIPE.but(*longer)) == ["steps 24 -> 30", "learner.ranks 1 -> 2"]
    with pytest.raises(RecipeError, match=r"differs from the run's: learner\.lr 0\.001 -> 0\.002") as error:
        check_resumed_recipe(tmp_path, RECIPE.but(*merge_overrides(before, ["learner.lr=2e-3"])))
    assert "steps" in error.value.fix and "docs/" not in str(error.value)


def test_a_damaged_start_record_is_reported(tmp_path: Path) -> None:
    assert recorded_overrides(tmp_path) == ()
    for text in ("{", "[" * 100_000):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(UserError, match=r"run\.json is damaged"):
            recorded_overrides(tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "failures/faults.jsonl", "logs/driver.log"])
def test_a_run_folder_with_links_to_files_is_not_driven(tmp_path: Path, name: str) -> None:
    folder, victim = tmp_path / "run", tmp_path / "victim"
    hold_run(folder, [])
    victim.write_text("text without a line break")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(victim)
    (tmp_path / "disk").mkdir()
    (folder / "moved").symlink_to(tmp_path / "disk")  # a folder on a different disk
    with (
        pytest.raises(UserError, match=rf"{name} is a symbolic link, and agentrl could write to .*victim") as caught,
        claim_run_folder(folder, tmp_path, "x", resume=True, command="c"),
    ):
        pass
    assert caught.value.fix == "replace it with a copy of the file" and victim.read_text() == "text without a line break"
    (folder / name).unlink()
    (tmp_path / "loop").symlink_to("loop")
    (folder / name).symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="is a symbolic link"), claim_run_folder(folder, tmp_path, "x", resume=True, command="c"):
        pass
    (folder / name).unlink()
    with claim_run_folder(folder, tmp_path, "x", resume=True, command="c"):
        pass


def test_a_hard_linked_copy_of_a_run_is_continued_without_changing_the_original(tmp_path: Path) -> None:
    run, copy, victim = tmp_path / "run", tmp_path / "copy", tmp_path / "victim"
    hold_run(run)
    changed = ["metrics.jsonl", "experience.sqlite", "experience.sqlite-wal", "logs/driver.log", "failures/traces.sqlite", "events/.lock"]
    for name in [*changed, "model/model.safetensors", "model/policy.safetensors"]:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("original")
    (run / "failures" / "traces.sqlite").chmod(0o600)
    for name in ("metrics.jsonl", "experience.sqlite", "experience.sqlite-wal"):  # left by a driver that was killed while it copied
        (run / f".{name}.part").write_text("")
    shutil.copytree(run, copy, copy_function=os.link)
    (copy / ".metrics.jsonl.part").unlink()
    copy.chmod(0o755)
    victim.write_text("mine")
    (copy / ".metrics.jsonl.part").hardlink_to(victim)
    with (
        claim_run_folder(copy, tmp_path, "x", resume=True, command="c"),
        claim_run_folder(run, tmp_path, "x", resume=True, command="c"),
    ):
        for name in changed:
            with (copy / name).open("a") as file:
                file.write(", changed")
            assert (copy / name).read_text() == "original, changed" and (run / name).read_text() == "original"
        assert (copy / "model" / "model.safetensors").samefile(run / "model" / "model.safetensors"), "weights are never changed in place"
    assert victim.read_text() == "mine"
    assert (copy / "failures" / "traces.sqlite").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["loop", "a" * 300])
def test_a_folder_that_cannot_exist_contains_no_links(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    check_links(tmp_path / name)


def test_links_of_trackers_and_folders_of_others_do_not_prevent_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    hold_run(folder, [])
    for name in ("wandb", "lost+found"):
        (folder / name).mkdir()
    (folder / "wandb" / "debug.log").symlink_to(tmp_path / "before-it-was-moved" / "wandb" / "run-1" / "logs" / "debug.log")
    (folder / "logs" / "newest.log").symlink_to(folder / "logs" / "driver.log")
    scan, may_enter = os.scandir, False

    def scan_own(path: Any) -> Any:
        if Path(path).name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_own)
    monkeypatch.setattr(os, "access", lambda path, mode: may_enter)
    with claim_run_folder(folder, tmp_path, "x", resume=True, command="c"):
        pass
    may_enter = True
    with (
        pytest.raises(UserError, match=r"lost\+found cannot be read: Permission denied"),
        claim_run_folder(folder, tmp_path, "x", resume=True, command="c"),
    ):
        pass


HARD = ['tasks.family.options={"a b": "it\'s $HOME"}', "policy.model=./my model", "name=a;b", "steps=3", "sandbox.backend=bubblewrap"]


def test_the_recorded_resume_command_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell splits it into the given arguments plus --resume."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/agentrl", "train"])
    start = RunStart(recipe=Path("my recipes/r.py"), folder=tmp_path / "a run", overrides=tuple(HARD))
    arguments = shlex.split(start.command(resume=True))
    assert arguments == ["/somewhere/bin/agentrl", "train", "my recipes/r.py", *HARD[:4], "--run-dir", str(tmp_path / "a run"),
                     "--sandbox", "bubblewrap", "--resume"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["recipes/mine.py"])
    assert shlex.split(start.command())[:4] == [sys.executable, "-m", "agentrl", "train"]
    record = json.loads((hold_run(tmp_path / "kept", ["steps=3"]).folder / "run.json").read_text())
    assert record["resume"].endswith(f"train recipes/mine.py steps=3 --run-dir {tmp_path}/kept --resume")


KEYS = st.sampled_from(["steps", "learner.lr", "critic", "critic.lam", "critic.gamma", "objective.advantage", "learner.limits"])
VALUES = {
    "steps": ["1", "7"],
    "learner.lr": ["1e-3", "0.5"],
    "critic": ["{}", '{"lam": 0.5}'],
    "critic.lam": ["0.25", "1"],
    "critic.gamma": ["0.5", "1"],
    "objective.advantage": ["gae"],
    "learner.limits": ['[{"metric": "kl_behaviour", "at": 1}]', "[]"],
}
OVERRIDES = st.lists(KEYS.flatmap(lambda key: st.sampled_from([f"{key}={value}" for value in VALUES[key]])), max_size=6)


@given(OVERRIDES, OVERRIDES)
def test_merged_overrides_equal_both_in_sequence(earlier: list[str], later: list[str]) -> None:
    frame = ["objective.advantage=gae", "critic={}"]
    one_by_one = RECIPE.but(*frame, *earlier, *later)
    assert RECIPE.but(*merge_overrides([*frame, *earlier], later)) == one_by_one
    assert merge_overrides(merge_overrides(earlier, later), later) == merge_overrides(earlier, later)


def leaves(kind: type[Section], prefix: str = "") -> Iterator[str]:
    """Every key with a value; named sections have the name `x`."""
    for name, field in kind.model_fields.items():
        inner, several = section_of(field.annotation), named_section_of(field.annotation)
        if inner is not None or several is not None:
            yield from leaves(inner or several, f"{prefix}{name}." if inner else f"{prefix}{name}.x.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{name}"


DECIDES = (
    *("name", "seed", "max_staleness", "pipeline_depth", "order", "device", "store"),
    *("policy.*", "tasks.*", "mcp.*", "tools.*", "memory.*", "objective.*", "critic.*"),
    *("learner.lr", "learner.warmup_steps", "learner.lr_schedule", "learner.weight_decay", "learner.max_grad_norm", "learner.lora.*"),
    *("learner.minibatches", "learner.kernels", "learner.offload"),
    *("judge_servers.x.model", "judge_servers.x.dtype", "judge_servers.x.max_model_len"),
    *("rollout.agent", "rollout.delegation.*", "rollout.compaction", "rollout.instructions"),
    *("rollout.group.*", "rollout.groups_per_step", "rollout.extra_groups", "rollout.sampling.*"),
)
"""Keys that decide what is sampled, judged or learned, or what a checkpoint holds. A new key is put here, or declared `resumable`."""


def test_every_key_is_either_resumable_or_decides_what_a_run_learns() -> None:
    resumable = resumable_keys(Recipe)
    for key in leaves(Recipe):
        is_resumable = any(fnmatchcase(key, pattern) for pattern in resumable)
        decides = any(fnmatchcase(key, pattern) for pattern in DECIDES)
        assert is_resumable != decides, f"{key}: is it resumable ({is_resumable}), or does it decide what a run learns ({decides})?"


def test_settings_against_a_slow_server_may_change_on_resume(tmp_path: Path) -> None:
    hold_run(tmp_path)
    faster = ["serving.threads=2", "rollout.concurrency=8", "serving.request_timeout_s=300", "rollout.checkpoint_turns=true"]
    assert len(check_resumed_recipe(tmp_path, RECIPE.but(*faster))) == 4
    with pytest.raises(RecipeError, match=r"rollout\.sampling\.temperature 1\.0 -> 0\.5") as error:
        check_resumed_recipe(tmp_path, RECIPE.but(*faster, "rollout.sampling.temperature=0.5"))
    assert "rollout.concurrency" in error.value.fix and "serving.*" in error.value.fix


def test_judge_servers_may_get_more_resources_but_not_other_weights(tmp_path: Path) -> None:
    recipe = RECIPE.but('judge_servers.small={"model": "m"}')
    hold_run(tmp_path, recipe=recipe)
    assert check_resumed_recipe(tmp_path, recipe.but("judge_servers.small.threads=2")) == ["judge_servers.small.threads 1 -> 2"]
    with pytest.raises(RecipeError, match=r"judge_servers\.small\.model"):
        check_resumed_recipe(tmp_path, recipe.but("judge_servers.small.model=other"))
