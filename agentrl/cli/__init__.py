"""The command line: parse, call, print. Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, NoReturn

import typer

from agentrl import __version__
from agentrl.base.secrets import RedactingFormatter
from agentrl.cli import check, failures, history, judging, machine, memory, model, practice, runs, sandboxes, suites, train, tune
from agentrl.cli import sample as sampling
from agentrl.cli.terminal import outlast_readers, settle
from agentrl.session.ending import ended_by_user, report_error

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Reinforcement-learning post-training for tool-using language-model agents.",
)
EVAL_EXAMPLES = (
    "Example: agentrl eval recipes/quickstart.py --model runs/quickstart/model --json; "
    "agentrl eval evals/reading --policy runs/quickstart@12 --junit eval.xml"
)
sandbox_app = typer.Typer(no_args_is_help=True, help="Sandboxes: conformance check, attacks, list, clean up.")

app.command("train", epilog="Example: agentrl train recipes/quickstart.py learner.lr=1e-4 --run-dir runs/x")(train.train)
app.command("eval", epilog=EVAL_EXAMPLES)(train.evaluate)
app.command("sample", epilog="Example: agentrl sample recipes/quickstart.py --groups 16 --model runs/quickstart@12")(sampling.sample)
app.command("compare", epilog="Example: agentrl compare runs/quickstart-eval runs/quickstart-eval-2 --difference 0.05")(
    suites.compare_evaluations
)
app.command("history", epilog="Example: agentrl history runs/quickstart --out history.html; agentrl history runs/twelve runs/last")(
    history.history
)
app.command("check", epilog="Example: agentrl check sandboxes/chores --backend bubblewrap")(check.check)
app.command("practice", epilog="Example: agentrl practice evals/pricing recipes/quickstart.py --count 24")(practice.practice)
app.command("doctor", epilog="Example: agentrl doctor --json")(machine.doctor)
app.command("init", epilog="Example: agentrl init my-agent && cd my-agent && agentrl train recipes/quickstart.py")(machine.init)
app.command("report", epilog="Example: agentrl report runs/quickstart")(runs.report)
app.command("label", epilog="Example: agentrl label runs/quickstart --by anna --phase after")(judging.label)
app.command("versions", epilog="Example: agentrl versions runs/quickstart --json")(runs.versions)
app.command("memory", epilog="Example: agentrl memory runs/archive --json")(memory.memory)
sandbox_app.command("check", epilog="Example: agentrl sandbox check --backend all")(check.sandbox_check)
sandbox_app.command("attack", epilog="Example: agentrl sandbox attack --backend all --only fork")(check.sandbox_attack)
sandbox_app.command("ls", epilog="Example: agentrl sandbox ls --json")(sandboxes.sandbox_ls)
sandbox_app.command("prune", epilog="Example: agentrl sandbox prune --images --dry-run")(sandboxes.sandbox_prune)
app.add_typer(sandbox_app, name="sandbox")
app.add_typer(judging.judge_app, name="judge")
app.add_typer(failures.failures_app, name="failures")
app.add_typer(model.model_app, name="model")
app.add_typer(tune.tune_app, name="tune")


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Reinforcement-learning post-training for tool-using language-model agents."""


@app.command("version", hidden=True)
def version_command() -> None:
    """Print the version."""
    _version(True)


def run_recipe(file: str) -> NoReturn:
    """What a recipe file calls when it is run as a script: the same as `agentrl train FILE ...`."""
    main(["train", file, *sys.argv[1:]])


def main(argv: list[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    outlast_readers()
    shown = logging.StreamHandler()
    shown.setFormatter(RedactingFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[shown])
    try:
        app(args=argv, prog_name="agentrl")
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if ended_by_user(error):
            print("stopped", file=sys.stderr)
            sys.exit(130)
        sys.exit(report_error(error))
    finally:
        settle()
    sys.exit(0)
