"""The benchmark of splitting, without training: what counts as split, which runs resume, and the page of stored results."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from agentrl.records import Split
from agentrl.session.transcript import transcript
from benchmarks import splitting
from sandboxes.pages import Questions
from sandboxes.pages.strategies import alone, handing_on
from sandboxes.pages.strategies import splitting as one_helper_a_page
from tests.sandboxes.test_questions import Reads, played

TASK = Questions().task(Split.HELDOUT, 0)


async def attempt(reads: Reads) -> dict[str, Any]:
    return json.loads(json.dumps(transcript(TASK, await played(TASK, reads), phase="after", step=1)))


@pytest.mark.slow
async def test_an_attempt_is_split_if_every_page_has_a_helper(tmp_path: Path) -> None:
    attempts = [await attempt(reads) for reads in (one_helper_a_page, alone, handing_on)]
    assert [splitting.gave_every_page(finished) for finished in attempts] == [True, False, False]
    assert splitting.split(attempts).value == splitting.solved(attempts).value == pytest.approx(1 / 3)
    for line in attempts[0]["trajectories"]:
        line["messages"][0]["content"] = line["messages"][0]["content"].replace("the question on page ", "what is on pages ")
    assert splitting.gave_every_page(attempts[0]), "with another wording"
    attempts[0]["trajectories"].pop()
    assert not splitting.gave_every_page(attempts[0])


def write_finished_run(folder: Path, attempts: list[dict[str, Any]]) -> None:
    """Writes the files of a finished run that the benchmark reads."""
    (folder / "episodes").mkdir(parents=True)
    (folder / "summary.json").write_text(
        json.dumps({"tokens_trained": 5000, "versions": {"agentrl": "0"}, "sandbox_backend": "bubblewrap"})
    )
    figures = {"episodes": 64, "tokens_sampled": 1000, splitting.SPLIT: 0.5, splitting.HELPERS: 0.75}
    steps = [{"step": step, "reward_mean": step / 8, **figures} for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    for phase, lines in (("before", attempts[1:]), ("after", attempts[:1])):
        (folder / "episodes" / f"{phase}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
async def test_results_are_stored_and_the_page_is_written_from_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = [await attempt(reads) for reads in (one_helper_a_page, alone, handing_on)]
    runs, out, page = tmp_path / "runs", tmp_path / "stored", tmp_path / "page.md"
    commands: list[list[str]] = []

    def fake_timed_run(command: list[str]) -> tuple[float, float]:
        commands.append(command)
        if "--resume" not in command:
            write_finished_run(Path(command[command.index("--run-dir") + 1]), attempts)
        return 300.0, 3.0

    monkeypatch.setattr(splitting.subprocess, "run", lambda command, **_: commands.append(command))
    monkeypatch.setattr(splitting, "timed", fake_timed_run)
    write_finished_run(runs / "verifier-1", attempts)
    (runs / "verifier-1" / "recipe.json").write_text("{}")
    configurations = [("verifier", 0), ("verifier", 1), ("episode", 0)]
    splitting.run_all(configurations, runs, out, "", ["steps=2"])
    assert [Path(command[1]).name for command in commands] == ["splitting_policy.py", *["splitting.py"] * 3]
    assert ["--resume" in command for command in commands] == [False, False, True, False]
    assert "objective.credit=episode" in commands[3] and "seed=0" in commands[3] and "steps=2" in commands[3]
    splitting.run_all(configurations, tmp_path / "elsewhere", out, "", [])
    assert len(commands) == 4, "a stored result is not measured again, even with a different folder of runs"

    page.write_text(f"# Before\n\n{splitting.BEGIN}\n\nold\n\n{splitting.END}\n\nAfter.\n")
    monkeypatch.setattr(sys, "argv", ["splitting.py", "--out", str(out), "--page", str(page)])
    splitting.main()
    text = page.read_text()
    assert text.startswith("# Before\n") and text.endswith("\n\nAfter.\n") and "old" not in text
    assert (
        "| `verifier` | 0, 1 | 0.00 [0.00, 0.49] | 1.00 [0.34, 1.00] | 1.00 to 1.00 | 0.00 [0.00, 0.49] | 1.00 [0.34, 1.00] | 5,000 | 5.0 |"
        in text
    )
    assert "--seeds 0 1 --credits episode verifier steps=2`" in text
    assert (tmp_path / "images" / "learning-to-split.svg").exists()


@pytest.mark.slow
async def test_results_with_different_overrides_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = [await attempt(reads) for reads in (one_helper_a_page, alone)]
    write_finished_run(tmp_path / "run", attempts)
    for seed, overrides in enumerate(([], ["learner.lr=1e-4"])):
        measured = {
            "overrides": overrides,
            "machine": {"cores": 2, "processor": "p", "memory_gib": 24},
            "note": "",
            "wall_s": 1.0,
            "peak_gib": 1.0,
            "resumed": False,
        }
        outcome = splitting.read(tmp_path / "run", "roles", seed, measured)
        splitting.result_path(tmp_path, "roles", seed).write_text(json.dumps(asdict(outcome)))
        if seed == 0:
            splitting.check_alike(tmp_path, [])
            with pytest.raises(SystemExit, match=r"measured with no overrides, not with `learner.lr=1e-4`\nfix: use the same overrides"):
                splitting.check_alike(tmp_path, ["learner.lr=1e-4"])
    with pytest.raises(SystemExit, match=r"different settings: roles-seed0.json with bubblewrap; roles-seed1.json with bubblewrap learner"):
        splitting.stored_outcomes(tmp_path)


def test_a_folder_without_results_is_an_error_with_the_command_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["splitting.py", "--out", str(tmp_path), "--page", str(tmp_path / "page.md")])
    with pytest.raises(SystemExit, match=r".* has no stored results\nfix: python benchmarks/splitting.py"):
        splitting.main()
