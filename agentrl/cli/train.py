"""`agentrl train`, `agentrl eval`, `agentrl sample` and `agentrl worker`."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.base.numbers import plural
from agentrl.base.user_code import printable
from agentrl.cli.regressions import evaluate_recipe, evaluate_suites_command
from agentrl.cli.running import JsonFlag, SandboxChoice, all_overrides, load_recipe, loading, run_folder, say
from agentrl.cli.suites import evaluate_suite
from agentrl.errors import UserError
from agentrl.evaluation.policies import RequestOptions, find_policy
from agentrl.failure.case import check_attempt_options, load_suite
from agentrl.session.ending import is_disk_full, pause_until_room
from agentrl.session.folder import claim_run_folder, finished_summary

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe
    from agentrl.evaluation.policies import NamedPolicy
    from agentrl.observe import Summary
    from agentrl.run.sample import SampleResult, SampleTotals

_REASONS_SHOWN = 5  # why episodes were excluded
_TAGS_SHOWN = 4  # tags of failures


def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe file: a Python file with a module-level `recipe`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides, such as learner.lr=1e-4.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder. Default: the first free one of runs/NAME, runs/NAME-2, ...")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the run folder.")] = False,
    sandbox: SandboxChoice = None,
    cluster: Annotated[
        str | None, typer.Option(help="Start the parts on a Ray cluster: auto, HOST:PORT or ray://HOST:PORT. local: on this machine.")
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Restart the driver up to N times in a row if it is killed or fails, and continue the run.")
    ] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Fine-tune an agent with reinforcement learning.

    Press ctrl-C once to finish the current step, save, and write the report. Press it twice to stop immediately.

    objective.advantage, objective.loss, trackers, store, sandbox.backend and serving.weight_transfer accept the name of a built-in part, or
    a reference to your own part: module:attr, ./file.py:attr, or an entry point in the group agentrl.plugins.
    """
    root, written = load_recipe(recipe, [])
    changes = all_overrides(overrides, sandbox=sandbox, cluster=cluster)
    if restarts:
        raise typer.Exit(_train_supervised(root, recipe, written, changes, run_dir, resume=resume, restarts=restarts, as_json=as_json))
    with run_folder(root, recipe, written, changes, run_dir, resume=resume) as (start, loaded, checked):
        summary = finished_summary(start.folder, loaded) if resume else None
        if summary is not None:
            say(f"{start.folder} is already finished. To train more steps, add steps=N", file=sys.stderr)
        else:
            with loading():
                from agentrl.run.loop import train as run_training

            while summary is None:
                try:
                    summary = asyncio.run(run_training(loaded, start, checked, root=root, console=not as_json))
                except BaseException as error:
                    if not is_disk_full(error, start.folder):
                        raise
                    pause_until_room(error, start.folder)
                    start = replace(start, began=time.monotonic())
        if as_json:
            print(summary.model_dump_json())
        else:
            say(describe(summary, start.folder))
        if summary.interrupted:
            say(f"interrupted; continue with: {start.command(resume=True)}", file=sys.stderr if as_json else sys.stdout)
            raise typer.Exit(130)
        if summary.problems:
            raise typer.Exit(1)


def _train_supervised(
    root: Path,
    recipe: Path,
    written: Recipe,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    *,
    resume: bool,
    restarts: int,
    as_json: bool,
) -> int:
    """Runs the command in another process, and restarts that process if it is killed or fails. Returns the exit code."""
    from agentrl.cli.supervised import supervise

    name = (written if resume else written.but(*overrides)).name
    with claim_run_folder(run_dir, root / "runs", name, resume=resume, command=f"agentrl train {recipe}") as folder:
        pass  # the next command in this folder is the driver
    options = ["--run-dir", str(folder), *["--resume"] * resume, *["--json"] * as_json]
    return supervise([sys.executable, "-m", "agentrl", "train", str(recipe), *overrides, *options], folder, restarts=restarts)


def evaluate(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE|SUITE", help="Recipe file, or with --policy the folder of a suite.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Dotted overrides, such as evaluation.heldout=64. With --policy, additional suites.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Policy to evaluate: a model folder or id, RUN@VERSION, URL, or module:attr.")] = None,
    suite: Annotated[Path | None, typer.Option(help="Folder of a suite, whose cases replace the held-out tasks.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Attempts per case. Default: as set in the case or its suite.")] = None,
    threshold: Annotated[float, typer.Option(help="Lowest score of a passing attempt, for cases without a threshold.")] = 1.0,
    key_env: Annotated[str, typer.Option(help="With --policy URL: environment variable with the API key.")] = "",
    request: Annotated[
        list[str] | None, typer.Option(help="With --policy URL: additional request field, KEY=VALUE; temperature=null omits the field.")
    ] = None,
    header: Annotated[list[str] | None, typer.Option(help="With --policy URL: additional header, NAME=env:VARIABLE or file:PATH.")] = None,
    tokens_name: Annotated[str, typer.Option(help="With --policy URL: the name of the max_tokens field on that server.")] = "",
    junit: Annotated[Path | None, typer.Option(help="With --policy: file for JUnit XML.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="With --policy: store the results in the cases as their baselines.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Model folder or id, or RUN@VERSION. With --policy URL: the model name on that server.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for transcripts and logs. Default: the first free one of runs/NAME-eval, runs/NAME-eval-2, ..."),
    ] = None,
    sandbox: SandboxChoice = None,
    as_json: JsonFlag = False,
) -> None:
    """Evaluate a model or any other policy on held-out tasks or on suites of cases.

    agentrl eval RECIPE evaluates the recipe's model on its held-out tasks. With evaluation.attempts=8, each task is tried eight times,
    and the report shows pass@k and success against sampled tokens. With --suite, the cases of a suite replace the held-out tasks. With
    --policy URL or --policy module:attr, the command evaluates a policy that agentrl does not serve. --policy MODEL has the same effect as
    --model MODEL.

    agentrl eval SUITE ... evaluates a policy on suites without a recipe. --policy defaults to the policy recorded in suite.toml. The exit
    code is 0 if every case passes, otherwise 1. A case passes if the mean score of its attempts reaches its threshold.
    """
    without_recipe = recipe.is_dir() and suite is None and not (model or key_env or request or header or tokens_name)
    if policy is not None and suite is not None:
        raise UserError("--policy and --suite cannot be combined", fix="use --model, or agentrl eval SUITE [SUITE ...] --policy POLICY")
    requests = RequestOptions.parse(request or (), header or (), tokens_name)
    target = None if policy is None else find_policy(policy, model_name=model or "", key_env=key_env, requests=requests)
    if target is not None and target.served and recipe.is_file() and not (junit or pin):
        model, policy = policy, None  # the same as --model
    if policy is not None or without_recipe:
        arguments = all_overrides(overrides, sandbox=sandbox)
        _evaluate_policy(
            target, recipe, arguments, repeats=repeats, threshold=threshold, run_dir=run_dir, junit=junit, pin=pin, as_json=as_json
        )
        return
    of_policy = junit is not None or pin or bool(key_env or request or header or tokens_name)
    _check_recipe_options(recipe, of_policy=of_policy, of_suite=suite is None and (repeats is not None or threshold != 1.0))
    changes = all_overrides(overrides, sandbox=sandbox, model=model)
    if suite is None:
        _evaluate_held_out(recipe, changes, run_dir, as_json=as_json)
    else:
        root, written = load_recipe(recipe, [])
        check_attempt_options(repeats=repeats, threshold=threshold)
        cases = load_suite(suite)
        evaluate_suite(root, recipe, written, changes, run_dir, cases, repeats=repeats, threshold=threshold, as_json=as_json)


def _check_recipe_options(recipe: Path, *, of_policy: bool, of_suite: bool) -> None:
    """Checks the arguments of an evaluation without --policy.

    Args:
        of_policy: whether an option that needs --policy is set.
        of_suite: whether --repeats or --threshold is set without --suite.

    Raises `UserError` if `of_policy` or `of_suite` is true, or if `recipe` is the folder of a suite, which needs --policy here.
    """
    if of_policy:
        options = "--junit, --pin, --key-env, --request, --header and --tokens-name"
        raise UserError(f"{options} need --policy", fix="agentrl eval SUITE --policy POLICY")
    if recipe.is_dir():
        raise UserError(f"{recipe} is a suite and needs --policy", fix=f"agentrl eval {recipe} --policy FOLDER or RUN@VERSION")
    if of_suite:
        raise UserError(
            "--repeats and --threshold need a suite", fix="add --suite evals/SUITE, or repeat held-out tasks with evaluation.attempts=3"
        )


def _evaluate_held_out(recipe: Path, overrides: tuple[str, ...], run_dir: Path | None, *, as_json: bool) -> None:
    """Evaluates the model of a recipe on its held-out tasks, and prints the success rates."""
    root, written = load_recipe(recipe, [])
    with run_folder(root, recipe, written, overrides, run_dir, verb="eval") as (start, loaded, checked):
        with loading():
            from agentrl.evaluation.held_out import evaluate_held_out

        results = asyncio.run(evaluate_held_out(loaded, start, checked, root=root, console=not as_json))
    if as_json:
        print(json.dumps(results))
    else:
        _print_rates(results)


def _evaluate_policy(
    target: NamedPolicy | None,
    path: Path,
    arguments: Sequence[str],
    *,
    repeats: int | None,
    threshold: float,
    run_dir: Path | None,
    junit: Path | None,
    pin: bool,
    as_json: bool,
) -> None:
    """Evaluates a policy on the suites `path` and `arguments`, or on the held-out tasks of the recipe `path`.

    Args:
        target: the policy to evaluate; None means the policy recorded in the suites.
        arguments: overrides, and additional suites.
    """
    suites = [str(path), *(item for item in arguments if "=" not in item)]
    overrides = [item for item in arguments if "=" in item]
    if target is None or not path.is_file():
        evaluate_suites_command(
            suites, target, overrides, repeats=repeats, threshold=threshold, run_dir=run_dir, junit_file=junit, pinning=pin, as_json=as_json
        )
        return
    if len(suites) > 1 or junit is not None or pin:
        raise UserError(
            f"--junit, --pin and additional suites cannot be combined with the recipe {path}",
            fix=f"agentrl eval {path} [KEY=VALUE ...] --policy POLICY",
        )
    root, written = load_recipe(path, overrides)
    evaluate_recipe(root, written, target, repeats=repeats, threshold=threshold, run_dir=run_dir, as_json=as_json)


def _print_rates(results: dict[str, dict[str, Any]]) -> None:
    for split, rate in results.items():
        print(f"{split:14} {rate['value']:.3f}  95% interval [{rate['ci_low']:.3f}, {rate['ci_high']:.3f}]  n={rate['n']}")
        if rate["attempts"] > 1:
            shares = "  ".join(f"pass@{k} {share:.3f}" for k, share in rate["pass_at"].items())
            print(f"{'':14} {shares}  {rate['attempts']} attempts per task, {rate['tokens_mean']:,.0f} sampled tokens each")
        for bounded_rate in rate["thinking"]:
            success = (
                f"{bounded_rate['value']:.3f}  95% interval [{bounded_rate['ci_low']:.3f}, {bounded_rate['ci_high']:.3f}]"
                if "value" in bounded_rate
                else "no score"
            )
            tokens = "" if bounded_rate["tokens_mean"] is None else f"  {bounded_rate['tokens_mean']:,.0f} sampled tokens each"
            print(f"{'':14} {success}  at most {bounded_rate['thinking_tokens']} thinking tokens{tokens}")


def describe(summary: Summary, folder: Path) -> str:
    """Returns the result of a run as text: success before and after training, cost, and the paths of the report and the model."""
    from agentrl.experience.audit import token_balance
    from agentrl.judge import JudgeUsage
    from agentrl.observe.exclusions import printable_text
    from agentrl.observe.stats import rate_difference

    lines = []
    pairs = (
        ("held-out", summary.heldout_before, summary.heldout_after),
        ("real tables", summary.heldout_real_before, summary.heldout_real_after),
    )
    for name, before, after in pairs:
        if before is not None:
            then = ""
            if after is not None:
                low, high = rate_difference(before, after)
                change = f"{after.value - before.value:+.2f} [{low:+.2f}, {high:+.2f}]"
                then = f" -> {after.value:.2f} [{after.ci_low:.2f}, {after.ci_high:.2f}], {change}"
            lines.append(f"{name:12} {before.value:.2f} [{before.ci_low:.2f}, {before.ci_high:.2f}]{then}  (95% intervals)")
    stall = f", median stall {summary.swap_stall_ms_p50:.0f} ms" if summary.swap_stall_ms_p50 is not None else ""
    broken = f"{plural(summary.tasks_quarantined, 'broken task')} excluded, " if summary.tasks_quarantined else ""
    broken += f"{plural(summary.tasks_withheld, 'training task')} withheld, " if summary.tasks_withheld else ""
    broken += f"{plural(summary.attempts_cancelled, 'attempt')} cancelled, " if summary.attempts_cancelled else ""
    broken += f"{plural(summary.groups_stopped, 'group')} stopped early, " if summary.groups_stopped else ""
    minutes = sum(summary.wall_s.values()) / 60
    lines.append(
        f"{plural(summary.steps, 'step')}, {plural(summary.episodes, 'episode')} ({summary.episodes_left_out} excluded), {broken}"
        f"{summary.tokens_trained:,} tokens trained, {plural(summary.weight_swaps, 'weight swap')}{stall}, {minutes:.1f} minutes"
    )
    if summary.tokens:
        lines.append(f"{token_balance(summary.tokens)} (agentrl store {folder})")
    if len(summary.sessions) > 1:
        ends = ", ".join(f"after step {later.step}: {earlier.ended}" for earlier, later in pairwise(summary.sessions))
        lines.append(f"{len(summary.sessions) - 1:>8} resumed    {ends}")
    if summary.attempts_failed:
        lines.append(f"{summary.attempts_failed:>8} attempts   ended in a fault that the policy did not cause, including retried attempts")
    lines += [f"{count:>8} excluded  {reason}" for reason, count in list(summary.left_out_reasons.items())[:_REASONS_SHOWN]]
    if len(summary.left_out_reasons) > _REASONS_SHOWN:
        lines.append(f"{'':8} other reasons: see left_out_reasons in {folder / 'summary.json'}")
    if summary.judges:
        calls, _, rest = JudgeUsage.from_figures(summary.judges).summary().partition(" ")
        lines.append(f"{calls:>8} {rest}")
    if summary.failures:
        named = ", ".join(f"{times} {printable_text(tag)}" for tag, times in list(summary.failures.items())[:_TAGS_SHOWN])
        lines.append(f"{sum(summary.failures.values()):>8} failures   {named}: agentrl failures list {folder}")
    lines.append(f"report {folder / 'report.html'}")
    lines.append(f"model  {folder / 'model'}" if (folder / "model").is_dir() else "model  none: the weights did not change")
    return "\n".join([*lines, *(f"no result: {problem}" for problem in summary.problems)])


_NAME = 40  # characters of a kind


def sample(
    recipe: Annotated[Path, typer.Argument(help="Recipe file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides, such as rollout.group.size=16.")] = None,
    groups: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of training tasks, each with rollout.group.size attempts. Default: 32, or with --resume the earlier number."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model folder or id, or RUN@VERSION. Default: the model of the recipe.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Run folder. Default: the first free one of runs/NAME-sample, runs/NAME-sample-2, ...")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue in the run folder. A larger --groups adds groups.")] = False,
    sandbox: SandboxChoice = None,
    as_json: JsonFlag = False,
) -> None:
    """Sample and score attempts at training tasks without training.

    Writes a run folder that agentrl tune, label, failures and report can read. For each kind of task, prints how many tasks were solved and
    how many groups contain different scores, from which training can learn. Press ctrl-C once to finish the current groups. Press it twice
    to stop immediately.
    """
    root, written = load_recipe(recipe, [])
    changes = all_overrides(overrides, sandbox=sandbox, model=model)
    with run_folder(root, recipe, written, changes, run_dir, resume=resume, verb="sample") as (start, loaded, checked):
        with loading():
            from agentrl.run import sample as sampling

        result = asyncio.run(sampling.sample(loaded, start, checked, groups=groups, root=root, console=not as_json))
        say(json.dumps(result.as_json()) if as_json else render_result(result, group_size=loaded.rollout.group.size))
        if result.unfinished:
            say(f"interrupted; continue with: {start.command(resume=True)}", file=sys.stderr if as_json else sys.stdout)
            raise typer.Exit(130)
    if result.totals.rate is None:
        print("no attempt was scored", file=sys.stderr)
        raise typer.Exit(1)


def worker(
    run: Annotated[
        str,
        typer.Argument(help="Folder of a run in progress with rollout.workers, or http://HOST:PORT of its driver.", show_default=False),
    ],
    key_file: Annotated[
        Path | None,
        typer.Option(help="With http://HOST:PORT: copy of workers.json from the run folder. Default: the key in AGENTRL_DRIVER_KEY."),
    ] = None,
) -> None:
    """Start an additional rollout worker for a run in progress.

    The worker stops when the run ends, or on ctrl-C. After ctrl-C, other workers continue its groups. On a different machine, specify the
    driver's address and run the command in a copy of the project. The worker opens as many sandboxes as each worker that the run starts.
    """
    with loading():
        from agentrl.cluster.link import take_key
        from agentrl.run.worker import main
        from agentrl.run.worker_access import WorkerAccess, read_key

    remote = run.startswith("http://")
    key = "" if not remote else take_key() if key_file is None else read_key(key_file)

    def open_access(stack: AsyncExitStack) -> WorkerAccess:
        access = WorkerAccess.remote(run, key, stack=stack, root=Path.cwd()) if remote else WorkerAccess.local(Path(run))
        say(f"connecting to the driver of {run}; ctrl-C stops this worker, not the run", file=sys.stderr)
        return access

    raise typer.Exit(main(open_access))


def render_result(result: SampleResult, *, group_size: int) -> str:
    """Returns the result as text: a row for each kind of task, the reasons why attempts were excluded, and a command to run next."""
    rows = [(" ".join(printable(kind, _NAME).split()) or "-", totals) for kind, totals in result.by_kind.items()]
    rows = [*(rows if len(rows) > 1 else []), ("all", result.totals)]
    wide = max(4, *(len(name) for name, _ in rows))
    lines = [f"{'kind':{wide}}  {'tasks':>5}  {'attempts':>8}  {'mean score':24}  {'solved':>6}  {'differ':>6}"]
    lines += [f"{name:{wide}}  {_row(totals)}" for name, totals in rows]
    lines += ["solved: tasks that at least one attempt solved; differ: groups whose attempts have different scores"]
    lines += [f"{count:>8} excluded  {reason}" for reason, count in result.totals.left_out_reasons.items()]
    if result.totals.solved:
        lines.append(
            f"to imitate the best episodes: {shlex.join(['agentrl', 'tune', 'sft', str(result.folder), '--out', 'models/imitated'])}"
        )
    lines.append(f"folder {result.folder}  ({plural(result.requested, 'group')} of {group_size})")
    return "\n".join(lines)


def _row(totals: SampleTotals) -> str:
    rate = totals.rate
    mean = "-" if rate is None else f"{rate.value:.3f} [{rate.ci_low:.3f}, {rate.ci_high:.3f}]"
    solved = totals.solved if totals.all_have_thresholds else "-"
    return f"{totals.tasks:>5}  {totals.attempts:>8}  {mean:24}  {solved:>6}  {totals.differ:>6}"
