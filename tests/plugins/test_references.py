from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import PluginError
from agentrl.plugins.references import resolve


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


def test_the_error_of_a_missing_dependency_names_the_dependency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="install 'surely_not_installed'"):
        resolve("needy:x")


def test_a_file_that_fails_to_import_is_reported_with_its_line_and_not_cached(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("x = 1\ny = 1 / 0\n")
    with pytest.raises(PluginError, match=r"broken\.py:2: ZeroDivisionError: division by zero\n  fix: "):
        resolve(f"{path}:x")
    path.write_text("x = 1\n")
    assert resolve(f"{path}:x") == 1


SECTION = "from agentrl.config import LearnerConfig\n"
MISTAKES = {
    "def x(\n": r"mistaken\.py:1: SyntaxError: '\(' was never closed",
    "\nimport nosuchmodule\n": r"mistaken\.py:2: ModuleNotFoundError: .*\n  fix: install 'nosuchmodule'",
    "import math\nmath.sqroot(2)\n": r"mistaken\.py:2: AttributeError: module 'math' has no attribute 'sqroot'",
    f"{SECTION}x = LearnerConfig(lrr=1)\n": r"mistaken\.py:2: LearnerConfig\.lrr: unknown key; did you mean lr\? known here: ",
    f"{SECTION}x = LearnerConfig(lr='fast')\n": r"mistaken\.py:2: LearnerConfig\.lr: Input should be a valid number.*\(got 'fast'\)",
    f"{SECTION}x = LearnerConfig(zero_stage=0, lr=0.1)\nx.lrr\n": r"mistaken\.py:3: AttributeError: .*has no attribute 'lrr'",
    "raise SystemExit(3)\n": r"mistaken\.py:1: SystemExit: 3",
}


@pytest.mark.parametrize("text", MISTAKES)
@pytest.mark.parametrize("as_module", [False, True])
def test_a_mistake_in_user_code_is_reported_by_line(text: str, as_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mistaken.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match=MISTAKES[text]) as error:
        resolve("mistaken:x" if as_module else f"{tmp_path}/mistaken.py:x")
    assert error.value.fix and len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"recipe = \0\n", r"odd\.py: SyntaxError: source code string cannot contain null bytes"),
        (b"class Own(BaseException): pass\nraise Own('oh')\n", r"odd\.py:2: Own: oh"),
        (b"raise BaseExceptionGroup('both', [KeyError(), KeyboardInterrupt()])\n", r"odd\.py:1: BaseExceptionGroup: both"),
    ],
)
def test_any_exception_of_a_file_is_reported_with_its_location(source: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_bytes(source)
    with pytest.raises(PluginError, match=message):
        resolve(f"{tmp_path / 'odd.py'}:recipe")


def test_ctrl_c_while_a_file_is_imported_stays_a_keyboard_interrupt(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        resolve(f"{tmp_path / 'odd.py'}:recipe")
