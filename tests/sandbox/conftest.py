"""Fixtures of real sandboxes."""

import pytest

from agentrl.sandbox import select_backend
from tests.sandbox.building import BOTH, IMAGE, SPEC


@pytest.fixture
def root(tmp_path):
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "image.toml").write_text(IMAGE)
    return tmp_path


@pytest.fixture(params=BOTH)
async def backend(request, root):
    backend = select_backend(request.param, run_label="test", root=root)
    await backend.prepare(SPEC)
    yield backend
    await backend.close()
