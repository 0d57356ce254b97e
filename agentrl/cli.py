"""The command line: parse, call, print. Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from pydantic import ValidationError

from agentrl import __version__
from agentrl.ending import explain, stopped
from agentrl.errors import RecipeError, UserError
from agentrl.fuzzing.commands import EXAMPLE, fuzz
from agentrl.plugins import add_project_root, resolve
from agentrl.recipe import Recipe, SandboxConfig, TasksConfig, apply_overrides
from agentrl.runfolder import Start, check_same, claimed, given_before, holds_run, merged
from agentrl.supervised.commands import tune_app

if TYPE_CHECKING:
    from agentrl.observe import Summary
    from agentrl.preflight import Checked
    from agentrl.prove.source import FamilySource

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training for tool-using language-model agents.",
)
sandbox_app = typer.Typer(no_args_is_help=True, help="Sandboxes: conformance check, attacks, list, clean up.")
app.add_typer(sandbox_app, name="sandbox")
app.add_typer(tune_app, name="tune")
app.command("fuzz", epilog=EXAMPLE)(fuzz)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
SandboxChoice = Annotated[str | None, typer.Option("--sandbox", help="auto, docker or bubblewrap (overrides the recipe).")]


_REASONS_SHOWN = 5  # for leaving episodes out, at the end of a run


@app.command(epilog="Example: agentrl train recipes/quickstart.py learner.lr=1e-4 --run-dir runs/x")
def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe file: a Python file with a module-level `recipe`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides, such as learner.lr=1e-4.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/NAME, runs/NAME-2, ...: the first free one.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the run folder.")] = False,
    sandbox: SandboxChoice = None,
    as_json: JsonFlag = False,
) -> None:
    """Fine-tune an agent with RL. Ctrl-C once: finish the step, save, report. Twice: stop now."""
    root, written = load_recipe(recipe, [])
    given = (*(overrides or []), *([f"sandbox.backend={sandbox}"] if sandbox else []))
    with run_folder(root, recipe, written, given, run_dir, resume=resume) as (start, loaded, checked):
        with loading():
            from agentrl.loop import train as run_training

        summary = asyncio.run(run_training(loaded, start, checked, root=root, console=not as_json))
        print(summary.model_dump_json() if as_json else describe(summary, start.folder))
        if summary.interrupted:
            print(f"interrupted; continue with: {start.command(resume=True)}", file=sys.stderr if as_json else sys.stdout)
            raise typer.Exit(130)
        if summary.problems:
            raise typer.Exit(1)


@app.command("eval", epilog="Example: agentrl eval recipes/quickstart.py --model runs/quickstart/model --json")
def evaluate(
    recipe: Annotated[Path, typer.Argument(help="Recipe file whose tasks, sandbox and verifier are used.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides, such as evaluation.heldout=64.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder or id. Default: the recipe's policy.model.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where transcripts and logs go. Default: runs/NAME-eval, -eval-2, ...")] = None,
    sandbox: SandboxChoice = None,
    as_json: JsonFlag = False,
) -> None:
    """Evaluate a model on the held-out tasks of a recipe."""
    root, written = load_recipe(recipe, [])
    given = (*(overrides or []), *([f"sandbox.backend={sandbox}"] if sandbox else []))
    if model is not None:
        chosen = str(Path(model).resolve()) if Path(model).is_dir() else model
        given = (*given, f"policy.model={json.dumps(chosen)}")
    with run_folder(root, recipe, written, given, run_dir, evaluating=True) as (start, loaded, checked):
        with loading():
            from agentrl.loop import evaluate_only

        results = asyncio.run(evaluate_only(loaded, start, checked, root=root, console=not as_json))
    if as_json:
        print(json.dumps(results))
        return
    for split, rate in results.items():
        print(f"{split:14} {rate['value']:.3f}  95% interval [{rate['ci_low']:.3f}, {rate['ci_high']:.3f}]  n={rate['n']}")


@app.command(epilog="Example: agentrl check sandboxes/chores --backend bubblewrap")
def check(
    target: Annotated[Path, typer.Argument(help="Folder of task folders, or a recipe file whose task family is checked.")],
    count: Annotated[
        int | None, typer.Option(min=1, help="Tasks of each split. Default: all of a folder, 24 of a recipe's family.")
    ] = None,
    sandbox: Annotated[
        str | None, typer.Option("--backend", "--sandbox", help="auto, docker or bubblewrap (overrides the recipe).")
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Cases at once.")] = 8,
    as_json: JsonFlag = False,
) -> None:
    """Prove a task family in real sandboxes: gold solutions score 1, nothing and cheats 0, tasks are pure, splits apart, answers hidden."""
    from agentrl.check import check_family, render

    source, config = open_target(target, sandbox)
    wanted = count if count is not None or target.is_dir() else 24
    report = asyncio.run(check_family(source, config, count=wanted, parallel=parallel, quiet=as_json))
    print(json.dumps(report.to_data()) if as_json else render(report))
    raise typer.Exit(0 if report.ok else 1)


@app.command(epilog="Example: agentrl doctor --json")
def doctor(as_json: JsonFlag = False) -> None:
    """Say what is there, what is missing, and the fix, a line each."""
    from agentrl import doctor as examine

    checks = examine.checks()
    print(examine.to_json(checks) if as_json else examine.render(checks))
    raise typer.Exit(0 if all(item.ok or not item.required for item in checks) else 1)


@app.command(epilog="Example: agentrl init my-agent && cd my-agent && agentrl train recipes/quickstart.py")
def init(target: Annotated[Path, typer.Argument(help="New folder.")]) -> None:
    """Write a project of your own: task family, verifier, recipe and test, ready to train."""
    from agentrl.project import init_project

    for path in init_project(target, target.resolve().name):
        print(path)


@app.command(epilog="Example: agentrl report runs/quickstart")
def report(run_dir: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Write report.html again from what is in a run folder."""
    from agentrl.observe import write_report

    if not run_dir.is_dir():
        raise UserError(f"no run folder {run_dir}", fix="give the folder of a run, such as runs/quickstart")
    print(write_report(run_dir))


@app.command(epilog="Example: agentrl versions runs/quickstart --json")
def versions(run_dir: Annotated[Path, typer.Argument(help="Run folder.")], as_json: JsonFlag = False) -> None:
    """List the policy versions of a run with their states and evaluations."""
    from agentrl import codec
    from agentrl.version import FolderRegistry

    if not (run_dir / "versions").is_dir():
        raise UserError(f"{run_dir} has no versions", fix="give the folder of a run, such as runs/quickstart")
    found = FolderRegistry(run_dir / "versions").versions()
    if as_json:
        print(json.dumps([codec.to_data(item) for item in found]))
        return
    for item in found:
        evals = "  ".join(f"{name} {value:.3f}" for name, value in item.evals.items())
        print(f"{item.number:6d}  {item.state:<11} {item.sha256[:12]}  {evals}")


BackendChoice = Annotated[str, typer.Option(help="docker, bubblewrap, auto, or all.")]
ImageFolder = Annotated[str, typer.Option(help="Folder that holds an image.toml.")]
RuntimeName = Annotated[str, typer.Option(help="Container runtime for Docker, such as runsc or kata.")]


@sandbox_app.command("check", epilog="Example: agentrl sandbox check --backend all")
def sandbox_check(
    backend: BackendChoice = "auto",
    image: ImageFolder = "sandboxes/tables",
    only: Annotated[str, typer.Option(help="Only checks whose name contains this.")] = "",
    runtime: RuntimeName = "",
    as_json: JsonFlag = False,
) -> None:
    """Hold a sandbox backend to the protocol: limits, isolation, clean-up, hostile programs."""
    from agentrl.check import backend_names, check_backend

    root = project_root(Path.cwd() / image / "image.toml")
    checking = [check_backend(name, image, root=root, only=only, runtime=runtime) for name in backend_names(backend)]
    results = [result for work in checking for result in asyncio.run(work)]
    if as_json:
        print(json.dumps(results))
    else:
        for item in results:
            verdict = "ok" if item["ok"] else "FAIL"
            print(f"{item['backend']:11} {verdict:4} {item['wall_s']:6.2f} s  {item['name']}  {item['detail']}")
    raise typer.Exit(0 if results and all(result["ok"] for result in results) else 1)


@sandbox_app.command("attack", epilog="Example: agentrl sandbox attack --backend all --only fork")
def sandbox_attack(
    backend: BackendChoice = "auto",
    image: ImageFolder = "sandboxes/tables",
    only: Annotated[str, typer.Option(help="Only attacks whose name contains this.")] = "",
    runtime: RuntimeName = "",
    as_json: JsonFlag = False,
) -> None:
    """Throw hostile programs at a sandbox backend and judge each: contained, ESCAPED, or error. About a minute a backend."""
    from agentrl.check import attack_backend, backend_names
    from agentrl.sandbox.attacks import AttackResult

    def report(name: str, result: AttackResult) -> None:
        row = f"{name:11} {result.verdict:12} {result.wall_s:5.1f} s  {result.kind:16} {result.name:27} {result.evidence}"
        print(row, file=sys.stderr if as_json else sys.stdout, flush=True)

    root = project_root(Path.cwd() / image / "image.toml")
    results: list[dict[str, Any]] = []
    for name in backend_names(backend):
        found = asyncio.run(attack_backend(name, image, root=root, only=only, runtime=runtime, report=report))
        counts = Counter(item["verdict"] for item in found)
        tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "no attack of that name"
        print(f"{found[0]['backend'] if found else name}: {tally}", file=sys.stderr if as_json else sys.stdout)
        results += found
    if as_json:
        print(json.dumps(results))
    bad = [item for item in results if item["verdict"] in ("ESCAPED", "error")]
    raise typer.Exit(0 if results and not bad else 1)


@sandbox_app.command("ls", epilog="Example: agentrl sandbox ls --json")
def sandbox_ls(as_json: JsonFlag = False) -> None:
    """List the sandboxes on this machine, leftovers of dead drivers included."""
    from agentrl import codec
    from agentrl.sandbox import list_open

    found = list_open()
    if as_json:
        print(json.dumps([codec.to_data(item) for item in found]))
        return
    for item in found:
        print(f"{item.name:40} {item.backend:11} {'in use' if item.driver_alive else 'left over':9} {item.run}")
    if not found:
        print("no sandboxes")


@sandbox_app.command("prune", epilog="Example: agentrl sandbox prune --images --dry-run")
def sandbox_prune(
    images: Annotated[bool, typer.Option("--images", help="Also images of sandboxes that nothing has used for long.")] = False,
    unused_days: Annotated[float | None, typer.Option(help="How long, with --images: 30 days where it is not given.", min=0.0)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove what dead drivers left behind, and with --images what is not used any more."""
    from agentrl.sandbox import evict, list_open, prune

    if unused_days is not None and not images:
        raise UserError("--unused-days says which images are removed", fix="give --images too")
    if dry_run:
        for sandbox in list_open():
            if not sandbox.driver_alive:
                print(f"would remove sandbox {sandbox.name} ({sandbox.backend})")
    else:
        print(f"{prune()} removed")
    if images:
        found = evict(days=30.0 if unused_days is None else unused_days, dry=dry_run)
        for item in found:
            print(f"{'would remove' if dry_run else 'removed'} {item.what}, {item.size / 1e6:.1f} MB, unused for {item.days:.1f} days")
        print(f"{len(found)} of images, {sum(item.size for item in found) / 1e6:.1f} MB{' would be' if dry_run else ''} removed")


@contextmanager
def loading() -> Iterator[None]:
    """Around the imports that take seconds: nothing runs yet, so ctrl-C ends the process there and then.

    Python would raise inside whatever is being imported, and there an interrupt can get lost.
    """
    before = signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(*_: object) -> NoReturn:
    os.write(2, b"\nstopped before anything was started\n")
    os._exit(130)


@contextmanager
def run_folder(
    root: Path,
    recipe: Path,
    written: Recipe,
    given: tuple[str, ...],
    wanted: Path | None,
    *,
    resume: bool = False,
    evaluating: bool = False,
) -> Iterator[tuple[Start, Recipe, Checked]]:
    """Around a run: its folder, held by this process alone, its recipe, and what was found by all the checks that are cheap.

    `given` are the overrides on the command line; a resumed run's earlier ones lie below them. An error that leaves this block is
    told to the person, and ends the command.
    """
    named = written if resume else apply_overrides(written, list(given))  # a typo is told before a folder is made
    name = next((item.partition("=")[2] for item in reversed(given) if item.startswith("name=")), named.name)
    verb, suffix = ("eval", "-eval") if evaluating else ("train", "")
    doing = shlex.join(["agentrl", verb, str(recipe), *given])
    with claimed(wanted, root / "runs", name + suffix, resume=resume, resumable=not evaluating, command=doing) as folder:
        start = Start(recipe=recipe, folder=folder, overrides=merged(given_before(folder) if resume else (), given))
        loaded = apply_overrides(written, list(start.overrides))
        if resume and (changes := check_same(folder, loaded)):
            print(f"resuming with {', '.join(changes)}", file=sys.stderr)
        with loading():
            from agentrl import preflight

            checked = preflight.check(loaded, folder, root=root)
        try:
            yield start, loaded, checked
        except typer.Exit:
            raise
        except BaseException as error:
            go_on = start.command(resume=True) if holds_run(folder) and not evaluating else ""
            if stopped(error):
                kept = f"; what was finished is kept, continue with: {go_on}" if go_on else ""
                print(f"stopped{kept}", file=sys.stderr)
                raise typer.Exit(130) from None
            raise typer.Exit(explain(error, folder=folder, go_on=go_on)) from None


def describe(summary: Summary, folder: Path) -> str:
    """The result of a run for a person: before and after, what it took, where to look."""
    lines = []
    pairs = (
        ("held-out", summary.heldout_before, summary.heldout_after),
        ("real tables", summary.heldout_real_before, summary.heldout_real_after),
    )
    for name, before, after in pairs:
        if before is not None:
            then = f" -> {after.value:.2f} [{after.ci_low:.2f}, {after.ci_high:.2f}]" if after is not None else ""
            lines.append(f"{name:12} {before.value:.2f} [{before.ci_low:.2f}, {before.ci_high:.2f}]{then}  (95% intervals)")
    stall = f", median stall {summary.swap_stall_ms_p50:.0f} ms" if summary.swap_stall_ms_p50 is not None else ""
    broken = f"{summary.tasks_quarantined} broken tasks set aside, " if summary.tasks_quarantined else ""
    minutes = sum(summary.wall_s.values()) / 60
    lines.append(
        f"{summary.steps} steps, {summary.episodes} episodes ({summary.episodes_left_out} left out), "
        f"{broken}"
        f"{summary.tokens_trained:,} tokens trained, {summary.weight_swaps} weight swaps{stall}, {minutes:.1f} minutes"
    )
    lines += [f"{count:>8} left out  {reason}" for reason, count in list(summary.left_out_reasons.items())[:_REASONS_SHOWN]]
    if len(summary.left_out_reasons) > _REASONS_SHOWN:
        lines.append(f"{'':8} and for other reasons: left_out_reasons in {folder / 'summary.json'}")
    lines.append(f"report {folder / 'report.html'}")
    lines.append(f"model  {folder / 'model'}" if (folder / "model").is_dir() else "model  none: the weights are still those of version 0")
    return "\n".join([*lines, *(f"no result: {problem}" for problem in summary.problems)])


def open_target(target: Path, backend: str | None) -> tuple[FamilySource, SandboxConfig]:
    """The task family and the sandbox settings that a folder of task folders, or a recipe file, means."""
    from agentrl.prove.source import FamilySource

    if target.is_dir():
        root = project_root(target.resolve() / "task")
        source = FamilySource(tasks=TasksConfig(family=str(target.resolve())), root=root)
        source.open()  # before the backend's name is looked at: a mistake in a folder is told first
        return source, _sandbox_config(backend or "auto")
    root, loaded = load_recipe(target, [f"sandbox.backend={backend}"] if backend else [])
    return FamilySource(tasks=loaded.tasks, root=root, seed=loaded.seed), loaded.sandbox


def _sandbox_config(backend: str) -> SandboxConfig:
    try:
        return SandboxConfig.model_validate({"backend": backend})
    except ValidationError:
        raise UserError(f"no sandbox backend {backend!r}", fix="use docker, bubblewrap or auto") from None


def load_recipe(path: Path, overrides: list[str]) -> tuple[Path, Recipe]:
    """The project root and the recipe of a file, with overrides laid over it; the root is put on `sys.path`."""
    if not path.is_file():
        raise RecipeError(f"no recipe file {path}", fix="give the path of a Python file with a module-level `recipe`")
    root = project_root(path)
    add_project_root(root)
    found = resolve(f"{path.resolve()}:recipe")
    if not isinstance(found, Recipe):
        raise RecipeError(f"{path}: `recipe` is {type(found).__name__}, not agentrl.Recipe", fix="write recipe = Recipe(...)")
    return root, apply_overrides(found, overrides)


def project_root(path: Path) -> Path:
    """The nearest folder above a file that holds a pyproject.toml, else the current directory."""
    for folder in path.resolve().parents:
        if (folder / "pyproject.toml").is_file():
            return folder
    return Path.cwd()


def run_recipe(file: str) -> NoReturn:
    """What a recipe file calls when it is run as a script: the same as `agentrl train FILE ...`."""
    main(["train", file, *sys.argv[1:]])


def main(argv: list[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app(args=argv, prog_name="agentrl")
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if stopped(error):
            print("stopped", file=sys.stderr)
            sys.exit(130)
        sys.exit(explain(error))
    sys.exit(0)


@app.command(hidden=True)
def version() -> None:
    """Print the version."""
    print(__version__)
