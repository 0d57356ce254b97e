"""A policy with a million parameters learns to cross the frozen lake, an environment from Gymnasium, on two CPU cores.

    pip install gymnasium
    agentrl train recipes/frozen_lake.py --run-dir runs/lake

Each turn is one action, written as one of four letters. Each turn has a separate context, because the next action depends only on the
position.
"""

from agentrl.config import (
    EvalConfig,
    GroupConfig,
    LearnerConfig,
    ObjectiveConfig,
    PolicyConfig,
    Recipe,
    RolloutConfig,
    ServingConfig,
    TasksConfig,
)
from agentrl.plugins.parts import Part

LAKE = {
    "is_slippery": False,
    "formatter": "recipes.frozen_lake:describe",
    "instructions": "",
    "action_names": ["l", "n", "o", "d"],  # left, down, right, up: letters to which the untrained policy assigns similar probabilities
    "context_turns": 1,
    "limits": {"turns": 30, "turn_tokens": 4, "episode_tokens": 64, "all_tokens": 2048},
}

recipe = Recipe(
    name="frozen_lake",
    steps=40,
    policy=PolicyConfig(model="recipes/models/tables-base", dtype="float32", max_model_len=128),
    tasks=TasksConfig(family=Part("gymnasium:FrozenLake-v1", options=LAKE)),
    rollout=RolloutConfig(group=GroupConfig(size=32), groups_per_step=4, concurrency=128),
    evaluation=EvalConfig(heldout=32),  # sampled as in training, because greedy actions may walk into a wall forever
    serving=ServingConfig(max_num_seqs=128, kv_cache_gb=0.5, threads=1),
    objective=ObjectiveConfig(),
    learner=LearnerConfig(lr=2e-4, ranks=1, threads=1, max_tokens_per_microbatch=4096),
)


def describe(cell: int) -> str:
    """Returns the position as a row and a column."""
    return f"{cell // 4} {cell % 4}"


if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
