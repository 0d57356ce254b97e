"""A policy with a million parameters learns to balance the pole of Gymnasium's CartPole, on two CPU cores.

    pip install gymnasium
    agentrl train recipes/cartpole.py --run-dir runs/pole

For each step of the environment, the policy writes one letter in one turn. Each turn has a separate context, because the next action
depends only on the four numbers. An episode of 500 steps therefore needs contexts of only 40 tokens.
"""

from collections.abc import Sequence

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
from agentrl.plugins.parts import Part

POLE = {
    "formatter": "recipes.cartpole:describe",
    "instructions": "",
    "action_names": ["l", "h"],  # letters to which the untrained policy assigns similar probabilities
    "context_turns": 1,
    "limits": {"turns": 500, "turn_tokens": 4, "episode_tokens": 64, "wall_s": 600.0, "episode_output_chars": 100_000},
}

recipe = Recipe(
    name="cartpole",
    steps=40,
    policy=PolicyConfig(model="recipes/models/tables-base", dtype="float32", max_model_len=128),
    tasks=TasksConfig(family=Part("gymnasium:CartPole-v1", options=POLE)),
    rollout=RolloutConfig(group=GroupConfig(size=16), groups_per_step=2, concurrency=32),
    evaluation=EvalConfig(heldout=32, sampling=SamplingConfig(temperature=0.0)),
    serving=ServingConfig(max_num_seqs=32, kv_cache_gb=0.5, threads=1),
    objective=ObjectiveConfig(clip_low=0.2, clip_high=0.28),
    learner=LearnerConfig(lr=2e-4, ranks=1, threads=1, max_tokens_per_microbatch=8192),
)

SCALES = (3.7, 3.0, 40.0, 3.0)


def describe(observation: Sequence[float]) -> str:
    """Returns position, velocity, angle and angular velocity as digits with signs."""
    return " ".join(f"{max(-9, min(9, round(float(value) * scale))):+d}" for value, scale in zip(observation, SCALES, strict=True))


if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
