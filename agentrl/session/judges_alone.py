"""The judges' servers of a recipe where there is no run: for a measurement, a check, practice."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.session.judge_servers import running_judge_servers
from agentrl.session.preflight import declare_judges


@asynccontextmanager
async def standalone_judge_servers(recipe: Recipe | None, *, root: Path) -> AsyncIterator[None]:
    """Around what asks the judges of a recipe: their servers answer, if it starts any. Their logs stay where something fails.

    Raises `UserError` for a model that cannot be served, and `ServingError` for a server that does not start.
    """
    models = {} if recipe is None else declare_judges(recipe, root=root)
    if recipe is None or not models:
        yield
        return
    work = Path(tempfile.mkdtemp(prefix="agentrl-judges-"))
    print(f"starting the judges' servers {', '.join(models)}; their logs are in {work / 'logs'}", file=sys.stderr)
    async with running_judge_servers(recipe, models, folder=work) as servers:
        await servers.ready()
        yield
    shutil.rmtree(work, ignore_errors=True)
