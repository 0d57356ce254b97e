"""The quickstart with PPO: a critic values every token, and advantages are estimated from its values instead of within a group.

    python recipes/quickstart_ppo.py
    agentrl train recipes/quickstart_ppo.py critic.lam=0.95 --run-dir runs/x

Everything else is the quickstart's: the same tasks, sandboxes, policy and evaluation.
"""

from agentrl.recipe import (
    CriticConfig,
    EvalConfig,
    LearnerConfig,
    ObjectiveConfig,
    PolicyConfig,
    Recipe,
    RolloutConfig,
    ServingConfig,
    TasksConfig,
)

recipe = Recipe(
    name="quickstart-ppo",
    steps=28,
    max_staleness=1,
    policy=PolicyConfig(model="recipes/models/tables-base", dtype="float32", max_model_len=512),
    tasks=TasksConfig(family="sandboxes.tables:Tables"),
    rollout=RolloutConfig(group_size=1, groups_per_step=128, min_group_size=1, concurrency=64),
    evaluation=EvalConfig(heldout=160, heldout_real=96, temperature=0.0),
    serving=ServingConfig(max_num_seqs=64, kv_cache_gb=0.5, threads=1),
    objective=ObjectiveConfig(advantage="gae", clip_low=0.2, clip_high=0.28),
    critic=CriticConfig(lr=1e-3, epochs=2, minibatches=8, warmup_steps=2),
    learner=LearnerConfig(lr=3e-4, zero_stage=2, ranks=1, threads=1, max_tokens_per_microbatch=2048),
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
