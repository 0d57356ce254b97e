"""Conversations with a simulated user: a policy with a million parameters learns the rules of a service desk, on two CPU cores.

    agentrl check recipes/desk.py
    agentrl train recipes/desk.py --run-dir runs/desk

The customer is a script, and the policy presses buttons: seven messages and actions, each of which is one letter. With `buttons=false`, a
model that can call functions writes its own messages. To use a model as the customer, for example the 135M-parameter model from `make
smollm2`:

    agentrl train recipes/desk.py tasks.family.options.user=recipes.desk:caller \\
      'judge_servers={"customer": {"model": "recipes/models/smollm2"}}'

`tasks.family.options.user=policy` lets the policy also play the customer.
"""

from agentrl.config import (
    EvalConfig,
    GroupConfig,
    LearnerConfig,
    ObjectiveConfig,
    PolicyConfig,
    Recipe,
    RolloutConfig,
    SamplingConfig,
    ServingConfig,
    TasksConfig,
)
from agentrl.judge import Endpoint, served
from agentrl.judge.user import EndpointUser
from agentrl.plugins.parts import Part

DESK = {"buttons": True, "kinds": ["refund", "late_refund", "cancel", "late_cancel"], "turns": 10, "turn_tokens": 4, "episode_tokens": 480}

recipe = Recipe(
    name="desk",
    steps=40,
    policy=PolicyConfig(model="recipes/models/tables-base", dtype="float32", max_model_len=512),
    tasks=TasksConfig(family=Part("sandboxes.desk:Desk", options=DESK)),
    rollout=RolloutConfig(group=GroupConfig(size=32), groups_per_step=8, concurrency=256),
    evaluation=EvalConfig(heldout=64, heldout_real=0, sampling=SamplingConfig(temperature=0.0)),
    serving=ServingConfig(max_num_seqs=256, kv_cache_gb=0.5, threads=1),
    objective=ObjectiveConfig(entropy_coef=0.03),
    learner=LearnerConfig(lr=2e-4, ranks=1, threads=1, max_tokens_per_microbatch=8192),
)

caller = EndpointUser(endpoint=Endpoint(url=served("customer"), model="customer", temperature=0.7, max_tokens=48))

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
