"""The command line lists, compares, promotes, pins and rolls back versions of a run, on real folders."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import save_file
from typer.testing import CliRunner

from agentrl.base.files import MANIFEST, folder_manifest, sha256_file
from agentrl.base.run_lock import drive_folder
from agentrl.cli import app
from agentrl.config import Recipe, build
from agentrl.errors import StoreError, UserError
from agentrl.evaluation.splits import SplitEvaluation
from agentrl.observe import Rate
from agentrl.records import PolicyVersion, Split, VersionState
from agentrl.session import measure
from agentrl.session.versions import held_out_scores, lineage
from agentrl.version import FolderRegistry, rollback


def recipe(**changes: object) -> Recipe:
    data = {"name": "test", "steps": 4, "policy": {"model": "base"}, "tasks": {"family": "sandboxes.tables:Tables"}}
    return build({**data, "evaluation": {"heldout": 4}, **changes})


def publish(run: Path, number: int, *, parent: int | None = None, value: float | None = None) -> PolicyVersion:
    folder = run / "versions" / f"{number:06d}"
    folder.mkdir(parents=True)
    save_file({"w": np.full(8, number if value is None else value, "<f4"), "same": np.ones(3, "<f4")}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    parent = (number - 1 if number else None) if parent is None else parent
    version = PolicyVersion(number=number, parent=parent, folder=f"versions/{number:06d}", sha256=sha256_file(folder / "model.safetensors"))
    FolderRegistry(run / "versions").add(version)
    return version


def checkpoint(run: Path, number: int) -> None:
    folder = run / "checkpoints" / f"{number:06d}"
    folder.mkdir(parents=True)
    (folder / "state").write_bytes(b"optimizer")
    (folder / MANIFEST).write_text(json.dumps(folder_manifest(folder)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four versions after version 0, with checkpoints of the last three."""
    folder = tmp_path / "run"
    for number in range(5):
        publish(folder, number)
    for number in (2, 3, 4):
        checkpoint(folder, number)
    (folder / "recipe.json").write_text(recipe().model_dump_json())
    FolderRegistry(folder / "versions").set_state(4, VersionState.SERVING)
    return folder


def run_command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["versions", *map(str, arguments)], catch_exceptions=True)


def output_of(*arguments: object) -> str:
    result = run_command(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def error_of(*arguments: object) -> str:
    result = run_command(*arguments)
    assert isinstance(result.exception, UserError | StoreError), (result.output, result.exception)
    return str(result.exception)


def evaluate(run: Path, phase: str, number: int, scores: list[float]) -> None:
    """Records an evaluation of a version as a run does."""
    version = FolderRegistry(run / "versions").get(number)
    evaluation = SplitEvaluation(
        rate=Rate.from_scores(scores),
        by_kind={},
        attempts=1,
        episodes=len(scores),
        excluded=0,
        excluded_reasons={},
        tokens_mean=None,
        pass_at={},
        compute=(),
        transcripts=(),
    )
    measure.save_evaluation(run, phase, {Split.HELDOUT: evaluation}, of=measure.evaluation_key(recipe().evaluation, version.sha256))
    lines = [{"task_id": f"t{index}", "split": "heldout", "score": score, "left_out": False} for index, score in enumerate(scores)]
    (run / "episodes").mkdir(exist_ok=True)
    (run / "episodes" / f"{phase}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_list_shows_what_the_run_records(run: Path) -> None:
    evaluate(run, "step2", 2, [1.0, 0.0, 1.0, 1.0])
    metrics = {"step": 2, "episodes": 8, "staleness_mean": 1.25, "staleness_max": 3, "reward_mean": None}
    (run / "metrics.jsonl").write_text(json.dumps(metrics) + "\nnot json\n")
    output_of("pin", run, 2)
    publish(run, 5, parent=2, value=2)
    listed = json.loads(output_of("list", run, "--json"))
    assert [version["number"] for version in listed] == [0, 1, 2, 3, 4, 5]
    two, five = listed[2], listed[5]
    assert two["held_out"]["heldout"]["value"] == 0.75 and two["held_out"]["heldout"]["ci_low"] < 0.75 and two["phase"] == "step2"
    assert five["held_out"] == two["held_out"], "equal weights have the same evaluation"
    assert (two["pinned"], two["checkpoint_bytes"] > 0, listed[1]["checkpoint_bytes"]) == (True, True, None)
    folder = run / "versions" / "000002"
    assert two["weights_bytes"] == sum(path.stat().st_size for path in folder.iterdir() if path.name != "version.json")
    rows = output_of("list", run).splitlines()
    assert rows[3].split()[:3] == ["*2", "1", "candidate"] and "1.2 to 3" in rows[3] and "heldout 0.750 [0.3" in rows[3]
    assert "restored from version 2" in rows[6]


def test_the_difference_of_two_versions(run: Path) -> None:
    evaluate(run, "step1", 1, [1.0] * 8 + [0.0])
    evaluate(run, "after", 4, [0.0] * 8 + [1.0])
    metrics = [{"step": step, "episodes": 8, "tokens_trained": 100 * step, "entropy": 1 / step} for step in range(1, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    difference = json.loads(output_of("diff", run, 1, 4, "--json"))
    assert (difference["common"], difference["only_after"], difference["totals"]["tokens_trained"]) == (1, [2, 3, 4], 900)
    tensors = {tensor["name"]: tensor for tensor in difference["tensors"]}
    assert tensors["w"]["difference"] == pytest.approx(3 * 8**0.5) and tensors["w"]["relative"] == pytest.approx(3.0)
    assert tensors["same"]["changed"] == 0
    (evaluation,) = difference["evaluations"]
    assert evaluation["comparison"]["verdict"] == "worse" and evaluation["comparison"]["p_value"] == pytest.approx(0.0390625)
    assert evaluation["comparison"]["lost"] == [f"heldout/t{index}" for index in range(8)]
    assert evaluation["comparison"]["gained"] == ["heldout/t8"]
    output = output_of("diff", run, 1, 4)
    assert "1 of 2 tensors changed" in output and "effect -77.8 points  95% interval [" in output and "higher: heldout/t8" in output
    assert "no recorded evaluation includes both" in output_of("diff", run, 0, 4)
    assert output_of("diff", run, 2, 1).startswith("version 2 continues from version 1 with 1 step\n")


def test_versions_on_two_branches_have_a_common_ancestor() -> None:
    parents = [None, 0, 1, 2, 1, 4, 5]
    numbered = [PolicyVersion(number=number, parent=parent, folder="f", sha256="") for number, parent in enumerate(parents)]
    assert lineage(numbered, 3, 6) == (1, (2, 3), (4, 5, 6))
    assert lineage(numbered, 1, 6) == (1, (), (4, 5, 6))
    assert lineage(numbered, 6, 0) == (0, (1, 4, 5, 6), ())


def test_a_rollback_is_requested_and_withdrawn(run: Path) -> None:
    registry = FolderRegistry(run / "versions")
    (run / "run.json").write_text(json.dumps({"overrides": [], "resume": "agentrl train x.py --resume"}))
    output = output_of("rollback", run, 2)
    assert "back to version 2, undoing 3, 4" in output and "continue with: agentrl train x.py --resume steps=N" in output
    request = rollback.pending_request(run / "versions", registry)
    assert (request.version, request.to, request.by_user) == (4, 2, True)
    assert "replaces the requested rollback to version 2" in output_of("rollback", run, 3)
    with drive_folder(run, command="agentrl train"):
        assert "when the run has ended, continue with" in output_of("rollback", run, 2)
        (run / "recipe.json").write_text(recipe(steps=9).model_dump_json())
        assert "performs it at its next step" in output_of("rollback", run, 2)
    assert "to version 2 is cancelled" in output_of("rollback", run, "--cancel")
    assert rollback.pending_request(run / "versions", registry) is None
    assert "no pending rollback" in error_of("rollback", run, "--cancel")


def test_a_rollback_without_an_intact_checkpoint_is_an_error_and_leaves_no_request(run: Path) -> None:
    registry = FolderRegistry(run / "versions")
    assert "no intact checkpoint" in (error := error_of("rollback", run, 1)) and "checkpoint: 2, 3, 4" in error
    (run / "checkpoints" / "000002" / "state").write_bytes(b"damaged")
    assert "checkpoint: 3, 4" in error_of("rollback", run, 2)
    assert rollback.read_request(run / "versions") is None
    output_of("rollback", run, 3)
    error_of("rollback", run, 2)
    assert rollback.pending_request(run / "versions", registry).to == 3, "the earlier request stays"
    assert "has no version 7" in (error := error_of("rollback", run, 7)) and "0 to 4" in error
    assert "has the weights of version 4" in error_of("rollback", run, 4)
    registry.set_state(3, VersionState.ROLLED_BACK)
    assert "was rolled back and cannot serve again" in error_of("rollback", run, 3)
    assert "has no versions" in error_of("rollback", run.parent, 1)
    (run / "versions" / "000003" / "version.json").write_text("{")
    assert "000003/version.json is not a policy version" in error_of("rollback", run, 2)


def test_a_promoted_version_is_exported_unless_the_run_is_active(run: Path) -> None:
    registry = FolderRegistry(run / "versions")
    assert f"version 3 is promoted and exported to {run / 'model'}" in output_of("promote", run, 3)
    assert sha256_file(run / "model" / "model.safetensors") == registry.get(3).sha256
    assert registry.get(3).state is VersionState.PROMOTED
    promoted = output_of("promote", run, 2)
    assert "version 3 is also promoted, and is newer" in promoted and f"agentrl versions rollback {run} 2\n" in promoted
    assert sha256_file(run / "model" / "model.safetensors") == registry.get(2).sha256
    with drive_folder(run, command="agentrl train"):
        assert "has no gate, so its result is its last version" in error_of("promote", run, 4)
    gated = recipe(gate={"suite": "evals/x"})
    (run / "recipe.json").write_text(gated.model_dump_json())
    with drive_folder(run, command="agentrl train"):
        assert output_of("promote", run, 4) == "version 4 is promoted\n"
        publish(run, 5)
        checkpoint(run, 5)
        assert "has not served yet" in error_of("promote", run, 5)
    assert "no intact checkpoint, so the gate could not roll back to it" in error_of("promote", run, 1)


def test_versions_that_cannot_be_promoted(run: Path) -> None:
    registry = FolderRegistry(run / "versions")
    weights = run / "versions" / "000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert "differs from the registered file" in error_of("promote", run, 3)
    registry.prune(keep=1)
    assert "the weights of version 1" in error_of("promote", run, 1)
    registry.set_state(2, VersionState.ROLLED_BACK)
    assert "cannot serve again" in error_of("promote", run, 2)
    assert not (run / "model").exists() and registry.get(1).state is VersionState.CANDIDATE


def test_pinned_versions_are_kept_and_deleted_weights_cannot_be_pinned(run: Path) -> None:
    registry = FolderRegistry(run / "versions")
    assert "its checkpoint was deleted, so the run cannot return to it" in output_of("pin", run, 1)
    registry.prune(keep=1)
    registry.verify(registry.get(1))
    assert "the weights of version 2" in error_of("pin", run, 2)
    assert registry.pinned() == {1}
    output_of("unpin", run, 1)
    assert registry.pinned() == set() and registry.prune(keep=1) == (1,)
    assert "has no version 9" in error_of("pin", run, 9)
    assert "the weights of version 2 of" in error_of("diff", run, 2, 4)


def test_a_list_is_read_while_versions_are_published_and_pruned(run: Path) -> None:
    """Every list shows a state that existed, with consecutive numbers. A folder that disappears does not cause an error."""
    registry, ended = FolderRegistry(run / "versions"), threading.Event()

    def churn() -> None:
        for number in range(5, 40):
            publish(run, number)
            registry.prune(keep=2)
            shutil.rmtree(run / "checkpoints" / f"{number - 3:06d}", ignore_errors=True)
        ended.set()

    thread = threading.Thread(target=churn)
    thread.start()
    while not ended.is_set():
        versions = json.loads(output_of("list", run, "--json"))
        assert [version["number"] for version in versions] == list(range(len(versions))) and len(versions) >= 5
    thread.join()


@pytest.mark.parametrize("name", ["versions/.lock", "versions/pinned", "task_changes.jsonl", "labels/me.jsonl"])
@pytest.mark.parametrize(
    "command",
    [
        *(["versions", verb, "{run}"] for verb in ("list", "league")),
        *(["versions", verb, "{run}", "3"] for verb in ("pin", "unpin", "promote", "rollback")),
        ["versions", "diff", "{run}", "2", "3"],
        ["tasks", "remove", "{run}", "total"],
        ["label", "{run}", "--by", "me"],
        *([name, "{run}"] for name in ("store", "report", "memory")),
    ],
    ids=" ".join,
)
def test_no_command_writes_through_a_link_in_a_run_folder(name: str, command: list[str], run: Path, tmp_path: Path) -> None:
    """A third party may have written the folder."""
    for link, victim in ((run / name, tmp_path / "victim"), (run / "moved", tmp_path)):  # a folder may be on a different disk
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
    for content in (None, "text without a line break"):
        if content is not None:
            (tmp_path / "victim").write_text(content)
        result = CliRunner().invoke(app, [argument.format(run=run) for argument in command])
        assert isinstance(result.exception, UserError) and f"{name} is a symbolic link" in str(result.exception), result.output
        assert (content is None and not (tmp_path / "victim").exists()) or (tmp_path / "victim").read_text() == content
    (run / name).unlink()
    assert run_command("list", run).exit_code == 0


def test_a_held_out_evaluation_is_read_only_from_the_run_folder(tmp_path: Path) -> None:
    line = {"task_id": "a", "split": "heldout", "score": 1.0}
    for path in (tmp_path / "run" / "episodes" / "after.jsonl", tmp_path / "private.jsonl"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{json.dumps(line)}\n")
    assert held_out_scores(tmp_path / "run", "after") == {"heldout/a": [1.0]}
    assert held_out_scores(tmp_path / "run", "../../private") == {}
