"""Fixtures of real sandboxes."""

import pytest

from tests.sandbox.building import IMAGE


@pytest.fixture
def root(tmp_path):
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "image.toml").write_text(IMAGE)
    return tmp_path
