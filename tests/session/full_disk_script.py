"""`python -m tests.session.full_disk_script FOLDER light|torch`: the error of each writer of a run on a full disk, as JSON.

Run by `tests/session/test_full_disk.py` with FOLDER on a separate small file system.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.base.error_text import disk_full_error
from agentrl.experience import SqliteStore
from agentrl.learner.driver_reports import UpdateFailureLog, disk_errors_raised
from agentrl.learner.update_guard import UpdateFailure
from agentrl.observe import RunTracker, Summary
from agentrl.records import Blame, Failure, Group, PolicyVersion
from agentrl.rollout import excluded_group
from agentrl.version import FolderRegistry

BLOCK = b"x" * 4096


def fill(folder: Path) -> None:
    handle = os.open(folder / "filler", os.O_CREAT | os.O_WRONLY)
    try:
        while True:
            os.write(handle, BLOCK)
    except OSError:
        os.close(handle)


def group(index: int) -> Group:
    message = os.urandom(8000).hex()  # incompressible
    return excluded_group(index, "t", "k", Failure(stage="s", blame=Blame.TASK, kind="k", message=message), size=1)


def light(run: Path) -> dict[str, Callable[[], Any]]:
    store, tracker, registry = SqliteStore(run / "experience.sqlite"), RunTracker(run), FolderRegistry(run / "versions")
    summary = Summary(
        name="x", finished=False, steps=0, episodes=0, episodes_left_out=0, tokens_trained=0, weight_swaps=0, sandbox_backend="b", seed=0
    )
    setback = UpdateFailure(step=0, what="group", groups=(0,), episodes=("e",), action="skip", reasons=("r" * 9000,), metrics={})
    metrics = {f"metric {number}": 1.0 for number in range(300)}
    return {
        "store": lambda: [store.put(group(index)) for index in range(40)],
        "metrics": lambda: tracker.log(1, metrics),
        "closing metrics": tracker.close,
        "summary": lambda: summary.write(run),
        "registry": lambda: registry.add(PolicyVersion(number=1, parent=None, folder="versions/000001", sha256="0" * 64)),
        "failures": lambda: UpdateFailureLog(run).append((setback,)),
    }


def heavy(run: Path) -> dict[str, Callable[[], Any]]:
    import torch
    from safetensors.torch import save_file

    tensors = {"a": torch.zeros(100_000)}

    def guarded(save: Callable[[], Any]) -> None:
        with disk_errors_raised("it"):
            save()

    return {
        "torch.save": lambda: guarded(lambda: torch.save(tensors, run / "x.pt")),
        "safetensors": lambda: guarded(lambda: save_file(tensors, run / "x.safetensors")),
    }


def main() -> None:
    run = Path(sys.argv[1])
    attempts = (light if sys.argv[2] == "light" else heavy)(run)
    fill(run)
    errors = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception as error:
            errors[name] = [type(error).__name__, str(error), disk_full_error(error) is not None]
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
