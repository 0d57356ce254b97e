from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed in it, entry points included, by pip and from its pyproject.toml."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    completed = subprocess.run([*command, "--target", str(folder), str(PACKAGE)], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return folder
