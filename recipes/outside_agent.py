"""Trains with an unchanged agent program, which requests completions from an OpenAI endpoint. The gateway provides this endpoint.

    agentrl train recipes/outside_agent.py
    agentrl train recipes/outside_agent.py rollout.agent.options.port=8791 tasks.family.options.network=127.0.0.1:8791

The program is `recipes/agents/tables_stdlib.py`, a version of `tables_sdk.py` without the SDK, which the sandbox's image does not contain.
The program runs in the episode's sandbox, has its own tools, and can reach only the gateway. The policy, the tasks and the evaluation are
the quickstart's. For other programs, see docs/bring-your-own-agent.md.
"""

from agentrl.config import Part
from recipes.quickstart import recipe as base

ADDRESS = "127.0.0.1:8790"

recipe = base.but(
    {
        "name": "outside-agent",
        "tasks.family.options": {"network": ADDRESS},
        "rollout.agent": Part(
            "agentrl.gateway:ExternalProgram",
            options={
                "command": ["python3", "-I", "agent.py"],
                "files": {"agent.py": "recipes/agents/tables_stdlib.py"},
                "port": int(ADDRESS.rpartition(":")[2]),
            },
        ),
    }
)

if __name__ == "__main__":
    from agentrl.cli import run_recipe

    run_recipe(__file__)
