"""Fixtures of real sandboxes."""

import pytest

from agentrl.sandbox import prune, select_backend
from tests.sandbox.building import BOTH, IMAGE, SPEC, leftovers


@pytest.fixture
def root(tmp_path):
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "image.toml").write_text(IMAGE)
    return tmp_path


@pytest.fixture
def nothing_is_left():
    """Fails a test that leaves a sandbox or control group of this process after its backend is closed."""
    yield
    assert leftovers() == []


@pytest.fixture
def no_orphans():
    """Removes the leftovers of processes that a test kills, so that tests on other workers do not see them."""
    yield
    prune()


@pytest.fixture(params=BOTH)
async def backend(request, root):
    backend = select_backend(request.param, run_label="test", root=root)
    await backend.prepare(SPEC)
    yield backend
    await backend.close()
