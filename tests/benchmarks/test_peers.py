"""The command around the runs: its arguments, whose turn it is, what is made again, and what the tables say."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.errors import InfrastructureError, UserError
from benchmarks import peers
from benchmarks.contest import ours, outcome, tables, trl
from benchmarks.contest.ours import Follower
from benchmarks.contest.outcome import Outcome, Point
from benchmarks.contest.setting import Setting
from benchmarks.contest.watch import running

ROOT = Path(__file__).resolve().parents[2]
SETTING = Setting(recipe="recipes/quickstart.py", mode="multi", wait=(0.2, 2.0), backend="bubblewrap")
RATE = {"value": 0.5, "ci_low": 0.4, "ci_high": 0.6, "n": 160}


def made(side: str, seed: int, arrived_s: float | None, *, start: float = 30.0, setting: Setting = SETTING) -> Outcome:
    last = Point(step=8, clock_s=arrived_s or 2400.0, value=0.95 if arrived_s else 0.6, ci_low=0.5, ci_high=0.99, n=160)
    return Outcome(
        side=side,
        seed=seed,
        setting=setting.record(),
        command=f"python benchmarks/peers.py --sides {side}",
        ended="arrived" if arrived_s else "time",
        arrived_s=arrived_s,
        clock_s=arrived_s or 2400.0,
        steps=8,
        curve=(Point(step=4, clock_s=100.0, value=0.4, ci_low=0.3, ci_high=0.5, n=160), last),
        after=last,
        tokens_sampled=12_345,
        tokens_trained=6_789,
        episodes=1024,
        faults=1,
        peak_gib=3.25,
        parts={"start": start, "rollout": 80.0, "update": 16.0, "evaluation": 60.0 if side == "ours" else 0.0},
        settings={} if side == "ours" else dict(trl.OPTIONS),
    )


def test_sides_take_turns_and_no_seed_is_lost() -> None:
    assert peers.turns(["ours", "trl"], [0, 1, 2], [0, 1]) == [("ours", 0), ("trl", 0), ("ours", 1), ("trl", 1), ("ours", 2)]
    assert peers.turns(["trl"], [0, 1, 2], [4]) == [("trl", 4)]


@pytest.mark.parametrize(("text", "seconds"), [("0.2..2", (0.2, 2.0)), ("0.5", (0.5, 0.5))])
def test_waits_are_read(text: str, seconds: tuple[float, float]) -> None:
    assert peers.arguments(["--wait", text]).wait == seconds


@pytest.mark.parametrize("text", ["2..0.2", "soon", "-1", "1..9999", ""])
def test_a_wait_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.arguments([f"--wait={text}"])
    assert "argument --wait" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mode": "single"}, "a single turn calls nothing"),
        ({"target": 1.5}, "no success rate"),
        ({"minutes": 0}, "above 0"),
        ({"mode": "both"}, "no mode"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        replace(SETTING, **change)


def test_both_sides_get_one_recipe() -> None:
    recipe = SETTING.made(seed=7)
    assert (recipe.seed, recipe.evaluation.temperature, recipe.evaluation.heldout_real) == (7, 0.0, 0)
    assert recipe.sandbox.options == {"low": 0.2, "high": 2.0, "backend": "bubblewrap"}
    single = replace(SETTING, mode="single", wait=(0.0, 0.0)).made(seed=7)
    assert single.tasks.options == {"of": "sandboxes.tables:Tables"}
    assert single.sandbox.backend == "bubblewrap"


def test_the_command_of_a_result_makes_the_setting_again() -> None:
    setting = replace(SETTING, overrides=("learner.lr=1e-4", "rollout.group_size=4"), target=0.8, minutes=5.0)
    words = setting.command("--sides", "ours").split()
    assert words[:2] == ["python", "benchmarks/peers.py"]
    assert peers.setting_of(peers.arguments(words[2:])) == setting


@pytest.mark.parametrize("key", ["objective.loss=gspo", "learner.minibatches=2", "objective.kl=k3 objective.kl_coef=0.1"])
def test_what_the_peer_has_no_equal_of_is_refused(key: str) -> None:
    with pytest.raises(UserError, match="the peer is not compared"):
        replace(SETTING, overrides=tuple(key.split())).made(seed=0)


def test_only_what_is_missing_is_made(tmp_path: Path) -> None:
    record = SETTING.record()
    assert outcome.missing(tmp_path, SETTING.name, record, "ours", 0)
    path = outcome.save(made("ours", 0, 600.0), tmp_path, SETTING.name)
    assert outcome.load(path) == made("ours", 0, 600.0)
    assert not outcome.missing(tmp_path, SETTING.name, record, "ours", 0)
    assert outcome.missing(tmp_path, SETTING.name, record, "trl", 0)
    with pytest.raises(UserError, match=r"another setting: target 0\.9 there, 0\.8 now"):
        outcome.missing(tmp_path, SETTING.name, replace(SETTING, target=0.8).record(), "ours", 0)


def test_minutes_are_a_bound_and_no_other_run(tmp_path: Path) -> None:
    """Who arrived within 40 minutes did within 70; who did not may, and is asked again."""
    longer, shorter = (replace(SETTING, minutes=minutes).record() for minutes in (70.0, 30.0))
    outcome.save(made("ours", 0, 600.0), tmp_path, SETTING.name)
    outcome.save(made("trl", 0, None), tmp_path, SETTING.name)
    outcome.save(made("trl", 1, 2000.0), tmp_path, SETTING.name)
    assert not outcome.missing(tmp_path, SETTING.name, longer, "ours", 0)
    assert outcome.missing(tmp_path, SETTING.name, longer, "trl", 0)
    assert not outcome.missing(tmp_path, SETTING.name, shorter, "trl", 0), "not in 40 minutes is not in 30 either"
    with pytest.raises(UserError, match=r"minutes 40\.0 there, 30\.0 now"):
        outcome.missing(tmp_path, SETTING.name, shorter, "trl", 1)
    outcome.save(made("trl", 0, None, setting=replace(SETTING, minutes=70.0)), tmp_path, SETTING.name)
    assert "at most 40 or 70 min." in tables.tables(tmp_path)


def test_what_is_tried_for_the_peer_begins_with_what_it_was_given() -> None:
    base = trl.options_of(["micro_batch=4"])
    tried = trl.candidates(base)
    assert tried[0] == {} and {"micro_batch": 4} not in tried and {"threads": 1} in tried
    assert len(tried) == len(trl.CANDIDATES) - 1


def test_each_run_says_how_fast_its_machine_was(tmp_path: Path) -> None:
    machine = outcome.machine()
    assert machine["gflops"] > 0
    outcome.save(replace(made("ours", 0, 600.0), machine={"gflops": 123}), tmp_path, SETTING.name)
    outcome.save(made("trl", 0, 1200.0), tmp_path, SETTING.name)
    table = tables.tables(tmp_path)
    assert "| 1 of 1024 | 123 |" in table and "| 1 of 1024 | - |" in table


@pytest.mark.parametrize("text", ["", "{", "[]", '{"curve": 3}', '{"curve": [], "after": null, "odd": 1}'])
def test_a_file_that_is_no_result_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "x-ours-seed0.json").write_text(text)
    with pytest.raises(UserError, match="no result of this benchmark"):
        outcome.all_in(tmp_path)


def test_the_page_gets_its_tables_and_keeps_its_words(tmp_path: Path) -> None:
    results, page = tmp_path / "peers", tmp_path / "peers.md"
    for one in (made("ours", 0, 300.0), made("ours", 1, 360.0), made("ours", 2, 330.0), made("trl", 0, 1650.0), made("trl", 1, 1980.0)):
        outcome.save(one, results, SETTING.name)
    page.write_text(f"Before.\n{tables.BEGIN}\nold\n{tables.END}\nAfter.\n")
    tables.page(page, results)
    text = page.read_text()
    assert text.startswith("Before.\n") and text.endswith("After.\n") and "old" not in text
    assert "agentrl 5.5 min, TRL 30.2 min, **5.5 times** ours; without the start 5.0 and 29.8 min, 6.0 times. Of ours 1.0 min were" in text
    assert "| TRL | 1 | 33.0 | arrived | 8 | 0.40 [0.30, 0.50] at step 4 | 0.95 [0.50, 0.99] |" in text
    assert "| TRL | 30 | 10.0 | 0.0 | 0.0 | 2.0 |" in text, "seconds of a step"
    tables.page(page, results)
    assert page.read_text() == text


def test_a_page_without_the_marks_is_left_alone(tmp_path: Path) -> None:
    outcome.save(made("ours", 0, 300.0), tmp_path, SETTING.name)
    (tmp_path / "peers.md").write_text("No place here.\n")
    with pytest.raises(UserError, match="no place for the tables"):
        tables.page(tmp_path / "peers.md", tmp_path)
    assert (tmp_path / "peers.md").read_text() == "No place here.\n"


def test_who_did_not_arrive_is_said() -> None:
    mine, late = [made("ours", 0, 300.0)], [made("trl", 0, None), made("trl", 1, 1500.0)]
    assert "TRL 32.5 min, at least (of 2 runs 1 did not arrive) **6.5 times** ours" in tables.verdict([*mine, *late], "trl")
    assert "1 of 1 runs of ours did not arrive" in tables.verdict([made("ours", 0, None), *late], "trl")
    assert tables.verdict(mine, "trl") == "TRL: still to be made."


@pytest.mark.parametrize(
    ("given", "told"), [("threads", "no such setting"), ("threads=two", "is no int"), ("rollouts=mine", "no such rollouts")]
)
def test_a_setting_of_the_peers_that_there_is_not_is_told(given: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        trl.options_of([given])


def test_settings_of_the_peers_are_read_and_written() -> None:
    options = trl.options_of(["threads=1", "cache=static", "gradient_checkpointing=true"])
    assert (options["threads"], options["cache"], options["gradient_checkpointing"]) == (1, "static", True)
    words = trl.words_of(options)
    assert trl.options_of([word for word in words if word != "--peer"]) == options


def test_our_run_is_followed_by_its_folder(tmp_path: Path) -> None:
    folder, setting = tmp_path / "run", replace(SETTING, minutes=10.0)
    follower = Follower(folder, setting)
    assert not follower.look(1.0), "nothing there yet"
    version(folder, 0, "candidate")
    follower.look(20.0)
    version(folder, 0, "serving")
    follower.look(30.0)
    evaluations(folder, before=0.1)
    assert not follower.look(50.0)
    assert follower.before_s == 20.0
    version(folder, 4, "candidate")
    assert not follower.look(120.0)
    evaluations(folder, before=0.1, step4=0.93)
    assert follower.look(140.0), "it has arrived"
    arrived = follower.arrived()
    assert arrived is not None and (arrived.step, arrived.clock_s) == (4, 100.0), "when its version was there, without the first evaluation"


def test_our_run_ends_with_its_time(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "run", replace(SETTING, minutes=1.0))
    evaluations(tmp_path / "run", before=0.1)
    assert not follower.look(59.0)
    assert follower.look(61.0)
    assert follower.arrived() is None


def version(folder: Path, number: int, state: str) -> None:
    path = folder / "versions" / f"{number:06d}" / "version.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"number": number, "state": state}))


def evaluations(folder: Path, **phases: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = {phase: {"heldout": {**RATE, "value": value}} for phase, value in phases.items()}
    (folder / "evaluations.json").write_text(json.dumps(found))


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def told_pid(log: Path) -> int:
    deadline = time.monotonic() + 20
    while not (log.exists() and log.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(log.read_text())


def test_nothing_of_a_side_is_left(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running([sys.executable, "-c", STUBBORN], log=log, root=ROOT) as watched:
        grandchild = told_pid(log)
        watched._look()
        watched.finish(grace_s=0.1)
    assert watched.ended()
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE


def test_a_killed_benchmark_takes_its_side_along(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = f"""
import time
from pathlib import Path
from benchmarks.contest.watch import running
with running(["sh", "-c", "echo $$; exec sleep 600"], log=Path({str(log)!r}), root=Path(".")):
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as benchmark:
        side = psutil.Process(told_pid(log))
        benchmark.kill()
    side.wait(timeout=10)


def test_where_our_seconds_go_is_read_from_the_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    told = "agentrl.learner: step {}: 32 samples, 2330 tokens trained; update 0.18 s, checkpoint {} s, publish 0.25 s, all 1.00 s\n"
    log = tmp_path / "logs" / "learner.log"
    log.write_text(told.format(0, "0.25") + told.format(1, "0.00") + "agentrl.learner: stopped before step 2\n")
    stages = {"prepare": 4.0, "start": 16.0, "evaluate before": 9.0, "evaluate step4": 8.0, "evaluate step8": 7.0, "close": 1.0}
    (tmp_path / "summary.json").write_text(json.dumps({"wall_s": stages}))
    lines = [{"step": 1, "step_s": 10.0, "update_s": 2.0, "swap_total_ms": 250.0}, {"step": 2, "step_s": 6.0, "update_s": 1.0}]
    spent = {"start": 20.0, "rollout": 12.0, "update": 3.0, "sync": 1.0, "evaluation": 15.0}
    assert ours.parts(tmp_path, lines, None) == spent
    assert ours.parts(tmp_path, lines, 8) == {**spent, "evaluation": 8.0}, "the one that saw it arrive is not in the time it took"
    log.write_text("")
    with pytest.raises(InfrastructureError, match=r"does not say what publishing took in steps \[1, 2\]"):
        ours.parts(tmp_path, lines, None)
