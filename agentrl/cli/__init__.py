"""The command line. Exit codes: 0 done, 1 failed, 2 usage error, 130 interrupted.

The module of a command is imported when the command is used, so `agentrl --help` imports no such module.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup

from agentrl import __version__
from agentrl.base.secrets import RedactingFormatter
from agentrl.cli.terminal import outlast_readers, settle
from agentrl.session.ending import ended_by_user, report_error


class Command(NamedTuple):
    """A command of `agentrl`: the function or `typer.Typer` that implements it, as `module:attribute` below `agentrl.cli`."""

    implementation: str
    summary: str
    example: str = ""


COMMANDS: dict[str, dict[str, Command]] = {
    "Train": {
        "train": Command(
            "train:train", "Fine-tune an agent with reinforcement learning.", "train recipes/quickstart.py learner.lr=1e-4 --run-dir runs/x"
        ),
        "sample": Command(
            "train:sample",
            "Sample and score attempts at training tasks without training.",
            "sample recipes/quickstart.py --groups 16 --model runs/quickstart@12",
        ),
        "worker": Command("train:worker", "Sample groups for a run that is in progress.", "worker runs/quickstart"),
        "tune": Command("tune:tune_app", "Train on the episodes of a run without RL: imitation, preferences or a reward model."),
        "practice": Command(
            "cases:practice",
            "Generate training tasks from the cases of a suite.",
            "practice evals/pricing recipes/quickstart.py --count 24",
        ),
    },
    "Evaluate": {
        "eval": Command(
            "train:evaluate",
            "Evaluate a model or any other policy on held-out tasks or on suites of cases.",
            "eval recipes/quickstart.py --model runs/quickstart/model --json; "
            "agentrl eval evals/reading --policy runs/quickstart@12 --junit eval.xml",
        ),
        "compare": Command(
            "suites:compare_evaluations",
            "Compare two evaluations of a suite case by case, or two training runs.",
            "compare runs/quickstart-eval runs/quickstart-eval-2 --difference 0.05; agentrl compare runs/quickstart runs/quickstart-2",
        ),
        "history": Command(
            "history:history",
            "Show the results of suites over policy versions.",
            "history runs/quickstart --out history.html; agentrl history runs/twelve runs/last",
        ),
        "judge": Command("judging:judge_app", "Measure a model judge on human labels and correct its success rates."),
        "label": Command("judging:label", "Label the answers of a run by hand.", "label runs/quickstart --by anna --phase after"),
        "score": Command(
            "score:score",
            "List the pending scores of a run, and send scores by command, from a file, over HTTP or on a web page.",
            "score runs/mine --list; agentrl score runs/mine EPISODE review 0.5 --by anna; agentrl score runs/mine --serve --port 8421",
        ),
    },
    "Failures": {
        "failures": Command("failures:failures_app", "List, read, tag, cluster, promote, import and export captured failures."),
    },
    "Inspect": {
        "view": Command(
            "view:view", "Show runs in a live web page, down to single tokens.", "view runs; agentrl view runs/quickstart --open"
        ),
        "watch": Command("view:watch", "Show a run in the terminal, during training or afterwards.", "watch runs/quickstart"),
        "report": Command("runs:report", "Write report.html from the files of a run folder.", "report runs/quickstart --follow"),
        "profile": Command(
            "profile:profile",
            "Run a few steps of a recipe and print where the time is spent.",
            "profile recipes/quickstart.py serving.threads=2",
        ),
        "tasks": Command("tasks:tasks_app", "List, add, remove and reweight the tasks of a run, even during training."),
        "versions": Command("versions:versions_app", "List, compare, promote and pin the policy versions of a run, or roll back to one."),
        "store": Command("store:store", "List, count and verify the sampled groups of a run.", "store runs/quickstart --verify"),
        "export": Command(
            "export:export",
            "Export the episodes of a run as inspect_ai logs, Parquet, JSON lines or ATIF.",
            "export runs/quickstart --to eval --step 12 && inspect view --log-dir runs/quickstart/exports/eval",
        ),
        "memory": Command(
            "runs:memory", "Show the notes of a run's agents and check which agents read them.", "memory runs/archive --json"
        ),
    },
    "Setup": {
        "init": Command(
            "doctor:init",
            "Create a project with a task family, verifier, recipe and test.",
            "init my-agent && cd my-agent && agentrl train recipes/quickstart.py",
        ),
        "doctor": Command("doctor:doctor", "Check this machine and print how to fix what is missing.", "doctor --json"),
        "check": Command(
            "check:check", "Check a task family in real sandboxes before training on it.", "check sandboxes/chores --backend bubblewrap"
        ),
        "env": Command("environments:env_app", "Install packages that contain environments, each in a separate virtual environment."),
        "chaos": Command("chaos:chaos_app", "Kill parts of a small real run and verify that no data is lost."),
        "cluster": Command("cluster:cluster_app", "Show what a run needs and whether it fits a cluster; write Kubernetes manifests."),
        "sandbox": Command("sandboxes:sandbox_app", "Check and attack sandbox backends; list, remove and serve sandboxes."),
        "model": Command("model:model_app", "Import a model from a folder, a GGUF file or a package."),
    },
}
"""Heading of `agentrl --help` -> name -> command."""


class LazyGroup(TyperGroup):
    """The commands of `COMMANDS`, each imported when it is used. typer bundles its own click, whose types it does not export."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of all commands, in the order of the help text."""
        return [name for commands in COMMANDS.values() for name in commands]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Imports and returns a command; None if there is no such command."""
        for commands in COMMANDS.values():
            if (command := commands.get(cmd_name)) is not None:
                return load_command(cmd_name, command)
        return super().get_command(ctx, cmd_name)

    def get_help(self, ctx: Any) -> str:
        """Returns the help text, which is not rendered with rich because that would take longer than everything else that `agentrl --help`
        does."""
        width = max(len(name) for name in (*self.list_commands(ctx), "-h, --help"))
        lines = ["Usage: agentrl COMMAND [ARGS]...", "", f"  {self.help}"]
        for heading, commands in COMMANDS.items():
            lines += ["", f"{heading}:", *(f"  {name:{width}}  {command.summary}" for name, command in commands.items())]
        lines += ["", "Options:", f"  {'--version':{width}}  Print the version.", f"  {'-h, --help':{width}}  Print this help.", ""]
        lines.append("Run `agentrl COMMAND --help` for the options of a command and an example.")
        return "\n".join(lines)


def load_command(name: str, command: Command) -> Any:
    """Imports the implementation of a command as a click command."""
    module, _, attribute = command.implementation.partition(":")
    implementation = getattr(importlib.import_module(f"agentrl.cli.{module}"), attribute)
    if isinstance(implementation, typer.Typer):
        implementation.info.help = command.summary
        loaded = typer.main.get_command(implementation)
    else:
        single = typer.Typer(pretty_exceptions_enable=False, add_completion=False, context_settings=HELP_OPTIONS)
        single.command(name, epilog=f"Example: agentrl {command.example}")(implementation)
        loaded = typer.main.get_command(single)
    loaded.name = name
    return loaded


HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


def command_group() -> typer.Typer:
    """Returns a command group without commands, to which a module adds its commands, such as those of `agentrl tune`."""
    return typer.Typer(no_args_is_help=True, add_completion=False, context_settings=HELP_OPTIONS)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP_OPTIONS,
    add_completion=False,
    help="Reinforcement-learning post-training for tool-using language-model agents.",
)


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
    """Runs `agentrl train FILE ...`. A recipe file calls this function when the file is run as a script."""
    main(["train", file, *sys.argv[1:]])


def main(argv: list[str] | None = None) -> NoReturn:
    """The entry point of the console script."""
    outlast_readers()
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    try:
        app(args=(sys.argv[1:] if argv is None else argv) or ["--help"], prog_name="agentrl")
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
