"""Searches for small sorting networks in training phases. Each phase starts from the model and the archive of the previous phase.

    python recipes/discovery.py --channels 6 --phases 8 --out runs/discovery
    agentrl train recipes/discovery.py                                             # a single phase, without an archive

Between two phases, the networks of all episodes are added to the archive (`sandboxes.networks.archive`). Half of the next episodes start
from states in the archive. An interrupted phase is resumed, and a finished phase is not repeated. `sandboxes/networks/checker.py` verifies
every sorting network in a separate process before the network is written to `found.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.base.files import append_lines, json_line
from agentrl.config import (
    EvalConfig,
    GroupConfig,
    LearnerConfig,
    ObjectiveConfig,
    Part,
    PolicyConfig,
    Recipe,
    RolloutConfig,
    ServingConfig,
    TasksConfig,
)
from agentrl.experience.reading import StoreReader
from agentrl.records import Episode
from sandboxes.networks.archive import Archive
from sandboxes.networks.state import Comparator, label, parse

ROOT = Path(__file__).resolve().parents[1]
CHECKER = ROOT / "sandboxes" / "networks" / "checker.py"
BUDGET = {4: 8, 5: 13, 6: 18, 7: 24, 8: 30}
"""Channels -> number of comparators that an episode may place, about 1.5 times the smallest known number for a sorting network."""

recipe = Recipe(
    name="discovery",
    steps=12,
    policy=PolicyConfig(model="recipes/models/tables-base", dtype="float32", max_model_len=512),
    tasks=TasksConfig(family=Part("sandboxes.networks:SortingNetwork", options={"channels": 6, "budget": 18})),
    rollout=RolloutConfig(group=GroupConfig(size=16), groups_per_step=8, concurrency=64),
    evaluation=EvalConfig(heldout=0),
    serving=ServingConfig(max_num_seqs=64, kv_cache_gb=0.5, threads=1),
    objective=ObjectiveConfig(clip_low=0.2, clip_high=0.28),
    learner=LearnerConfig(lr=3e-4, zero_stage=2, ranks=1, threads=1, max_tokens_per_microbatch=2048),
)


def main() -> None:
    """Runs all phases that are not finished."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--channels", type=int, choices=sorted(BUDGET), default=6, help="number of inputs of the network")
    parser.add_argument("--phases", type=int, default=8, help="total number of phases, including finished ones")
    parser.add_argument("--out", type=Path, default=Path("runs/discovery"), help="folder for the phases and their archives")
    parser.add_argument("overrides", nargs="*", help="recipe overrides, such as learner.lr=1e-4")
    arguments = parser.parse_args()
    for phase in range(arguments.phases):
        if not _archive_path(arguments.out, phase + 1).exists():
            _run_phase(arguments.out, phase, arguments.channels, arguments.overrides)


def _archive_path(folder: Path, phase: int) -> Path:
    """Returns the path of the archive with which a phase starts."""
    return folder / f"archive-{phase}.json"


def _run_phase(folder: Path, phase: int, channels: int, overrides: Sequence[str]) -> None:
    """Trains one phase, and writes the archive for the next phase."""
    run, previous, archive_file = folder / f"phase-{phase}", folder / f"phase-{phase - 1}" / "model", _archive_path(folder, phase)
    options = {"channels": channels, "budget": BUDGET[channels], **({"archive": str(archive_file.resolve())} if phase else {})}
    command = [sys.executable, "-m", "agentrl", "train", str(Path(__file__).resolve()), "--run-dir", str(run)]
    command += [f"seed={phase}", f"tasks.family.options={json.dumps(options)}"]
    command += [f"policy.model={previous.resolve()}"] if phase else []
    started = time.monotonic()
    subprocess.run([*command, *overrides, *(["--resume"] if (run / "run.json").exists() else [])], cwd=ROOT, check=True)
    archive = Archive.load(archive_file) if phase else Archive(channels)
    networks = list(read_networks(run, channels))
    added, best = archive.add(networks), archive.best()
    line: dict[str, object] = {"phase": phase, "episodes": len(networks), "states": len(archive.states), "new_states": added}
    line |= {"minutes": round((time.monotonic() - started) / 60, 1), **(_check(best) if best else {"comparators": None})}
    append_lines(folder / "found.jsonl", [json_line(line)])
    print(f"phase {phase}: {json.dumps(line)}", flush=True)
    archive.save(_archive_path(folder, phase + 1))


def _check(network: Sequence[Comparator]) -> dict[str, object]:
    """Returns a network and the verdict of the independent checker. Raises `CalledProcessError` if the network does not sort."""
    text = " ".join(map(label, network))
    checked = subprocess.run([sys.executable, str(CHECKER), text], check=True, capture_output=True, text=True)
    return {"comparators": len(network), "network": text, "checked": checked.stdout.strip()}


def read_networks(run: Path, channels: int) -> Iterator[list[Comparator]]:
    """Yields the final network of each training episode of a run, except for episodes without a score or with an invalid action. Each
    network includes the comparators with which the episode started."""
    store = StoreReader(run / "experience.sqlite")
    try:
        for entry in store.entries():
            for group in store.groups([entry.index]):
                yield from (network for scored in group.scored if (network := _network(scored.episode, channels)))
    finally:
        store.close()


def _network(episode: Episode, channels: int) -> list[Comparator]:
    """Returns the comparators of an episode's network; an empty list if an action is invalid."""
    trajectory = episode.trajectories[0]
    start = trajectory.prompt[-1].content.split() if trajectory.prompt else []
    texts = [word for word in start if "-" in word] + [turn.message.content for turn in trajectory.turns]
    try:
        return [parse(text, channels) for text in texts]
    except ValueError:
        return []


if __name__ == "__main__":
    main()
