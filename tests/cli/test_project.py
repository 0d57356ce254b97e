"""`agentrl init`: the wheel contains the files, and the new project works outside the repository."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.cli.project import init_project
from agentrl.errors import UserError
from agentrl.plugins.references import CONTENT, content_root
from tests.commands import agentrl

ROOT = Path(__file__).resolve().parents[2]


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=600)
    (wheel,) = out.glob("agentrl_posttraining-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


def test_an_editable_install_finds_the_content_in_the_repository() -> None:
    assert content_root() == ROOT


@pytest.mark.slow
def test_the_wheel_contains_the_content_and_the_entry_points(unpacked_wheel: Path) -> None:
    for part in CONTENT:
        packed, original = unpacked_wheel / "agentrl" / "_project" / part, ROOT / part
        if original.is_dir():
            assert files_of(packed) == files_of(original)
        else:
            assert packed.read_bytes() == original.read_bytes()
    entry_points = next(unpacked_wheel.glob("*.dist-info/entry_points.txt")).read_text()
    assert "agentrl = agentrl.cli:main" in entry_points
    templates = unpacked_wheel / "agentrl" / "observe" / "templates"
    assert files_of(templates) == files_of(ROOT / "agentrl" / "observe" / "templates")
    assert "[vllm.general_plugins]" in entry_points
    assert (unpacked_wheel / "agentrl" / "py.typed").is_file(), "type checkers read the annotations of a user's dependency"
    assert {path.name for path in unpacked_wheel.iterdir() if path.suffix != ".dist-info"} == {"agentrl"}, "only agentrl is installed"


@pytest.mark.slow
def test_a_project_from_the_wheel_passes_its_own_tests(unpacked_wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "my-agent"
    env = {"PYTHONPATH": str(unpacked_wheel), "PATH": "/usr/bin:/bin"}
    code = "import sys; from pathlib import Path; from agentrl.cli.project import init_project; init_project(Path(sys.argv[1]), 'my agent')"
    subprocess.run([sys.executable, "-c", code, str(target)], cwd=tmp_path, env=env, check=True, timeout=300)
    assert 'name = "my-agent"' in (target / "pyproject.toml").read_text()
    assert files_of(target / "sandboxes" / "tables") == files_of(ROOT / "sandboxes" / "tables")
    result = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=target, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_returned_list_contains_all_written_files(tmp_path: Path) -> None:
    written = init_project(tmp_path / "new", "new")
    assert written == sorted(path for path in (tmp_path / "new").rglob("*") if path.is_file())
    names = {path.relative_to(tmp_path / "new").as_posix() for path in written}
    assert {"README.md", "Makefile", "pyproject.toml", ".gitignore", "tests/test_tables.py", "recipes/quickstart.py"} <= names
    assert not any(name.endswith(".in") for name in names)


def test_the_content_imports_only_copied_modules(tmp_path: Path) -> None:
    written = {path.relative_to(tmp_path / "new").as_posix() for path in init_project(tmp_path / "new", "new")}
    missing = set()
    for name in (name for name in written if name.endswith(".py")):
        for node in ast.walk(ast.parse((tmp_path / "new" / name).read_text())):
            module = (node.module if isinstance(node, ast.ImportFrom) else None) or ""
            part = module.replace(".", "/")
            if part.startswith(("rewards/", "sandboxes/", "recipes/")) and not {f"{part}.py", f"{part}/__init__.py"} & written:
                missing.add(f"{name} imports {module}")
    assert not missing


def test_a_folder_that_is_not_empty_raises_and_stays_unchanged(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        init_project(tmp_path, "x")
    assert files_of(tmp_path) == {"mine.txt": b"mine"}
    with pytest.raises(UserError, match="is a file"):
        init_project(tmp_path / "mine.txt", "x")


def test_a_name_without_letters_raises_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a valid project name"):
        init_project(tmp_path / "new", "--")
    assert not (tmp_path / "new").exists()


def test_init_prints_the_next_commands(tmp_path: Path) -> None:
    for arguments, file in (([], "recipes/quickstart.py"), (["--empty"], "recipes/mine.py")):
        target = tmp_path / f"new one {len(arguments)}"
        result = CliRunner().invoke(app, ["init", str(target), *arguments])
        assert result.exit_code == 0, result.output
        first, *rest = result.output[result.output.index("next:") :].splitlines()[1:]
        assert first.strip() == f"cd '{target}'" and [line.strip() for line in rest][-2:] == [
            f"agentrl check {file}",
            f"agentrl train {file}",
        ]
        assert (target / file).is_file()


@pytest.mark.slow
def test_an_empty_project_is_complete_and_contains_nothing_of_the_quickstart(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    written = [path.relative_to(target).as_posix() for path in init_project(target, "mine", empty=True)]
    assert len(written) < 15 and not [name for name in written if "tables" in name or "quickstart" in name or name.endswith(".in")]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    result = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=target, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "3 passed" in result.stdout, result.stdout + result.stderr
    code = "from agentrl.cli.running import load_recipe; from pathlib import Path; print(load_recipe(Path('recipes/mine.py'), [])[1].name)"
    assert subprocess.run([sys.executable, "-c", code], cwd=target, env=env, capture_output=True, text=True, check=True).stdout == "mine\n"


@pytest.mark.bubblewrap
@pytest.mark.slow
def test_an_empty_project_passes_check(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    init_project(target, "mine", empty=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "agentrl", "check", "recipes/mine.py", "--count", "3", "--backend", "bubblewrap"]
    result = subprocess.run(command, cwd=target, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0 and "FAIL" not in result.stdout, result.stdout + result.stderr


def test_control_characters_of_a_folder_name_are_not_printed(tmp_path: Path) -> None:
    result = agentrl("init", str(tmp_path / "a\x1b[31m"), "--empty")
    assert result.returncode == 0 and "\x1b" not in result.stdout and f"{tmp_path}/a\ufffd[31m/pyproject.toml\n" in result.stdout
