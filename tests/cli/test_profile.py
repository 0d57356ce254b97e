"""The temporary run folder of `agentrl profile` is removed unless its logs explain a failure."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from agentrl.cli.profile import _folder
from agentrl.errors import UserError


@pytest.mark.parametrize(
    ("error", "kept"), [(UserError("a check failed"), False), (KeyboardInterrupt(), False), (typer.Exit(130), False), (typer.Exit(1), True)]
)
def test_only_a_failed_run_keeps_its_temporary_folder(
    error: BaseException, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(type(error)), _folder(None) as folder:
        folder.mkdir()
        raise error
    assert folder.is_relative_to(tmp_path) and folder.exists() == kept and bool(list(tmp_path.iterdir())) == kept
