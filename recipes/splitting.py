"""Learning to split: questions on several pages, for an agent whose context has room for only one question.

    agentrl check recipes/splitting.py                            # checks the tasks
    agentrl train recipes/splitting.py objective.credit=episode   # or another credit method
    agentrl train recipes/splitting.py rollout.compaction=0.6

Runs on two CPU cores. At first, the policy splits a third of its tasks, and its helpers make mistakes. A task is solved only if every
helper is correct. The last command requests summaries of long contexts. This policy was not trained to write summaries, and at first no
summary is accepted.
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
    name="splitting",
    steps=24,
    max_staleness=1,
    policy=PolicyConfig(model="recipes/models/splitting-base", dtype="float32", max_model_len=384),
    tasks=TasksConfig(family=Part("sandboxes.pages:Questions", options={"pages": 3})),
    rollout=RolloutConfig(
        agent="delegating",
        delegation=DelegationConfig(total=6, turns=8),
        group=GroupConfig(size=8),
        groups_per_step=16,
        concurrency=64,
    ),
    evaluation=EvalConfig(heldout=160, heldout_real=0),
    serving=ServingConfig(max_num_seqs=96, kv_cache_gb=0.5, threads=1),
    objective=ObjectiveConfig(credit="verifier", clip_low=0.2, clip_high=0.28),
    learner=LearnerConfig(lr=3e-4, zero_stage=2, ranks=1, threads=1, max_tokens_per_microbatch=2048),
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
