"""The command of the peer comparison: its arguments, the order of sides, continued comparisons, and the tables."""

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

from agentrl.cli.running import load_recipe
from agentrl.errors import InfrastructureError, UserError
from benchmarks import peers, stored
from benchmarks.contest import comparison, ours, tables, trl
from benchmarks.contest.comparison import Comparison
from benchmarks.contest.ours import Follower
from benchmarks.contest.outcome import Outcome, Point
from benchmarks.contest.setting import Setting
from benchmarks.contest.watch import running

ROOT = Path(__file__).resolve().parents[2]
SETTING = Setting(recipe="recipes/quickstart.py", mode="multi", wait=(0.2, 2.0), backend="bubblewrap")
RATE = {"value": 0.5, "ci_low": 0.4, "ci_high": 0.6, "n": 160}


MACHINE = {"processor": "AMD EPYC", "cores": 2, "memory_gib": 24, "gflops": 120, "load": 0.1, "busy_cores": 0.0, "python": "3.11.7"}


def outcome_of(side: str, seed: int, arrived_s: float | None, *, start: float = 30.0, number: int = 0, **changes: Any) -> Outcome:
    """A run that started `number` times 1,000 s after the first run of its comparison."""
    last = Point(step=8, clock_s=arrived_s or 2400.0, value=0.95 if arrived_s else 0.6, ci_low=0.5, ci_high=0.99, n=160)
    outcome = Outcome(
        side=side,
        seed=seed,
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
        machine=MACHINE,
        began=1000.0 * number,
        finished=1000.0 * number + 900.0,
    )
    return replace(outcome, **changes)


def comparison_of(*times: tuple[float | None, float | None], setting: Setting = SETTING, peer: str = "trl") -> Comparison:
    """A comparison of rounds with these seconds: ours and the peer's."""
    rounds = [
        (outcome_of("ours", seed, our_s, number=2 * seed), outcome_of(peer, seed, peer_s, number=2 * seed + 1))
        for seed, (our_s, peer_s) in enumerate(times)
    ]
    return Comparison(
        setting=setting.record(),
        sides=("ours", peer),
        options=dict(trl.OPTIONS),
        tried=({"change": {"micro_batch": 4}, "steps": 2, "seconds_a_step": 7.5, "parts": {"update": 3.0}, "peak_gib": 1.0},),
        origin={"command": "python benchmarks/peers.py", "seeds": [0, 1, 2], "machine": MACHINE, "commit": "0123456789ab", "code": {}},
        versions={"trl": "1.16.0"},
        boot="b",
        rounds=tuple(rounds),
    )


THREE = comparison_of((300.0, 1650.0), (360.0, 1440.0), (330.0, 1980.0))


@pytest.mark.parametrize(
    ("options", "sides"),
    [
        ("--mode multi", ("ours", "trl-together", "trl")),
        ("--mode single", ("ours", "trl")),
        ("--sides trl-together ours", ("ours", "trl-together")),
    ],
)
def test_a_round_runs_our_side_first_then_the_peers_fastest(options: str, sides: tuple[str, ...]) -> None:
    assert peers.sides_of(peers.arguments(options.split())) == sides


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--mode single --sides ours trl-together", "no calls that could run"),
        ("--sides ours", "cannot be compared"),
        ("--sides trl", "cannot be compared"),
    ],
)
def test_sides_that_cannot_be_compared_raise_an_error(options: str, error: str) -> None:
    with pytest.raises(UserError, match=error):
        peers.sides_of(peers.arguments(options.split()))


@pytest.mark.parametrize(("text", "seconds"), [("0.2..2", (0.2, 2.0)), ("0.5", (0.5, 0.5))])
def test_an_interval_of_seconds_is_parsed(text: str, seconds: tuple[float, float]) -> None:
    assert peers.arguments(["--wait", text]).wait == seconds


@pytest.mark.parametrize("text", ["2..0.2", "soon", "-1", "1..9999", ""])
def test_an_invalid_wait_is_an_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.arguments([f"--wait={text}"])
    assert "argument --wait" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"mode": "single"}, "a single turn makes no tool calls"),
        ({"target": 1.5}, "not a success rate"),
        ({"minutes": 0}, "above 0"),
        ({"mode": "both"}, "mode 'both' is unknown"),
    ],
)
def test_an_invalid_setting_raises_an_error(change: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        replace(SETTING, **change)


def test_both_sides_get_the_same_recipe() -> None:
    recipe = SETTING.build_recipe(seed=7)
    assert (recipe.seed, recipe.evaluation.sampling.temperature, recipe.evaluation.heldout_real) == (7, 0.0, 0)
    assert recipe.sandbox.backend.options == {"low": 0.2, "high": 2.0, "backend": "bubblewrap"}
    single = replace(SETTING, mode="single", wait=(0.0, 0.0)).build_recipe(seed=7)
    assert single.tasks.family.options == {"of": "sandboxes.tables:Tables"}
    assert single.sandbox.backend.ref == "bubblewrap"


def test_the_command_of_a_result_reproduces_its_setting() -> None:
    setting = replace(SETTING, overrides=("learner.lr=1e-4", "rollout.group.size=4"), target=0.8, minutes=5.0)
    argv = setting.command("--sides", "ours").split()
    assert argv[:2] == ["python", "benchmarks/peers.py"]
    assert peers.setting_of(peers.arguments(argv[2:])) == setting


@pytest.mark.parametrize("key", ["objective.loss=gspo", "learner.minibatches=2", "objective.kl=k3 objective.kl_coef=0.1"])
def test_a_recipe_key_without_an_equivalent_in_the_peer_raises_an_error(key: str) -> None:
    with pytest.raises(UserError, match="the peer has no equivalent of"):
        replace(SETTING, overrides=tuple(key.split())).build_recipe(seed=0)


def test_uninterrupted_pairs_of_one_machine_are_published(tmp_path: Path) -> None:
    comparison.publish(THREE, tmp_path / "one.json")
    assert comparison.published(tmp_path) == {"one": THREE}


def _with_another_machine(pairs: Comparison) -> Comparison:
    ours, peer = pairs.rounds[1]
    return replace(pairs, rounds=(pairs.rounds[0], (ours, replace(peer, machine={**MACHINE, "processor": "Xeon"})), pairs.rounds[2]))


@pytest.mark.parametrize(
    ("unpublishable", "error"),
    [
        (replace(THREE, rounds=THREE.rounds[:2]), "2 of at least 3 pairs"),
        (replace(THREE, rounds=(*THREE.rounds[:2], THREE.rounds[2][:1])), "not consist of one run of each side"),
        (
            replace(THREE, rounds=(*THREE.rounds[:2], (THREE.rounds[2][0], THREE.rounds[1][1]))),
            "not consist of one run of each side with the same seed",
        ),
        (replace(THREE, rounds=(*THREE.rounds[:2], tuple(reversed(THREE.rounds[2])))), "not consist of one run of each side"),
        (_with_another_machine(THREE), "its runs are from several machines"),
        (replace(THREE, rounds=(THREE.rounds[1], THREE.rounds[0], THREE.rounds[2])), "15 min between two runs"),
        (replace(THREE, rounds=(*THREE.rounds[:2], tuple(replace(one, machine={}) for one in THREE.rounds[2]))), "a run has no CPU model"),
    ],
)
def test_incomplete_or_interrupted_pairs_are_not_published(unpublishable: Comparison, error: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=error):
        comparison.publish(unpublishable, tmp_path / "one.json")
    comparison.save(unpublishable, tmp_path / "one.json")  # as if a user had copied it there
    with pytest.raises(UserError, match=error):
        tables.tables(tmp_path)


def test_a_slow_run_replaced_by_a_later_fast_one_is_not_published() -> None:
    """A run that is repeated later did not run directly after the others, in any round."""
    ours, peer = THREE.rounds[1]
    repeated = replace(ours, arrived_s=200.0, began=9000.0, finished=9200.0)
    assert replace(THREE, rounds=(THREE.rounds[0], (repeated, peer), THREE.rounds[2])).faults()


def test_a_ratio_shows_its_number_of_rounds_and_range() -> None:
    assert str(THREE.ratio("trl")) == "5.5 times (4.0 to 6.0, n=3)"
    late = comparison_of((300.0, None), (300.0, 1500.0), (300.0, None))
    assert str(late.ratio("trl")) == "8.0 times (5.0 to 8.0, n=3, in 2 at least)"


def test_there_is_no_ratio_if_our_run_missed_the_target() -> None:
    late = comparison_of((None, 1650.0), (360.0, 1440.0), (330.0, 1980.0))
    with pytest.raises(ValueError, match="ours did not reach"):
        late.ratio("trl")
    assert "none: 1 of 3 runs of ours did not reach the target" in tables.summary({"one": late})


def test_an_interrupted_comparison_is_continued_only_by_its_command_on_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = peers.arguments(["--wait", "0.2..2", "--backend", "bubblewrap", "--sides", "ours", "trl"])
    sides, draft, options = peers.sides_of(args), tmp_path / "draft.json", trl.options_of([])
    now = time.time()
    rounds = [tuple(replace(outcome, began=now - 200, finished=now - 100) for outcome in THREE.rounds[0])]
    base = replace(THREE, rounds=tuple(rounds), boot=stored.boot(), origin=THREE.origin | {"command": peers.command(SETTING, sides, args)})

    def continued(stored_comparison: Comparison) -> bool:
        comparison.save(stored_comparison, draft)
        return peers.unfinished(draft, SETTING, sides, options, args) is not None

    assert continued(base)
    assert not continued(replace(base, boot="another"))
    assert not continued(replace(base, origin=base.origin | {"command": "another"}))
    assert not continued(replace(base, origin=base.origin | {"code": {"README.md": "another"}}))
    assert not continued(replace(base, rounds=(tuple(replace(run, finished=now - 5000) for run in rounds[0]),)))


def test_the_peer_runs_with_its_fastest_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches first, then the other settings with the fastest micro-batch. A setting that fails is recorded with its reason."""
    seconds = {"micro_batch": {1: 9.0, 2: 4.0, 4: 5.0, 8: 6.0, 16: 7.0, 32: 8.0}, "cache": {"static": 3.5}, "threads": {1: 6.0}}

    def timed(setting: Setting, seed: int, options: dict[str, Any], change: dict[str, Any], *_: Any) -> dict[str, Any]:
        [(key, value)] = change.items()
        assert setting.wait == (0.0, 0.0) and (key == "micro_batch" or options["micro_batch"] == 2)
        return {"change": change, "seconds_a_step": seconds.get(key, {}).get(value)}

    monkeypatch.setattr(trl, "_try", timed)
    chosen, attempts = trl.tune(SETTING, 0, dict(trl.OPTIONS), tmp_path, steps=1)
    assert chosen == {**trl.OPTIONS, "micro_batch": 2, "cache": "static"}
    assert [attempt["change"] for attempt in attempts] == [*({"micro_batch": size} for size in trl.MICRO_BATCHES), *trl.OTHERS]


@pytest.mark.parametrize("recipe", ["recipes/quickstart.py", "recipes/smollm2.py"])
def test_the_peers_settings_are_timed_on_recipes_that_load(recipe: str) -> None:
    setting = replace(SETTING, recipe=recipe, wait=(0.0, 0.0))
    for steps in (1, 3):
        overrides = trl.small_steps(setting.build_recipe(0), steps)
        _, short_recipe = load_recipe(ROOT / recipe, [*setting.arguments(0), *overrides])
        assert short_recipe.steps == steps


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rounds": 3}', '{"rounds": [], "sides": [], "tried": [], "odd": 1}'])
def test_a_file_that_is_no_result_raises_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match="is not a result of this benchmark"):
        comparison.published(tmp_path)


def test_writing_the_page_replaces_the_tables_and_nothing_else(tmp_path: Path) -> None:
    results, page = tmp_path / "peers", tmp_path / "peers.md"
    comparison.publish(THREE, results / f"{SETTING.name}.json")
    page.write_text(f"Before.\n{tables.BEGIN}\nold\n{tables.END}\nAfter.\n")
    tables.page(page, results)
    text = page.read_text()
    assert text.startswith("Before.\n") and text.endswith("After.\n") and "old" not in text
    assert "| quickstart-multi-wait-0.2-2 | TRL as it ships | **5.5 times (4.0 to 6.0, n=3)** | 6.0 times (4.3 to 6.5, n=3) |" in text
    assert "| TRL as it ships | 27.5 (24.0 to 33.0) | 8 (8 to 8) |" in text, "medians of the runs"
    assert "| TRL as it ships | 30 | 10.0 | 0.0 | 0.0 | 2.0 |" in text, "seconds of a step"
    tables.page(page, results)
    assert page.read_text() == text


def test_a_page_without_marks_raises_an_error_and_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "peers.md").write_text("No marks here.\n")
    with pytest.raises(UserError, match="no marks for the tables"):
        tables.page(tmp_path / "peers.md", tmp_path / "peers")
    assert (tmp_path / "peers.md").read_text() == "No marks here.\n"


@pytest.mark.parametrize(
    ("option", "error"), [("threads", "unknown setting"), ("threads=two", "is not of type int"), ("rollouts=mine", "unknown value")]
)
def test_an_unknown_peer_setting_raises_an_error(option: str, error: str) -> None:
    with pytest.raises(UserError, match=error):
        trl.options_of([option])


def test_a_micro_batch_that_does_not_divide_a_step_raises_an_error() -> None:
    trl.check_options(SETTING, dict(trl.OPTIONS))
    with pytest.raises(UserError, match="micro_batch=32 does not divide the 16 episodes"):
        trl.check_options(replace(SETTING, overrides=("rollout.groups_per_step=2",)), dict(trl.OPTIONS))


def test_peer_settings_are_parsed() -> None:
    options = trl.options_of(["threads=1", "cache=static", "gradient_checkpointing=true"])
    assert (options["threads"], options["cache"], options["gradient_checkpointing"]) == (1, "static", True)


def test_the_follower_reads_the_progress_of_our_run_from_its_folder(tmp_path: Path) -> None:
    folder, setting = tmp_path / "run", replace(SETTING, minutes=10.0)
    follower = Follower(folder, setting)
    assert not follower.look(1.0), "the folder is empty"
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
    assert follower.look(140.0), "the target is reached"
    arrived = follower.arrived()
    assert arrived is not None and (arrived.step, arrived.clock_s) == (4, 100.0), "publication time without the first evaluation"


def test_our_run_ends_at_the_time_limit(tmp_path: Path) -> None:
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
    rates = {phase: {"heldout": {**RATE, "value": value}} for phase, value in phases.items()}
    (folder / "evaluations.json").write_text(json.dumps(rates))


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def logged_pid(log: Path) -> int:
    deadline = time.monotonic() + 20
    while not (log.exists() and log.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(log.read_text())


@pytest.mark.slow
def test_no_process_of_a_side_survives(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running([sys.executable, "-c", STUBBORN], log=log, root=ROOT) as watched:
        grandchild = logged_pid(log)
        watched._look()
        watched.finish(grace_s=0.1)
    assert watched.ended()
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_killing_the_benchmark_ends_the_process_of_its_side(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = f"""
import time
from pathlib import Path
from benchmarks.contest.watch import running
with running(["sh", "-c", "echo $$; exec sleep 600"], log=Path({str(log)!r}), root=Path(".")):
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as benchmark:
        side = psutil.Process(logged_pid(log))
        benchmark.kill()
    side.wait(timeout=10)


def test_our_seconds_per_activity_are_read_from_the_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log_line = "agentrl.learner: step {}: 32 samples, 2330 tokens trained; update 0.18 s, checkpoint {} s, publish 0.25 s, all 1.00 s\n"
    log = tmp_path / "logs" / "learner.log"
    log.write_text(log_line.format(0, "0.25") + log_line.format(1, "0.00") + "agentrl.learner: stopped before step 2\n")
    stages = {"prepare": 4.0, "start": 16.0, "evaluate before": 9.0, "evaluate step4": 8.0, "evaluate step8": 7.0, "close": 1.0}
    (tmp_path / "summary.json").write_text(json.dumps({"wall_s": stages}))
    lines = [{"step": 1, "step_s": 10.0, "update_s": 2.0, "swap_total_ms": 250.0}, {"step": 2, "step_s": 6.0, "update_s": 1.0}]
    seconds = {"start": 20.0, "rollout": 12.0, "update": 3.0, "sync": 1.0, "evaluation": 15.0}
    assert ours.parts(tmp_path, lines, None) == seconds
    assert ours.parts(tmp_path, lines, 8) == {**seconds, "evaluation": 8.0}, "the evaluation that reached the target is not counted"
    log.write_text("")
    with pytest.raises(InfrastructureError, match=r"does not contain the publishing time of steps \[1, 2\]"):
        ours.parts(tmp_path, lines, None)
