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


def made(side: str, seed: int, arrived_s: float | None, *, start: float = 30.0, number: int = 0, **changes: Any) -> Outcome:
    """A run that began `number` times 1,000 s after the first one of its comparison."""
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


def compared(*times: tuple[float | None, float | None], setting: Setting = SETTING, peer: str = "trl") -> Comparison:
    """A comparison whose rounds took so many seconds, ours and the peer's."""
    rounds = [
        (made("ours", seed, mine, number=2 * seed), made(peer, seed, theirs, number=2 * seed + 1))
        for seed, (mine, theirs) in enumerate(times)
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


THREE = compared((300.0, 1650.0), (360.0, 1440.0), (330.0, 1980.0))


@pytest.mark.parametrize(
    ("words", "sides"),
    [
        ("--mode multi", ("ours", "trl-together", "trl")),
        ("--mode single", ("ours", "trl")),
        ("--sides trl-together ours", ("ours", "trl-together")),
    ],
)
def test_a_round_is_ours_first_then_the_peers_best(words: str, sides: tuple[str, ...]) -> None:
    assert peers.sides_of(peers.arguments(words.split())) == sides


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--mode single --sides ours trl-together", "no calls that could run"),
        ("--sides ours", "cannot be compared"),
        ("--sides trl", "cannot be compared"),
    ],
)
def test_sides_that_are_no_pair_are_refused(words: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        peers.sides_of(peers.arguments(words.split()))


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
    assert (recipe.seed, recipe.evaluation.sampling.temperature, recipe.evaluation.heldout_real) == (7, 0.0, 0)
    assert recipe.sandbox.backend.options == {"low": 0.2, "high": 2.0, "backend": "bubblewrap"}
    single = replace(SETTING, mode="single", wait=(0.0, 0.0)).made(seed=7)
    assert single.tasks.family.options == {"of": "sandboxes.tables:Tables"}
    assert single.sandbox.backend.ref == "bubblewrap"


def test_the_command_of_a_result_makes_the_setting_again() -> None:
    setting = replace(SETTING, overrides=("learner.lr=1e-4", "rollout.group.size=4"), target=0.8, minutes=5.0)
    words = setting.command("--sides", "ours").split()
    assert words[:2] == ["python", "benchmarks/peers.py"]
    assert peers.setting_of(peers.arguments(words[2:])) == setting


@pytest.mark.parametrize("key", ["objective.loss=gspo", "learner.minibatches=2", "objective.kl=k3 objective.kl_coef=0.1"])
def test_what_the_peer_has_no_equal_of_is_refused(key: str) -> None:
    with pytest.raises(UserError, match="the peer has no equivalent of"):
        replace(SETTING, overrides=tuple(key.split())).made(seed=0)


def test_pairs_of_one_machine_in_one_go_are_published(tmp_path: Path) -> None:
    comparison.publish(THREE, tmp_path / "one.json")
    assert comparison.published(tmp_path) == {"one": THREE}


def _other_machine(one: Comparison) -> Comparison:
    mine, theirs = one.rounds[1]
    return replace(one, rounds=(one.rounds[0], (mine, replace(theirs, machine={**MACHINE, "processor": "Xeon"})), one.rounds[2]))


@pytest.mark.parametrize(
    ("wanting", "told"),
    [
        (replace(THREE, rounds=THREE.rounds[:2]), "2 of at least 3 pairs"),
        (replace(THREE, rounds=(*THREE.rounds[:2], THREE.rounds[2][:1])), "not one run of each side"),
        (replace(THREE, rounds=(*THREE.rounds[:2], (THREE.rounds[2][0], THREE.rounds[1][1]))), "not one run of each side with one seed"),
        (replace(THREE, rounds=(*THREE.rounds[:2], tuple(reversed(THREE.rounds[2])))), "not one run of each side"),
        (_other_machine(THREE), "runs of several machines"),
        (replace(THREE, rounds=(THREE.rounds[1], THREE.rounds[0], THREE.rounds[2])), "15 min between two runs"),
        (replace(THREE, rounds=(*THREE.rounds[:2], tuple(replace(one, machine={}) for one in THREE.rounds[2]))), "without CPU model"),
    ],
)
def test_what_is_not_pairs_of_one_machine_in_one_go_is_not_published(wanting: Comparison, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told):
        comparison.publish(wanting, tmp_path / "one.json")
    comparison.save(wanting, tmp_path / "one.json")  # as somebody might put it there by hand
    with pytest.raises(UserError, match=told):
        tables.tables(tmp_path)


def test_a_fast_run_in_place_of_a_slow_one_is_not_published() -> None:
    """A run that is repeated later lies outside of the one go, whatever its round."""
    mine, theirs = THREE.rounds[1]
    again = replace(mine, arrived_s=200.0, began=9000.0, finished=9200.0)
    assert replace(THREE, rounds=(THREE.rounds[0], (again, theirs), THREE.rounds[2])).faults()


def test_a_ratio_has_its_number_and_range() -> None:
    assert str(THREE.ratio("trl")) == "5.5 times (4.0 to 6.0, n=3)"
    late = compared((300.0, None), (300.0, 1500.0), (300.0, None))
    assert str(late.ratio("trl")) == "8.0 times (5.0 to 8.0, n=3, in 2 at least)"


def test_no_ratio_rests_on_a_bound_of_ours() -> None:
    late = compared((None, 1650.0), (360.0, 1440.0), (330.0, 1980.0))
    with pytest.raises(ValueError, match="ours did not reach"):
        late.ratio("trl")
    assert "none: 1 of 3 runs of ours did not reach the target" in tables.summary({"one": late})


def test_an_interrupted_comparison_is_continued_only_by_its_command_on_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = peers.arguments(["--wait", "0.2..2", "--backend", "bubblewrap", "--sides", "ours", "trl"])
    sides, draft, options = peers.sides_of(given), tmp_path / "draft.json", trl.options_of([])
    now = time.time()
    rounds = [tuple(replace(one, began=now - 200, finished=now - 100) for one in THREE.rounds[0])]
    one = replace(THREE, rounds=tuple(rounds), boot=stored.boot(), origin=THREE.origin | {"command": peers.command(SETTING, sides, given)})

    def continued(some: Comparison) -> bool:
        comparison.save(some, draft)
        return peers.begun(draft, SETTING, sides, options, given) is not None

    assert continued(one)
    assert not continued(replace(one, boot="another"))
    assert not continued(replace(one, origin=one.origin | {"command": "another"}))
    assert not continued(replace(one, origin=one.origin | {"code": {"README.md": "another"}}))
    assert not continued(replace(one, rounds=(tuple(replace(run, finished=now - 5000) for run in rounds[0]),)))


def test_the_peer_gets_the_fastest_of_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches first, the other settings with the fastest of them; one that fails is kept with its reason."""
    seconds = {"micro_batch": {1: 9.0, 2: 4.0, 4: 5.0, 8: 6.0, 16: 7.0, 32: 8.0}, "cache": {"static": 3.5}, "threads": {1: 6.0}}

    def timed(setting: Setting, seed: int, options: dict[str, Any], change: dict[str, Any], *_: Any) -> dict[str, Any]:
        [(key, value)] = change.items()
        assert setting.wait == (0.0, 0.0) and (key == "micro_batch" or options["micro_batch"] == 2)
        return {"change": change, "seconds_a_step": seconds.get(key, {}).get(value)}

    monkeypatch.setattr(trl, "_try", timed)
    chosen, tried = trl.tune(SETTING, 0, dict(trl.OPTIONS), tmp_path, steps=1)
    assert chosen == {**trl.OPTIONS, "micro_batch": 2, "cache": "static"}
    assert [one["change"] for one in tried] == [*({"micro_batch": size} for size in trl.MICRO_BATCHES), *trl.OTHERS]


@pytest.mark.parametrize("recipe", ["recipes/quickstart.py", "recipes/smollm2.py"])
def test_the_peers_settings_are_timed_on_recipes_that_load(recipe: str) -> None:
    setting = replace(SETTING, recipe=recipe, wait=(0.0, 0.0))
    for steps in (1, 3):
        more = trl.small_steps(setting.made(0), steps)
        _, small = load_recipe(ROOT / recipe, [*setting.arguments(0), *more])
        assert small.steps == steps


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rounds": 3}', '{"rounds": [], "sides": [], "tried": [], "odd": 1}'])
def test_a_file_that_is_no_result_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match="no result of this benchmark"):
        comparison.published(tmp_path)


def test_the_page_gets_its_tables_and_keeps_its_words(tmp_path: Path) -> None:
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


def test_a_page_without_the_marks_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "peers.md").write_text("No marks here.\n")
    with pytest.raises(UserError, match="no marks for the tables"):
        tables.page(tmp_path / "peers.md", tmp_path / "peers")
    assert (tmp_path / "peers.md").read_text() == "No marks here.\n"


@pytest.mark.parametrize(
    ("given", "told"), [("threads", "no such setting"), ("threads=two", "is no int"), ("rollouts=mine", "unknown value")]
)
def test_a_setting_of_the_peers_that_there_is_not_is_told(given: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        trl.options_of([given])


def test_a_micro_batch_that_does_not_divide_a_step_is_refused_before_anything_runs() -> None:
    trl.check_options(SETTING, dict(trl.OPTIONS))
    with pytest.raises(UserError, match="micro_batch=32 does not divide the 16 episodes"):
        trl.check_options(replace(SETTING, overrides=("rollout.groups_per_step=2",)), dict(trl.OPTIONS))


def test_settings_of_the_peers_are_read() -> None:
    options = trl.options_of(["threads=1", "cache=static", "gradient_checkpointing=true"])
    assert (options["threads"], options["cache"], options["gradient_checkpointing"]) == (1, "static", True)


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


@pytest.mark.slow
def test_nothing_of_a_side_is_left(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running([sys.executable, "-c", STUBBORN], log=log, root=ROOT) as watched:
        grandchild = told_pid(log)
        watched._look()
        watched.finish(grace_s=0.1)
    assert watched.ended()
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
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
