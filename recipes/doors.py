"""A policy with a million parameters learns to write notes that help later episodes, and to use them, on two CPU cores.

    agentrl train recipes/doors.py --run-dir runs/doors
    agentrl memory runs/doors
    agentrl train recipes/doors.py --run-dir runs/doors-alone memory=null       # without a memory
    python benchmarks/environments.py memory                                    # three seeds, and a control

The gold is behind the same door during all visits to a house (`sandboxes/doors`). A training episode has three days. On the later days, the
policy reads notes from the same episode, so correct notes pay off. The held-out houses differ from the training houses, and are visited in
six rounds of one day each.
"""

from agentrl.config import (
    EvalConfig,
    GroupConfig,
    LearnerConfig,
    MemoryConfig,
    ObjectiveConfig,
    PolicyConfig,
    Recipe,
    RolloutConfig,
    SamplingConfig,
    ServingConfig,
    TasksConfig,
)
from agentrl.plugins.parts import Part

HOUSES, VISITS = 16, 6
LIMITS = {"turns": 6, "turn_tokens": 4, "episode_tokens": 128, "all_tokens": 1024}
VISITED = {"houses": HOUSES, "visits": VISITS, "context_turns": 1, "limits": LIMITS}

recipe = Recipe(
    name="doors",
    steps=12,
    max_staleness=0,
    policy=PolicyConfig(model="recipes/models/tables-base", dtype="float32", max_model_len=128),
    tasks=TasksConfig(family=Part("sandboxes.doors:DoorTasks", options=VISITED)),
    rollout=RolloutConfig(group=GroupConfig(size=8), groups_per_step=HOUSES, concurrency=128),
    memory=MemoryConfig(scope="project", notes=3, heldout_rounds=VISITS),
    evaluation=EvalConfig(heldout=HOUSES * VISITS, sampling=SamplingConfig(temperature=0.0)),
    serving=ServingConfig(max_num_seqs=128, kv_cache_gb=0.5, threads=1),
    objective=ObjectiveConfig(turn_coef=1.0, entropy_coef=0.02),
    learner=LearnerConfig(lr=2e-4, ranks=1, threads=1, max_tokens_per_microbatch=8192),
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
