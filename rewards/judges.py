"""Judges that call a model on this machine, served at port 8000 as `judge`. Copy the judges that you need and change the endpoint.

    vllm serve Qwen/Qwen3-8B --port 8000 --served-model-name judge

These judges can be used without a calibration, because the model is user-supplied. Calibrate a judge (`agentrl judge calibrate
rewards.judges:correct LABELS`) before you train with it.
"""

from __future__ import annotations

from agentrl.judge import Endpoint, Ensemble, Judge, Pairwise
from agentrl.judge.scoring import CORRECT, GROUNDED, HELPFUL, INSTRUCTIONS

LOCAL = Endpoint(url="http://127.0.0.1:8000/v1", model="judge")

correct = Judge(endpoint=LOCAL, form=CORRECT, name="correct")
"""Whether the answer means the same as the task's reference."""

helpful = Judge(endpoint=LOCAL, form=HELPFUL, name="helpful")
"""Whether the answer is complete, to the point and, as far as the model knows, correct. Needs no reference."""

grounded = Judge(endpoint=LOCAL, form=GROUNDED, name="grounded")
"""Whether the answer follows from the results of the agent's tools."""

instructions = Judge(endpoint=LOCAL, form=INSTRUCTIONS, name="instructions")
"""Whether the answer has the requested form."""

better = Pairwise(endpoint=LOCAL, name="better")
"""Whether the answer is better than the task's reference. The two are compared in both orders."""

quality = Ensemble(judges={"helpful": helpful, "better": better}, aggregate="mean", quorum=2, max_disagreement=0.4, name="quality")
"""Two judges with different prompts, which must agree."""
