"""`agentrl train` and `agentrl eval`: a run from its recipe to its result."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import JsonFlag, SandboxChoice, model_override
from agentrl.cli.recipes import load_recipe
from agentrl.cli.regressions import evaluate_recipe, evaluate_suites_command
from agentrl.cli.running import loading, run_folder
from agentrl.cli.suites import evaluate_suite, open_suite
from agentrl.errors import UserError
from agentrl.evaluation.policies import find_policy
from agentrl.evaluation.request_options import RequestOptions
from agentrl.session.folder import finished_summary

if TYPE_CHECKING:
    from agentrl.observe import Summary

_REASONS_SHOWN = 5  # for leaving episodes out, at the end of a run
_TAGS_SHOWN = 4  # of failures


def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe file: a Python file with a module-level `recipe`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides, such as learner.lr=1e-4.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/NAME, runs/NAME-2, ...: the first free one.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the run folder.")] = False,
    sandbox: SandboxChoice = None,
    as_json: JsonFlag = False,
) -> None:
    """Fine-tune an agent with RL. Ctrl-C once: finish the step, save, report. Twice: stop now.

    objective.advantage, objective.loss, trackers, store, sandbox.backend and serving.weight_transfer take the words of the parts that
    ship, or a reference to yours: module:attr, ./file.py:attr, or an entry point of the group agentrl.plugins.
    """
    root, written = load_recipe(recipe, [])
    given = (*(overrides or []), *([f"sandbox.backend={sandbox}"] if sandbox else []))
    with run_folder(root, recipe, written, given, run_dir, resume=resume) as (start, loaded, checked):
        summary = finished_summary(start.folder, loaded) if resume else None
        if summary is not None:
            print(f"{start.folder} is finished; nothing was started. To train further, add steps=N", file=sys.stderr)
        else:
            with loading():
                from agentrl.run.loop import train as run_training

            summary = asyncio.run(run_training(loaded, start, checked, root=root, console=not as_json))
        print(summary.model_dump_json() if as_json else describe(summary, start.folder))
        if summary.interrupted:
            print(f"interrupted; continue with: {start.command(resume=True)}", file=sys.stderr if as_json else sys.stdout)
            raise typer.Exit(130)
        if summary.problems:
            raise typer.Exit(1)


def evaluate(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|SUITE", help="Recipe file whose model, sandbox, sampling and tasks are used; with --policy a suite's folder."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Dotted overrides, such as evaluation.heldout=64; with --policy also further suites.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Policy to evaluate: a model folder, RUN@VERSION, URL, or module:attr.")] = None,
    suite: Annotated[Path | None, typer.Option(help="Folder of a suite: its cases in place of the held-out tasks.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Attempts at each case. Default: what the case says, else its suite.")] = None,
    threshold: Annotated[float, typer.Option(help="Score from which an attempt has passed; of a case, where it has none, the mean.")] = 1.0,
    key_env: Annotated[str, typer.Option(help="With --policy URL: environment variable that holds the key.")] = "",
    request: Annotated[
        list[str] | None, typer.Option(help="With --policy URL: additional key of each request, KEY=VALUE; temperature=null omits it.")
    ] = None,
    header: Annotated[list[str] | None, typer.Option(help="With --policy URL: additional header, NAME=env:VARIABLE or file:PATH.")] = None,
    tokens_name: Annotated[str, typer.Option(help="With --policy URL: the server's name for max_tokens.")] = "",
    junit: Annotated[Path | None, typer.Option(help="With --policy: write JUnit XML there.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="With --policy: keep the results in the cases, as their baselines.")] = False,
    model: Annotated[str | None, typer.Option(help="Model folder or id, or RUN@VERSION; with --policy URL the model's name there.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where transcripts and logs go. Default: runs/NAME-eval, -eval-2, ...")] = None,
    sandbox: SandboxChoice = None,
    as_json: JsonFlag = False,
) -> None:
    """Evaluate a model on the held-out tasks of a recipe, or on a suite of cases (--suite); or evaluate a policy on suites (--policy).

    evaluation.attempts=8 tries each held-out task eight times: pass@k, and success against sampled tokens in the report.

    With --policy and a recipe, evaluate a policy that agentrl does not serve (module:attr or a URL) on the recipe's held-out tasks.

    For suites, --policy defaults to the policy that suite.toml records. The exit code is 0 if every case passes, and otherwise 1. A case
    passes if the mean score of its attempts reaches its threshold.
    """
    of_suite = recipe.is_dir() and suite is None and not (model or key_env or request or header or tokens_name)
    if policy is not None or of_suite:
        if suite is not None:
            raise UserError("--policy does not go with --suite", fix="agentrl eval SUITE [SUITE ...] --policy POLICY")
        more = [*(overrides or []), *([f"sandbox.backend={sandbox}"] if sandbox else [])]
        named = [str(recipe), *(item for item in more if "=" not in item)]
        changes = [item for item in more if "=" in item]
        requests = RequestOptions.parse(request or (), header or (), tokens_name)
        target = None if policy is None else find_policy(policy, model_name=model or "", key_env=key_env, requests=requests)
        if target is not None and recipe.is_file():
            if len(named) > 1 or junit is not None or pin:
                raise UserError(
                    f"--junit, --pin and further suites do not go with the recipe {recipe}",
                    fix=f"agentrl eval {recipe} [KEY=VALUE ...] --policy POLICY",
                )
            root, written = load_recipe(recipe, changes)
            evaluate_recipe(root, written, target, repeats=repeats, threshold=threshold, run_dir=run_dir, as_json=as_json)
            return
        evaluate_suites_command(
            named, target, changes, repeats=repeats, threshold=threshold, run_dir=run_dir, junit_file=junit, pinning=pin, as_json=as_json
        )
        return
    if junit is not None or pin or key_env or request or header or tokens_name:
        told = "--junit, --pin, --key-env, --request, --header and --tokens-name"
        raise UserError(f"{told} need --policy", fix="agentrl eval SUITE --policy POLICY")
    if recipe.is_dir():
        raise UserError(f"{recipe} is a suite and needs --policy", fix=f"agentrl eval {recipe} --policy FOLDER or RUN@VERSION")
    if suite is None and (repeats is not None or threshold != 1.0):
        raise UserError("--repeats and --threshold are for cases, and there is no suite", fix="name one: --suite evals/SUITE")
    root, written = load_recipe(recipe, [])
    given = (*(overrides or []), *([f"sandbox.backend={sandbox}"] if sandbox else []), *model_override(model))
    if suite is not None:
        cases = open_suite(suite, repeats=repeats, threshold=threshold)
        evaluate_suite(root, recipe, written, given, run_dir, cases, repeats=repeats, threshold=threshold, as_json=as_json)
        return
    with run_folder(root, recipe, written, given, run_dir, verb="eval") as (start, loaded, checked):
        with loading():
            from agentrl.evaluation.held_out import evaluate_held_out

        results = asyncio.run(evaluate_held_out(loaded, start, checked, root=root, console=not as_json))
    if as_json:
        print(json.dumps(results))
        return
    for split, rate in results.items():
        print(f"{split:14} {rate['value']:.3f}  95% interval [{rate['ci_low']:.3f}, {rate['ci_high']:.3f}]  n={rate['n']}")
        if rate["attempts"] > 1:
            shares = "  ".join(f"pass@{k} {share:.3f}" for k, share in rate["pass_at"].items())
            print(f"{'':14} {shares}  {rate['attempts']} attempts a task, {rate['tokens_mean']:,.0f} sampled tokens each")
        for one in rate["thinking"]:
            told = f"{one['value']:.3f}  95% interval [{one['ci_low']:.3f}, {one['ci_high']:.3f}]" if "value" in one else "no score"
            tokens = "" if one["tokens_mean"] is None else f"  {one['tokens_mean']:,.0f} sampled tokens each"
            print(f"{'':14} {told}  at most {one['thinking_tokens']} thought{tokens}")


def describe(summary: Summary, folder: Path) -> str:
    """The result of a run for a person: before and after, what it took, where to look."""
    lines = []
    from agentrl.judge import JudgeUsage
    from agentrl.observe.exclusions import printable_text
    from agentrl.observe.stats import rate_difference

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
    broken = f"{summary.tasks_quarantined} broken tasks left out, " if summary.tasks_quarantined else ""
    broken += f"{summary.tasks_withheld} training tasks withheld, " if summary.tasks_withheld else ""
    broken += f"{summary.attempts_cancelled} further attempts cancelled, " if summary.attempts_cancelled else ""
    broken += f"{summary.groups_stopped} groups stopped early, " if summary.groups_stopped else ""
    minutes = sum(summary.wall_s.values()) / 60
    lines.append(
        f"{summary.steps} steps, {summary.episodes} episodes ({summary.episodes_left_out} left out), "
        f"{broken}"
        f"{summary.tokens_trained:,} tokens trained, {summary.weight_swaps} weight swaps{stall}, {minutes:.1f} minutes"
    )
    if len(summary.sessions) > 1:
        ends = ", ".join(f"after step {later.step}: {one.ended}" for one, later in pairwise(summary.sessions))
        lines.append(f"{len(summary.sessions) - 1:>8} resumed    {ends}")
    if summary.attempts_failed:
        lines.append(
            f"{summary.attempts_failed:>8} attempts   ended in a fault that the policy did not cause, including attempts that were retried"
        )
    lines += [f"{count:>8} left out  {reason}" for reason, count in list(summary.left_out_reasons.items())[:_REASONS_SHOWN]]
    if len(summary.left_out_reasons) > _REASONS_SHOWN:
        lines.append(f"{'':8} and for other reasons: left_out_reasons in {folder / 'summary.json'}")
    if summary.judges:
        asked, _, rest = JudgeUsage.from_figures(summary.judges).summary().partition(" ")
        lines.append(f"{asked:>8} {rest}")
    if summary.failures:
        named = ", ".join(f"{times} {printable_text(tag)}" for tag, times in list(summary.failures.items())[:_TAGS_SHOWN])
        lines.append(f"{sum(summary.failures.values()):>8} failures   {named}: agentrl failures list {folder}")
    lines.append(f"report {folder / 'report.html'}")
    lines.append(f"model  {folder / 'model'}" if (folder / "model").is_dir() else "model  none: the weights are still those of version 0")
    return "\n".join([*lines, *(f"no result: {problem}" for problem in summary.problems)])
