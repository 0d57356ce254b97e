"""`agentrl versions`: lists, compares, promotes and pins the versions of a run, and rolls back to an earlier version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.base.numbers import plural
from agentrl.base.user_code import one_line
from agentrl.cli import command_group
from agentrl.cli.running import JsonFlag, RunFolder, SandboxChoice, all_overrides, listed, loading, reporting_errors, say
from agentrl.errors import UserError

if TYPE_CHECKING:
    from agentrl.evaluation.canary import CanaryResult
    from agentrl.evaluation.versus import DifferenceSoFar, Result, Trial, VersionComparison
    from agentrl.session.version_changes import RequestedRollback
    from agentrl.session.versions import EvaluationDifference, VersionRecord
    from agentrl.version.tensor_diff import TensorChange

versions_app = command_group()

Number = Annotated[int, typer.Argument(min=0, help="Number of a version, as printed by `agentrl versions list`.")]

_TENSORS_SHOWN = 12
_CASES_SHOWN = 12
_METRICS = ("reward_mean", "entropy", "kl_behaviour", "clip_fraction", "ess", "grad_norm", "lr", "staleness_mean", "staleness_max")
_TOTALS = ("episodes", "episodes_left_out", "tokens_trained", "groups_late", "rollbacks")


@versions_app.command("list", epilog="Example: agentrl versions list runs/quickstart --json")
def list_versions(run: RunFolder, as_json: JsonFlag = False) -> None:
    """List the versions of a run: state, staleness of the trained tokens, size, evaluations with 95% intervals, and gate decisions.

    The number of a version is the learner step that produced it. The run can roll back to versions with a checkpoint. `*`: pinned.
    """
    from agentrl.session.versions import read_versions

    records = read_versions(run)
    if as_json:
        print(json.dumps([_as_data(record) for record in records]))
        return
    print(f"{'version':>7} {'parent':>6}  {'state':11}  {'weights':12}  {'staleness':>10} {'size':>8} {'checkpoint':>10}  evaluations")
    for version in records:
        print(_row(version).rstrip())
        if version.verdict is not None:
            print(f"        gate: {one_line(version.verdict.outcome)}: {one_line(version.verdict.reason)}")
            for case in version.verdict.regressions:
                turn = "the transcripts are equal" if case.turn is None else f"turn {case.turn} is the first that differs"
                print(
                    f"        case {one_line(case.case)}: {turn} ({one_line(case.before_episode)} passed, {one_line(case.episode)} did not)"
                )


def _row(record: VersionRecord) -> str:
    version, mean = record.version, record.metrics.get("staleness_mean")
    staleness = "-" if mean is None else f"{mean:.1f} to {record.metrics.get('staleness_max', mean):.0f}"
    checkpoint = "-" if record.checkpoint_bytes is None else _size(record.checkpoint_bytes)
    rates = {name: f"{value:.3f}" for name, value in version.evals.items()}
    rates |= {split: f"{rate.value:.3f} [{rate.ci_low:.3f}, {rate.ci_high:.3f}]" for split, rate in record.held_out.items()}
    figures = None if record.verdict is None else record.verdict.figures
    if figures is not None and figures.pass_at_1 is not None:
        rates["gate"] = f"{figures.pass_at_1:.3f} [{figures.low:.3f}, {figures.high:.3f}]"
    shown = [f"{one_line(name)} {rate}" for name, rate in rates.items()]
    if version.parent is not None and version.parent != version.number - 1:
        shown.append(f"restored from version {version.parent}")
    parent = "-" if version.parent is None else str(version.parent)
    name = f"{'*' if record.pinned else ''}{version.number}"
    columns = f"{name:>7} {parent:>6}  {version.state:11}  {version.sha256[:12]:12}  {staleness:>10} {_size(record.weights_bytes):>8}"
    return f"{columns} {checkpoint:>10}  {'  '.join(shown)}"


def _as_data(record: VersionRecord) -> dict[str, Any]:
    from agentrl.records import codec

    data: dict[str, Any] = codec.to_data(record.version)
    return data | {
        "pinned": record.pinned,
        "weights_bytes": record.weights_bytes,
        "checkpoint_bytes": record.checkpoint_bytes,
        "gate": record.verdict and codec.to_data(record.verdict),
        "held_out": {split: asdict(rate) for split, rate in record.held_out.items()},
        "phase": record.phase,
        "metrics": dict(record.metrics),
    }


@versions_app.command("diff", epilog="Example: agentrl versions diff runs/quickstart 4 8")
def diff(
    run: RunFolder,
    before: Number,
    after: Number,
    all_tensors: Annotated[bool, typer.Option("--all", help=f"List all tensors. Default: the {_TENSORS_SHOWN} that changed most.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare two versions: the steps between them, the tensors that changed, and their recorded evaluations.

    Evaluations are compared as in `agentrl compare`: the effect with a 95% interval, a sign-flip test over cases, and the cases that
    changed.
    """
    from agentrl.session.version_changes import known_version, require_weights
    from agentrl.session.versions import evaluation_differences, lineage, open_registry, read_versions
    from agentrl.version.tensor_diff import compare_weights

    registry = open_registry(run)
    versions = [known_version(registry, number) for number in (before, after)]
    for version in versions:
        require_weights(registry, version)
    records = {record.number: record for record in read_versions(run)}
    common, back, forth = lineage([record.version for record in records.values()], before, after)
    try:
        tensors = list(compare_weights(*(registry.path(version) for version in versions)))
    except (ValueError, OSError) as error:
        raise UserError(
            f"cannot compare versions {before} and {after} of {run}: {error}", fix=f"choose different versions: agentrl versions list {run}"
        ) from None
    evaluations = evaluation_differences(run, records[before], records[after])
    totals = {name: sum(records[step].metrics.get(name, 0) for step in forth if step in records) for name in _TOTALS}
    if as_json:
        data = {"before": before, "after": after, "common": common, "only_before": back, "only_after": forth, "totals": totals}
        data |= {"metrics": {str(number): dict(records[number].metrics) for number in (before, after)}}
        data |= {"tensors": [asdict(tensor) | {"relative": tensor.relative} for tensor in tensors]}
        print(json.dumps(data | {"evaluations": [asdict(evaluation) for evaluation in evaluations]}))
        return
    back_steps, forth_steps = (plural(len(way), "step") for way in (back, forth))
    if back and not forth:
        print(f"version {before} continues from version {after} with {back_steps}")
    else:
        way = f"; version {before} is {back_steps} from it on a different branch" if back else ""
        print(f"version {after} continues from version {common} with {forth_steps}{way}")
    print("  " + ", ".join(f"{value:,.0f} {name}" for name, value in totals.items()))
    _print_metrics(records[before], records[after])
    _print_tensors(tensors, most=len(tensors) if all_tensors else _TENSORS_SHOWN)
    for evaluation in evaluations:
        _print_evaluation(evaluation)
    if not evaluations:
        say(f"no recorded evaluation includes both versions; to evaluate both: agentrl versions compare {run} {before} {after}")


def _print_metrics(before: VersionRecord, after: VersionRecord) -> None:
    for name in _METRICS:
        values = [record.metrics.get(name) for record in (before, after)]
        if any(value is not None for value in values):
            print(f"  {name:15} " + " -> ".join("-" if value is None else f"{value:.4g}" for value in values))


def _print_tensors(tensors: Sequence[TensorChange], *, most: int) -> None:
    changed = sorted((tensor for tensor in tensors if tensor.changed), key=lambda tensor: (-tensor.relative, tensor.name))
    norms = [sum(getattr(tensor, name) ** 2 for tensor in tensors) ** 0.5 for name in ("difference", "before")]
    relative = f" ({norms[0] / norms[1]:.3g} of the weights before)" if norms[1] else ""
    print(f"{len(changed)} of {len(tensors)} tensors changed, with norm {norms[0]:.4g}{relative}")
    if changed:
        print(f"  {'relative':>9} {'norm':>10} {'largest':>10} {'changed':>8}  tensor")
    for tensor in changed[:most]:
        share = tensor.changed / tensor.numbers
        print(f"  {tensor.relative:9.3g} {tensor.difference:10.3g} {tensor.largest:10.3g} {share:8.1%}  {one_line(tensor.name)}")
    if len(changed) > most:
        print(f"  and {len(changed) - most} more; --all lists them")


def _print_evaluation(difference: EvaluationDifference) -> None:
    compared = difference.comparison
    print(f"{one_line(difference.what)}: {compared.before:.3f} -> {compared.after:.3f}, {compared.verdict}")
    interval = f"95% interval [{100 * compared.low:+.1f}, {100 * compared.high:+.1f}]"
    print(f"  effect {100 * compared.effect:+.1f} points  {interval}  p = {compared.p_value:.3g}  ({plural(compared.cases, 'case')})")
    for what, cases in (("lower", compared.lost), ("higher", compared.gained), ("content changed", difference.changed)):
        if cases:
            print(f"  {what}: {listed(cases, _CASES_SHOWN)}")


@versions_app.command("compare", epilog="Example: agentrl versions compare runs/quickstart 4 8 --suite evals/pricing --repeats 2")
def compare_versions(
    run: RunFolder,
    before: Number,
    after: Number,
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides, such as rollout.concurrency=16.")] = None,
    suite: Annotated[Path | None, typer.Option(help="Folder of a suite. Default: held-out tasks of the run's recipe.")] = None,
    cases: Annotated[int | None, typer.Option(min=1, help="Maximum number of cases. Default: all cases of the suite or recipe.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Attempts per case and version. Default: as set in the case or suite.")] = None,
    alpha: Annotated[float, typer.Option(help="Probability of a wrong verdict `better` or `worse`.")] = 0.05,
    margin: Annotated[float, typer.Option(help="Largest difference of mean scores that counts as equal.")] = 0.05,
    canary: Annotated[
        float | None, typer.Option(help="Give AFTER this share of the attempts, such as 0.2; then promote it or roll back to BEFORE.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the comparison. Default: the first free one of runs/NAME-eval, runs/NAME-eval-2, ...")
    ] = None,
    sandbox: SandboxChoice = None,
    as_json: JsonFlag = False,
) -> None:
    """Run two versions on the same cases until it is clear which is better (A/B test). Run this command in the recipe's project.

    One server switches between the weights of the two versions. The comparison stops after a block of 16 cases if the interval of the
    difference (95% by default, and valid at any number of cases) excludes 0 (better, worse) or is within --margin (same). The exit code is
    1 if AFTER is worse.

    With --canary 0.2, AFTER runs a fifth of the attempts, and BEFORE runs the others. AFTER is promoted once it is clear that it is not
    worse by --margin or more. The run rolls back to BEFORE once it is clear that AFTER is worse. The exit code is 1 unless AFTER is
    promoted.
    """
    with loading():
        from agentrl.evaluation.canary import check_canary, run_canary
        from agentrl.evaluation.comparison import ComparisonVerdict
        from agentrl.evaluation.versus import prepare_comparison, try_blocks
        from agentrl.failure.case import load_suite

    changes = all_overrides(overrides, sandbox=sandbox)
    loaded = None if suite is None else load_suite(suite)
    if canary is not None:
        check_canary(run, before, after)
    with prepare_comparison(
        run, (before, after), loaded, overrides=changes, cases=cases, repeats=repeats, alpha=alpha, margin=margin, folder=run_dir
    ) as comparison:
        if canary is None:
            difference = _try_versions(comparison, try_blocks, as_json=as_json, text=_comparison_text)
            passed = difference.verdict is not ComparisonVerdict.WORSE
        else:
            result = _try_versions(comparison, partial(run_canary, share=canary), as_json=as_json, text=_canary_text)
            passed = _apply_canary(run, before, after, result, quiet=as_json)
    if not passed:
        raise typer.Exit(1)


def _try_versions(
    comparison: VersionComparison, trial: Trial[Result], *, as_json: bool, text: Callable[[Result, VersionComparison], str]
) -> Result:
    """Serves both versions for `trial`, and prints and returns the result of the trial."""
    from agentrl.evaluation.versus import run_comparison

    with reporting_errors(comparison.prepared.start.folder):
        done = asyncio.run(run_comparison(comparison, trial, console=not as_json))
    folders = [str(folder) for folder in comparison.folders]
    print(json.dumps(asdict(done) | {"folders": folders}) if as_json else text(done, comparison))  # type: ignore[call-overload]
    return done


def _canary_text(canary: CanaryResult, comparison: VersionComparison) -> str:
    interval = f"{1 - comparison.alpha:.0%} interval [{100 * canary.interval.low:+.1f}, {100 * canary.interval.high:+.1f}]"
    lines = [
        f"baseline  {canary.baseline:.3f}  version {comparison.numbers[0]}, {plural(canary.attempts[0], 'attempt')}",
        f"candidate {canary.candidate:.3f}  version {comparison.numbers[1]}, {canary.attempts[1]} of at most {canary.most} attempts",
        f"effect    {100 * canary.interval.value:+.1f} points  {interval}, valid at any number of attempts",
        f"decision  {canary.outcome}  (margin {100 * comparison.margin:g} points)",
    ]
    if canary.unscored:
        lines.append(f"excluded  {plural(canary.unscored, 'attempt')} of the candidate without a pair of scores")
    return "\n".join([*lines, *(f"attempts  {folder}" for folder in comparison.folders)])


def _apply_canary(run: Path, before: int, after: int, canary: CanaryResult, *, quiet: bool) -> bool:
    """Promotes the candidate, or rolls the run back to the baseline. Returns whether the candidate is promoted."""
    from agentrl.evaluation.canary import CanaryOutcome
    from agentrl.session.version_changes import is_driven, promote, request_rollback

    lines = ["no decision, so nothing was changed: raise --cases or --repeats, or widen --margin"]
    if canary.outcome is CanaryOutcome.PROMOTE:
        promote(run, after)
        lines = [f"version {after} is promoted"]
    elif canary.outcome is CanaryOutcome.ROLL_BACK:
        lines = _rollback_lines(run, before, request_rollback(run, before))
        if not is_driven(run):
            promote(run, before)
            lines = [f"version {before} is promoted and exported to {run / 'model'}", *lines]
    if not quiet:
        print("\n".join(lines))
    return canary.outcome is CanaryOutcome.PROMOTE


def _comparison_text(difference: DifferenceSoFar, comparison: VersionComparison) -> str:
    before, after = comparison.numbers
    interval = f"{1 - comparison.alpha:.0%} interval [{100 * difference.interval.low:+.1f}, {100 * difference.interval.high:+.1f}]"
    lines = [
        f"before  {difference.before:.3f}  version {before}",
        f"after   {difference.after:.3f}  version {after}",
        f"effect  {100 * difference.interval.value:+.1f} points  {interval}, valid at any number of cases",
        f"verdict {difference.verdict}  ({difference.cases} of at most {difference.most} cases, margin {100 * comparison.margin:g} points)",
    ]
    if difference.unscored:
        lines.append(f"excluded {plural(difference.unscored, 'pair')} of attempts with only one score")
    for what, cases in (("lower", difference.lost), ("higher", difference.gained)):
        if cases:
            lines.append(f"{what}: {listed(cases, _CASES_SHOWN)}")
    return "\n".join([*lines, *(f"attempts {folder}" for folder in comparison.folders)])


@versions_app.command("promote", epilog="Example: agentrl versions promote runs/quickstart 3")
def promote_version(run: RunFolder, number: Number) -> None:
    """Promote a version, and export it to model/ in the run folder unless the run is in progress.

    If the version was evaluated, a running gate then compares later versions with this version. If the run finishes later, its result
    replaces model/.
    """
    from agentrl.session.version_changes import promote

    promotion = promote(run, number)
    say(f"version {promotion.number} is promoted" + ("" if promotion.model is None else f" and exported to {promotion.model}"))
    if promotion.newest != promotion.number:
        say(
            f"version {promotion.newest} is also promoted, and is newer; "
            f"to continue from version {promotion.number}: agentrl versions rollback {run} {promotion.number}"
        )


@versions_app.command("rollback", epilog="Example: agentrl versions rollback runs/quickstart 4")
def rollback_version(
    run: RunFolder,
    number: Annotated[int | None, typer.Argument(min=0, help="Number of the version to roll back to. It must have a checkpoint.")] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel a requested rollback that the learner has not performed yet.")] = False,
) -> None:
    """Roll the server and the learner back to a version: to its weights, optimizer, random state and schedule.

    The learner performs the rollback instead of its next update, either during the run or after --resume, and publishes the old weights
    under the next number. The versions after the given version are rolled back and are never served again. The groups of the rolled-back
    steps remain consumed. The groups of the rollback step, which the rolled-back versions sampled, are excluded.
    """
    from agentrl.session.version_changes import cancel_rollback, request_rollback

    if cancel == (number is not None):
        raise UserError("give the number of a version, or --cancel", fix="agentrl versions rollback RUN NUMBER")
    if number is None:
        print(f"the rollback to version {cancel_rollback(run)} is cancelled")
        return
    say("\n".join(_rollback_lines(run, number, request_rollback(run, number))))


def _rollback_lines(run: Path, number: int, rollback: RequestedRollback) -> list[str]:
    from agentrl.session.folder import resume_command

    replaced = rollback.replaced is not None and rollback.replaced != number
    lines = [f"replaces the requested rollback to version {rollback.replaced}"] if replaced else []
    lines.append(f"requested: roll back to version {number}, undoing {', '.join(map(str, rollback.undone))}")
    if rollback.live and not rollback.needs_steps:
        return [*lines, "the learner performs it at its next step"]
    command = f"{resume_command(run)}{' steps=N' if rollback.needs_steps else ''}"
    lines.append(f"{'when the run has ended, ' if rollback.live else ''}continue with: {command}")
    return [*lines, "the run has completed its steps: set a larger steps=N"] if rollback.needs_steps else lines


@versions_app.command("pin", epilog="Example: agentrl versions pin runs/quickstart 4")
def pin_version(run: RunFolder, number: Number) -> None:
    """Keep the weights and the checkpoint of a version: learner.keep_versions and learner.keep_checkpoints do not apply to it."""
    from agentrl.session.version_changes import has_checkpoint, set_pinned

    set_pinned(run, number, pinned=True)
    there = has_checkpoint(run, number)
    print(f"version {number} is pinned" + ("" if there else "; its checkpoint was deleted, so the run cannot return to it"))


@versions_app.command("unpin", epilog="Example: agentrl versions unpin runs/quickstart 4")
def unpin_version(run: RunFolder, number: Number) -> None:
    """Unpin a version. The weights and the checkpoint of an unpinned version are deleted when newer versions replace them."""
    from agentrl.session.version_changes import set_pinned

    set_pinned(run, number, pinned=False)
    print(f"version {number} is not pinned")


@versions_app.command("league", epilog="Example: agentrl versions league runs/kuhn --json")
def show_league(run: RunFolder, as_json: JsonFlag = False) -> None:
    """List the ratings in a league (rollout.agent=players): Elo relative to version 0 with a 95% interval, and games. `*` marks an
    opponent.

    A version's rating counts only games against members of the league. `draw` is the probability that the version is the next opponent.
    """
    from agentrl.version.league import FILE, LeagueTable

    if not (run / FILE).is_file():
        raise UserError(f"{run} has no league", fix="train with rollout.agent=players and past versions as opponents")
    table = LeagueTable(run)
    rated = table.ratings()
    weights = table.weights(max(rating.version for rating in rated))
    if as_json:
        print(json.dumps([asdict(rating) | {"draw": weights.get(rating.version)} for rating in rated]))
        return
    print(f"{'version':>7} {'Elo':>6}  {'95% interval':>16} {'games':>7} {'draw':>6}")
    for rating in rated:
        low, high = rating.interval
        name, draw = f"{'*' if rating.version in weights else ''}{rating.version}", weights.get(rating.version)
        print(f"{name:>7} {rating.elo:6.0f}  [{low:6.0f}, {high:6.0f}] {rating.games:7d} {'' if draw is None else f'{draw:6.2f}'}".rstrip())


def _size(size: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B" if size else "-"
