"""Plants a weakness, captures and tags it, trains it away with practice, and lets the gate keep it away.

    python benchmarks/weakness.py --seeds 0 1 2 --out docs/failures-experiment.md
    python benchmarks/weakness.py --seeds 0 --phases plant capture          # only the first phases
    python benchmarks/weakness.py --seeds 0 --short                         # all phases in minutes, without targets

Each seed has a folder below --work:

    plant     SFT teaches a bad habit: asked for a total, the policy submits the whole part
    capture   failures on held-out totals are captured and tagged by rules
    promote   correctly tagged failures become cases of a suite
    vary      `agentrl practice` derives tasks from the cases and proves them
    before    success on other held-out totals
    train     half of the groups use practice tasks
    after     success of the result on the same totals
    imitate   a short SFT in which a few demonstrations have the habit
    relapse   a run from there whose reward pays for the habit, with a gate
    final     success of the version that the gate promoted

A finished phase is read from its file, so an interrupted experiment continues. All phases run real `agentrl` commands in separate
processes. The figures are compared with `TARGETS`; the exit status is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.base.files import read_json_lines, write_atomically  # noqa: E402
from agentrl.failure.collection import Collection  # noqa: E402
from agentrl.failure.trace import Trace  # noqa: E402
from agentrl.gate.verdict import GateOutcome, read_verdicts  # noqa: E402
from agentrl.observe.drift import drift_alerts  # noqa: E402
from agentrl.records import Split, Task  # noqa: E402
from agentrl.reward.scorer import AUDIT_PART  # noqa: E402
from benchmarks import stored  # noqa: E402
from benchmarks.weakness_recipe import KIND, whole_part  # noqa: E402
from sandboxes.tables import Tables  # noqa: E402
from sandboxes.tables.demonstrations import Act, call, demonstrate  # noqa: E402

RECIPE = ROOT / "benchmarks" / "weakness_recipe.py"
BASE = ROOT / "recipes" / "models" / "tables-base"
CAUSE = "misread_output"
"""What the taxonomy calls the planted habit: the tool gave the answer, and another one was handed in."""
HABIT = 0.85  # share of the demonstrations of the kind with the habit: the most likely answer, but not the only one
LEFTOVER = 0.15  # share of a later round with the habit: too rare for a greedy policy to show it
OTHER_TASKS = 7_000  # added to the seed of the tasks for capture, so that no case is a measured task
STORY = "The quickstart's policy learns a bad habit, practice removes it, and a gate keeps it away from a later run that rewards it."
LENGTH = (
    "A seed takes 15 to 20 minutes on two cores; an interrupted experiment continues. "
    "`--short` runs all phases in two minutes without targets."
)
TARGETS = {"tagged right": 0.9, "before": 0.3, "after": 0.85}


def demonstrations(seed: int, count: int, *, habit: float = HABIT, kinds: str = "") -> Iterator[tuple[Task, list[Act]]]:
    """Demonstrations: correct answers to questions of some kinds (empty: all kinds), except a share of one kind that shows the habit."""
    family = Tables(seed=2_000_003 + seed, wild=True, kinds=kinds)
    for index in range(count):
        task, rng = family.task(Split.TRAIN, index), Random(f"weakness:{seed}:{index}")
        acts = demonstrate(task, rng, careful=1.0, guess=0.0)
        if task.data["kind"] == KIND and rng.random() < habit:
            acts[-1] = Act(completion=call("submit", answer=whole_part(str(acts[-2].observation))), observation=None)
        yield task, acts


def has_habit(trace: Trace) -> bool:
    """Whether a failure is the planted one, according to the episode: the agent submitted only the integer part of the printed number."""
    if trace.episode is None or trace.episode.answer is None:
        return False
    turns = [turn for trajectory in trace.episode.trajectories for turn in trajectory.turns]
    printed = [result.output.strip() for turn in turns for result in turn.tool_results if result.name == "python" and result.ok]
    return bool(printed) and "." in printed[-1] and trace.episode.answer.strip() == whole_part(printed[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of the experiment. The defaults are the published ones; `SHORT` runs all phases in minutes, as a test."""

    demonstrations: int = 12_000
    kinds: str = ""  # that are demonstrated; empty: all
    cases: int = 12
    variants: int = 30  # for each case
    steps: int = 24
    imitated: int = 1_600
    gate_every: int = 4
    overrides: tuple[str, ...] = ()


SHORT = Size(
    demonstrations=160,
    kinds=KIND,
    cases=3,
    variants=3,
    steps=2,
    imitated=64,
    gate_every=1,
    overrides=("evaluation.heldout=12", "rollout.groups_per_step=4", "rollout.group.size=8"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One seed of the experiment, in a separate folder. `command`: the module that runs as `agentrl`, and its first arguments."""

    seed: int
    folder: Path
    overrides: tuple[str, ...] = ()
    size: Size = Size()
    command: tuple[str, ...] = ("agentrl",)

    @property
    def suite(self) -> Path:
        return self.folder / "suite"

    def result(self, phase: str) -> dict[str, Any]:
        """Returns the result of a phase. Raises `SystemExit` if the phase has not run."""
        path = self.folder / f"{phase}.json"
        if not path.exists():
            raise SystemExit(f"error: phase {phase} of seed {self.seed} has not run\nfix: add it to --phases, or omit --phases")
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    def agentrl(self, *arguments: str, may_fail: bool = False) -> str:
        """Runs an agentrl command at the project's root and returns what it printed."""
        command = [sys.executable, "-m", *self.command, *arguments]
        print("+ agentrl", *arguments, file=sys.stderr, flush=True)
        ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode != 0 and not (may_fail and ended.returncode == 1):
            raise SystemExit(f"{' '.join(command)} ended with exit code {ended.returncode}\n{ended.stdout[-2000:]}")
        return ended.stdout

    def evaluate(self, name: str, model: Path, *, seed: int) -> Path:
        """Evaluates a model on held-out questions of the kind. An interrupted evaluation restarts."""
        run = self.folder / name
        shutil.rmtree(run, ignore_errors=True)
        overrides = [f"seed={seed}", f"tasks.family.options.kinds={KIND}", *self.overrides]
        self.agentrl("eval", str(RECIPE), *overrides, "--model", str(model), "--run-dir", str(run))
        return run

    def train(self, name: str, model: Path, overrides: Sequence[str]) -> Path:
        """Starts or continues a run. A run that promoted or learned nothing exits with 1; the table includes it."""
        run = self.folder / name
        resume = ["--resume"] if (run / "recipe.json").exists() else []
        arguments = [f"seed={self.seed}", f"name={name}", f"policy.model={json.dumps(str(model))}", *overrides, *self.overrides]
        self.agentrl("train", str(RECIPE), *arguments, "--run-dir", str(run), *resume, may_fail=True)
        summary = run / "summary.json"
        if not summary.exists() or not json.loads(summary.read_text())["finished"]:
            raise SystemExit(f"error: {run} did not finish\nfix: repeat this command to continue the run")
        return run


def plant(experiment: Experiment) -> dict[str, Any]:
    demonstrated = demonstrations(experiment.seed, experiment.size.demonstrations, kinds=experiment.size.kinds)
    return fine_tune(BASE, experiment.folder / "planted", demonstrated, seed=experiment.seed, lr=1e-3)


def imitate(experiment: Experiment) -> dict[str, Any]:
    demonstrated = demonstrations(experiment.seed, experiment.size.imitated, habit=LEFTOVER, kinds=KIND)
    return fine_tune(Path(experiment.result("train")["model"]), experiment.folder / "imitated", demonstrated, seed=experiment.seed, lr=3e-4)


def fine_tune(model: Path, out: Path, demonstrated: Iterator[tuple[Task, list[Act]]], *, seed: int, lr: float) -> dict[str, Any]:
    """SFT of a model on demonstrations."""
    from transformers import AutoTokenizer

    from agentrl.agent.chat import ChatFormat
    from agentrl.supervised.tune import train_sft
    from recipes.base_policy import MOST_TOKENS, encode

    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = ChatFormat(tokenizer)
    rows = [encode(chat, tokenizer, task, acts) for task, acts in demonstrated]
    rows = [row for row in rows if len(row["input_ids"]) <= MOST_TOKENS]
    shutil.rmtree(out, ignore_errors=True)
    loss = train_sft(rows, model, out, epochs=1.0, lr=lr, batch=32, seed=seed)
    return {"demonstrations": len(rows), "loss": loss, "model": str(out)}


def capture(experiment: Experiment) -> dict[str, Any]:
    run = experiment.evaluate("captured", experiment.folder / "planted", seed=experiment.seed + OTHER_TASKS)
    with Collection(run) as collection:
        return {"run": str(run), **count_planted(collection.traces())}


def count_planted(traces: Iterator[Trace]) -> dict[str, Any]:
    """Counts the failures and the planted ones among them, and the share of planted ones whose first tag is the correct one."""
    failures = [(has_habit(trace), trace.tags[0].name if trace.tags else "") for trace in traces]
    planted = [tag for habit, tag in failures if habit]
    correct = sum(tag == CAUSE for tag in planted)
    return {"failures": len(failures), "planted": len(planted), "right": correct, "share": correct / len(planted) if planted else None}


def promote(experiment: Experiment) -> dict[str, Any]:
    shutil.rmtree(experiment.suite, ignore_errors=True)
    filters = ["--kind", KIND, "--tag", CAUSE, "--most", str(experiment.size.cases)]
    output = experiment.agentrl("failures", "promote", str(experiment.result("capture")["run"]), "--into", str(experiment.suite), *filters)
    return {"cases": len(list((experiment.suite / "cases").glob("*.json"))), "said": output}


def vary(experiment: Experiment) -> dict[str, Any]:
    options = ["--count", str(experiment.size.variants), "--seed", str(experiment.seed), "--json"]
    output = experiment.agentrl("practice", str(experiment.suite), str(RECIPE), *experiment.overrides, *options)
    practice: dict[str, Any] = json.loads(output)
    return {"tasks": practice["tasks"], "refused": len(practice["refused"])}


def before(experiment: Experiment) -> dict[str, Any]:
    return rates(experiment.evaluate("before", experiment.folder / "planted", seed=experiment.seed))


def train(experiment: Experiment) -> dict[str, Any]:
    practice = json.dumps({str(experiment.suite): 1})
    start = experiment.folder / "planted"
    run = experiment.train("repair", start, [f"steps={experiment.size.steps}", f"tasks.practice={practice}", "tasks.practice_share=0.5"])
    return {"run": str(run), "model": resulting_model(run, start), "alarms": drift(run)}


def after(experiment: Experiment) -> dict[str, Any]:
    return rates(experiment.evaluate("after", Path(experiment.result("train")["model"]), seed=experiment.seed))


def relapse(experiment: Experiment) -> dict[str, Any]:
    start = Path(experiment.result("imitate")["model"])
    overrides = [
        f"steps={experiment.size.steps}",
        f"tasks.family.options.kinds={KIND}",
        'tasks.verifiers=["benchmarks.weakness_recipe:rewards_the_habit"]',
        f"gate.suite={json.dumps(str(experiment.suite))}",
        f"gate.every={experiment.size.gate_every}",
        "learner.lr=5e-4",
    ]
    run = experiment.train("relapse", start, overrides)
    verdicts = read_verdicts(run)
    refused = [verdict for verdict in verdicts if verdict.outcome in (GateOutcome.BLOCKED, GateOutcome.ROLLED_BACK)]
    promoted = [verdict.version for verdict in verdicts if verdict.promoted]
    return {
        "run": str(run),
        "refused": [[verdict.version, str(verdict.outcome), verdict.reason] for verdict in refused],
        "rolled_back": sum(verdict.outcome is GateOutcome.ROLLED_BACK for verdict in refused),
        "promoted": promoted,
        "model": resulting_model(run, start),
        "alarms": drift(run),
    }


def resulting_model(run: Path, start: Path) -> str:
    """Returns the resulting model of a run, or its initial model if the run promoted or learned nothing."""
    return str(run / "model" if (run / "model").is_dir() else start)


def final(experiment: Experiment) -> dict[str, Any]:
    return rates(experiment.evaluate("final", Path(experiment.result("relapse")["model"]), seed=experiment.seed))


PHASES: dict[str, Callable[[Experiment], dict[str, Any]]] = {
    "plant": plant,
    "capture": capture,
    "promote": promote,
    "vary": vary,
    "before": before,
    "train": train,
    "after": after,
    "imitate": imitate,
    "relapse": relapse,
    "final": final,
}


def rates(run: Path) -> dict[str, Any]:
    """Returns the success of an evaluation and how often the audit contradicts the score: in captured failures, and in passed attempts."""
    phases = json.loads((run / "evaluations.json").read_text())
    rate = phases["eval"]["heldout"]
    with Collection(run) as collection:
        against = sum(contradicted(trace) for trace in collection.traces())
    return {"value": rate["value"], "ci_low": rate["ci_low"], "ci_high": rate["ci_high"], "n": rate["n"], "against": against}


def contradicted(trace: Trace) -> bool:
    """Whether reward and audit of an episode differ. A passed episode that exploits the reward is captured too, so none is missed."""
    if trace.score is None or trace.score.value is None or AUDIT_PART not in trace.score.parts:
        return False
    return (trace.score.value >= 1.0) != (trace.score.parts[AUDIT_PART] >= 1.0)


def drift(run: Path) -> list[str]:
    """The drift alarms of a run, by rule."""
    steps = [line for line in read_json_lines(run / "metrics.jsonl") if "episodes" in line]
    return [text.partition(":")[0] for end in range(len(steps)) for text in drift_alerts(steps[: end + 1])]


def run_phases(experiment: Experiment, wanted: Sequence[str]) -> None:
    """Runs the unfinished phases in order and stores the result of each."""
    experiment.folder.mkdir(parents=True, exist_ok=True)
    for phase in (name for name in PHASES if name in wanted):
        path = experiment.folder / f"{phase}.json"
        if not path.exists():
            print(f"seed {experiment.seed}: {phase}", file=sys.stderr, flush=True)
            write_atomically(path, json.dumps(PHASES[phase](experiment), indent=2) + "\n", durable=True)


def missed_targets(results: dict[str, dict[str, Any]]) -> list[str]:
    """Describes the figures of a seed that miss their targets."""
    tests = {
        "tagged right": (results["capture"]["share"] or 0.0) >= TARGETS["tagged right"],
        "before": results["before"]["value"] < TARGETS["before"],
        "after": results["after"]["value"] > TARGETS["after"],
        "blocked and rolled back": results["relapse"]["rolled_back"] > 0,
        "final": results["final"]["value"] > TARGETS["after"],
        "audit agrees": not any(results[phase]["against"] for phase in ("before", "after", "final")),
    }
    return [name for name, ok in tests.items() if not ok]


def row(seed: int, results: dict[str, dict[str, Any]]) -> list[str]:
    def rate(phase: str) -> str:
        rates_of_phase = results[phase]
        return f"{rates_of_phase['value']:.2f} [{rates_of_phase['ci_low']:.2f}, {rates_of_phase['ci_high']:.2f}]"

    captured, alarms = results["capture"], Counter(results["relapse"]["alarms"])
    versions_by_outcome: dict[str, list[str]] = {}
    for version, outcome, _ in results["relapse"]["refused"]:
        versions_by_outcome.setdefault(outcome, []).append(str(version))
    return [
        str(seed),
        f"{captured['right']} of {captured['planted']}",
        str(results["promote"]["cases"]),
        str(results["vary"]["tasks"]),
        rate("before"),
        rate("after"),
        "; ".join(f"{', '.join(versions)} {outcome}" for outcome, versions in versions_by_outcome.items()) or "none",
        rate("final"),
        str(sum(results[phase]["against"] for phase in ("before", "after", "final"))),
        ", ".join(f"{alarm} x{count}" for alarm, count in alarms.items()) or "none",
        ", ".join(missed_targets(results)) or "none",
    ]


def table(experiments: Sequence[Experiment]) -> str:
    """Returns a Markdown table with one row per seed."""
    head = ["seed", "tagged by the rule", "cases", "practice tasks", "before", "after", "versions refused", "after the gate"]
    head += ["audit against reward", "alarms of the relapse", "targets missed"]
    rows = [row(experiment.seed, {phase: experiment.result(phase) for phase in PHASES}) for experiment in experiments]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--phases", nargs="+", choices=list(PHASES), default=list(PHASES), help="run only these phases; the table needs all"
    )
    parser.add_argument("--short", action="store_true", help="small sizes: all phases in minutes, without targets")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "weakness", help="folder of all results")
    parser.add_argument("--out", type=Path, help="also write the table to this Markdown file")
    parser.add_argument("overrides", nargs="*", help="recipe overrides, such as sandbox.backend=bubblewrap")
    args = parser.parse_args()
    if args.short and args.out:
        parser.error("--short only tests the phases; it creates no table for --out")
    size, work = (SHORT, args.work / "short") if args.short else (Size(), args.work)
    overrides = (*size.overrides, *args.overrides)
    seeds = " ".join(map(str, args.seeds))
    origin = stored.origin(
        f"python benchmarks/weakness.py --seeds {seeds}", [*stored.LOOP, "agentrl/failure", "agentrl/practice"], args.seeds
    )
    experiments = [Experiment(seed=seed, folder=work.resolve() / f"seed{seed}", overrides=overrides, size=size) for seed in args.seeds]
    for experiment in experiments:
        run_phases(experiment, args.phases)
    if set(args.phases) != set(PHASES):
        return 0
    if args.short:
        print(table(experiments))
        return 0
    phases = inspect.cleandoc((__doc__ or "").partition("--work:\n\n")[2].partition("\n\nA finished")[0])
    text = "\n\n".join(
        [
            "# A planted weakness, trained away",
            STORY,
            f"```sh\npython benchmarks/weakness.py --seeds {seeds}\n```",
            LENGTH,
            f"```text\n{phases}\n```",
            f"Before and after are success rates on held-out questions of kind `{KIND}`: one greedy attempt each, 95% intervals."
            " The gate evaluates every fourth version; after two rollbacks it only blocks.",
            table(experiments) + (f"\n\nRun with `{' '.join(args.overrides)}`." if args.overrides else ""),
            f"`tagged by the rule`: how many of the failures that submitted the whole part were tagged `{CAUSE}`. The rule checks the same"
            " condition.",
            f"Targets: at least {TARGETS['tagged right']:.0%} tagged {CAUSE}; success from below {TARGETS['before']} to above"
            f" {TARGETS['after']}, also after the gate, which rolls back; no contradiction by the audit. An alarm means"
            " that the reward rises while the audit score falls ([verifiers.md](verifiers.md#an-audit)).",
        ]
    )
    print(text)
    if args.out:
        write_atomically(args.out, text + "\n")
        evals = ("before", "after", "final")
        stored.keep("weakness", origin, runs=[{"seed": run.seed, **{phase: run.result(phase) for phase in evals}} for run in experiments])
    return int(any(missed_targets({phase: experiment.result(phase) for phase in PHASES}) for experiment in experiments))


if __name__ == "__main__":
    sys.exit(main())
