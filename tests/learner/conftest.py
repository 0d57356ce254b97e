"""One process for all tests of this folder that has imported the modules of a learner: see `preloaded`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.config import Recipe
from agentrl.learner import LearnerProcess
from tests.learner import preloaded


@pytest.fixture(scope="package")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The address at which the host of preloaded processes listens."""
    with preloaded.hosting(tmp_path_factory.mktemp("host")) as address:
        yield address


@pytest.fixture
def make_learner(host: Path) -> Callable[[Path, Recipe], LearnerProcess]:
    """A real `LearnerProcess`, except that the host forks its ranks; test_process tests the start of real ones."""

    class Preloaded(LearnerProcess):
        def _command(self, placement: str) -> list[str]:
            return preloaded.command(host, self.recipe.learner.ranks, *self._worker())

    return Preloaded
