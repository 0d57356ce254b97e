"""The quickstart with PPO: a critic values every token, and advantages are estimated from these values instead of within a group.

    agentrl train recipes/quickstart_ppo.py
    agentrl train recipes/quickstart_ppo.py critic.lam=0.95 --run-dir runs/x

Everything else is as in the quickstart: tasks, sandboxes, policy and evaluation.
"""

from agentrl.config import CriticConfig
from recipes.quickstart import recipe as base

recipe = base.but(
    {
        "name": "quickstart-ppo",
        "steps": 28,
        "rollout.group.size": 1,
        "rollout.groups_per_step": 128,
        "objective.advantage": "gae",
        "critic": CriticConfig(lr=1e-3, epochs=2, minibatches=8, warmup_steps=2),
    }
)
