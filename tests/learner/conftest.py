"""One process for the whole room that has imported what learners need: see `preloaded`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.config import Recipe
from agentrl.learner import LearnerProcess
from tests.learner import preloaded


@pytest.fixture(scope="package")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the host of preloaded processes listens."""
    with preloaded.hosting(tmp_path_factory.mktemp("host")) as address:
        yield address


@pytest.fixture
def make_learner(host: Path) -> Callable[[Path, Recipe], LearnerProcess]:
    """A run's learner as it is, except that its ranks are forked by the host; starting real ones is tested in test_process."""

    class Preloaded(LearnerProcess):
        def _command(self, placement: str) -> list[str]:
            return preloaded.command(host, self.recipe.learner.ranks, *self._worker())

    return Preloaded
