"""Compares agentrl's and TRL's time to a held-out success, with the same base model, tasks, verifier, sandboxes and evaluation.

    python benchmarks/peers.py --mode multi --wait 0.2..2        # several turns; programs take 0.2 to 2 s
    python benchmarks/peers.py --mode multi                      # several turns, programs without a wait
    python benchmarks/peers.py --mode single                     # one turn
    python benchmarks/peers.py --recipe recipes/smollm2.py --mode single --heldout 64 --minutes 60 --tune 1
    python benchmarks/peers.py --markdown                        # writes the tables of docs/peers.md from the results; runs nothing

First the peer's settings are timed (--tune), and the peer runs with the fastest. Then --pairs rounds run: one run of each side with the
same seed, one after another. Each side trains until its held-out success reaches --target, or until --minutes are over. The side
`trl-together` is TRL with the concurrent rollout function of this repository, which is faster than unmodified TRL (`trl`).

A comparison is published in --out only if it has at least three rounds that one machine ran without interruption. An unfinished comparison
is in --runs; the same command continues it after an interruption of less than 15 minutes, and otherwise restarts it. docs/peers.md has the
rules.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as the command line does: recipes and families are imported from the project root

from agentrl.base.installation import package_versions  # noqa: E402
from agentrl.errors import InfrastructureError, UserError  # noqa: E402
from benchmarks import stored  # noqa: E402
from benchmarks.contest import comparison, ours, tables, trl  # noqa: E402
from benchmarks.contest.comparison import Comparison  # noqa: E402
from benchmarks.contest.outcome import SIDES, Outcome  # noqa: E402
from benchmarks.contest.setting import MODES, Setting  # noqa: E402
from benchmarks.contest.watch import Progress  # noqa: E402

PAGE = ROOT / "docs" / "peers.md"


def interval(text: str) -> tuple[float, float]:
    """`0.2..2` or `0.5`: seconds."""
    low, dots, high = text.partition("..")
    try:
        bounds = (float(low), float(high if dots else low))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an interval of seconds, such as 0.2..2") from None
    if not 0.0 <= bounds[0] <= bounds[1] or bounds[1] > 3600.0:
        raise argparse.ArgumentTypeError(f"{text!r} must be seconds from 0 to 3600, the smaller number first")
    return bounds


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/quickstart.py", help="tasks, model and settings of both sides")
    parser.add_argument("--model", default="", help="folder of a different base model")
    parser.add_argument(
        "--mode", choices=MODES, default="multi", help="multi: several turns; single: one turn, and the submitted program is scored"
    )
    parser.add_argument("--wait", type=interval, default=(0.0, 0.0), metavar="LOW..HIGH", help="seconds that every program sleeps first")
    parser.add_argument("--target", type=float, default=0.9, help="held-out success to reach (default 0.9)")
    parser.add_argument("--every", type=int, default=4, help="steps between evaluations (default 4)")
    parser.add_argument("--heldout", type=int, default=160, help="tasks in each evaluation (default 160)")
    parser.add_argument("--minutes", type=float, default=40.0, help="maximum minutes of training per run (default 40)")
    parser.add_argument("--backend", default="auto", help="sandbox backend: auto, docker or bubblewrap")
    parser.add_argument("--pairs", type=int, default=3, help="rounds, with seeds 0, 1, 2, ... (default 3, the minimum for publishing)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[], help="sides to run; default: all sides of the mode")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="KEY=VALUE", help=f"settings from which tuning starts: {', '.join(trl.OPTIONS)}"
    )
    parser.add_argument("--tune", type=int, default=2, metavar="STEPS", help="steps per timed setting of the peer; 0 disables tuning")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "peers", help="folder of published comparisons")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "peers", help="folder of the runs")
    parser.add_argument("--markdown", action="store_true", help="write the tables of docs/peers.md from the results; run nothing")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="recipe override for both sides, such as learner.lr=1e-5"
    )
    return parser.parse_args(argv)


def setting_of(args: argparse.Namespace) -> Setting:
    return Setting(
        recipe=args.recipe,
        model=args.model,
        mode=args.mode,
        wait=args.wait,
        target=args.target,
        every=args.every,
        heldout=args.heldout,
        minutes=args.minutes,
        backend=args.backend,
        overrides=tuple(args.set),
    )


def sides_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The sides of a round in their order, ours first. Raises `UserError` for sides that cannot be compared."""
    possible = SIDES if args.mode == "multi" else ("ours", "trl")
    chosen = tuple(side for side in possible if side in (args.sides or possible))
    if set(args.sides) - set(chosen):
        raise UserError("a single turn makes no calls that could run concurrently", fix="remove trl-together from --sides")
    if chosen[0] != "ours" or len(chosen) < 2:
        raise UserError(f"--sides {' '.join(args.sides)} cannot be compared", fix="give ours and at least one side of the peer")
    return chosen


def main(args: argparse.Namespace) -> None:
    if args.markdown:
        tables.page(PAGE, args.out)
        print(f"wrote {PAGE}")
        return
    if args.pairs < 1 or args.tune < 0:
        raise UserError("--pairs must be at least 1 and --tune at least 0", fix="see --help")
    setting, sides, options = setting_of(args), sides_of(args), trl.options_of(args.peer)
    setting.build_recipe(seed=0)  # reports a wrong setting before anything runs
    work = args.runs.resolve() / setting.name
    draft = work / "comparison.json"
    current = unfinished(draft, setting, sides, options, args) or prepare(setting, sides, options, args, work)
    comparison.save(current, draft)
    for seed in range(len(current.rounds), args.pairs):
        current = current.with_round(tuple(run_side(setting, current.options, work, side, seed) for side in sides))
        comparison.save(current, draft)
    print(tables.summary({setting.name: current}) + "\n\n" + tables.group(setting.name, current))
    comparison.publish(current, args.out / f"{setting.name}.json")


def unfinished(
    path: Path, setting: Setting, sides: tuple[str, ...], options: dict[str, object], args: argparse.Namespace
) -> Comparison | None:
    """The unfinished comparison of the same command and code, unless this machine has restarted or done other work since."""
    if not path.exists():
        return None
    draft = comparison.load(path)
    wanted = (setting.record(), sides, command(setting, sides, args), stored.boot())
    same = (draft.setting, draft.sides, draft.origin["command"], draft.boot) == wanted and not stored.changed(draft.origin["code"])
    recent = bool(draft.rounds) and time.time() - draft.rounds[-1][-1].finished < comparison.MOST_GAP_S
    if same and recent and len(draft.rounds) < args.pairs:
        print(f"continuing {path}: {len(draft.rounds)} of {args.pairs} rounds", file=sys.stderr)
        return draft
    return None


def prepare(setting: Setting, sides: tuple[str, ...], options: dict[str, object], args: argparse.Namespace, work: Path) -> Comparison:
    """A comparison without rounds, after the peer's settings were timed."""
    code = [*stored.LOOP, "benchmarks/contest", setting.recipe]
    origin = stored.origin(command(setting, sides, args), code, range(args.pairs))
    timed_settings: list[dict[str, object]] = []
    if args.tune:
        base = {**options, "rollouts": "together"} if "trl-together" in sides else options
        tuned, timed_settings = trl.tune(setting, 0, base, work / "tune", steps=args.tune)
        options = {**tuned, "rollouts": options["rollouts"]}
    trl.check_options(setting, options)
    return Comparison(
        setting=setting.record(),
        sides=sides,
        options=options,
        tried=tuple(timed_settings),
        origin=origin,
        versions=package_versions(),
        boot=stored.boot(),
    )


def command(setting: Setting, sides: tuple[str, ...], args: argparse.Namespace) -> str:
    """The command that repeats the comparison."""
    more = ["--sides", *sides, "--pairs", str(args.pairs), "--tune", str(args.tune)]
    return setting.command(*more, *(word for item in args.peer for word in ("--peer", item)))


def run_side(setting: Setting, options: dict[str, object], work: Path, side: str, seed: int) -> Outcome:
    """One run, with the state of the machine just before it."""
    progress = Progress(f"{side}, seed {seed}", setting.minutes)
    folder, machine, began = work / f"{side}-seed{seed}", stored.machine(), time.time()
    if side == "ours":
        run = ours.run(setting, seed, folder, progress)
    else:
        run = trl.run(side, setting, seed, folder, progress, {**options, "rollouts": trl.rollouts_of(side)})
    arrived = (
        f"reached the target after {run.arrived_s / 60:.1f} min" if run.arrived_s is not None else f"did not reach the target ({run.ended})"
    )
    progress.say(
        f"{arrived}, {run.steps} steps, peak {run.peak_gib:.1f} GiB; {machine['gflops']} GFLOPS, {machine['busy_cores']} cores busy"
    )
    return replace(run, machine=machine, began=began, finished=time.time())


if __name__ == "__main__":
    try:
        main(arguments())
    except (UserError, InfrastructureError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; repeat the command within 15 minutes to continue after the last complete round")
