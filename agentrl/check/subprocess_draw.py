"""Draws tasks in another process: `python -m agentrl.check.subprocess_draw` reads what to draw from standard input.

The process has another hash seed than its parent, and draws the tasks in another order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.base.processes import import_environment
from agentrl.check.family_source import Draw, FamilySource, digests
from agentrl.config.recipe import TasksConfig
from agentrl.plugins.references import add_project_root
from agentrl.records import Split
from agentrl.task import make_task

TIMEOUT_S = 600.0


def draw_in_subprocess(source: FamilySource, draws: Sequence[Draw]) -> list[dict[str, tuple[str, str]] | str]:
    """The digests of these tasks, or why one cannot be made, computed in another process.

    Raises `RuntimeError` with the process's last output when it cannot open the family.
    """
    with tempfile.NamedTemporaryFile(prefix="agentrl-check-") as answer:  # standard output belongs to the family
        question = {
            "tasks": source.tasks.model_dump(mode="json"),
            "seed": source.seed,
            "root": str(source.root),
            "draws": draws,
            "answer": answer.name,
        }
        seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
        environment = import_environment(Path(__file__).resolve().parents[2]) | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-m", "agentrl.check.subprocess_draw"]
        try:
            done = subprocess.run(
                command, input=json.dumps(question), env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not finished after {TIMEOUT_S:g} s") from None
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-600:] or f"exit code {done.returncode}")
        drawn: list[Any] = json.loads(answer.read())
    return [one if isinstance(one, str) else {name: (pair[0], pair[1]) for name, pair in one.items()} for one in drawn]


def main() -> None:
    question = json.load(sys.stdin)
    root = Path(question["root"])
    add_project_root(root)
    source = FamilySource(tasks=TasksConfig.model_validate(question["tasks"]), seed=question["seed"], root=root)
    family = source.open()
    draws = [(Split(split), int(index)) for split, index in question["draws"]]
    drawn: dict[Draw, Any] = {}
    for split, index in sorted(draws, key=lambda draw: (-draw[1], draw[0])):
        try:
            drawn[split, index] = digests(make_task(family, split, index))
        except Exception as error:  # a family is user code
            drawn[split, index] = f"{type(error).__name__}: {error}"
    Path(question["answer"]).write_text(json.dumps([drawn[draw] for draw in draws]), encoding="utf-8")


if __name__ == "__main__":
    main()
