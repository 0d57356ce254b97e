"""Task folders with an instruction-tuned model on one GPU: the agent writes files, and hidden tests check them in fresh sandboxes.

    agentrl check sandboxes/chores        # checks the tasks: gold solutions score 1, and no work and cheats score 0
    agentrl eval recipes/chores.py        # measures the model before training
    agentrl train recipes/chores.py

These ten tasks are an example. Ten tasks are too few to train a model that solves other tasks. Set `tasks` to your own folder.
"""

from agentrl.config import EvalConfig, GroupConfig, LearnerConfig, Part, PolicyConfig, Recipe, RolloutConfig, ServingConfig, TasksConfig

recipe = Recipe(
    name="chores",
    steps=40,
    device="cuda",
    policy=PolicyConfig(model="Qwen/Qwen3-4B", dtype="bfloat16", max_model_len=8192),
    tasks=TasksConfig(family=Part("sandboxes/chores", options={"heldout": 0.3})),
    rollout=RolloutConfig(group=GroupConfig(size=8), groups_per_step=7, concurrency=56),
    evaluation=EvalConfig(heldout=3, heldout_real=0, every=10),
    serving=ServingConfig(max_num_seqs=64, gpu_memory_utilization=0.35),
    learner=LearnerConfig(lr=1e-6, warmup_steps=5, max_tokens_per_microbatch=16384),
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
