"""Trains on a taskset for verifiers, whose tools and rewards run unchanged in a separate Python environment.

    agentrl env add verifiers==0.4.0
    agentrl train recipes/verifiers_programs.py

The taskset is `recipes/verifiers_tasks/programs.py`. For other packages, see docs/environments.md.
"""

from recipes.quickstart import recipe as base

recipe = base.but(
    {
        "name": "verifiers-programs",
        "tasks.family": "verifiers:recipes/verifiers_tasks/programs.py",
        "tasks.family.options": {"limits": {"turns": 2, "turn_tokens": 192, "episode_tokens": 512}},
        "evaluation.heldout_real": 0,
    }
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
