"""The benchmarks that train a small policy with the learner's code: logprobs by version, and the definition of a collapse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.staleness import Run, cell

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.deepspeed

VERSIONS = """
import json, sys
from pathlib import Path
from benchmarks.small_loop import SUM, SmallLoop, join_alone, make_base, make_recipe, prompts_of

ranks, prompts, base = join_alone(), prompts_of(SUM)[::2], Path(sys.argv[1])
make_base(base, seed=0, taught=[(prompts_of(SUM), 0.3)])
lines = []
for staleness in (0, 1):
    keys = {"learner.minibatches": 2, "objective.off_policy.preset": "second_moment", "learner.lr": 0.003}
    loop = SmallLoop(base, make_recipe(seed=0, steps=4, groups=len(prompts), size=8, max_staleness=staleness, **keys), ranks)
    lines.append([loop.update(step, loop.sample_groups(len(prompts) * step, prompts, max(step - staleness, 0), 8)) for step in range(4)])
print(json.dumps(lines))
"""


def test_proximal_logprobs_are_those_of_the_version_of_the_step_in_every_optimizer_step(tmp_path: Path) -> None:
    """The server's logprobs of version s agree with the proximal ones of step s, also after the first of two optimizer steps."""
    command = [sys.executable, "-c", VERSIONS, str(tmp_path)]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    fresh, stale = json.loads(completed.stdout.splitlines()[-1])
    assert [step["optimizer_steps"] for step in fresh] == [2, 2, 2, 2]
    for step in fresh:
        assert step["mismatch_tokens"] == 1 and step["mismatch_kl"] < 1e-9
        assert step["truncated_fraction"] == 0, "no token of the current version is masked"
        assert step["kl_behaviour"] > 1e-7, "the second optimizer step uses other weights"
    assert all(step["mismatch_tokens"] == 0 and step["ess"] < 1 for step in stale[1:])


def test_a_collapse_is_the_first_step_below_half_of_the_best_success() -> None:
    fallen, risen = Run(success={0: 0.2, 10: 0.8, 20: 0.41, 30: 0.39, 40: 0.9}), Run(success={0: 0.5, 10: 0.26, 20: 0.6})
    assert (fallen.collapse, risen.collapse) == (30, None)
    assert cell([fallen, risen]) == "0.75 [0.60, 0.90], 1 collapsed (step 30)"
