"""`python -m agentrl.learner.worker --run-dir DIR`: one rank of a run's learner, started by torchrun.

Light on purpose: the process ties itself to its parent before it spends seconds importing torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from agentrl.errors import AgentRLError, LearnerHalted
from agentrl.learner.lifeline import die_with_parent


def main() -> int:
    """0 when all steps are made or a stop was asked for, 1 when the learner cannot go on; the log says why."""
    parser = argparse.ArgumentParser(description="One rank of a run's learner; start it with torchrun.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process to die with: the one that started this one")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    from agentrl.learner.process import HALTED
    from agentrl.learner.steps import work

    try:
        work(arguments.run_dir)
    except AgentRLError as error:
        logging.getLogger("agentrl.learner").error("%s: %s", type(error).__name__, error)
        if isinstance(error, LearnerHalted) and os.environ.get("RANK") == "0":
            note = arguments.run_dir / HALTED
            note.parent.mkdir(exist_ok=True)
            note.write_text(str(error), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
