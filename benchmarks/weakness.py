"""Plants a weakness, captures and tags it, trains it away with practice, and lets the gate keep it away.

    python benchmarks/weakness.py --seeds 0 1 2 --out docs/failures-experiment.md
    python benchmarks/weakness.py --seeds 0 --phases plant capture          # only the first phases
    python benchmarks/weakness.py --seeds 0 --short                         # all phases in minutes, without targets

Each seed has a folder below --work:

    plant     SFT teaches the base policy careful work and one bad habit: asked for a total, it submits the whole part
    capture   the policy is evaluated on held-out totals; failures are captured and tagged by the built-in rules
    promote   correctly tagged failures become cases of a suite
    vary      `agentrl practice` derives tasks from the cases and proves them
    before    success of the policy on other held-out totals
    train     a run in which half of the groups use practice tasks
    after     success of the result on the same totals
    imitate   a short round of SFT on demonstrations of which a few have the habit
    relapse   a run from there whose reward pays for the habit, with a gate that rolls back
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
from agentrl.reward.combine import AUDIT_PART  # noqa: E402
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
STORY = """\
This experiment shows the cycle from a failure to a gate: the quickstart's policy learns a bad habit, practice removes it, and a gate keeps
it away from a later run that rewards it."""
LENGTH = """\
A seed takes 15 to 20 minutes on two cores; an interrupted experiment continues. `--short` runs all phases in two minutes without targets,
as CI does (`tests/e2e/test_weakness.py`)."""
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
    turns = [turn for line in trace.episode.trajectories for turn in line.turns]
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

    def done(self, phase: str) -> dict[str, Any]:
        """Returns the result of a phase. Raises `SystemExit` if the phase has not run."""
        path = self.folder / f"{phase}.json"
        if not path.exists():
            raise SystemExit(f"error: phase {phase} of seed {self.seed} has not run\nfix: add it to --phases, or omit --phases")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def agentrl(self, *arguments: str, may_fail: bool = False) -> str:
        """Runs an agentrl command at the project's root and returns what it printed."""
        command = [sys.executable, "-m", *self.command, *arguments]
        print("+ agentrl", *arguments, file=sys.stderr, flush=True)
        ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode != 0 and not (may_fail and ended.returncode == 1):
            raise SystemExit(f"{' '.join(command)} ended with exit code {ended.returncode}\n{ended.stdout[-2000:]}")
        return ended.stdout

    def evaluated(self, name: str, model: Path, *, seed: int) -> Path:
        """Evaluates a model on held-out questions of the kind. An interrupted evaluation restarts."""
        run = self.folder / name
        shutil.rmtree(run, ignore_errors=True)
        given = [f"seed={seed}", f"tasks.family.options.kinds={KIND}", *self.overrides]
        self.agentrl("eval", str(RECIPE), *given, "--model", str(model), "--run-dir", str(run))
        return run

    def trained(self, name: str, model: Path, given: Sequence[str]) -> Path:
        """Starts or continues a run. A run that promoted or learned nothing exits with 1; the table includes it."""
        run = self.folder / name
        resume = ["--resume"] if (run / "recipe.json").exists() else []
        wanted = [f"seed={self.seed}", f"name={name}", f"policy.model={json.dumps(str(model))}", *given, *self.overrides]
        self.agentrl("train", str(RECIPE), *wanted, "--run-dir", str(run), *resume, may_fail=True)
        summary = run / "summary.json"
        if not summary.exists() or not json.loads(summary.read_text())["finished"]:
            raise SystemExit(f"error: {run} did not finish\nfix: repeat this command, which continues the run")
        return run


def plant(one: Experiment) -> dict[str, Any]:
    some = demonstrations(one.seed, one.size.demonstrations, kinds=one.size.kinds)
    return imitated(BASE, one.folder / "planted", some, seed=one.seed, lr=1e-3)


def imitate(one: Experiment) -> dict[str, Any]:
    some = demonstrations(one.seed, one.size.imitated, habit=LEFTOVER, kinds=KIND)
    return imitated(Path(one.done("train")["model"]), one.folder / "imitated", some, seed=one.seed, lr=3e-4)


def imitated(model: Path, out: Path, some: Iterator[tuple[Task, list[Act]]], *, seed: int, lr: float) -> dict[str, Any]:
    """SFT of a model on demonstrations."""
    from transformers import AutoTokenizer

    from agentrl.agent.chat import ChatFormat
    from agentrl.supervised.tune import train_sft
    from recipes.base_policy import MOST_TOKENS, encode

    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = ChatFormat(tokenizer)
    rows = [encode(chat, tokenizer, task, acts) for task, acts in some]
    rows = [row for row in rows if len(row["input_ids"]) <= MOST_TOKENS]
    shutil.rmtree(out, ignore_errors=True)
    loss = train_sft(rows, model, out, epochs=1.0, lr=lr, batch=32, seed=seed)
    return {"demonstrations": len(rows), "loss": loss, "model": str(out)}


def capture(one: Experiment) -> dict[str, Any]:
    run = one.evaluated("captured", one.folder / "planted", seed=one.seed + OTHER_TASKS)
    with Collection(run) as collection:
        return {"run": str(run), **named(collection.traces())}


def named(traces: Iterator[Trace]) -> dict[str, Any]:
    """Counts the failures and the planted ones among them, and the share of planted ones whose first tag is the correct one."""
    found = [(has_habit(trace), trace.tags[0].name if trace.tags else "") for trace in traces]
    planted = [tag for habit, tag in found if habit]
    right = sum(tag == CAUSE for tag in planted)
    return {"failures": len(found), "planted": len(planted), "right": right, "share": right / len(planted) if planted else None}


def promote(one: Experiment) -> dict[str, Any]:
    shutil.rmtree(one.suite, ignore_errors=True)
    filters = ["--kind", KIND, "--tag", CAUSE, "--most", str(one.size.cases)]
    said = one.agentrl("failures", "promote", str(one.done("capture")["run"]), "--into", str(one.suite), *filters)
    return {"cases": len(list((one.suite / "cases").glob("*.json"))), "said": said}


def vary(one: Experiment) -> dict[str, Any]:
    wanted = ["--count", str(one.size.variants), "--seed", str(one.seed), "--json"]
    said = one.agentrl("practice", str(one.suite), str(RECIPE), *one.overrides, *wanted)
    found: dict[str, Any] = json.loads(said)
    return {"tasks": found["tasks"], "refused": len(found["refused"])}


def before(one: Experiment) -> dict[str, Any]:
    return rates(one.evaluated("before", one.folder / "planted", seed=one.seed))


def train(one: Experiment) -> dict[str, Any]:
    practice = json.dumps({str(one.suite): 1})
    start = one.folder / "planted"
    run = one.trained("repair", start, [f"steps={one.size.steps}", f"tasks.practice={practice}", "tasks.practice_share=0.5"])
    return {"run": str(run), "model": left_by(run, start), "alarms": drift(run)}


def after(one: Experiment) -> dict[str, Any]:
    return rates(one.evaluated("after", Path(one.done("train")["model"]), seed=one.seed))


def relapse(one: Experiment) -> dict[str, Any]:
    start = Path(one.done("imitate")["model"])
    given = [
        f"steps={one.size.steps}",
        f"tasks.family.options.kinds={KIND}",
        'tasks.verifiers=["benchmarks.weakness_recipe:rewards_the_habit"]',
        f"gate.suite={json.dumps(str(one.suite))}",
        f"gate.every={one.size.gate_every}",
        "learner.lr=5e-4",
    ]
    run = one.trained("relapse", start, given)
    verdicts = read_verdicts(run)
    refused = [verdict for verdict in verdicts if verdict.outcome in (GateOutcome.BLOCKED, GateOutcome.ROLLED_BACK)]
    promoted = [verdict.version for verdict in verdicts if verdict.promoted]
    return {
        "run": str(run),
        "refused": [[verdict.version, str(verdict.outcome), verdict.reason] for verdict in refused],
        "rolled_back": sum(verdict.outcome is GateOutcome.ROLLED_BACK for verdict in refused),
        "promoted": promoted,
        "model": left_by(run, start),
        "alarms": drift(run),
    }


def left_by(run: Path, start: Path) -> str:
    """Returns the resulting model of a run, or its initial model if the run promoted or learned nothing."""
    return str(run / "model" if (run / "model").is_dir() else start)


def final(one: Experiment) -> dict[str, Any]:
    return rates(one.evaluated("final", Path(one.done("relapse")["model"]), seed=one.seed))


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
    found = phases["eval"]["heldout"]
    with Collection(run) as collection:
        against = sum(contradicted(trace) for trace in collection.traces())
    return {"value": found["value"], "ci_low": found["ci_low"], "ci_high": found["ci_high"], "n": found["n"], "against": against}


def contradicted(trace: Trace) -> bool:
    """Whether reward and audit of an episode differ. A passed episode that exploits the reward is captured too, so none is missed."""
    if trace.score is None or trace.score.value is None or AUDIT_PART not in trace.score.parts:
        return False
    return (trace.score.value >= 1.0) != (trace.score.parts[AUDIT_PART] >= 1.0)


def drift(run: Path) -> list[str]:
    """The drift alarms of a run, by rule."""
    steps = [line for line in read_json_lines(run / "metrics.jsonl") if "episodes" in line]
    return [text.partition(":")[0] for at in range(len(steps)) for text in drift_alerts(steps[: at + 1])]


def run_phases(one: Experiment, wanted: Sequence[str]) -> None:
    """Runs the unfinished phases in order and stores the result of each."""
    one.folder.mkdir(parents=True, exist_ok=True)
    for phase in (name for name in PHASES if name in wanted):
        path = one.folder / f"{phase}.json"
        if not path.exists():
            print(f"seed {one.seed}: {phase}", file=sys.stderr, flush=True)
            write_atomically(path, json.dumps(PHASES[phase](one), indent=2) + "\n", durable=True)


def missed(found: dict[str, dict[str, Any]]) -> list[str]:
    """Describes the figures of a seed that miss their targets."""
    tests = {
        "tagged right": (found["capture"]["share"] or 0.0) >= TARGETS["tagged right"],
        "before": found["before"]["value"] < TARGETS["before"],
        "after": found["after"]["value"] > TARGETS["after"],
        "blocked and rolled back": found["relapse"]["rolled_back"] > 0,
        "final": found["final"]["value"] > TARGETS["after"],
        "audit agrees": not any(found[phase]["against"] for phase in ("before", "after", "final")),
    }
    return [name for name, ok in tests.items() if not ok]


def row(seed: int, found: dict[str, dict[str, Any]]) -> list[str]:
    def rate(phase: str) -> str:
        one = found[phase]
        return f"{one['value']:.2f} [{one['ci_low']:.2f}, {one['ci_high']:.2f}]"

    caught, alarms = found["capture"], Counter(found["relapse"]["alarms"])
    refused: dict[str, list[str]] = {}
    for version, outcome, _ in found["relapse"]["refused"]:
        refused.setdefault(outcome, []).append(str(version))
    return [
        str(seed),
        f"{caught['right']} of {caught['planted']}",
        str(found["promote"]["cases"]),
        str(found["vary"]["tasks"]),
        rate("before"),
        rate("after"),
        "; ".join(f"{', '.join(versions)} {outcome}" for outcome, versions in refused.items()) or "none",
        rate("final"),
        str(sum(found[phase]["against"] for phase in ("before", "after", "final"))),
        ", ".join(f"{alarm} x{count}" for alarm, count in alarms.items()) or "none",
        ", ".join(missed(found)) or "none",
    ]


def table(experiments: Sequence[Experiment]) -> str:
    """Returns a Markdown table with one row per seed."""
    head = ["seed", "tagged by the rule", "cases", "practice tasks", "before", "after", "versions refused", "after the gate"]
    head += ["audit against reward", "alarms of the relapse", "targets missed"]
    rows = [row(one.seed, {phase: one.done(phase) for phase in PHASES}) for one in experiments]
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
    given = parser.parse_args()
    if given.short and given.out:
        parser.error("--short shows that every phase works, and makes no table for --out")
    size, work = (SHORT, given.work / "short") if given.short else (Size(), given.work)
    overrides = (*size.overrides, *given.overrides)
    seeds = " ".join(map(str, given.seeds))
    origin = stored.origin(
        f"python benchmarks/weakness.py --seeds {seeds}", [*stored.LOOP, "agentrl/failure", "agentrl/practice"], given.seeds
    )
    experiments = [Experiment(seed=seed, folder=work.resolve() / f"seed{seed}", overrides=overrides, size=size) for seed in given.seeds]
    for one in experiments:
        run_phases(one, given.phases)
    if set(given.phases) != set(PHASES):
        return 0
    if given.short:
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
            table(experiments) + (f"\n\nMade with `{' '.join(given.overrides)}`." if given.overrides else ""),
            f"`tagged by the rule`: failures that submitted the whole part, and those of them tagged `{CAUSE}`. The rule checks the same"
            " condition, so the column does not show how often a tag is right on other failures.",
            f"Targets: at least {TARGETS['tagged right']:.0%} tagged {CAUSE}; success from below {TARGETS['before']} to above"
            f" {TARGETS['after']}, also after the gate, which rolls back; no contradiction by the audit. Alarms are those of the relapse:"
            " the reward rises while the audit falls ([verifiers.md](verifiers.md#an-audit)).",
        ]
    )
    print(text)
    if given.out:
        write_atomically(given.out, text + "\n")
        rates = ("before", "after", "final")
        stored.keep("weakness", origin, runs=[{"seed": one.seed, **{phase: one.done(phase) for phase in rates}} for one in experiments])
    return int(any(missed({phase: one.done(phase) for phase in PHASES}) for one in experiments))


if __name__ == "__main__":
    sys.exit(main())
