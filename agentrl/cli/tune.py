"""`agentrl tune sft`, `dpo` and `reward`: supervised training on the episodes of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli import command_group
from agentrl.cli.running import checked_run, say
from agentrl.cli.store import open_run_store
from agentrl.cli.terminal import outlasting_terminal
from agentrl.config import recipe
from agentrl.errors import UserError
from agentrl.judge.labels import TextPreference
from agentrl.judge.rendering import PromptField
from agentrl.records import Group
from agentrl.supervised.select import Preference, select_demonstrations, select_preferences
from agentrl.version.model_folder import write_chat_template

tune_app = command_group()

SHOWS = "question,answer"
MARGIN = 0.5
_LEAST = 1e-9  # minimum of values that would train nothing at 0

Run = Annotated[Path, typer.Argument(help="Run folder whose scored episodes are used.", callback=checked_run)]
Out = Annotated[Path, typer.Option(help="Folder to write the model to; must not exist.")]
Start = Annotated[Path | None, typer.Option("--model", help="Model folder to start from. Default: the run's base policy.")]
PerTask = Annotated[int, typer.Option(min=1, help="Maximum number of examples per task.")]
Margin = Annotated[float, typer.Option(min=0, help="Minimum difference between the two scores of a preference pair.")]
Epochs = Annotated[float, typer.Option(min=0.01, help="Passes over the data.")]
Rate = Annotated[float, typer.Option(min=_LEAST, help="Peak learning rate of a cosine schedule.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows per optimizer step.")]
Seed = Annotated[int, typer.Option(min=0)]


@tune_app.command("sft", epilog="Example: agentrl tune sft runs/quickstart --out models/imitated")
@outlasting_terminal()
def sft(
    run: Run,
    out: Out,
    model: Start = None,
    min_score: Annotated[
        float | None, typer.Option(help="Minimum score of an episode to imitate. Default: the task's pass threshold, or 1.")
    ] = None,
    per_task: PerTask = 1,
    epochs: Epochs = 2,
    lr: Rate = 1e-4,
    batch: BatchSize = 16,
    seed: Seed = 0,
) -> None:
    """Imitate the best episodes of a run (rejection sampling)."""
    start = _start(run, model, out)
    rows = select_demonstrations(_groups(run), min_score=min_score, per_task=per_task)
    print(f"{len(rows)} demonstrations")
    from agentrl.supervised import tune

    _done(run, out, tune.train_sft(rows, start, out, epochs=epochs, lr=lr, batch=batch, seed=seed))


@tune_app.command("dpo", epilog="Example: agentrl tune dpo runs/quickstart --out models/preferred --beta 0.1")
@outlasting_terminal()
def dpo(
    run: Run,
    out: Out,
    model: Start = None,
    margin: Margin = MARGIN,
    per_task: PerTask = 4,
    beta: Annotated[float, typer.Option(min=_LEAST, help="Strength of the KL constraint to the initial policy.")] = 0.1,
    epochs: Epochs = 1,
    lr: Rate = 1e-5,
    batch: BatchSize = 16,
    seed: Seed = 0,
) -> None:
    """Learn to prefer better attempts at a task to worse attempts (DPO)."""
    start = _start(run, model, out)
    pairs = _pairs(run, margin, per_task)
    from agentrl.supervised import tune

    _done(run, out, tune.train_dpo(pairs, start, out, beta=beta, epochs=epochs, lr=lr, batch=batch, seed=seed))


@tune_app.command(
    "reward",
    epilog="Examples: agentrl tune reward runs/quickstart --out models/reward; "
    "agentrl tune reward --labels labels/anna.jsonl --model models/small --out models/reward",
)
@outlasting_terminal()
def reward(
    out: Out,
    run: Annotated[Path | None, typer.Argument(help="Run folder whose scored episodes are used.", callback=checked_run)] = None,
    labels: Annotated[
        list[Path] | None, typer.Option(help="Learn from label files of `agentrl label` instead of a run. Needs --model.")
    ] = None,
    shows: Annotated[
        str | None,
        typer.Option(
            help=f"With --labels: fields in the model's input: question, reference, transcript, outputs, answer. Default: {SHOWS}."
        ),
    ] = None,
    model: Start = None,
    margin: Margin = MARGIN,
    per_task: PerTask = 4,
    epochs: Epochs = 1,
    lr: Rate = 1e-4,
    batch: BatchSize = 16,
    seed: Seed = 0,
) -> None:
    """Train a reward model from the scores of a run or from human labels."""
    from agentrl.judge.reward_model import validate_shows

    if (run is None) == (not labels):
        raise UserError("give either a run or labels", fix="give a run folder, or --labels FILE --model FOLDER")
    if shows if run is not None else margin != MARGIN:
        raise UserError(
            f"--{'shows' if run is not None else 'margin'} has no effect {'without' if run is not None else 'with'} --labels",
            fix="omit it",
        )
    if run is not None:
        start = _start(run, model, out)
        pairs = _pairs(run, margin, per_task)
        from agentrl.supervised import tune

        _done(run, out, tune.train_reward_model(pairs, start, out, epochs=epochs, lr=lr, batch=batch, seed=seed))
        return
    shown = validate_shows(tuple(name.strip() for name in (shows or SHOWS).split(",") if name.strip()))
    start = _model(model, out)
    texts = _labelled_pairs(labels or [], shown, per_task)
    from agentrl.supervised import tune

    _print_result(out, tune.train_reward_model(texts, start, out, epochs=epochs, lr=lr, batch=batch, seed=seed, shows=shown))


def _start(run: Path, model: Path | None, out: Path) -> Path:
    if not (run / "recipe.json").is_file():
        raise UserError(f"{run} is not a run folder", fix="give the folder of a run, such as runs/quickstart")
    return _model(model or run / "versions" / "000000", out)


def _model(start: Path | None, out: Path) -> Path:
    if out.exists():
        raise UserError(f"{out} already exists", fix="choose a different --out, or move the folder")
    if start is None:
        raise UserError("--labels needs a model to start from", fix="give a model folder with --model")
    if not (start / "config.json").is_file():
        raise UserError(f"{start} is not a model folder", fix="give a model folder with --model")
    out.parent.mkdir(parents=True, exist_ok=True)
    return start


def _pairs(run: Path, margin: float, per_task: int) -> list[Preference]:
    pairs = select_preferences(_groups(run), margin=margin, per_task=per_task)
    print(f"{len(pairs)} preferences")
    return pairs


def _labelled_pairs(labels: list[Path], shows: tuple[PromptField, ...], per_task: int) -> list[TextPreference]:
    from agentrl.judge.labels import preference_pairs, read_labels

    pairs = preference_pairs(read_labels(labels), shows, per_task=per_task)
    if not pairs:
        raise UserError("the label files contain no question with a right and a wrong answer", fix="label more answers: agentrl label RUN")
    print(f"{len(pairs)} preferences")
    return pairs


def _groups(run: Path) -> Iterator[Group]:
    with open_run_store(run) as store:
        for entry in store.entries(first=0):
            if entry.has_episodes and not entry.is_residual:  # its scores are only the late parts
                yield from store.groups([entry.index])


def _done(run: Path, out: Path, loss: float) -> None:
    used = run / "versions" / "000000" / "chat_template.jinja"
    if recipe.load(run / "recipe.json").policy.chat_template is not None and used.is_file():
        write_chat_template(out, used.read_text(encoding="utf-8"))  # the template of these episodes, which may differ from that of --model
    _print_result(out, loss)


def _print_result(out: Path, loss: float) -> None:
    say(f"final loss {loss:.4f}\nmodel {out}")
