"""Memory across episodes: agents share notes about the contents of a project's drawers, which they can discover only by looking.

    agentrl check recipes/archive.py       # the tasks themselves
    agentrl train recipes/archive.py
    agentrl memory runs/archive            # the notes, their readers, and a check that no note reveals an answer

Requires a GPU and a model that can call tools. `benchmarks/memory.py` measures the effect of memory with scripted policies on any machine.
"""

from agentrl.config import (
    EvalConfig,
    GroupConfig,
    LearnerConfig,
    MemoryConfig,
    ObjectiveConfig,
    Part,
    PolicyConfig,
    Recipe,
    RolloutConfig,
    ServingConfig,
    TasksConfig,
)

recipe = Recipe(
    name="archive",
    steps=40,
    device="cuda",
    policy=PolicyConfig(model="Qwen/Qwen3-0.6B", dtype="bfloat16", max_model_len=3072),
    tasks=TasksConfig(family=Part("sandboxes.archive:Archive", options={"projects": 16})),
    rollout=RolloutConfig(group=GroupConfig(size=8), groups_per_step=16, concurrency=64),
    memory=MemoryConfig(scope="project", notes=3, heldout_rounds=8),
    evaluation=EvalConfig(heldout=160, heldout_real=0),
    serving=ServingConfig(max_num_seqs=128, gpu_memory_utilization=0.4),
    objective=ObjectiveConfig(clip_high=0.28),
    learner=LearnerConfig(lr=2e-6, warmup_steps=4, max_tokens_per_microbatch=16384),
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
