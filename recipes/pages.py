"""Sub-agents and summaries: the agent looks up entries on many pages, but its context is too small for all pages.

    agentrl check recipes/pages.py        # checks the tasks
    agentrl eval recipes/pages.py         # measures the model before training
    agentrl train recipes/pages.py objective.credit=roles

Requires a GPU and a model that can call tools. `tests/sandboxes/test_pages.py` runs a short version with scripted policies on any machine.
"""

from agentrl.config import (
    DelegationConfig,
    EvalConfig,
    GroupConfig,
    LearnerConfig,
    ObjectiveConfig,
    Part,
    PolicyConfig,
    Recipe,
    RolloutConfig,
    ServingConfig,
    TasksConfig,
)

recipe = Recipe(
    name="pages",
    steps=40,
    device="cuda",
    policy=PolicyConfig(model="Qwen/Qwen3-0.6B", dtype="bfloat16", max_model_len=4096),
    tasks=TasksConfig(
        family=Part("sandboxes.pages:Pages", options={"pages": 6, "entries": 80, "turn_tokens": 512, "episode_tokens": 2560})
    ),
    rollout=RolloutConfig(
        agent="delegating",
        delegation=DelegationConfig(total=6, turns=3),
        compaction=0.7,
        group=GroupConfig(size=8),
        groups_per_step=16,
        concurrency=64,
    ),
    evaluation=EvalConfig(heldout=160, heldout_real=0),
    serving=ServingConfig(max_num_seqs=128, gpu_memory_utilization=0.4),
    objective=ObjectiveConfig(credit="verifier", clip_high=0.28),
    learner=LearnerConfig(lr=2e-6, warmup_steps=4, max_tokens_per_microbatch=16384),
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
