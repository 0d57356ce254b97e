"""A policy with a million parameters learns Kuhn poker against itself and a league of its past versions, on two CPU cores.

    agentrl train recipes/kuhn_poker.py --run-dir runs/kuhn
    agentrl versions league runs/kuhn

In half of the groups, a past version plays one of the two roles. The entropy bonus is in units of the reward, because advantages are not
divided by their standard deviation. Without a bonus, the policy circles around the game's equilibrium. A bonus moves the equilibrium: the
exploitability of the equilibrium is 0.07 with a bonus of 0.3, and 0.03 with a bonus of 0.15. The bonus and the learning rate therefore
decrease during the run. `python benchmarks/selfplay.py` prints the exact exploitability.
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

GAME = {"limits": {"turns": 4, "turn_tokens": 4, "episode_tokens": 128, "all_tokens": 512}}

recipe = Recipe(
    name="kuhn_poker",
    steps=1000,
    policy=PolicyConfig(model="recipes/models/tables-base", dtype="float32", max_model_len=128),
    tasks=TasksConfig(family=Part("sandboxes.games:KuhnPoker", options=GAME)),
    rollout=RolloutConfig(
        agent=Part("players", options={"opponent": "league", "share": 0.5}),
        group=GroupConfig(size=8),
        groups_per_step=40,
        concurrency=128,
    ),
    evaluation=EvalConfig(heldout=0, heldout_real=0),
    serving=ServingConfig(max_num_seqs=128, kv_cache_gb=0.25, threads=1),
    objective=ObjectiveConfig(advantage=Part("rloo"), credit="verifier", entropy_coef=(0.5, 0.05)),
    learner=LearnerConfig(lr=1.2e-4, lr_schedule="linear", ranks=1, threads=1, max_tokens_per_microbatch=8192),
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
