"""Judges that ask a model on this machine, served at port 8000 under the name `judge`: copy what fits, and say where yours is served.

    vllm serve Qwen/Qwen3-8B --port 8000 --served-model-name judge

None of them demands a calibration, because the model is yours. Measure it (`agentrl judge calibrate rewards.judges:correct LABELS`)
before you train on it.
"""

from __future__ import annotations

from agentrl.judge import Endpoint, Ensemble, Judge, Pairwise
from agentrl.judge.forms import CORRECT, GROUNDED, HELPFUL, INSTRUCTIONS

LOCAL = Endpoint(url="http://127.0.0.1:8000/v1", model="judge")

correct = Judge(endpoint=LOCAL, form=CORRECT, name="correct")
"""Says the answer what the task's reference says?"""

helpful = Judge(endpoint=LOCAL, form=HELPFUL, name="helpful")
"""Without a reference: right as far as the model knows, complete, to the point."""

grounded = Judge(endpoint=LOCAL, form=GROUNDED, name="grounded")
"""Does the answer follow from what the agent's tools gave?"""

instructions = Judge(endpoint=LOCAL, form=INSTRUCTIONS, name="instructions")
"""Does the answer have the form that was asked for?"""

better = Pairwise(endpoint=LOCAL, name="better")
"""Is the answer better than the task's reference? Asked in both orders."""

quality = Ensemble(judges={"helpful": helpful, "better": better}, aggregate="mean", quorum=2, max_disagreement=0.4, name="quality")
"""Two prompts that have to agree."""
