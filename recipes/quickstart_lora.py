"""The quickstart with LoRA: the base policy stays as it is, and a version is a low-rank adapter to it, a tenth of its size.

    python recipes/quickstart_lora.py
    agentrl train recipes/quickstart_lora.py learner.lora.rank=4 --run-dir runs/x

Everything else but the learning rate is the quickstart's: the same tasks, sandboxes, policy and evaluation. `model/` in the run
folder is the result as a whole model, `adapter/` what was trained.
"""

from agentrl.recipe import (
    EvalConfig,
    LearnerConfig,
    LoraConfig,
    ObjectiveConfig,
    PolicyConfig,
    Recipe,
    RolloutConfig,
    ServingConfig,
    TasksConfig,
)

recipe = Recipe(
    name="quickstart-lora",
    steps=24,
    max_staleness=1,
    policy=PolicyConfig(model="recipes/models/tables-base", dtype="float32", max_model_len=512),
    tasks=TasksConfig(family="sandboxes.tables:Tables"),
    rollout=RolloutConfig(group_size=8, groups_per_step=16, concurrency=64),
    evaluation=EvalConfig(heldout=160, heldout_real=96, temperature=0.0),
    serving=ServingConfig(max_num_seqs=64, kv_cache_gb=0.5, threads=1),
    objective=ObjectiveConfig(clip_low=0.2, clip_high=0.28),
    learner=LearnerConfig(lr=4e-3, zero_stage=2, ranks=1, threads=1, max_tokens_per_microbatch=2048, lora=LoraConfig(rank=8, alpha=16.0)),
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
