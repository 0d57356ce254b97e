from __future__ import annotations

import base64
import hashlib
import sys
from pathlib import Path

import pytest

from agentrl.errors import UserError
from agentrl.model.source import find_source

RUNS = "raise SystemExit('the package was imported')\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def install(site: Path, name: str, files: dict[str, bytes], *, record: list[str] | None = None) -> None:
    """Installs a package into a folder as pip does; the lines of `record` replace those with the files' hashes."""
    info = site / f"{name}-1.0.dist-info"
    for path, content in {f"{name}/__init__.py": RUNS.encode(), **files}.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nLicense: Apache-2.0\n")
    lines = record if record is not None else [f"{path},{record_hash(content)},{len(content)}" for path, content in files.items()]
    (info / "RECORD").write_text("\n".join([f"{name}/__init__.py,,", *lines]) + "\n")


def record_hash(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def test_a_file_in_a_package_is_found_and_the_package_is_not_imported(site: Path) -> None:
    install(site, "brought", {"brought/small.gguf": b"GGUF", "brought-1.0.dist-info/LICENSE": b"do as you like"})
    for text in ("package:brought", "package:brought/small.gguf", "package:brought/brought/small.gguf"):
        source = find_source(text)
        assert (source.path, source.name, source.package) == (site / "brought" / "small.gguf", "brought/small.gguf", "brought 1.0")
        assert source.sha256 == {"small.gguf": hashlib.sha256(b"GGUF").hexdigest()}
        assert source.licence == "Apache-2.0" and [path.name for path in source.licences] == ["LICENSE"]
    assert "brought" not in sys.modules


@pytest.mark.slow
def test_a_package_is_found_by_its_modules_name(site: Path) -> None:
    install(site, "brought", {"inner_name/small.gguf": b"GGUF"})
    (site / "brought-1.0.dist-info" / "top_level.txt").write_text("inner_name\n")
    assert find_source("package:inner_name").package == "brought 1.0"


@pytest.mark.slow
def test_a_package_without_gguf_lists_its_files(site: Path) -> None:
    install(site, "plain", {"plain/notes.txt": b"x", "plain/part.bin": b"x"})
    with pytest.raises(UserError, match=r"contains no GGUF file; it contains plain/notes\.txt, plain/part\.bin"):
        find_source("package:plain")
    install(site, "two", {"two/a.gguf": b"GGUF", "two/b.gguf": b"GGUF"})
    with pytest.raises(
        UserError, match=r"more than one GGUF file; its GGUF files are two/a\.gguf, two/b\.gguf\n  fix: give package:two/FILE"
    ):
        find_source("package:two")
    with pytest.raises(UserError, match=r"no file 'c\.gguf'; its GGUF files are two/a\.gguf"):
        find_source("package:two/c.gguf")
    with pytest.raises(UserError, match="'absent' is not installed\n  fix: correct the name; if it is correct"):
        find_source("package:absent")
    with pytest.raises(UserError, match="is not installed"):
        find_source("package:")
    for name in ("shareda", "sharedb"):
        install(site, name, {"shared/a.gguf": b"GGUF"})
        (site / f"{name}-1.0.dist-info" / "top_level.txt").write_text("shared\n")
    with pytest.raises(UserError, match=r"'shared' is a module of 2 packages: shareda, sharedb\n  fix: .*package:shareda"):
        find_source("package:shared")


@pytest.mark.parametrize("text", ["../../outside.gguf", "/etc/passwd", "../outside.gguf", "two/../../outside.gguf"])
def test_a_path_that_leaves_the_package_is_not_found(site: Path, text: str) -> None:
    (site.parent / "outside.gguf").write_bytes(b"GGUF")
    install(site, "two", {"two/a.gguf": b"GGUF"})
    with pytest.raises(UserError, match="no file"):
        find_source(f"package:two/{text}")


def test_a_package_with_files_outside_its_folder_raises(site: Path) -> None:
    outside = site.parent / "outside.gguf"
    outside.write_bytes(b"GGUF")
    for number, path in enumerate(("../outside.gguf", str(outside))):
        install(site, f"sly{number}", {}, record=[f"{path},,"])
        with pytest.raises(UserError, match="has a file outside its folder"):
            find_source(f"package:sly{number}")
    install(site, "linked", {}, record=["linked/link.gguf,,"])
    (site / "linked" / "link.gguf").symlink_to(outside)
    with pytest.raises(UserError, match="has a file outside its folder"):
        find_source("package:linked")


def test_a_changed_installed_file_raises(site: Path) -> None:
    install(site, "brought", {"brought/small.gguf": b"GGUF"})
    (site / "brought" / "small.gguf").write_bytes(b"GGUF, but others")
    with pytest.raises(UserError, match="is not the file that 'brought' installed"):
        find_source("package:brought")


def test_pickled_weights_raise(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(UserError, match="contains pickled weights, and loading them can run arbitrary code"):
            find_source(str(path))


def test_invalid_sources_raise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a model: it has no config\.json"):
        find_source(str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"give the file: .*m\.gguf"):
        find_source(str(tmp_path))
    (tmp_path / "m.zip").write_bytes(b"PK")
    with pytest.raises(UserError, match="is not a GGUF file"):
        find_source(str(tmp_path / "m.zip"))
    for absent in ("Qwen/Qwen3-0.6B", "./absent.gguf", "a\0b", "x" * 5000):
        with pytest.raises(UserError, match="download a model from a hub first"):
            find_source(absent)


def test_a_folders_files_and_licence_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    (tmp_path / "LICENSE.txt").write_text("do as you like")
    (tmp_path / "README.md").write_text("---\nlicense: mit\ntags: [a]\n---\n# A model\n\nlicense: other\n")
    source = find_source(str(tmp_path))
    assert set(source.sha256) == {"config.json", "model.safetensors", "LICENSE.txt"}
    assert source.licence == "mit" and [path.name for path in source.licences] == ["LICENSE.txt"]
    (tmp_path / "README.md").write_text("license: mit\n")
    assert find_source(str(tmp_path)).licence == ""


def test_a_licence_that_links_elsewhere_is_not_copied(tmp_path: Path) -> None:
    """A user who shares the imported folder would share that file. The hub's cache links every file, but to its own files."""
    folder = tmp_path / "cache" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (tmp_path / "id_rsa").write_text("secret")
    (tmp_path / "cache" / "blobs").mkdir()
    (tmp_path / "cache" / "blobs" / "1").write_text("do as you like")
    (folder / "LICENSE").symlink_to(tmp_path / "id_rsa")
    (folder / "NOTICE").symlink_to("../../blobs/1")
    assert [path.name for path in find_source(str(folder)).licences] == ["NOTICE"]
