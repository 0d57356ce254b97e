"""Trains on a task set for inspect_ai, whose agent, tools and scorer run unchanged in a separate Python environment.

    agentrl env add inspect-ai
    agentrl train recipes/inspect_tables.py

The task set is `recipes/inspect_tasks/tables.py`: the quickstart's questions in inspect's style. Its tools run in agentrl's sandboxes, and
the scorer's value is the score. For other task sets, see docs/environments.md.
"""

from recipes.quickstart import recipe as base

recipe = base.but(
    {
        "name": "inspect-tables",
        "tasks.family": "inspect:recipes/inspect_tasks/tables.py@tables",
        "tasks.family.options": {
            "image": "sandboxes/tables",
            "sandbox": {"memory_mb": 128, "processes": 16, "disk_mb": 16},
            "limits": {"turns": 4, "turn_tokens": 192, "episode_tokens": 768},
        },
        "evaluation.heldout_real": 0,
    }
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
