"""Ours and TRL's GRPOTrainer side by side: the same base model, tasks, verifier, sandboxes, evaluation and machine, seeds in turns.

    python benchmarks/peers.py --mode multi                              # the shipped policy; three seeds of ours, two of TRL's
    python benchmarks/peers.py --mode multi --wait 0.2..2                # programs take their time, as builds do
    python benchmarks/peers.py --mode single --seeds 0 1 2 --peer-seeds 0 1
    python benchmarks/peers.py --recipe recipes/smollm2.py --mode multi --minutes 40 --heldout 64
    python benchmarks/peers.py --mode multi --wait 0.2..2 --sides trl-together    # TRL's trainer with a rollout function of ours
    python benchmarks/peers.py --mode multi --tune                       # two steps of TRL under each setting of its own
    python benchmarks/peers.py --recipe recipes/smollm2.py --mode multi --tune 1 --peer micro_batch=4 --set rollout.groups_per_step=1
    python benchmarks/peers.py --markdown                                # writes the tables of docs/peers.md; runs nothing

Each side trains until its held-out success reaches --target, or until --minutes are over. A run's result is a JSON file in --out; running
again makes only those that are missing, so an interrupted benchmark goes on where it stopped (a run that was cut off begins again: half a
run has no time). What is compared, and what is not counted, is in docs/peers.md.
"""

from __future__ import annotations

import argparse
import sys
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as the command line does: recipes and families are imported from the project root

from agentrl.errors import InfrastructureError, UserError  # noqa: E402
from benchmarks.contest import ours, outcome, tables, trl  # noqa: E402
from benchmarks.contest.setting import MODES, Setting  # noqa: E402
from benchmarks.contest.watch import Progress  # noqa: E402

PAGE = ROOT / "docs" / "peers.md"


def interval(text: str) -> tuple[float, float]:
    """`0.2..2` or `0.5`: seconds."""
    low, dots, high = text.partition("..")
    try:
        found = (float(low), float(high if dots else low))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no interval of seconds such as 0.2..2") from None
    if not 0.0 <= found[0] <= found[1] or found[1] > 3600.0:
        raise argparse.ArgumentTypeError(f"{text!r}: seconds go from a smaller number to a larger one, and neither is negative")
    return found


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/quickstart.py", help="whose tasks, model and settings both sides take")
    parser.add_argument("--model", default="", help="another base model: a folder")
    parser.add_argument("--mode", choices=MODES, default="multi", help="single: no tool answers, a program that is handed in is judged")
    parser.add_argument("--wait", type=interval, default=(0.0, 0.0), metavar="LOW..HIGH", help="seconds that every program sleeps first")
    parser.add_argument("--target", type=float, default=0.9, help="held-out success to reach (default 0.9)")
    parser.add_argument("--every", type=int, default=4, help="steps between evaluations (default 4)")
    parser.add_argument("--heldout", type=int, default=160, help="tasks in each evaluation (default 160)")
    parser.add_argument("--minutes", type=float, default=40.0, help="of training for one run at most (default 40)")
    parser.add_argument("--backend", default="auto", help="sandboxes: auto, docker or bubblewrap")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of our runs (default 0 1 2)")
    parser.add_argument("--peer-seeds", type=int, nargs="*", default=[0, 1], help="of TRL's (default 0 1)")
    parser.add_argument(
        "--sides", nargs="+", choices=outcome.SIDES, default=["ours", "trl"], help="trl-together: with our rollout function"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="KEY=VALUE", help=f"a setting of TRL's: {', '.join(trl.OPTIONS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "peers", help="where results are kept")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "peers", help="where runs work")
    parser.add_argument("--again", action="store_true", help="make runs that there are results of once more")
    parser.add_argument("--note", default="", help="a sentence about the machine that the results keep, such as: other work ran meanwhile")
    parser.add_argument("--tune", type=int, nargs="?", const=2, metavar="STEPS", help="try TRL's own settings, so many steps each (2)")
    parser.add_argument("--markdown", action="store_true", help="write the tables of docs/peers.md from the results, and stop")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a recipe override for both sides: learner.lr=1e-5")
    return parser.parse_args(given)


def setting_of(given: argparse.Namespace) -> Setting:
    return Setting(
        recipe=given.recipe,
        model=given.model,
        mode=given.mode,
        wait=given.wait,
        target=given.target,
        every=given.every,
        heldout=given.heldout,
        minutes=given.minutes,
        backend=given.backend,
        overrides=tuple(given.set),
    )


def turns(sides: list[str], seeds: list[int], peer_seeds: list[int]) -> list[tuple[str, int]]:
    """Sides and seeds in the order in which they run: ours, theirs, ours, ... so that no side has the quiet hours for itself."""
    rounds = zip_longest(*(seeds if side == "ours" else peer_seeds for side in sides))
    return [(side, seed) for seeds_of_all in rounds for side, seed in zip(sides, seeds_of_all, strict=True) if seed is not None]


def main(given: argparse.Namespace) -> None:
    if given.markdown:
        tables.page(PAGE, given.out)
        print(f"wrote {PAGE}")
        return
    setting, options = setting_of(given), trl.options_of(given.peer)
    if given.mode == "single" and "trl-together" in given.sides:
        raise UserError("a single turn has no calls to make together", fix="leave trl-together out")
    setting.made(seed=0)  # what is wrong with it is told before anything runs
    work = given.runs.resolve() / setting.name
    if given.tune is not None:
        if given.tune < 1:
            raise UserError(f"--tune {given.tune} tries nothing", fix="give a number of steps, or none for two")
        trl.tune(setting, (given.peer_seeds or [0])[0], options, work, given.out / f"{setting.name}-tried.json", steps=given.tune)
        return
    todo = turns(given.sides, given.seeds, given.peer_seeds)
    if not given.again:
        todo = [(side, seed) for side, seed in todo if outcome.missing(given.out, setting.name, setting.record(), side, seed)]
    print(f"{setting.name}: {len(todo)} runs to make, at most {len(todo) * setting.minutes:.0f} min of training", file=sys.stderr)
    failed = [
        told for number, (side, seed) in enumerate(todo) if (told := one(given, setting, options, work, side, seed, len(todo) - number))
    ]
    if failed:
        raise InfrastructureError(f"{len(failed)} of {len(todo)} runs failed:\n" + "\n".join(failed))
    print(tables.tables(given.out))


def one(given: argparse.Namespace, setting: Setting, options: dict[str, object], work: Path, side: str, seed: int, left: int) -> str:
    """Makes one run and keeps its result; what went wrong, if something did, so that the other runs are made all the same."""
    progress = Progress(f"{side}, seed {seed} ({left} to go)", setting.minutes)
    folder = work / f"{side}-seed{seed}"
    try:
        if side == "ours":
            made = ours.run(setting, seed, folder, progress)
        else:
            played = {"rollouts": "together"} if side == "trl-together" else {}
            made = trl.run(side, setting, seed, folder, progress, {**options, **played})
    except InfrastructureError as error:
        progress.say(f"failed: {error}")
        return f"{side}, seed {seed}: {error}"
    path = outcome.save(outcome.with_note(made, given.note), given.out, setting.name)
    arrived = f"arrived after {made.arrived_s / 60:.1f} min" if made.arrived_s is not None else f"had not arrived ({made.ended})"
    progress.say(f"{arrived}, {made.steps} steps, peak {made.peak_gib:.1f} GiB; {path}")
    return ""


if __name__ == "__main__":
    try:
        main(arguments())
    except (UserError, InfrastructureError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on with the runs that are missing")
