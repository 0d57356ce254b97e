from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import PluginError
from agentrl.plugins import resolve


def test_modules_and_files_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("value = 41 + 1\n")
    monkeypatch.chdir(tmp_path)
    assert resolve("./mine.py:value") == 42
    assert resolve("pathlib:Path") is Path


def test_the_error_lists_what_the_module_has(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("exact = 1\n")
    with pytest.raises(PluginError, match="it has: exact"):
        resolve(f"{path}:exakt")


def test_a_missing_dependency_of_the_module_is_named_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="install 'surely_not_installed'"):
        resolve("needy:x")


def test_a_file_that_fails_to_import_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    for wrong, says in (("1 / 0", "ZeroDivisionError: division by zero"), ("raise SystemExit(3)", "SystemExit: 3"), ("def", "SyntaxError")):
        path.write_text(wrong + "\n")
        with pytest.raises(PluginError, match=f"importing .*broken.py failed: {says}(.|\n)*fix: repair"):
            resolve(f"{path}:x")
    path.write_text("x = 1\n")
    assert resolve(f"{path}:x") == 1
