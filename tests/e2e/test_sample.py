"""`agentrl sample` with a real server and real sandboxes: a run folder that grows, and that other commands read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.experience import SqliteStore
from agentrl.files import read_json_lines

from .conftest import agentrl

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.bubblewrap]

RECIPE = "recipes/quickstart.py"
SANDBOX = ("--sandbox", "bubblewrap")


@pytest.mark.usefixtures("nothing_left")
def test_attempts_are_sampled_kept_and_added_to(tmp_path: Path, forked: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    code, output = agentrl("sample", RECIPE, "rollout.group_size=4", "--groups", "3", "--run-dir", str(run), *SANDBOX, by=forked)
    assert code == 0, output[-4000:]
    assert "sample  3 groups of 4" in output and f"folder {run}  (3 groups of 4)" in output and "Traceback" not in output
    first = stored(run)
    assert sorted(first) == [0, 1, 2] and not list((run / "checkpoints").iterdir()) and not (run / "model").exists()

    code, output = agentrl("sample", RECIPE, "--resume", "--groups", "4", "--run-dir", str(run), "--json", *SANDBOX, by=forked)
    assert code == 0, output[-4000:]
    assert "resuming with rollout.groups_per_step 3 -> 4" in output
    found = json.loads(output.splitlines()[-1])
    assert found["groups"] == 4 and found["all"]["attempts"] + found["all"]["left_out"] == 16
    then = stored(run)
    assert sorted(then) == [0, 1, 2, 3] and all(then[index] == group for index, group in first.items())
    assert len(read_json_lines(run / "episodes" / "train.jsonl")) == 16

    code, output = agentrl("sample", RECIPE, "--resume", "--run-dir", str(run), *SANDBOX)
    assert code == 0 and "server" not in output, "with nothing to make, nothing is started"
    assert "(4 groups of 4)" in output and stored(run) == then

    for verb, other in (("train", "sample"), ("sample", "train")):
        folder = run if verb == "train" else tmp_path / "trained"
        if verb == "sample":
            folder.mkdir()
            (folder / "recipe.json").write_text((run / "recipe.json").read_text())
            (folder / "run.json").write_text(json.dumps({"verb": "train", "overrides": []}))
        code, output = agentrl(verb, RECIPE, "--resume", "--run-dir", str(folder), *SANDBOX)
        assert code == 2 and f"holds what `agentrl {other}` made" in output.replace("\n", " "), output

    code, output = agentrl("tune", "dpo", str(run), "--out", str(run / "versions" / "000000"))
    assert code == 2 and "is there already" in output, "the folder is taken for a run"
    code, output = agentrl("failures", "list", str(run))
    assert code == 0, output
    code, output = agentrl("report", str(run))
    assert code == 0 and (run / "report.html").exists(), output


def stored(run: Path) -> dict[int, object]:
    store = SqliteStore(run / "experience.sqlite")
    try:
        return {index: store.groups([index])[0] for index in store.indices()}
    finally:
        store.close()
